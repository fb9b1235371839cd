"""Loader configuration, and the check that what it asks for fits into this machine's memory.

No setting changes which samples are in which micro-batch. Each part of a loader's memory has a bound: batches
``prefetch_bytes``, what a cache keeps and fetches its own settings, responses of a remote store the number of
concurrent requests. Their sum times the ranks of a node is checked against the node's memory before the first
byte is read.

World of a data-parallel job: the rank of this process, and the number of ranks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from shardflow.config import Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading.layout import BatchLayout
from shardflow.sampling.plan import data_parallel_rank
from shardflow.storage import ByteStore, CacheConfig, CachedStore, RemoteStore
from shardflow.telemetry.process import machine_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Data-parallel rank, and the number of ranks.

    All ranks of a tensor- or pipeline-parallel group pass the same ``World``, so that they get the same
    micro-batches.
    """

    rank: int = 0
    #: From 0.
    world_size: int = 1
    ranks_per_node: int = 0
    #  Ranks of one node, numbered consecutively; 0 if unknown. Decides which lanes a rank reads, never what
    # is
    #: in a step.

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(
                f"world_size must be at least 1, got {self.world_size}; give the number of ranks."
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank must be from 0 to world_size - 1 ({self.world_size - 1}), got {self.rank}; correct it."
            )
        if self.ranks_per_node < 0:
            raise ConfigError(
                f"ranks_per_node must be at least 0, got {self.ranks_per_node}; give the ranks of one node."
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """Read ``RANK`` and ``WORLD_SIZE`` as torchrun sets them; a world of one rank if neither is set.

        Processes that srun or mpirun started without them are refused: each would be a world of its own, and
        all of them would train on the same batches.

        ``LOCAL_WORLD_SIZE``, if set, is the number of ranks of a node; it is left out where nodes have
        different numbers, as far as ``GROUP_WORLD_SIZE`` tells.

        Args:
            environment: Variables to read; the process environment by default.

        Raises:
            ConfigError: Only one of the two is set, a value is not a number in range, or this is one of
                several processes of a launcher that sets neither.
        """
        names = ("RANK", "WORLD_SIZE")
        variables = os.environ if environment is None else environment
        found = [variables.get(name) for name in names]
        if found == [None, None]:
            _refuse_equal_batches(variables)
            return cls()
        numbers: list[int] = []
        for name, text in zip(names, found, strict=True):
            if text is None or not text.isascii() or not text.isdigit():
                raise ConfigError(
                    f"{name} must be a number when a world is given, got {text!r} (environment); "
                    "start the job with torchrun, or unset both RANK and WORLD_SIZE."
                )
            numbers.append(int(text))
        local, nodes = variables.get("LOCAL_WORLD_SIZE", ""), variables.get("GROUP_WORLD_SIZE", "")
        ranks_per_node = int(local) if local.isascii() and local.isdigit() else 0
        if nodes.isascii() and nodes.isdigit() and int(nodes) * ranks_per_node != numbers[1]:
            ranks_per_node = 0
        return cls(rank=numbers[0], world_size=numbers[1], ranks_per_node=ranks_per_node)


_LAUNCHERS: Final = (
    ("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
    ("mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
)
"""Launchers that number their processes, but not in torchrun's variables: number, and how many there are."""


def _refuse_equal_batches(variables: Mapping[str, str]) -> None:
    for launcher, rank, sizes in _LAUNCHERS:
        size = next((name for name in sizes if name in variables), None)
        if size is not None and rank in variables and variables[size] not in {"0", "1"}:
            raise ConfigError(
                f"This is process {variables[rank]} of {variables[size]} of {launcher}, but RANK and "
                f"WORLD_SIZE are not set, so all of them would get the same batches; export RANK=${rank} "
                f"WORLD_SIZE=${size} in each, start torchrun or shardflow train once a node, or pass "
                "world='single' where each process is to get everything."
            )


@dataclass(frozen=True, slots=True)
class ResolvedWorld:
    """World of a loader, and where it was found."""

    world: World
    source: str
    """Such as ``torch.distributed``; empty for a `World` that the caller passed."""
    is_default: bool = False
    """Whether nothing was passed, so that a process group which is joined later may contradict it."""

    def __str__(self) -> str:
        """Return it for a log or a message, such as ``rank 3 of 8 from torch.distributed``."""
        return f"rank {self.world.rank} of {self.world.world_size} from {self.source}"

    def check_unchanged(self) -> None:
        """Refuse a default that would be resolved to another rank by now.

        Raises:
            ConfigError: It differs.
        """
        if not self.is_default:
            return
        now, was = resolve_world(None), self.world
        if (now.world.rank, now.world.world_size) != (was.rank, was.world_size):
            raise ConfigError(
                f"The loader was made as {self}, and this process is now {now}: its batches would be those "
                "of another rank. Make the loader after torch.distributed.init_process_group(), or pass "
                "world= (a World, a DeviceMesh dimension, or 'single')."
            )


def resolve_world(world: Any = None) -> ResolvedWorld:
    """Return the data-parallel rank of this process, and where it was found. Never imports torch.

    Args:
        world: A `World`; ``"single"`` for a loader that yields everything; a torch ``DeviceMesh`` of one
            dimension; ``(mesh, "dp")`` or ``(mesh, ("replicate", "shard"))``, its data-parallel dimensions.
            None takes the rank of torch.distributed if that is imported and initialized, else the variables
            that torchrun sets, else a single process.

    Raises:
        ConfigError: It is none of these, a dimension does not exist or must be named, this process is not
            in the mesh, or the variables are wrong.
    """
    if isinstance(world, World):
        return ResolvedWorld(world, "")
    if world is None:
        return _default_world()
    if isinstance(world, str) and world == "single":
        return ResolvedWorld(World(), "world='single'")
    mesh, dimensions = world if isinstance(world, tuple) and len(world) == 2 else (world, None)
    if not callable(getattr(mesh, "get_coordinate", None)):
        shown = repr(world) if isinstance(world, str) else type(world).__name__
        raise ConfigError(
            "world must be a World, 'single', a DeviceMesh of one dimension, or (mesh, 'dp') with the name "
            f"of its data-parallel dimension, got {shown}."
        )
    return _mesh_world(mesh, dimensions)


def _default_world() -> ResolvedWorld:
    distributed = sys.modules.get("torch.distributed")
    from_environment = World.from_environment
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        world = World(rank=rank, world_size=world_size)
        if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            known = from_environment()
            if (known.rank, known.world_size) == (rank, world_size):
                world = known  # knows the ranks of a node as well
        return ResolvedWorld(world, "torch.distributed", is_default=True)
    if {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return ResolvedWorld(from_environment(), "the environment (RANK, WORLD_SIZE)", is_default=True)
    return ResolvedWorld(from_environment(), "no process group (a single process)", is_default=True)


def _mesh_world(mesh: Any, dimensions: Any) -> ResolvedWorld:
    """Return the rank along dimensions of a mesh; processes that differ in others get the same batches."""
    shape, names = tuple(mesh.shape), tuple(mesh.mesh_dim_names or ())
    shown = ", ".join(map(repr, names)) or "none has a name; give them with mesh_dim_names"
    if dimensions is None:
        if len(shape) != 1:
            raise ConfigError(
                f"A DeviceMesh of {len(shape)} dimensions ({shown}) does not say which of them is "
                "data-parallel; write world=(mesh, NAME), or world=(mesh, (NAME, NAME)) for several."
            )
        numbers = [0]
    else:
        wanted = (dimensions,) if isinstance(dimensions, str) else tuple(dimensions)
        unknown = [name for name in wanted if name not in names]
        if unknown or not wanted:
            raise ConfigError(
                f"world=(mesh, {dimensions!r}) must name dimensions of the mesh; there are {shown}."
            )
        numbers = [names.index(name) for name in wanted]
    place = mesh.get_coordinate()
    if place is None:
        raise ConfigError(
            "This process is not in the DeviceMesh of world=; make no loader here, or pass a mesh that holds "
            "all processes that train."
        )
    rank = 0
    for size, coordinate in zip(shape, place, strict=True):
        rank = rank * size + int(coordinate)
    data_rank, size = data_parallel_rank(rank, shape, numbers)
    along = ", ".join(names[number] for number in numbers) if names else "its one dimension"
    return ResolvedWorld(World(rank=data_rank, world_size=size), f"the device mesh ({along})")


_MIB = 1 << 20
_ADDRESS: Final = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]\x00-\x1f\x7f]+)(:(?P<port>[0-9]+))?", re.ASCII
)
_MAX_PORT: Final = 65_535


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """Settings of a loader, per process that iterates.

    Private memory is about ``prefetch_bytes``, plus as much again for recycled buffers, plus ``read_bytes``
    and a slice per thread, plus the batches that the consumer holds.
    """

    execution: Literal["threads", "process", "workers", "service"] = "threads"
    """Where reading and decoding run: ``threads`` of this process; one loader ``process`` with threads, for a
    trainer whose own Python is busy; ``workers``, processes with one thread each, for transforms written
    in Python; or ``service``, the data ``servers`` (`shardflow serve`). The second and third need Linux.
    """
    num_threads: Annotated[int, Bounds(1, 256)] = 2
    """Threads that read and decode; with ``workers`` the number of processes, with ``service`` the requests
    under way at each server. Threads start with the first batch and end with the iteration; processes end
    with the loader. Stored tokens alone of a local dataset use one thread.
    """
    servers: tuple[str, ...] = ()
    """Data servers of ``service``: ``HOST:PORT`` each, where a name stands for all its addresses, found anew
    every few seconds; or one ``@FILE`` with an address a line, read again when it changes."""
    server_token_file: str = ""
    """File with the token that the servers ask for; empty where they listen on this machine alone."""
    server_tls_ca: str = ""
    """PEM file of the certificate authority of the servers, which are then spoken to over TLS."""
    server_timeout_s: Annotated[float, Bounds(0.1)] = 30.0
    """Longest wait for a server, after which another one is asked; less where servers were faster lately."""
    prefetch_bytes: ByteSize = 256 * _MIB
    """Bound on the micro-batches that are being made or are ready; a single one may exceed it."""
    read_bytes: ByteSize = 8 * _MIB
    """How much a thread reads at once. Larger studies take several reads; a field is never split."""
    max_node_bytes: ByteSize = 0
    """Cap on the memory of all loaders of a node, buffers, caches in memory and bytes under way together;
    checked at the start, for as many ranks as the ``World`` says a node has. 0 is the memory of the machine,
    or of its cgroup.
    """
    wait_timeout_s: Annotated[float, Bounds(0.001)] = 300.0
    """Longest wait for a micro-batch; a longer one raises an error that names what is slow."""
    on_bad_sample: Literal["mask", "raise"] = "mask"
    """What a damaged sample becomes: a slot of weight 0 and a quarantine row, or a `SampleError`."""
    max_bad_samples: Annotated[int, Bounds(0)] = 100
    """How many samples this rank may mask over the loader's life before it raises `SampleError`."""
    max_bad_share: Annotated[float, Bounds(0.0, 1.0)] = 0.05
    """Share of an epoch's samples that this rank may mask before it raises `SampleError`; 8 are tolerated in
    any case.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "servers", check_servers(self.servers, self.execution))
        check_fields(self)
        for name in ("prefetch_bytes", "read_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 byte, got {getattr(self, name)}; correct it.")
        if self.max_node_bytes < 0:
            raise ConfigError(
                f"max_node_bytes must be at least 0 bytes, got {self.max_node_bytes}; correct it, or "
                "leave it out for the memory of the machine."
            )
        if self.execution in ("process", "workers") and not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"execution must be 'threads' on this system, got {self.execution!r}; loader processes need "
                "Linux."
            )


def check_servers(servers: Sequence[str], execution: str) -> tuple[str, ...]:
    """Return the data servers of a loader.

    Raises:
        ConfigError: There are none where the execution needs some, or an entry is no address, see
            `parse_server`.
    """
    if isinstance(servers, str) or not all(isinstance(one, str) for one in servers):
        raise ConfigError("servers must be a list of addresses, such as ['data-0:8815', 'data-1:8815'].")
    for one in servers:
        if not (one.startswith("@") and len(one) > 1):
            parse_server(one)
    if execution == "service" and not servers:
        raise ConfigError(
            'execution = "service" needs servers, such as ["data-0:8815"]; start them with: shardflow serve '
            "DATASET."
        )
    return tuple(servers)


def parse_server(address: str) -> tuple[str, int]:
    """Return host and port of a data server, of ``HOST:PORT``; an IPv6 address is in brackets.

    Raises:
        ConfigError: It is no address, no name can be looked up so, or the port is missing or none.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ConfigError(
            f"servers must hold addresses HOST:PORT, or @FILE with one a line, got {address!r}; correct it."
        )
    host, port = found["host"].strip("[]"), found["port"]
    if port is None:
        raise ConfigError(
            f"servers must hold addresses HOST:PORT, got {address!r} without a port; write the one of "
            f"--listen, such as {address}:8815."
        )
    if len(port) > len(str(_MAX_PORT)) or not 1 <= int(port) <= _MAX_PORT:
        raise ConfigError(
            f"the port of a data server must be from 1 to {_MAX_PORT}, got {address!r}; correct it."
        )
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigError(
            "the host of a data server must be a name with 1 to 63 characters between dots, got "
            f"{address!r}; correct it."
        ) from None
    return host, int(port)


def check_fits(num_bytes: int, what: str, remedy: str) -> None:
    """Refuse sizes that cannot be allocated, before an allocator fails or the process is killed.

    Args:
        num_bytes: How much is needed at once.
        what: What needs it.
        remedy: What to change.

    Raises:
        ConfigError: This machine has less memory.
    """
    if num_bytes > machine_bytes():
        raise ConfigError(
            f"{what} must fit into the {machine_bytes() / 1e9:.1f} GB of memory of this machine, got "
            f"{num_bytes / 1e9:.1f} GB; {remedy}."
        )


def check_layout(layout: BatchLayout) -> None:
    """Refuse a micro-batch that does not fit; see `check_fits`."""
    if layout.num_bytes > machine_bytes():
        largest = max(layout.arrays, key=lambda array: array.num_bytes)
        what = f"a micro-batch with {largest.name} {largest.dtype} {list(largest.shape)}"
        check_fits(layout.num_bytes, what, "lower its samples or tokens, or the sizes of its fields")


def rank_num_bytes(
    config: LoaderConfig, datasets: Sequence[Dataset], changes: Mapping[str, int | str] | None = None
) -> dict[str, int]:
    """Return the most bytes that the loader of one rank takes, by what for.

    Not included: batches that the consumer holds, a micro-batch that exceeds ``prefetch_bytes`` alone, the
    samples table (mapped, and shared by the ranks of a node) and the interpreter itself.

    Args:
        config: The loader's.
        datasets: What it reads.
        changes: Settings by name, such as ``cache.ram_bytes``, to assume instead of the current ones.
    """
    changes = changes or {}

    def number(settings: LoaderConfig | CacheConfig, name: str) -> int:
        table = "loader" if settings is config else "cache"
        return int(changes.get(f"{table}.{name}", getattr(settings, name)))

    num_threads = number(config, "num_threads")
    num_readers = num_threads if changes.get("loader.execution", config.execution) == "workers" else 1
    caches = {id(each.cache): each.cache.config for each in datasets if each.cache is not None}.values()
    ahead = max((number(cache, "read_ahead_bytes") for cache in caches), default=0)
    remote = {id(store): store for store in map(_origin, datasets) if isinstance(store, RemoteStore)}.values()
    at_once = changes.get("store.max_concurrency")
    answers = sum(store.answer_bytes(None if at_once is None else int(at_once)) for store in remote)
    return {
        # The pool may hold as much again for the next batches.
        "prefetch_bytes, twice": 2 * number(config, "prefetch_bytes"),
        "read_bytes of each thread": num_threads * number(config, "read_bytes"),
        "ram_bytes of the cache": num_readers * sum(number(cache, "ram_bytes") for cache in caches),
        "read_ahead_bytes of the cache": num_readers * ahead,
        "answers of the store": num_readers * answers,
    }


def check_node(config: LoaderConfig, datasets: Sequence[Dataset], world: World) -> None:
    """Refuse settings with which the loaders of a node could take more memory than they may.

    Args:
        config: The loader's; ``max_node_bytes`` is the cap, by default the memory of the machine or its
            cgroup.
        datasets: What it reads.
        world: Gives the number of ranks of a node; one if it is unknown.

    Raises:
        ConfigError: The sum is above the cap, or the cap above the memory.
    """
    room, cap = machine_bytes(), config.max_node_bytes
    if cap > room:
        raise ConfigError(
            f"max_node_bytes must be at most the {_gb(room)} of memory of this machine or its cgroup, got "
            f"{_gb(cap)}; lower it."
        )
    parts = rank_num_bytes(config, datasets)
    num_ranks = max(1, world.ranks_per_node)
    total = num_ranks * sum(parts.values())
    if total <= (cap or room):
        return
    what = "max_node_bytes" if cap else "the memory of this machine or its cgroup"
    each = ", ".join(f"{_gb(num_bytes)} {name}" for name, num_bytes in parts.items() if num_bytes)
    raise ConfigError(
        f"the loaders of a node must take at most {_gb(cap or room)} ({what}), got {_gb(total)}: {num_ranks} "
        f"rank(s) with {each}; lower the largest of these{', or raise max_node_bytes' if cap else ''}."
    )


def _origin(dataset: Dataset) -> ByteStore:
    return dataset.store.origin if isinstance(dataset.store, CachedStore) else dataset.store


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
