"""A table written column by column from pieces: one of any number of rows takes the memory of a piece.

The same bytes as `shardflow.shards.table.encode_table`. Sizes must be known before the first byte, because
they stand in the header; a checksum for each 64 KiB is all that is kept until the end.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    align,
    crc32c,
)

__all__ = ["StreamedColumn", "stream_table"]

_KINDS = "iufS"


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
