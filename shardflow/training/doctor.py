"""Preflight checks of a machine, its environment variables and a run's settings.

`inspect_environment` takes a snapshot of the machine; each rule is a function of that snapshot and yields
findings: what must hold, what was found, and the fix. Needs no torch.

The tables of environment variables come from the sources of NCCL (docs/userguide/source/env.rst of
NVIDIA/nccl at 0186f08, 2.32, with the old names of variables; ``_UNDOCUMENTED``: NCCL_PARAM lines of its src)
and of torch (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp of pytorch/pytorch at 4c2f280). Not every name
has a rule; a name that is not listed here is reported as a mistake.
"""

from __future__ import annotations

import difflib
import os
import platform
import pyexpat
import re
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from shardflow.errors import ConfigError
from shardflow.telemetry.process import machine_bytes, num_processors
from shardflow.training.config import TrainConfig

_NCCL: Final = """
ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_MODE COLLNET_ENABLE COLLNET_NODE_THRESHOLD
COMM_BLOCKING COMM_ID CONF_FILE CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE
DEBUG_LEVELS DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DMABUF_ENABLE ENV_PLUGIN
GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GIN_PLUGIN
GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE
IB_AR_THRESHOLD IB_DISABLE IB_ECE_ENABLE IB_EVENT_BASED_LB IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS
IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY IB_PKEY_VALUE IB_QPS_PER_CONNECTION IB_RAIL_POLICY IB_RETRY_CNT
IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT
IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET LAUNCH_MODE
LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LOCAL_REGISTER MAX_CTAS MEM_SYNC_DOMAIN
MIN_CTAS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID MULTI_RANK_GPU_ENABLE NET NETDEVS_POLICY NET_GDR_C2C
NET_GDR_LEVEL NET_GDR_READ NET_MERGE_LEVEL NET_MERGE_POLICY NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS
NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_ENABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE
P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROFILER_PLUGIN PROTO PSK PXN_C2C
PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR RMA_EAGER_INIT RMA_PLUGIN RUNTIME_CONNECT
SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME SOCKET_MAGIC SOCKET_NTHREADS
SOCKET_POLL_TIMEOUT_MSEC SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SYM_GIN_KERNELS_ENABLE TOPO_DUMP_FILE
TOPO_FILE TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD WIN_ENABLE
"""
_UNDOCUMENTED: Final = "IB_ROUTABLE_FLID_GID_INDEX IB_USE_INLINE SHARP_MAX_COMMS"
_TORCH: Final = """
ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BCAST_UNIQUEID BLOCKING_WAIT COORD_CHECK_MILSEC CUDA_EVENT_CACHE
DEBUG_INFO_PIPE_FILE DEBUG_INFO_TEMP_FILE DESYNC_DEBUG DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING
HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK NONBLOCKING_TIMEOUT
PROPAGATE_ERROR RANKS_PER_ROOT RETHROW_CUDA_ERRORS SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
TRACE_BUFFER_SIZE USE_TENSOR_REGISTER_ALLOCATOR_HOOK WAIT_TIMEOUT_DUMP_MILSEC
"""

KNOWN: Final = frozenset(
    [f"NCCL_{name}" for name in f"{_NCCL} {_UNDOCUMENTED}".split()]
    + [f"TORCH_NCCL_{name}" for name in _TORCH.split()]
)
"""Names that have an effect today."""

INVENTED: Final = {
    "NCCL_TIMEOUT": "timeouts.steady_s of the run; NCCL itself has no such variable",
    "TORCH_NCCL_BLOCKING_WAIT_TIMEOUT_MS": "timeouts.steady_s of the run; torch has no such variable",
}
"""Names found in many scripts that nothing reads, with the setting that does what they promise."""

OLD_NAMES: Final = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_CHECKS_DISABLE": "",
    "NCCL_CHECK_POINTERS": "NCCL_CHECK_MODE=DEBUG_LOCAL",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_LL_THRESHOLD": "",
    "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_CTAS",
    "NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_CTAS",
    "NCCL_SINGLE_RING_THRESHOLD": "",
    "NCCL_TREE_THRESHOLD": "",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
}
"""Aliases, deprecated and removed names, each with its current name; empty where there is none."""

DEBUGGING: Final = {
    "NCCL_IB_DISABLE": "InfiniBand and RoCE stay unused",
    "NCCL_P2P_DISABLE": "GPUs of a machine cannot access each other's memory",
    "NCCL_SHM_DISABLE": "GPUs of a machine communicate over the network",
}
"""Debugging switches that slow a job down when they are left on: 1 is a warning."""


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a variable accepts."""

    minimum: int = 0
    maximum: int | None = None
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describe the range in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.maximum is None:
            return f"an integer of at least {self.minimum}"
        return f"an integer from {self.minimum} to {self.maximum}"

    def holds(self, text: str) -> bool:
        """Return whether a value is accepted."""
        if self.choices:
            return text.upper() in self.choices
        if not re.fullmatch(r"-?\d+", text):
            return False
        return self.minimum <= int(text) <= (sys.maxsize if self.maximum is None else self.maximum)


_SWITCHES: Final = """
COLLNET_ENABLE CUMEM_ENABLE CUMEM_HOST_ENABLE DMABUF_ENABLE GDRCOPY_ENABLE GRAPH_MIXING_SUPPORT
GRAPH_REGISTER IB_DISABLE IB_ECE_ENABLE IB_MERGE_NICS IB_RETURN_ASYNC_EVENTS IB_SPLIT_DATA_ON_QPS
IGNORE_CPU_AFFINITY LOCAL_REGISTER NVB_DISABLE OOB_NET_ENABLE P2P_DISABLE PXN_DISABLE RAS_ENABLE
RUNTIME_CONNECT SET_THREAD_NAME SHM_DISABLE
"""
RANGES: Final = {
    **{f"NCCL_{name}": Range(0, 1) for name in _SWITCHES.split()},
    "NCCL_CGA_CLUSTER_SIZE": Range(0, 8),
    "NCCL_CROSS_NIC": Range(0, 2),
    "NCCL_DEBUG": Range(choices=("VERSION", "WARN", "ATTN", "INFO", "TRACE")),
    # NCCL accepts 0 as infinite: a dead link is then never detected.
    "NCCL_IB_TIMEOUT": Range(1, 31),
    "NCCL_IB_RETRY_CNT": Range(0, 7),
    "NCCL_IB_QPS_PER_CONNECTION": Range(1, 128),
    "NCCL_IB_PCI_RELAXED_ORDERING": Range(0, 2),
    "NCCL_MAX_CTAS": Range(1, 64),
    "NCCL_MIN_CTAS": Range(1, 64),
    "NCCL_MNNVL_ENABLE": Range(0, 2),
    "NCCL_NTHREADS": Range(choices=("64", "128", "256", "512")),
    "NCCL_NVLS_ENABLE": Range(0, 2),
    "NCCL_P2P_PXN_LEVEL": Range(0, 2),
    "NCCL_SOCKET_FAMILY": Range(choices=("AF_INET", "AF_INET6")),
    "NCCL_SOCKET_NTHREADS": Range(1, 16),
    "NCCL_SOCKET_RETRY_CNT": Range(1),
    "NCCL_SOCKET_RETRY_SLEEP_MSEC": Range(1),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Range(0, 3),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": Range(1),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": Range(0),
}
"""Value ranges, for the variables that have one in the sources above."""


def unread_names(
    environment: Iterable[str], allowed: Iterable[str] = ()
) -> Iterator[tuple[str, str, str, str]]:
    """Find variables of NCCL and torch that nothing reads.

    Args:
        environment: Names of all variables.
        allowed: Names to ignore, such as a plugin's.

    Yields:
        The name, what must hold, what was found, and the fix.
    """
    skipped = {*allowed, *KNOWN, *OLD_NAMES}
    for name in sorted(environment):
        if not name.startswith(("NCCL_", "TORCH_NCCL_")) or name in skipped:
            continue
        if name in INVENTED:
            yield name, "be unset: nothing reads it", "it set", f"use {INVENTED[name]}"
            continue
        near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.6)
        fix = f"unset it{f', or use {near[0]}' if near else ''}; --allow {name} if a plugin reads it"
        yield name, "be a variable that NCCL or torch reads", "a name unknown to both", fix


def refuse_unknown_names(environment: Mapping[str, str]) -> None:
    """Refuse to start if a variable of NCCL or torch is set that nothing reads.

    Raises:
        ConfigError: There is one; the message suggests the closest real name. ``SHARDFLOW_ALLOW_VARIABLES``
            is a comma-separated list of names to ignore.
    """
    allowed = environment.get("SHARDFLOW_ALLOW_VARIABLES", "").split(",")
    for name, must, found, fix in unread_names(environment, allowed):
        raise ConfigError(f"{name} must {must}, got {found}; {fix}.")


Level = Literal["ok", "warning", "error"]
"""``error``: the job will fail, hang, or do something other than intended. ``warning``: it may, or it wastes
resources."""

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_CONTAINER_SHM_BYTES: Final = 64 * _MIB
"""Default of container runtimes."""
_SHM: Final = "/dev/shm"  # noqa: S108 - only its size is read
_SHM_PER_RANK_BYTES: Final = 256 * _MIB
_FILES_PER_RANK: Final = 1024
_PROCESSES_PER_RANK: Final = 256
_DEFAULT_BUFFER_BYTES: Final = 2 * 256 * _MIB
"""Defaults of loader.prefetch_bytes and loader.pinned_bytes together."""
_DEFAULT_STEADY_S: Final = 100.0
_LEAST_RUN_BYTES: Final = _GIB
"""Ledger, metrics and a small model, for a run without a checkpoint yet."""
_MOST_SOCKETS: Final = 64
"""Limit of NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD."""
_IB_UNIT_S: Final = 4.096e-6
_IB_TIMEOUT, _IB_RETRIES = 20, 7
"""NCCL's defaults since 2.23."""
_LEAST_SHUTDOWN_S: Final = 30
_OF_TORCHRUN: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BUFFERS: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FLOORS: Final = {
    "torch": ("2.10.0", "CVE-2026-24747: an untrusted checkpoint corrupts the heap, even with weights_only"),
    "pydicom": ("3.0.2", "CVE-2026-32711: a DICOMDIR escapes its folder"),
}
"""Package: first safe version, and the vulnerability below it. pydicom 2.4.5 is safe too, but too old."""
_NO_SAFE_RELEASE: Final = {
    "pylibjpeg-openjpeg": (
        "OSV-2025-219 in its bundled OpenJPEG: a heap overflow while decoding",
        "decode untrusted JPEG 2000 only in packing, whose processes may be killed",
    ),
    "python-gdcm": (
        "CVE-2026-3650: one malformed file exhausts memory",
        "uninstall it: shardflow does not use it",
    ),
}
_EXPAT: Final = "2.6.0"
_VALUES: Final[tuple[tuple[str, str, Level, str, str, str], ...]] = (
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        "1",
        "error",
        "be unset in production",
        "1: the CPU blocks in every collective",
        "unset it; timeouts.steady_s bounds an exchange",
    ),
    (
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "warning",
        "be 1, so that a process whose NCCL thread hangs is ended",
        "0",
        "unset it",
    ),
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "error",
        "end a rank whose collective failed",
        "0: it waits forever",
        "unset it (3 is the default)",
    ),
    *(
        ("NCCL_DEBUG", level, "warning", "be WARN in production", level, "set it to WARN: every rank writes")
        for level in ("INFO", "TRACE")
    ),
    *(
        (name, "1", "warning", "be 0 or unset in production", f"1: {effect}", "unset it")
        for name, effect in DEBUGGING.items()
    ),
)
"""Variables with one wrong value: name, value, level, what must hold, what was found, the fix."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one rule."""

    level: Level
    topic: str
    """A variable, a limit, a package."""
    must: str
    """What must hold."""
    found: str
    fix: str
    """What to do; empty if the level is ``ok``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Snapshot of a machine, its environment variables, and the run planned for it."""

    variables: Mapping[str, str] = field(default_factory=dict)
    config: TrainConfig | None = None
    """The run's settings, if given."""
    num_nodes: int = 1
    ranks_per_node: int = 1
    interfaces: tuple[str, ...] = ("lo", "eth0")
    hcas: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters."""
    limits: Mapping[str, int | None] = field(default_factory=dict)
    """Soft limits by name (``nofile``, ``memlock``, ``nproc``); None is unlimited."""
    num_cores: float = 8.0
    """Cores available to this process, by affinity and cgroup quota."""
    memory_bytes: int = 64 << 30
    """Memory available to the ranks of this machine, by machine and cgroup."""
    shm_bytes: int | None = 32 << 30
    """Size of /dev/shm; None if there is none."""
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    """Free space by purpose: ``run.output``, ``cache.directory`` (its blocks count as free)."""
    checkpoint_bytes: int | None = None
    """Size of the run's newest checkpoint, if it has one."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the installed packages."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.ranks_per_node


def inspect_environment(
    config: TrainConfig | None = None, *, num_nodes: int = 1, ranks_per_node: int | None = None
) -> Environment:
    """Collect what the rules check, on this machine.

    Args:
        config: The run's settings.
        num_nodes: Machines of the job.
        ranks_per_node: Ranks on each; by default the GPUs of this machine, at least one.
    """
    return Environment(
        variables=dict(os.environ),
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
        shm_bytes=shutil.disk_usage(_SHM).total if Path(_SHM).is_dir() else None,
        free_bytes={} if config is None else _free_space(config),
        checkpoint_bytes=None if config is None else _newest_checkpoint_bytes(config.run.output),
        versions=_installed_versions(),
    )


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _free_space(config: TrainConfig) -> dict[str, int]:
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
    found = {"python": platform.python_version(), "expat": ".".join(map(str, pyexpat.version_info))}
    for package in (*_FLOORS, *_NO_SAFE_RELEASE):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def examine(environment: Environment, *, allowed: Iterable[str] = ()) -> list[Finding]:
    """Apply all rules.

    Args:
        environment: Snapshot to check.
        allowed: Variables to ignore, such as a plugin's.
    """
    unread = (Finding("error", *found) for found in unread_names(environment.variables, allowed))
    rules = (
        _check_variables,
        _check_flight_recorder,
        _check_links,
        _check_interfaces,
        _check_adapters,
        _check_limits,
        _check_cores,
        _check_memory,
        _check_disks,
        _check_versions,
        _check_launcher,
        _check_ranks,
    )
    return [*unread, *(finding for rule in rules for finding in rule(environment))]


def _check(holds: bool, topic: str, must: str, found: str, fix: str, level: Level = "error") -> Finding:
    return Finding("ok", topic, must, found, "") if holds else Finding(level, topic, must, found, fix)


def _check_variables(environment: Environment) -> Iterator[Finding]:
    variables = environment.variables
    for name in sorted(OLD_NAMES.keys() & variables.keys()):
        fix = f"use {OLD_NAMES[name]}" if OLD_NAMES[name] else "unset it"
        yield Finding("warning", name, "have its current name", "an old name, or one that is ignored", fix)
    for name in sorted(RANGES.keys() & variables.keys()):
        if not RANGES[name].holds(variables[name]):
            must = f"be {RANGES[name].describe()}"
            yield Finding("error", name, must, repr(variables[name]), "correct or unset it")
    for name, value, level, must, found, fix in _VALUES:
        # The old names of torch's variables, without TORCH_, still take effect.
        if variables.get(name, variables.get(name.removeprefix("TORCH_"), "")).upper() == value:
            yield Finding(level, name, must, found, fix)
    file = variables.get("NCCL_DEBUG_FILE", "")
    if file and not file.startswith("/dev/") and not ("%p" in file and "%h" in file):
        found = "a name without %h and %p: ranks overwrite each other's file"
        yield Finding("warning", "NCCL_DEBUG_FILE", "differ for each process", found, "put %h.%p in the name")


def _check_flight_recorder(environment: Environment) -> Iterator[Finding]:
    variables, name = environment.variables, "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    mode = variables.get(name, variables.get("NCCL_ASYNC_ERROR_HANDLING"))
    sizes = [variables[buffer] for buffer in _BUFFERS if buffer in variables]
    if mode == "1" and sizes and sizes[0] != "0":
        found, fix = "1, which aborts before the record is written", "unset it (3 is the default)"
        yield Finding("warning", name, "be 3 when the flight recorder is on", found, fix)
    if variables.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1" and sizes and sizes[0] == "0":
        fix = "set TORCH_FR_BUFFER_SIZE=2000, or unset both: training sets them"
        must, found = "have a buffer to dump", "a flight recorder of size 0"
        yield Finding("warning", "TORCH_NCCL_DUMP_ON_TIMEOUT", must, found, fix)


def _check_links(environment: Environment) -> Iterator[Finding]:
    """Check the combined effect of the socket and InfiniBand variables."""
    defaults = {
        "NCCL_SOCKET_NTHREADS": 1,
        "NCCL_NSOCKS_PERTHREAD": 1,
        "NCCL_IB_TIMEOUT": _IB_TIMEOUT,
        "NCCL_IB_RETRY_CNT": _IB_RETRIES,
    }
    texts = [environment.variables.get(name, str(default)) for name, default in defaults.items()]
    if not all(text.isdigit() for text in texts):
        return  # reported by its range
    threads, each, exponent, retries = map(int, texts)
    if threads * each > _MOST_SOCKETS:
        topic = "NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD"
        yield Finding("error", topic, f"be at most {_MOST_SOCKETS}", str(threads * each), "lower one of them")
    config = environment.config
    steady_s = config.timeouts.steady_s if config is not None else _DEFAULT_STEADY_S
    patience_s = _IB_UNIT_S * 2 ** min(exponent, 31) * retries
    if patience_s > steady_s and {"NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"} & environment.variables.keys():
        yield Finding(
            "warning",
            "NCCL_IB_TIMEOUT",
            f"give up on a link before timeouts.steady_s ({steady_s:g} s)",
            f"{patience_s:.0f} s with NCCL_IB_RETRY_CNT={retries}: the exchange times out first",
            f"use {_IB_TIMEOUT} and {_IB_RETRIES} (30 s), or raise timeouts.steady_s",
        )


def matching(pattern: str, names: tuple[str, ...]) -> list[str]:
    """Select names as NCCL does: comma-separated prefixes; leading ``=`` is exact, ``^`` excludes."""
    excludes = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    is_exact = pattern.startswith("=")
    # Exact names are written =a,b as well as =a,=b.
    wanted = [part.removeprefix("=").split(":")[0] for part in pattern.split(",") if part]
    hits = [
        name for name in names if any(name == part if is_exact else name.startswith(part) for part in wanted)
    ]
    return [name for name in names if name not in hits] if excludes else hits


def _check_interfaces(environment: Environment) -> Iterator[Finding]:
    present = ", ".join(environment.interfaces)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        pattern = environment.variables.get(name)
        if pattern is None:
            continue
        # gloo takes whole names, separated by commas.
        hits = matching(pattern if name.startswith("NCCL") else f"={pattern}", environment.interfaces)
        if environment.num_nodes > 1 and set(hits) == {"lo"}:
            must = "name an interface that the other machines can reach"
            yield Finding("error", name, must, "the loopback", f"use one of {present}")
        else:
            found = ", ".join(hits) or f"{pattern!r} among {present}"
            yield _check(bool(hits), name, "name a network interface of this machine", found, "correct it")
    usable = [
        name
        for name in environment.interfaces
        if name != "lo" and not name.startswith(("docker", "veth", "br-", "virbr"))
    ]
    if environment.num_nodes > 1 and len(usable) > 1 and "GLOO_SOCKET_IFNAME" not in environment.variables:
        must, found = "be set where machines have several networks", f"it unset, and {', '.join(usable)}"
        fix = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield Finding("warning", "GLOO_SOCKET_IFNAME", must, found, fix)


def _check_adapters(environment: Environment) -> Iterator[Finding]:
    pattern = environment.variables.get("NCCL_IB_HCA")
    hits = [] if pattern is None else matching(pattern, environment.hcas)
    if pattern is not None and not hits:
        found = f"{pattern!r} among {', '.join(environment.hcas) or 'none'}"
        fix = "correct it, or unset it: NCCL finds the adapters"
        yield Finding("error", "NCCL_IB_HCA", "name an adapter of this machine", found, fix)
    elif pattern is not None and "=" not in pattern and len(hits) > len(pattern.split(",")):
        found, fix = f"prefixes that match {', '.join(hits)}", "put = in front: mlx5_1 also matches mlx5_10"
        yield Finding("warning", "NCCL_IB_HCA", "name adapters exactly", found, fix)
    locked_bytes = environment.limits.get("memlock")
    if environment.hcas and environment.num_nodes > 1 and locked_bytes is not None:
        must, found = "be unlimited, as NCCL registers memory with the adapter", f"{locked_bytes} bytes"
        fix = "ulimit -l unlimited; for a service LimitMEMLOCK=infinity, for a container --ulimit memlock=-1"
        yield Finding("error", "ulimit -l", must, found, fix)


def _check_limits(environment: Environment) -> Iterator[Finding]:
    # A connection to every other rank, and the open shards.
    for name, option, needed in (
        ("nofile", "ulimit -n", _FILES_PER_RANK + 2 * environment.world_size),
        ("nproc", "ulimit -u", _PROCESSES_PER_RANK * environment.ranks_per_node),
    ):
        limit = environment.limits.get(name)
        found = "unlimited" if limit is None else str(limit)
        fix = f"{option} {max(needed, 65536)}"
        yield _check(limit is None or limit >= needed, option, f"be at least {needed}", found, fix)


def _check_cores(environment: Environment) -> Iterator[Finding]:
    cores, ranks = environment.num_cores, environment.ranks_per_node
    threads = environment.config.loader.num_threads if environment.config is not None else 2
    yield _check(
        cores / ranks >= 1 + threads,
        "CPU cores",
        f"be at least {1 + threads} for each rank: one for the loop, {threads} for the loader",
        f"{cores / ranks:.1f} ({cores:g} for {ranks} ranks, by affinity and cgroup)",
        "give the job more cores, or lower loader.num_threads",
        "warning",
    )
    text = environment.variables.get("OMP_NUM_THREADS", "")
    if text.isdigit() and int(text) * ranks > cores:
        must = f"times {ranks} ranks be at most {cores:g} cores"
        yield Finding("warning", "OMP_NUM_THREADS", must, text, "lower it; torchrun sets 1")


def _check_memory(environment: Environment) -> Iterator[Finding]:
    needed, shm = _SHM_PER_RANK_BYTES * environment.ranks_per_node, environment.shm_bytes
    must, found = f"hold at least {_size(needed)}", "none" if shm is None else _size(shm)
    if shm is None or shm <= _CONTAINER_SHM_BYTES:
        fix = f"--shm-size={needed >> 20}m, or an emptyDir of medium Memory: a container has 64 MiB"
        yield Finding("error", _SHM, must, found, fix)
    else:
        fix = f"mount -o remount,size={needed >> 20}m /dev/shm"
        yield _check(shm >= needed, _SHM, must, found, fix, "warning")
    config, each = environment.config, _DEFAULT_BUFFER_BYTES
    if config is not None:
        each = config.loader.prefetch_bytes + config.loader.pinned_bytes + config.cache.ram_bytes
    buffers = each * environment.ranks_per_node
    yield _check(
        buffers <= environment.memory_bytes // 2,
        "memory",
        f"hold the ranks' buffers, {_size(buffers)}, in half of it: pinned pages cannot be swapped",
        _size(environment.memory_bytes),
        "lower loader.prefetch_bytes, loader.pinned_bytes or cache.ram_bytes",
    )


def _check_disks(environment: Environment) -> Iterator[Finding]:
    if environment.config is None:
        return
    needed, why = _LEAST_RUN_BYTES, "ledger, metrics and a first checkpoint"
    if environment.checkpoint_bytes is not None:
        # The retained ones exist already; one more is written before one is removed.
        needed = max(_LEAST_RUN_BYTES, 2 * environment.checkpoint_bytes)
        why = f"a new checkpoint of {_size(environment.checkpoint_bytes)} is written before an old one goes"
    free = environment.free_bytes.get("run.output")
    if free is not None:
        fix = "free up space, lower run.keep_last, or choose another disk"
        yield _check(free >= needed, "run.output", f"have {_size(needed)} free: {why}", _size(free), fix)
    free = environment.free_bytes.get("cache.directory")
    if free is not None:
        needed = environment.config.cache.max_bytes + environment.config.cache.min_free_bytes
        must = f"have {_size(needed)} free: cache.max_bytes plus cache.min_free_bytes"
        fix = "lower cache.max_bytes: the cache cannot grow to it"
        yield _check(free >= needed, "cache.directory", must, _size(free), fix, "warning")


def _check_versions(environment: Environment) -> Iterator[Finding]:
    versions = environment.versions
    for package, (floor, vulnerability) in _FLOORS.items():
        if package in versions:
            is_safe = _numbers(versions[package]) >= _numbers(floor)
            must = f"be at least {floor}" + ("" if is_safe else f" ({vulnerability})")
            yield _check(is_safe, package, must, versions[package], f"pip install '{package}>={floor}'")
    for package, (vulnerability, fix) in _NO_SAFE_RELEASE.items():
        if package in versions:
            yield Finding("warning", package, f"be free of {vulnerability}", versions[package], fix)
    if "expat" in versions and _numbers(versions["expat"]) < _numbers(_EXPAT):
        must = f"be at least {_EXPAT} (one large token takes quadratic time)"
        fix = "use a newer Python; shardflow itself refuses DTDs and entities"
        yield Finding("warning", "expat", must, versions["expat"], fix)


def _check_launcher(environment: Environment) -> Iterator[Finding]:
    variables = environment.variables
    stale = [name for name in _OF_TORCHRUN if name in variables]
    if stale and "TORCHELASTIC_RUN_ID" not in variables:
        found, fix = "values of another launcher or an older shell", f"unset {' '.join(stale)}"
        yield Finding("warning", ", ".join(stale), "be set by torchrun alone", found, fix)
    shared = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if ":" in variables.get("PET_NNODES", "") and variables.get(shared) != "1":
        must = "be 1 where machines may leave and join"
        found, fix = (
            "it unset: ranks ask a machine that may be gone",
            f"export {shared}=1, or use shardflow train",
        )
        yield Finding("error", shared, must, found, fix)
    timeout = variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    if timeout.isdigit() and int(timeout) < _LEAST_SHUTDOWN_S:
        must = f"be at least {_LEAST_SHUTDOWN_S}: a step and a checkpoint must finish before SIGKILL"
        fix = "raise it, and the scheduler's grace time with it"
        yield Finding("warning", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", must, timeout, fix)


def _check_ranks(environment: Environment) -> Iterator[Finding]:
    if environment.config is None:
        return
    world_size, steps = environment.world_size, environment.config.batch.micro_batches_per_step
    must, found = f"be at most batch.micro_batches_per_step ({steps}), and divide it", str(world_size)
    if world_size > steps:
        yield Finding("error", "ranks", must, found, "start fewer, or raise it for a new run")
    else:
        wasted = 1 - steps / (-(-steps // world_size) * world_size)
        if wasted:
            found = f"{world_size}: {wasted:.0%} of the work are padding micro-batches"
        yield _check(not wasted, "ranks", must, found, "start a divisor", "warning")


def _numbers(version: str) -> tuple[int, ...]:
    """Parse ``2.13.0+cpu`` into comparable numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"
