"""Which lines of ``metrics.jsonl`` count: a later start did again what stands behind its own beginning.

A file is read twice: once for the lines of starts, which say what they do again, and once for all else. So
nothing of a run is held in memory, however long it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardflow.errors import ConfigError
from shardflow.monitoring.tail import METRICS_FILE

__all__ = ["RunFile", "Starts"]

_KIND: Final = re.compile(rb'"event":\s*"(\w+)"')
_GLOBAL_STEP: Final = re.compile(rb'"global_step":\s*(\d+)')
_NEVER: Final = 1 << 62
_BY_NUMBER: Final = ("step", "interval", "verdict", "tune")
"""Events that are named by the number of a step; all else by the number of steps done before it."""

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
        num_intervals: Lines of intervals.
        num_verdicts: Lines of verdicts.

    Raises:
        ConfigError: It holds no metrics.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / METRICS_FILE
        steps: list[int] = []
        self.num_steps = self.num_intervals = self.num_verdicts = 0
        # A run that goes on may grow between the two readings; what is new belongs to the next look.
        self._num_bytes = 0
        try:
            file = self._path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"RUN must be the folder of a training run, which holds {METRICS_FILE}, got another one; "
                "correct it."
            ) from None
        with file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._num_bytes += len(line)
                kind = found[1] if (found := _KIND.search(line, 0, 64)) else b""
                if kind == b"step" and (number := _GLOBAL_STEP.search(line)):
                    self.num_steps = max(self.num_steps, int(number[1]) + 1)
                elif kind == b"attempt" and (record := _record(line)) is not None:
                    steps.append(int(record["start"]))
                self.num_intervals += kind == b"interval"
                self.num_verdicts += kind == b"verdict"
        self.starts = Starts.of(tuple(steps))

    def events(self) -> Iterator[tuple[Mapping[str, Any], bool]]:
        """Read all lines since the first start, in order, and whether they count; those about a start do.

        Lines without a time or a step, and those that a kill left unfinished, are left out.
        """
        start, left = -1, self._num_bytes
        with self._path.open("rb") as file:
            for line in file:
                left -= len(line)
                if left < 0:
                    return
                record = _record(line)
                if record is None:
                    continue
                if record["event"] == "attempt":
                    start += 1
                    yield record, True
                elif start >= 0 and record["event"] in _OF_A_START:
                    yield record, True
                elif start >= 0 and "global_step" in record:
                    yield record, self.starts.counts(record["event"], int(record["global_step"]), start)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "event" in record and "time_s" in record else None
