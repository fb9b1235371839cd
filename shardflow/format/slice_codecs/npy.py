"""Slice codec ``npy``: one array as an uncompressed NumPy 1.0 file (docs/format.md, section 4).

The header is matched, not evaluated: NumPy's own reader parses it as Python source.
"""

from __future__ import annotations

import functools
import io
import re
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from shardflow.errors import FormatError

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '(<[iuf][248]|\|[iu]1)', 'fortran_order': False, "
    rb"'shape': \((\d+), (\d+)(?:, (\d+))?\), \} *\n"
)


@functools.lru_cache(maxsize=256)
def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """Return what precedes the numbers of an array; its size is a multiple of 64."""
    stream = io.BytesIO()
    npy_format.write_array_header_1_0(stream, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def encode(array: NDArray[Any]) -> bytes:
    """Encode a C-contiguous, little-endian array of two or three axes."""
    stream = io.BytesIO()
    npy_format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def read_header(payload: memoryview) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and dtype without decoding.

    Raises:
        FormatError: The payload is no NumPy 1.0 file of plain numbers in C order with two or three axes.
    """
    shape, dtype, _ = _parse(payload)
    return shape, dtype


def decode(payload: memoryview, out: NDArray[Any]) -> None:
    """Copy into a C-contiguous array of the payload's shape and dtype.

    Raises:
        FormatError: The payload is cut, or of another shape or dtype than ``out``.
    """
    shape, dtype, start = _parse(payload)
    if shape != out.shape or dtype != out.dtype:
        raise FormatError(f"a slice must be {out.dtype} {out.shape}, got {dtype} {shape}.")
    if payload.nbytes != start + out.nbytes:
        raise FormatError(f"an npy payload must hold {out.nbytes} data bytes, got {payload.nbytes - start}.")
    out[...] = np.frombuffer(payload, dtype, offset=start).reshape(shape)


def _parse(payload: memoryview) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    start = len(_MAGIC) + 2
    stop = start + int.from_bytes(payload[len(_MAGIC) : start], "little")
    match = _HEADER.fullmatch(bytes(payload[start:stop]))
    if bytes(payload[: len(_MAGIC)]) != _MAGIC or match is None:
        raise FormatError("an npy payload must be a NumPy 1.0 file of plain numbers, got other bytes.")
    shape = tuple(int(size) for size in match.groups()[1:] if size is not None)
    return shape, np.dtype(match[1].decode("ascii")), stop
