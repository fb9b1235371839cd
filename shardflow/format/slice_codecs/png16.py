"""Slice codec ``png16``: one array as a PNG of 8 or 16 bits per sample (docs/format.md, section 4).

Meant for tools that read nothing else: two thirds of the compression of ``b2nd`` at a fifth of its speed.
PNG has no signed numbers, so int16 is stored with an offset, which a text chunk after the header records.
"""

from __future__ import annotations

import functools
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.contents.pictures import PNG_SIGNATURE, decode_picture, opencv

# Of a PNG (ISO/IEC 15948): signature, then the chunk IHDR with width, height, depth and color type, and its
# checksum. Ours has the chunk tEXt behind it where values are moved.
_HEAD = struct.Struct(">8sI4sIIBB")
_HEAD_NUM_BYTES = 33
_GRAY, _RGB = 0, 2
_OFFSET = 0x8000
_OFFSET_TEXT = b"Offset\x00-32768"
_COLORS = 3
_DTYPES = {"|u1", "<u2", "<i2"}


def holds(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Tell whether the codec can store such an array."""
    return dtype.str in _DTYPES and (len(shape) == 2 or shape[2] == _COLORS)


def encode(array: NDArray[Any]) -> bytes:
    """Encode a C-contiguous array that the codec `holds`."""
    cv2 = opencv()
    is_signed = array.dtype.kind == "i"
    plain = np.bitwise_xor(array.view(np.uint16), _OFFSET) if is_signed else array
    is_written, found = cv2.imencode(".png", plain[..., ::-1] if plain.ndim == _COLORS else plain)
    if not is_written:
        raise FormatError(f"a PNG must hold the slice, got an error for {array.dtype} {array.shape}.")
    png: bytes = found.tobytes()
    if not is_signed:
        return png
    return b"".join((png[:_HEAD_NUM_BYTES], _offset_chunk(), png[_HEAD_NUM_BYTES:]))


def read_header(payload: memoryview) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and dtype without decoding.

    Raises:
        FormatError: The payload is no gray or RGB PNG of 8 or 16 bits.
    """
    try:
        signature, _, name, columns, rows, depth, kind = _HEAD.unpack_from(payload)
    except struct.error:
        signature = name = b""
        columns = rows = depth = kind = 0
    if signature != PNG_SIGNATURE or name != b"IHDR" or depth not in (8, 16) or kind not in (_GRAY, _RGB):
        raise FormatError("a png16 payload must be a gray or RGB PNG of 8 or 16 bits, got other bytes.")
    chunk = _offset_chunk()
    is_signed = bytes(payload[_HEAD_NUM_BYTES : _HEAD_NUM_BYTES + len(chunk)]) == chunk
    if min(rows, columns) < 1 or (is_signed and depth != 16):
        raise FormatError("a png16 payload must have pixels, and 16 bits where it has an offset, got others.")
    shape = (rows, columns) if kind == _GRAY else (rows, columns, _COLORS)
    return shape, np.dtype("<i2" if is_signed else f"<u{depth // 8}")


def decode(payload: memoryview, out: NDArray[Any]) -> None:
    """Decode into a C-contiguous array of the payload's shape and dtype, without the GIL.

    Raises:
        FormatError: The payload cannot be decoded, or is of another shape or dtype than ``out``.
    """
    shape, dtype = read_header(payload)
    if shape != out.shape or dtype != out.dtype:
        raise FormatError(f"a slice must be {out.dtype} {out.shape}, got {dtype} {shape}.")
    cv2 = opencv()
    found = decode_picture(payload, cv2.IMREAD_UNCHANGED)
    stored = out.view(np.uint16) if dtype.kind == "i" else out
    if found.shape != shape or found.dtype != stored.dtype:
        raise FormatError("a png16 payload must decode, got a damaged PNG.")
    # OpenCV decodes into memory of its own; the copy from there restores color order and sign.
    plain = found[..., ::-1] if found.ndim == _COLORS else found
    if dtype.kind == "i":
        np.bitwise_xor(plain, _OFFSET, out=stored)
    else:
        np.copyto(stored, plain)


@functools.cache
def _offset_chunk() -> bytes:
    body = b"tEXt" + _OFFSET_TEXT
    return struct.pack(">I", len(_OFFSET_TEXT)) + body + struct.pack(">I", zlib.crc32(body))
