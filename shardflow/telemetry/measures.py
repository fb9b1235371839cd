"""One rank's numbers of an interval as a row, and the interval that the rows of all ranks make.

A row is a list of floats in a fixed order, so that ranks exchange it in one small gather, whatever ran where.
Owns that order. Who gathers (a process group, or nobody in a run of one process) is the caller's business.

Intervals of one process whose loop is not ours: what its loader counts, and the stages that it names.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from shardflow.errors import ConfigError
from shardflow.telemetry.counters import STAGES, StageCounters, StageTimer
from shardflow.telemetry.intervals import GaugeNumbers, Interval, RankNumbers, StageNumbers
from shardflow.telemetry.process import ProcessProbe, machine_bytes, num_processors

if TYPE_CHECKING:
    from types import TracebackType

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


class IntervalListener(Protocol):
    """Whoever wants a run's intervals as they are measured."""

    def measured(self, interval: Interval) -> None:
        """Take the newest interval; called on rank 0, between two steps: be quick."""


class IntervalRecorder:
    """Measures the loop of one process.

    What the loader does is counted by itself; the loop says what it is at with `stage` and where a step ends
    with `step`. The time that the loop waits for the loader is its data wait.

    Args:
        counters: The loader's, ``loader.counters``.
        listeners: Get each interval.
        interval_s: An interval ends with the first step after so many seconds. The first step of all is an
            interval of its own, see `Interval.is_warm_up`.
        children: Returns the process ids of the loader's processes, ``lambda: loader.process_ids``.
        settings: Returns the settings to note in each interval, by name.
        memory: Returns bytes by name, see `RankMeasures`.
        clock: Seconds, never going back.

    Raises:
        ConfigError: ``interval_s`` is not above 0.

    Example::

        with IntervalRecorder(loader.counters, listeners=[metrics]) as recorder:
            for batch in loader:
                with recorder.stage("forward"):
                    loss = model(batch)
                with recorder.stage("backward"):
                    loss.backward()
                with recorder.stage("optimizer"):
                    optimizer.step()
                recorder.step(num_samples=len(batch.rows))
    """

    def __init__(
        self,
        counters: StageCounters,
        *,
        listeners: Sequence[IntervalListener] = (),
        interval_s: float = 5.0,
        children: Callable[[], Sequence[int]] | None = None,
        settings: Callable[[], Mapping[str, int | float | str]] | None = None,
        memory: Callable[[], Mapping[str, int]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if interval_s <= 0:
            raise ConfigError(f"interval_s must be above 0, got {interval_s:g}; give some seconds.")
        self.listeners = list(listeners)
        self._counters = counters
        self._interval_s = interval_s
        self._settings = settings or dict
        self._clock = clock
        self._host = socket.gethostname()
        self._waited = counters.totals("wait")
        self._measures = RankMeasures(counters, children=children, every_s=interval_s, memory=memory)
        self._num_steps_done = 0
        self._num_steps = 0
        self._num_samples = self._num_tokens = 0.0
        self._began_s = clock()

    def stage(self, name: str) -> StageTimer:
        """Return a context manager that counts the time of its block.

        On a GPU it measures what the loop does there, not what the device does, unless the block waits for
        the device.

        Raises:
            ConfigError: There is no such stage.
        """
        if name not in STAGES:
            raise ConfigError(f"a stage must be one of {', '.join(STAGES)}, got {name!r}; correct it.")
        return self._counters.timed(name)

    def step(self, *, num_samples: float = 0.0, num_tokens: float = 0.0, epoch: int = 0) -> Interval | None:
        """Say that a step has ended; returns the interval that ended with it, if any."""
        self._num_steps_done += 1
        self._num_steps += 1
        self._num_samples += num_samples
        self._num_tokens += num_tokens
        is_first = self._num_steps_done == 1
        if not is_first and self._clock() - self._began_s < self._interval_s:
            return None
        return self._end(epoch, is_warm_up=is_first)

    def close(self) -> None:
        """End the thread that watches the process."""
        self._measures.close()

    def __enter__(self) -> IntervalRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _end(self, epoch: int, *, is_warm_up: bool) -> Interval:
        waited, self._waited = self._waited, self._counters.totals("wait")
        self._counters.add(
            "data_wait", self._waited.seconds - waited.seconds, 0, self._waited.num_items - waited.num_items
        )
        began_s, self._began_s = self._began_s, self._clock()
        wall_s = self._began_s - began_s
        interval = interval_of(
            [self._measures.take()],
            hosts=[self._host],
            global_step=self._num_steps_done - 1,
            num_steps=self._num_steps,
            epoch=epoch,
            is_warm_up=is_warm_up,
            wall_s=wall_s,
            step_s=wall_s,
            slowest_wait_s=self._waited.seconds - waited.seconds,
            num_samples=self._num_samples,
            num_tokens=self._num_tokens,
            settings=self._settings(),
        )
        self._num_steps, self._num_samples, self._num_tokens = 0, 0.0, 0.0
        for listener in self.listeners:
            listener.measured(interval)
        return interval
