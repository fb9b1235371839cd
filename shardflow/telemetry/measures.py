"""Interval measurement: each rank's numbers as a row of floats, and the interval record made from all rows.

The order of a row is fixed here, so ranks exchange it in one small all-gather, which the caller performs.
`IntervalRecorder` measures a training loop of the user's own in a single process.
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
"""Gauges of a row, see `Interval.gauges`."""
_STAGES: Final = tuple(STAGES)
_MEMORY: Final = ("pinned_bytes", "device_bytes", "cache_ram_bytes", "cache_disk_bytes")
_EVENTS: Final = (
    "service_local",
    "service_resent",
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
"""Decimal places of seconds and shares: microseconds are enough, and many ranks make long lines."""


class RankMeasures:
    """Collects a rank's row of each interval.

    Args:
        counters: Counters of the loader and of the loop.
        children: Returns the process ids of loader processes.
        every_s: Approximate length of an interval.
        memory: Returns bytes by name, those of `RankNumbers` (``pinned_bytes``, ``device_bytes``,
            ``cache_ram_bytes``, ``cache_disk_bytes``) and ``cache_free_bytes``.
        num_masked: Returns the number of slots masked so far.
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
        """Return the row of the time since the last call, for `interval_of`."""
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
        """Stop the thread that monitors the process."""
        self._probe.close()


def interval_of(rows: Sequence[Sequence[float]], *, hosts: Sequence[str], **fields: Any) -> Interval:
    """Make an interval from the rows of all ranks.

    Args:
        rows: By rank.
        hosts: Host name of each rank.
        fields: Other fields of `Interval`: steps, sums, settings.
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
    """Return the totals of a stage over all ranks; None if no rank ran it."""
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
    """Return a gauge over all ranks; None if no rank observed it."""
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
    """Consumer of a run's intervals as they are measured."""

    def measured(self, interval: Interval) -> None:
        """Receive the newest interval; called on rank 0 between two steps, so it must be quick."""


class IntervalRecorder:
    """Interval measurement for a training loop of one process.

    The loader counts its own stages; the loop marks its stages with `stage` and the end of each step with
    `step`. The time that the loop waits for the loader is its data wait.

    Args:
        counters: ``loader.counters``.
        listeners: Receive each interval.
        interval_s: An interval ends with the first step after this many seconds. The first step of the loop
            is an interval of its own, see `Interval.is_warm_up`.
        children: Returns the process ids of the loader's processes, ``lambda: loader.process_ids``.
        settings: Returns the settings to record in each interval, by name.
        memory: Returns bytes by name, see `RankMeasures`.
        clock: Monotonic clock in seconds.

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
            raise ConfigError(
                f"interval_s must be above 0 seconds, got {interval_s:g}; set it to 5, for example."
            )
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

        On a GPU it measures the host's time, not the device's, unless the block waits for the device.

        Raises:
            ConfigError: There is no such stage.
        """
        if name not in STAGES:
            raise ConfigError(f"the stage must be one of {', '.join(STAGES)}, got {name!r}.")
        return self._counters.timed(name)

    def step(self, *, num_samples: float = 0.0, num_tokens: float = 0.0, epoch: int = 0) -> Interval | None:
        """Record the end of a step, and return the interval that ended with it, if any."""
        self._num_steps_done += 1
        self._num_steps += 1
        self._num_samples += num_samples
        self._num_tokens += num_tokens
        is_first = self._num_steps_done == 1
        if not is_first and self._clock() - self._began_s < self._interval_s:
            return None
        return self._end(epoch, is_warm_up=is_first)

    def close(self) -> None:
        """Stop the thread that monitors the process."""
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
