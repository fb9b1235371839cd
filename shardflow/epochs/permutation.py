"""A keyed permutation of ``[0, size)`` in constant memory, which never changes.

Any position is mapped in constant time, so a resume seeks instead of replaying. Small sizes are a sorted
table, which reaches every permutation with equal probability; a network over a handful of numbers cannot.
Large ones walk the cycles of a network over a slightly larger rectangle. Both are integer arithmetic on
64-bit words: the result depends neither on the platform and its byte order nor on the versions of Python and
NumPy. ``tests/golden/order.json`` pins it.
"""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import checked_int
from shardflow.epochs.network import MAX_SIZE, MixedRadixNetwork, UInt64Array, mix_array
from shardflow.errors import PlanError
from shardflow.seeds import derive

__all__ = ["Permutation"]

Int64Array = npt.NDArray[np.int64]

_TABLE_SIZE = 4096
"""Largest size that is a table, of 64 KiB with its inverse; frozen, as it decides who orders a data set."""

_GOLDEN_RATIO = 0x9E3779B97F4A7C15
# Up to this many positions Python integers (3.5 us each) beat the 110 NumPy calls of the network (60 us).
_FEW = 12


class Permutation:
    """A bijection on ``[0, size)``, chosen among all of them by ``key``.

    Immutable and safe to share between threads.

    Args:
        size: Number of positions, 1 to 2**48.
        key: 64-bit key, from :func:`shardflow.seeds.derive`.

    Raises:
        PlanError: ``size`` or ``key`` is out of range.

    Example:
        >>> permutation = Permutation(5, key=7)
        >>> sorted(permutation(position) for position in range(5))
        [0, 1, 2, 3, 4]
        >>> permutation.inverse(permutation(3))
        3
    """

    __slots__ = ("_inverse_table", "_network", "_table", "key", "size")

    def __init__(self, size: int, key: int) -> None:
        where = "permutation"
        self.size = checked_int("size", size, low=1, high=MAX_SIZE, where=where, error=PlanError)
        self.key = checked_int("key", key, low=0, high=2**64 - 1, where=where, error=PlanError)
        self._network: MixedRadixNetwork | None = None
        self._table = self._inverse_table = np.empty(0, np.int64)
        if self.size > _TABLE_SIZE:
            self._network = MixedRadixNetwork(self.size, self.key)
        else:
            self._table = _sorted_table(self.size, self.key)
            self._inverse_table = np.empty_like(self._table)
            self._inverse_table[self._table] = np.arange(self.size)

    @overload
    def __call__(self, positions: int) -> int: ...
    @overload
    def __call__(self, positions: Int64Array) -> Int64Array: ...
    def __call__(self, positions: int | Int64Array) -> int | Int64Array:
        """Return what stands at ``positions``.

        Args:
            positions: One position, or an array of integers of any shape.

        Returns:
            A Python integer for one position; else a new int64 array in the shape of ``positions``.

        Raises:
            PlanError: A position lies outside ``[0, size)`` or is no integer.
        """
        if isinstance(positions, np.ndarray):
            return self._map_array(positions, inverse=False)
        return self._map_int(positions, inverse=False)

    @overload
    def inverse(self, values: int) -> int: ...
    @overload
    def inverse(self, values: Int64Array) -> Int64Array: ...
    def inverse(self, values: int | Int64Array) -> int | Int64Array:
        """Return the positions at which ``values`` stand; arguments, result and errors as in a call."""
        if isinstance(values, np.ndarray):
            return self._map_array(values, inverse=True)
        return self._map_int(values, inverse=True)

    def _map_int(self, number: object, *, inverse: bool) -> int:
        found = checked_int(
            "value" if inverse else "position",
            number,
            low=0,
            high=self.size - 1,
            where="permutation",
            error=PlanError,
        )
        if self._network is None:
            return int((self._inverse_table if inverse else self._table)[found])
        return _walk_int(self._network, found, self.size, inverse=inverse)

    def _map_array(self, numbers: Int64Array, *, inverse: bool) -> Int64Array:
        if not np.issubdtype(numbers.dtype, np.integer):
            raise PlanError(f"positions must be integers, got an array of {numbers.dtype} (permutation).")
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= self.size):
            raise PlanError(
                f"positions must lie in [0, {self.size}), got {int(numbers.min())} to {int(numbers.max())} "
                f"(permutation)."
            )
        if self._network is None:
            mapped: Int64Array = (self._inverse_table if inverse else self._table)[numbers]
            return mapped
        if numbers.size <= _FEW:
            few = [_walk_int(self._network, n, self.size, inverse=inverse) for n in numbers.ravel().tolist()]
            return np.array(few, np.int64).reshape(numbers.shape)
        words = numbers.astype(np.uint64).ravel()
        _walk_array(self._network, words, self.size, inverse=inverse)
        return words.view(np.int64).reshape(numbers.shape)


def _sorted_table(size: int, key: int) -> Int64Array:
    """Order ``[0, size)`` by a pseudo-random word each; no two are equal, as mixing is a bijection."""
    words = np.arange(1, size + 1, dtype=np.uint64)
    np.multiply(words, _GOLDEN_RATIO, out=words)
    np.add(words, derive(key, "permutation-table", size), out=words)
    mix_array(words, np.empty_like(words))
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _walk_int(network: MixedRadixNetwork, number: int, size: int, *, inverse: bool) -> int:
    """Apply the network until the result lies below ``size``; it does, at the latest at ``number`` itself."""
    step = network.inverse_int if inverse else network.forward_int
    number = step(number)
    while number >= size:
        number = step(number)
    return number


def _walk_array(network: MixedRadixNetwork, words: UInt64Array, size: int, *, inverse: bool) -> None:
    """Apply the network in place, and again to the few results, one in ``sqrt(size)``, that lie outside."""
    step = network.inverse_array if inverse else network.forward_array
    step(words)
    if network.left * network.right == size:
        return
    outside = np.flatnonzero(words >= size)
    while outside.size:
        again = words[outside]
        step(again)
        words[outside] = again
        outside = outside[again >= size]
