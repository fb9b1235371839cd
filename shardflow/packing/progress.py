"""Progress of a job, reported to the caller, who decides how to show it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receiver of a job's phases, called from the job's own thread and never with anything from an input.

    Phases come in this order: ``archive`` (if there is one), ``headers``, ``reports``, ``studies``,
    ``samples``, ``ledger``, ``page``, ``facts``, ``manifest``, ``done``. Exceptions pass through the job,
    which stays resumable.
    """

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of ``total`` units (files, reports, studies, shards); 0 where it has none."""

    def advance(self, count: int = 1) -> None:
        """Finish ``count`` units of the phase."""

    def note(self, text: str) -> None:
        """Report a line of text."""


class SilentProgress:
    """Progress that is not shown."""

    def phase(self, name: str, total: int) -> None:
        """Begin a phase."""

    def advance(self, count: int = 1) -> None:
        """Finish units."""

    def note(self, text: str) -> None:
        """Report a line of text."""
