"""Steps and intervals in bounded memory: a fixed number of stretches of a run, each with what it held.

Downsampling is honest: of each stretch of steps the least, the median and the most are kept beside the
mean, so that one slow step in ten thousand is still on the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from shardflow.telemetry import Interval

__all__ = ["MOST_POINTS", "MOST_RANKS", "MOST_STRETCHES", "RankSums", "StepColumns", "Stretch", "Stretches"]

MOST_POINTS: Final = 1200
"""Stretches of steps: more than a page is wide."""
MOST_STRETCHES: Final = 400
"""Stretches of intervals, which hold much more."""
MOST_RANKS: Final = 64
"""Ranks of a stretch."""

_ENVELOPES: Final = ("step_s", "data_wait_s", "loss", "gradient_norm")


class StepColumns:
    """Steps in their order, as columns of at most `MOST_POINTS` rows.

    Args:
        num_steps: Of the run.

    Attributes:
        steps_per_row: Global steps of a row.
        columns: ``first`` and ``last`` (global steps), ``time_s`` (of the last, since the run began),
            ``num_steps`` (measured ones), of step_s, data_wait_s, loss and gradient_norm ``_least``,
            ``_median``, ``_most`` and ``_mean``; ``learning_rate`` of the last step; ``samples_per_s`` and
            ``tokens_per_s``. None where no step of the row has a number.
    """

    def __init__(self, num_steps: int) -> None:
        self.steps_per_row = max(1, math.ceil(num_steps / MOST_POINTS))
        self.columns: dict[str, list[float | None]] = {
            name: []
            for name in (
                *("first", "last", "time_s", "num_steps", "learning_rate", "samples_per_s", "tokens_per_s"),
                *(f"{name}_{what}" for name in _ENVELOPES for what in ("least", "median", "most", "mean")),
            )
        }
        self._rows: list[tuple[Mapping[str, Any], float]] = []
        self._place = -1

    def add(self, step: Mapping[str, Any], time_s: float) -> None:
        """Add the line of a step, later than those before it."""
        place = int(step["global_step"]) // self.steps_per_row
        if place != self._place:
            self.finish()
            self._place = place
        self._rows.append((step, time_s))

    def finish(self) -> None:
        """Close the row that is open."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        last, time_s = rows[-1]
        put = self._put
        put("first", float(rows[0][0]["global_step"]))
        put("last", float(last["global_step"]))
        put("time_s", time_s)
        put("num_steps", float(len(rows)))
        put("learning_rate", number(last.get("learning_rate")))
        seconds = math.fsum(number(step.get("step_s")) or 0.0 for step, _ in rows)
        for name, key in (("samples_per_s", "num_samples"), ("tokens_per_s", "num_tokens")):
            total = math.fsum(number(step.get(key)) or 0.0 for step, _ in rows)
            put(name, total / seconds if seconds else None)
        for name in _ENVELOPES:
            values = [value for step, _ in rows if (value := number(step.get(name))) is not None]
            put(f"{name}_least", min(values, default=None))
            put(f"{name}_median", median(values) if values else None)
            put(f"{name}_most", max(values, default=None))
            put(f"{name}_mean", math.fsum(values) / len(values) if values else None)

    def _put(self, name: str, value: float | None) -> None:
        self.columns[name].append(value)


@dataclass(slots=True)
class RankSums:
    """A rank in a stretch; seconds are sums, bytes the most."""

    host: str = ""
    data_wait_s: float = 0.0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    step_s: float = 0.0
    """Of the steps in which it was measured."""
    pss_bytes: int = 0
    pinned_bytes: int = 0
    device_bytes: int = 0
    cache_ram_bytes: int = 0
    cache_disk_bytes: int = 0


@dataclass(slots=True)
class Stretch:
    """Consecutive intervals together."""

    first: int
    """First global step."""
    began_s: float
    """Since the run began."""
    last: int = 0
    ended_s: float = 0.0
    num_steps: int = 0
    wall_s: float = 0.0
    step_s: float = 0.0
    rank_wall_s: float = 0.0
    """Wall time summed over ranks."""
    rank_step_s: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    """Of a stage, summed over ranks and threads."""
    stage_bytes: dict[str, int] = field(default_factory=dict)
    gauges: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Mean times steps, least, most."""
    ranks: dict[int, RankSums] = field(default_factory=dict)
    available_bytes: int = 0
    """Least."""

    def share(self, stage: str) -> float:
        """Part of the ranks' wall time that a stage of the loop took, 0 to 1."""
        return self.stage_s.get(stage, 0.0) / self.rank_wall_s if self.rank_wall_s else 0.0


class Stretches:
    """Intervals in their order, in at most `MOST_STRETCHES` stretches, and one more.

    Args:
        num_steps: Of the run.
    """

    def __init__(self, num_steps: int) -> None:
        self.rows: list[Stretch] = []
        self._steps_per_row = max(1, math.ceil(num_steps / MOST_STRETCHES))
        self._place = -1

    def add(self, interval: Interval, time_s: float) -> None:
        """Add an interval that ended so many seconds after the run began."""
        place = interval.global_step // self._steps_per_row
        if place != self._place:
            self._trim()
            self._place = place
            first = interval.global_step - interval.num_steps + 1
            self.rows.append(Stretch(first=max(0, first), began_s=max(0.0, time_s - interval.wall_s)))
        _add_interval(self.rows[-1], interval, time_s)

    def _trim(self) -> None:
        """Of many ranks keep the slowest, as an interval does; which these are changes over a stretch."""
        if self.rows and len(self.rows[-1].ranks) > MOST_RANKS:
            ranks = self.rows[-1].ranks
            slowest = sorted(ranks, key=lambda rank: -(ranks[rank].compute_s + ranks[rank].data_wait_s))
            self.rows[-1].ranks = {rank: ranks[rank] for rank in sorted(slowest[:MOST_RANKS])}

    def finish(self) -> list[Stretch]:
        """Return all stretches."""
        self._trim()
        return self.rows


def _add_interval(row: Stretch, interval: Interval, time_s: float) -> None:
    row.last, row.ended_s = interval.global_step, time_s
    row.num_steps += interval.num_steps
    row.wall_s += interval.wall_s
    row.step_s += interval.step_s
    row.rank_wall_s += interval.wall_s * interval.world_size
    row.rank_step_s += interval.step_s * interval.world_size
    if interval.available_bytes:
        row.available_bytes = min(row.available_bytes or interval.available_bytes, interval.available_bytes)
    for name, stage in interval.stages.items():
        row.stage_s[name] = row.stage_s.get(name, 0.0) + stage.seconds
        row.stage_bytes[name] = row.stage_bytes.get(name, 0) + stage.num_bytes
    for name, gauge in interval.gauges.items():
        total, least, most = row.gauges.get(name, (0.0, math.inf, -math.inf))
        mean = total + gauge.mean * interval.num_steps
        row.gauges[name] = (mean, min(least, gauge.least), max(most, gauge.most))
    for rank in interval.ranks:
        sums = row.ranks.setdefault(rank.rank, RankSums())
        sums.host = rank.host
        sums.step_s += interval.step_s
        sums.data_wait_s += rank.data_wait_s
        sums.compute_s += rank.compute_s
        sums.exchange_s += rank.exchange_s
        for name in ("pss_bytes", "pinned_bytes", "device_bytes", "cache_ram_bytes", "cache_disk_bytes"):
            setattr(sums, name, max(getattr(sums, name), getattr(rank, name)))


def number(value: object) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing."""
    return math.fsum(values) / len(values) if values else None
