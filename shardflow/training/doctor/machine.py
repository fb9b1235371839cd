"""Rules about the machine: interfaces, limits, memory, cores, disks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from shardflow.training.config import TrainConfig
from shardflow.training.doctor.finding import Finding, error, fine, warning
from shardflow.training.doctor.surroundings import Surroundings

__all__ = ["check_machine"]

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_CONTAINER_SHM_BYTES: Final = 64 * _MIB
"""What a container has unless it is told otherwise."""
_SHM: Final = "/dev/shm"  # noqa: S108 - it is asked for its size
_SHM_PER_RANK_BYTES: Final = 256 * _MIB
_FILES_PER_RANK: Final = 1024
_PROCESSES_PER_RANK: Final = 256
_DEFAULT_BUFFER_BYTES: Final = 256 * _MIB
"""Of loader.prefetch_bytes, and of loader.pinned_bytes."""
_LEAST_RUN_BYTES: Final = _GIB
"""For a run without a checkpoint yet: ledger, metrics, a small model."""


def check_machine(around: Surroundings) -> Iterator[Finding]:
    """Check this machine for the job."""
    rules: tuple[Callable[[Surroundings], Iterator[Finding]], ...] = (
        _interfaces,
        _adapters,
        _limits,
        _shared_memory,
        _cores,
        _memory,
        _disk,
        _cache,
    )
    for rule in rules:
        yield from rule(around)


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
        exact = pattern if name.startswith("NCCL") else f"={pattern}"
        hits = matching(exact, around.interfaces)
        if not hits:
            yield error(
                name, "name a network interface of this machine", f"{pattern!r} among {present}", "correct it"
            )
        elif around.num_nodes > 1 and set(hits) == {"lo"}:
            yield error(
                name,
                "name an interface that the other machines reach",
                "the loopback",
                f"name one of {present}",
            )
        else:
            yield fine(name, "name a network interface of this machine", ", ".join(hits))
    usable = [
        name
        for name in around.interfaces
        if name != "lo" and not name.startswith(("docker", "veth", "br-", "virbr"))
    ]
    if around.num_nodes > 1 and len(usable) > 1 and "GLOO_SOCKET_IFNAME" not in around.environment:
        yield warning(
            "GLOO_SOCKET_IFNAME",
            "name the interface where machines have several networks",
            f"it unset, and {', '.join(usable)}",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )


def _adapters(around: Surroundings) -> Iterator[Finding]:
    pattern = around.environment.get("NCCL_IB_HCA")
    if pattern is not None:
        hits = matching(pattern, around.hcas)
        if not hits:
            yield error(
                "NCCL_IB_HCA",
                "name an adapter of this machine",
                f"{pattern!r} among {', '.join(around.hcas) or 'none'}",
                "correct it, or unset it: NCCL finds the adapters",
            )
        elif "=" not in pattern and len(hits) > len(pattern.removeprefix("^").split(",")):
            yield warning(
                "NCCL_IB_HCA",
                "name adapters exactly",
                f"prefixes that match {', '.join(hits)}",
                "put = in front: mlx5_1 is mlx5_10 too",
            )
    if around.hcas and around.num_nodes > 1 and around.limits.get("memlock") is not None:
        yield error(
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
        found = around.limits.get(name)
        must = f"be at least {needed}"
        if found is not None and found < needed:
            yield error(option, must, str(found), f"{option} {max(needed, 65536)}")
        else:
            yield fine(option, must, "unlimited" if found is None else str(found))


def _shared_memory(around: Surroundings) -> Iterator[Finding]:
    needed = _SHM_PER_RANK_BYTES * around.ranks_per_node
    must, found = f"hold at least {_size(needed)}", around.shm_bytes
    if found is None or found <= _CONTAINER_SHM_BYTES:
        yield error(
            _SHM,
            must,
            "none" if found is None else _size(found),
            f"--shm-size={needed >> 20}m, or an emptyDir of medium Memory: a container has 64 MiB",
        )
    elif found < needed:
        yield warning(_SHM, must, _size(found), f"mount -o remount,size={needed >> 20}m /dev/shm")
    else:
        yield fine(_SHM, must, _size(found))


def _cores(around: Surroundings) -> Iterator[Finding]:
    threads = around.config.loader.num_threads if around.config else 2
    needed = 1 + threads
    each = around.num_cores / around.ranks_per_node
    must = f"be at least {needed} for each rank: one for the loop, {threads} for the loader"
    found = f"{each:.1f} ({around.num_cores:g} for {around.ranks_per_node} ranks, by affinity and cgroup)"
    if each < needed:
        yield warning("CPU cores", must, found, "give the job more cores, or lower loader.num_threads")
    else:
        yield fine("CPU cores", must, found)
    text = around.environment.get("OMP_NUM_THREADS", "")
    if text.isdigit() and int(text) * around.ranks_per_node > around.num_cores:
        yield warning(
            "OMP_NUM_THREADS",
            f"times {around.ranks_per_node} ranks be at most {around.num_cores:g} cores",
            text,
            "lower it; torchrun sets 1",
        )


def _memory(around: Surroundings) -> Iterator[Finding]:
    config = around.config
    each = 2 * _DEFAULT_BUFFER_BYTES
    if config is not None:
        each = config.loader.prefetch_bytes + config.loader.pinned_bytes + config.cache.ram_bytes
    buffers = each * around.ranks_per_node
    must = f"hold the ranks' buffers, {_size(buffers)}, in half of it: pinned pages cannot be swapped"
    if buffers > around.memory_bytes // 2:
        fix = "lower loader.prefetch_bytes, loader.pinned_bytes or cache.ram_bytes"
        yield error("memory", must, _size(around.memory_bytes), fix)
    else:
        yield fine("memory", must, _size(around.memory_bytes))


def _disk(around: Surroundings) -> Iterator[Finding]:
    config, free = around.config, around.free_bytes.get("run.output")
    if config is None or free is None:
        return
    needed, why = _run_bytes(config, around.checkpoint_bytes)
    must = f"have {_size(needed)} free: {why}"
    if free < needed:
        yield error("run.output", must, _size(free), "make room, lower run.keep_last, or choose another disk")
    else:
        yield fine("run.output", must, _size(free))


def _cache(around: Surroundings) -> Iterator[Finding]:
    config, free = around.config, around.free_bytes.get("cache.directory")
    if config is None or free is None:
        return
    needed = config.cache.max_bytes + config.cache.min_free_bytes
    must = f"have {_size(needed)} free: cache.max_bytes, and cache.min_free_bytes beside it"
    if free < needed:
        yield warning("cache.directory", must, _size(free), "lower cache.max_bytes: it will not get there")
    else:
        yield fine("cache.directory", must, _size(free))


def _run_bytes(config: TrainConfig, checkpoint_bytes: int | None) -> tuple[int, str]:
    if checkpoint_bytes is None:
        return _LEAST_RUN_BYTES, "ledger, metrics and a first checkpoint"
    # The kept ones stand already, but for the first times; one more is written before one is removed.
    return max(_LEAST_RUN_BYTES, 2 * checkpoint_bytes), (
        f"a new checkpoint of {_size(checkpoint_bytes)} is written before an old one goes"
        if config.run.keep_last
        else ""
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"
