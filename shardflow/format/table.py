"""Checksummed column tables: the format of every binary file of a dataset except the tars.

The layout is specified in docs/format.md, section 5::

    prefix     magic, header_num_bytes, crc32c(header)        16 bytes
    header     canonical JSON, padded with spaces             data begins at a multiple of 64
    data       columns, each padded with zeros to 64 bytes
    checksums  crc32c of each 64 KiB block of each column     in column order
    trailer    crc32c(checksums), end magic                   12 bytes

Columns are views of the mapped file. A block is checked once, when it is first touched, so opening a table
of any size costs its header and checksums alone. `stream_table` writes a table in the memory of one piece;
sizes must be known in advance, because the header contains them.
"""

from __future__ import annotations

import json
import math
import re
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, FormatError
from shardflow.format.keys import Json, canonical_json

MAGIC = b"SFTABLE1"
END_MAGIC = b"SFTABEND"
BLOCK_NUM_BYTES = 65536
ALIGNMENT = 64
PREFIX = struct.Struct("<8sII")
TRAILER = struct.Struct("<I8s")
# Object, Unicode, date and boolean columns have no one byte layout that every reader knows.
_DTYPE = re.compile(r"<[iu][248]|\|[iu]1|<f[248]|\|S[1-9][0-9]{0,3}", re.ASCII)
_KINDS = "iufS"
# Above this mean length, copying each span costs less than indexing each row.
_LONG_SPAN_ROWS = 32


class TableDamageError(ChecksumError):
    """Damage of a table file: its bytes are not the ones that were written.

    Attributes:
        offset: Where in the file, in bytes.
        place: Where, in words: the column or the part of the file.
        problem: What is wrong there.
    """

    def __init__(self, name: str, offset: int, place: str, problem: str) -> None:
        super().__init__(
            f"{name} must be whole, got {problem} ({place}, offset {offset}); "
            "run `shardflow verify` and fetch the file again."
        )
        self.name, self.offset, self.place, self.problem = name, offset, place, problem

    def __reduce__(self) -> tuple[type[TableDamageError], tuple[str, int, str, str]]:
        """Cross a process boundary with all fields."""
        return type(self), (self.name, self.offset, self.place, self.problem)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its dtype and shape, its bytes in the data region, and the number of its first checksum."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    first_block: int

    @property
    def num_blocks(self) -> int:
        """Number of checksums of the column."""
        return -(-self.num_bytes // BLOCK_NUM_BYTES)

    def block_range(self, block: int) -> tuple[int, int]:
        """Return the bytes of a block in the data region; the last block includes the padding."""
        start = block * BLOCK_NUM_BYTES
        stop = min(start + BLOCK_NUM_BYTES, align(self.num_bytes))
        return self.offset + start, self.offset + stop


@dataclass(frozen=True, slots=True)
class Layout:
    """A parsed and checked header, with the checksums of the blocks."""

    meta: dict[str, Any]
    columns: dict[str, Column]
    data_start: int
    checksums: NDArray[np.uint32]


def align(num_bytes: int) -> int:
    """Round up to the next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def crc32c(data: bytes | memoryview | NDArray[Any]) -> int:
    """Return the CRC-32C (Castagnoli) of a buffer, without copying it."""
    if not isinstance(data, bytes):
        # google_crc32c takes bytes and arrays, read-only ones too, but refuses a memoryview.
        data = np.frombuffer(data, np.uint8)
    return int(google_crc32c.value(data))


class Need(Protocol):
    """Function that puts some bytes of a table into its buffer, which is filled as it is read."""

    def __call__(self, start: int, stop: int, *, afresh: bool = False) -> None:
        """Fetch what is missing of the bytes from ``start`` to ``stop``; with ``afresh``, all of them."""


def all_there(start: int, stop: int, *, afresh: bool = False) -> None:
    """Do nothing: the `Need` of a buffer that is whole."""


def parse_layout(buffer: memoryview, name: str, need: Need = all_there) -> Layout:
    """Read and check prefix, header, checksums and trailer; the data blocks are left unread.

    Args:
        buffer: The whole file.
        name: What errors call the file.
        need: Fills the buffer, see `Table`.

    Raises:
        TableDamageError: The file is no whole table.
    """
    need(0, min(PREFIX.size, buffer.nbytes))
    if buffer.nbytes < PREFIX.size:
        raise TableDamageError(name, buffer.nbytes, "prefix", "the end of the file")
    magic, header_num_bytes, header_crc = PREFIX.unpack_from(buffer)
    if magic != MAGIC:
        raise TableDamageError(name, 0, "prefix", f"another magic than {MAGIC.decode()}")
    data_start = PREFIX.size + header_num_bytes
    if data_start > buffer.nbytes:
        raise TableDamageError(name, 8, "prefix", "a header length that passes the end of the file")
    need(PREFIX.size, data_start)
    header = bytes(buffer[PREFIX.size : data_start])
    if crc32c(header) != header_crc:
        # The wrong byte may also be in the length or the crc32c, which precede the header.
        raise TableDamageError(name, len(MAGIC), "header", "another crc32c")
    try:
        fields = json.loads(header)
        columns = _parse_columns(fields["columns"])
        is_consistent = (
            data_start % ALIGNMENT == 0
            and fields["block_num_bytes"] == BLOCK_NUM_BYTES
            and fields["data_num_bytes"] == sum(align(column.num_bytes) for column in columns.values())
            and isinstance(fields["meta"], dict)
        )
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError):
        is_consistent = False
    if not is_consistent:
        raise TableDamageError(name, PREFIX.size, "header", "a header that no writer of this format makes")
    data_stop = data_start + fields["data_num_bytes"]
    num_blocks = sum(column.num_blocks for column in columns.values())
    checksums_stop = data_stop + 4 * num_blocks
    if buffer.nbytes != checksums_stop + TRAILER.size:
        raise TableDamageError(
            name,
            min(buffer.nbytes, checksums_stop + TRAILER.size),
            "end of file",
            f"{buffer.nbytes} bytes instead of {checksums_stop + TRAILER.size}",
        )
    need(data_stop, buffer.nbytes)
    checksums_crc, end_magic = TRAILER.unpack_from(buffer, checksums_stop)
    if end_magic != END_MAGIC:
        raise TableDamageError(
            name, checksums_stop + 4, "trailer", f"another magic than {END_MAGIC.decode()}"
        )
    checksums = np.frombuffer(buffer, "<u4", num_blocks, data_stop)
    if crc32c(checksums) != checksums_crc:
        raise TableDamageError(name, data_stop, "checksums", "another crc32c of the checksums")
    return Layout(fields["meta"], columns, data_start, checksums)


def _parse_columns(entries: list[dict[str, Any]]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    offset = first_block = 0
    for entry in entries:
        if not _DTYPE.fullmatch(entry["dtype"]):
            raise ValueError
        dtype, shape = np.dtype(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        num_bytes = dtype.itemsize * math.prod(shape)
        # Everything but dtype and shape follows from the order of the columns, so a disagreement is damage.
        if not shape or min(shape) < 0 or (entry["offset"], entry["num_bytes"]) != (offset, num_bytes):
            raise ValueError
        column = Column(entry["name"], dtype, shape, offset, num_bytes, first_block)
        columns[column.name] = column
        offset += align(num_bytes)
        first_block += column.num_blocks
    if len(columns) != len(entries):
        raise ValueError
    return columns


class Table:
    """A table file, open for reading. Safe for many threads.

    Args:
        buffer: The whole file, usually a memory map.
        name: What errors call the file.
        need: Fills a buffer that is filled as it is read; called for a block before it is checked, and once
            more where its checksum is another one.

    Attributes:
        meta: The metadata that was encoded with the columns.

    Raises:
        TableDamageError: This is no whole table file, or its header or checksums are damaged.
    """

    def __init__(self, buffer: memoryview, *, name: str, need: Need = all_there) -> None:
        self.name = name
        layout = parse_layout(buffer, name, need)
        self._need = need
        self.meta: dict[str, Any] = layout.meta
        self._bytes = np.frombuffer(buffer, np.uint8)
        self._columns = layout.columns
        self._data_start = layout.data_start
        self._checksums = layout.checksums
        self._is_checked = np.zeros(len(layout.checksums), bool)
        # Columns whose blocks are all checked, as views: the fast path of repeated reads.
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
                f"{self.name} must be a {kind} table of format {format_version}, got {found[0]!a} "
                f"{found[1]!a}; a newer format needs a newer shardflow."
            )

    def num_rows(self, name: str) -> int:
        """Return the length of a column's first axis.

        Raises:
            FormatError: There is no such column.
        """
        return self._column(name).shape[0]

    def dtype_and_shape(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the dtype and shape of a column.

        Raises:
            FormatError: There is no such column.
        """
        column = self._column(name)
        return column.dtype, column.shape

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
        """Return a column as a read-only view if all of its blocks are checked, else None."""
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
        if at.size and at.view(np.uint64).max() >= num_rows:  # a negative row is huge as uint64
            raise IndexError(f"rows must lie in [0, {num_rows}), got others ({self.name}, column {name}).")
        if name not in self._whole:
            # Rows that follow each other are one span: finding the blocks of each takes 20 times as long.
            is_span = at.size > 1 and at[-1] - at[0] == at.size - 1 and bool((np.diff(at) == 1).all())
            self._check_rows(column, at[:1] if is_span else at, (at[-1:] if is_span else at) + 1)
        return np.asarray(self._view(column)[rows])

    def gather_spans(self, name: str, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
        """Return spans of rows of a column, one after another; only their blocks are read and checked.

        Args:
            name: The column.
            starts: ``(n,)`` first row of each span.
            stops: ``(n,)`` row after its last one; an empty span is allowed.

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
                f"{self.name} has no column {name}, only {', '.join(self._columns)}; is it a different table?"
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
        wanted = sorted(set(unchecked.tolist()))
        if self._need is not all_there:
            for first, stop in _runs(wanted):
                self._need(
                    self._data_start + column.block_range(first)[0],
                    self._data_start + column.block_range(stop - 1)[1],
                )
        for block in wanted:
            start, stop = column.block_range(block)
            start, stop = start + self._data_start, stop + self._data_start
            number = column.first_block + block
            if not self._is_good(start, stop, number):
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

    def _is_good(self, start: int, stop: int, number: int) -> bool:
        if crc32c(self._bytes[start:stop]) == int(self._checksums[number]):
            return True
        self._need(start, stop, afresh=True)
        return crc32c(self._bytes[start:stop]) == int(self._checksums[number])


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of ascending numbers that follow each other, as start and stop."""
    start = numbers[0]
    for number, after in zip(numbers, [*numbers[1:], -1], strict=True):
        if after != number + 1:
            yield start, number + 1
            start = after


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedColumn:
    """A column whose rows come in pieces."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Iterable[NDArray[Any]]
    """The rows in order, in arrays of any length; read once."""


def encode_table(columns: Mapping[str, NDArray[Any]], meta: Mapping[str, Json]) -> bytes:
    """Encode columns and metadata as a table file.

    Args:
        columns: Arrays of signed, unsigned, floating-point or byte-string dtype with at least one axis;
            stored little-endian and in C order, in the order given.
        meta: JSON without floating-point numbers.

    Raises:
        FormatError: A column has a dtype without defined bytes, or no axis.
    """
    whole = [
        StreamedColumn(name=name, dtype=values.dtype, shape=values.shape, pieces=(values,))
        for name, values in columns.items()
    ]
    return b"".join(stream_table(whole, meta))


def stream_table(columns: Sequence[StreamedColumn], meta: Mapping[str, Json]) -> Iterator[bytes]:
    """Yield a table file in pieces.

    Args:
        columns: In file order.
        meta: JSON without floating-point numbers.

    Raises:
        FormatError: A column has a dtype without defined bytes, no axis, or pieces with a different number
            of rows in total.
    """
    entries: list[Json] = []
    offset = 0
    for column in columns:
        dtype = column.dtype.newbyteorder("<")
        if dtype.kind not in _KINDS or not column.shape:
            raise FormatError(
                f"a table stores columns of kind {', '.join(_KINDS)} with at least one axis, got {dtype} "
                f"with {len(column.shape)} axes ({column.name})."
            )
        num_bytes = dtype.itemsize * math.prod(column.shape)
        entries.append(
            {
                "name": column.name,
                "dtype": dtype.str,
                "shape": list(column.shape),
                "offset": offset,
                "num_bytes": num_bytes,
            }
        )
        offset += align(num_bytes)
    text = canonical_json(
        {"block_num_bytes": BLOCK_NUM_BYTES, "columns": entries, "data_num_bytes": offset, "meta": dict(meta)}
    )
    header = text.ljust(align(PREFIX.size + len(text)) - PREFIX.size)
    yield PREFIX.pack(MAGIC, len(header), crc32c(header)) + header
    checksums = array("I")
    for column in columns:
        yield from _column_bytes(column, checksums)
    packed = np.asarray(checksums, "<u4").tobytes()
    yield packed + TRAILER.pack(crc32c(packed), END_MAGIC)


def _column_bytes(column: StreamedColumn, checksums: array[int]) -> Iterator[bytes]:
    """Yield the bytes of a column with its padding, and append the checksums of its blocks."""
    dtype = column.dtype.newbyteorder("<")
    num_rows = 0
    rest = b""
    for piece in column.pieces:
        num_rows += len(piece)
        data = rest + np.asarray(piece, dtype=dtype, order="C").tobytes()
        whole = len(data) // BLOCK_NUM_BYTES * BLOCK_NUM_BYTES
        for at in range(0, whole, BLOCK_NUM_BYTES):
            checksums.append(crc32c(data[at : at + BLOCK_NUM_BYTES]))
        if whole:
            yield data[:whole]
        rest = data[whole:]
    if num_rows != column.shape[0]:
        raise FormatError(
            f"column {column.name} was announced with {column.shape[0]} rows, but its pieces hold {num_rows}."
        )
    rest += bytes(align(len(rest)) - len(rest))
    if rest:
        checksums.append(crc32c(rest))
        yield rest
