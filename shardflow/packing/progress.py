"""How a job tells where it is; who shows it, and how, is the caller's business."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Hears of a job's phases; called from the job's own thread, and never with anything of an input.

    Phases come in this order: ``headers``, ``reports``, ``studies``, ``samples``, ``ledger``, ``page``,
    ``manifest``, ``done``. Exceptions pass through the job, which stays resumable.
    """

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of ``total`` units (files, reports, studies); 0 where it has none."""

    def advance(self, count: int = 1) -> None:
        """Finish ``count`` units of the phase."""

    def note(self, text: str) -> None:
        """Say something worth a line."""


class SilentProgress:
    """Shows nothing."""

    def phase(self, name: str, total: int) -> None:
        """Begin a phase."""

    def advance(self, count: int = 1) -> None:
        """Finish units."""

    def note(self, text: str) -> None:
        """Say something."""
