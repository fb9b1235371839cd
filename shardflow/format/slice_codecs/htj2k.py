"""Slice codec ``htj2k``: one array as a reversible High-Throughput JPEG 2000 codestream (docs/format.md).

Meant for archives: 10 % smaller than ``b2nd`` on CT, decoded at a seventh of its speed, and readable by any
decoder of ITU-T T.814, such as OpenJPH. Integers of up to 16 bits keep their sign: as unsigned numbers they
compress a third worse. Encoding and decoding need imagecodecs, which is imported for the first slice.

OpenJPH encodes and OpenJPEG decodes, at half the speed: a slice may be a stranger's, with the checksum that
fits. Damage can end the process inside OpenJPH, and where it finds an error, imagecodecs drops that and
returns wrong pixels; OpenJPEG reports its errors and is fuzzed by those who maintain it.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError

# Of the SIZ segment (ITU-T T.800, A.5.1), which follows the start of the codestream: its length,
# capabilities, then sizes and offsets of image and tiles, and the number of components; a byte of depth and
# sign for each component.
_START, _END = b"\xff\x4f\xff\x51", b"\xff\xd9"
_SIZ = struct.Struct(">4xHH8IH")
_COMPONENT_NUM_BYTES = 3
# The segments behind it: marker and length, which counts itself. Of COD (A.6.1) the style, the number of
# layers, the style of the code-blocks and the wavelet; of SOT (A.4.2), which is last, the tile, the length of
# its only part up to the end of the codestream, the number and count of parts, and the marker behind it.
_SEGMENT = struct.Struct(">HH")
_CODING = struct.Struct(">4xBxH4xBB")
_TILE_PART = struct.Struct(">4xHIBBH")
_COD, _SOT, _SOD = 0xFF52, 0xFF90, 0xFF93
_OTHERS = {0xFF50, 0xFF5C, 0xFF64}  # CAP, QCD, COM
_MAX_SEGMENTS = 8
_PRECINCTS, _BLOCKS = 0x01, 0xC0
_OURS = (0, 1, 0x40, 1)  # no precincts, one layer, high-throughput blocks alone, reversible
_SIGNED = 0x80
_COLORS = 3
_DTYPES = {"|u1", "|i1", "<u2", "<i2"}


def holds(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Tell whether the codec can store such an array."""
    return dtype.str in _DTYPES and (len(shape) == 2 or shape[2] == _COLORS)


def encode(array: NDArray[Any]) -> bytes:
    """Encode a C-contiguous array that the codec `holds`."""
    encoded: bytes = bytes(_imagecodecs().htj2k_encode(array, reversible=True))
    return encoded


def read_header(payload: memoryview) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and dtype without decoding.

    Raises:
        FormatError: The payload is no codestream of the kind that this codec writes.
    """
    try:
        return _parse(payload)
    except (struct.error, ValueError, IndexError):
        raise FormatError(
            "an htj2k payload must be a codestream as docs/format.md describes it: reversible, one tile in "
            "one part, one layer, no precincts and no segments but SIZ, CAP, COD, QCD and COM; got another."
        ) from None


def decode(payload: memoryview, out: NDArray[Any]) -> None:
    """Decode into a C-contiguous array of the payload's shape and dtype, without the GIL.

    Raises:
        FormatError: The payload cannot be decoded, or is of another shape or dtype than ``out``.
    """
    shape, dtype = read_header(payload)
    if shape != out.shape or dtype != out.dtype:
        raise FormatError(f"a slice must be {out.dtype} {out.shape}, got {dtype} {shape}.")
    imagecodecs = _imagecodecs()
    try:
        imagecodecs.jpeg2k_decode(payload, out=out, numthreads=1)
    except (ValueError, RuntimeError) as error:
        raise FormatError(f"an htj2k payload must decode, got {type(error).__name__}.") from None


def _parse(payload: memoryview) -> tuple[tuple[int, ...], np.dtype[Any]]:
    _, _, columns, rows, left, top, tile_columns, tile_rows, tile_left, tile_top, num_components = (
        _SIZ.unpack_from(payload)
    )
    components = bytes(payload[_SIZ.size : _SIZ.size + _COMPONENT_NUM_BYTES * num_components])
    # All components alike and whole, and one tile: decoders divide by what stands here.
    depth = components[0]
    is_whole = (
        (bytes(payload[:4]), bytes(payload[-2:])) == (_START, _END)
        and components == bytes((depth, 1, 1)) * num_components
        and (left, top, tile_left, tile_top) == (0, 0, 0, 0)
        and (tile_columns, tile_rows) == (columns, rows)
        and _is_ours(payload)
    )
    num_bits, shape = (depth & ~_SIGNED) + 1, (rows, columns)
    if not is_whole or num_bits not in (8, 16) or min(shape) < 1 or num_components not in (1, _COLORS):
        raise ValueError
    dtype = np.dtype(f"{'i' if depth & _SIGNED else 'u'}{num_bits // 8}").newbyteorder("<")
    return (shape if num_components == 1 else (*shape, num_components)), dtype


def _is_ours(payload: memoryview) -> bool:
    """Tell whether the segments behind SIZ are of the kinds that this codec writes.

    OpenJPEG also decodes what loses bits or has blocks of plain JPEG 2000, and takes 300 times the memory of
    the slice for small precincts, which other segments could bring in, too.
    """
    position = len(_START) + struct.unpack_from(">H", payload, len(_START))[0]
    codings: list[tuple[int, int, int, int]] = []
    for _ in range(_MAX_SEGMENTS):
        marker, num_bytes = _SEGMENT.unpack_from(payload, position)
        if marker == _SOT:
            part = (0, len(payload) - len(_END) - position, 0, 1, _SOD)
            return codings == [_OURS] and part == _TILE_PART.unpack_from(payload, position)
        if marker == _COD:
            style, num_layers, blocks, wavelet = _CODING.unpack_from(payload, position)
            codings.append((style & _PRECINCTS, num_layers, blocks & _BLOCKS, wavelet))
        elif marker not in _OTHERS:
            return False
        position += 2 + num_bytes
    return False


@functools.cache
def _imagecodecs() -> Any:
    """Import the decoder for the first slice: training on other codecs does not need it installed.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import imagecodecs
    except ImportError:
        raise ConfigError(
            "imagecodecs must be installed for htj2k slices, got none; run: pip install 'shardflow[htj2k]'."
        ) from None
    return imagecodecs
