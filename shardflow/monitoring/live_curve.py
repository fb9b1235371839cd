"""A curve over a run of any length in memory of one size: means of ever longer stretches of steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

__all__ = ["Curve", "resampled"]

_MOST_BUCKETS: Final = 512


class Curve:
    """Values by their steps, which come in order.

    Args:
        most: Stretches that are held; when there are more, each two neighbours become one.
    """

    def __init__(self, most: int = _MOST_BUCKETS) -> None:
        self._most = most
        self._steps_each = 1
        self._buckets: dict[int, tuple[float, int]] = {}

    def add(self, step: int, value: float | None) -> None:
        """Take a value; None, as of a step without tokens, is left out."""
        if value is None:
            return
        total, count = self._buckets.get(step // self._steps_each, (0.0, 0))
        self._buckets[step // self._steps_each] = (total + value, count + 1)
        if len(self._buckets) > self._most:
            self._steps_each *= 2
            joined: dict[int, tuple[float, int]] = {}
            for number, (part, parts) in self._buckets.items():
                total, count = joined.get(number // 2, (0.0, 0))
                joined[number // 2] = (total + part, count + parts)
            self._buckets = joined

    def go_back_to(self, step: int) -> None:
        """Forget values of this step and later ones, and of the stretch that it lies in."""
        self._buckets = {
            number: held for number, held in self._buckets.items() if (number + 1) * self._steps_each <= step
        }

    def values(self) -> tuple[float, ...]:
        """Return the mean of each stretch, in their order."""
        return tuple(total / count for total, count in self._buckets.values())


def resampled(values: tuple[float, ...], width: int) -> list[float]:
    """Return at most so many means of neighbouring values."""
    if len(values) <= width:
        return list(values)
    edges = [number * len(values) // width for number in range(width + 1)]
    return [sum(values[first:last]) / (last - first) for first, last in pairwise(edges)]
