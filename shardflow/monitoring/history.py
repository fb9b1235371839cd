"""History of a run: its settings, and the records of its ``metrics.jsonl``.

Each step is kept once, as its latest start measured it; what a later start repeated is dropped, as in
`shardflow.training.metrics.read_metrics`. `RunFile` reads a file twice, first for the lines of starts, which
determine what is repeated, so that memory does not grow with the run. Invariant: following a file gives the
same records as reading it again from the start.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardflow.monitoring.lines import MetricsLine, MetricsTail, open_metrics, parse_line, split_lines
from shardflow.telemetry import Interval, Move, Verdict

CONFIG_FILE: Final = "resolved_config.toml"
"""In a run folder."""


def read_settings(run: Path) -> dict[str, object]:
    """Return the settings of a run by dotted name; an empty dict if its folder holds no readable ones."""
    try:
        tables = tomllib.loads((run / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(_flat(tables, ""))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


_KIND: Final = re.compile(rb'"event":\s*"(\w+)"')
_GLOBAL_STEP: Final = re.compile(rb'"global_step":\s*(\d{1,18})\b')
_NEVER: Final = 1 << 62
_BY_NUMBER: Final = ("step", "interval", "verdict", "tune")
"""Events whose ``global_step`` is the number of a step."""
_BY_STEPS_DONE: Final = ("checkpoint", "evaluation")
"""Events whose ``global_step`` is the number of steps done before them."""
_OF_A_START: Final = ("plan", "end")
"""Events that describe a start rather than a step."""


@dataclass(frozen=True, slots=True)
class Starts:
    """The starts of a run, in their order."""

    steps: tuple[int, ...]
    """Global step at which each begins."""
    _redone_from: tuple[int, ...] = ()
    """By start, the first step that a later one repeats."""

    @classmethod
    def of(cls, steps: tuple[int, ...]) -> Starts:
        """Derive which steps each start repeats from the global steps at which starts begin."""
        redone_from, lowest = [], _NEVER
        for step in reversed(steps):
            redone_from.append(lowest)
            lowest = min(lowest, step)
        return cls(steps, tuple(reversed(redone_from)))

    def counts(self, event: str, number: int, start: int) -> bool:
        """Return whether a line counts: no later start repeats it.

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
        # A running run may grow between the two reads; what is new belongs to the next one.
        self._num_bytes = 0
        with open_metrics(run) as file:
            for line, num_bytes in split_lines(file):
                self._num_bytes += num_bytes
                if line is None:
                    continue
                kind = found[1] if (found := _KIND.search(line, 0, 64)) else b""
                if kind == b"step" and (number := _GLOBAL_STEP.search(line)):
                    num_steps = int(number[1]) + 1
                    # Validate only what leaps ahead, so that no damaged line lengthens the run.
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


class RunHistory:
    """Measurements of a run so far.

    Args:
        run: The run folder.
        keep: How many records of each kind are held, the newest ones; 0 for all. A restart that goes back
            further than that leaves fewer.
        on_line: Called with each line before it is added here, in the order of the file.

    Attributes:
        steps: Lines of steps, as `StepMetrics` has them, with ``time_s``.
        intervals: With the time of each, seconds since 1970.
        verdicts: The same of verdicts.
        moves: The same of moves of the tuner.
        checkpoints: Lines of checkpoints.
        evaluations: Lines of evaluations.
        attempts: Lines of starts.
        end: The line of the newest start's end, ``outcome`` in it; None while it runs, or if it was killed.
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
        self._held: dict[str, list[Any]] = {
            "step": self.steps,
            "interval": self.intervals,
            "verdict": self.verdicts,
            "tune": self.moves,
            "checkpoint": self.checkpoints,
            "evaluation": self.evaluations,
            "attempt": self.attempts,
        }
        self._tail = MetricsTail(run)
        self._keep = keep
        self._on_line = on_line

    def follow(self) -> bool:
        """Read what was written since the last call; return whether there was anything.

        An incomplete last line waits for the next call; damaged ones are left out.

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
        """Whether a new run was begun in the folder, see `MetricsTail.is_of_another_run`."""
        return self._tail.is_of_another_run()

    def _add(self, line: MetricsLine) -> None:
        self.last_event_s = max(self.last_event_s, line.time_s)
        if line.event == "attempt":
            self._go_back_to(line.values["start"])
            self.end = None
        elif line.event == "plan":
            self.num_planned_steps = line.values["num_steps"]
        elif line.event == "end":
            self.end = dict(line.values)
        held = self._held.get(line.event)
        if held is None:
            return
        held.append(line.values if line.record is None else (line.time_s, line.record))
        # Rarely, so that a step costs no copy of all others; the same lines leave the same ones held.
        if self._keep and len(held) >= 2 * self._keep:
            del held[: -self._keep]

    def _go_back_to(self, start: int) -> None:
        """Forget what a start at this global step repeats."""
        self.steps[:] = [line for line in self.steps if line["global_step"] < start]
        for event in _BY_STEPS_DONE:
            self._held[event][:] = [line for line in self._held[event] if line["global_step"] <= start]
        for event in ("interval", "verdict", "tune"):
            self._held[event][:] = [one for one in self._held[event] if one[1].global_step < start]


def read_history(run: Path) -> RunHistory:
    """Read a run folder.

    Raises:
        ConfigError: It holds no metrics.
        StorageError: They cannot be read.
    """
    history = RunHistory(run)
    history.follow()
    return history
