"""Packing of one slide: tissue is found in a coarse level, and the tiles that show it are stored.

Tissue has color and glass has not: the chroma of a coarse level is cut at Otsu's threshold, as
preprocessing of slides usually does. Tiles beside tissue are stored too, so that a region at its border is
whole.

Source: N. Otsu, A threshold selection method from gray-level histograms, IEEE Trans. SMC 9 (1979).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.keys import level_field
from shardflow.format.reasons import Reason, reading_source, source_error
from shardflow.format.volumes.encoder import LevelWriter
from shardflow.format.volumes.tiles import TileForm, decode_tile, encode_tile
from shardflow.packing.engines.base import step
from shardflow.packing.sources.slides import TIFF, DicomLevel, Place, SlideLevel, open_levels

if TYPE_CHECKING:
    from shardflow.packing.settings import SlidesConfig
    from shardflow.packing.sources.dicom.elements import HeaderLimits
    from shardflow.packing.sources.dicom.headers import InstanceHeader
    from shardflow.packing.studies.assembly import FragmentWriter

_MAP_SIDE: Final = 2048
"""Longest side of the map of tissue, in pixels."""
_MIN_MAP_SIDE: Final = 1024
_CHROMA_RANGE: Final = (12, 48)
"""Between these the threshold of chroma is: glass under JPEG reaches 10, pale tissue begins at 15."""
_MEDIAN_PX: Final = 5
_FULL: Final = 255
_MPP_TOLERANCE: Final = 1.02
_MAX_DIFFERENCE: Final = 2.0
"""Mean difference of two decoders of one JPEG tile, in gray values: more is another color space."""
_MAX_NUM_BYTES: Final = (1 << 33) - 1
"""Of a member of a tar."""


@dataclass(frozen=True, slots=True)
class TissueMap:
    """Tissue of a slide in a grid of small cells, as sums over all cells above and to the left."""

    sums: NDArray[np.int64]
    """``(rows + 1, columns + 1)``."""

    @property
    def has_tissue(self) -> bool:
        """Whether there is any."""
        return bool(self.sums[-1, -1])

    def shares(self, level: SlideLevel) -> NDArray[np.int64]:
        """Return the share of each tile of a level that is tissue, in 1/255 and rounded up."""
        cells = np.array(self.sums.shape) - 1
        edges = []
        for sides, side, tile, num in zip(
            cells.tolist(),
            (level.rows, level.columns),
            (level.tile_rows, level.tile_columns),
            level.grid,
            strict=True,
        ):
            ends = np.minimum(np.arange(num + 1) * tile, side)
            edges.append((ends[:-1] * sides // side, -(-ends[1:] * sides // side)))
        (top, bottom), (left, right) = edges
        sums = self.sums
        inside = (
            sums[np.ix_(bottom, right)]
            - sums[np.ix_(top, right)]
            - sums[np.ix_(bottom, left)]
            + sums[np.ix_(top, left)]
        )
        return -(-inside * _FULL // np.outer(bottom - top, right - left))


def find_tissue(level: SlideLevel) -> TissueMap:
    """Find the tissue of a slide in one of its levels.

    Raises:
        SourceError: A tile cannot be decoded.
    """
    # The import takes 0.2 s, which only packers of slides should pay.
    import cv2

    step_px = max(1, -(-max(level.rows, level.columns) // _MAP_SIDE))
    shape = -(-level.rows // step_px), -(-level.columns // step_px)
    chroma = np.zeros(shape, np.uint8)
    places = [*itertools.product(range(level.grid[0]), range(level.grid[1]))]
    for (row, column), pixels in zip(places, level.pixels(places), strict=True):
        if not column:
            step()
        if pixels is None:
            continue
        first = row * level.tile_rows, column * level.tile_columns
        last = min(first[0] + level.tile_rows, level.rows), min(first[1] + level.tile_columns, level.columns)
        (top, left), (bottom, right) = (
            (first[0] // step_px, first[1] // step_px),
            (-(-last[0] // step_px), -(-last[1] // step_px)),
        )
        own = pixels[: last[0] - first[0], : last[1] - first[1]]
        small = cv2.resize(own, (right - left, bottom - top), interpolation=cv2.INTER_AREA)
        chroma[top:bottom, left:right] = small.max(axis=2) - small.min(axis=2)
    chroma = cv2.medianBlur(chroma, _MEDIAN_PX)
    found, _ = cv2.threshold(chroma, 0, _FULL, cv2.THRESH_BINARY | cv2.THRESH_OTSU)
    least, most = _CHROMA_RANGE
    is_tissue = chroma > min(max(found, least), most)
    sums = np.zeros((shape[0] + 1, shape[1] + 1), np.int64)
    sums[1:, 1:] = is_tissue.cumsum(axis=0).cumsum(axis=1)
    return TissueMap(sums)


@contextmanager
def open_slide(
    headers: Sequence[InstanceHeader], paths: Mapping[int, Path], limits: HeaderLimits
) -> Iterator[list[SlideLevel]]:
    """Open the levels of a slide, finest first.

    Args:
        headers: Of its files: one of TIFF, or one for each level of DICOM.
        paths: Of the files, by position.
        limits: Bounds on what a file declares.

    Raises:
        SourceError: One cannot be read.
    """
    if headers[0].transfer_syntax_uid == TIFF:
        with open_levels(paths[headers[0].file_index]) as (levels, _):
            yield [*levels]
    else:
        yield [DicomLevel(paths[header.file_index], header, limits) for header in headers]


def choose_levels(levels: Sequence[SlideLevel], wanted_mpp: Sequence[float]) -> list[SlideLevel]:
    """Return the levels to store: for each wanted resolution the coarsest that is at least as fine.

    Where none is, or the slide has no scale, that is the finest level.

    Args:
        levels: Finest first.
        wanted_mpp: Microns per pixel; empty for all levels.
    """
    if not wanted_mpp:
        return [*levels]
    chosen = set()
    for mpp in wanted_mpp:
        fine = [
            at
            for at, level in enumerate(levels)
            if level.spacing_mm is not None and 1000 * max(level.spacing_mm) <= mpp * _MPP_TOLERANCE
        ]
        chosen.add(max(fine, default=0))
    return [levels[at] for at in sorted(chosen)]


def write_slide(
    number: int, levels: Sequence[SlideLevel], writer: FragmentWriter, settings: SlidesConfig
) -> dict[str, Any]:
    """Write the levels of a slide; return the facts that they determine.

    Args:
        number: Of the slide among the series of its sample.
        levels: All that there are, finest first.
        writer: Of the sample.
        settings: What is stored.

    Raises:
        SourceError: A tile cannot be read, or a level is larger than a member of a tar.
        StorageError: The members cannot be written.
    """
    coarse = [level for level in levels if max(level.rows, level.columns) >= _MIN_MAP_SIDE] or [levels[0]]
    tissue = find_tissue(coarse[-1])
    chosen = choose_levels(levels, settings.mpp)
    described = []
    forms = set()
    for place, level in enumerate(chosen):
        shares = tissue.shares(level)
        wanted = np.ones(level.grid, bool)
        if settings.tissue_only and tissue.has_tissue:
            wanted = _with_neighbors(shares > 0)
        form, num_stored = _write_level(level_field(number, place), level, shares, wanted, writer)
        forms.add(form)
        described.append(
            {
                "columns": level.columns,
                "encoding": form,
                "num_stored_tiles": num_stored,
                "num_tiles": int(np.prod(level.grid)),
                "num_tissue_tiles": int(np.count_nonzero(2 * shares >= _FULL)),
                "pixel_spacing_mm": None if level.spacing_mm is None else list(level.spacing_mm),
                "rows": level.rows,
                "tile_columns": level.tile_columns,
                "tile_rows": level.tile_rows,
            }
        )
    finest = chosen[0]
    return {
        "columns": finest.columns,
        "decoders": sorted(forms),
        "display_range": [0.0, 255.0],
        "num_clipped": 0,
        "num_padding": 0,
        "pixel_spacing_mm": described[0]["pixel_spacing_mm"],
        "rows": finest.rows,
        "slide": {
            "has_tissue": tissue.has_tissue,
            "levels": described,
            "objective_power": finest.objective_power,
        },
    }


def _with_neighbors(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which tiles are chosen, or beside one that is, diagonally too."""
    wide = np.pad(mask, 1)
    parts = [
        wide[row : row + mask.shape[0], column : column + mask.shape[1]]
        for row in range(3)
        for column in range(3)
    ]
    return np.asarray(np.logical_or.reduce(parts), np.bool_)


def _write_level(
    name: str,
    level: SlideLevel,
    shares: NDArray[np.int64],
    wanted: NDArray[np.bool_],
    writer: FragmentWriter,
) -> tuple[TileForm, int]:
    """Write a level; return the form of its tiles, and how many are stored."""
    places = [(row, column) for row, column in np.argwhere(wanted).tolist()]
    form = _form_of(level, places)
    tiles = _tiles(level, places, form)
    num_stored = num_bytes = 0
    with LevelWriter(
        (level.rows, level.columns), (level.tile_rows, level.tile_columns), folder=writer.folder
    ) as encoder:
        for row, column in itertools.product(*map(range, level.grid)):
            if not column:
                step()
            tile = next(tiles) if wanted[row, column] else None
            num_stored += tile is not None
            num_bytes += len(tile or b"")
            if num_bytes > _MAX_NUM_BYTES:
                raise source_error(Reason.LIMIT_EXCEEDED, f"a level of more than {_MAX_NUM_BYTES} bytes")
            encoder.add(tile, int(shares[row, column]))
        writer.add_volume(name, encoder.finish(form))
    return form, num_stored


def _tiles(level: SlideLevel, places: Sequence[Place], form: TileForm) -> Iterator[bytes | None]:
    """Yield the encoded tiles; None for those that the file does not have."""
    if form == "deflate":
        for pixels in level.pixels(places):
            yield None if pixels is None else encode_tile(pixels)
        return
    for stream in level.streams(places):
        if stream is None:
            yield None
            continue
        tile, is_rgb = stream
        if is_rgb != (form == "jpeg_rgb"):
            raise source_error(Reason.DECODE_FAILED, "JPEG tiles of two color spaces in one level")
        yield tile


def _form_of(level: SlideLevel, places: Sequence[Place]) -> TileForm:
    """Return how tiles are stored: JPEG stays as it is if both decoders see one image in the first tile.

    Raises:
        SourceError: The first tile is refused, as it would be in any other place.
    """
    if not level.is_jpeg:
        return "deflate"
    # One pass: a sparse level may lack most tiles, and each pass finds all frames of the file.
    for stream, pixels in zip(level.streams(places), level.pixels(places), strict=True):
        if stream is None or pixels is None:
            continue
        tile, is_rgb = stream
        decoded = np.empty_like(pixels)
        try:
            decode_tile(tile, decoded)
        except FormatError:  # of another decoder than the one that made the pixels
            return "deflate"
        if float(np.abs(decoded.astype(np.int16) - pixels).mean()) > _MAX_DIFFERENCE:
            return "deflate"
        return "jpeg_rgb" if is_rgb else "jpeg_ycbcr"
    return "deflate"


def check_copy(kept: Path, copy: Path) -> None:
    """Make sure that two files of one level hold the same bytes.

    Raises:
        SourceError: CONFLICTING_INSTANCE where they differ; FILE_UNREADABLE.
    """
    digests = set()
    for path in (kept, copy):
        with reading_source(), path.open("rb") as file:
            digests.add(hashlib.file_digest(file, "sha256").digest())
    if len(digests) > 1:
        raise source_error(Reason.CONFLICTING_INSTANCE, "files of a slide")
