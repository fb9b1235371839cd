"""A few computed things, kept by their key: bounded, and safe between threads without a lock.

A lock would be held for ever in a child that was forked while a thread computed. Two threads may compute the
same thing; neither ever sees half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

_Value = TypeVar("_Value")


class Recent(Generic[_Value]):
    """The newest values by key.

    Args:
        size: How many are kept; the one that was computed first goes first.
    """

    __slots__ = ("_size", "_values")

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Hashable, _Value] = {}

    def get(self, key: Hashable, compute: Callable[[], _Value]) -> _Value:
        """Return the value of ``key``, computed if it is not kept."""
        found = self._values.get(key)
        if found is None:
            found = compute()
            if len(self._values) >= self._size:
                # A copy of the keys is made in one go; one that is gone by now is no loss.
                for oldest in list(self._values)[: len(self._values) + 1 - self._size]:
                    self._values.pop(oldest, None)
            self._values[key] = found
        return found
