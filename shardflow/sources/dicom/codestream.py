"""What an encoded frame says about itself: checked before a codec allocates by it.

Source: ISO/IEC 10918-1 (JPEG) B.2.2, ISO/IEC 14495-1 (JPEG-LS) C.2, ISO/IEC 15444-1 (JPEG 2000) A.5.1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["CodestreamHeader", "read_jpeg2000_header", "read_jpeg_header"]

_JP2_SIGNATURE = b"\x00\x00\x00\x0cjP  "
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC} | {0xF7}
_APP0, _APP14 = 0xE0, 0xEE


@dataclass(frozen=True, kw_only=True, slots=True)
class CodestreamHeader:
    """Shape of one encoded frame."""

    rows: int
    columns: int
    num_components: int
    precision: int
    """Bits of a sample."""
    adobe_transform: int | None = None
    """JPEG only: colour transform of the Adobe marker; 0 none (RGB), 1 YCbCr; None without the marker."""
    is_jfif: bool = False
    """JPEG only: a JFIF marker says YCbCr."""
    component_ids: bytes = b""
    """JPEG only."""


def read_jpeg_header(data: bytes) -> CodestreamHeader | None:
    """Read the frame header of a JPEG or JPEG-LS stream; None where there is none."""
    if data[:2] != b"\xff\xd8":
        return None
    position, adobe, is_jfif = 2, None, False
    try:
        while True:
            if data[position] != 0xFF:
                return None
            marker = data[position + 1]
            if marker == 0xFF:  # fill byte
                position += 1
                continue
            (length,) = struct.unpack_from(">H", data, position + 2)
            if length < 2:
                return None
            if marker in _START_OF_FRAME:
                precision, rows, columns, count = struct.unpack_from(">BHHB", data, position + 4)
                return CodestreamHeader(
                    rows=rows,
                    columns=columns,
                    num_components=count,
                    precision=precision,
                    adobe_transform=adobe,
                    is_jfif=is_jfif,
                    component_ids=data[position + 10 : position + 10 + 3 * count : 3],
                )
            segment = data[position + 4 : position + 2 + length]
            if marker == _APP14 and segment[:5] == b"Adobe" and len(segment) >= 12:
                adobe = segment[11]
            is_jfif = is_jfif or (marker == _APP0 and segment[:4] == b"JFIF")
            position += 2 + length
    except (IndexError, struct.error):
        return None


def read_jpeg2000_header(data: bytes) -> CodestreamHeader | None:
    """Read the size marker of a JPEG 2000 or HTJ2K stream, bare or in JP2 boxes; None where there is none."""
    try:
        position = _skip_boxes(data) if data.startswith(_JP2_SIGNATURE) else 0
        if position is None or data[position : position + 4] != b"\xff\x4f\xff\x51":
            return None
        width, height, left, top = struct.unpack_from(">IIII", data, position + 8)
        (count,) = struct.unpack_from(">H", data, position + 40)
        precision = (data[position + 42] & 0x7F) + 1
        return CodestreamHeader(
            rows=height - top, columns=width - left, num_components=count, precision=precision
        )
    except (IndexError, struct.error):
        return None


def _skip_boxes(data: bytes) -> int | None:
    """Where the codestream box begins; None where a box has no proper length (other parsers hang there)."""
    position = 0
    while True:
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"jp2c":
            return position + 8
        if length < 8:
            return None
        position += int(length)
