"""A keyed bijection on a rectangle of integers: an unbalanced Feistel network in mixed radix.

A number ``x`` in ``[0, left * right)`` is the pair ``(x // right, x % right)``. Each round adds a keyed hash
of one half to the other half, modulo that half's radix. Such a round can be undone whatever the hash is, so
the whole is a bijection, and no list of ``left * right`` numbers exists anywhere.

Why not powers of two with XOR: their domain can be four times the size that is wanted, and three of four
results would have to be walked again. Here ``left * right`` exceeds the size by less than its square root.

The constants, the number of rounds and the order of the halves are frozen: they are the order of every epoch
ever run (change class ITERATION ORDER, guarded by ``tests/golden/order.json``).

Source:
    Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (the generalised Feistel network);
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, and Stafford's
    constants "Mix13" (the hash).
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

from shardflow.seeds import derive

__all__ = ["MAX_SIZE", "MixedRadixNetwork", "UInt64Array", "mix_array"]

UInt64Array = npt.NDArray[np.uint64]

MAX_SIZE = 2**48
"""Largest domain: no radix exceeds 2**24, so a 40-bit hash times a radix fits into 64 bits."""

# Over 400,000 keys of a domain of 100 numbers, four rounds tie neighbouring numbers together (chi-square 200
# standard deviations off) and six still a little (3.7); eight do not, and domains here are larger than 4096.
_NUM_ROUNDS = 8
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1
# Four work arrays of this many words (256 KiB) stay in the second-level cache of a core.
_BLOCK = 8192


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
