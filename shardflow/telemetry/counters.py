"""Stage counters: thread-safe totals of seconds, bytes and items per stage, and gauges.

Totals only grow, so a reader may subtract two snapshots; a gauge (queue depth, buffered bytes) keeps its
last value and its extremes. A `CountersWindow` returns everything, gauges included, counted since its last
use.

`STAGES` lists every stage by the name used in counters, in ``metrics.jsonl`` and in the exported label
``stage``. No name ever contains a patient, a file or a path.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

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


def _gauge_totals(numbers: list[float]) -> GaugeTotals:
    last, least, most, weighted, weight = numbers
    return GaugeTotals(last=last, least=least, most=most, weighted=weighted, weight=weight)
