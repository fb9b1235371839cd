"""Reader of slides in TIFF pyramids: Aperio SVS, OME-TIFF, and any tiled TIFF in 8-bit RGB.

tifffile finds the images of a file; the levels are the tiled ones of the proportions of the first. Whatever
else a file holds (label, macro image, thumbnail) is left out, and no text of it is read but the scale.

Source: TIFF 6.0, section 15 (tiles); TIFF technical note 2 (JPEG); the Aperio and OME-TIFF specifications.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.dictionary import WHOLE_SLIDE
from shardflow.packing.sources.dicom.elements import HeaderLimits, check_limits
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.planes import PlaneHeader
from shardflow.packing.sources.dicom.slides import slide_limits
from shardflow.packing.sources.placement import make_header
from shardflow.packing.sources.slides.levels import Array, Place, SlideLevel, plain_jpeg

if TYPE_CHECKING:
    from shardflow.packing.sources.placement import Placement

TIFF: Final = "tiff"
"""Stands for a transfer syntax in headers."""
_BYTES_PER_MM: Final = {2: 25.4, 3: 10.0}  # Resolution Unit: inch, centimeter
_MPP_RANGE: Final = (0.02, 50.0)
"""Microns per pixel of the finest level that are believed: resolutions of 72 or 300 dpi are of printers."""
_APERIO_MPP: Final = re.compile(r"\|\s*MPP\s*=\s*([0-9.]+)")
_APERIO_POWER: Final = re.compile(r"\|\s*AppMag\s*=\s*([0-9.]+)")
_OME_SIZE: Final = re.compile(r'PhysicalSize([XY])="([0-9.eE+-]+)"')
_OME_UNIT: Final = re.compile(r'PhysicalSize[XY]Unit="([^"]*)"')
_OME_POWER: Final = re.compile(r'NominalMagnification="([0-9.]+)"')
_LABEL_WORDS: Final = re.compile(r"\b(label|macro|overview|thumbnail)\b", re.IGNORECASE)
_RATIO_TOLERANCE: Final = 0.02
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
        return replace(header, sop_class_uid=WHOLE_SLIDE, modality=header.modality or "SM", flags=flags)


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
        raise source_error(Reason.FILE_UNREADABLE, type(error).__name__) from None
    except (tifffile.TiffFileError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise source_error(Reason.HEADER_UNREADABLE, f"TIFF: {type(error).__name__}") from None


def _levels(file: Any) -> tuple[list[TiffLevel], int]:
    pages = [page for first in file.pages for page in (first, *(first.pages or ()))]
    tiled = [
        page for page in pages if page.is_tiled and not _LABEL_WORDS.search(page.description.split("|")[0])
    ]
    if not tiled:
        raise source_error(Reason.UNSUPPORTED_SLIDE, "no tiled image")
    finest = max(tiled, key=lambda page: page.imagelength * page.imagewidth)
    ratio = finest.imagelength / finest.imagewidth
    found: dict[tuple[int, int], Any] = {}
    for page in tiled:
        # A level of few pixels has rounded sides.
        tolerance = _RATIO_TOLERANCE + 1 / min(page.imagelength, page.imagewidth)
        if abs(page.imagelength / page.imagewidth / ratio - 1) <= tolerance:
            found.setdefault((page.imagelength, page.imagewidth), page)
    levels = [found[size] for size in sorted(found, reverse=True)]
    for page in levels:
        _check_page(page)
    spacing = _spacing_mm(finest)
    return [TiffLevel(page, finest, spacing) for page in levels], len(pages) - len(levels)


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


def _spacing_mm(page: Any) -> tuple[float, float] | None:
    """Return the distance of pixels between rows and columns; None where no plausible one is stated."""
    text = page.description or ""
    found: tuple[float, float] | None = None
    if match := _APERIO_MPP.search(text):
        found = (float(match[1]), float(match[1]))
    elif sizes := dict(_OME_SIZE.findall(text)):
        if set(_OME_UNIT.findall(text)) <= {"µm", "um", "&#181;m", "&#xB5;m"} and {"X", "Y"} <= sizes.keys():
            found = (float(sizes["Y"]), float(sizes["X"]))
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
    """

    def __init__(self, page: Any, finest: Any, spacing_mm: tuple[float, float] | None) -> None:
        self._page = page
        self.rows, self.columns = int(page.imagelength), int(page.imagewidth)
        self.tile_rows, self.tile_columns = int(page.tilelength), int(page.tilewidth)
        if spacing_mm is not None:
            self.spacing_mm = (
                spacing_mm[0] * finest.imagelength / self.rows,
                spacing_mm[1] * finest.imagewidth / self.columns,
            )
        text = finest.description or ""
        power = _APERIO_POWER.search(text) or _OME_POWER.search(text)
        self.objective_power = float(power[1]) if power else None
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
