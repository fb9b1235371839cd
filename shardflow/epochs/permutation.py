"""A keyed permutation of ``[0, size)`` in constant memory, which never changes.

Any position is mapped in constant time, so a resume seeks instead of replaying. Small sizes are a sorted
table, which reaches every permutation with equal probability; a network over a handful of numbers cannot.
Large ones walk the cycles of a network over a slightly larger rectangle. Both are integer arithmetic on
64-bit words: the result depends neither on the platform and its byte order nor on the versions of Python and
NumPy. ``tests/golden/order.json`` pins it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import checked_int
from shardflow.epochs.network import MAX_SIZE, MixedRadixNetwork, UInt64Array, mix_array
from shardflow.errors import PlanError
from shardflow.seeds import derive

__all__ = ["Permutation", "shuffled"]

Int64Array = npt.NDArray[np.int64]

_TABLE_SIZE = 4096
"""Largest size that is a table, of 32 KiB; frozen, as it decides who orders a data set."""

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
        >>> sorted(Permutation(5, key=7)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    __slots__ = ("_network", "_table", "key", "size")

    def __init__(self, size: int, key: int) -> None:
        where = "permutation"
        self.size = checked_int("size", size, low=1, high=MAX_SIZE, where=where, error=PlanError)
        self.key = checked_int("key", key, low=0, high=2**64 - 1, where=where, error=PlanError)
        self._network: MixedRadixNetwork | None = None
        self._table = np.empty(0, np.int64)
        if self.size > _TABLE_SIZE:
            self._network = MixedRadixNetwork(self.size, self.key)
        else:
            self._table = _sorted_table(self.size, self.key)

    def __call__(self, positions: Int64Array) -> Int64Array:
        """Return what stands at ``positions``.

        Args:
            positions: Integers of any shape.

        Returns:
            A new int64 array in the shape of ``positions``.

        Raises:
            PlanError: A position lies outside ``[0, size)`` or is no integer.
        """
        if not np.issubdtype(positions.dtype, np.integer):
            raise PlanError(f"positions must be integers, got an array of {positions.dtype} (permutation).")
        if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= self.size):
            raise PlanError(
                f"positions must lie in [0, {self.size}), got {int(positions.min())} to "
                f"{int(positions.max())} (permutation)."
            )
        if self._network is None:
            mapped: Int64Array = self._table[positions]
            return mapped
        if positions.size <= _FEW:
            few = [_walk_int(self._network, n, self.size) for n in positions.ravel().tolist()]
            return np.array(few, np.int64).reshape(positions.shape)
        words = positions.astype(np.uint64).ravel()
        _walk_array(self._network, words, self.size)
        return words.view(np.int64).reshape(positions.shape)


def shuffled(size: int, key: int) -> Int64Array:
    """Return the numbers below ``size`` in the order of a permutation, ``(size,)`` int64."""
    return Permutation(size, key)(np.arange(size))


def _sorted_table(size: int, key: int) -> Int64Array:
    """Order ``[0, size)`` by a pseudo-random word each; no two are equal, as mixing is a bijection."""
    words = np.arange(1, size + 1, dtype=np.uint64)
    np.multiply(words, _GOLDEN_RATIO, out=words)
    np.add(words, derive(key, "permutation-table", size), out=words)
    mix_array(words, np.empty_like(words))
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _walk_int(network: MixedRadixNetwork, number: int, size: int) -> int:
    """Apply the network until the result lies below ``size``; it does, at the latest at ``number`` itself."""
    number = network.forward_int(number)
    while number >= size:
        number = network.forward_int(number)
    return number


def _walk_array(network: MixedRadixNetwork, words: UInt64Array, size: int) -> None:
    """Apply the network in place, and again to the few results, one in ``sqrt(size)``, that lie outside."""
    network.forward_array(words)
    if network.left * network.right == size:
        return
    outside = np.flatnonzero(words >= size)
    while outside.size:
        again = words[outside]
        network.forward_array(again)
        words[outside] = again
        outside = outside[again >= size]
