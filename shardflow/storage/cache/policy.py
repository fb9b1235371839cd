"""What goes first when room is needed: one rule each, on plain numbers.

The same functions decide in the folder, in memory and in the simulation of benchmarks/stream, so that the
table of hit rates speaks of what runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardflow.storage.cache.config import EvictionPolicy

__all__ = ["NEVER", "decayed", "eviction_order", "is_worth_keeping"]

Float64Array = NDArray[np.float64]

NEVER = float("inf")
"""Next use of what no plan needs any more."""


def decayed(frequency: float, age: float, half_life: float) -> float:
    """Return what a count of uses is worth after a while: half of it after each half-life."""
    return float(frequency * 2.0 ** (-age / half_life))


def eviction_order(
    policy: EvictionPolicy,
    *,
    next_use: Float64Array,
    last_use: Float64Array,
    frequency: Float64Array,
    clock: float,
    half_life: float,
) -> NDArray[np.intp]:
    """Sort blocks by how soon they go, the first to go first.

    Args:
        policy: ``belady``: what is needed last goes first, and what no plan speaks of before that, the
            least often used of it. ``lru``: what was used least recently. ``lfu-decay``: what was used least
            often, uses counting half after each half-life.
        next_use: ``(n,)`` distance to the next use, `NEVER` for none.
        last_use: ``(n,)`` clock of the last use; settles ties, the oldest first.
        frequency: ``(n,)`` uses, decayed up to ``last_use``.
        clock: Now.
        half_life: Of frequencies, in units of the clock.
    """
    if policy == "lru":
        return np.argsort(last_use, kind="stable")
    often = frequency * np.exp2((last_use - clock) / half_life)
    if policy == "lfu-decay":
        return np.lexsort((last_use, often))
    return np.lexsort((last_use, often, -next_use))


def is_worth_keeping(policy: EvictionPolicy, next_use: float, next_use_of_victim: float) -> bool:
    """Tell whether a block that was just read should take the place of a victim.

    Only who knows the future can say no: a block that is needed later than everything that is kept is not
    kept at all. Where neither is known, the newer one is kept.
    """
    if policy != "belady":
        return True
    return next_use < next_use_of_victim or next_use == next_use_of_victim == NEVER
