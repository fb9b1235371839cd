"""Pictures of conversations: found by name, decoded once as a check, stored without metadata.

Pictures are stored byte for byte except for their metadata: cameras and viewers write names, dates and
thumbnails into JPEG and PNG files. With ``deid.text = "keep"`` metadata is kept too. JPEG: ITU-T
T.81, annex B; Exif: CIPA DC-008; PNG: W3C Recommendation, third edition, section 11.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardflow.format.contents.pictures import image_header
from shardflow.packing.corpora.config import LineError, LineReason
from shardflow.packing.corpora.conversations import Slot
from shardflow.packing.corpora.lines import reading

_KINDS: Final = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png"}
_ORIENTATION: Final = 0x0112
_MAX_PIXELS: Final = 1 << 27
_TURNED: Final = range(5, 9)
"""Orientations that swap rows and columns."""
_PNG_HEAD: Final = b"\x89PNG\r\n\x1a\n"
# What decides how pixels look; every other chunk that a decoder need not know is a note.
_PNG_KEPT: Final = frozenset(
    {b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"iCCP", b"cICP", b"sBIT", b"bKGD", b"hIST", b"pHYs", b"sPLT"}
)
_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_JFIF, _EXIF, _ICC, _ADOBE = 0xE0, 0xE1, 0xE2, 0xEE
_APPLICATION: Final = range(0xE0, 0xF0)
_COMMENT: Final = 0xFE
_RESTARTS: Final = range(0xD0, 0xD8)
_ICC_HEAD: Final = b"ICC_PROFILE\0"


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """Picture as stored in its sample."""

    payload: bytes
    kind: str
    """``jpg`` or ``png``."""
    rows: int
    """Height as displayed, with its orientation applied."""
    columns: int
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Other facts of it."""


class PictureFinder:
    """Finds the pictures of lines.

    Args:
        root: Folder that names are relative to; None for that of the line's file.
        max_bytes: Larger files are not read.
        keeps_notes: Whether metadata is stored too.
    """

    def __init__(self, root: Path | None, max_bytes: int, *, keeps_notes: bool) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._keeps_notes = keeps_notes

    def find(self, slot: Slot, folder: Path) -> StoredPicture:
        """Return the picture of a slot.

        Args:
            slot: The place, with a name, an address that holds the data, or bytes.
            folder: Of the line's file.

        Raises:
            LineError: It is missing, outside the folder, or not an image.
            StorageError: It cannot be read.
        """
        payload = slot.data if slot.data is not None else self._read(slot.name, folder)
        if len(payload) > self._max_bytes:
            raise LineError(LineReason.IMAGES_TOO_LARGE)
        kind, orientation, rows, columns = _decoded(payload)
        # Also finds the end: a decoder takes a picture that lacks its last bytes.
        plain = without_notes(payload, orientation)
        return StoredPicture(payload if self._keeps_notes else plain, kind, rows, columns)

    def _read(self, name: str, folder: Path) -> bytes:
        if name.startswith("data:"):
            head, _, text = name.partition(",")
            try:
                return base64.b64decode(text, validate=True) if head.endswith(";base64") else b""
            except (binascii.Error, ValueError):
                raise LineError(LineReason.NOT_AN_IMAGE) from None
        name = name.removeprefix("file://")
        if "://" in name:
            raise LineError(LineReason.IMAGE_ELSEWHERE)
        if not name or "\0" in name:
            raise LineError(LineReason.IMAGE_MISSING)
        root = os.path.normpath((self._root or folder).absolute())
        # By name alone: folders of images are often links to another disk.
        path = Path(os.path.normpath(Path(root) / name))
        if not path.is_relative_to(root):
            raise LineError(LineReason.IMAGE_ELSEWHERE)
        try:
            is_file = path.is_file()
        except (OSError, ValueError):  # such as a name that is too long
            is_file = False
        if not is_file:
            raise LineError(LineReason.IMAGE_MISSING)
        with reading(path.open, "rb") as file:
            data: bytes = reading(file.read, self._max_bytes + 1)
        return data


def _decoded(payload: bytes) -> tuple[str, int, int, int]:
    """Decode a picture; return its kind, orientation, rows and columns.

    Raises:
        LineError: It cannot be decoded completely, is neither JPEG nor PNG, or has too many pixels.
    """
    from PIL import Image

    # A header may state any size, and memory is allocated by it.
    header = image_header(payload)
    if header is None or header.rows * header.columns > _MAX_PIXELS:
        raise LineError(LineReason.NOT_AN_IMAGE)
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(payload), formats=("JPEG", "PNG")) as image:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            kind = _KINDS[image.format or ""]
            image.load()
            orientation = image.getexif().get(_ORIENTATION, 1)
            columns, rows = image.size
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - Pillow raises nearly everything on damaged files
        raise LineError(LineReason.NOT_AN_IMAGE) from None
    if orientation in _TURNED:
        rows, columns = columns, rows
    return kind, orientation if orientation in range(1, 9) else 1, rows, columns


def without_notes(payload: bytes, orientation: int = 1) -> bytes:
    """Return a JPEG or PNG without its metadata; its pixels, color profile and orientation stay.

    Args:
        payload: A whole picture.
        orientation: From its Exif, 1 to 8; written again if not 1.

    Raises:
        LineError: Its segments or chunks are malformed.
    """
    exif = b"" if orientation == 1 else _exif(orientation)
    try:
        pieces = _png_pieces(payload, exif) if payload.startswith(_PNG_HEAD) else _jpeg_pieces(payload, exif)
        return b"".join(pieces)
    except (IndexError, struct.error):
        raise LineError(LineReason.NOT_AN_IMAGE) from None


def _exif(orientation: int) -> bytes:
    """Return a TIFF header whose only entry is the orientation."""
    entry = struct.pack(">HHIHH", _ORIENTATION, 3, 1, orientation, 0)
    return b"MM\0*" + struct.pack(">IH", 8, 1) + entry + bytes(4)


def _png_pieces(payload: bytes, exif: bytes) -> Iterator[bytes]:
    yield _PNG_HEAD
    at = len(_PNG_HEAD)
    while True:
        length, name = struct.unpack_from(">I4s", payload, at)
        chunk = payload[at : at + 12 + length]
        if len(chunk) < 12 + length:
            raise IndexError
        at += len(chunk)
        is_critical = not name[0] & 0x20
        if is_critical or name in _PNG_KEPT:
            yield chunk
        if name == b"IHDR" and exif:
            yield struct.pack(">I", len(exif)) + b"eXIf" + exif
            yield struct.pack(">I", zlib.crc32(b"eXIf" + exif))
        if name == b"IEND":
            return


def _jpeg_pieces(payload: bytes, exif: bytes) -> Iterator[bytes]:
    yield payload[:2]
    at, is_exif_due = 2, bool(exif)
    while True:
        while payload[at + 1] == 0xFF:  # fill bytes
            at += 1
        if payload[at] != 0xFF:
            raise IndexError
        marker = payload[at + 1]
        if marker == _EOI:
            yield payload[at : at + 2]
            return
        length = struct.unpack_from(">H", payload, at + 2)[0]
        segment = payload[at : at + 2 + length]
        at += 2 + length
        if is_exif_due and marker != _JFIF:
            # JFIF wants to be first.
            yield struct.pack(">BBH", 0xFF, _EXIF, len(exif) + 8) + b"Exif\0\0" + exif
            is_exif_due = False
        if _is_kept(marker, segment):
            yield segment
        if marker == _SOS:
            stop = _scan_end(payload, at)
            yield payload[at:stop]
            at = stop


def _is_kept(marker: int, segment: bytes) -> bool:
    if marker == _ICC:
        return segment[4:].startswith(_ICC_HEAD)
    if marker in _APPLICATION:
        # JFIF extensions hold smaller copies of the picture.
        return marker == _ADOBE or (marker == _JFIF and segment[4:].startswith(b"JFIF\0"))
    return marker != _COMMENT


def _scan_end(payload: bytes, at: int) -> int:
    """Return the offset of the next marker after coded data."""
    while True:
        at = payload.find(b"\xff", at)
        if at < 0:
            raise IndexError
        following = payload[at + 1]
        if following not in (0x00, 0xFF) and following not in _RESTARTS:
            return at
        at += 1 if following == 0xFF else 2
