"""Levels of a slide as packing reads them: their tiles as pixels, and as JPEG streams without metadata.

A JPEG tile is kept as the scanner compressed it. What is written is only what a decoder needs: tables, frame,
scans and a marker of the color space. Comments, Exif, ICC profiles and whatever follows the end of the image
are left behind, since they hold dates, names of devices and, at times, of patients. A stream with any other
segment, or one that is longer than what it declares, is refused.

Source: ITU T.81, annex B (markers); Adobe technical note 5116 (the color transform).
"""

from __future__ import annotations

import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from shardflow.errors import os_reason
from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom.description import DESCRIPTION_TAGS, describe_image
from shardflow.packing.sources.dicom.elements import HeaderLimits, open_file, read_elements
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.slides import TILE_TAGS, objective_power, slide_limits, tile_frames
from shardflow.packing.sources.dicom.stored import find_frames, iter_stored, read_frame

Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Place: TypeAlias = tuple[int, int]
"""Row and column of a tile in the grid of its level."""

JPEG_BASELINE: Final = "1.2.840.10008.1.2.4.50"
# A segment of the header or between scans, and what ends entropy-coded data: no stuffed zero, no restart.
_MARKER: Final = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")
_END, _SCAN, _APP14 = 0xD9, 0xDA, 0xEE
_FRAMES: Final = frozenset({0xC0, 0xC1, 0xC2})
"""Baseline, extended and progressive."""
_HUFFMAN, _QUANTIZATION, _RESTART = 0xC4, 0xDB, 0xDD
_LEFT_OUT: Final = frozenset({*range(0xE0, 0xF0), 0xFE})
"""Segments of applications, and comments."""


class SlideLevel(ABC):
    """One level of a slide, open for reading.

    Attributes:
        rows: Of the level.
        columns: Of the level.
        tile_rows: Of a tile; those at the lower and right edge are padded.
        tile_columns: Of a tile.
        spacing_mm: Distance of pixels between rows and columns; None where it is unknown.
        objective_power: Magnification of the objective; None where it is unknown.
        is_jpeg: Whether its tiles are JPEG streams.
    """

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int
    spacing_mm: tuple[float, float] | None = None
    objective_power: float | None = None
    is_jpeg: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.rows // self.tile_rows), -(-self.columns // self.tile_columns)

    @abstractmethod
    def pixels(self, places: Sequence[Place]) -> Iterator[Array | None]:
        """Decode tiles; None for one that the file does not have.

        Yields:
            ``(tile_rows, tile_columns, 3)`` RGB.

        Raises:
            SourceError: FILE_UNREADABLE, PIXEL_DATA_TRUNCATED or DECODE_FAILED.
        """

    @abstractmethod
    def streams(self, places: Sequence[Place]) -> Iterator[tuple[bytes, bool] | None]:
        """Return the JPEG streams of tiles, see `plain_jpeg`; None for one that the file does not have.

        Raises:
            SourceError: As of `pixels`.
        """


def plain_jpeg(
    data: bytes, shape: tuple[int, int], *, tables: bytes = b"", photometric: str
) -> tuple[bytes, bool]:
    """Return a JPEG stream of the segments that a decoder needs alone, and whether it is RGB.

    Bytes within the data of a scan are not looked at: what a decoder passes over there stays.

    Args:
        data: The stream.
        shape: Rows and columns that it must have.
        tables: Stream of the tables that it lacks, as TIFF stores them once for all tiles.
        photometric: Color space by its container; what the stream says counts more.

    Raises:
        SourceError: DECODE_FAILED or PIXEL_DATA_TRUNCATED.
    """
    # pydicom and imagecodecs, which only packers of slides should pay for.
    from shardflow.packing.sources.dicom.decoders import holds_rgb, read_jpeg_header

    header = read_jpeg_header(data)
    found = None if header is None else (header.rows, header.columns, header.num_components, header.precision)
    if found != (*shape, 3, 8):
        raise source_error(Reason.DECODE_FAILED, f"a JPEG tile of {found}, not {shape}")
    is_rgb = holds_rgb(data, photometric)
    marker = struct.pack(">BBH5sHHHB", 0xFF, _APP14, 14, b"Adobe", 100, 0, 0, 0 if is_rgb else 1)
    return b"".join(
        [b"\xff\xd8", marker, *(_segments(tables) if tables else ()), *_segments(data), b"\xff\xd9"]
    ), is_rgb


def _segments(data: bytes) -> Iterator[bytes]:
    """Yield the segments of a stream that a decoder needs.

    Raises:
        SourceError: PIXEL_DATA_TRUNCATED; DECODE_FAILED where one is unknown, or longer than it should be.
    """
    position = 2
    while True:
        match = _MARKER.match(data, position)
        if match is None or (match[1][0] != _END and match.end() + 2 > len(data)):
            raise source_error(Reason.PIXEL_DATA_TRUNCATED, "no end of a JPEG tile")
        marker = match[1][0]
        if marker == _END:
            return
        end = match.end() + int.from_bytes(data[match.end() : match.end() + 2], "big")
        if marker not in _LEFT_OUT:
            content = data[match.end() + 2 : end]
            if end > len(data):
                raise source_error(Reason.PIXEL_DATA_TRUNCATED, "no end of a JPEG tile")
            if not _is_exact(marker, content):
                raise source_error(Reason.DECODE_FAILED, f"a JPEG tile with a segment {marker:#x}")
            if marker == _SCAN:  # with its data, up to the next marker
                following = _MARKER.search(data, end)
                end = len(data) if following is None else following.start()
            yield data[match.end() - 2 : end]
        position = end


def _is_exact(marker: int, content: bytes) -> bool:
    """Return whether a segment is one that decoders need, and holds nothing but what it declares."""
    if marker == _RESTART:
        return len(content) == 2
    if marker in _FRAMES:
        return len(content) >= 6 and len(content) == 6 + 3 * content[5]
    if marker == _SCAN:
        return bool(content) and len(content) == 4 + 2 * content[0]
    if marker not in (_HUFFMAN, _QUANTIZATION):
        return False
    at = 0
    while at < len(content):  # several tables
        at += 17 + sum(content[at + 1 : at + 17]) if marker == _HUFFMAN else 65 + 64 * (content[at] >> 4)
    return at == len(content)


class DicomLevel(SlideLevel):
    """Level of a slide in a DICOM file.

    Args:
        path: The file.
        header: As `shardflow.packing.sources.dicom.headers.read_header` read it.
        limits: Bounds on what the file declares.

    Raises:
        SourceError: The tiles are not a grid; see `tile_frames`.
    """

    def __init__(self, path: Path, header: InstanceHeader, limits: HeaderLimits) -> None:
        self._path, self._limits = path, slide_limits(limits)
        elements = read_elements(path, DESCRIPTION_TAGS | TILE_TAGS, limits)
        tile, _ = describe_image(elements, self._limits)
        self._header = replace(header, image=tile)
        self._frames = tile_frames(elements, tile, header.image)
        self.rows, self.columns = header.image.rows, header.image.columns
        self.tile_rows, self.tile_columns = tile.rows, tile.columns
        self.spacing_mm = header.planes[0].pixel_spacing
        self.objective_power = objective_power(elements)
        self.is_jpeg = header.transfer_syntax_uid == JPEG_BASELINE

    def pixels(self, places: Sequence[Place]) -> Iterator[Array | None]:
        """Decode tiles, see `SlideLevel.pixels`."""
        frames = [self._frames.get(place) for place in places]
        stored = [frame for frame in frames if frame is not None]
        found = iter_stored(self._path, self._header, stored, self._limits) if stored else iter(())
        for frame in frames:
            yield None if frame is None else next(found)[0]

    def streams(self, places: Sequence[Place]) -> Iterator[tuple[bytes, bool] | None]:
        """Return JPEG streams, see `SlideLevel.streams`."""
        header, shape = self._header, (self.tile_rows, self.tile_columns)
        photometric = header.image.photometric_interpretation
        try:
            with open_file(self._path, self._limits.max_inflated_bytes) as descriptor:
                found = find_frames(
                    descriptor, header.pixel_offset, header.num_bytes, header.image.num_frames
                )
                for place in places:
                    frame = self._frames.get(place)
                    data = None if frame is None else read_frame(descriptor, found[frame])
                    yield None if data is None else plain_jpeg(data, shape, photometric=photometric)
        except OSError as error:
            raise source_error(Reason.FILE_UNREADABLE, os_reason(error)) from None
