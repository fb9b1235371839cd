"""Tables of the environment variables of NCCL and torch's process groups, taken from their sources.

Sources. NCCL: docs/userguide/source/env.rst of NVIDIA/nccl at 0186f08 (2.32), with the old names of
variables; ``_UNDOCUMENTED``: NCCL_PARAM lines of its src. torch: torch/csrc/distributed/c10d/
ProcessGroupNCCL.hpp of pytorch/pytorch at 4c2f280. Not every name has a rule; a name that is not listed here
is reported as a mistake.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from shardflow.errors import ConfigError

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
