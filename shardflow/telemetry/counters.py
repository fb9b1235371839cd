"""Counters that many threads add to and one thread reads.

A stage is a name such as ``"read"`` or ``"decode"``. Its totals only grow, so that a reader may take the
difference of two snapshots; a gauge (queue depth, buffered bytes) keeps what was last seen and the extremes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["StageCounters", "StageTimer", "StageTotals"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTotals:
    """What a stage did since its counters were made.

    Seconds are summed over threads: two threads that decode for one second make two.
    """

    seconds: float = 0.0
    num_bytes: int = 0
    num_items: int = 0


class StageCounters:
    """Thread-safe totals per stage and gauges.

    Example:
        >>> counters = StageCounters()
        >>> counters.add("read", 0.5, num_bytes=100, num_items=2)
        >>> counters.totals("read")
        StageTotals(seconds=0.5, num_bytes=100, num_items=2)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[str, list[float]] = {}
        self._gauges: dict[str, list[float]] = {}

    def add(self, stage: str, seconds: float = 0.0, num_bytes: int = 0, num_items: int = 0) -> None:
        """Add to a stage's totals; a new name makes a new stage."""
        with self._lock:
            totals = self._stages.get(stage)
            if totals is None:
                totals = self._stages[stage] = [0.0, 0, 0]
            totals[0] += seconds
            totals[1] += num_bytes
            totals[2] += num_items

    def timed(self, stage: str, num_bytes: int = 0, num_items: int = 1) -> StageTimer:
        """Return a context manager that adds the time of its block, also when the block raises."""
        return StageTimer(self, stage, num_bytes, num_items)

    def observe(self, gauge: str, value: float) -> None:
        """Record the present value of something that goes up and down."""
        with self._lock:
            seen = self._gauges.get(gauge)
            if seen is None:
                self._gauges[gauge] = [value, value, value, value, 1]
                return
            seen[0] = value
            seen[1] = min(seen[1], value)
            seen[2] = max(seen[2], value)
            seen[3] += value
            seen[4] += 1

    def totals(self, stage: str) -> StageTotals:
        """Return a stage's totals; zeros for a stage that never ran."""
        with self._lock:
            seconds, num_bytes, num_items = self._stages.get(stage, (0.0, 0, 0))
        return StageTotals(seconds=seconds, num_bytes=int(num_bytes), num_items=int(num_items))

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return all totals and gauges at one instant, ready for JSON.

        Returns:
            Per stage ``{"seconds", "num_bytes", "num_items"}``; per gauge ``{"last", "least", "most",
            "mean"}``.
        """
        with self._lock:
            stages = {
                name: {"seconds": totals[0], "num_bytes": int(totals[1]), "num_items": int(totals[2])}
                for name, totals in self._stages.items()
            }
            gauges = {
                name: {"last": seen[0], "least": seen[1], "most": seen[2], "mean": seen[3] / seen[4]}
                for name, seen in self._gauges.items()
            }
        return {**stages, **gauges}


class StageTimer:
    """The time of a ``with`` block, added to a stage when the block ends."""

    __slots__ = ("_counters", "_num_bytes", "_num_items", "_stage", "_start")

    def __init__(self, counters: StageCounters, stage: str, num_bytes: int, num_items: int) -> None:
        self._counters = counters
        self._stage = stage
        self._num_bytes = num_bytes
        self._num_items = num_items
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._counters.add(self._stage, time.perf_counter() - self._start, self._num_bytes, self._num_items)
