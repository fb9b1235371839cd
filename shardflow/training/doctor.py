"""The settings doctor: checks a machine, an environment and a run's settings before the job starts.

`look_around` takes a snapshot of the machine; every rule is a function of it that says what must hold, what
was found, and the fix. Needs no torch. The tables of variables are in `nccl_variables`.
"""

from __future__ import annotations

import os
import platform
import pyexpat
import re
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

from shardflow.telemetry.process import machine_bytes, num_processors
from shardflow.training.config import TrainConfig
from shardflow.training.nccl_variables import DEBUGGING, OLD_NAMES, RANGES, unread_names

Level = Literal["ok", "warning", "error"]
"""``error``: the job will fail, hang, or do something else than was meant. ``warning``: it may, or it wastes
something."""

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_CONTAINER_SHM_BYTES: Final = 64 * _MIB
"""What a container has by default."""
_SHM: Final = "/dev/shm"  # noqa: S108 - it is asked for its size
_SHM_PER_RANK_BYTES: Final = 256 * _MIB
_FILES_PER_RANK: Final = 1024
_PROCESSES_PER_RANK: Final = 256
_DEFAULT_BUFFER_BYTES: Final = 256 * _MIB
"""Of loader.prefetch_bytes, and of loader.pinned_bytes."""
_LEAST_RUN_BYTES: Final = _GIB
"""For a run without a checkpoint yet: ledger, metrics, a small model."""
_MOST_SOCKETS: Final = 64
"""Of NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD."""
_IB_UNIT_S: Final = 4.096e-6
_IB_TIMEOUT, _IB_RETRIES = 20, 7
"""NCCL's defaults since 2.23."""
_BUFFER_NAMES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FLOORS: Final = {
    "torch": ("2.10.0", "CVE-2026-24747: a stranger's checkpoint corrupts the heap, weights_only or not"),
    "pydicom": ("3.0.2", "CVE-2026-32711: a DICOMDIR leads out of its folder"),
}
"""Package: first sound version, and what is wrong below it. pydicom 2.4.5 is sound too, but too old."""
_NO_SOUND_RELEASE: Final = {
    "pylibjpeg-openjpeg": (
        "OSV-2025-219 in the OpenJPEG that it bundles: a heap overflow while decoding",
        "decode JPEG 2000 of others in packing alone: its processes may be killed",
    ),
    "python-gdcm": (
        "CVE-2026-3650: one malformed file fills the memory",
        "uninstall it: shardflow does not use it",
    ),
}
_EXPAT: Final = "2.6.0"
_OF_TORCHRUN: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LEAST_SHUTDOWN_S: Final = 30
_PACKAGES: Final = ("torch", "pydicom", "pylibjpeg-openjpeg", "python-gdcm")
_VALUES: Final[tuple[tuple[str, str, Level, str, str, str], ...]] = (
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        "1",
        "error",
        "be unset in production",
        "1: the processor waits in every collective",
        "unset it; timeouts.steady_s bounds an exchange",
    ),
    (
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "warning",
        "be 1: it ends a process whose NCCL thread hangs",
        "0",
        "unset it",
    ),
    *(
        (name, "1", "warning", "be 0 or unset in production", f"1: {effect}", "unset it")
        for name, effect in DEBUGGING.items()
    ),
)
"""Variables that are wrong at one value: name, value, level, what must hold, what was found, the fix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one rule found."""

    level: Level
    topic: str
    """A variable, a limit, a package."""
    must: str
    """What must hold."""
    found: str
    fix: str
    """What to do; empty where all is well."""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """A machine, an environment, and what is to run there."""

    environment: Mapping[str, str] = field(default_factory=dict)
    config: TrainConfig | None = None
    """The run's settings; None where none were given."""
    num_nodes: int = 1
    ranks_per_node: int = 1
    interfaces: tuple[str, ...] = ("lo", "eth0")
    hcas: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters."""
    limits: Mapping[str, int | None] = field(default_factory=dict)
    """Soft limits by name (``nofile``, ``memlock``, ``nproc``); None is unlimited."""
    num_cores: float = 8.0
    """Cores this process may use: of its affinity, and of its cgroup's quota."""
    memory_bytes: int = 64 << 30
    """Memory that the ranks of this machine may fill: of the machine and of the cgroup."""
    shm_bytes: int | None = 32 << 30
    """Size of /dev/shm; None where there is none."""
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    """Free space by what it is for: ``run.output``, ``cache.directory`` (its blocks count as free)."""
    checkpoint_bytes: int | None = None
    """Size of the run's newest checkpoint; None where there is none yet."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of installed packages; those that are absent are left out."""


def look_around(
    config: TrainConfig | None = None,
    *,
    num_nodes: int = 1,
    ranks_per_node: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Surroundings:
    """Collect what the rules look at, on this machine.

    Args:
        config: The run's settings.
        num_nodes: Machines of the job.
        ranks_per_node: Ranks on each; by default the GPUs of this machine, at least one.
        environment: Variables to look at; those of this process by default.
    """
    environment = dict(os.environ if environment is None else environment)
    return Surroundings(
        environment=environment,
        config=config,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node or max(1, len(list(Path("/dev").glob("nvidia[0-9]*")))),
        interfaces=_names(Path("/sys/class/net")),
        hcas=_names(Path("/sys/class/infiniband")),
        limits={
            "nofile": _soft_limit(resource.RLIMIT_NOFILE),
            "memlock": _soft_limit(resource.RLIMIT_MEMLOCK),
            "nproc": _soft_limit(resource.RLIMIT_NPROC),
        },
        num_cores=num_processors(),
        memory_bytes=machine_bytes(),
        shm_bytes=_total_bytes(Path("/dev/shm")),  # noqa: S108 - it is asked for its size
        free_bytes={} if config is None else _free_of(config),
        checkpoint_bytes=None if config is None else _newest_checkpoint_bytes(config.run.output),
        versions=_installed_versions(),
    )


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _total_bytes(folder: Path) -> int | None:
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def _free_of(config: TrainConfig) -> dict[str, int]:
    free = {"run.output": _free_bytes(config.run.output)}
    folder = config.cache.directory
    if folder is not None:
        held = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        free["cache.directory"] = _free_bytes(folder) + held
    return free


def _free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _newest_checkpoint_bytes(run: Path) -> int | None:
    names = sorted(path for path in (run / "checkpoints").glob("step-*") if path.is_dir())
    return sum(path.stat().st_size for path in names[-1].iterdir()) if names else None


def _installed_versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "expat": ".".join(map(str, pyexpat.version_info)),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def examine(around: Surroundings, *, allowed: Iterable[str] = ()) -> list[Finding]:
    """Apply all rules.

    Args:
        around: What to look at.
        allowed: Names of variables that are left alone, such as a plugin's.
    """
    unread = (_finding("error", *found) for found in unread_names(around.environment, allowed))
    rules = (
        _variables,
        _torch_modes,
        _links,
        _interfaces,
        _adapters,
        _limits,
        _cores,
        _memory,
        _disks,
        _versions,
        _launcher,
        _ranks,
    )
    return [*unread, *(finding for rule in rules for finding in rule(around))]


def _finding(level: Level, topic: str, must: str, found: str, fix: str) -> Finding:
    return Finding(level=level, topic=topic, must=must, found=found, fix=fix)


def _check(holds: bool, topic: str, must: str, found: str, fix: str, level: Level = "error") -> Finding:
    return _finding("ok", topic, must, found, "") if holds else _finding(level, topic, must, found, fix)


def _variables(around: Surroundings) -> Iterator[Finding]:
    environment = around.environment
    for name in sorted(OLD_NAMES.keys() & environment.keys()):
        fix = f"say {OLD_NAMES[name]}" if OLD_NAMES[name] else "unset it"
        yield _finding("warning", name, "have the name of today", "an old name, or one that is ignored", fix)
    for name in sorted(RANGES.keys() & environment.keys()):
        if not RANGES[name].holds(environment[name]):
            must = f"be {RANGES[name].describe()}"
            yield _finding("error", name, must, repr(environment[name]), "correct or unset it")
    for name, value, level, must, found, fix in _VALUES:
        # Of torch's variables the old names, without TORCH_, still count.
        if environment.get(name, environment.get(name.removeprefix("TORCH_"))) == value:
            yield _finding(level, name, must, found, fix)
    debug = environment.get("NCCL_DEBUG", "")
    if debug.upper() in {"INFO", "TRACE"}:
        fix = "set it to WARN: every rank writes"
        yield _finding("warning", "NCCL_DEBUG", "be WARN in production", debug, fix)
    file = environment.get("NCCL_DEBUG_FILE", "")
    if file and not file.startswith("/dev/") and not ("%p" in file and "%h" in file):
        found = "a name without %h and %p: ranks overwrite each other"
        must = "differ for each process"
        yield _finding("warning", "NCCL_DEBUG_FILE", must, found, "put %h.%p into the name")


def _torch_modes(around: Surroundings) -> Iterator[Finding]:
    environment, name = around.environment, "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    mode = environment.get(name, environment.get("NCCL_ASYNC_ERROR_HANDLING", "3"))
    records = [environment[buffer] for buffer in _BUFFER_NAMES if buffer in environment]
    fix = "unset it (3 is the default)"
    if mode == "0":
        yield _finding("error", name, "end a rank whose collective failed", "0: it waits for ever", fix)
    elif mode == "1" and records and records[0] != "0":
        found = "1, which aborts before the record is written"
        yield _finding("warning", name, "be 3 beside the flight recorder", found, fix)
    if environment.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1" and records and records[0] == "0":
        yield _finding(
            "warning",
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
            "have a buffer to write out",
            "a flight recorder of size 0",
            "set TORCH_FR_BUFFER_SIZE=2000, or unset both: training sets them",
        )


def _links(around: Surroundings) -> Iterator[Finding]:
    """Check what variables of sockets and InfiniBand do together."""
    defaults = {
        "NCCL_SOCKET_NTHREADS": 1,
        "NCCL_NSOCKS_PERTHREAD": 1,
        "NCCL_IB_TIMEOUT": _IB_TIMEOUT,
        "NCCL_IB_RETRY_CNT": _IB_RETRIES,
    }
    texts = [around.environment.get(name, str(default)) for name, default in defaults.items()]
    if not all(text.isdigit() for text in texts):
        return  # reported by its range
    threads, each, exponent, retries = map(int, texts)
    if threads * each > _MOST_SOCKETS:
        topic = "NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD"
        yield _finding(
            "error", topic, f"be at most {_MOST_SOCKETS}", str(threads * each), "lower one of them"
        )
    steady_s = around.config.timeouts.steady_s if around.config else 100.0
    patience_s = _IB_UNIT_S * 2 ** min(exponent, 31) * retries
    if patience_s > steady_s and {"NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"} & around.environment.keys():
        yield _finding(
            "warning",
            "NCCL_IB_TIMEOUT",
            f"give a link up before timeouts.steady_s ({steady_s:g} s)",
            f"{patience_s:.0f} s with NCCL_IB_RETRY_CNT={retries}: the exchange ends first",
            f"use {_IB_TIMEOUT} and {_IB_RETRIES} (30 s), or raise timeouts.steady_s",
        )


def matching(pattern: str, names: tuple[str, ...]) -> list[str]:
    """Select names as NCCL does: prefixes by commas, ``=`` for whole names, ``^`` in front excludes."""
    excludes = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    is_exact = pattern.startswith("=")
    # Exact names are written =a,b as well as =a,=b.
    wanted = [part.removeprefix("=").split(":")[0] for part in pattern.split(",") if part]
    hits = [
        name for name in names if any(name == part if is_exact else name.startswith(part) for part in wanted)
    ]
    return [name for name in names if name not in hits] if excludes else hits


def _interfaces(around: Surroundings) -> Iterator[Finding]:
    present = ", ".join(around.interfaces)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        pattern = around.environment.get(name)
        if pattern is None:
            continue
        # gloo takes whole names, by commas.
        hits = matching(pattern if name.startswith("NCCL") else f"={pattern}", around.interfaces)
        if around.num_nodes > 1 and set(hits) == {"lo"}:
            must = "name an interface that the other machines reach"
            yield _finding("error", name, must, "the loopback", f"name one of {present}")
        else:
            found = ", ".join(hits) or f"{pattern!r} among {present}"
            yield _check(bool(hits), name, "name a network interface of this machine", found, "correct it")
    usable = [
        name
        for name in around.interfaces
        if name != "lo" and not name.startswith(("docker", "veth", "br-", "virbr"))
    ]
    if around.num_nodes > 1 and len(usable) > 1 and "GLOO_SOCKET_IFNAME" not in around.environment:
        yield _finding(
            "warning",
            "GLOO_SOCKET_IFNAME",
            "name the interface where machines have several networks",
            f"it unset, and {', '.join(usable)}",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )


def _adapters(around: Surroundings) -> Iterator[Finding]:
    pattern = around.environment.get("NCCL_IB_HCA")
    hits = [] if pattern is None else matching(pattern, around.hcas)
    if pattern is not None and not hits:
        found = f"{pattern!r} among {', '.join(around.hcas) or 'none'}"
        fix = "correct it, or unset it: NCCL finds the adapters"
        yield _finding("error", "NCCL_IB_HCA", "name an adapter of this machine", found, fix)
    elif pattern is not None and "=" not in pattern and len(hits) > len(pattern.split(",")):
        found, fix = f"prefixes that match {', '.join(hits)}", "put = in front: mlx5_1 is mlx5_10 too"
        yield _finding("warning", "NCCL_IB_HCA", "name adapters exactly", found, fix)
    if around.hcas and around.num_nodes > 1 and around.limits.get("memlock") is not None:
        yield _finding(
            "error",
            "ulimit -l",
            "be unlimited where NCCL registers memory with an adapter",
            f"{around.limits['memlock']} bytes",
            "ulimit -l unlimited; of a service LimitMEMLOCK=infinity, of a container --ulimit memlock=-1",
        )


def _limits(around: Surroundings) -> Iterator[Finding]:
    world_size = around.num_nodes * around.ranks_per_node
    # A connection to every other rank, and the shards that are open.
    for name, option, needed in (
        ("nofile", "ulimit -n", _FILES_PER_RANK + 2 * world_size),
        ("nproc", "ulimit -u", _PROCESSES_PER_RANK * around.ranks_per_node),
    ):
        limit = around.limits.get(name)
        found = "unlimited" if limit is None else str(limit)
        fix = f"{option} {max(needed, 65536)}"
        yield _check(limit is None or limit >= needed, option, f"be at least {needed}", found, fix)


def _cores(around: Surroundings) -> Iterator[Finding]:
    threads = around.config.loader.num_threads if around.config else 2
    needed = 1 + threads
    each = around.num_cores / around.ranks_per_node
    yield _check(
        each >= needed,
        "CPU cores",
        f"be at least {needed} for each rank: one for the loop, {threads} for the loader",
        f"{each:.1f} ({around.num_cores:g} for {around.ranks_per_node} ranks, by affinity and cgroup)",
        "give the job more cores, or lower loader.num_threads",
        "warning",
    )
    text = around.environment.get("OMP_NUM_THREADS", "")
    if text.isdigit() and int(text) * around.ranks_per_node > around.num_cores:
        must = f"times {around.ranks_per_node} ranks be at most {around.num_cores:g} cores"
        yield _finding("warning", "OMP_NUM_THREADS", must, text, "lower it; torchrun sets 1")


def _memory(around: Surroundings) -> Iterator[Finding]:
    needed, shm = _SHM_PER_RANK_BYTES * around.ranks_per_node, around.shm_bytes
    must, found = f"hold at least {_size(needed)}", "none" if shm is None else _size(shm)
    if shm is None or shm <= _CONTAINER_SHM_BYTES:
        fix = f"--shm-size={needed >> 20}m, or an emptyDir of medium Memory: a container has 64 MiB"
        yield _finding("error", _SHM, must, found, fix)
    else:
        fix = f"mount -o remount,size={needed >> 20}m /dev/shm"
        yield _check(shm >= needed, _SHM, must, found, fix, "warning")
    config = around.config
    each = 2 * _DEFAULT_BUFFER_BYTES
    if config is not None:
        each = config.loader.prefetch_bytes + config.loader.pinned_bytes + config.cache.ram_bytes
    buffers = each * around.ranks_per_node
    yield _check(
        buffers <= around.memory_bytes // 2,
        "memory",
        f"hold the ranks' buffers, {_size(buffers)}, in half of it: pinned pages cannot be swapped",
        _size(around.memory_bytes),
        "lower loader.prefetch_bytes, loader.pinned_bytes or cache.ram_bytes",
    )


def _disks(around: Surroundings) -> Iterator[Finding]:
    config = around.config
    if config is None:
        return
    needed, why = _LEAST_RUN_BYTES, "ledger, metrics and a first checkpoint"
    if around.checkpoint_bytes is not None:
        # Those that are kept exist already; one more is written before one is removed.
        needed = max(_LEAST_RUN_BYTES, 2 * around.checkpoint_bytes)
        why = f"a new checkpoint of {_size(around.checkpoint_bytes)} is written before an old one goes"
    free = around.free_bytes.get("run.output")
    if free is not None:
        fix = "make room, lower run.keep_last, or choose another disk"
        yield _check(free >= needed, "run.output", f"have {_size(needed)} free: {why}", _size(free), fix)
    free = around.free_bytes.get("cache.directory")
    if free is not None:
        needed = config.cache.max_bytes + config.cache.min_free_bytes
        must = f"have {_size(needed)} free: cache.max_bytes, and cache.min_free_bytes beside it"
        fix = "lower cache.max_bytes: it will not get there"
        yield _check(free >= needed, "cache.directory", must, _size(free), fix, "warning")


def _versions(around: Surroundings) -> Iterator[Finding]:
    for package, (floor, hole) in _FLOORS.items():
        found = around.versions.get(package)
        if found is not None:
            is_sound = _numbers(found) >= _numbers(floor)
            must = f"be at least {floor}" + ("" if is_sound else f" ({hole})")
            yield _check(is_sound, package, must, found, f"pip install '{package}>={floor}'")
    for package, (hole, fix) in _NO_SOUND_RELEASE.items():
        if package in around.versions:
            yield _finding("warning", package, f"be free of {hole}", around.versions[package], fix)
    expat = around.versions.get("expat")
    if expat is not None and _numbers(expat) < _numbers(_EXPAT):
        must = f"be at least {_EXPAT} (one large token takes quadratic time)"
        fix = "take a newer Python; shardflow refuses DTDs and entities by itself"
        yield _finding("warning", "expat", must, expat, fix)


def _launcher(around: Surroundings) -> Iterator[Finding]:
    environment = around.environment
    stale = [name for name in _OF_TORCHRUN if name in environment]
    if stale and "TORCHELASTIC_RUN_ID" not in environment:
        found = "them set already, as by another launcher or an older shell"
        fix = f"unset {' '.join(stale)}"
        yield _finding("warning", ", ".join(stale), "be set by torchrun alone", found, fix)
    restarts = environment.get("PET_MAX_RESTARTS", "0")
    shared = environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    if restarts.isdigit() and int(restarts) > 0 and shared != "1":
        yield _finding(
            "error",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            "be 1 where torchrun restarts ranks (pytorch #135712)",
            "it unset: the first restart after a kill fails",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or start shardflow train",
        )
    timeout = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    if timeout.isdigit() and int(timeout) < _LEAST_SHUTDOWN_S:
        must = f"be at least {_LEAST_SHUTDOWN_S}: a step and a checkpoint must fit in before SIGKILL"
        fix = "raise it, and the scheduler's grace time with it"
        yield _finding("warning", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", must, timeout, fix)


def _ranks(around: Surroundings) -> Iterator[Finding]:
    if around.config is None:
        return
    world_size = around.num_nodes * around.ranks_per_node
    steps = around.config.batch.micro_batches_per_step
    must, found = f"be at most batch.micro_batches_per_step ({steps}), and divide it", str(world_size)
    if world_size > steps:
        yield _finding("error", "ranks", must, found, "start fewer, or raise it for a new run")
    else:
        lost = 1 - steps / (-(-steps // world_size) * world_size)
        if lost:
            found = f"{world_size}: {lost:.0%} of the work are padding micro-batches"
        yield _check(not lost, "ranks", must, found, "start a divisor", "warning")


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"
