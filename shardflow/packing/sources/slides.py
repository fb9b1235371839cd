"""Slides: the levels of a pyramid in DICOM or TIFF, as pixels and as JPEG streams without metadata.

A JPEG tile is kept as the scanner compressed it. What is written is only what a decoder needs: tables,
frame, scans and a marker of the color space. Comments, Exif, ICC profiles and whatever follows the end of
the image are left behind, since they hold dates, names of devices and, at times, of patients. A stream with
any other segment, or one that is longer than what it declares, is refused.

tifffile finds the images of a TIFF file (Aperio SVS, OME-TIFF, and any tiled TIFF in 8-bit RGB); the levels
are the largest tiled one and those of its own pyramid, whose sides are its sides divided by a whole number.
Whatever else a file holds (label, macro image, thumbnail) is left out, and no text of it is read except the
scale.

Sources: ITU T.81, annex B (markers); Adobe technical note 5116 (the color transform); TIFF 6.0, section 15
(tiles); TIFF technical note 2 (JPEG); the Aperio and OME-TIFF specifications.
"""

from __future__ import annotations

import logging
import math
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from shardflow.errors import SourceError, os_reason
from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom.description import DESCRIPTION_TAGS, ImageDescription, describe_image
from shardflow.packing.sources.dicom.dictionary import WHOLE_SLIDE
from shardflow.packing.sources.dicom.elements import HeaderLimits, check_limits, open_file, read_elements
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.planes import PlaneHeader
from shardflow.packing.sources.dicom.slides import TILE_TAGS, objective_power, slide_limits, tile_frames
from shardflow.packing.sources.dicom.stored import find_frames, iter_stored, read_frame
from shardflow.packing.sources.dicom.values import read_jpeg_header
from shardflow.packing.sources.documents.bounded import XmlNode, parse_xml
from shardflow.packing.sources.placement import make_header

if TYPE_CHECKING:
    from shardflow.packing.sources.placement import Placement

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
    from shardflow.packing.sources.dicom.decoders import holds_rgb

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
        with open_file(self._path, self._limits.max_inflated_bytes) as descriptor:
            found = find_frames(descriptor, header.pixel_offset, header.num_bytes, header.image.num_frames)
            for place in places:
                frame = self._frames.get(place)
                data = None if frame is None else read_frame(descriptor, found[frame])
                yield None if data is None else plain_jpeg(data, shape, photometric=photometric)


TIFF: Final = "tiff"
"""Stands for a transfer syntax in headers."""
_BYTES_PER_MM: Final = {2: 25.4, 3: 10.0}  # Resolution Unit: inch, centimeter
_MPP_RANGE: Final = (0.02, 50.0)
"""Microns per pixel of the finest level that are believed: resolutions of 72 or 300 dpi are of printers."""
_APERIO_MPP: Final = re.compile(r"\|\s*MPP\s*=\s*([0-9.]+)")
_APERIO_POWER: Final = re.compile(r"\|\s*AppMag\s*=\s*([0-9.]+)")
_LABEL_WORDS: Final = re.compile(r"label|macro|overview|barcode|thumbnail", re.IGNORECASE)
_MICRONS: Final = frozenset({"", "um", "\u00b5m", "\u03bcm"})
_JPEG: Final = 7
_RGB, _YCBCR = 2, 6
_COLORS: Final = 3
# Of these samples are YCbCr, which tifffile leaves as they are.
_UNSUPPORTED_COMPRESSIONS: Final = frozenset({33003})


def read_tiff(path: Path, placement: Placement, *, limits: HeaderLimits) -> InstanceHeader:
    """Read what packing needs of a slide; no tile is decoded.

    Args:
        path: The file.
        placement: Whose it is.
        limits: Bounds on what the file declares.

    Raises:
        SourceError: FILE_UNREADABLE, NOT_IMAGE, HEADER_UNREADABLE, UNSUPPORTED_SLIDE or LIMIT_EXCEEDED.
    """
    with open_levels(path) as (levels, num_other):
        finest, allowed = levels[0], slide_limits(limits)
        check_limits(
            ("tiles", math.prod(finest.grid), allowed.max_frames),
            ("pixels of a tile", finest.tile_rows * finest.tile_columns, limits.max_frame_pixels),
            ("bytes of pixels", finest.rows * finest.columns * _COLORS, allowed.max_pixel_bytes),
        )
        image = ImageDescription(
            rows=finest.rows,
            columns=finest.columns,
            samples_per_pixel=_COLORS,
            num_frames=1,
            bits_allocated=8,
            bits_stored=8,
            high_bit=7,
            is_signed=False,
            planar_configuration=0,
            photometric_interpretation="RGB",
        )
        plane = PlaneHeader(pixel_spacing=finest.spacing_mm)
        header = make_header(placement, image, (plane,), syntax=TIFF, num_bytes=path.stat().st_size)
        flags = ("slide_images_left_out",) if num_other else ()
        return replace(
            header,
            sop_class_uid=WHOLE_SLIDE,
            modality=header.modality or "SM",
            flags=flags,
            pyramid=(header.sop_instance_uid,),  # whatever else its series holds, a file is a slide
        )


@contextmanager
def open_levels(path: Path) -> Iterator[tuple[list[TiffLevel], int]]:
    """Open the levels of a slide, finest first, and count its other images.

    Raises:
        SourceError: As of `read_tiff`.
    """
    try:
        import tifffile
    except ImportError:
        raise source_error(Reason.UNSUPPORTED_SLIDE, "install shardflow[slides]") from None
    try:
        # What it logs may quote texts of the file.
        tifffile.logger().setLevel(logging.CRITICAL + 1)
        with tifffile.TiffFile(path) as file:
            yield _levels(file)
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, os_reason(error)) from None
    except (tifffile.TiffFileError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise source_error(Reason.HEADER_UNREADABLE, f"TIFF: {type(error).__name__}") from None


@dataclass(frozen=True, slots=True)
class _Ome:
    """What OME-XML says of the images of a file."""

    root: XmlNode | None
    """None where it cannot be read."""

    def image_of(self, number: int) -> XmlNode | None:
        """Return the image that a page belongs to; None where nothing says so."""
        images = [] if self.root is None else [*self.root.elements("Image")]
        if len(images) == 1:
            return images[0]
        for image in images:
            for data in image.find_all("Pixels/TiffData"):
                first = _int_of(data.get("IFD"), 0)
                if first <= number < first + _int_of(data.get("PlaneCount"), 1):
                    return image
        return None

    def power_of(self, image: XmlNode | None) -> float | None:
        """Return the magnification of the objective of an image."""
        if image is None or self.root is None:
            return None
        used = {one.get("ID") for one in image.elements("ObjectiveSettings")}
        powers = {
            _float_of(one.get("NominalMagnification"))
            for one in self.root.find_all("Instrument/Objective")
            if not used or one.get("ID") in used
        }
        return powers.pop() if len(powers) == 1 else None


def _int_of(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() else default


def _float_of(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_ome(file: Any) -> _Ome | None:
    """Return what the first page says in OME-XML; None where it has none."""
    text = file.pages.first.description or ""
    if not file.is_ome and not (text.lstrip().startswith("<") and "<OME" in text):
        return None
    try:
        return _Ome(parse_xml(text.strip().encode()))
    except SourceError:
        return _Ome(None)


def _is_label(page: Any, number: int) -> bool:
    """Return whether the text of a page says that it is no scan; XML of the first page tells of all pages."""
    text = (page.description or "").split("|")[0]
    return not (number == 0 and text.lstrip().startswith("<")) and bool(_LABEL_WORDS.search(text))


def _is_level(page: Any, finest: Any) -> bool:
    """Return whether the sides of a page are those of the finest divided by one whole number."""
    whole, sides = ((int(one.imagelength), int(one.imagewidth)) for one in (finest, page))
    if min(sides) < 1:
        return False
    factor = max(whole) // max(sides)
    return any(
        each >= 2 and all(abs(most - side * each) <= each for most, side in zip(whole, sides, strict=True))
        for each in (factor, factor + 1)
    )


def _levels(file: Any) -> tuple[list[TiffLevel], int]:
    ome = _read_ome(file)
    groups: list[list[Any]] = []
    firsts: list[Any] = []
    num_pages = 0
    for number, first in enumerate(file.pages):
        pages = [first, *(first.pages or ())]
        num_pages += len(pages)
        firsts.append(first)
        image = None if ome is None else ome.image_of(number)
        is_label = _is_label(first, number) or (image is not None and _LABEL_WORDS.search(image.get("Name")))
        # An image inside of a label shows it too.
        groups.append(
            []
            if is_label
            else [page for page in pages if page.is_tiled and (page is first or not _is_label(page, -1))]
        )
    tiled = [(page, number) for number, group in enumerate(groups) for page in group]
    if not tiled:
        raise source_error(Reason.UNSUPPORTED_SLIDE, "no tiled image")
    finest, own = max(tiled, key=lambda found: found[0].imagelength * found[0].imagewidth)
    image = None if ome is None else ome.image_of(own)
    tops = [
        group[0]
        for number, group in enumerate(groups)
        if group
        and group[0] is firsts[number]
        and number != own
        and (ome is None or (image is not None and ome.image_of(number) is image))
    ]
    found = {(finest.imagelength, finest.imagewidth): finest}
    for page in (*groups[own], *tops):
        if _is_level(page, finest):
            found.setdefault((page.imagelength, page.imagewidth), page)
    levels = [found[size] for size in sorted(found, reverse=True)]
    for page in levels:
        _check_page(page)
    if ome is None:
        power = _APERIO_POWER.search(finest.description or "")
        objective = _float_of(power[1]) if power else None
    else:
        objective = ome.power_of(image)
    spacing = _spacing_mm(finest, image)
    return [TiffLevel(page, finest, spacing, objective) for page in levels], num_pages - len(levels)


def _check_page(page: Any) -> None:
    """Refuse what is no brightfield image, or is encoded in a way that nobody reads here."""
    is_rgb = page.samplesperpixel == _COLORS and page.bitspersample == 8 and page.planarconfig == 1
    if not is_rgb or page.photometric not in (_RGB, _YCBCR) or page.imagedepth != 1:
        raise source_error(
            Reason.UNSUPPORTED_SLIDE,
            f"{page.samplesperpixel} samples of {page.bitspersample} bits, photometric "
            f"{int(page.photometric)}",
        )
    if int(page.compression) in _UNSUPPORTED_COMPRESSIONS:
        raise source_error(Reason.UNSUPPORTED_SLIDE, f"compression {int(page.compression)}")
    if page.photometric == _YCBCR and int(page.compression) != _JPEG:
        # Only the decoder of JPEG makes RGB of it.
        raise source_error(Reason.UNSUPPORTED_SLIDE, f"YCbCr in compression {int(page.compression)}")


def _spacing_mm(page: Any, image: XmlNode | None) -> tuple[float, float] | None:
    """Return the distance of pixels between rows and columns; None where no plausible one is stated.

    Args:
        page: The finest level.
        image: What OME-XML says of it.
    """
    found: tuple[float, float] | None = None
    pixels = None if image is None else image.find("Pixels")
    if pixels is not None and (pixels.get("PhysicalSizeX") or pixels.get("PhysicalSizeY")):
        down, across = (_float_of(pixels.get(f"PhysicalSize{axis}")) for axis in "YX")
        units = {pixels.get(f"PhysicalSize{axis}Unit") for axis in "YX"}
        if down is not None and across is not None and units <= _MICRONS:
            found = down, across
    elif match := _APERIO_MPP.search(page.description or ""):
        found = (float(match[1]), float(match[1]))
    else:
        unit = _BYTES_PER_MM.get(int(page.resolutionunit))
        x, y = page.resolution
        if unit is not None and min(x, y) > 0:
            found = (1000 * unit / y, 1000 * unit / x)
    least, most = _MPP_RANGE
    if found is None or not all(least <= each <= most for each in found):
        return None
    return found[0] / 1000, found[1] / 1000


class TiffLevel(SlideLevel):
    """Level of a slide in a TIFF file.

    Args:
        page: The image, of tifffile.
        finest: That of the finest level.
        spacing_mm: Distance of pixels in the finest level.
        objective_power: Magnification of the objective.
    """

    def __init__(
        self,
        page: Any,
        finest: Any,
        spacing_mm: tuple[float, float] | None,
        objective_power: float | None,
    ) -> None:
        self._page = page
        self.rows, self.columns = int(page.imagelength), int(page.imagewidth)
        self.tile_rows, self.tile_columns = int(page.tilelength), int(page.tilewidth)
        if spacing_mm is not None:
            self.spacing_mm = (
                spacing_mm[0] * finest.imagelength / self.rows,
                spacing_mm[1] * finest.imagewidth / self.columns,
            )
        self.objective_power = objective_power
        self.is_jpeg = int(page.compression) == _JPEG

    def _tiles(self, places: Sequence[Place]) -> Iterator[tuple[int, bytes | None]]:
        """Read the bytes of tiles; None for one of no bytes."""
        page, columns = self._page, self.grid[1]
        handle = page.parent.filehandle
        for row, column in places:
            number = row * columns + column
            offset, num_bytes = int(page.dataoffsets[number]), int(page.databytecounts[number])
            if not offset or not num_bytes:
                yield number, None
                continue
            if num_bytes > handle.size:
                raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"a tile of {num_bytes} bytes")
            handle.seek(offset)
            data = handle.read(num_bytes)
            if len(data) != num_bytes:
                raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"{len(data)} of {num_bytes} bytes of a tile")
            yield number, data

    def pixels(self, places: Sequence[Place]) -> Iterator[Array | None]:
        """Decode tiles, see `SlideLevel.pixels`."""
        page, shape = self._page, (self.tile_rows, self.tile_columns, _COLORS)
        for number, data in self._tiles(places):
            if data is None:
                yield None
                continue
            try:
                found = page.decode(data, number, jpegtables=page.jpegtables, _fullsize=True)[0]
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the bytes break is the file's fault
                raise source_error(Reason.DECODE_FAILED, f"tifffile: {type(error).__name__}") from None
            if found is None or found.shape[-3:] != shape or found.dtype != np.uint8:
                raise source_error(Reason.DECODE_FAILED, "a tile of another size")
            yield np.ascontiguousarray(found.reshape(shape))

    def streams(self, places: Sequence[Place]) -> Iterator[tuple[bytes, bool] | None]:
        """Return JPEG streams, see `SlideLevel.streams`."""
        shape, tables = (self.tile_rows, self.tile_columns), self._page.jpegtables or b""
        photometric = "RGB" if self._page.photometric == _RGB else "YBR_FULL"
        for _, data in self._tiles(places):
            yield None if data is None else plain_jpeg(data, shape, tables=tables, photometric=photometric)
