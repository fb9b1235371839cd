"""What an image says of itself in its first bytes, without decoding it (PNG, ISO 15948; JPEG, ITU-T T.81)."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

__all__ = ["HEAD_NUM_BYTES", "IMAGE_KINDS", "ImageHeader", "image_header", "image_size"]

IMAGE_KINDS: Final = frozenset({"jpg", "jpeg", "png"})
HEAD_NUM_BYTES: Final = 1 << 18
"""Enough for a JPEG whose size stands behind a thumbnail and a colour profile."""

_MAX_PIXELS: Final = 1 << 28
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PNG_GREY: Final = (8, 0)
_JPEG_GREY: Final = (8, 1)
# Start of frame, all processes; between them lie DHT (c4), JPG (c8) and DAC (cc).
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})


class ImageHeader(NamedTuple):
    """What an image says of itself."""

    rows: int
    columns: int
    is_grey: bool
    """Whether it stores one sample a pixel, of 8 bits."""


def image_header(head: bytes) -> ImageHeader | None:
    """Read the header of a PNG or JPEG; None where its first bytes do not tell."""
    header = _stated(head)
    # A header may say anything; memory is taken by what it says.
    return header if header and 0 < header.rows * header.columns <= _MAX_PIXELS else None


def image_size(head: bytes) -> tuple[int, int] | None:
    """Return ``(rows, columns)`` of a PNG or JPEG; None where its first bytes do not tell."""
    header = image_header(head)
    return header and header[:2]


def _stated(head: bytes) -> ImageHeader | None:
    if head.startswith(_PNG) and len(head) >= 26 and head[12:16] == b"IHDR":
        columns, rows, num_bits, colours = struct.unpack_from(">IIBB", head, 16)
        return ImageHeader(rows, columns, (num_bits, colours) == _PNG_GREY)
    if not head.startswith(b"\xff\xd8"):
        return None
    at = 2
    while at + 10 <= len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker in _FRAMES:
            num_bits, rows, columns, num_samples = struct.unpack_from(">BHHB", head, at + 4)
            return ImageHeader(rows, columns, (num_bits, num_samples) == _JPEG_GREY)
        else:
            at += 2 + int(struct.unpack_from(">H", head, at + 2)[0])
    return None
