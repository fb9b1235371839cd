"""Keyed permutation of ``[0, size)`` in constant memory, and checks of the integers and JSON of a plan.

Any position is mapped in constant time, so a resume seeks instead of replaying. A small permutation is a
sorted table, which reaches every order with equal probability; a network over a handful of numbers cannot. A
large one cycle-walks an unbalanced Feistel network in mixed radix: ``x`` in ``[0, left * right)`` is the
pair ``(x // right, x % right)``, and each round adds a keyed hash of one half to the other modulo its radix.
Rounds are invertible whatever the hash is, so the whole is a bijection. Powers of two with XOR would need a
domain of up to four times the size, with three of four results walked again; here ``left * right`` exceeds
the size by less than its square root.

All arithmetic uses 64-bit integers and does not depend on platform, byte order, Python or NumPy version. The
constants, the number of rounds and the order of the halves are frozen: they define the order of every epoch
ever run (change class ITERATION ORDER, guarded by ``tests/golden/order.json``).

`checked_int` accepts NumPy integers and returns Python ones, so every number that leaves a plan (a summary,
a state) can be written as JSON and no product wraps at 64 bits.

Source:
    Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (the generalized Feistel network);
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, and Stafford's
    constants "Mix13" (the hash).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isqrt
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.errors import PlanError, ShardflowError
from shardflow.seeds import derive

MAX_COUNTER = 2**63 - 1
"""Largest seed, epoch or step: the largest signed 64-bit integer."""
UInt64Array = npt.NDArray[np.uint64]
MAX_SIZE = 2**48
"""Largest domain: no radix exceeds 2**24, so a 40-bit hash times a radix fits into 64 bits."""
# Over 400,000 keys of a domain of 100 numbers, four rounds tie neighboring numbers together (chi-square 200
# standard deviations off) and six still a little (3.7); eight do not, and domains here are larger than 4096.
_NUM_ROUNDS = 8
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1
# Four work arrays of this many words (256 KiB) stay in the second-level cache of a core.
_BLOCK = 8192
Int64Array = npt.NDArray[np.int64]
_TABLE_SIZE = 4096
"""Largest size ordered by a table, of 32 KiB; frozen, because it decides the order of small datasets."""
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio."""
# Up to this many positions Python integers (3.5 us each) beat the 110 NumPy calls of the network (60 us).
_FEW = 12


def checked_int(
    name: str, value: object, *, low: int, high: int, where: str, error: type[ShardflowError]
) -> int:
    """Return ``value`` as a Python integer.

    Args:
        name: Name of the number, as the caller spells it.
        value: Anything; only integers (Python's or NumPy's, no booleans) pass.
        low: Smallest allowed value.
        high: Largest allowed value.
        where: Where the value was given, for the message.
        error: The class to raise.

    Raises:
        ShardflowError: Of class ``error``, if ``value`` is no integer or lies outside ``[low, high]``.
    """
    number = _as_int(value)
    if number is not None and low <= number <= high:
        return number
    bounds = f"of at least {low}" if high == MAX_COUNTER else f"in [{low}, {high}]"
    if number is not None and number > high:
        bounds = f"of at most {high}"
    # Text is not repeated: a state or a config may hold anything where a number should be.
    found = f"{value!r}" if number is not None or isinstance(value, bool | float) else type(value).__name__
    raise error(f"{name} must be an integer {bounds}, got {found} ({where}).")


def check_ints(
    owner: object, bounds: Mapping[str, tuple[int, int]], *, where: str, error: type[ShardflowError]
) -> None:
    """Check attributes of a frozen dataclass, and convert them to Python integers; see `checked_int`."""
    for name, (low, high) in bounds.items():
        number = checked_int(name, getattr(owner, name), low=low, high=high, where=where, error=error)
        object.__setattr__(owner, name, number)


def checked_object(
    value: object, keys: Collection[str], *, what: str, error: type[ShardflowError], remedy: str = ""
) -> Mapping[str, Any]:
    """Return ``value`` if it is a JSON object with exactly the given keys.

    Raises:
        ShardflowError: Of class ``error``, if it is not; the message names missing and unknown keys.
    """
    if not isinstance(value, Mapping):
        raise error(f"{what} must be a JSON object, got {type(value).__name__}{remedy}.")
    missing, unknown = set(keys) - set(value), set(value) - set(keys)
    if missing or unknown:
        raise error(
            f"{what} must have the keys {', '.join(sorted(keys))}, got {sorted(missing)} missing and "
            f"{sorted(map(str, unknown))} unknown{remedy}."
        )
    return value


def sums(values: npt.ArrayLike) -> Int64Array:
    """Return the sum of the values before each one, and the total: ``(n + 1,)`` int64."""
    return np.concatenate(([0], np.cumsum(np.asarray(values, np.int64)))).astype(np.int64)


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def golden_words(count: int, start: int = 0) -> UInt64Array:
    """Return ``start`` plus the multiples 1 to ``count`` of the golden ratio, modulo 2**64, uint64.

    All are different, and any consecutive ones are spread nearly evenly over the range.
    """
    words = np.arange(1, count + 1, dtype=np.uint64)
    np.multiply(words, GOLDEN_RATIO, out=words)
    np.add(words, np.uint64(start), out=words)
    return words


def mix_array(words: UInt64Array, scratch: UInt64Array) -> None:
    """Mix 64-bit words in place by a fixed bijection; ``scratch`` has the same shape.

    The upper bits of a result depend on all bits of the word; the last xor-shift of Mix13, which is for the
    lower bits, is left out.
    """
    np.right_shift(words, 30, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MULTIPLIER_1, out=words)
    np.right_shift(words, 27, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MULTIPLIER_2, out=words)


class MixedRadixNetwork:
    """The bijection on ``[0, left * right)``, a near-square rectangle that holds ``size`` numbers.

    For one Python integer and for an array; both compute the same.

    Args:
        size: 1 to :data:`MAX_SIZE`.
        key: 64-bit key.

    Attributes:
        left: Radix of the upper half, ``ceil(sqrt(size))``.
        right: Radix of the lower half, ``ceil(size / left)``.
    """

    __slots__ = ("_round_keys", "left", "right")

    def __init__(self, size: int, key: int) -> None:
        self.left = isqrt(size - 1) + 1
        self.right = -(-size // self.left)
        self._round_keys = tuple(derive(key, "permutation-round", size, i) for i in range(_NUM_ROUNDS))

    def forward_int(self, number: int) -> int:
        """Map one number of the domain."""
        left, right = divmod(number, self.right)
        keys = self._round_keys
        for i in range(0, _NUM_ROUNDS, 2):
            left = (left + _below(self.left, right + keys[i])) % self.left
            right = (right + _below(self.right, left + keys[i + 1])) % self.right
        return left * self.right + right

    def forward_array(self, numbers: UInt64Array) -> None:
        """Map a one-dimensional array of numbers of the domain, in place."""
        work = np.empty((4, min(_BLOCK, numbers.size)), np.uint64)
        for start in range(0, numbers.size, _BLOCK):
            block = numbers[start : start + _BLOCK]
            left, right, hashed, scratch = work[:, : block.size]
            np.floor_divide(block, self.right, out=left)
            np.multiply(left, self.right, out=scratch)
            np.subtract(block, scratch, out=right)
            for i in range(_NUM_ROUNDS):
                half, other, radix = (right, left, self.right) if i % 2 else (left, right, self.left)
                np.add(other, self._round_keys[i], out=hashed)
                mix_array(hashed, scratch)
                np.right_shift(hashed, 24, out=hashed)
                np.multiply(hashed, radix, out=hashed)
                np.right_shift(hashed, 40, out=hashed)
                # Of the two candidates for the residue the wrong one has wrapped to a huge number.
                np.add(half, hashed, out=half)
                np.subtract(half, radix, out=scratch)
                np.minimum(half, scratch, out=half)
            np.multiply(left, self.right, out=left)
            np.add(left, right, out=block)


def _below(radix: int, word: int) -> int:
    """Hash a word to a number below ``radix``: its upper 40 bits as a fraction of 2**40, times the radix."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * _MULTIPLIER_1) & _MASK
    word = ((word ^ (word >> 27)) * _MULTIPLIER_2) & _MASK
    return (word >> 24) * radix >> 40


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
        """Return the numbers at ``positions``.

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
    """Return the numbers below ``size`` in the order of the permutation of a key, ``(size,)`` int64."""
    return Permutation(size, key)(np.arange(size))


def _sorted_table(size: int, key: int) -> Int64Array:
    """Order ``[0, size)`` by one pseudo-random word each; no two are equal, because mixing is a bijection."""
    words = golden_words(size, derive(key, "permutation-table", size))
    mix_array(words, np.empty_like(words))
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _walk_int(network: MixedRadixNetwork, number: int, size: int) -> int:
    """Apply the network until the result is below ``size``; at the latest, it is ``number`` itself."""
    number = network.forward_int(number)
    while number >= size:
        number = network.forward_int(number)
    return number


def _walk_array(network: MixedRadixNetwork, words: UInt64Array, size: int) -> None:
    """Apply the network in place, and again to the few results, one in ``sqrt(size)``, outside the range."""
    network.forward_array(words)
    if network.left * network.right == size:
        return
    outside = np.flatnonzero(words >= size)
    while outside.size:
        again = words[outside]
        network.forward_array(again)
        words[outside] = again
        outside = outside[again >= size]
