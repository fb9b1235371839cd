"""Chosen rows of a samples table: which they are, the n-th of them, and how many lie before a row.

A subset is a bit a row of the table and a count every 64 rows: 0.19 bytes a row, whatever share is chosen, so
half of 200 million rows takes 38 MB (as int64 it would take 800). Both questions are answered without a loop
over rows. Rows without gaps are a ``range`` and need nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["RowSet", "Rows", "mask_of", "nth_rows", "rows_digest", "select_rows"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# A multiple of 64, so that a block begins with a word.
_BLOCK_ROWS = 2**20
_HALVES = (32, 16, 8, 4, 2, 1)
_DIGEST_LABEL = b"shardflow-rows-1"


class RowSet:
    """Ascending rows, at least one, with gaps. Safe to share between threads.

    Args:
        start: The row that bit 0 stands for; the first chosen one.
        words: ``(W,)`` uint64; bit ``i`` of word ``w`` is set where row ``start + 64 w + i`` is chosen.
    """

    def __init__(self, start: int, words: npt.NDArray[np.uint64]) -> None:
        self._start = start
        # A word without bits behind the end, so that the end has a word too.
        self._words = np.append(words, np.uint64(0))
        counts = np.bitwise_count(self._words)
        self.num_rows = int(counts.sum(dtype=np.int64))
        small = self.num_rows < 2**32
        before = np.zeros(len(self._words), np.uint32 if small else np.int64)
        np.cumsum(counts[:-1], out=before[1:])
        self._before = before

    def __len__(self) -> int:
        """Return the number of chosen rows."""
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        """Iterate over the rows."""
        for block in self.blocks():
            yield from block.tolist()

    @property
    def num_bytes(self) -> int:
        """Memory that the set takes."""
        return self._words.nbytes + self._before.nbytes

    def take(self, numbers: Int64Array) -> Int64Array:
        """Return the rows that are the ``numbers``-th chosen ones, counted from 0, int64 of equal shape."""
        numbers = np.asarray(numbers, np.int64)
        # Asked in the type of the counts: NumPy would copy all of them to another one.
        place = np.searchsorted(self._before[:-1], numbers.astype(self._before.dtype), side="right") - 1
        left = numbers - self._before[place].astype(np.int64)
        word = self._words[place]
        rows = place * 64 + self._start
        for width in _HALVES:
            low = word & np.uint64((1 << width) - 1)
            count = np.bitwise_count(low).astype(np.int64)
            is_high = count <= left
            left -= np.where(is_high, count, 0)
            word = np.where(is_high, word >> np.uint64(width), low)
            rows += np.where(is_high, width, 0)
        return np.asarray(rows, np.int64)

    def rank(self, rows: Int64Array) -> Int64Array:
        """Return how many chosen rows lie before each of ``rows``, int64."""
        offsets = np.clip(rows - self._start, 0, 64 * (len(self._words) - 1))
        place, bit = offsets >> 6, (offsets & 63).astype(np.uint64)
        low = self._words[place] & ((np.uint64(1) << bit) - np.uint64(1))
        ranks: Int64Array = self._before[place].astype(np.int64) + np.bitwise_count(low)
        return ranks

    def span(self, start: int, stop: int) -> Int64Array:
        """Return the rows of the numbers ``[start, stop)``; quicker than `take` for neighbours."""
        if stop <= start:
            return np.zeros(0, np.int64)
        ends = np.array([start, stop - 1], self._before.dtype)
        first, last = (np.searchsorted(self._before[:-1], ends, side="right") - 1).tolist()
        bits = np.unpackbits(self._words[first : last + 1].view(np.uint8), bitorder="little")
        skipped = start - int(self._before[first])
        rows: Int64Array = np.flatnonzero(bits)[skipped : skipped + stop - start] + (first * 64 + self._start)
        return rows

    def blocks(self) -> Iterator[Int64Array]:
        """Yield all rows, some at a time, in ascending order."""
        step = _BLOCK_ROWS // 64
        for first in range(0, len(self._words), step):
            bits = np.unpackbits(self._words[first : first + step].view(np.uint8), bitorder="little")
            found = np.flatnonzero(bits)
            if found.size:
                yield found + (first * 64 + self._start)

    @property
    def digest(self) -> str:
        """SHA-256 of the label, the first row, the rows from it to the last, and a bit for each of them."""
        last = int(self.span(self.num_rows - 1, self.num_rows)[0])
        num_spanned = last - self._start + 1
        header = struct.pack("<QQ", self._start, num_spanned)
        bits = self._words.view(np.uint8)[: -(-num_spanned // 8)]
        return hashlib.sha256(_DIGEST_LABEL + header + bits.tobytes()).hexdigest()


Rows: TypeAlias = range | RowSet
"""Ascending rows of a samples table; a range where they have no gaps."""


def nth_rows(rows: Rows, numbers: Int64Array) -> Int64Array:
    """Return the rows that are the ``numbers``-th of ``rows``."""
    if isinstance(rows, range):
        return numbers + rows.start
    return rows.take(numbers)


def mask_of(rows: Rows, start: int, stop: int) -> BoolArray:
    """Return which of the rows ``[start, stop)`` of the table belong to ``rows``."""
    mask = np.zeros(stop - start, bool)
    if isinstance(rows, range):
        mask[max(rows.start - start, 0) : max(rows.stop - start, 0)] = True
        return mask
    first, last = rows.rank(np.array([start, stop], np.int64)).tolist()
    mask[rows.span(first, last) - start] = True
    return mask


def rows_digest(rows: Rows) -> str:
    """Return the digest of rows, whether they have gaps or not."""
    if isinstance(rows, RowSet):
        return rows.digest
    header = struct.pack("<QQ", rows.start, len(rows))
    bits = np.packbits(np.ones(len(rows), bool), bitorder="little")
    return hashlib.sha256(_DIGEST_LABEL + header + bits.tobytes()).hexdigest()


def select_rows(span: range, choose: Callable[[int, int], BoolArray]) -> Rows:
    """Choose among rows of a table, some of them at a time.

    Args:
        span: The rows to choose from, without gaps.
        choose: Called with ``start, stop`` for parts of ``span``, in order; returns which rows are chosen,
            ``(stop - start,)`` bool.

    Returns:
        The chosen rows; a range where they have no gaps, empty where none is chosen.
    """
    words = np.zeros(-(-len(span) // 64), np.uint64)
    bits = words.view(np.uint8)
    first = last = -1
    count = 0
    for start in range(span.start, span.stop, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, span.stop)
        chosen = choose(start, stop)
        found = np.flatnonzero(chosen)
        if not found.size:
            continue
        first = start + int(found[0]) if first < 0 else first
        last, count = start + int(found[-1]), count + len(found)
        packed = np.packbits(chosen, bitorder="little")
        place = (start - span.start) // 8
        bits[place : place + len(packed)] = packed
    if last - first + 1 == count or not count:
        return range(first, last + 1) if count else range(0)
    return RowSet(*_moved(words, first - span.start, first, last - first + 1))


def _moved(
    words: npt.NDArray[np.uint64], offset: int, start: int, num_rows: int
) -> tuple[int, npt.NDArray[np.uint64]]:
    """Let the bits begin with the first chosen row, so that equal rows are equal words."""
    skipped, shift = divmod(offset, 64)
    words = words[skipped:]
    if shift:
        high = np.append(words[1:], np.uint64(0)) << np.uint64(64 - shift)
        words = (words >> np.uint64(shift)) | high
    return start, words[: -(-num_rows // 64)]
