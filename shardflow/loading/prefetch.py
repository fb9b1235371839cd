"""Prefetching from the plan: caches learn what will be read when, and the next reads are fetched ahead.

The plan is a function, so future reads are computed, not guessed. `PrefetchPlanner` fills each cache's
next-use table: the steps at which the ranks of this node read each row, in the current epoch and the next.
`StreamReads` follows one stream of micro-batches and lists the reads to come; `Prefetcher` carries them out
on threads of its own, within a bound of bytes. Both continue across the end of an epoch, so that the next one
starts warm.
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
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ShardflowError, os_reason
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import BoundField, DrawKey, SlotRequest
from shardflow.fields.quarantine import BadSample
from shardflow.fields.reader import FieldReader
from shardflow.fields.registry import FieldSet
from shardflow.format.volumes.bricks import RegionPlan
from shardflow.loading.config import World
from shardflow.loading.rows.selection import Selection
from shardflow.processes import join_all, wait_for_at_exit
from shardflow.sampling import EpochPlan, RankSchedule
from shardflow.storage import ByteRange
from shardflow.storage.cache.forecast import Run
from shardflow.storage.cache.store import Cache, CachedStore
from shardflow.telemetry import StageCounters

_LOGGER = logging.getLogger(__name__)
# Publishing is mostly kernel work; two threads keep up with any link that one process can fill.
_NUM_PUBLISHERS: Final = 2
# Rows of the node that a table looks ahead; a row not needed within them counts as never needed.
_MAX_SAMPLES_AHEAD: Final = 1 << 22
# The share of a thread that filling the tables may take, so that it does not slow down the reads it serves.
_FILL_SHARE: Final = 0.25
_IDLE_S: Final = 0.2


class PlannedRead(NamedTuple):
    """Samples of a micro-batch that are fetched at once: one sample with images, otherwise all of them."""

    place: int
    """Position of the micro-batch in the current epoch and the next."""
    epoch: int
    number: int
    """Number of the micro-batch among the rank's own of its epoch."""
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ShardRead:
    """The part of a planned read that is stored in one shard."""

    store: CachedStore
    path: str
    ranges: Sequence[ByteRange]
    """None of them if the whole shard is cached."""
    num_bytes: int
    """Bytes of the blocks that it needs; of a shard that is cached whole, as many as is likely."""

    def run(self) -> Callable[[], None] | None:
        """Read what is not cached; returns the call that publishes it, see `CachedStore.read_ahead`."""
        return self.store.read_ahead(self.path, self.ranges)


@dataclass(frozen=True, slots=True, eq=False)
class _CachedDataset:
    """A dataset of the selection, and the run that its cache forecasts for it."""

    cache: Cache
    run: Run
    components: tuple[int, ...]


class PrefetchPlanner:
    """Access forecast of a loader, for the caches of its datasets. Safe for many threads.

    Args:
        selection: The samples.
        schedule: Which rank runs which micro-batch.
        world: This rank, and the ranks of its node.
        run_id: Identity of the run's plan and seed.
        counters: Gets what the caches count while a stream of the loader reads.
        fields: What is read of a sample.
    """

    def __init__(
        self,
        selection: Selection,
        schedule: RankSchedule,
        world: World,
        fields: FieldSet,
        *,
        run_id: str,
        counters: StageCounters,
    ) -> None:
        self.selection, self.schedule, self.world, self.fields = selection, schedule, world, fields
        self.counters = counters
        self._cached = _join(selection, world, run_id)
        self._streams: weakref.WeakSet[StreamReads] = weakref.WeakSet()
        by_cache = {id(one.cache): one.cache.counters for one in self._cached}
        self._cache_counters = list(by_cache.values())
        # The caches drop this loader's tables when the loader is gone.
        weakref.finalize(self, _leave, self._cached)

    @property
    def is_on(self) -> bool:
        """Whether any dataset has a cache."""
        return bool(self._cached)

    def follow(self, plan: EpochPlan, numbers: range) -> StreamReads:
        """Follow the reads of some of the rank's micro-batches of an epoch."""
        reads = StreamReads(self, plan, numbers)
        self._streams.add(reads)
        return reads

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads of closed streams; returns whether they have ended."""
        closed = [reads for reads in list(self._streams) if reads.is_closed]
        return join_all([thread for reads in closed for thread in reads.threads], timeout_s)

    def counted(self) -> list[dict[str, dict[str, float]]]:
        """Return what the caches have counted so far."""
        return [counters.snapshot() for counters in self._cache_counters]

    def count(self, before: list[dict[str, dict[str, float]]]) -> list[dict[str, dict[str, float]]]:
        """Add what the caches have counted since ``before`` to the loader's counters; returns totals."""
        now = self.counted()
        for new, old in zip(now, before, strict=True):
            for stage, totals in new.items():
                past = old.get(stage, dict.fromkeys(totals, 0.0))
                grown = {name: value - past[name] for name, value in totals.items()}
                self.counters.add(stage, grown["seconds"], int(grown["num_bytes"]), int(grown["num_items"]))
        return now

    def report(self, epoch: int, step: int, next_step: int) -> None:
        """Report the progress of the reads to the caches."""
        for one in self._cached:
            one.cache.forecast.report(one.run, epoch, step, next_step)

    def rest(self) -> None:
        """Report to the caches that this process reads nothing until its next report."""
        for one in self._cached:
            one.cache.forecast.rest(one.run)

    def fill(self, plan: EpochPlan, first_step: int, reads: StreamReads) -> None:
        """Fill the tables of this epoch and the next, as far ahead as they reach, until the stream ends."""
        mine = [one for one in self._cached if one.cache.forecast.begin_filling(one.run)]
        try:
            for epoch, first in ((plan.epoch, first_step), (plan.epoch + 1, 0)):
                unfilled = [one for one in mine if not one.run.table.has_epoch(epoch)]
                if unfilled and not self._fill_epoch(plan.for_epoch(epoch), first, unfilled, reads):
                    return
        finally:
            for one in mine:
                one.cache.forecast.end_filling(one.run)

    def _fill_epoch(
        self, plan: EpochPlan, first_step: int, unfilled: list[_CachedDataset], reads: StreamReads
    ) -> bool:
        is_on_node = _micros_of_node(self.schedule, self.world)
        for one in unfilled:
            one.run.table.begin_epoch(plan.epoch, plan.num_steps)
        for step in range(first_step, plan.num_steps):
            start = time.perf_counter()
            planned, _ = plan.step(step)
            rows = planned[is_on_node]
            rows = rows[rows >= 0]
            if self.fields.previous is not None:
                earlier = self.fields.previous.rows(rows)
                rows = np.concatenate([rows, earlier[earlier >= 0]])
            components, inside = self.selection.components_of(rows), self.selection.study_rows(rows)
            for one in unfilled:
                here = inside[np.isin(components, one.components)]
                one.run.table.put(plan.epoch, here, np.full(len(here), step, np.int64))
            pause_s = (time.perf_counter() - start) * (1 / _FILL_SHARE - 1)
            last = step + (plan.epoch - reads.epoch) * plan.num_steps
            while (last - reads.step) * planned.size >= _MAX_SAMPLES_AHEAD and reads.pause(_IDLE_S):
                pass
            if not reads.pause(pause_s):
                return False
        for one in unfilled:
            one.run.table.end_epoch(plan.epoch)
        return True


class StreamReads:
    """Reads of one stream of an epoch: how far they are, and those to come. Safe for many threads.

    Nothing runs before the first micro-batch is opened, and nothing after `close`.

    Args:
        planner: The forecast that the stream belongs to.
        plan: The epoch.
        numbers: The rank's micro-batches that are read, in order.
    """

    def __init__(self, planner: PrefetchPlanner, plan: EpochPlan, numbers: range) -> None:
        self._planner, self._plan, self._numbers = planner, plan, numbers
        self._selection, self._schedule, self._fields = planner.selection, planner.schedule, planner.fields
        self._per_step = self._schedule.num_micro_batches_per_rank
        self._changed = threading.Condition()
        self._open: set[int] = set()
        self._next = numbers.start
        self._has_started = False
        self._threads: list[threading.Thread] = []
        self._counted = planner.counted()
        self.is_closed = False
        self._prefetcher: Prefetcher | None = None
        counters = StageCounters()  # the caches count what is prefetched
        self._reader = FieldReader(self._selection, read_bytes=1, counters=counters)
        self._plans: dict[int, EpochPlan] = {}
        self._planning = threading.Lock()
        # Of the bytes of samples, those of the blocks that their reads needed where they were looked for.
        self._share_needed = 1.0
        self._planned: Iterator[PlannedRead] = iter(())

    # ---- progress --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that is read."""
        return self._plan.epoch

    @property
    def step(self) -> int:
        """First step that is not read completely."""
        with self._changed:
            return min(self._open, default=self._next) // self._per_step

    def opened(self, number: int) -> None:
        """Note that the reads of a micro-batch begin."""
        with self._changed:
            if not self._has_started and not self.is_closed:
                self._start()
            self._open.add(number)
            self._next = max(self._next, number + 1)
            prefetcher = self._prefetcher
        if prefetcher is not None:
            prefetcher.passed(number)
        self._report()

    def finished(self, number: int) -> None:
        """Note that a micro-batch was read."""
        with self._changed:
            self._open.discard(number)
            self._counted = self._planner.count(self._counted)
        self._report()

    def pause(self, seconds: float) -> bool:
        """Wait; returns False once the stream is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed, seconds)
            return not self.is_closed

    def change(self) -> None:
        """Apply the caches' settings as they are now; may be called from any thread."""
        with self._changed:
            if self._has_started and not self.is_closed:
                self._prefetch()

    def close(self) -> None:
        """Stop the threads; a read in flight ends by itself."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
            prefetcher = self._prefetcher
        if prefetcher is not None:
            prefetcher.close()

    @property
    def threads(self) -> list[threading.Thread]:
        """Threads that may still run."""
        with self._changed:
            return self._threads + (self._prefetcher.threads if self._prefetcher is not None else [])

    def _report(self) -> None:
        step, next_step = self.step, -(-self._next // self._per_step)
        epoch = self.epoch
        if step >= self._plan.num_steps:
            epoch, step, next_step = epoch + 1, 0, 0
        self._planner.report(epoch, step, next_step)

    def _start(self) -> None:
        """Start the threads; needs the lock."""
        self._has_started = True
        filler = threading.Thread(
            target=self._planner.fill,
            args=(self._plan, self._numbers.start // self._per_step, self),
            name="shardflow-foresight",
            daemon=True,
        )
        self._threads.append(wait_for_at_exit(filler))
        filler.start()
        self._prefetch()

    def _prefetch(self) -> None:
        """Start, resize or stop the prefetcher as the caches' settings say now; needs the lock."""
        stores = [dataset.store for dataset in self._selection.datasets]
        settings = [
            store.cache.config for store in stores if isinstance(store, CachedStore) and store.cache.is_on
        ]
        max_bytes = max((each.read_ahead_bytes for each in settings), default=0)
        if not max_bytes or not self._fields.reads_shards:
            if self._prefetcher is not None:
                self._prefetcher.close()
                self._threads += self._prefetcher.threads
                self._prefetcher = None
            return
        num_threads = max(each.read_ahead_threads for each in settings)
        if self._prefetcher is not None:
            self._prefetcher.resize(num_threads=num_threads, max_bytes=max_bytes)
            return
        self._planned = self._plan_reads()
        self._prefetcher = Prefetcher(
            self,
            next_number=self._next,
            num_threads=num_threads,
            max_bytes=max_bytes,
            counters=self._planner.counters,
        )
        self._prefetcher.start()

    # ---- the reads to come -----------------------------------------------------------------------

    def take(self, next_number: int) -> PlannedRead | None:
        """Return the next read of a micro-batch that the loader has not reached; None at the end."""
        with self._planning:
            for planned in self._planned:
                if planned.place >= next_number:
                    return planned
            return None

    def locate(self, planned: PlannedRead, thread: ThreadState) -> list[ShardRead]:
        """Return where the fields of a read's samples are stored.

        Raises:
            StorageError: The index of a shard cannot be read.
        """
        rows = planned.rows
        if not self._fields.reads_own:
            found = []
        else:
            found = self._locate(rows, rows, self._fields.own, planned, thread)
        if self._fields.previous is not None:
            earlier = self._fields.previous.rows(rows)
            has_one = earlier >= 0
            fields = self._fields.of_previous
            found += self._locate(earlier[has_one], rows[has_one], fields, planned, thread)
        return found

    def _locate(
        self,
        rows: NDArray[np.int64],
        planned_rows: NDArray[np.int64],
        of: Sequence[BoundField],
        planned: PlannedRead,
        thread: ThreadState,
    ) -> list[ShardRead]:
        """Return where some fields of studies are stored, ``(n,)``, which are read for rows of the plan."""
        found: list[ShardRead] = []
        shards = self._selection.column("shard", rows)
        inside = self._selection.column("row_in_shard", rows)
        for shard_number in np.unique(shards).tolist():
            try:
                shard = self._reader.open_shard(shard_number, thread)
            except BadSample:
                continue  # the loader finds it again and masks it
            if not isinstance(shard.store, CachedStore):
                continue
            here = np.flatnonzero(shards == shard_number)
            num_stored = sum(map(shard.sample_num_bytes, inside[here].tolist()))
            if shard.store.is_kept(shard.path):
                # As in most epochs but the first; what the loader reads of it is not looked for.
                num_bytes = int(num_stored * self._share_needed)
                found.append(ShardRead(shard.store, shard.path, (), num_bytes))
                continue
            fields: list[int] = []
            regions: list[RegionPlan] = []
            for place in here.tolist():
                if int(inside[place]) < shard.index.num_samples:
                    at = int(inside[place]), int(rows[place]), int(planned_rows[place])
                    for crop in range(self._fields.num_crops):
                        with suppress(BadSample):
                            request = self._request(*at, planned, crop)
                            fields += {number for one in of for number in one.needed(shard, request)}
                            regions += [plan for one in of for plan in one.needed_regions(shard, request)]
            ranges = shard.ranges(fields, regions)
            if ranges:
                num_bytes = shard.store.num_bytes_ahead(shard.path, ranges)
                found.append(ShardRead(shard.store, shard.path, ranges, num_bytes))
                self._share_needed = num_bytes / max(num_stored, 1)
        return found

    def _request(
        self, row_in_shard: int, row: int, planned_row: int, planned: PlannedRead, crop: int
    ) -> SlotRequest:
        plan = self._plans[planned.epoch]
        place: tuple[int, ...] = ()
        if self._selection.repeats:
            # A draw of a mixture depends on the slot too, which the plan knows.
            step, slot = divmod(planned.number, self._per_step)
            micro = self._schedule.micro(self._planner.world.rank, slot)
            sample = int(np.flatnonzero(plan.micro_batch(step, micro).rows == planned_row)[0])
            place = (step, micro, sample * self._fields.num_crops + crop)
        at = np.array([row], np.int64)
        table_row = int(self._selection.table_rows(at)[0])
        return SlotRequest(
            slot=0,
            draw=DrawKey(plan.seed, plan.epoch, row, place, table_row, crop),
            row_in_shard=row_in_shard,
            key="",
            entity=self._selection.entity(row),
            component=int(self._selection.components_of(at)[0]),
            study_row=int(self._selection.study_rows(at)[0]),
            table_row=table_row,
        )

    def _plan_reads(self) -> Iterator[PlannedRead]:
        """Yield the reads of this epoch, then those of the next."""
        # Plans of its own: those of the loader keep what its threads asked for last.
        plan, numbers = self._plan.for_epoch(self.epoch), self._numbers
        yield from self._plan_epoch(plan, numbers, 0)
        num_before = plan.num_steps * self._per_step
        plan = plan.for_epoch(self.epoch + 1)
        numbers = range(numbers.start % numbers.step, plan.num_steps * self._per_step, numbers.step)
        yield from self._plan_epoch(plan, numbers, num_before)

    def _plan_epoch(self, plan: EpochPlan, numbers: range, num_before: int) -> Iterator[PlannedRead]:
        self._plans[plan.epoch] = plan
        for number in numbers:
            step, slot = divmod(number, self._per_step)
            rows = plan.micro_batch(step, self._schedule.micro(self._planner.world.rank, slot)).rows
            rows = rows[rows >= 0]
            num_together = 1 if self._fields.reads_members else max(len(rows), 1)
            for first in range(0, len(rows), num_together):
                together = rows[first : first + num_together]
                yield PlannedRead(num_before + number, plan.epoch, number, together)


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A reader that waits for room."""

    place: int
    """Position of its micro-batch."""
    num_bytes: int
    changed: threading.Condition


class Prefetcher:
    """Thread pool that carries out planned reads in order until it is closed. Safe for many threads.

    Args:
        reads: What to fetch.
        next_number: First micro-batch that the loader has not reached.
        num_threads: Threads that read.
        max_bytes: Bound on bytes in flight and ahead of the loader; a single read may exceed it.
        counters: Gets the gauge ``fetching_bytes``, observed as each read begins: bytes requested or not yet
            published; and ``ahead_batches``, observed as the loader reaches a micro-batch: later ones of
            which something has been fetched.
    """

    def __init__(
        self,
        reads: StreamReads,
        *,
        next_number: int,
        num_threads: int,
        max_bytes: int,
        counters: StageCounters,
    ) -> None:
        self._reads, self._next, self._max_bytes, self._counters = reads, next_number, max_bytes, counters
        self._lock = threading.Lock()
        self._has_landed = threading.Condition(self._lock)
        # By the place of the micro-batch: a read that the loader has passed counts until it is published.
        self._under_way: Counter[int] = Counter()
        self._ahead: Counter[int] = Counter()
        self._waiting: list[_Turn] = []
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
        """Change how many threads read, and the bound; a surplus thread finishes its read first."""
        with self._starting:
            with self._lock:
                self._num_wanted, self._max_bytes = num_threads, max_bytes
                self._wake_first()
            if not self._is_closed:
                self._start_readers()

    def passed(self, number: int) -> None:
        """Note that the loader has reached a micro-batch."""
        with self._lock:
            self._next = max(self._next, number + 1)
            for place in [place for place in self._ahead if place < self._next]:
                del self._ahead[place]
            self._counters.observe("ahead_batches", len(self._ahead))
            self._wake_first()

    def close(self) -> None:
        """Stop the threads; reads in flight are still published, since other processes may wait for them."""
        with self._lock:
            self._is_closed = True
            self._has_landed.notify_all()
            for turn in self._waiting:
                turn.changed.notify()

    @property
    def threads(self) -> list[threading.Thread]:
        """Threads that may still run."""
        return self._threads

    # ---- inside ----------------------------------------------------------------------------------

    def _start_readers(self) -> None:
        """Start the missing readers; needs the lock of starting, which no thread of the pool takes."""
        # Counted once: when nothing is left to read, each thread ends as soon as it has started.
        for _ in range(self._num_wanted - len(self._readers)):
            thread = self._new_thread(self._read_all)
            with self._lock:
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
            while self._is_wanted() and (planned := self._reads.take(self._next)) is not None:
                for read in self._reads.locate(planned, thread):
                    if self._reserve(planned.place, read.num_bytes):
                        self._read(read, planned.place)
        except (ShardflowError, OSError) as error:
            # The loader's own read will hit the same fault, with its retries, its deadline and its place.
            _LOGGER.debug("prefetching ended: %s", os_reason(error))
        finally:
            with self._lock:
                self._readers.discard(threading.current_thread())

    def _is_wanted(self) -> bool:
        """Tell a reader whether to continue; one that must not is removed from the readers."""
        if len(self._readers) > self._num_wanted:  # first without the lock, because it is rarely true
            with self._lock:
                if len(self._readers) > self._num_wanted:
                    self._readers.discard(threading.current_thread())
                    return False
        return not self._is_closed

    def _reserve(self, place: int, num_bytes: int) -> bool:
        """Wait for room; returns False if the loader was faster or the stream is closed."""
        turn = _Turn(place, num_bytes, threading.Condition(self._lock))
        with self._lock:
            self._waiting.append(turn)
            turn.changed.wait_for(lambda: self._may_go(turn))
            self._waiting.remove(turn)
            is_settled = self._is_settled(place)
            if not is_settled:
                self._under_way[place] += num_bytes
                self._counters.observe("fetching_bytes", self._under_way.total())
            self._wake_first()
            return not is_settled

    def _may_go(self, turn: _Turn) -> bool:
        """Tell whether a reader waits no longer: the earliest micro-batch goes first, whoever wakes up."""
        return self._is_settled(turn.place) or (turn is self._first() and self._has_room(turn.num_bytes))

    def _first(self) -> _Turn:
        return min(self._waiting, key=lambda turn: turn.place)

    def _wake_first(self) -> None:
        """Wake the first reader if it may go, which wakes the next one; needs the lock.

        Each micro-batch that the loader reaches makes room for one read, so all the others would wake up in
        vain.
        """
        if self._waiting and self._may_go(first := self._first()):
            first.changed.notify()

    def _is_settled(self, place: int) -> bool:
        return self._is_closed or place < self._next

    def _has_room(self, num_bytes: int) -> bool:
        held = self._under_way.total() + self._ahead.total()
        return not held or held + num_bytes <= self._max_bytes

    def _read(self, read: ShardRead, place: int) -> None:
        publish, num_bytes = None, read.num_bytes
        try:
            publish = read.run()
        finally:
            if publish is None:  # everything was cached, or the read failed
                self._done(place, num_bytes)
        if publish is None:
            return
        with self._lock:
            if not self._is_closed:
                self._landed.append((place, num_bytes, publish))
                self._has_landed.notify()
                return
        # The publishers may have ended already.
        self._publish(place, num_bytes, publish)

    def _publish_all(self) -> None:
        while True:
            with self._lock:
                self._has_landed.wait_for(lambda: self._landed or self._is_closed)
                if not self._landed:
                    return
                landed = self._landed.popleft()
            self._publish(*landed)
            # Do not keep the bytes alive while waiting for the next ones.
            del landed

    def _publish(self, place: int, num_bytes: int, publish: Callable[[], None]) -> None:
        try:
            publish()
        except (ShardflowError, OSError) as error:
            _LOGGER.debug("a block was not published: %s", os_reason(error))
        finally:
            self._done(place, num_bytes)

    def _done(self, place: int, num_bytes: int) -> None:
        with self._lock:
            self._under_way[place] -= num_bytes
            if not self._under_way[place]:
                del self._under_way[place]
            if place >= self._next:
                self._ahead[place] += num_bytes
            self._wake_first()


def _join(selection: Selection, world: World, run_id: str) -> tuple[_CachedDataset, ...]:
    node = world.rank // world.ranks_per_node if world.ranks_per_node else 0
    text = f"{run_id} {selection.split} {world.world_size} {world.ranks_per_node} {node}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    found: dict[str, _CachedDataset] = {}
    for dataset in selection.datasets:
        if isinstance(dataset.store, CachedStore) and dataset.store.cache.is_on:
            # Blocks are keyed by study, whatever the samples are.
            space = dataset.manifest.dataset_id
            if space in found:
                continue
            same = [other.manifest.dataset_id == space for other in selection.datasets]
            cache = dataset.store.cache
            run = cache.forecast.join(space, digest, dataset.studies.num_samples)
            components = tuple(np.flatnonzero(same).tolist())
            found[space] = _CachedDataset(cache, run, components)
    return tuple(found.values())


def _leave(cached: tuple[_CachedDataset, ...]) -> None:
    for one in cached:
        one.cache.forecast.leave(one.run)


def _micros_of_node(schedule: RankSchedule, world: World) -> NDArray[np.bool_]:
    """Return which micro-batches of a step the node of this rank runs; all of them if it is unknown."""
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
