"""Keyed draws: every choice of the generator is a labelled hash, so no choice depends on another one's order.

NumPy's and Python's random distributions may change between versions; `shardflow.seeds.derive` is frozen. A
draw costs about two microseconds, which is nothing beside a rendered slice; noise has its own stream
(`noise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from shardflow.seeds import derive

__all__ = ["Draws"]

_T = TypeVar("_T")
_STEPS = 1_000_000


class Draws:
    """A stream of draws under one label; `at` opens independent streams below it."""

    def __init__(self, seed: int, label: str, *counters: int) -> None:
        self._seed = seed
        self._label = label
        self._counters = counters
        self._num_drawn = 0

    def at(self, label: str, *counters: int) -> Draws:
        """Open the stream of a part; it does not depend on what was drawn here."""
        return Draws(self._seed, f"{self._label}/{label}", *self._counters, *counters)

    def key(self) -> int:
        """Draw 64 bits."""
        value = derive(self._seed, self._label, *self._counters, self._num_drawn)
        self._num_drawn += 1
        return value

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from ``low`` to ``high``, both included."""
        return low + self.key() % (high - low + 1)

    def real(self, low: float, high: float) -> float:
        """Draw a number from ``low`` to ``high`` with three decimals, the same on every machine."""
        return round(low + (high - low) * self.integer(0, _STEPS) / _STEPS, 3)

    def chance(self, percent: float) -> bool:
        """Say yes in ``percent`` of a hundred cases."""
        return self.integer(0, _STEPS - 1) < percent * (_STEPS / 100)

    def choice(self, items: Sequence[_T]) -> _T:
        """Draw one item."""
        return items[self.integer(0, len(items) - 1)]

    def weighted(self, items: Sequence[tuple[_T, int]]) -> _T:
        """Draw one item of pairs (item, weight)."""
        place = self.integer(0, sum(weight for _, weight in items) - 1)
        for item, weight in items:
            place -= weight
            if place < 0:
                return item
        raise IndexError("weights must be positive")

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        """Return the items in a drawn order (Fisher-Yates)."""
        left = list(items)
        for last in range(len(left) - 1, 0, -1):
            other = self.integer(0, last)
            left[last], left[other] = left[other], left[last]
        return left

    def some(self, items: Sequence[_T], count: int) -> list[_T]:
        """Draw up to ``count`` different items, in a drawn order."""
        return self.shuffled(items)[:count]
