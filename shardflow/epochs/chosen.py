"""The layout of chosen rows: the numbers of the chosen samples stand where rows stand in a whole split.

Lanes and windows ask for shards, bytes and facts by the number of a sample. For a whole split that is its
row. For a subset it is its place among the chosen ones, and these columns translate on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import sums
from shardflow.epochs.layout import SampleLayout
from shardflow.epochs.rows import Rows, RowSet, nth_rows

__all__ = ["ChosenColumn", "EvenOffsets", "chosen_layout"]

Int64Array = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]


class EvenOffsets:
    """Where samples begin, as if those of a shard were equally large and lay side by side.

    The bytes of a shard's chosen samples are exact, and so are whole shards; inside one, windows need no more
    than about. It takes two numbers a shard where true sums would take one a sample.

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
        shards = np.searchsorted(self._shard_rows, numbers, side="right") - 1
        places = numbers - self._shard_rows[shards]
        return places * self._each[shards] + np.minimum(places, self._rest[shards])


class ChosenColumn:
    """A column of the samples table, asked for by the numbers of chosen samples.

    Args:
        column: ``(rows of the table,)``.
        rows: The chosen rows.
    """

    __slots__ = ("_column", "_rows", "dtype", "ndim", "shape")

    def __init__(self, column: AnyArray, rows: Rows) -> None:
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
    rows: RowSet, *, dataset_id: str, shard: AnyArray, num_bytes: AnyArray, facts: Mapping[str, AnyArray]
) -> SampleLayout:
    """Return the layout of chosen rows, whose population is ``range(len(rows))``.

    Reads two columns of the chosen rows once, in blocks; what it keeps has two numbers a shard.

    Args:
        rows: The chosen rows.
        dataset_id: Digest of the manifest.
        shard: Number of each row's shard, by row of the table; samples of a shard are neighbours.
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


def _runs(rows: RowSet, shard: AnyArray, num_bytes: AnyArray) -> Iterator[tuple[int, int, int]]:
    """Yield shard, samples and bytes of neighbouring chosen rows of one shard."""
    for block in rows.blocks():
        shards = shard[block]
        starts = np.concatenate(([0], np.flatnonzero(shards[1:] != shards[:-1]) + 1))
        sizes = np.add.reduceat(num_bytes[block].astype(np.int64), starts)
        counts = np.diff(np.append(starts, len(block)))
        yield from zip(shards[starts].tolist(), counts.tolist(), sizes.tolist(), strict=True)
