"""Checksummed column tables: the format of every binary file of a dataset except the tars.

The layout is specified in docs/format.md, section 5::

    prefix     magic, header_num_bytes, crc32c(header)        16 bytes
    header     canonical JSON, padded with spaces             data begins at a multiple of 64
    data       columns, each padded with zeros to 64 bytes
    checksums  crc32c of each 64 KiB block of each column     in column order
    trailer    crc32c(checksums), end magic                   12 bytes

Columns are views of the mapped file. A block is checked once, when it is first touched, so opening a table
of any size costs its header and checksums alone. `stream_table` writes the same bytes as `encode_table` from
pieces, in the memory of one piece; sizes must be known in advance, because the header contains them.
"""

from __future__ import annotations

import json
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
# Above this mean length a copy for each span costs less than a number for each row.
_LONG_SPAN_ROWS = 32


class TableDamageError(ChecksumError):
    """The bytes of a table file are not the ones that were written.

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
        """How many checksums the column has."""
        return -(-self.num_bytes // BLOCK_NUM_BYTES)

    def block_range(self, block: int) -> tuple[int, int]:
        """The bytes of a block in the data region; the last one takes the padding with it."""
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
    """CRC-32C (Castagnoli) of a buffer, without copying it."""
    if not isinstance(data, bytes):
        # google_crc32c takes bytes and arrays, read-only ones too, but refuses a memoryview.
        data = np.frombuffer(data, np.uint8)
    return int(google_crc32c.value(data))


def parse_layout(buffer: memoryview, name: str) -> Layout:
    """Read and check prefix, header, checksums and trailer; the data blocks are left unread.

    Raises:
        TableDamageError: Something is not as it must be.
    """
    if buffer.nbytes < PREFIX.size:
        raise TableDamageError(name, buffer.nbytes, "prefix", "the end of the file")
    magic, header_num_bytes, header_crc = PREFIX.unpack_from(buffer)
    if magic != MAGIC:
        raise TableDamageError(name, 0, "prefix", f"another magic than {MAGIC.decode()}")
    data_start = PREFIX.size + header_num_bytes
    if data_start > buffer.nbytes:
        raise TableDamageError(name, 8, "prefix", "a header length that passes the end of the file")
    header = bytes(buffer[PREFIX.size : data_start])
    if crc32c(header) != header_crc:
        # Length and crc32c of the header lie before it, and one of them may be what is wrong.
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
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError):
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
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedColumn:
    """A column of one axis whose rows come in pieces."""

    name: str
    dtype: np.dtype[Any]
    num_rows: int
    pieces: Callable[[], Iterable[NDArray[Any]]]
    """Makes the pieces in order; each of one axis, of any length, and of values that the dtype holds."""


def stream_table(columns: Sequence[StreamedColumn], meta: Mapping[str, Json]) -> Iterator[bytes]:
    """Yield a table file in pieces.

    Args:
        columns: In file order.
        meta: JSON without floating-point numbers.

    Raises:
        FormatError: A dtype has no defined bytes, or a column's pieces have another number of rows.
    """
    entries: list[Json] = []
    offset = 0
    for column in columns:
        dtype = column.dtype.newbyteorder("<")
        if dtype.kind not in _KINDS:
            raise FormatError(f"a column must be of one of {_KINDS}, got {dtype} ({column.name}).")
        num_bytes = dtype.itemsize * column.num_rows
        entries.append(
            {
                "name": column.name,
                "dtype": dtype.str,
                "shape": [column.num_rows],
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
        yield from _column(column, checksums)
    packed = np.asarray(checksums, "<u4").tobytes()
    yield packed + TRAILER.pack(crc32c(packed), END_MAGIC)


def _column(column: StreamedColumn, checksums: array[int]) -> Iterator[bytes]:
    """Yield the bytes of a column with its padding, and add the checksums of its blocks."""
    dtype = column.dtype.newbyteorder("<")
    num_rows = 0
    rest = b""
    for piece in column.pieces():
        num_rows += len(piece)
        data = rest + np.asarray(piece, dtype=dtype, order="C").tobytes()
        whole = len(data) // BLOCK_NUM_BYTES * BLOCK_NUM_BYTES
        for at in range(0, whole, BLOCK_NUM_BYTES):
            checksums.append(crc32c(data[at : at + BLOCK_NUM_BYTES]))
        if whole:
            yield data[:whole]
        rest = data[whole:]
    if num_rows != column.num_rows:
        raise FormatError(
            f"a streamed column must have the {column.num_rows} rows that were announced, got {num_rows} "
            f"({column.name})."
        )
    rest += bytes(align(len(rest)) - len(rest))
    if rest:
        checksums.append(crc32c(rest))
        yield rest
