"""Loader runtime: everything a loader holds in one process, the streams that it opens, and its tunables.

Memory, locks, counters, loader processes, caches and stores. A forked child makes a runtime of its own,
because threads that do not exist in the child may hold the locks of its parent's. Tunables may change while
streams run; what a stream has already opened, it finishes with the old settings.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ConfigError, ShardflowError
from shardflow.fields.quarantine import Quarantine
from shardflow.fields.reader import FieldReader
from shardflow.fields.registry import FieldSet
from shardflow.fields.slots import SlotAssembler
from shardflow.fields.types.findings import FindingArrays
from shardflow.fields.types.text import TextAssembler
from shardflow.loading.assembly import BatchSource, PartSize
from shardflow.loading.batch import Batch, BatchStream
from shardflow.loading.config import LoaderConfig, World, rank_num_bytes
from shardflow.loading.engine import BufferPool, OrderedEngine, Pool, Task
from shardflow.loading.prefetch import PrefetchPlanner, StreamReads
from shardflow.loading.process import LoaderProcesses, ProcessStream
from shardflow.loading.rows.lock import make_lock
from shardflow.loading.rows.selection import Selection
from shardflow.sampling import BatchSpec, EpochPlan, LoaderState, RankSchedule
from shardflow.storage import CachedStore, RemoteStore
from shardflow.storage.cache.store import Cache
from shardflow.telemetry import StageCounters, TunableLimit
from shardflow.telemetry.process import machine_bytes, num_processors

if TYPE_CHECKING:
    from shardflow.loading.service import DataServers, Requests

_LOGGER = logging.getLogger(__name__)
_JOIN_TIMEOUT_S: Final = 5.0
_MIB: Final = 1 << 20
_EXECUTIONS: Final[tuple[str, ...]] = ("threads", "process", "workers")
_SERVICE: Final = "service"
_LOADER_SETTINGS: Final = ("execution", "num_threads", "prefetch_bytes", "read_bytes")
# The least and the most of each tunable number, whatever the machine.
_CACHE_BOUNDS: Final = {
    "cache.read_ahead_bytes": (0, 1 << 40),
    "cache.read_ahead_threads": (1, 64),
    "cache.ram_bytes": (0, 1 << 40),
    "cache.max_bytes": (0, 1 << 60),
}
_BOUNDS: Final = {
    "loader.num_threads": (1, 256),
    "loader.prefetch_bytes": (_MIB, 1 << 40),
    "loader.read_bytes": (64 << 10, 256 * _MIB),
    **_CACHE_BOUNDS,
    "store.max_concurrency": (1, 256),
}
# More threads than processors pay only where they wait: a little for a disk, a lot for a network.
_PER_PROCESSOR: Final = 2
_PER_PROCESSOR_REMOTE: Final = 8
# File descriptors left to everything else, and how many each further thread, request or process may take.
_SPARE_DESCRIPTORS: Final = 64
_DESCRIPTORS: Final = {
    "loader.num_threads": 2,
    "cache.read_ahead_threads": 2,
    "store.max_concurrency": 2,
}
_DESCRIPTORS_OF_A_PROCESS: Final = 8


class ThreadStream(BatchStream):
    """Stream whose micro-batches threads of this process make.

    The threads run from the first micro-batch until the last, an error, or the end of the stream's life.

    Args:
        source: What the micro-batches are made from.
        numbers: Which of the rank's micro-batches of the epoch, in the order to yield them.
        reader: What reads for the source.
    """

    def __init__(
        self, source: BatchSource, numbers: range, reader: FieldReader, requests: Requests | None = None
    ) -> None:
        super().__init__(len(numbers))
        config = source.config
        self._source, self._reader, self._requests = source, reader, requests
        self._engine: OrderedEngine[Batch] = OrderedEngine(
            partial(_open, source, numbers, requests),
            len(numbers),
            num_threads=self._num_threads(config),
            max_bytes=config.prefetch_bytes,
            wait_timeout_s=config.wait_timeout_s,
            counters=source.counters,
        )
        # The threads reference the engine, not the stream, so the stream dies with its last user, whether
        # that one finished, stopped early or raised. At exit the same call ends the threads before the
        # interpreter shuts down.
        self._finalizer = weakref.finalize(self, _close, self._engine, source.reads, requests)

    def _num_threads(self, config: LoaderConfig) -> int:
        if self._requests is not None:
            return config.num_threads * self._requests.num_servers
        return self._source.num_threads(config)

    def _take(self) -> Batch | None:
        return self._engine.take()

    def change(self, config: LoaderConfig) -> None:
        """Continue with other threads and bounds; may be called from any thread."""
        self._engine.resize(num_threads=self._num_threads(config), max_bytes=config.prefetch_bytes)
        self._reader.read_bytes = config.read_bytes
        if self._source.reads is not None:
            self._source.reads.change()

    def start(self) -> None:
        """Begin before the first micro-batch is requested."""
        self._engine.start()

    def describe_wait(self, timeout_s: float) -> str:
        """Return the message of a wait for the next micro-batch that took too long."""
        return self._engine.describe_wait(timeout_s)

    def describe_activity(self) -> str:
        """Describe which shard, tier and stage the threads are at; may be called from any thread."""
        return self._engine.describe_activity()

    def _end(self) -> None:
        self._finalizer()


def _close(engine: OrderedEngine[Batch], reads: StreamReads | None, requests: Requests | None) -> None:
    if reads is not None:
        reads.close()
    if requests is not None:
        requests.close()
    engine.close()


def _open(source: BatchSource, numbers: range, requests: Requests | None, place: int) -> Task[Batch]:
    task = source.open(numbers[place])
    return task if requests is None else requests.task(task)


class LoaderRuntime:
    """Everything a loader holds in this process; its tunables, see `shardflow.telemetry.intervals.Tunables`.

    A tunable acts at once on what runs, except for ``loader.execution``, and for ``loader.num_threads`` with
    the execution ``workers``: those wait for the next ``iter()`` or `Loader.apply_pending`. Safe for many
    threads. Datasets of a blend share a cache; all remote stores get the same limit.

    Args:
        selection: The samples.
        schedule: Which rank runs which micro-batch.
        world: This rank.
        state: The run that the loader belongs to.
        config: How to run.
        counters: Gets the stages of reading and decoding.
        fields: What a batch holds.

    Attributes:
        pid: The process that this belongs to.
        config: How to run now: as given, with later changes.
        processes: The loader processes; None until they are needed.
        servers: The data servers; None until they are needed.
        streams: Open streams whose micro-batches threads of this process make.
    """

    def __init__(
        self,
        selection: Selection,
        schedule: RankSchedule,
        world: World,
        state: LoaderState,
        config: LoaderConfig,
        counters: StageCounters,
        fields: FieldSet,
    ) -> None:
        self.pid = os.getpid()
        self.fields = fields
        self.selection, self.world, self.config = selection, world, config
        stores = [dataset.store for dataset in selection.datasets]
        origins = [store.origin if isinstance(store, CachedStore) else store for store in stores]
        caches = [store.cache for store in stores if isinstance(store, CachedStore)]
        self._caches: list[Cache] = list({id(cache): cache for cache in caches}.values())
        self._remotes = list({id(one): one for one in origins if isinstance(one, RemoteStore)}.values())
        self.counters = counters
        self.pool = BufferPool(config.prefetch_bytes)
        self.planner = PrefetchPlanner(
            selection,
            schedule,
            world,
            fields,
            run_id=f"{state.plan_id} {state.seed}",
            counters=self.counters,
        )
        self.processes: LoaderProcesses | None = None
        self.servers: DataServers | None = None
        self._retired: list[LoaderProcesses] = []
        self._schedule, self._state = schedule, state
        self._part_size = PartSize(selection, config, fields)
        self._changing = threading.RLock()
        self.streams: weakref.WeakSet[ThreadStream] = weakref.WeakSet()

    # ---- streams ---------------------------------------------------------------------------------

    def stream(
        self, plan: EpochPlan, numbers: range, known_masks: Quarantine, pool: Pool | None = None
    ) -> ThreadStream:
        """Open a stream whose micro-batches threads of this process make."""
        with self._changing:
            reader = self._reader()
            self._collect_indexes()
            reads = self.planner.follow(plan, numbers) if self.planner.is_on else None
            source = self._source(plan, known_masks, pool or self.pool, reader, reads)
            stream = ThreadStream(source, numbers, reader)
            self.streams.add(stream)
        return stream

    def served_stream(self, plan: EpochPlan, numbers: range, known_masks: Quarantine) -> ThreadStream:
        """Open a stream whose micro-batches data servers make, or threads of this process if none answers.

        Raises:
            ConfigError: pyarrow is missing, or another machine cannot make the batches of this loader.
        """
        with self._changing:
            if self.servers is None:
                self.servers = self.open_servers()
            reader = self._reader()
            source = self._source(plan, known_masks, self.pool, reader, None)
            stream = ThreadStream(source, numbers, reader, self.servers.requests())
            self.streams.add(stream)
        return stream

    def open_servers(self) -> DataServers:
        """Return the data servers of the loader; nothing is sent before the first micro-batch.

        Raises:
            ConfigError: pyarrow is missing, or another machine cannot make the batches of this loader.
        """
        from shardflow.loading.service import DataServers
        from shardflow.loading.service_wire import describe_run

        lock = make_lock(self.selection, self._state, self.fields)
        run = describe_run(self.selection, self.fields, self._given_spec(), self.config, lock)
        streams = weakref.WeakMethod(self._resize_streams)
        return DataServers(self.config, run, self.counters, streams)

    def _resize_streams(self) -> None:
        """Let streams have as many requests under way as there are servers now."""
        for stream in list(self.streams):
            stream.change(self.config)

    def source(self, plan: EpochPlan, pool: Pool) -> BatchSource:
        """Return what makes the micro-batches of an epoch one by one, for a data server."""
        with self._changing:
            self._collect_indexes()
            return self._source(plan, Quarantine(0), pool, self._reader(), None)

    def _reader(self) -> FieldReader:
        return FieldReader(self.selection, read_bytes=self.config.read_bytes, counters=self.counters)

    def _collect_indexes(self) -> None:
        for dataset in self.selection.datasets if self.fields.reads_shards else ():
            dataset.collect_indexes()

    def _source(
        self,
        plan: EpochPlan,
        known_masks: Quarantine,
        pool: Pool,
        reader: FieldReader,
        reads: StreamReads | None,
    ) -> BatchSource:
        return BatchSource(
            selection=self.selection,
            plan=plan,
            schedule=self._schedule,
            rank=self.world.rank,
            config=self.config,
            pool=pool,
            assembler=SlotAssembler(reader, self.fields.own),
            previous=SlotAssembler(reader, self.fields.of_previous),
            texts=self._texts(reader),
            findings=FindingArrays.of(self.selection),
            part_size=self._part_size,
            counters=self.counters,
            known_masks=known_masks,
            reads=reads,
            fields=self.fields,
        )

    def _texts(self, reader: FieldReader) -> TextAssembler | None:
        """Return the fast path of a loader that reads nothing but reports from shards."""
        report = self.fields.report
        return None if report is None else TextAssembler(reader, self.selection, self.counters, report.name)

    def process_stream(
        self, epoch: int, numbers: range, known_masks: Sequence[Mapping[str, Any]]
    ) -> ProcessStream:
        """Open a stream whose micro-batches loader processes make; they start with the first one."""
        if self.processes is not None and not self.processes.fits(self.config):
            self.retire_processes()
        if self.processes is None:
            arguments = {
                "dataset": replace(self.selection, delivered=()),  # large, and counted again there
                "batch": self._given_spec(),
                "seed": self._state.seed,
                "world": self.world,
                "fields": self.fields.specs,
            }
            if self.fields.transform is not None:
                arguments |= self.fields.transform.given
            self.processes = LoaderProcesses(arguments, self.config, self.counters)
        return ProcessStream(self.processes, epoch, numbers, known_masks)

    def _given_spec(self) -> BatchSpec:
        """Return the batch spec that a loader of the same batches is made with."""
        spec = self._state.spec
        if self.fields.num_crops == 1:
            return spec
        # The plan counts samples, and a loader's batch their crops.
        return replace(spec, micro_batch_size=spec.micro_batch_size * self.fields.num_crops)

    def retire_processes(self) -> None:
        """Stop using the loader processes; `close_retired` ends them once no stream needs them."""
        if self.processes is not None:
            self._retired.append(self.processes)
            self.processes = None

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the loader processes that run."""
        every = [self.processes, *self._retired]
        return [pid for processes in every if processes is not None for pid in processes.pids]

    def close_retired(self) -> None:
        """End the loader processes that are no longer used."""
        retired, self._retired = self._retired, []
        for processes in retired:
            processes.close()

    def close(self) -> None:
        """End all loader processes, and wait a while for the prefetches of streams that ended.

        Does nothing in a forked child.
        """
        self.retire_processes()
        self.close_retired()
        servers, self.servers = self.servers, None
        if servers is not None and self.pid == os.getpid():
            servers.close()
        if self.pid == os.getpid() and not self.planner.join(_JOIN_TIMEOUT_S):
            _LOGGER.debug("prefetching continues after close, until its requests end")

    @property
    def num_buffers_allocated(self) -> int:
        """Batch buffers allocated so far."""
        shared = 0 if self.servers is None else self.servers.buffers.num_allocated
        return self.pool.num_allocated + shared

    # ---- tunables --------------------------------------------------------------------------------

    def values(self) -> dict[str, int | str]:
        """Return the tunables by name, as they were set last; of several caches or stores the largest."""
        found: dict[str, int | str] = {
            f"loader.{name}": getattr(self.config, name) for name in _LOADER_SETTINGS
        }
        for name in _CACHE_BOUNDS if self._caches else ():
            if name == "cache.max_bytes" and not any(cache.config.directory for cache in self._caches):
                continue
            found[name] = max(getattr(cache.config, name.partition(".")[2]) for cache in self._caches)
        if self._remotes:
            found["store.max_concurrency"] = max(store.max_concurrency for store in self._remotes)
        return found

    def limits(self) -> dict[str, TunableLimit]:
        """Return what each tunable may be now, with the others as they are.

        The memory of all loaders of the node stays within ``max_node_bytes``, or within half of the machine's
        if none was given. The current value is always allowed.
        """
        values = self.values()
        limits: dict[str, TunableLimit] = {}
        spare = _free_descriptors()
        for name, current in values.items():
            if isinstance(current, str):
                choices = _EXECUTIONS if sys.platform == "linux" else _EXECUTIONS[:1]
                if current == _SERVICE:  # chosen for what the other machines have
                    choices = (_SERVICE,)
                elif self.fields.transform is not None:
                    possible = self.fields.transform.executions()
                    choices = tuple(one for one in choices if one in possible)
                choices = tuple(one for one in choices if one == current or self._fits({name: one}))
                limits[name] = TunableLimit(choices=choices, is_live=False)
                continue
            is_processes = name == "loader.num_threads" and values["loader.execution"] == "workers"
            least, most = _BOUNDS[name]
            least = min(current, max(least, self._least_of_cache(name)))
            most = min(most, self._most_in_memory(name, least))
            if name in _DESCRIPTORS:
                each = _DESCRIPTORS_OF_A_PROCESS if is_processes else _DESCRIPTORS[name]
                most = min(most, current + spare // each)
            if name == "loader.num_threads":
                most = min(most, self._most_threads(is_processes=is_processes))
            if name == "cache.max_bytes":
                disks = [cache.disk for cache in self._caches]
                most = min(most, min((disk.room_bytes for disk in disks if disk is not None), default=0))
            limits[name] = TunableLimit(least=least, most=max(most, current), is_live=not is_processes)
        return limits

    def set(self, name: str, value: int | str) -> None:
        """Change one tunable.

        Raises:
            ConfigError: There is no such tunable here, or the value is outside its limits.
            ShardflowError: This is a forked child, whose loader has tunables of its own.
        """
        if self.pid != os.getpid():
            raise ShardflowError(
                "settings must be changed in the process that they belong to, got a forked child; ask the "
                "loader for its tunables there."
            )
        with self._changing:
            limits = self.limits()
            if name not in limits:
                raise ConfigError(
                    f"a setting to change must be one of {', '.join(limits)}, got {name!r}; correct it."
                )
            _check(name, value, limits[name])
            self.change({name: value})

    def change(self, changes: Mapping[str, int | str]) -> None:
        """Change settings by name, without a check; what runs follows where it can.

        Raises:
            ConfigError: A value of a cache is impossible, see `CacheConfig`.
        """
        with self._changing:
            ours = {
                name: changes[f"loader.{name}"] for name in _LOADER_SETTINGS if f"loader.{name}" in changes
            }
            others = {name: value for name, value in changes.items() if not name.startswith("loader.")}
            self.config = replace(self.config, **ours)  # type: ignore[arg-type]
            kept = {name.partition(".")[2]: int(others[name]) for name in _CACHE_BOUNDS if name in others}
            for cache in self._caches if kept else ():
                cache.change(
                    {name: one for name, one in kept.items() if name != "max_bytes" or cache.config.directory}
                )
            for store in self._remotes if "store.max_concurrency" in others else ():
                store.bound(int(others["store.max_concurrency"]))
            self.pool.bound(self.config.prefetch_bytes)
            if self.servers is not None:
                self.servers.buffers.bound(self.config.prefetch_bytes)
            self._part_size.divide_among(self.config.num_threads)
            for stream in list(self.streams):
                stream.change(self.config)
            if self.processes is not None:
                self.processes.change(self.config, others)

    @property
    def has_pending(self) -> bool:
        """Whether the newest stream was opened for an execution that is no longer configured."""
        if self.config.execution in ("threads", _SERVICE):
            return self.processes is not None
        return self.processes is None or not self.processes.fits(self.config)

    def take_back_pending(self, processes: LoaderProcesses | None) -> None:
        """Return to the execution of the running stream, because another one could not start.

        Args:
            processes: The loader processes of that stream; None for threads.
        """
        with self._changing:
            if self.processes is not None and self.processes is not processes:
                self.processes.close()
            self.processes = processes
            self._retired = [other for other in self._retired if other is not processes]
            kept: dict[str, Any] = {"execution": "threads"} if processes is None else processes.structure
            self.config = replace(self.config, **kept)

    def _least_of_cache(self, name: str) -> int:
        """Return the least of a cache's size: one block, since a cache of nothing is none."""
        configs = [cache.config for cache in self._caches]
        if name == "cache.max_bytes":
            return max((config.block_bytes for config in configs if config.directory), default=0)
        if name == "cache.ram_bytes":
            return max((config.block_bytes for config in configs if not config.directory), default=0)
        return 0

    def _num_bytes(self, changes: Mapping[str, int | str]) -> int:
        """Return the memory that the node's loaders may take with some changes."""
        ranks = max(1, self.world.ranks_per_node)
        return ranks * sum(rank_num_bytes(self.config, self.selection.datasets, changes).values())

    def _max_bytes(self) -> int:
        return self.config.max_node_bytes or machine_bytes() // 2

    def _fits(self, changes: Mapping[str, int | str]) -> bool:
        return self._num_bytes(changes) <= self._max_bytes()

    def _most_in_memory(self, name: str, least: int) -> int:
        """Return the largest value with which the node's loaders stay within their memory."""
        with_least = self._num_bytes({name: least})
        each = self._num_bytes({name: least + 1}) - with_least
        return least + max(self._max_bytes() - with_least, 0) // each if each else _BOUNDS[name][1]

    def _most_threads(self, *, is_processes: bool) -> int:
        share = max(int(num_processors()) // max(1, self.world.ranks_per_node), 1)
        waits = self.config.execution == _SERVICE or (bool(self._remotes) and not is_processes)
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
    """Return how many file descriptors this process may still open, less a reserve."""
    try:
        import resource
    except ImportError:  # not on this system: unknown
        return 1 << 20
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    try:
        num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        num_open = 0  # not Linux: unknown
    return max(soft - num_open - _SPARE_DESCRIPTORS, 0)
