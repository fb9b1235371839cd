"""Loader runtime: what a loader holds in one process, the streams it makes, and its tunables.

Memory, locks, counters, loader processes, caches and stores. A forked child makes its own: its parent's may
be held by threads that do not exist there. Settings may change while streams run; what a stream has opened,
it finishes as it began.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardflow.errors import ConfigError, ShardflowError, StateError
from shardflow.fields.findings import EntitySlots
from shardflow.fields.quarantine import Quarantine
from shardflow.fields.reader import FieldReader
from shardflow.fields.registry import field_kinds
from shardflow.fields.slots import SlotAssembler
from shardflow.fields.text import TextAssembler
from shardflow.fields.tokens import TokenAssembler
from shardflow.fields.transforms import Transform, load_transform
from shardflow.format import Dataset
from shardflow.loading.assembly import BatchSource, MicroBatchTask, PartSize
from shardflow.loading.batch import Batch
from shardflow.loading.config import LoaderConfig, rank_num_bytes
from shardflow.loading.engine import BufferPool, OrderedEngine, Pool
from shardflow.loading.prefetch import PrefetchPlanner, ReadProgress
from shardflow.loading.process import LoaderProcesses, ProcessStream
from shardflow.loading.selection import Selection
from shardflow.loading.world import World
from shardflow.sampling import EpochPlan, LoaderState, RankSchedule
from shardflow.storage import CachedStore, RemoteStore
from shardflow.storage.cache.store import Cache
from shardflow.telemetry import StageCounters, TunableLimit
from shardflow.telemetry.process import machine_bytes, num_processors

_CACHE_SETTINGS: Final = ("read_ahead_bytes", "read_ahead_threads", "ram_bytes", "max_bytes")
_LOGGER = logging.getLogger(__name__)
_JOIN_TIMEOUT_S: Final = 5.0
_SETTINGS: Final = ("execution", "num_threads", "prefetch_bytes", "read_bytes")
_MIB: Final = 1 << 20
_EXECUTIONS: Final[tuple[str, ...]] = ("threads", "process", "workers")
# More threads than processors pay only where they wait: a little for a disk, much for a network.
_PER_PROCESSOR: Final = 2
_PER_PROCESSOR_REMOTE: Final = 8
# Descriptors that are left to everybody else, and how many one more of something may take.
_SPARE_DESCRIPTORS: Final = 64
_DESCRIPTORS: Final = {
    "loader.num_threads": 2,
    "cache.read_ahead_threads": 2,
    "store.max_concurrency": 2,
}
_DESCRIPTORS_OF_A_PROCESS: Final = 8
_LEAST: Final = {
    "loader.num_threads": 1,
    "loader.prefetch_bytes": _MIB,
    "loader.read_bytes": 64 << 10,
    "cache.read_ahead_bytes": 0,
    "cache.read_ahead_threads": 1,
    "cache.ram_bytes": 0,
    "cache.max_bytes": 0,
    "store.max_concurrency": 1,
}
_MOST: Final = {
    "loader.num_threads": 256,
    "loader.prefetch_bytes": 1 << 40,
    "loader.read_bytes": 256 * _MIB,
    "cache.read_ahead_bytes": 1 << 40,
    "cache.read_ahead_threads": 64,
    "cache.ram_bytes": 1 << 40,
    "cache.max_bytes": 1 << 60,
    "store.max_concurrency": 256,
}


class Tiers:
    """What lies between a loader and the bytes of its datasets.

    Datasets of a blend share a cache; remote stores have the same limit each.

    Args:
        datasets: What is read.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        stores = [dataset.store for dataset in datasets]
        origins = [store.origin if isinstance(store, CachedStore) else store for store in stores]
        caches = [store.cache for store in stores if isinstance(store, CachedStore)]
        self._caches: list[Cache] = list({id(cache): cache for cache in caches}.values())
        self._remotes = list({id(one): one for one in origins if isinstance(one, RemoteStore)}.values())

    @property
    def is_remote(self) -> bool:
        """Whether anything comes over a network."""
        return bool(self._remotes)

    def settings(self) -> dict[str, int]:
        """Return what `change` changes, by name; of several caches or stores the largest value."""
        found: dict[str, int] = {}
        for name in _CACHE_SETTINGS:
            if name == "max_bytes" and not any(cache.config.directory for cache in self._caches):
                continue
            if self._caches:
                found[f"cache.{name}"] = max(getattr(cache.config, name) for cache in self._caches)
        if self._remotes:
            found["store.max_concurrency"] = max(store.max_concurrency for store in self._remotes)
        return found

    def least(self, name: str) -> int:
        """Return the least that a cache's setting may be: a cache of nothing is none."""
        configs = [cache.config for cache in self._caches]
        if name == "cache.max_bytes":
            return max((config.block_bytes for config in configs if config.directory), default=0)
        if name == "cache.ram_bytes":
            return max((config.block_bytes for config in configs if not config.directory), default=0)
        return 0

    def disk_room_bytes(self) -> int:
        """Return what the folders of the caches can hold: what they do, and what their disks have free."""
        tiers = [cache.disk for cache in self._caches]
        return min((tier.room_bytes for tier in tiers if tier is not None), default=0)

    def change(self, changes: Mapping[str, int | str]) -> None:
        """Change settings by name; those of others are passed over.

        Raises:
            ConfigError: A value cannot be, see `CacheConfig`.
        """
        kept = {
            name.partition(".")[2]: int(one) for name, one in changes.items() if name.startswith("cache.")
        }
        for cache in self._caches if kept else ():
            cache.change(
                {name: one for name, one in kept.items() if name != "max_bytes" or cache.config.directory}
            )
        for store in self._remotes if "store.max_concurrency" in changes else ():
            store.bound(int(changes["store.max_concurrency"]))


class BatchStream(Iterator[Batch]):
    """Yields micro-batches.

    Its threads run from the first one until the last, an error, or the end of the stream's life.

    Args:
        source: What the micro-batches are made from.
        numbers: Which of the rank's micro-batches of the epoch, in the order to yield them.
        reader: What reads for the source.
    """

    def __init__(self, source: BatchSource, numbers: range, reader: FieldReader) -> None:
        config = source.config
        self._source, self._reader = source, reader
        self._num_left = len(numbers)
        self._engine: OrderedEngine[Batch] = OrderedEngine(
            partial(_open, source, numbers),
            len(numbers),
            num_threads=source.num_threads(config),
            max_bytes=config.prefetch_bytes,
            wait_timeout_s=config.wait_timeout_s,
            counters=source.counters,
        )
        # The threads know the engine and not the stream, so the stream dies with its last user, whether that
        # one finished, broke off or raised. At exit the same call ends threads before the interpreter goes
        # down.
        self._finalizer = weakref.finalize(self, _close, self._engine, source.watch)

    def __next__(self) -> Batch:
        """Return the next micro-batch.

        Raises:
            WaitTimeoutError: It did not come in time.
            SampleError: A sample is bad, and the loader is told to raise.
            StateError: The stream was closed, or ended with an error, before its last micro-batch.
            ShardflowError: A shard cannot be read, or the stream was begun in another process.
        """
        try:
            batch = self._engine.take()
        except BaseException:
            self.close()
            raise
        if batch is None:
            self.close()
            if self._num_left:
                # StopIteration here would look like the end of the epoch.
                raise StateError(
                    f"an iteration must go on to its end, got {self._num_left} micro-batches left of one "
                    "that was closed or ended with an error; call iter() again."
                )
            raise StopIteration
        self._num_left -= 1
        return batch

    def change(self, config: LoaderConfig) -> None:
        """Go on with other threads and bounds; what is made stays as it is. May be called from anywhere."""
        self._engine.resize(num_threads=self._source.num_threads(config), max_bytes=config.prefetch_bytes)
        self._reader.read_bytes = config.read_bytes
        if self._source.watch is not None:
            self._source.watch.change()

    def start(self) -> None:
        """Begin before the first micro-batch is asked for."""
        self._engine.start()

    def describe_wait(self, timeout_s: float) -> str:
        """Say what the next micro-batch waits for."""
        return self._engine.describe_wait(timeout_s)

    def describe_activity(self) -> str:
        """Say which shard, tier and stage its threads are at, from any thread."""
        return self._engine.describe_activity()

    def close(self) -> None:
        """End the threads; the stream yields nothing more."""
        self._finalizer()


def _close(engine: OrderedEngine[Batch], watch: ReadProgress | None) -> None:
    if watch is not None:
        watch.close()
    engine.close()


def _open(source: BatchSource, numbers: range, place: int) -> MicroBatchTask:
    return source.open(numbers[place])


class LoaderRuntime:
    """What a loader holds in this process.

    Args:
        selection: The samples.
        schedule: Who runs what.
        world: This rank.
        state: The run that the loader belongs to.
        config: How to run.

    Attributes:
        pid: The process that this belongs to.
        config: How to run now: as given, and what was changed since.
        side: The processes that load for this one; None until they are needed.
        tiers: What it reads through.
        changing: Held while settings change.
        streams: Those whose micro-batches threads of this process make.
    """

    def __init__(
        self,
        selection: Selection,
        schedule: RankSchedule,
        world: World,
        state: LoaderState,
        config: LoaderConfig,
    ) -> None:
        self.pid = os.getpid()
        self.selection, self.world, self.config = selection, world, config
        self.tiers = Tiers(selection.datasets)
        self.counters = StageCounters()
        self.pool = BufferPool(config.prefetch_bytes)
        self.planner = PrefetchPlanner(
            selection,
            schedule,
            world,
            config,
            run_id=f"{state.plan_id} {state.seed}",
            counters=self.counters,
        )
        self.side: LoaderProcesses | None = None
        self._retired: list[LoaderProcesses] = []
        self._schedule, self._state = schedule, state
        self._part_size = PartSize(selection, config)
        self._tokens = None if config.tokens is None else TokenAssembler(selection, config.tokens)
        self._transform: Transform | None = None
        self.changing = threading.RLock()
        self.streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()

    # ---- streams ---------------------------------------------------------------------------------

    def stream(
        self, plan: EpochPlan, numbers: range, known_masks: Quarantine, pool: Pool | None = None
    ) -> BatchStream:
        """Make a stream whose micro-batches threads of this process make."""
        if self._transform is None and self.config.transform:
            self._transform = load_transform(self.config.transform)
        with self.changing:
            config = self.config
            reader = FieldReader(self.selection, read_bytes=config.read_bytes, counters=self.counters)
            kinds = field_kinds(config.view, text=config.text, counters=self.counters)
            source = BatchSource(
                selection=self.selection,
                plan=plan,
                schedule=self._schedule,
                rank=self.world.rank,
                config=config,
                pool=pool or self.pool,
                assembler=SlotAssembler(reader, kinds),
                texts=TextAssembler(reader, self.counters) if config.view is None and config.text else None,
                tokens=self._tokens,
                transform=self._transform,
                entities=EntitySlots.of(self.selection),
                part_size=self._part_size,
                counters=self.counters,
                known_masks=known_masks,
                watch=self.planner.watch(plan, numbers) if self.planner.is_on else None,
            )
            stream = BatchStream(source, numbers, reader)
            self.streams.add(stream)
        return stream

    def process_stream(
        self, epoch: int, numbers: range, known_masks: Sequence[Mapping[str, Any]]
    ) -> ProcessStream:
        """Make a stream whose micro-batches other processes make; they start with the first one."""
        if self.side is not None and not self.side.fits(self.config):
            self.retire_processes()
        if self.side is None:
            arguments = {
                "dataset": self.selection,
                "batch": self._state.spec,
                "seed": self._state.seed,
                "world": self.world,
            }
            self.side = LoaderProcesses(arguments, self.config, self.counters)
        return self.side.stream(epoch, numbers, known_masks)

    def retire_processes(self) -> None:
        """Do without the processes from now on; `close_retired` ends them, once no stream needs them."""
        if self.side is not None:
            self._retired.append(self.side)
            self.side = None

    @property
    def process_ids(self) -> list[int]:
        """Processes of this loader that run."""
        sides = [self.side, *self._retired]
        return [pid for side in sides if side is not None for pid in side.pids]

    def close_retired(self) -> None:
        """End the processes that are not needed any more."""
        retired, self._retired = self._retired, []
        for side in retired:
            side.close()

    def close(self) -> None:
        """End all processes, and wait a while for what was read ahead of streams that ended.

        Nothing happens in a forked child.
        """
        self.retire_processes()
        self.close_retired()
        if self.pid == os.getpid() and not self.planner.join(_JOIN_TIMEOUT_S):
            _LOGGER.debug("reading ahead goes on after close, until its requests end")

    # ---- changes ---------------------------------------------------------------------------------

    def settings(self) -> dict[str, int | str]:
        """Return what `change` changes, by name."""
        ours = {f"loader.{name}": getattr(self.config, name) for name in _SETTINGS}
        return {**ours, **self.tiers.settings()}

    def change(self, changes: Mapping[str, int | str]) -> None:
        """Change settings by name, unchecked, see `Tunables.set`; what runs takes part where it can."""
        with self.changing:
            ours = {name: changes[f"loader.{name}"] for name in _SETTINGS if f"loader.{name}" in changes}
            others = {name: value for name, value in changes.items() if not name.startswith("loader.")}
            self.config = replace(self.config, **ours)  # type: ignore[arg-type]
            self.tiers.change(others)
            self.pool.bound(self.config.prefetch_bytes)
            self._part_size.divide_among(self.config.num_threads)
            for stream in list(self.streams):
                stream.change(self.config)
            if self.side is not None:
                self.side.change(self.config, others)

    @property
    def has_pending(self) -> bool:
        """Whether the newest stream was opened for an execution that is no longer asked for."""
        if self.config.execution == "threads":
            return self.side is not None
        return self.side is None or not self.side.fits(self.config)

    def take_back_pending(self, side: LoaderProcesses | None) -> None:
        """Go back to the execution of a stream that goes on, since another could not start.

        Args:
            side: The processes that make it; None for threads.
        """
        with self.changing:
            if self.side is not None and self.side is not side:
                self.side.close()
            self.side = side
            self._retired = [other for other in self._retired if other is not side]
            kept: dict[str, Any] = {"execution": "threads"} if side is None else side.structure
            self.config = replace(self.config, **kept)


class LoaderTunables:
    """Changes settings of a loader, see `shardflow.telemetry.intervals.Tunables`. Safe for many threads.

    All of them act at once on what runs, but for ``loader.execution``, and for ``loader.num_threads`` where
    these are processes: such a change waits for the next ``iter()`` or `Loader.apply_pending`.

    Args:
        parts: Of the loader.
    """

    def __init__(self, parts: LoaderRuntime) -> None:
        self._parts = parts

    def values(self) -> dict[str, int | str]:
        """Return the settings as they were set last."""
        return self._parts.settings()

    def limits(self) -> dict[str, TunableLimit]:
        """Return what each may be now, with the others as they are.

        The memory of all loaders of the node stays within ``max_node_bytes``, or within half of the machine's
        where none was given. A value that stands already is always allowed.
        """
        values = self.values()
        limits: dict[str, TunableLimit] = {}
        spare = _free_descriptors()
        for name, present in values.items():
            if isinstance(present, str):
                choices = _EXECUTIONS if sys.platform == "linux" else _EXECUTIONS[:1]
                choices = tuple(one for one in choices if one == present or self._fits({name: one}))
                limits[name] = TunableLimit(choices=choices, is_live=False)
                continue
            is_processes = name == "loader.num_threads" and values["loader.execution"] == "workers"
            least = min(present, max(_LEAST[name], self._parts.tiers.least(name)))
            most = min(_MOST[name], self._most_in_memory(name, least))
            if name in _DESCRIPTORS:
                each = _DESCRIPTORS_OF_A_PROCESS if is_processes else _DESCRIPTORS[name]
                most = min(most, present + spare // each)
            if name == "loader.num_threads":
                most = min(most, self._most_threads(is_processes=is_processes))
            if name == "cache.max_bytes":
                most = min(most, self._parts.tiers.disk_room_bytes())
            limits[name] = TunableLimit(least=least, most=max(most, present), is_live=not is_processes)
        return limits

    def set(self, name: str, value: int | str) -> None:
        """Change one setting.

        Raises:
            ConfigError: There is no such setting here, or the value is outside its limits.
            ShardflowError: This is a forked child, whose loader has settings of its own.
        """
        if self._parts.pid != os.getpid():
            raise ShardflowError(
                "settings must be changed in the process that they belong to, got a forked child; ask the "
                "loader for its tunables there."
            )
        with self._parts.changing:
            limits = self.limits()
            if name not in limits:
                raise ConfigError(
                    f"a setting to change must be one of {', '.join(limits)}, got {name!r}; correct it."
                )
            _check(name, value, limits[name])
            self._parts.change({name: value})

    # ---- inside ----------------------------------------------------------------------------------

    def _num_bytes(self, changes: Mapping[str, int | str]) -> int:
        parts = self._parts
        ranks = max(1, parts.world.ranks_per_node)
        return ranks * sum(rank_num_bytes(parts.config, parts.selection.datasets, changes).values())

    def _room(self) -> int:
        return self._parts.config.max_node_bytes or machine_bytes() // 2

    def _fits(self, changes: Mapping[str, int | str]) -> bool:
        return self._num_bytes(changes) <= self._room()

    def _most_in_memory(self, name: str, least: int) -> int:
        """Return the largest value with which the node's loaders stay within their room."""
        with_least = self._num_bytes({name: least})
        each = self._num_bytes({name: least + 1}) - with_least
        return least + max(self._room() - with_least, 0) // each if each else _MOST[name]

    def _most_threads(self, *, is_processes: bool) -> int:
        parts = self._parts
        share = max(int(num_processors()) // max(1, parts.world.ranks_per_node), 1)
        waits = parts.tiers.is_remote and not is_processes
        return share * (_PER_PROCESSOR_REMOTE if waits else _PER_PROCESSOR)


def _check(name: str, value: int | str, limit: TunableLimit) -> None:
    if limit.choices:
        if value not in limit.choices:
            raise ConfigError(
                f"{name} must be one of {', '.join(limit.choices)} on this machine, got {value!r}; choose "
                "one of them."
            )
    elif not isinstance(value, int) or isinstance(value, bool) or not limit.least <= value <= limit.most:
        raise ConfigError(
            f"{name} must be a number from {limit.least} to {limit.most} here (memory, processors, "
            f"descriptors and disk of this machine, max_node_bytes), got {value!r}; stay within."
        )


def _free_descriptors() -> int:
    """Return how many descriptors this process may open, a few kept back."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        num_open = 0  # no such folder here, and no way to know
    return max(soft - num_open - _SPARE_DESCRIPTORS, 0)
