"""Prefetch planner: tells the caches what the plan will read, and fetches the next reads ahead of the loader.

The plan is a function, so future reads are computed, not guessed. A bounded part of them is held at a time: a
table of the steps at which rows are read by the ranks of this node, for the present epoch and the next, and
the reads of this rank's next micro-batches, which are fetched before the loader asks. Both continue across
the end of an epoch, so that the next one begins warm.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ShardflowError
from shardflow.fields.decode import ThreadState
from shardflow.fields.quarantine import BadSample
from shardflow.fields.reader import FieldReader, Shard
from shardflow.fields.registry import field_kinds
from shardflow.fields.slots import SlotRequest
from shardflow.fields.views import DrawKey
from shardflow.loading.config import LoaderConfig
from shardflow.loading.selection import Selection
from shardflow.loading.world import World
from shardflow.processes import join_all, wait_for_at_exit
from shardflow.sampling import EpochPlan, RankSchedule
from shardflow.storage import ByteRange
from shardflow.storage.cache.forecast import Run
from shardflow.storage.cache.store import Cache, CachedStore
from shardflow.telemetry import StageCounters

_LOGGER = logging.getLogger(__name__)
# Most of publishing is the kernel's work, and two are ahead of any link that one process fills.
_NUM_PUBLISHERS: Final = 2
# Samples of the node that are known ahead: what does not come within them counts as never.
_MAX_SAMPLES_AHEAD = 1 << 22
# The walk takes at most this share of a thread, so that it does not slow down the reading it serves.
_WALK_SHARE = 0.25
_IDLE_S = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class ShardRead:
    """A part of a wish that lies in one shard."""

    store: CachedStore
    path: str
    ranges: Sequence[ByteRange]

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that it needs."""
        return self.store.num_bytes_ahead(self.path, self.ranges)

    def run(self) -> Callable[[], None] | None:
        """Read what is not kept; returns what publishes it, see `CachedStore.read_ahead`."""
        return self.store.read_ahead(self.path, self.ranges)


class PlannedReads:
    """The reads to come, in order: of this epoch, then of the next. Safe for many threads.

    A wish is the samples of a micro-batch that are fetched at once: one with images, all of them without.

    Args:
        selection: The samples.
        schedule: Who runs what.
        rank: This rank.
        config: What is read of a sample.
        plan: The present epoch.
        numbers: The rank's micro-batches of it that are read, in order.
    """

    def __init__(
        self,
        selection: Selection,
        schedule: RankSchedule,
        rank: int,
        config: LoaderConfig,
        plan: EpochPlan,
        numbers: range,
    ) -> None:
        self._selection, self._schedule, self._rank, self._config = selection, schedule, rank, config
        self._lock = threading.Lock()
        self._plans = {plan.epoch: plan.for_epoch(plan.epoch)}
        counters = StageCounters()
        self._reader = FieldReader(selection, read_bytes=1, counters=counters)
        self._kinds = field_kinds(config.view, text=config.text, counters=counters)
        self._generator = self._all(plan, numbers)

    def take(self, next_number: int) -> tuple[int, int, int, NDArray[np.int64]] | None:
        """Return the next wish that the loader has not come to itself.

        Returns:
            Its place among the micro-batches of both epochs, epoch, number, and rows; None at the end.
        """
        with self._lock:
            for wish in self._generator:
                if wish[0] >= next_number:
                    return wish
            return None

    def reads(self, epoch: int, number: int, rows: NDArray[np.int64], thread: ThreadState) -> list[ShardRead]:
        """Return what the fields of samples are read from.

        Raises:
            StorageError: The index of a shard cannot be read.
        """
        selection = self._selection
        found: list[ShardRead] = []
        shards, inside = selection.column("shard", rows), selection.column("row_in_shard", rows)
        for shard_number in np.unique(shards).tolist():
            try:
                shard = self._reader.open_shard(shard_number, thread)
            except BadSample:
                continue  # the loader finds it again and masks it
            if not isinstance(shard.store, CachedStore):
                continue
            fields: list[int] = []
            for place in np.flatnonzero(shards == shard_number).tolist():
                if int(inside[place]) < shard.index.num_samples:
                    with suppress(BadSample):
                        fields += self._fields(shard, int(inside[place]), int(rows[place]), epoch, number)
            offsets = shard.index.field_offsets[fields].tolist()
            sizes = shard.index.field_num_bytes[fields].tolist()
            ranges = [ByteRange(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
            if ranges:
                found.append(ShardRead(shard.store, shard.path, ranges))
        return found

    def _fields(self, shard: Shard, row_in_shard: int, row: int, epoch: int, number: int) -> list[int]:
        step, slot = divmod(number, self._schedule.num_micro_batches_per_rank)
        place: tuple[int, ...] = ()
        if self._selection.is_blend:
            # The slot in the micro-batch: the plan says it.
            micro = self._schedule.micro(self._rank, slot)
            planned = self._plans[epoch].micro_batch(step, micro).rows
            place = (step, micro, int(np.flatnonzero(planned == row)[0]))
        table_row = int(self._selection.table_rows(np.array([row], np.int64))[0])
        request = SlotRequest(
            slot=0,
            draw=DrawKey(self._plans[epoch].seed, epoch, row, place, table_row),
            row_in_shard=row_in_shard,
            key="",
            text_bytes=0,
            entity=self._selection.entity(row),
        )
        return sorted({number for kind in self._kinds for number in kind.needed(shard, request)})

    def _all(self, plan: EpochPlan, numbers: range) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
        per_rank = self._schedule.num_micro_batches_per_rank
        yield from self._epoch(plan.epoch, numbers, 0)
        following = self._plans[plan.epoch + 1] = plan.for_epoch(plan.epoch + 1)
        first = numbers.start % numbers.step
        num_before = plan.num_steps * per_rank
        yield from self._epoch(
            following.epoch, range(first, following.num_steps * per_rank, numbers.step), num_before
        )

    def _epoch(
        self, epoch: int, numbers: range, num_before: int
    ) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
        plan = self._plans[epoch]
        for number in numbers:
            step, slot = divmod(number, self._schedule.num_micro_batches_per_rank)
            rows = plan.micro_batch(step, self._schedule.micro(self._rank, slot)).rows
            rows = rows[rows >= 0]
            if self._config.view is None:
                if len(rows):
                    yield num_before + number, epoch, number, rows
                continue
            for place in range(len(rows)):
                yield num_before + number, epoch, number, rows[place : place + 1]


class Prefetcher:
    """Carries out the wishes of a `PlannedReads`, in its order, until told to stop. Safe for many threads.

    Args:
        wishes: What to fetch.
        next_number: First micro-batch that the loader has not come to.
        num_threads: Threads that read.
        max_bytes: Bound on bytes under way and ahead of the loader; one read alone may exceed it.
        counters: Gets the gauge ``fetching_bytes``, seen as each read begins: bytes asked for or not yet
            published; and ``ahead_batches``, seen as the loader comes to a micro-batch: those after it of
            which something is there.
    """

    def __init__(
        self,
        wishes: PlannedReads,
        *,
        next_number: int,
        num_threads: int,
        max_bytes: int,
        counters: StageCounters,
    ) -> None:
        self._wishes, self._next, self._max_bytes, self._counters = wishes, next_number, max_bytes, counters
        self._changed = threading.Condition()
        # By the place of the micro-batch: a wish that was passed counts until its bytes are published.
        self._under_way: Counter[int] = Counter()
        self._ahead: Counter[int] = Counter()
        self._waiting: list[int] = []
        self._landed: deque[tuple[int, int, Callable[[], None]]] = deque()
        self._is_closed = False
        self._num_wanted, self._num_started = num_threads, 0
        self._readers: set[threading.Thread] = set()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the threads."""
        with self._starting:
            self._start_readers()
            for _ in range(_NUM_PUBLISHERS):
                self._start(self._new_thread(self._publish_all))

    def resize(self, *, num_threads: int, max_bytes: int) -> None:
        """Change how many threads read, and the bound; one too many ends its wish first."""
        with self._starting:
            with self._changed:
                self._num_wanted, self._max_bytes = num_threads, max_bytes
                self._changed.notify_all()
            if not self._is_closed:
                self._start_readers()

    def passed(self, number: int) -> None:
        """Say that the loader has come to a micro-batch."""
        with self._changed:
            self._next = max(self._next, number + 1)
            for place in [place for place in self._ahead if place < self._next]:
                del self._ahead[place]
            self._counters.observe("ahead_batches", len(self._ahead))
            self._changed.notify_all()

    def close(self) -> None:
        """Tell the threads to end; what is under way is published all the same: others may wait for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that may still run."""
        return self._threads

    # ---- inside ----------------------------------------------------------------------------------

    def _start_readers(self) -> None:
        """Start those that are missing; under the lock of starting, for which no thread of ours waits."""
        # Counted once: where nothing is left to wish for, each of them ends as soon as it has started.
        for _ in range(self._num_wanted - len(self._readers)):
            thread = self._new_thread(self._read_all)
            with self._changed:
                self._readers.add(thread)
            self._start(thread)

    def _new_thread(self, target: Callable[[], None]) -> threading.Thread:
        self._num_started += 1
        name = f"shardflow-ahead-{self._num_started - 1}"
        return wait_for_at_exit(threading.Thread(target=target, name=name, daemon=True))

    def _start(self, thread: threading.Thread) -> None:
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()

    def _read_all(self) -> None:
        thread = ThreadState()
        try:
            while self._is_wanted() and (wish := self._wishes.take(self._next)) is not None:
                place, epoch, number, rows = wish
                for read in self._wishes.reads(epoch, number, rows, thread):
                    num_bytes = read.num_bytes
                    if self._reserve(place, num_bytes):
                        self._read(read, place, num_bytes)
        except (ShardflowError, OSError) as error:
            # The loader's own read meets the same fault, with its retries, deadline and place.
            _LOGGER.debug("reading ahead ended: %s", type(error).__name__)
        finally:
            with self._changed:
                self._readers.discard(threading.current_thread())

    def _is_wanted(self) -> bool:
        """Tell a reader whether to go on; one that is not to is no reader any more."""
        if len(self._readers) > self._num_wanted:  # without the lock, for there is mostly nothing to it
            with self._changed:
                if len(self._readers) > self._num_wanted:
                    self._readers.discard(threading.current_thread())
                    return False
        return not self._is_closed

    def _reserve(self, place: int, num_bytes: int) -> bool:
        """Wait for room; False where the loader was faster, or the stream is closed."""
        with self._changed:
            self._waiting.append(place)
            # What is needed first goes first, whichever thread wakes up first.
            self._changed.wait_for(
                lambda: self._is_settled(place) or (place == min(self._waiting) and self._has_room(num_bytes))
            )
            self._waiting.remove(place)
            self._changed.notify_all()
            if self._is_settled(place):
                return False
            self._under_way[place] += num_bytes
            self._counters.observe("fetching_bytes", self._under_way.total())
            return True

    def _is_settled(self, place: int) -> bool:
        return self._is_closed or place < self._next

    def _has_room(self, num_bytes: int) -> bool:
        held = self._under_way.total() + self._ahead.total()
        return not held or held + num_bytes <= self._max_bytes

    def _read(self, read: ShardRead, place: int, num_bytes: int) -> None:
        publish = None
        try:
            publish = read.run()
        finally:
            if publish is None:  # all of it is kept, or it failed
                self._done(place, num_bytes)
        if publish is None:
            return
        with self._changed:
            if not self._is_closed:
                self._landed.append((place, num_bytes, publish))
                self._changed.notify_all()
                return
        # The publishers may have ended.
        self._publish(place, num_bytes, publish)

    def _publish_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._landed or self._is_closed)
                if not self._landed:
                    return
                landed = self._landed.popleft()
            self._publish(*landed)
            # The name must not keep the bytes while this thread waits for others.
            del landed

    def _publish(self, place: int, num_bytes: int, publish: Callable[[], None]) -> None:
        try:
            publish()
        except (ShardflowError, OSError) as error:
            _LOGGER.debug("a block was not published: %s", type(error).__name__)
        finally:
            self._done(place, num_bytes)

    def _done(self, place: int, num_bytes: int) -> None:
        with self._changed:
            self._under_way[place] -= num_bytes
            if not self._under_way[place]:
                del self._under_way[place]
            if place >= self._next:
                self._ahead[place] += num_bytes
            self._changed.notify_all()


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """A dataset of the selection whose cache is told the future."""

    cache: Cache
    run: Run
    components: tuple[int, ...]


class PrefetchPlanner:
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
        self._watches: weakref.WeakSet[ReadProgress] = weakref.WeakSet()
        self._counted: dict[int, StageCounters] = {id(told.cache): told.cache.counters for told in self._told}
        # A table speaks of what this loader will read as long as the loader lives.
        self._finalizer = weakref.finalize(self, _leave, self._told)

    @property
    def is_on(self) -> bool:
        """Whether any dataset has a cache."""
        return bool(self._told)

    def watch(self, plan: EpochPlan, numbers: range) -> ReadProgress:
        """Follow the reads of some of the rank's micro-batches of an epoch."""
        watch = ReadProgress(self, plan, numbers)
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
            told.cache.forecast.report(told.run, epoch, step, next_step)

    def rest(self) -> None:
        """Tell the caches that this process reads no more, until it reports again."""
        for told in self._told:
            told.cache.forecast.rest(told.run)

    def walk(self, plan: EpochPlan, first_step: int, watch: ReadProgress) -> None:
        """Fill the tables of this epoch and the next, as far ahead as they are kept, until told to stop."""
        mine = [told for told in self._told if told.cache.forecast.begin_filling(told.run)]
        try:
            for epoch, first in ((plan.epoch, first_step), (plan.epoch + 1, 0)):
                unfilled = [told for told in mine if not told.run.table.has_epoch(epoch)]
                if unfilled and not self._walk_epoch(plan.for_epoch(epoch), first, unfilled, watch):
                    return
        finally:
            for told in mine:
                told.cache.forecast.end_filling(told.run)

    def _walk_epoch(
        self, plan: EpochPlan, first_step: int, unfilled: list[_Told], watch: ReadProgress
    ) -> bool:
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


class ReadProgress:
    """The reads of one epoch's stream: how far they are, and those ahead. Safe for many threads.

    Nothing runs before the first micro-batch is opened, and nothing after `close`.

    Args:
        planner: What it belongs to.
        plan: The epoch.
        numbers: The rank's micro-batches that are read, in order.
    """

    def __init__(self, planner: PrefetchPlanner, plan: EpochPlan, numbers: range) -> None:
        self._planner, self._plan, self._numbers = planner, plan, numbers
        self._per_step = planner.schedule.num_micro_batches_per_rank
        self._changed = threading.Condition()
        self._open: set[int] = set()
        self._next = numbers.start
        self._has_started = False
        self._fetching: Prefetcher | None = None
        self._threads: list[threading.Thread] = []
        self._counted = planner.counted()
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
            self._counted = self._planner.count(self._counted)
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
        self._planner.report(epoch, step, next_step)

    def _start(self) -> None:
        """Start the threads; under the lock."""
        self._has_started = True
        planner = self._planner
        first_step = self._numbers.start // self._per_step
        walker = threading.Thread(
            target=planner.walk,
            args=(self._plan, first_step, self),
            name="shardflow-foresight",
            daemon=True,
        )
        self._threads.append(wait_for_at_exit(walker))
        walker.start()
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Fetch ahead as the caches' settings say now; under the lock."""
        planner, config = self._planner, self._planner.config
        stores = [dataset.store for dataset in planner.selection.datasets]
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
        wishes = PlannedReads(
            planner.selection,
            planner.schedule,
            planner.world.rank,
            config,
            self._plan,
            self._numbers,
        )
        self._fetching = Prefetcher(
            wishes,
            next_number=self._next,
            num_threads=num_threads,
            max_bytes=max_bytes,
            counters=planner.counters,
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
            run = cache.forecast.join(space, digest, dataset.studies.num_samples)
            components = tuple(np.flatnonzero(same).tolist())
            found[space] = _Told(cache, run, components)
    return tuple(found.values())


def _leave(told: tuple[_Told, ...]) -> None:
    for entry in told:
        entry.cache.forecast.leave(entry.run)


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
            if not schedule.is_padding(micro):
                is_here[micro] = True
    return is_here
