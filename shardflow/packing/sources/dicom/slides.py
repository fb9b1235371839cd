"""Description of whole-slide images: a level of a pyramid, as the header of its file tells it.

An instance of VL Whole Slide Microscopy holds one level in tiles, its frames. The header of packing describes
the level as one image of the total pixel matrix. Only levels are let through: labels carry names and
barcodes, and overviews and thumbnails show the label.

Source: DICOM PS3.3, A.32.8 and C.8.12.4 (whole slide microscopy image), C.8.12.14 (optical paths), C.7.6.17.3
(dimension organization), A.32.8.3 (multi-resolution pyramids).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.elements import Elements, HeaderLimits

_IMAGE_TYPE: Final = 0x00080008
_SAMPLES, _ALLOCATED = 0x00280002, 0x00280100
_TOTAL_COLUMNS, _TOTAL_ROWS, _LABEL_IN_IMAGE = 0x00480006, 0x00480007, 0x00480010
_PATHS, _PATH, _LENS_POWER = 0x00480105, 0x00480106, 0x00480112
_PYRAMID, _CONTAINER = 0x00080019, 0x00400512
_NUM_PATHS, _NUM_PLANES = 0x00480302, 0x00480303
_CONCATENATION, _FRAMES = 0x00209161, 0x52009230
_SLIDE_POSITIONS, _COLUMN, _ROW = 0x0048021A, 0x0048021E, 0x0048021F
_MAX_TILES: Final = 1 << 18
_MAX_SIDE: Final = 1 << 24
_COLORS: Final = 3

SLIDE_TAGS: Final = frozenset(
    {_TOTAL_COLUMNS, _TOTAL_ROWS, _LABEL_IN_IMAGE, _PATHS, _NUM_PATHS, _NUM_PLANES, _CONCATENATION}
    | {_PYRAMID, _CONTAINER}
)
"""Tags that `check_slide`, `describe_level` and `pyramid_of` use, beside those of all images."""
TILE_TAGS: Final = frozenset({_PATHS, _FRAMES})
"""Tags that `tile_frames` and `objective_power` use."""


def check_slide(elements: Elements) -> None:
    """Let the levels of brightfield slides through.

    Raises:
        SourceError: SLIDE_LABEL or UNSUPPORTED_SLIDE.
    """
    flavor = values.codes(elements, _IMAGE_TYPE)[2:3]
    if flavor != ("VOLUME",) or values.code(elements, _LABEL_IN_IMAGE).upper() == "YES":
        raise source_error(Reason.SLIDE_LABEL)
    num_paths = max(values.single(elements, _NUM_PATHS, "i") or 1, len(elements.items(_PATHS)))
    num_planes = values.single(elements, _NUM_PLANES, "i") or 1
    samples, bits = values.short(elements, _SAMPLES), values.short(elements, _ALLOCATED)
    if num_paths > 1 or num_planes > 1 or samples != _COLORS or bits != 8:
        raise source_error(
            Reason.UNSUPPORTED_SLIDE,
            f"{num_paths} optical paths, {num_planes} focal planes, {samples} samples of {bits} bits",
        )
    if elements.values.get(_CONCATENATION):
        raise source_error(Reason.UNSUPPORTED_SLIDE, "a concatenation of several files")


def slide_limits(limits: HeaderLimits) -> HeaderLimits:
    """Return the limits on a level, whose tiles are decoded one by one."""
    return replace(limits, max_frames=_MAX_TILES, max_pixel_bytes=_MAX_SIDE**2 * _COLORS)


def describe_level(elements: Elements, tile: ImageDescription) -> ImageDescription:
    """Return the description of a level as one image.

    Args:
        elements: Of the file.
        tile: Description of its frames.

    Raises:
        SourceError: INVALID_IMAGE_DESCRIPTION.
    """
    rows, columns = (
        values.single(elements, _TOTAL_ROWS, "i") or 0,
        values.single(elements, _TOTAL_COLUMNS, "i") or 0,
    )
    if not (0 < rows <= _MAX_SIDE and 0 < columns <= _MAX_SIDE):
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, f"a level of {rows} rows and {columns} columns")
    return replace(tile, rows=rows, columns=columns, num_frames=1)


def pyramid_of(elements: Elements) -> tuple[str, str, str]:
    """Return the container, the optical path and the pyramid of a level; ``""`` for what it does not name."""
    path = "".join(values.text(one, _PATH) for one in elements.items(_PATHS)[:1])
    return values.text(elements, _CONTAINER), path, values.code(elements, _PYRAMID)


def objective_power(elements: Elements) -> float | None:
    """Return the magnification of the objective; None where it is not stated."""
    for path in elements.items(_PATHS)[:1]:
        found = values.decimals(path, _LENS_POWER, 1)
        if found and found[0] > 0:
            return found[0]
    return None


def tile_frames(
    elements: Elements, tile: ImageDescription, level: ImageDescription
) -> dict[tuple[int, int], int]:
    """Return the frame of each tile by row and column in the grid of tiles.

    Frames without positions of their own (``TILED_FULL``) are all tiles, row by row. Those with positions
    (``TILED_SPARSE``) may leave some out.

    Args:
        elements: Of the file, with `TILE_TAGS`.
        tile: Description of its frames.
        level: Description of the level.

    Raises:
        SourceError: INVALID_IMAGE_DESCRIPTION or UNSUPPORTED_SLIDE.
    """
    num_rows, num_columns = -(-level.rows // tile.rows), -(-level.columns // tile.columns)
    frames = elements.items(_FRAMES)
    places = [_place(frame) for frame in frames]
    if not any(places):
        if tile.num_frames != num_rows * num_columns:
            raise source_error(
                Reason.INVALID_IMAGE_DESCRIPTION, f"{tile.num_frames} tiles of {num_rows * num_columns}"
            )
        return {divmod(frame, num_columns): frame for frame in range(tile.num_frames)}
    found: dict[tuple[int, int], int] = {}
    for frame, place in enumerate(places):
        row, column = (-1, -1) if place is None else (place[0] - 1, place[1] - 1)
        is_inside = 0 <= row < level.rows and 0 <= column < level.columns
        if not is_inside or len(places) != tile.num_frames:
            raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, "a tile outside of its level")
        if row % tile.rows or column % tile.columns:
            raise source_error(Reason.UNSUPPORTED_SLIDE, "tiles that overlap or leave gaps")
        if found.setdefault((row // tile.rows, column // tile.columns), frame) != frame:
            raise source_error(Reason.UNSUPPORTED_SLIDE, "several tiles at one place")
    return found


def _place(frame: Elements) -> tuple[int, int] | None:
    """Return row and column of a frame's first pixel in its level, from 1; None if not stated."""
    for item in frame.items(_SLIDE_POSITIONS)[:1]:
        row, column = values.single(item, _ROW, "i"), values.single(item, _COLUMN, "i")
        if row is not None and column is not None:
            return row, column
    return None
