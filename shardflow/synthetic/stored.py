"""From values to stored integers, and from stored integers to the bytes of pixel data."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from shardflow.synthetic.study import Encoding

__all__ = ["pixel_bytes", "rle_frame", "store"]

_Array = np.ndarray[Any, np.dtype[Any]]
_RUN, _MAX_PACKET = 3, 128


def store(values: _Array, encoding: Encoding, *, full_scale: bool) -> _Array:
    """Return the stored integers, int16 or uint16, of one slice.

    Args:
        values: ``(rows, columns)`` float32; used up.
        encoding: How to store them.
        full_scale: Whether 1.0 stands for the highest stored value (radiographs); else values are in the
            unit that slope and intercept lead to.
    """
    if full_scale:
        values *= np.float32(encoding.highest)
    else:
        if float(encoding.intercept):
            values -= np.float32(encoding.intercept)
        if encoding.slope is not None and float(encoding.slope) != 1:
            values /= np.float32(encoding.slope)
    np.rint(values, out=values)
    np.clip(values, np.float32(encoding.lowest), np.float32(encoding.highest), out=values)
    stored: _Array = values.astype(np.int32).astype(np.int16 if encoding.is_signed else np.uint16)
    if encoding.photometric == "MONOCHROME1":
        stored = (encoding.highest - stored).astype(stored.dtype)
    if encoding.padding is not None:
        stored[_outside(*stored.shape)] = encoding.padding
    if encoding.has_high_bits:
        _set_high_bits(stored, encoding.bits_stored)
    return stored


@lru_cache(maxsize=4)
def _outside(rows: int, columns: int) -> _Array:
    """Pixels outside the reconstructed circle."""
    down = (np.arange(rows) * 2 - rows + 1) ** 2
    across = (np.arange(columns) * 2 - columns + 1) ** 2
    outside: _Array = down[:, None] + across[None, :] > min(rows, columns) ** 2
    outside.flags.writeable = False
    return outside


def _set_high_bits(stored: _Array, bits_stored: int) -> None:
    """Write an overlay, a frame in the corner, into the bit above those that count, and clear the others.

    Signed pixels lose their sign extension by this, which is what a reader must put right.
    """
    bits = stored.view(np.uint16)
    bits &= np.uint16((1 << bits_stored) - 1)
    high = np.uint16(1 << bits_stored)
    rows, columns = stored.shape
    bits[: rows // 4, : columns // 4] |= high
    bits[rows // 16 : rows // 5, columns // 16 : columns // 5] &= np.uint16(0xFFFF) ^ high


def pixel_bytes(stored: _Array, *, big_endian: bool) -> bytes:
    """Return native pixel data; its length is even."""
    data = stored.astype(stored.dtype.newbyteorder(">" if big_endian else "<"), copy=False).tobytes()
    return data + b"\0" * (len(data) % 2)


def rle_frame(stored: _Array) -> bytes:
    """Return one frame of 16 bit pixels in RLE Lossless.

    Source: DICOM PS3.5, annex G: a header of segment offsets, most significant bytes first, each row on its
    own.
    """
    planes = stored.astype(stored.dtype.newbyteorder(">"), copy=False)
    split = np.ascontiguousarray(planes).view(np.uint8).reshape(*stored.shape, 2)
    segments = [_pack_bits(np.ascontiguousarray(split[:, :, byte])) for byte in (0, 1)]
    header = np.zeros(16, dtype="<u4")
    header[:3] = (2, 64, 64 + len(segments[0]))
    return header.tobytes() + b"".join(segments)


def _pack_bits(rows: _Array) -> bytes:
    """Encode rows of bytes as PackBits, each row starting a new packet; padded to an even length."""
    flat, width = rows.reshape(-1), rows.shape[1]
    starts, lengths = _runs(flat, width)
    is_run = lengths >= _RUN
    # Neighbouring short runs of one row make one literal stretch.
    row = starts // width
    begins = np.ones(len(starts), dtype=bool)
    begins[1:] = is_run[1:] | is_run[:-1] | (row[1:] != row[:-1])
    first = starts[begins]
    length = np.diff(np.append(first, flat.size))
    repeats = is_run[begins]
    # Packets hold at most 128 bytes.
    pieces = (length + _MAX_PACKET - 1) // _MAX_PACKET
    owner = np.repeat(np.arange(len(first)), pieces)
    piece = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    source = first[owner] + piece * _MAX_PACKET
    size = np.minimum(length[owner] - piece * _MAX_PACKET, _MAX_PACKET)
    repeated = repeats[owner]
    stored_size = np.where(repeated, 1, size)
    target = np.cumsum(stored_size + 1) - (stored_size + 1)
    packed = np.zeros(int((stored_size + 1).sum()), dtype=np.uint8)
    packed[target] = np.where(repeated, 257 - size, size - 1) & 0xFF
    # Bytes follow their packet's control byte.
    within = np.arange(int(stored_size.sum())) - np.repeat(np.cumsum(stored_size) - stored_size, stored_size)
    packed[np.repeat(target + 1, stored_size) + within] = flat[np.repeat(source, stored_size) + within]
    data = packed.tobytes()
    return data + b"\0" * (len(data) % 2)


def _runs(flat: _Array, width: int) -> tuple[_Array, _Array]:
    """Starts and lengths of runs of equal bytes; a run ends with its row."""
    change = np.empty(flat.size, dtype=bool)
    change[1:] = flat[1:] != flat[:-1]
    change[0::width] = True
    starts = np.flatnonzero(change)
    return starts, np.diff(np.append(starts, flat.size))
