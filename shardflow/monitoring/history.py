"""A run's ``metrics.jsonl`` as records: of one that has ended, or of one that goes on.

Each step is held once, as its latest start measured it; what a later start did again is dropped, as
``shardflow.training.metrics.read_metrics`` does. Invariant: reading on gives the same as reading anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardflow.monitoring.lines import MetricsLine
from shardflow.monitoring.tail import EventTail
from shardflow.telemetry import Interval, Move, Verdict

__all__ = ["RunHistory", "read_history"]


class RunHistory:
    """What a run has measured so far.

    Args:
        run: The run folder.
        keep: How many records of each kind are held, the newest ones; 0 for all. A restart that goes back
            further than that leaves fewer.
        on_line: Called with each line before it is added here, in the order of the file.

    Attributes:
        steps: Lines of steps, as `StepMetrics` has them, with ``time_s``.
        intervals: With the time of each, seconds since 1970.
        verdicts: The same of verdicts.
        moves: The same of what the tuner did.
        checkpoints: Lines of checkpoints.
        evaluations: Lines of evaluations.
        attempts: Lines of starts.
        end: The line of the newest start's end, ``outcome`` in it; None while it goes on, or was killed.
        num_planned_steps: Of the whole run; 0 while it is not known.
        last_event_s: When the newest line was written, seconds since 1970; 0 before the first.
    """

    def __init__(
        self, run: Path, *, keep: int = 0, on_line: Callable[[MetricsLine], None] | None = None
    ) -> None:
        self.steps: list[dict[str, Any]] = []
        self.intervals: list[tuple[float, Interval]] = []
        self.verdicts: list[tuple[float, Verdict]] = []
        self.moves: list[tuple[float, Move]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.attempts: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None
        self.num_planned_steps = 0
        self.last_event_s = 0.0
        self._tail = EventTail(run)
        self._keep = keep
        self._on_line = on_line

    def follow(self) -> bool:
        """Read what was written since the last call; True if there was anything.

        A line that is not written whole yet waits for the next call; damaged ones are left out.

        Raises:
            ConfigError: The folder holds no metrics.
            StorageError: They cannot be read.
        """
        has_read = False
        for line in self._tail.read():
            has_read = True
            if self._on_line is not None:
                self._on_line(line)
            self._add(line)
        return has_read

    @property
    def num_damaged(self) -> int:
        """Lines that were left out so far."""
        return self._tail.num_damaged

    @property
    def is_of_another_run(self) -> bool:
        """Whether a new run was begun in the folder, see `EventTail.is_of_another_run`."""
        return self._tail.is_of_another_run()

    def _add(self, line: MetricsLine) -> None:
        self.last_event_s = max(self.last_event_s, line.time_s)
        match line.record:
            case Interval():
                self._keep_newest(self.intervals, (line.time_s, line.record))
            case Verdict():
                self._keep_newest(self.verdicts, (line.time_s, line.record))
            case Move():
                self._keep_newest(self.moves, (line.time_s, line.record))
        match line.event:
            case "attempt":
                self._go_back_to(line.values["start"])
                self._keep_newest(self.attempts, line.values)
                self.end = None
            case "plan":
                self.num_planned_steps = line.values["num_steps"]
            case "end":
                self.end = dict(line.values)
            case "step":
                self._keep_newest(self.steps, line.values)
            case "checkpoint":
                self._keep_newest(self.checkpoints, line.values)
            case "evaluation":
                self._keep_newest(self.evaluations, line.values)

    def _keep_newest(self, held: list[Any], new: object) -> None:
        held.append(new)
        # Rarely, so that a step costs no copy of all others; after the same lines the same are held, however
        # they came.
        if self._keep and len(held) >= 2 * self._keep:
            del held[: -self._keep]

    def _go_back_to(self, start: int) -> None:
        """Forget what a start at this global step does again."""
        # A step is named by its number, all else that is a line by the number of steps done before it.
        self.steps = [line for line in self.steps if line["global_step"] < start]
        for lines in (self.checkpoints, self.evaluations):
            lines[:] = [line for line in lines if line["global_step"] <= start]
        records: list[list[tuple[float, Any]]] = [self.intervals, self.verdicts, self.moves]
        for held in records:
            held[:] = [one for one in held if one[1].global_step < start]


def read_history(run: Path) -> RunHistory:
    """Read a run folder.

    Raises:
        ConfigError: It holds no metrics.
        StorageError: They cannot be read.
    """
    history = RunHistory(run)
    history.follow()
    return history
