"""The checksummed column table: every binary file of a dataset but the tars.

Owns encoding, reading and checking; what the columns mean is the business of `shards.index` and
`shards.samples`. Columns are views of the mapped file. A block is checked once, when it is first touched, so
that opening a table of any size costs the header and the checksums alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.shards.canonical import Json, canonical_json
from shardflow.shards.table_layout import (
    BLOCK_NUM_BYTES,
    END_MAGIC,
    MAGIC,
    PREFIX,
    TRAILER,
    Column,
    TableDamageError,
    align,
    crc32c,
    parse_layout,
)

__all__ = ["Table", "encode_table"]

_KINDS = "iufS"
# Above this mean length a copy for each span costs less than a number for each row.
_LONG_SPAN_ROWS = 32


def encode_table(columns: Mapping[str, NDArray[Any]], meta: Mapping[str, Json]) -> bytes:
    """Encode columns and meta data as a table file.

    Args:
        columns: Arrays of signed, unsigned, floating or byte-string dtype with at least one axis; stored
            little-endian
            and in C order, in the order given.
        meta: JSON without floating-point numbers.

    Raises:
        FormatError: A column has a dtype without defined bytes, or no axis.
    """
    entries: list[Json] = []
    data: list[bytes] = []
    checksums: list[int] = []
    offset = 0
    for name, values in columns.items():
        if values.dtype.kind not in _KINDS or not values.ndim:
            raise FormatError(
                f"a column must be an array of {_KINDS}, got {values.dtype}, {values.ndim} axes ({name})."
            )
        array = np.asarray(values, dtype=values.dtype.newbyteorder("<"), order="C")
        raw = array.tobytes()
        raw += bytes(align(len(raw)) - len(raw))
        entries.append(
            {
                "name": name,
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "offset": offset,
                "num_bytes": array.nbytes,
            }
        )
        checksums += [crc32c(raw[at : at + BLOCK_NUM_BYTES]) for at in range(0, len(raw), BLOCK_NUM_BYTES)]
        data.append(raw)
        offset += len(raw)
    text = canonical_json(
        {"block_num_bytes": BLOCK_NUM_BYTES, "columns": entries, "data_num_bytes": offset, "meta": dict(meta)}
    )
    header = text.ljust(align(PREFIX.size + len(text)) - PREFIX.size)
    packed = np.array(checksums, "<u4").tobytes()
    prefix = PREFIX.pack(MAGIC, len(header), crc32c(header))
    return b"".join([prefix, header, *data, packed, TRAILER.pack(crc32c(packed), END_MAGIC)])


class Table:
    """A table file, open for reading. Safe for many threads.

    Args:
        buffer: The whole file, usually a memory map.
        name: What errors call the file.

    Attributes:
        meta: The meta data that were encoded with the columns.

    Raises:
        TableDamageError: This is no whole table file, or its header or checksums are damaged.
    """

    def __init__(self, buffer: memoryview, *, name: str) -> None:
        self.name = name
        layout = parse_layout(buffer, name)
        self.meta: dict[str, Any] = layout.meta
        self._bytes = np.frombuffer(buffer, np.uint8)
        self._columns = layout.columns
        self._data_start = layout.data_start
        self._checksums = layout.checksums
        self._is_checked = np.zeros(len(layout.checksums), bool)
        # Columns of which no block is left to check, as views: what is read most often asks no further.
        self._whole: dict[str, NDArray[Any]] = {}

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of the columns, in file order."""
        return tuple(self._columns)

    def expect_kind(self, kind: str, format_version: int) -> None:
        """Refuse a table that holds something else, or a newer format of it.

        Raises:
            FormatError: ``meta`` names another kind or format version.
        """
        found = (self.meta.get("kind"), self.meta.get("format_version"))
        if found != (kind, format_version):
            raise FormatError(
                f"{self.name} must be a {kind} of format {format_version}, got {found[0]!a} {found[1]!a}; "
                "a newer format needs a newer shardflow."
            )

    def num_rows(self, name: str) -> int:
        """Return the length of a column's first axis.

        Raises:
            FormatError: There is no such column.
        """
        return self._column(name).shape[0]

    def column(self, name: str) -> NDArray[Any]:
        """Return a column as a read-only view, with all of its blocks checked.

        Raises:
            FormatError: There is no such column.
            TableDamageError: A block is damaged.
        """
        column = self._column(name)
        self._check(column, np.arange(column.num_blocks))
        return self._view(column)

    def whole(self, name: str) -> NDArray[Any] | None:
        """Return a column as a read-only view if all of its blocks are checked by now, else nothing."""
        return self._whole.get(name)

    def spans(self, name: str, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
        """Return a column as a read-only view of which only some spans of rows are checked.

        Arguments and errors as of `gather_spans`.
        """
        column = self._column(name)
        lengths = stops - starts
        if len(starts) and (starts.min() < 0 or lengths.min() < 0 or stops.max() > column.shape[0]):
            raise IndexError(
                f"spans must lie in [0, {column.shape[0]}), got others ({self.name}, column {name})."
            )
        has_rows = np.flatnonzero(lengths)
        self._check_rows(column, starts[has_rows], stops[has_rows])
        return self._view(column)

    def gather(self, name: str, rows: NDArray[Any] | int) -> NDArray[Any]:
        """Return some rows of a column; only the blocks that hold them are read and checked.

        Args:
            name: The column.
            rows: Row numbers, an integer array or one number.

        Raises:
            FormatError: There is no such column.
            TableDamageError: A block that holds one of the rows is damaged.
            IndexError: A row lies outside the column.
        """
        column = self._column(name)
        at = np.atleast_1d(np.asarray(rows, np.int64))
        num_rows = column.shape[0]
        if at.size and at.view(np.uint64).max() >= num_rows:  # as such a word a negative one is huge
            raise IndexError(f"rows must lie in [0, {num_rows}), got others ({self.name}, column {name}).")
        if name not in self._whole:
            self._check_rows(column, at, at + 1)
        return np.asarray(self._view(column)[rows])

    def gather_spans(self, name: str, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
        """Return spans of rows of a column, one behind another; only their blocks are read and checked.

        Args:
            name: The column.
            starts: ``(n,)`` first row of each span.
            stops: ``(n,)`` row behind its last one; an empty span is allowed.

        Raises:
            FormatError: There is no such column.
            TableDamageError: A block that holds one of the rows is damaged.
            IndexError: A span lies outside the column.
        """
        view = self.spans(name, starts, stops)
        lengths = stops - starts
        if lengths.sum() > _LONG_SPAN_ROWS * len(starts):
            spans = [view[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
            return np.concatenate(spans)
        # Row i of the result is row i - (where its span begins in the result) of its span.
        shifts = starts - (np.cumsum(lengths) - lengths)
        rows = np.arange(int(lengths.sum())) + np.repeat(shifts, lengths)
        return np.asarray(view[rows])

    def verify(self) -> None:
        """Check every byte of the file.

        Raises:
            TableDamageError: A block is damaged; the message names its column and place.
        """
        for column in self._columns.values():
            self._check(column, np.arange(column.num_blocks))

    def _column(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise FormatError(
                f"{self.name} must have a column {name}, got {', '.join(self._columns)}; is it another table?"
            ) from None

    def _view(self, column: Column) -> NDArray[Any]:
        view = self._whole.get(column.name)
        if view is not None:
            return view
        start = self._data_start + column.offset
        view = self._bytes[start : start + column.num_bytes].view(column.dtype).reshape(column.shape)
        view.flags.writeable = False
        return view

    def _check_rows(self, column: Column, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Check the blocks of some spans of rows, none of them empty."""
        if column.name in self._whole:
            return
        row_num_bytes = column.num_bytes // max(column.shape[0], 1)
        first = starts * row_num_bytes // BLOCK_NUM_BYTES
        last = (stops * row_num_bytes - 1) // BLOCK_NUM_BYTES
        # A span may straddle blocks; those between its first and its last one count as well.
        offsets = np.arange(int((last - first).max(initial=0)) + 1)
        self._check(column, np.minimum(first[:, None] + offsets, last[:, None]).ravel())

    def _check(self, column: Column, blocks: NDArray[np.int64]) -> None:
        unchecked = blocks[~self._is_checked[column.first_block + blocks]]
        if not len(unchecked):
            return
        # np.unique would import numpy.ma, 30 ms before the first batch.
        for block in sorted(set(unchecked.tolist())):
            start, stop = column.block_range(block)
            start, stop = start + self._data_start, stop + self._data_start
            number = column.first_block + block
            if crc32c(self._bytes[start:stop]) != int(self._checksums[number]):
                raise TableDamageError(
                    self.name,
                    start,
                    f"column {column.name}, bytes {start} to {stop}",
                    "another crc32c of a block",
                )
            # Two threads may check the same block at once; both write the same value.
            self._is_checked[number] = True
        all_blocks = slice(column.first_block, column.first_block + column.num_blocks)
        if self._is_checked[all_blocks].all():
            self._whole[column.name] = self._view(column)
