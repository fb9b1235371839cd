"""Progress of a job, reported to the caller, who decides how to show it."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Final, Protocol

# A task is late once it takes this many times the average of those before it, and this long.
_LATE: Final = 4.0
_LATE_S: Final = 10.0


class Progress(Protocol):
    """Receiver of a job's phases, called from the job's own thread and never with anything from an input.

    Phases come in this order: ``archive`` (if there is one), ``headers``, ``reports``, ``studies``,
    ``samples``, ``ledger``, ``page``, ``facts``, ``manifest``, ``done``. Exceptions pass through the job,
    which stays resumable.
    """

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of ``total`` units (files, reports, studies, shards); 0 where it has none."""

    def advance(self, count: int = 1, *, has_late: bool = False) -> None:
        """Finish ``count`` units of the phase.

        Args:
            count: How many.
            has_late: Whether others take much longer than these, or have to be tried again one by one: the
                rest may then take longer than the pace says, up to a deadline for each file.
        """

    def note(self, text: str) -> None:
        """Report a line of text."""


class SilentProgress:
    """Progress that is not shown."""

    def phase(self, name: str, total: int) -> None:
        """Begin a phase."""

    def advance(self, count: int = 1, *, has_late: bool = False) -> None:
        """Finish units."""

    def note(self, text: str) -> None:
        """Report a line of text."""


class RunningTasks:
    """Tasks that run, to tell whether one of them is late, such as one that waits for a file that hangs."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}
        self._num_done = 0
        self._taken_s = 0.0

    def begin(self, task: Hashable) -> None:
        """Note that a task begins, or waits for a process that starts."""
        self._since[task] = time.monotonic()

    def end(self, task: Hashable) -> None:
        """Note the end of a task."""
        self._taken_s += time.monotonic() - self._since.pop(task)
        self._num_done += 1

    @property
    def has_late(self) -> bool:
        """Whether a task takes much longer than those that have ended."""
        if not (self._since and self._num_done):
            return False
        usual_s = self._taken_s / self._num_done
        return time.monotonic() - min(self._since.values()) > max(_LATE_S, _LATE * usual_s)
