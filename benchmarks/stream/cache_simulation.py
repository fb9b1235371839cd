"""Simulation of an eviction policy over a sequence of reads: hits and bytes, without reading any.

The rules are those of `shardflow.storage.cache.forecast`, kept in order by heaps instead of being
sorted anew each time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardflow.storage.cache.config import EvictionPolicy
from shardflow.storage.cache.forecast import NEVER, is_worth_keeping

__all__ = ["Outcome", "next_uses", "simulate"]


_Key = tuple[float, float, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a line of reads."""

    num_reads: int
    num_hits: int
    fetched_bytes: int


def next_uses(reads: Sequence[int], *, horizon: Sequence[int] | None = None) -> list[float]:
    """Return for each read the place of the next one of the same block, `NEVER` for the last.

    Args:
        reads: Blocks in the order in which they are read.
        horizon: For each read the place from which on nothing is known; all is known if not given.
    """
    found = [NEVER] * len(reads)
    following: dict[int, int] = {}
    for place in range(len(reads) - 1, -1, -1):
        after = following.get(reads[place])
        if after is not None and (horizon is None or after < horizon[place]):
            found[place] = float(after)
        following[reads[place]] = place
    return found


def simulate(
    policy: EvictionPolicy,
    reads: Sequence[int],
    sizes: NDArray[np.int64],
    capacity_bytes: int,
    *,
    future: Sequence[float] | None = None,
) -> Outcome:
    """Run a policy over reads.

    Args:
        policy: The policy.
        reads: Blocks in the order in which they are read.
        sizes: ``(n,)`` bytes of each block.
        capacity_bytes: Bound on what is kept.
        future: `next_uses` of the reads, for ``belady``; worked out if not given.
    """
    if policy == "belady" and future is None:
        future = next_uses(reads)
    order = _Order(policy, half_life=max(1.0, capacity_bytes / max(1.0, float(sizes.mean()))))
    num_bytes = sizes.tolist()
    used = num_hits = fetched = clock = 0
    for place, block in enumerate(reads):
        next_use = future[place] if future is not None else NEVER
        if block in order:
            num_hits += 1
            order.touch(block, next_use, clock)
            continue
        fetched += num_bytes[block]
        if num_bytes[block] > capacity_bytes:
            continue
        while used + num_bytes[block] > capacity_bytes:
            victim, victim_next_use = order.first()
            if not is_worth_keeping(policy, next_use, victim_next_use):
                break
            order.remove(victim)
            used -= num_bytes[victim]
        else:
            clock += 1
            used += num_bytes[block]
            order.touch(block, next_use, clock)
    return Outcome(len(reads), num_hits, fetched)


class _Order:
    """The blocks that are kept, in the order in which they go."""

    def __init__(self, policy: EvictionPolicy, *, half_life: float) -> None:
        self._policy, self._half_life = policy, half_life
        self._kept: dict[int, tuple[int, float]] = {}
        """Last use and frequency."""
        self._keys: dict[int, _Key] = {}
        self._heap: list[tuple[_Key, int]] = []
        self._num_touches = 0

    def __contains__(self, block: int) -> bool:
        return block in self._kept

    def touch(self, block: int, next_use: float, clock: int) -> None:
        """Note a read of a block, which is kept from now on."""
        last_use, frequency = self._kept.pop(block, (clock, 0.0))
        frequency = frequency * 2.0 ** ((last_use - clock) / self._half_life) + 1.0
        self._kept[block] = (clock, frequency)
        self._num_touches += 1
        # In logarithms a decaying count keeps its place among the others, so it need not be updated.
        often = math.log2(frequency) + clock / self._half_life
        key = {
            "belady": (-next_use, often, self._num_touches),
            "lfu-decay": (0.0, often, self._num_touches),
            "lru": (0.0, 0.0, self._num_touches),
        }[self._policy]
        self._keys[block] = key
        heapq.heappush(self._heap, (key, block))

    def first(self) -> tuple[int, float]:
        """Return the block that goes first, and the place of its next use."""
        while True:
            key, block = self._heap[0]
            if self._keys.get(block) == key:
                return block, (-key[0] if self._policy == "belady" else NEVER)
            heapq.heappop(self._heap)  # read or removed since

    def remove(self, block: int) -> None:
        """Forget a block."""
        del self._kept[block], self._keys[block]
