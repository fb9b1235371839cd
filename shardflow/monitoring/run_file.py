"""Which lines of ``metrics.jsonl`` count: a later start did again what stands behind its own beginning.

A file is read twice: once for the lines of starts, which say what they do again, and once for all else. So
nothing of a run is held in memory, however long it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardflow.monitoring.lines import MetricsLine, open_metrics, parse_line, split_lines
from shardflow.telemetry import Interval

__all__ = ["RunFile", "Starts"]

_KIND: Final = re.compile(rb'"event":\s*"(\w+)"')
_GLOBAL_STEP: Final = re.compile(rb'"global_step":\s*(\d{1,18})\b')
_NEVER: Final = 1 << 62
_BY_NUMBER: Final = ("step", "interval", "verdict", "tune")
"""Events that are named by the number of a step."""

_BY_STEPS_DONE: Final = ("checkpoint", "evaluation")
"""Events that are named by the number of steps done before them."""

_OF_A_START: Final = ("plan", "end")
"""Events that are about a start, and no step."""


@dataclass(frozen=True, slots=True)
class Starts:
    """The starts of a run, in their order."""

    steps: tuple[int, ...]
    """Global step at which each begins."""
    _redone_from: tuple[int, ...] = ()
    """By start, the first step that a later one does again."""

    @classmethod
    def of(cls, steps: tuple[int, ...]) -> Starts:
        """Make it of the global steps at which starts begin."""
        redone_from, lowest = [], _NEVER
        for step in reversed(steps):
            redone_from.append(lowest)
            lowest = min(lowest, step)
        return cls(steps, tuple(reversed(redone_from)))

    def counts(self, event: str, number: int, start: int) -> bool:
        """Whether a line counts.

        Args:
            event: Its event.
            number: Its global step.
            start: Number of the start that wrote it, from 0.
        """
        last = self._redone_from[start]
        return number < last if event in _BY_NUMBER else number <= last


class RunFile:
    """The measurements of a run folder.

    Args:
        run: The run folder.

    Attributes:
        starts: Its starts.
        num_steps: One more than the largest global step that was measured; 0 without steps.
        num_intervals: Lines of intervals, damaged ones too.
        has_verdicts: Whether there are lines of verdicts.
        num_damaged: Lines that `lines` left out when it was read last.

    Raises:
        ConfigError: It holds no metrics.
        StorageError: They cannot be read.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        steps: list[int] = []
        self.num_steps = self.num_intervals = self.num_damaged = 0
        self.has_verdicts = False
        # A run that goes on may grow between the two readings; what is new belongs to the next look.
        self._num_bytes = 0
        with open_metrics(run) as file:
            for line, num_bytes in split_lines(file):
                self._num_bytes += num_bytes
                if line is None:
                    continue
                kind = found[1] if (found := _KIND.search(line, 0, 64)) else b""
                if kind == b"step" and (number := _GLOBAL_STEP.search(line)):
                    num_steps = int(number[1]) + 1
                    # Only what leaps ahead is looked at closely: a damaged line must not stretch the run.
                    if num_steps <= self.num_steps + 1 or parse_line(line) is not None:
                        self.num_steps = max(self.num_steps, num_steps)
                elif kind == b"attempt" and (start := parse_line(line)) is not None:
                    steps.append(start.values["start"])
                self.num_intervals += kind == b"interval"
                self.has_verdicts |= kind == b"verdict" and parse_line(line) is not None
        self.starts = Starts.of(tuple(steps))

    def intervals(self) -> Iterator[Interval]:
        """Read the intervals that count, in order."""
        for line, counts in self.lines():
            if counts and isinstance(line.record, Interval):
                yield line.record

    def lines(self) -> Iterator[tuple[MetricsLine, bool]]:
        """Read all lines since the first start, in order, and whether they count; those about a start do.

        Lines of unknown events are left out, and damaged ones, which are counted.
        """
        start, left, self.num_damaged = -1, self._num_bytes, 0
        with open_metrics(self._run) as file:
            for raw, num_bytes in split_lines(file):
                left -= num_bytes
                if left < 0:
                    return
                line = None if raw is None else parse_line(raw)
                if line is None:
                    self.num_damaged += raw != b""
                elif line.event == "attempt":
                    start += 1
                    yield line, True
                elif start >= 0 and line.event in _OF_A_START:
                    yield line, True
                elif start >= 0 and (line.event in _BY_NUMBER or line.event in _BY_STEPS_DONE):
                    step = line.record.global_step if line.record is not None else line.values["global_step"]
                    yield line, self.starts.counts(line.event, step, start)
