"""Sample layout: shards as row ranges with their bytes and facts, for a whole split or for chosen rows.

The plan reads no file: its caller passes columns of the samples table, usually memory-mapped, and nothing
here makes a copy that grows with the number of samples.

`RowSet` is a subset in 0.19 bytes per row, whatever share is chosen: one bit per row of the table and a
count every 64 rows. Half of 200 million rows takes 38 MB (800 MB as int64), and neither the n-th chosen row
nor the rank of a row takes a loop over rows. Rows without gaps are a ``range``. The layout of a subset is
indexed by the numbers of chosen samples instead of rows; `ChosenColumn` and `EvenOffsets` translate.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardflow.errors import PlanError
from shardflow.sampling.permutation import Int64Array, sums

BoolArray = npt.NDArray[np.bool_]

# A multiple of 64, so that every block begins with a whole word.
_BLOCK_ROWS = 2**20
_HALVES = (32, 16, 8, 4, 2, 1)
_DIGEST_LABEL = b"shardflow-rows-1"
AnyArray = npt.NDArray[Any]


class RowSet:
    """Ascending rows, at least one, with gaps. Safe to share between threads.

    Args:
        start: The row of bit 0; the first chosen one.
        words: ``(W,)`` uint64; bit ``i`` of word ``w`` is set if row ``start + 64 w + i`` is chosen.
    """

    def __init__(self, start: int, words: npt.NDArray[np.uint64]) -> None:
        self._start = start
        # An empty word at the end, so that the end of the rows has a word too.
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
        """Memory of the set in bytes."""
        return self._words.nbytes + self._before.nbytes

    def take(self, numbers: Int64Array) -> Int64Array:
        """Return the ``numbers``-th chosen rows, counted from 0, int64 of equal shape."""
        numbers = np.asarray(numbers, np.int64)
        # Searched in the type of the counts: otherwise NumPy would copy all of them.
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
        """Return the number of chosen rows before each of ``rows``, int64."""
        offsets = np.clip(rows - self._start, 0, 64 * (len(self._words) - 1))
        place, bit = offsets >> 6, (offsets & 63).astype(np.uint64)
        low = self._words[place] & ((np.uint64(1) << bit) - np.uint64(1))
        ranks: Int64Array = self._before[place].astype(np.int64) + np.bitwise_count(low)
        return ranks

    def span(self, start: int, stop: int) -> Int64Array:
        """Return the rows of the numbers ``[start, stop)``; faster than `take` for consecutive ones."""
        if stop <= start:
            return np.zeros(0, np.int64)
        ends = np.array([start, stop - 1], self._before.dtype)
        first, last = (np.searchsorted(self._before[:-1], ends, side="right") - 1).tolist()
        bits = np.unpackbits(self._words[first : last + 1].view(np.uint8), bitorder="little")
        skipped = start - int(self._before[first])
        rows: Int64Array = np.flatnonzero(bits)[skipped : skipped + stop - start] + (first * 64 + self._start)
        return rows

    def blocks(self) -> Iterator[Int64Array]:
        """Yield all rows in blocks, in ascending order."""
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
        return _digest_of_bits(self._start, num_spanned, self._words.view(np.uint8)[: -(-num_spanned // 8)])


class ListedRows:
    """Ascending rows of an array, as a `RowSet` offers them: 4 or 8 bytes per row, found without a search.

    Args:
        rows: ``(n,)`` integers.
    """

    def __init__(self, rows: AnyArray) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, numbers: Int64Array) -> Int64Array:
        """Return the ``numbers``-th rows, int64."""
        found: Int64Array = self._rows[numbers].astype(np.int64)
        return found

    def span(self, start: int, stop: int) -> Int64Array:
        """Return the rows of the numbers ``[start, stop)``."""
        found: Int64Array = self._rows[start:stop].astype(np.int64)
        return found

    def blocks(self) -> Iterator[Int64Array]:
        """Yield all rows in blocks, in ascending order."""
        for start in range(0, len(self._rows), _BLOCK_ROWS):
            yield self.span(start, start + _BLOCK_ROWS)


Rows: TypeAlias = range | RowSet
"""Ascending rows of a samples table; a range if they have no gaps."""


def nth_rows(rows: Rows | ListedRows, numbers: Int64Array) -> Int64Array:
    """Return the ``numbers``-th of ``rows``."""
    if isinstance(rows, range):
        return numbers + rows.start
    return rows.take(numbers)


def mask_of(rows: Rows, start: int, stop: int) -> BoolArray:
    """Return whether each row in ``[start, stop)`` belongs to ``rows``."""
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
    return _digest_of_bits(rows.start, len(rows), np.packbits(np.ones(len(rows), bool), bitorder="little"))


def _digest_of_bits(start: int, num_rows: int, bits: npt.NDArray[np.uint8]) -> str:
    header = struct.pack("<QQ", start, num_rows)
    return hashlib.sha256(_DIGEST_LABEL + header + bits.tobytes()).hexdigest()


def select_rows(span: range, choose: Callable[[int, int], BoolArray]) -> Rows:
    """Choose rows of a table, block by block.

    Args:
        span: The rows to choose from, without gaps.
        choose: Called with ``start, stop`` for parts of ``span``, in order; returns which rows are chosen,
            ``(stop - start,)`` bool.

    Returns:
        The chosen rows; a range if they have no gaps, empty if none is chosen.
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
    """Shift the bits to begin with the first chosen row, so that equal rows have equal words."""
    skipped, shift = divmod(offset, 64)
    words = words[skipped:]
    if shift:
        high = np.append(words[1:], np.uint64(0)) << np.uint64(64 - shift)
        words = (words >> np.uint64(shift)) | high
    return start, words[: -(-num_rows // 64)]


class Column(Protocol):
    """Numbers by sample: an array, or an object indexed like one."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the numbers."""

    @property
    def ndim(self) -> int:
        """Always 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleLayout:
    """The shards and bytes behind a population of rows.

    Raises:
        PlanError: The arrays do not fit each other or the population.
    """

    dataset_id: str
    """Digest of the manifest, 64 hexadecimal digits; it decides the lane of each sample."""
    population: range
    """Rows of the samples table, without gaps; of a subset or a blend, the numbers of its samples from 0."""
    shard_rows: Int64Array
    """``(S + 1,)`` int64, ascending: shard s holds the rows ``[shard_rows[s], shard_rows[s + 1])``."""
    shard_end_bytes: Int64Array
    """``(S,)`` int64, end of the last sample of the population in each shard."""
    offset_bytes: Column
    """Integers by row of the table (not of the population): offset of each sample in its shard."""
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Further integers by row of the table, such as ``text_bytes``, each a `Column`; used by a cost rule."""

    def __post_init__(self) -> None:
        rows, population = self.shard_rows, self.population
        if population.step != 1 or not population:
            raise PlanError(
                f"population must be rows without gaps, at least one, got {population} (sample layout)."
            )
        if (
            rows.ndim != 1
            or len(rows) != len(self.shard_end_bytes) + 1
            or len(rows) < 2
            or (int(rows[0]), int(rows[-1])) != (population.start, population.stop)
            or bool((np.diff(rows) <= 0).any())
        ):
            raise PlanError(
                f"shard_rows must ascend from {population.start} to {population.stop}, with one number more "
                f"than shard_end_bytes has ({len(self.shard_end_bytes)}), got another array (sample layout); "
                f"run `shardflow verify` on the dataset."
            )
        for name, column in {"offset_bytes": self.offset_bytes, **self.facts}.items():
            if column.ndim != 1 or len(column) < population.stop or column.dtype.kind not in "iu":
                raise PlanError(
                    f"{name} must be integers for {population.stop} rows, got {column.dtype} of shape "
                    f"{column.shape} (sample layout); run `shardflow verify` on the dataset."
                )

    @classmethod
    def of_columns(
        cls,
        population: range,
        *,
        dataset_id: str,
        shard: AnyArray,
        offset_bytes: AnyArray,
        num_bytes: AnyArray,
        facts: Mapping[str, AnyArray] | None = None,
    ) -> SampleLayout:
        """Make the layout from columns of the samples table, whose rows are ordered by shard and offset.

        Reads a few rows per shard, so opening 200 million rows takes milliseconds.

        Args:
            population: Rows, without gaps.
            dataset_id: Digest of the manifest.
            shard: Number of each row's shard, ascending over the population.
            offset_bytes: Offset of each row's sample.
            num_bytes: Size of each row's sample.
            facts: Further columns.

        Raises:
            PlanError: The rows are not ordered, or empty.
        """
        if population.step != 1 or not population or population.stop > len(shard):
            raise PlanError(
                f"population must be rows of the table ({len(shard)}) without gaps, at least one, got "
                f"{population} (sample layout)."
            )
        inside = shard[population.start : population.stop]
        first, last = int(inside[0]), int(inside[-1])
        if last < first:
            raise PlanError(
                "shard must ascend over the population, got a table in another order (sample layout); run "
                "`shardflow verify` on the dataset."
            )
        # Searched in the column's own type: otherwise NumPy would copy the whole column.
        numbers = np.arange(first, last + 1, dtype=np.int64).astype(shard.dtype)
        starts = np.unique(np.searchsorted(inside, numbers)).astype(np.int64)
        rows = np.append(starts, len(inside)) + population.start
        ends = rows[1:] - 1
        return cls(
            dataset_id=dataset_id,
            population=population,
            shard_rows=rows,
            shard_end_bytes=offset_bytes[ends].astype(np.int64) + num_bytes[ends].astype(np.int64),
            offset_bytes=offset_bytes,
            facts=dict(facts or {}),
        )

    @property
    def num_samples(self) -> int:
        """Rows of the population."""
        return len(self.population)

    @property
    def num_drawn(self) -> int:
        """Samples of an epoch: those of the population; a blend draws some more often."""
        return self.num_samples

    @property
    def num_shards(self) -> int:
        """Shards that hold rows of the population."""
        return len(self.shard_end_bytes)

    def shards_of(self, rows: Int64Array) -> Int64Array:
        """Return the number of each row's shard among ``num_shards``."""
        return np.searchsorted(self.shard_rows, rows, side="right") - 1

    def sample_bytes(self, rows: Int64Array) -> Int64Array:
        """Return the size of each row's sample, including the gap before the next one."""
        shards = self.shards_of(rows)
        sizes: Int64Array = self.ends_of(rows + 1, shards) - self.offset_bytes[rows].astype(np.int64)
        return sizes

    def ends_of(self, stops: Int64Array, shards: Int64Array) -> Int64Array:
        """Return the end of the rows before ``stops``, in ``shards``: int64 bytes."""
        is_last = stops == self.shard_rows[shards + 1]
        inside = self.offset_bytes[np.where(is_last, stops - 1, stops)].astype(np.int64)
        return np.where(is_last, self.shard_end_bytes[shards], inside)


class EvenOffsets:
    """Offsets of samples, as if those of a shard were equally large and contiguous.

    The total of each shard is exact; within one, windows need only approximate sizes. It takes two numbers
    per shard, where exact sums would take one per sample.

    Args:
        shard_rows: ``(S + 1,)`` int64, numbers of the samples of each shard.
        shard_bytes: ``(S,)`` int64, bytes of them.
    """

    __slots__ = ("_each", "_rest", "_shard_rows", "dtype", "ndim", "shape")

    def __init__(self, shard_rows: Int64Array, shard_bytes: Int64Array) -> None:
        self._shard_rows = shard_rows
        self._each, self._rest = np.divmod(shard_bytes, np.diff(shard_rows))
        self.dtype, self.ndim, self.shape = np.dtype(np.int64), 1, (int(shard_rows[-1]),)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        numbers = np.arange(*key.indices(len(self)), dtype=np.int64) if isinstance(key, slice) else key
        shards: Any
        if isinstance(key, slice) and len(numbers):
            # The plan of lanes looks at one shard after another, so most slices are of one.
            first, last = np.searchsorted(self._shard_rows, numbers[[0, -1]], side="right") - 1
            shards = first if first == last else np.searchsorted(self._shard_rows, numbers, side="right") - 1
        else:
            shards = np.searchsorted(self._shard_rows, numbers, side="right") - 1
        places = numbers - self._shard_rows[shards]
        return places * self._each[shards] + np.minimum(places, self._rest[shards])


class ChosenColumn:
    """Column of the samples table, indexed by the numbers of chosen samples.

    Args:
        column: ``(rows of the table,)``.
        rows: The chosen rows.
    """

    __slots__ = ("_column", "_rows", "dtype", "ndim", "shape")

    def __init__(self, column: AnyArray, rows: Rows | ListedRows) -> None:
        self._column, self._rows = column, rows
        self.dtype, self.ndim, self.shape = column.dtype, 1, (len(rows),)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        rows = self._rows
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self))
            if isinstance(rows, range):
                return self._column[rows.start + start : rows.start + stop]
            return self._column[rows.span(start, stop)]
        return self._column[nth_rows(rows, np.asarray(key))]


def chosen_layout(
    rows: RowSet | ListedRows,
    *,
    dataset_id: str,
    shard: AnyArray,
    num_bytes: AnyArray,
    facts: Mapping[str, AnyArray],
) -> SampleLayout:
    """Return the layout of chosen rows, whose population is ``range(len(rows))``.

    Reads two columns of the chosen rows once, in blocks, and keeps two numbers per shard.

    Args:
        rows: The chosen rows.
        dataset_id: Digest of the manifest.
        shard: Number of each row's shard, by row of the table; samples of a shard are contiguous.
        num_bytes: Size of each row's sample.
        facts: Further columns.

    Raises:
        PlanError: The columns do not fit the rows.
    """
    numbers: list[int] = []
    counts: list[int] = []
    sizes: list[int] = []
    for number, count, size in _runs(rows, shard, num_bytes):
        if numbers and numbers[-1] == number:  # a shard that two blocks share
            counts[-1] += count
            sizes[-1] += size
            continue
        numbers.append(number)
        counts.append(count)
        sizes.append(size)
    shard_rows = sums(counts)
    shard_bytes = np.array(sizes, np.int64)
    return SampleLayout(
        dataset_id=dataset_id,
        population=range(len(rows)),
        shard_rows=shard_rows,
        shard_end_bytes=shard_bytes,
        offset_bytes=EvenOffsets(shard_rows, shard_bytes),
        facts={name: ChosenColumn(column, rows) for name, column in facts.items()},
    )


def _runs(rows: RowSet | ListedRows, shard: AnyArray, num_bytes: AnyArray) -> Iterator[tuple[int, int, int]]:
    """Yield shard, samples and bytes of consecutive chosen rows of one shard."""
    for block in rows.blocks():
        shards = shard[block]
        starts = np.concatenate(([0], np.flatnonzero(shards[1:] != shards[:-1]) + 1))
        sizes = np.add.reduceat(num_bytes[block].astype(np.int64), starts)
        counts = np.diff(np.append(starts, len(block)))
        yield from zip(shards[starts].tolist(), counts.tolist(), sizes.tolist(), strict=True)
