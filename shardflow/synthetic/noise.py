"""Noise: a counter hash of our own, so that a seed means the same pixels in every version of NumPy.

NumPy promises no stable stream for its distributions, so none is used: SplitMix64 turns (key, pixel number)
into 64 bits, and the sum of four of their bytes is a bell curve with a standard deviation of 147.8 that is
cut at 3.45 of them. Kernels are small integer filters. The noise is pinned by a golden digest.

Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014 (the finalizer).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np

__all__ = ["Kernel", "bell_noise", "filtered_noise", "hashed_bits"]

Kernel = Literal["smooth", "standard", "sharp"]

_Array = np.ndarray[Any, np.dtype[Any]]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_BYTES = np.uint64(0x00FF00FF00FF00FF)
_BELL_DEVIATION = 147.80
# Standard deviation after each filter, relative to white noise: root of the sum of squared weights.
_GAIN: dict[Kernel, float] = {"standard": 1.0, "smooth": 6.0, "sharp": 16.6132}


@lru_cache(maxsize=4)
def _counters(count: int) -> _Array:
    counters: _Array = np.arange(1, count + 1, dtype=np.uint64) * _GAMMA
    counters.flags.writeable = False
    return counters


def hashed_bits(key: int, count: int) -> _Array:
    """Return ``count`` uint64 of the stream of a 64-bit key."""
    bits = _counters(count) + np.uint64(key)
    bits ^= bits >> _SHIFTS[0]
    bits *= _FIRST
    bits ^= bits >> _SHIFTS[1]
    bits *= _SECOND
    bits ^= bits >> _SHIFTS[2]
    return bits


def bell_noise(key: int, rows: int, columns: int) -> _Array:
    """Return ``(rows, columns)`` int16 from -510 to 510, mean 0, standard deviation 147.8."""
    count = rows * columns
    bits = hashed_bits(key, (count + 1) // 2)
    # Four lanes of 16 bits, each the sum of two bytes; two lanes make one value.
    lanes = ((bits & _BYTES) + ((bits >> np.uint64(8)) & _BYTES)).astype("<u8", copy=False).view("<i2")
    values: _Array = lanes[0::2] + lanes[1::2]
    values -= np.int16(510)
    return values[:count].astype(np.int16, copy=False).reshape(rows, columns)


def filtered_noise(key: int, rows: int, columns: int, kernel: Kernel, deviation: float) -> _Array:
    """Return ``(rows, columns)`` float32 noise as a kernel leaves it: mean 0, the given deviation."""
    scale = np.float32(deviation / (_BELL_DEVIATION * _GAIN[kernel]))
    if kernel == "standard":
        return bell_noise(key, rows, columns) * scale
    white = bell_noise(key, rows + 2, columns + 2)
    down = white[:-2] + 2 * white[1:-1] + white[2:]
    smooth = down[:, :-2] + 2 * down[:, 1:-1] + down[:, 2:]
    if kernel == "sharp":
        smooth = np.int16(20) * white[1:-1, 1:-1] - smooth
    noise: _Array = smooth * scale
    return noise
