"""Pictures: JPEG, PNG and WebP files of a dataset, checked before OpenCV decodes them.

A file may be a stranger's, with the checksum that fits. OpenCV tells a file by its first bytes, whatever its
name says, allocates what a header states, and makes up what is missing: some hundred bytes of JPEG become a
gigabyte of gray, or are gone through a thousand times. What a file states is compared with its length first.
"""

from __future__ import annotations

import functools
import re
import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError

HEAD_NUM_BYTES: Final = 1 << 18
"""Enough for a JPEG whose size follows a thumbnail and a color profile."""
_SHORT_HEAD_NUM_BYTES: Final = 1 << 12
"""Enough for most files."""
# Color types of PNG without color: gray, and gray with alpha.
_PNG_GRAY: Final = (0, 4)
# Start of frame, all processes; between them lie DHT (c4), JPG (c8) and DAC (cc).
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL: Final = frozenset({0xC0, 0xC1})
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNK: Final = struct.Struct(">I4s")
_JPEG_START, _JPEG_SCAN = b"\xff\xd8", b"\xff\xda"
# Of a WebP (RFC 9649): the chunk behind the head, and in it sizes minus one, or 14 bits of the size itself.
_WEBP_HEAD: Final = struct.Struct("<4s4x4s4s4x")
_WEBP_NUM_BYTES: Final = 30
_MAX_PIXELS: Final = 1 << 28
_MAX_PIXELS_PER_BYTE: Final = {_JPEG_START: 1024, PNG_SIGNATURE[:2]: 8 * 1032}
"""By the first bytes. Huffman coding takes a bit or more for each block of 64 pixels of a JPEG (ITU-T T.81),
which is half of this; deflate expands up to 1032 times, and a byte of PNG holds up to 8 pixels."""
# Within a scan, zero follows a data byte of FF; several bytes of FF may precede a marker (ITU-T T.81, B.1.1).
_JPEG_MARKER: Final = re.compile(rb"\xff[^\x00\xff]")
_JPEG_END: Final = 0xD9
_MAX_SCANS: Final = 100
"""Of a JPEG. Progressive encoders write about 10, and each goes through the whole picture."""


@functools.cache
def opencv() -> Any:
    """Import OpenCV for the first image: 0.2 s that listing a dataset need not pay.

    It decodes PNG and JPEG, converts color and resizes. An extra installs it, since it is more than half of
    what all dependencies take on disk; volumes, masks, texts, tokens and tables are read without it.

    Raises:
        ConfigError: It is not installed, or cannot be loaded: no fault of a sample, so it ends a run.
    """
    try:
        import cv2
    except ModuleNotFoundError:
        raise ConfigError(
            "PNG, JPEG, color as gray and images of another size than stored need OpenCV, which is not "
            "installed; run: pip install 'shardflow[images]'."
        ) from None
    except ImportError as error:  # opencv-python instead of opencv-python-headless, mostly
        raise ConfigError(
            f"OpenCV must load, got: {error}; install opencv-python-headless, or the library that is missing."
        ) from None
    return cv2


class ImageHeader(NamedTuple):
    """Size and kind of an image, from its header."""

    rows: int
    columns: int
    has_color: bool
    """Whether it stores color, a palette too."""
    num_bits: int
    """Bits of a sample: 8 or 16; fewer than 8 are expanded by a decoder."""
    has_one_scan: bool
    """Whether a decoder reads one scan only, as it does of a JPEG that is sequential and gray."""

    @property
    def is_gray(self) -> bool:
        """Whether it is decoded as one sample of 8 bits per pixel."""
        return not self.has_color and self.num_bits == 8


def image_header(head: bytes) -> ImageHeader | None:
    """Read the header of a PNG or JPEG; None where its first bytes do not tell."""
    header = _stated(head)
    # A header may state any size, and memory is allocated by it.
    return header if header and 0 < header.rows * header.columns <= _MAX_PIXELS else None


def file_header(payload: bytes | memoryview) -> ImageHeader | None:
    """Read the header of a PNG or JPEG from as much of the file as it takes, `HEAD_NUM_BYTES` at most."""
    header = image_header(bytes(payload[:_SHORT_HEAD_NUM_BYTES]))
    return header or image_header(bytes(payload[:HEAD_NUM_BYTES]))


def _stated(head: bytes) -> ImageHeader | None:
    if head.startswith(PNG_SIGNATURE) and len(head) >= 26 and head[12:16] == b"IHDR":
        columns, rows, num_bits, color_type = struct.unpack_from(">IIBB", head, 16)
        return ImageHeader(rows, columns, color_type not in _PNG_GRAY, 16 if num_bits > 8 else 8, False)
    if not head.startswith(b"\xff\xd8"):
        return None
    at = 2
    # Decoders look for the next marker behind a zero byte, as behind other garbage: what is a segment here
    # could hold their header.
    while at + 10 <= len(head) and head[at] == 0xFF and head[at + 1] != 0:
        marker = head[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker in _FRAMES:
            num_bits, rows, columns, num_samples = struct.unpack_from(">BHHB", head, at + 4)
            is_single = num_samples == 1 and marker in _SEQUENTIAL
            return ImageHeader(rows, columns, num_samples > 1, 16 if num_bits > 8 else 8, is_single)
        else:
            at += 2 + int(struct.unpack_from(">H", head, at + 2)[0])
    return None


def decode_picture(
    payload: bytes | memoryview | NDArray[np.uint8], flags: int, *, size: tuple[int, int] | None = None
) -> NDArray[Any]:
    """Decode a JPEG, PNG or WebP as ``cv2.imdecode``, with colors in OpenCV's order.

    Args:
        payload: The file.
        flags: Of ``cv2.imdecode``.
        size: Rows and columns that it must state; None for any.

    Returns:
        ``(rows, columns)``, or with a last axis of 3 or 4; uint8 or uint16.

    Raises:
        FormatError: It states no size or another one, more pixels than its bytes can hold, or cannot be
            decoded.
        ConfigError: OpenCV is not installed.
    """
    view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
    stated = _check(view)
    if size is not None and stated != size:
        raise FormatError(f"a picture must have {size[0]} x {size[1]} pixels, got {stated[0]} x {stated[1]}.")
    cv2 = opencv()
    try:
        pixels: NDArray[Any] | None = cv2.imdecode(np.frombuffer(view, np.uint8), flags)
    except cv2.error as error:
        raise FormatError(f"a picture must decode, got {type(error).__name__} from OpenCV.") from None
    if pixels is None or pixels.shape[:2] != stated:
        raise FormatError("a picture must decode to the size in its header, got another one or none.")
    return pixels


def picture_size(payload: bytes | memoryview) -> tuple[int, int] | None:
    """Read ``(rows, columns)`` of a JPEG, PNG or WebP from its header; None where it states none."""
    header = file_header(payload)
    return _webp_size(bytes(payload[:_WEBP_NUM_BYTES])) if header is None else header[:2]


def _check(payload: memoryview) -> tuple[int, int]:
    """Return rows and columns of a file that can hold what it states."""
    start, header = bytes(payload[:2]), file_header(payload)
    if header is None and start == _JPEG_START:  # behind large metadata
        header = image_header(bytes(payload))
    size = _webp_size(bytes(payload[:_WEBP_NUM_BYTES])) if header is None else header[:2]
    if size is None:
        raise FormatError("a picture must be a JPEG, PNG or WebP that states its size, got another file.")
    most = min(_MAX_PIXELS, len(payload) * _MAX_PIXELS_PER_BYTE.get(start, _MAX_PIXELS))
    if size[0] * size[1] > most:
        raise FormatError(
            f"a picture of {len(payload)} bytes must have up to {most} pixels, got {size[0]} x {size[1]} in "
            "its header: it is cut, or made to take memory."
        )
    has_scans = start == _JPEG_START and not (header is not None and header.has_one_scan)
    if has_scans and (num_scans := _num_scans(payload)) > _MAX_SCANS:
        raise FormatError(f"a JPEG must have up to {_MAX_SCANS} scans, got {num_scans}.")
    if bytes(payload[:8]) == PNG_SIGNATURE and not holds_its_chunks(payload):
        raise FormatError("a PNG must hold the chunks that it states, got one that ends early.")
    return size


def _num_scans(payload: memoryview) -> int:
    """Count the scans of a JPEG, or return how often their marker occurs anywhere if that is few enough."""
    # `bytes.count` takes 7 times as long, a twelfth of decoding a radiograph, and holds the GIL.
    scan = int.from_bytes(_JPEG_SCAN, "little")
    pairs = [np.frombuffer(payload, "<u2", (len(payload) - at) // 2, at) for at in (0, 1)]
    num_scans = sum(int(np.count_nonzero(one == scan)) for one in pairs)
    if num_scans <= _MAX_SCANS:
        return num_scans
    # Metadata, and what cameras append to a file, such as a video, may contain these bytes by chance.
    jpeg = bytes(payload)
    num_scans, at = 0, len(_JPEG_START)
    while found := _JPEG_MARKER.search(jpeg, at):
        marker, at = jpeg[found.end() - 1], found.end()
        if marker == _JPEG_END:
            break
        if marker not in _ALONE and at + 2 <= len(jpeg):
            num_scans += marker == _JPEG_SCAN[1]
            at += max(2, int.from_bytes(jpeg[at : at + 2], "big"))
    return num_scans


def _webp_size(head: bytes) -> tuple[int, int] | None:
    if len(head) < _WEBP_NUM_BYTES:
        return None
    riff, webp, chunk = _WEBP_HEAD.unpack_from(head)
    if (riff, webp) != (b"RIFF", b"WEBP"):
        return None
    at = _WEBP_HEAD.size
    if chunk == b"VP8X":
        columns, rows = (int.from_bytes(head[at + place : at + place + 3], "little") + 1 for place in (4, 7))
    elif chunk == b"VP8L":
        bits = int.from_bytes(head[at + 1 : at + 5], "little")
        columns, rows = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif chunk == b"VP8 ":
        columns, rows = (size & 0x3FFF for size in struct.unpack_from("<HH", head, at + 6))
    else:
        return None
    return (rows, columns) if rows * columns else None


def holds_its_chunks(payload: memoryview) -> bool:
    """Tell whether a PNG has pixels before its end, and no chunk longer than what is left of the file.

    OpenCV allocates the length that a chunk states, up to 4 GiB, and reads on behind an end that comes before
    the pixels.
    """
    position = len(PNG_SIGNATURE)
    has_pixels = False
    while position + _PNG_CHUNK.size <= len(payload):
        num_bytes, kind = _PNG_CHUNK.unpack_from(payload, position)
        position += 12 + num_bytes
        if kind == b"IEND":  # what follows is not read
            return has_pixels and not num_bytes and position <= len(payload)
        has_pixels = has_pixels or kind == b"IDAT"
    return position <= len(payload)
