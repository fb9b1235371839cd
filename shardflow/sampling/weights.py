"""Weighted sampling: how often each row is drawn, in integers, with draws counted over all epochs.

Rows of equal weight form a *class* (`WeightClasses`). The draws of an epoch are apportioned to classes
(`Apportionment`); those of a class go through its rows pass after pass, each pass in another keyed order, as
in a blend. After any number of epochs a class has its exact share of the draws, rounded down or up, and
within a pass no row is drawn twice: the draws of each row are within 1 of its exact share.

Draw j of a class belongs between the epochs in which its share passes j - 1 and j. Serving the earliest
deadline first keeps all these bounds, whatever the shares (Angel, Holroyd, Martin and Propp, "Discrete low
discrepancy sequences", 2009). Draws whose deadlines lie further back than the longest interval do not matter
any more, so a resume starts there instead of at epoch 0.

No list of rows is kept. Counts of each class before every block of rows (block prefix sums) find the n-th row
of a class by a search and a look at one block: 200 million rows in a few classes take about 15 MB.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from shardflow.errors import ConfigError, PlanError
from shardflow.sampling.lanes import Recent
from shardflow.sampling.layout import ListedRows, Rows, mask_of
from shardflow.sampling.permutation import Int64Array

MAX_CLASSES: Final = 1024
"""Most classes of different weights; weights of more values are rounded to fewer significant bits."""
MAX_WEIGHT: Final = 2**31 - 1
CodeArray = npt.NDArray[np.uint16]
_READ_ROWS: Final = 2**20
_SMALLEST_BLOCK: Final = 1024
_INDEX_BYTES: Final = 32 * 2**20
_TABLE_VALUES: Final = 2**16
_MANTISSA_BITS: Final = 52
_DIGEST_LABEL: Final = b"shardflow-weights-1"


class Codes(Protocol):
    """Class of each row of a table; picklable, so that it can cross to a loader process."""

    def __call__(self, start: int, stop: int) -> CodeArray:
        """Return the classes of the rows ``[start, stop)``, from 0; those of other rows do not matter."""


class Apportionment:
    """Draws of each class before every epoch.

    Args:
        totals: The weight of each class, all its rows together: ``(G, K)`` integers, one row per segment of
            epochs; each row has a sum above 0 and below 2**61.
        starts: ``(G,)``, first epoch of each segment, the first 0, ascending. Shares are counted from the
            start of their segment.
        given: Returns the draws of all classes before an epoch: 0 for 0, never falling.
    """

    def __init__(self, totals: Int64Array, starts: Sequence[int], given: Callable[[int], int]) -> None:
        self._totals, self._starts, self._given = totals, tuple(starts), given
        self._bases: dict[int, Int64Array] = {0: np.zeros(totals.shape[1], np.int64)}
        self._rates: Recent[tuple[Int64Array, Int64Array]] = Recent(4)
        # The latest boundary, from which the next epoch is one step.
        self._latest: tuple[int, int, _Boundary] | None = None

    def before(self, epoch: int) -> Int64Array:
        """Return the draws of each class before an epoch, ``(K,)`` int64; they add up to ``given(epoch)``."""
        segment = bisect_right(self._starts, epoch) - 1
        for number in range(len(self._bases) - 1, segment):
            ended = self._boundary(number, self._starts[number + 1])
            self._bases[number + 1] = self._bases[number] + ended.counts
        found: Int64Array = self._bases[segment] + self._boundary(segment, epoch).counts
        return found

    def _boundary(self, segment: int, epoch: int) -> _Boundary:
        first, latest = self._horizon(segment, epoch), self._latest
        if latest is not None and latest[0] == segment and first <= latest[1] <= epoch:
            _, at, found = latest
        else:
            at, num_draws = first, self._draws(segment, first)
            floors, rests = _shares(self._totals[segment], num_draws)
            found = _Boundary(num_draws, np.zeros_like(floors), floors, rests).served(self._totals[segment])
        for following in range(at + 1, epoch + 1):
            found = self._next(found, segment, self._draws(segment, following))
        self._latest = segment, epoch, found
        return found

    def _next(self, last: _Boundary, segment: int, num_draws: int) -> _Boundary:
        totals, more = self._totals[segment], num_draws - last.num_draws
        floors, rests = self._rates.get((segment, more), lambda: _shares(totals, more))
        whole = int(totals.sum())
        rests = last.rests + rests
        carried = rests >= whole
        found = _Boundary(num_draws, last.counts, last.floors + floors + carried, rests - whole * carried)
        return found.served(totals)

    def _draws(self, segment: int, epoch: int) -> int:
        return self._given(epoch) - self._given(self._starts[segment])

    def _horizon(self, segment: int, epoch: int) -> int:
        """Return the latest epoch before which nothing matters any more: every deadline has passed."""
        totals, first = self._totals[segment], self._starts[segment]
        longest = -(-int(totals.sum()) // int(totals[totals > 0].min()))
        epochs = range(first, epoch + 1)
        return first + max(0, bisect_right(epochs, self._given(epoch) - longest, key=self._given) - 1)


def _shares(totals: Int64Array, num_draws: int) -> tuple[Int64Array, Int64Array]:
    """Return the share of each class in some draws: whole draws, and parts of the sum of all weights."""
    whole = int(totals.sum())
    parts = np.array([divmod(num_draws * total, whole) for total in totals.tolist()], np.int64)
    return parts[:, 0].copy(), parts[:, 1].copy()


@dataclass(frozen=True, slots=True, eq=False)
class _Boundary:
    """The draws of classes up to an epoch; all arrays ``(K,)`` int64."""

    num_draws: int
    counts: Int64Array
    floors: Int64Array
    """Whole part of each class's share of the draws."""
    rests: Int64Array
    """Fraction of it, in parts of the sum of all weights."""

    def served(self, totals: Int64Array) -> _Boundary:
        """Serve what is due since the counts were taken, then the earliest deadlines of what is open."""
        counts = np.maximum(self.counts, self.floors)
        left = self.num_draws - int(counts.sum())
        is_open = np.flatnonzero((self.rests > 0) & (counts == self.floors))
        # Draws of all classes until the share of each reaches the next whole number.
        ahead = -((self.rests[is_open] - int(totals.sum())) // totals[is_open])
        chosen = is_open[np.argsort(ahead, kind="stable")[:left]]
        if left != len(chosen):
            raise PlanError(f"{left} draws are left for {len(chosen)} classes; this is a bug.")
        counts[chosen] += 1
        return _Boundary(self.num_draws, counts, self.floors, self.rests)


class WeightClasses:
    """Rows of a table by class, found without a list of rows. Safe to share between threads.

    Args:
        rows: The rows that may be drawn; the others are ignored.
        codes: The class of each row.
        row_weights: ``(G, K)`` integers of at least 0, the weight of a row of each class, a line per segment;
            None gives all classes that have rows the same total.
        num_classes: K.
        starts: First epoch of each segment, the first 0.
        names: Name of each class, for people.
        error: Largest relative difference between a weight and the integer that stands for it.

    Attributes:
        sizes: ``(K,)`` int64, rows of each class.
        totals: ``(G, K)`` int64, weights of all rows of each class.
        starts: First epoch of each segment.
        digest: SHA-256 of what decides the draws: the rows, the class of each, and the totals.

    Raises:
        PlanError: The weights of a segment are all 0, or their sum is too large.
    """

    def __init__(
        self,
        rows: Rows,
        codes: Codes,
        row_weights: Int64Array | None,
        num_classes: int,
        starts: Sequence[int] = (0,),
        *,
        names: tuple[str, ...] = (),
        error: float = 0.0,
    ) -> None:
        self.rows, self.codes, self.starts = rows, codes, tuple(starts)
        self.names = names or tuple(map(str, range(num_classes)))
        self.error = error
        self._num_classes = num_classes
        first, last = (rows.start, rows.stop) if isinstance(rows, range) else _ends(rows)
        self._first = first
        block = _SMALLEST_BLOCK
        while -(-(last - first) // block) * num_classes * np.dtype(np.uint32).itemsize > _INDEX_BYTES:
            block *= 2
        self._block, self._last = block, last
        digest = hashlib.sha256(_DIGEST_LABEL)
        digest.update(f"{first} {last} {num_classes}".encode())
        self._before = self._count(digest)
        self.sizes = self._before[-1].astype(np.int64)
        held = self.sizes > 0
        if row_weights is None:
            self.totals = held.astype(np.int64)[None]
        else:
            self.totals = row_weights * self.sizes
            if int((row_weights.astype(np.float64) * self.sizes).sum(axis=1).max()) >= 2**61:
                raise PlanError("the weights of all rows must add up to less than 2**61; make them smaller.")
        if not self.totals.any(axis=1).all():
            raise PlanError("the weights of the samples are all 0, so none can be drawn; correct the column.")
        digest.update(self.totals.astype("<i8").tobytes() + repr(self.starts).encode())
        self.digest = digest.hexdigest()

    def _count(self, digest: Any) -> npt.NDArray[np.uint32 | np.int64]:
        """Count the rows of each class in every block, and return the sums before each block and the end."""
        block, width = self._block, self._num_classes + 1
        num_blocks = -(-(self._last - self._first) // block)
        word = np.dtype(np.uint32 if self._last - self._first < 2**32 else np.int64)
        before = np.zeros((num_blocks + 1, self._num_classes), word)
        step = max(_READ_ROWS, block)
        keys = np.repeat(np.arange(step // block, dtype=np.int64) * width, block)
        narrow = np.dtype(np.uint8 if width <= 2**8 else "<u2")
        work = np.empty_like(keys)
        for start in range(self._first, self._last, step):
            stop = min(start + step, self._last)
            codes = self._masked(start, stop)
            digest.update(codes.astype(narrow, copy=False).data)
            np.add(keys[: stop - start], codes, out=work[: stop - start])
            counts = np.bincount(work[: stop - start], minlength=-(-(stop - start) // block) * width)
            at = (start - self._first) // block + 1
            found = counts.reshape(-1, width)[:, : self._num_classes]
            before[at : at + len(found)] = found
        np.cumsum(before, axis=0, out=before)
        return before

    def _masked(self, start: int, stop: int) -> CodeArray:
        """Return the classes of rows, with the number of classes for rows that are not to be drawn."""
        codes = self.codes(start, stop)
        if isinstance(self.rows, range):
            return codes
        return np.where(mask_of(self.rows, start, stop), codes, np.uint16(self._num_classes))

    def take(self, code: int, ranks: Int64Array) -> Int64Array:
        """Return the ``ranks``-th rows of a class, counted from 0, int64 of equal shape."""
        column = self._before[:, code]
        blocks = np.searchsorted(column[1:], ranks.astype(column.dtype), side="right")
        inside = ranks - column[blocks].astype(np.int64)
        rows = np.empty_like(ranks)
        order = np.argsort(blocks, kind="stable")
        found, firsts = np.unique(blocks[order], return_index=True)
        for number, here in zip(found.tolist(), np.split(order, firsts[1:]), strict=True):
            start = self._first + number * self._block
            codes = self._masked(start, min(start + self._block, self._last))
            rows[here] = np.flatnonzero(codes == code)[inside[here]] + start
        return rows

    def listed(self) -> list[ListedRows]:
        """Return the rows of each class as an array, which takes 4 or 8 bytes per row; for lanes."""
        word = np.int32 if self._last < 2**31 else np.int64
        found = [np.empty(int(size), word) for size in self.sizes]
        ends = np.zeros(self._num_classes, np.int64)
        for start in range(self._first, self._last, _READ_ROWS):
            codes = self._masked(start, min(start + _READ_ROWS, self._last))
            order = np.argsort(codes, kind="stable")
            counts = np.bincount(codes, minlength=self._num_classes + 1)[: self._num_classes]
            parts = np.split(order, np.cumsum(counts))
            for code in np.flatnonzero(counts).tolist():
                end = int(ends[code])
                found[code][end : end + int(counts[code])] = parts[code] + start
            ends += counts
        return [ListedRows(rows) for rows in found]


def _ends(rows: Any) -> tuple[int, int]:
    first, last = (int(rows.span(at, at + 1)[0]) for at in (0, len(rows) - 1))
    return first, last + 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Levels:
    """Values of a column of weights that are told apart, and the integers that stand for them."""

    bits: Int64Array
    """``(K,)`` int64, ascending: the 64-bit patterns of the values, cut to `mask`."""
    mask: int
    """Which bits of a value count."""
    weights: Int64Array
    """``(K,)`` int64, at most 2**31 - 1; 0 for the value 0 alone."""
    error: float
    """Largest relative difference between a value and what its integer stands for; 0 if they are exact."""
    table: CodeArray | None
    """``(2**16,)``, class of each value if all are integers below 2**16; otherwise None."""

    def codes(self, values: npt.NDArray[Any]) -> CodeArray:
        """Return the class of each value, ``(n,)`` uint16; of values that were not there, any."""
        if self.table is not None:
            return self.table.take(values, mode="clip")
        return np.searchsorted(self.bits, _bits(values) & self.mask).astype(np.uint16)


def find_levels(blocks: Iterator[npt.NDArray[Any]], *, name: str) -> Levels:
    """Find the values of a column of weights, and the integers that stand for them.

    Integers of at most 1,024 values are exact. Other values are scaled by a power of two so that the largest
    lies below 2**31; more than 1,024 values are cut to as many significant bits as leave no more.

    Args:
        blocks: Weights of the rows that may be drawn, in blocks.
        name: Name of the column, for messages.

    Raises:
        ConfigError: A weight is negative or not finite.
    """
    bits, mask, integers = np.zeros(0, np.int64), -1, True
    counts: Int64Array = np.zeros(_TABLE_VALUES, np.int64)
    for block in blocks:
        if not block.size:
            continue
        _check_weights(block, name)
        integers &= block.dtype.kind in "iub"
        is_narrow = block.dtype.kind in "ub" and block.dtype.itemsize <= np.dtype(np.uint16).itemsize
        if is_narrow or (block.dtype.kind in "iu" and int(block.max()) < _TABLE_VALUES):
            counts += np.bincount(block, minlength=_TABLE_VALUES)  # ten times as fast as sorting
            continue
        found = np.unique(_bits(block) & mask)
        bits, mask = _merged(bits, found, mask)
    is_small = not len(bits)
    bits, mask = _merged(bits, np.unique(_bits(np.flatnonzero(counts)) & mask), mask)
    values = bits.view(np.float64)
    # What was cut off is half a unit of the last bit on average; 0 stays 0.
    middles = np.where(
        values > 0, (bits | ((~mask + 1) >> 1)).view(np.float64) if mask != -1 else values, 0.0
    )
    largest = float(middles.max(initial=0.0))
    scale = 1.0
    if not (integers and largest <= MAX_WEIGHT and mask == -1) and largest > 0:
        scale = 2.0 ** (30 - int(np.floor(np.log2(largest))))
    weights = np.where(middles > 0, np.maximum(np.rint(middles * scale), 1), 0).astype(np.int64)
    used = values > 0
    error = float(np.abs(weights[used] / scale / values[used] - 1).max(initial=0.0))
    table = None
    if is_small:
        table = np.searchsorted(bits, _bits(np.arange(_TABLE_VALUES)) & mask).astype(np.uint16)
    return Levels(bits=bits, mask=mask, weights=weights, error=error, table=table)


def _bits(values: npt.NDArray[Any]) -> Int64Array:
    """Return the patterns of numbers of at least 0, which ascend with them."""
    found: Int64Array = (values.astype(np.float64) + 0.0).view(np.int64)  # -0.0 is 0.0
    return found


def _check_weights(block: npt.NDArray[Any], name: str) -> None:
    if block.dtype.kind == "f" and not np.isfinite(block).all():
        raise ConfigError(
            f"weights={name!r} must be finite numbers, got NaN or infinity; correct the column."
        )
    if block.dtype.kind not in "bu" and block.min() < 0:
        raise ConfigError(f"weights={name!r} must be at least 0, got negative numbers; correct the column.")


def _merged(bits: Int64Array, found: Int64Array, mask: int) -> tuple[Int64Array, int]:
    """Join values, cut to fewer significant bits while there are too many; a cut never needs the rest."""
    bits = np.union1d(bits, found)
    cut = _MANTISSA_BITS - 12 if mask == -1 else (~mask).bit_length()
    while len(bits) > MAX_CLASSES:
        cut += 1
        mask = -1 << cut
        bits = np.unique(bits & mask)
    return bits, mask
