"""Tiles of whole slides: their encoding, and the TIFF file that holds those of one level.

A level of a slide is one member of a sample, a BigTIFF file of one image that other readers open too. Its
tiles lie behind the header, row by row; a tile that is not stored has the size 0 there, as TIFF has it for
sparse files. A tile is a JPEG stream of its own, as the scanner compressed it, or lossless: differences along
rows, deflated. The index of the shard describes a level in the columns of bricks, with one brick of (rows,
columns, 3) for each tile (docs/format.md, section 20).

Source: TIFF 6.0, sections 14 (horizontal differencing) and 15 (tiles); libtiff's design of BigTIFF; TIFF
technical note 2 (JPEG).
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.contents.pictures import decode_picture, opencv

TILES_CODEC: Final = "tiles"
"""Codec of a slide, in ``study.json`` and the series table."""
WHITE: Final = 255
"""Samples of a tile that is not stored."""
COLORS: Final = 3
TileForm: TypeAlias = Literal["jpeg_ycbcr", "jpeg_rgb", "deflate"]
"""Encoding of the tiles of a level: JPEG of one of two color spaces, or lossless."""

_JPEG_START: Final = b"\xff\xd8"
# Compression and Photometric Interpretation.
_TAGS_OF: Final[dict[TileForm, tuple[int, int]]] = {
    "jpeg_ycbcr": (7, 6),
    "jpeg_rgb": (7, 2),
    "deflate": (8, 2),
}
_SHORT, _LONG, _LONG8 = 3, 4, 16
_CODE_OF: Final = {_SHORT: "H", _LONG: "I", _LONG8: "Q"}
_FILE_HEADER: Final = struct.Struct("<2sHHHQ")
_ENTRY: Final = struct.Struct("<HHQ8s")
_LEVEL: Final = 6


def tiff_header(
    shape: tuple[int, int, int], tile_shape: tuple[int, int, int], num_bytes: NDArray[Any], form: TileForm
) -> bytes:
    """Return what precedes the tiles of a level in its file.

    Args:
        shape: Rows, columns and 3 of the level.
        tile_shape: The same of a tile.
        num_bytes: ``(n,)`` sizes of the tiles, row by row; 0 for those that are not stored.
        form: Of the tiles.
    """
    compression, photometric = _TAGS_OF[form]
    num_tiles = len(num_bytes)
    sizes = num_bytes.astype("<u8")
    entries: list[tuple[int, int, tuple[int, ...]]] = [
        (256, _LONG, (shape[1],)),  # ImageWidth
        (257, _LONG, (shape[0],)),  # ImageLength
        (258, _SHORT, (8,) * COLORS),  # BitsPerSample
        (259, _SHORT, (compression,)),
        (262, _SHORT, (photometric,)),
        (277, _SHORT, (COLORS,)),  # SamplesPerPixel
        (284, _SHORT, (1,)),  # PlanarConfiguration: samples of a pixel together
        *([(317, _SHORT, (2,))] if form == "deflate" else []),  # Predictor
        (322, _SHORT, (tile_shape[1],)),  # TileWidth
        (323, _SHORT, (tile_shape[0],)),  # TileLength
    ]
    tables_at = _FILE_HEADER.size + 8 + (len(entries) + 2) * _ENTRY.size + 8
    # A table of one number lies in its entry.
    tables_num_bytes = 0 if num_tiles == 1 else 2 * sizes.nbytes
    starts = np.cumsum(sizes, dtype="<u8") - sizes + np.uint64(tables_at + tables_num_bytes)
    starts[sizes == 0] = 0
    parts = [_FILE_HEADER.pack(b"II", 43, 8, 0, _FILE_HEADER.size), struct.pack("<Q", len(entries) + 2)]
    for tag, kind, values in entries:
        packed = struct.pack(f"<{len(values)}{_CODE_OF[kind]}", *values)
        parts.append(_ENTRY.pack(tag, kind, len(values), packed.ljust(8, b"\0")))
    for place, (tag, table) in enumerate(((324, starts), (325, sizes))):  # TileOffsets, TileByteCounts
        value = table.tobytes() if num_tiles == 1 else struct.pack("<Q", tables_at + place * sizes.nbytes)
        parts.append(_ENTRY.pack(tag, _LONG8, num_tiles, value))
    parts.append(struct.pack("<Q", 0))  # no further image
    if num_tiles > 1:
        parts += [starts.tobytes(), sizes.tobytes()]
    return b"".join(parts)


def has_tiles(
    header: bytes, shape: tuple[int, int, int], tile_shape: tuple[int, int, int], num_bytes: NDArray[Any]
) -> bool:
    """Return whether a header is that of a level with these tiles, in any form."""
    return any(header == tiff_header(shape, tile_shape, num_bytes, form) for form in get_args(TileForm))


def encode_tile(pixels: NDArray[np.uint8]) -> bytes:
    """Encode a tile without loss.

    Args:
        pixels: ``(rows, columns, 3)`` RGB.
    """
    differences = pixels.copy()
    differences[:, 1:] -= pixels[:, :-1]
    return zlib.compress(differences.tobytes(), _LEVEL)


def decode_tile(payload: memoryview | bytes, out: NDArray[np.uint8]) -> None:
    """Decode a tile; without the GIL for the most part.

    Args:
        payload: Its bytes, checked against their crc32c.
        out: ``(rows, columns, 3)``, C-contiguous, to be filled with RGB.

    Raises:
        FormatError: The bytes cannot be decoded, or are a tile of another size.
    """
    if payload[:2] != _JPEG_START:
        _inflate_tile(payload, out)
        return
    cv2 = opencv()
    pixels = decode_picture(payload, cv2.IMREAD_UNCHANGED, size=out.shape[:2])
    if pixels.shape != out.shape or pixels.dtype != np.uint8:
        raise FormatError(f"a tile must be a JPEG stream of {out.shape}, got another one.")
    cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=out)


def _inflate_tile(payload: memoryview | bytes, out: NDArray[np.uint8]) -> None:
    engine = zlib.decompressobj()
    try:
        differences = engine.decompress(payload, out.nbytes)
    except zlib.error:
        raise FormatError("a tile could not be decoded (deflate).") from None
    if len(differences) != out.nbytes or engine.decompress(engine.unconsumed_tail, 1):
        raise FormatError(f"a tile must have {out.nbytes} bytes, got another number.")
    np.cumsum(np.frombuffer(differences, np.uint8).reshape(out.shape), axis=1, dtype=np.uint8, out=out)
