"""Stage counters, and the measurement of intervals from them.

Counters are thread-safe totals of seconds, bytes and items per stage. They only grow, so two snapshots can be
subtracted; a gauge (queue depth, buffered bytes) keeps its last value and its extremes. A `CountersWindow`
returns everything, gauges included, counted since its last use. `STAGES` lists every stage by the name used
in counters, in ``metrics.jsonl`` and in the exported label ``stage``. No name ever contains a patient, a file
or a path.

The numbers of a rank form a row of floats whose order is fixed here, so ranks exchange them in one small
all-gather, which the caller performs. `IntervalRecorder` measures a training loop of the user's own in a
single process.
"""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from shardflow.errors import ConfigError
from shardflow.telemetry.intervals import GaugeNumbers, Interval, RankNumbers, StageNumbers
from shardflow.telemetry.process import ProcessProbe, machine_bytes, num_processors

if TYPE_CHECKING:
    from types import TracebackType


StageGroup = Literal["fetch", "make", "device", "step", "idle"]
"""``fetch``: reading bytes into the process. ``make``: threads building micro-batches from them. ``device``:
transfer to the device of the model. ``step``: the training loop. ``idle``: waiting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of the pipeline or of the training loop."""

    group: StageGroup
    text: str
    """Description for people."""
    is_part_of: str = ""
    """The stage whose seconds include this one's; empty for none."""


STAGES: Final[dict[str, Stage]] = {
    "read": Stage(group="fetch", text="reading the bytes of fields, from whatever tier has them"),
    "cache_ram": Stage(group="fetch", text="blocks from the cache in memory", is_part_of="read"),
    "cache_disk": Stage(group="fetch", text="blocks from the cache on the node's disk", is_part_of="read"),
    "cache_origin": Stage(group="fetch", text="blocks from the store behind the cache, ahead or not"),
    "cache_wait": Stage(
        group="fetch", text="waiting for blocks that another rank fetches", is_part_of="read"
    ),
    "index": Stage(group="fetch", text="opening the index of a shard"),
    "service": Stage(group="fetch", text="waiting for micro-batches of data servers, and receiving them"),
    "service_queue": Stage(
        group="fetch", text="waiting for memory or a thread of a data server", is_part_of="service"
    ),
    "plan": Stage(group="make", text="looking up what a micro-batch holds"),
    "check": Stage(group="make", text="checksums"),
    "decode": Stage(group="make", text="decoding slices"),
    "transform": Stage(group="make", text="resizing, windowing and placing slices"),
    "user_transform": Stage(group="make", text="the user's own transform"),
    "tokens": Stage(group="make", text="placing stored tokens"),
    "collate": Stage(group="make", text="getting memory for a micro-batch, and putting it together"),
    "tokenize": Stage(group="device", text="making tokens and the model's tensors of a micro-batch"),
    "pin": Stage(group="device", text="into pinned memory, and waiting for room there"),
    "copy": Stage(group="device", text="from pinned memory to the device"),
    "data_wait": Stage(group="step", text="the loop, or the device, waits for its next micro-batch"),
    "forward": Stage(group="step", text="the model's forward, and its loss"),
    "backward": Stage(group="step", text="gradients, up to the last one of this rank"),
    "exchange": Stage(group="step", text="waiting for gradients of other ranks, after this rank's last one"),
    "optimizer": Stage(group="step", text="scaling and clipping gradients, updating weights"),
    "agree": Stage(
        group="step", text="the small exchange of numbers of each step, and waiting for ranks in it"
    ),
    "checkpoint": Stage(group="step", text="training stands still for a checkpoint"),
    "evaluate": Stage(group="step", text="evaluations"),
    "wait": Stage(group="idle", text="a consumer waits for the loader"),
    "starved": Stage(group="idle", text="waits for a loader that had nothing ready"),
    "idle": Stage(group="idle", text="threads of the loader have nothing to do"),
}
"""All stages, in the order a sample passes them. Seconds of the groups ``fetch`` and ``make`` are summed over
threads."""


def metric_name(name: str) -> str:
    """Return the OpenTelemetry name of a metric: dots, no unit in the name, one namespace.

    Example:
        >>> metric_name("stage.duration")
        'shardflow.stage.duration'
    """
    return f"shardflow.{name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTotals:
    """Totals of a stage; seconds are summed over threads."""

    seconds: float = 0.0
    num_bytes: int = 0
    num_items: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GaugeTotals:
    """Values of a gauge in a window; those of other processes are merged with `StageCounters.merge`."""

    last: float
    least: float
    most: float
    weighted: float
    """Sum of value times weight."""
    weight: float
    """Sum of the weights: the number of observations, or seconds if values lasted for different times."""


Gauges = dict[str, list[float]]
"""By name: last, least, most, weighted and weight, as in `GaugeTotals`, changed in place."""


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
        self._gauges: Gauges = {}
        self._windows: weakref.WeakSet[CountersWindow] = weakref.WeakSet()

    def add(self, stage: str, seconds: float = 0.0, num_bytes: int = 0, num_items: int = 0) -> None:
        """Add to a stage's totals; a new name creates a stage."""
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

    def observe(self, gauge: str, value: float, weight: float = 1.0) -> None:
        """Record the current value of a gauge.

        Args:
            gauge: Its name.
            value: Its value.
            weight: Weight of the value in the mean: the seconds that it lasted, if they differ.
        """
        self._note(gauge, [value, value, value, value * weight, weight])

    def merge(self, gauge: str, seen: GaugeTotals) -> None:
        """Record the totals of a gauge of another process."""
        self._note(gauge, [seen.last, seen.least, seen.most, seen.weighted, seen.weight])

    def _note(self, gauge: str, seen: list[float]) -> None:
        last, least, most, weighted, weight = seen
        with self._lock:
            windows = [window.gauges for window in self._windows] if len(self._windows) else ()
            for gauges in (self._gauges, *windows):
                known = gauges.get(gauge)
                if known is None:
                    gauges[gauge] = [*seen]
                    continue
                known[0] = last
                if least < known[1]:
                    known[1] = least
                if most > known[2]:
                    known[2] = most
                known[3] += weighted
                known[4] += weight

    def window(self) -> CountersWindow:
        """Open a view of everything counted from now on; it ends with its last reference."""
        window = CountersWindow(self)
        with self._lock:
            window.before = {name: tuple(totals) for name, totals in self._stages.items()}
            self._windows.add(window)
        return window

    def take(self, window: CountersWindow) -> tuple[dict[str, StageTotals], dict[str, GaugeTotals]]:
        """Return everything counted since the last call for a window; see `CountersWindow.take`."""
        with self._lock:
            now = {name: tuple(totals) for name, totals in self._stages.items()}
            gauges, window.gauges = window.gauges, {}
            before, window.before = window.before, now
        stages = {}
        for name, totals in now.items():
            seconds, num_bytes, num_items = (
                new - old for new, old in zip(totals, before.get(name, (0.0, 0, 0)), strict=True)
            )
            if num_items or num_bytes or seconds:
                stages[name] = StageTotals(
                    seconds=seconds, num_bytes=int(num_bytes), num_items=int(num_items)
                )
        return stages, {name: _gauge_totals(numbers) for name, numbers in gauges.items()}

    def totals(self, stage: str) -> StageTotals:
        """Return a stage's totals; zeros for a stage that never ran."""
        with self._lock:
            seconds, num_bytes, num_items = self._stages.get(stage, (0.0, 0, 0))
        return StageTotals(seconds=seconds, num_bytes=int(num_bytes), num_items=int(num_items))

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return all totals and gauges at one instant, as JSON values.

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
                name: {
                    "last": seen.last,
                    "least": seen.least,
                    "most": seen.most,
                    "mean": seen.weighted / seen.weight if seen.weight else seen.last,
                }
                for name, seen in ((name, _gauge_totals(numbers)) for name, numbers in self._gauges.items())
            }
        return {**stages, **gauges}


class CountersWindow:
    """View of everything counted since its last use; each of several views sees all of it.

    Attributes:
        before: Stage totals at the last `take`; written by the counters.
        gauges: Numbers of the gauges since the last `take`; written by the counters.
    """

    __slots__ = ("__weakref__", "_counters", "before", "gauges")

    def __init__(self, counters: StageCounters) -> None:
        self._counters = counters
        self.before: Mapping[str, tuple[float, ...]] = {}
        self.gauges: Gauges = {}

    def take(self) -> tuple[dict[str, StageTotals], dict[str, GaugeTotals]]:
        """Return stages and gauges since the last call, by name, without those that counted nothing."""
        return self._counters.take(self)


class StageTimer:
    """Context manager that adds the time of its block to a stage."""

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


def _gauge_totals(numbers: list[float]) -> GaugeTotals:
    last, least, most, weighted, weight = numbers
    return GaugeTotals(last=last, least=least, most=most, weighted=weighted, weight=weight)
