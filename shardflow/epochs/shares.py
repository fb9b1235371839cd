"""Shares in whole numbers: draws of a component from repeats or weights, and draws of its parts.

Exact fractions throughout, so that every machine finds the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

__all__ = ["draws_by_repeat", "draws_by_weight", "split_draws"]

Int64Array = npt.NDArray[np.int64]

_TIME_BITS = 31


def draws_by_repeat(num_samples: int, repeat: float) -> int:
    """Return how often a component is drawn from in an epoch: ``num_samples * repeat``, halves up."""
    return int(num_samples * Fraction(repr(repeat)) + Fraction(1, 2))


def draws_by_weight(weights: Sequence[float], num_draws: int) -> list[int]:
    """Return whole numbers in proportion to weights that add up to ``num_draws``, by the largest remainder.

    Of equal remainders the earlier one is larger.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    quotas = [weight * num_draws / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    left = num_draws - sum(counts)
    by_remainder = sorted(range(len(quotas)), key=lambda number: (counts[number] - quotas[number], number))
    for number in by_remainder[:left]:
        counts[number] += 1
    return counts


def split_draws(sizes: Int64Array, num_draws: int) -> Int64Array:
    """Split the first draws of a pass among the parts of a component, ``(K,)`` int64.

    Sample j of a part of n samples is due at time ``((2 j + 1) << 31) // n``; a pass draws in the order of
    time, equal times in the order of the parts. So no part is ever far ahead of its
    share, what a part has given never shrinks as draws are added, and a whole pass gives every sample once.

    Args:
        sizes: ``(K,)`` int64, samples of each part, below 2**29.
        num_draws: 0 to ``sizes.sum()``.
    """
    low, high = 0, 1 << (_TIME_BITS + 1)  # all that is due before `low` is at most num_draws
    while high - low > 1:
        middle = (low + high) // 2
        if int(_due_before(sizes, middle).sum()) <= num_draws:
            low = middle
        else:
            high = middle
    counts = _due_before(sizes, low)
    at_once = _due_before(sizes, low + 1) - counts
    left = num_draws - int(counts.sum())
    taken = np.minimum(at_once, np.maximum(left - (np.cumsum(at_once) - at_once), 0))
    found: Int64Array = counts + taken
    return found


def _due_before(sizes: Int64Array, time: int) -> Int64Array:
    """Return the samples of each part that are due before a time."""
    ends = -((-time * sizes) >> _TIME_BITS)
    found: Int64Array = np.minimum(ends >> 1, sizes)
    return found
