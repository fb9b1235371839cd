"""The settings of a loader that may change while it runs, and of the caches and stores it reads.

None of them changes which samples come in which micro-batch, nor a byte of them (contract S2). What they may
be follows from the machine: its processors and memory, shared with the other ranks of the node, descriptors
that are free, and the disk of the cache.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardflow.errors import ConfigError, ShardflowError
from shardflow.loading.loader_parts import LoaderParts
from shardflow.loading.node_room import rank_num_bytes
from shardflow.telemetry import KnobLimit
from shardflow.telemetry.machine import machine_bytes, num_processors

__all__ = ["LoaderKnobs"]

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


class LoaderKnobs:
    """Changes settings of a loader, see `shardflow.telemetry.Knobs`. Safe for many threads.

    All of them act at once on what runs, but for ``loader.execution``, and for ``loader.num_threads`` where
    these are processes: such a change waits for the next ``iter()`` or `Loader.apply_pending`.

    Args:
        parts: Of the loader.
    """

    def __init__(self, parts: LoaderParts) -> None:
        self._parts = parts

    def values(self) -> dict[str, int | str]:
        """Return the settings as they were set last."""
        return self._parts.settings()

    def limits(self) -> dict[str, KnobLimit]:
        """Return what each may be now, with the others as they are.

        The memory of all loaders of the node stays within ``max_node_bytes``, or within half of the machine's
        where none was given. A value that stands already is always allowed.
        """
        values = self.values()
        limits: dict[str, KnobLimit] = {}
        spare = _free_descriptors()
        for name, present in values.items():
            if isinstance(present, str):
                choices = _EXECUTIONS if sys.platform == "linux" else _EXECUTIONS[:1]
                choices = tuple(one for one in choices if one == present or self._fits({name: one}))
                limits[name] = KnobLimit(choices=choices, is_live=False)
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
            limits[name] = KnobLimit(least=least, most=max(most, present), is_live=not is_processes)
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
                "loader for its knobs there."
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


def _check(name: str, value: int | str, limit: KnobLimit) -> None:
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
