"""Where tuning starts: settings that are sensible on this machine, before anything was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["DataFacts", "MachineFacts", "default_settings"]

_MIB: Final = 1 << 20
_MOST_THREADS: Final = 8
"""To start with: more are of use for few jobs, and found."""
_MOST_PREFETCH: Final = 1024 * _MIB
_READY: Final = 4
"""Micro-batches that each thread may have under way or ready: more smooths nothing that a window shows."""
_SHARE: Final = 1 / 8
"""Of the free memory for what all loaders of a node keep under way; as much again lies in their pools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """What there is for the ranks of a node."""

    num_cpus: float
    """Processors that they may use together, quotas counted."""
    available_bytes: int
    """Memory that is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """What is read."""

    micro_batch_bytes: int = 0
    """In the memory of the host; 0 where that is not known."""
    has_images: bool = True
    is_remote: bool = False


def default_settings(machine: MachineFacts, ranks_per_node: int, data: DataFacts) -> dict[str, int | str]:
    """Return settings by name, for what nobody has set.

    A processor stays with each rank's loop; the loader gets the others, up to eight. Text alone is read by
    one thread. A remote store wants more requests than threads, so reading ahead gets sixteen.

    Example:
        >>> machine = MachineFacts(num_cpus=64, available_bytes=1 << 39)
        >>> default_settings(machine, 8, DataFacts(micro_batch_bytes=16 << 20))
        {'loader.num_threads': 7, 'loader.prefetch_bytes': 536870912}
    """
    num_ranks = max(1, ranks_per_node)
    num_threads = max(1, min(_MOST_THREADS, int(machine.num_cpus / num_ranks) - 1)) if data.has_images else 1
    most = min(_MOST_PREFETCH, int(machine.available_bytes * _SHARE / num_ranks))
    wanted = (num_threads + 1) * _READY * data.micro_batch_bytes or 256 * _MIB
    prefetch = max(16 * _MIB, min(most, wanted))
    found: dict[str, int | str] = {
        "loader.num_threads": num_threads,
        "loader.prefetch_bytes": prefetch,
    }
    if data.is_remote:
        found["cache.read_ahead_threads"] = 16
    return found
