"""One rank's numbers of an interval as a row, and the interval that the rows of all ranks make.

A row is a list of floats in a fixed order, so that ranks exchange it in one small gather, whatever ran where.
Owns that order. Who gathers (a process group, or nobody in a run of one process) is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from shardflow.telemetry.counters import StageCounters
from shardflow.telemetry.intervals import GaugeNumbers, Interval, RankNumbers, StageNumbers
from shardflow.telemetry.machine import machine_bytes, num_processors
from shardflow.telemetry.probe import ProcessProbe
from shardflow.telemetry.stages import STAGES

__all__ = ["GAUGES", "RankMeasures", "interval_of"]

GAUGES: Final = (
    "ready_batches",
    "ahead_batches",
    "buffered_bytes",
    "fetching_bytes",
    "pinned_regions",
    "threads_busy",
)
"""What goes up and down, see `Interval.gauges`."""
_STAGES: Final = tuple(STAGES)
_MEMORY: Final = ("pinned_bytes", "device_bytes", "cache_ram_bytes", "cache_disk_bytes")
_EVENTS: Final = (
    "cache_fault",
    "cache_poisoned",
    "cache_unsound",
    "cache_ram_evicted",
    "cache_disk_evicted",
)
_PROCESS: Final = ("cpu_s", "runnable_s", "gil_wait_share", "pss_bytes", "available_bytes")
_FACTS: Final = (*_PROCESS, *_MEMORY, "cache_free_bytes", "num_masked", *_EVENTS)
_FIRST_GAUGE: Final = 3 * len(_STAGES)
_FIRST_FACT: Final = _FIRST_GAUGE + 4 * len(GAUGES)
_MOST_RANKS: Final = 64
_DIGITS: Final = 6
"""Of seconds and shares in a line: microseconds are enough, and many ranks make long lines."""


class RankMeasures:
    """Collects a rank's row of each interval.

    Args:
        counters: What its loader and its loop count.
        children: Process ids of loader processes.
        every_s: Length of an interval, about.
        memory: Bytes by name, of those that `RankNumbers` has (``pinned_bytes``, ``device_bytes``,
            ``cache_ram_bytes``, ``cache_disk_bytes``), and ``cache_free_bytes``.
        num_masked: How many slots were masked so far.
    """

    def __init__(
        self,
        counters: StageCounters,
        *,
        children: Callable[[], Sequence[int]] | None = None,
        every_s: float = 5.0,
        memory: Callable[[], Mapping[str, int]] | None = None,
        num_masked: Callable[[], int] | None = None,
    ) -> None:
        self._window = counters.window()
        self._count_masked = num_masked or (lambda: 0)
        self._num_masked = self._count_masked()
        self._memory = memory or dict
        self._probe = ProcessProbe(children, every_s=every_s)

    def take(self) -> list[float]:
        """Return the row of what happened since the last call, see `interval_of`."""
        stages, gauges = self._window.take()
        facts, memory = self._probe.take(), self._memory()
        row: list[float] = []
        for name in _STAGES:
            done = stages.get(name)
            row += (0.0, 0.0, 0.0) if done is None else (done.seconds, done.num_bytes, done.num_items)
        for name in GAUGES:
            seen = gauges.get(name)
            row += (0.0,) * 4 if seen is None else (seen.weighted, seen.weight, seen.least, seen.most)
        row += [float(getattr(facts, name)) for name in _PROCESS]
        row += [float(memory.get(name, 0)) for name in _MEMORY]
        masked_before, self._num_masked = self._num_masked, self._count_masked()
        row += (memory.get("cache_free_bytes", -1), self._num_masked - masked_before)
        row += [float(stages[name].num_items) if name in stages else 0.0 for name in _EVENTS]
        return row

    def close(self) -> None:
        """End the thread that watches the process."""
        self._probe.close()


def interval_of(rows: Sequence[Sequence[float]], *, hosts: Sequence[str], **fields: Any) -> Interval:
    """Make an interval of the rows of all ranks.

    Args:
        rows: By rank.
        hosts: Name of each rank's machine.
        fields: Further fields of `Interval`: steps, sums, settings.
    """
    ranks = [_rank_numbers(rank, row, hosts[rank]) for rank, row in enumerate(rows)]
    if len(ranks) > _MOST_RANKS:
        busiest = sorted(ranks, key=lambda one: one.compute_s + one.data_wait_s)[-_MOST_RANKS:]
        ranks = sorted(busiest, key=lambda one: one.rank)
    return Interval(
        world_size=len(rows),
        ranks_per_node=max(hosts.count(host) for host in hosts),
        stages={
            name: stage
            for place, name in enumerate(_STAGES)
            if (stage := _stage_numbers([row[3 * place : 3 * place + 3] for row in rows])) is not None
        },
        gauges={
            name: gauge
            for place, name in enumerate(GAUGES)
            if (gauge := _gauge_numbers([row[_FIRST_GAUGE + 4 * place :][:4] for row in rows])) is not None
        },
        ranks=tuple(ranks),
        num_cpus=max(1, round(num_processors())),
        memory_bytes=machine_bytes(),
        available_bytes=int(min(_fact(row, "available_bytes") for row in rows)),
        num_masked=int(sum(_fact(row, "num_masked") for row in rows)),
        events={name: count for name in _EVENTS if (count := int(sum(_fact(row, name) for row in rows)))},
        cache_free_bytes=int(
            min((free for row in rows if (free := _fact(row, "cache_free_bytes")) >= 0), default=-1)
        ),
        **fields,
    )


def _stage_numbers(by_rank: Sequence[Sequence[float]]) -> StageNumbers | None:
    """Return what all ranks did in a stage; None where none of them did anything."""
    if not any(map(any, by_rank)):
        return None
    seconds = [one[0] for one in by_rank]
    most = max(seconds)
    return StageNumbers(
        seconds=round(sum(seconds), _DIGITS),
        num_bytes=int(sum(one[1] for one in by_rank)),
        num_items=int(sum(one[2] for one in by_rank)),
        most_seconds=round(most, _DIGITS),
        most_rank=seconds.index(most),
        least_seconds=round(min(seconds), _DIGITS),
    )


def _gauge_numbers(by_rank: Sequence[Sequence[float]]) -> GaugeNumbers | None:
    """Return what a gauge showed on all ranks; None where nobody looked."""
    seen = [one for one in by_rank if one[1] > 0]
    if not seen:
        return None
    return GaugeNumbers(
        mean=sum(one[0] for one in seen) / sum(one[1] for one in seen),
        least=min(one[2] for one in seen),
        most=max(one[3] for one in seen),
    )


def _rank_numbers(rank: int, row: Sequence[float], host: str) -> RankNumbers:
    return RankNumbers(
        rank=rank,
        host=host,
        data_wait_s=_seconds(row, "data_wait"),
        compute_s=_seconds(row, "forward") + _seconds(row, "backward"),
        exchange_s=_seconds(row, "exchange"),
        optimizer_s=_seconds(row, "optimizer"),
        cpu_s=_fact(row, "cpu_s"),
        runnable_s=_fact(row, "runnable_s"),
        gil_wait_share=_fact(row, "gil_wait_share"),
        pss_bytes=int(_fact(row, "pss_bytes")),
        **{name: int(_fact(row, name)) for name in _MEMORY},
    )


def _seconds(row: Sequence[float], stage: str) -> float:
    return round(row[3 * _STAGES.index(stage)], _DIGITS)


def _fact(row: Sequence[float], name: str) -> float:
    return round(row[_FIRST_FACT + _FACTS.index(name)], _DIGITS)
