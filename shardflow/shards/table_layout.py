"""Where everything lies in a table file, and what can be wrong with it.

The layout is specified in docs/format.md, section 5::

    prefix     magic, header_num_bytes, crc32c(header)        16 bytes
    header     canonical JSON, padded with spaces             data begins at a multiple of 64
    data       columns, each padded with zeros to 64 bytes
    checksums  crc32c of each 64 KiB block of each column     in column order
    trailer    crc32c(checksums), end magic                   12 bytes
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError

__all__ = [
    "ALIGNMENT",
    "BLOCK_NUM_BYTES",
    "END_MAGIC",
    "MAGIC",
    "PREFIX",
    "TRAILER",
    "Column",
    "Layout",
    "TableDamageError",
    "align",
    "crc32c",
    "parse_layout",
]

MAGIC = b"SFTABLE1"
END_MAGIC = b"SFTABEND"
BLOCK_NUM_BYTES = 65536
ALIGNMENT = 64
PREFIX = struct.Struct("<8sII")
TRAILER = struct.Struct("<I8s")
# Object, Unicode, date and boolean columns have no one byte layout that every reader knows.
_DTYPE = re.compile(r"<[iu][248]|\|[iu]1|<f[248]|\|S[1-9][0-9]{0,3}", re.ASCII)


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
