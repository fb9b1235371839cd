"""What the plan will read next, told to the cache in numbers: when each row is needed, and the bytes ahead.

The plan is a function, so the future is walked, not guessed. A bounded part of it is held at a time: a table
of the steps at which rows are read by the ranks of this node, for the present epoch and the next, and the
reads of the next micro-batches of this rank, which are fetched before the loader asks. Both go on over the
end of an epoch, so that the next one begins warm.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardflow.epochs import EpochPlan, RankSchedule
from shardflow.loading.config import LoaderConfig
from shardflow.loading.fetching_ahead import FetchingAhead
from shardflow.loading.reads_ahead import ReadsAhead
from shardflow.loading.selection import Selection
from shardflow.loading.world import World
from shardflow.storage.cache import Cache, CachedStore, Run
from shardflow.telemetry import StageCounters
from shardflow.threads import join_all, wait_for_at_exit

__all__ = ["Foresight", "Watch"]

# Samples of the node that are known ahead: what does not come within them counts as never.
_MAX_SAMPLES_AHEAD = 1 << 22
# The walk takes at most this share of a thread, so that it does not slow down the reading it serves.
_WALK_SHARE = 0.25
_IDLE_S = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """A dataset of the selection whose cache is told the future."""

    cache: Cache
    run: Run
    components: tuple[int, ...]


class Foresight:
    """Tells the caches of a loader's datasets what its runs will read. Safe for many threads.

    Args:
        selection: The samples.
        schedule: Who runs what.
        world: This rank, and the ranks of its node.
        config: What is read of a sample.
        run_id: Identity of the run's plan and seed.
        counters: Gets what the caches count while a stream of the loader reads.
    """

    def __init__(
        self,
        selection: Selection,
        schedule: RankSchedule,
        world: World,
        config: LoaderConfig,
        *,
        run_id: str,
        counters: StageCounters,
    ) -> None:
        self.selection, self.schedule, self.world, self.config = selection, schedule, world, config
        self._told = _join(selection, world, run_id)
        self.counters = counters
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._counted: dict[int, StageCounters] = {id(told.cache): told.cache.counters for told in self._told}
        # A table speaks of what this loader will read as long as the loader lives.
        self._finalizer = weakref.finalize(self, _leave, self._told)

    @property
    def is_on(self) -> bool:
        """Whether any dataset has a cache."""
        return bool(self._told)

    def watch(self, plan: EpochPlan, numbers: range) -> Watch:
        """Follow the reads of some of the rank's micro-batches of an epoch."""
        watch = Watch(self, plan, numbers)
        self._watches.add(watch)
        return watch

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads of streams that were closed; returns whether they have ended."""
        closed = [watch for watch in list(self._watches) if watch.is_closed]
        return join_all([thread for watch in closed for thread in watch.threads], timeout_s)

    def counted(self) -> list[dict[str, dict[str, float]]]:
        """Return what the caches have counted so far."""
        return [counters.snapshot() for counters in self._counted.values()]

    def count(self, before: list[dict[str, dict[str, float]]]) -> list[dict[str, dict[str, float]]]:
        """Add what the caches have counted since to the loader's counters; returns what they have now."""
        now = self.counted()
        for new, old in zip(now, before, strict=True):
            for stage, totals in new.items():
                past = old.get(stage, dict.fromkeys(totals, 0.0))
                grown = {name: value - past[name] for name, value in totals.items()}
                self.counters.add(stage, grown["seconds"], int(grown["num_bytes"]), int(grown["num_items"]))
        return now

    def report(self, epoch: int, step: int, next_step: int) -> None:
        """Tell the caches how far the reads are."""
        for told in self._told:
            told.cache.outlook.report(told.run, epoch, step, next_step)

    def rest(self) -> None:
        """Tell the caches that this process reads no more, until it reports again."""
        for told in self._told:
            told.cache.outlook.rest(told.run)

    def walk(self, plan: EpochPlan, first_step: int, watch: Watch) -> None:
        """Fill the tables of this epoch and the next, as far ahead as they are kept, until told to stop."""
        mine = [told for told in self._told if told.cache.outlook.begin_filling(told.run)]
        try:
            for epoch, first in ((plan.epoch, first_step), (plan.epoch + 1, 0)):
                unfilled = [told for told in mine if not told.run.table.has_epoch(epoch)]
                if unfilled and not self._walk_epoch(plan.for_epoch(epoch), first, unfilled, watch):
                    return
        finally:
            for told in mine:
                told.cache.outlook.end_filling(told.run)

    def _walk_epoch(self, plan: EpochPlan, first_step: int, unfilled: list[_Told], watch: Watch) -> bool:
        is_here = _micros_of_node(self.schedule, self.world)
        for told in unfilled:
            told.run.table.begin_epoch(plan.epoch, plan.num_steps)
        for step in range(first_step, plan.num_steps):
            start = time.perf_counter()
            rows, _ = plan.step(step)
            self._put(unfilled, plan.epoch, step, rows[is_here])
            ahead = (step - watch.step + (plan.epoch - watch.epoch) * plan.num_steps) * rows.size
            pause_s = (time.perf_counter() - start) * (1 / _WALK_SHARE - 1)
            while watch.pause(pause_s if ahead < _MAX_SAMPLES_AHEAD else _IDLE_S):
                if ahead < _MAX_SAMPLES_AHEAD:
                    break
                ahead = (step - watch.step + (plan.epoch - watch.epoch) * plan.num_steps) * rows.size
            if watch.is_closed:
                return False
        for told in unfilled:
            told.run.table.end_epoch(plan.epoch)
        return True

    def _put(self, unfilled: list[_Told], epoch: int, step: int, planned: NDArray[np.int64]) -> None:
        rows = planned[planned >= 0]
        components, inside = self.selection.components_of(rows), self.selection.study_rows(rows)
        for told in unfilled:
            here = inside[np.isin(components, told.components)]
            told.run.table.put(epoch, here, np.full(len(here), step, np.int64))


class Watch:
    """The reads of one epoch's stream: how far they are, and those ahead. Safe for many threads.

    Nothing runs before the first micro-batch is opened, and nothing after `close`.

    Args:
        foresight: What it belongs to.
        plan: The epoch.
        numbers: The rank's micro-batches that are read, in order.
    """

    def __init__(self, foresight: Foresight, plan: EpochPlan, numbers: range) -> None:
        self._foresight, self._plan, self._numbers = foresight, plan, numbers
        self._per_step = foresight.schedule.num_micro_batches_per_rank
        self._changed = threading.Condition()
        self._open: set[int] = set()
        self._next = numbers.start
        self._has_started = False
        self._fetching: FetchingAhead | None = None
        self._threads: list[threading.Thread] = []
        self._counted = foresight.counted()
        self.is_closed = False

    @property
    def epoch(self) -> int:
        """The epoch that is read."""
        return self._plan.epoch

    @property
    def step(self) -> int:
        """First step that is not read whole."""
        with self._changed:
            return min(self._open, default=self._next) // self._per_step

    def opened(self, number: int) -> None:
        """Say that a micro-batch begins to be read."""
        with self._changed:
            if not self._has_started and not self.is_closed:
                self._start()
            self._open.add(number)
            self._next = max(self._next, number + 1)
            fetching = self._fetching
        if fetching is not None:
            fetching.passed(number)
        self._report()

    def finished(self, number: int) -> None:
        """Say that a micro-batch was read."""
        with self._changed:
            self._open.discard(number)
            self._counted = self._foresight.count(self._counted)
        self._report()

    def change(self) -> None:
        """Go on as the caches' settings say now; may be called from anywhere."""
        with self._changed:
            if self._has_started and not self.is_closed:
                self._read_ahead()

    def pause(self, seconds: float) -> bool:
        """Wait; False once the stream is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed, seconds)
            return not self.is_closed

    def close(self) -> None:
        """Tell the threads to end; a fetch that is under way ends by itself."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
            fetching = self._fetching
        if fetching is not None:
            fetching.close()

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that may still run."""
        with self._changed:
            return self._threads + (self._fetching.threads if self._fetching is not None else [])

    # ---- inside ----------------------------------------------------------------------------------

    def _report(self) -> None:
        step, next_step = self.step, -(-self._next // self._per_step)
        epoch = self.epoch
        if step >= self._plan.num_steps:
            epoch, step, next_step = epoch + 1, 0, 0
        self._foresight.report(epoch, step, next_step)

    def _start(self) -> None:
        """Start the threads; under the lock."""
        self._has_started = True
        foresight = self._foresight
        first_step = self._numbers.start // self._per_step
        walker = threading.Thread(
            target=foresight.walk,
            args=(self._plan, first_step, self),
            name="shardflow-foresight",
            daemon=True,
        )
        self._threads.append(wait_for_at_exit(walker))
        walker.start()
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Fetch ahead as the caches' settings say now; under the lock."""
        foresight, config = self._foresight, self._foresight.config
        stores = [dataset.store for dataset in foresight.selection.datasets]
        settings = [
            store.cache.config for store in stores if isinstance(store, CachedStore) and store.cache.is_on
        ]
        max_bytes = max((each.read_ahead_bytes for each in settings), default=0)
        if not max_bytes or not (config.text or config.view is not None):
            if self._fetching is not None:
                self._fetching.close()
                self._threads += self._fetching.threads
                self._fetching = None
            return
        num_threads = max(each.read_ahead_threads for each in settings)
        if self._fetching is not None:
            self._fetching.resize(num_threads=num_threads, max_bytes=max_bytes)
            return
        wishes = ReadsAhead(
            foresight.selection,
            foresight.schedule,
            foresight.world.rank,
            config,
            self._plan,
            self._numbers,
        )
        self._fetching = FetchingAhead(
            wishes,
            next_number=self._next,
            num_threads=num_threads,
            max_bytes=max_bytes,
            counters=foresight.counters,
        )
        self._fetching.start()


def _join(selection: Selection, world: World, run_id: str) -> tuple[_Told, ...]:
    node = world.rank // world.ranks_per_node if world.ranks_per_node else 0
    text = f"{run_id} {selection.split} {world.world_size} {world.ranks_per_node} {node}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    found: dict[str, _Told] = {}
    for dataset in selection.datasets:
        if isinstance(dataset.store, CachedStore) and dataset.store.cache.is_on:
            # Blocks know the studies that need them, whatever is drawn.
            space = dataset.manifest.dataset_id
            if space in found:
                continue
            same = [other.manifest.dataset_id == space for other in selection.datasets]
            cache = dataset.store.cache
            run = cache.outlook.join(space, digest, dataset.studies.num_samples)
            components = tuple(np.flatnonzero(same).tolist())
            found[space] = _Told(cache, run, components)
    return tuple(found.values())


def _leave(told: tuple[_Told, ...]) -> None:
    for entry in told:
        entry.cache.outlook.leave(entry.run)


def _micros_of_node(schedule: RankSchedule, world: World) -> NDArray[np.bool_]:
    """Return which micro-batches of a step the node of this rank runs; all where it is not known."""
    is_here = np.ones(schedule.micro_batches_per_step, bool)
    size = world.ranks_per_node
    if not size:
        return is_here
    is_here[:] = False
    node = world.rank // size
    for rank in range(node * size, min((node + 1) * size, world.world_size)):
        for micro in schedule.micros(rank):
            if not schedule.is_filler(micro):
                is_here[micro] = True
    return is_here
