"""Regions of a sample as ``annotations.json`` lists them, and the pixels that they cover.

In a slice, a region is a stored mask, closed outlines, or a box, the first of them that there is; a region
whose mask is a volume in bricks is what that holds. Outlines are filled here alike for the masks that packing
stores and for regions that have none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.keys import parse_volume_field

Outline: TypeAlias = NDArray[np.float64]
"""``(n, 2)`` points ``(x, y)`` in pixel coordinates, which count edges."""
Pixels: TypeAlias = NDArray[np.uint8]
Box: TypeAlias = tuple[float, float, float, float]

_MAX_CROSSINGS: Final = 1 << 21
"""Edge and row pairs that are looked at together: bounds the memory of an outline with long edges."""
_AREA_KINDS: Final = frozenset({"segmentation", "contour", "box"})
_FULL: Final = 255


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """Region in one slice."""

    box: Box | None
    """``x0, y0, x1, y1`` in pixel coordinates; None where the region names the slice as a whole."""
    outlines: Sequence[Sequence[float]]
    """``x, y, x, y, ...`` each."""
    is_closed: bool
    """Whether the outlines enclose an area."""


@dataclass(frozen=True, slots=True)
class Region:
    """Entry of ``annotations.json``: a region in the slices of one series."""

    number: int
    series: int
    names: frozenset[str]
    """Its label, and the value of its code, as far as they are known."""
    source: str
    is_fractional: bool
    """Whether masks hold the covered part of each pixel times 255, and not 0 and 1."""
    places: Mapping[int, RegionPlace]
    """By the index of the slice."""
    reader: int | None = None
    """Who drew it, of several readers; None where that is not known."""
    volume: int | None = None
    """Region after which the volume in bricks is named that holds its mask; None where masks are slices."""
    values: Sequence[int] = ()
    """Numbers in that volume that are voxels of it; of a fractional region its voxels are parts of 255."""

    def mask_level(self, threshold: float) -> int:
        """Return the smallest value of a mask's pixel that belongs to the region.

        Args:
            threshold: Part of a pixel that must be covered; of a mask of 0 and 1 it is all.
        """
        return max(1, math.ceil(threshold * _FULL)) if self.is_fractional else 1

    def table(self, dtype: np.dtype[Any], threshold: float = 0.5) -> NDArray[np.bool_]:
        """Return which values of its volume are voxels of the region, ``(number of values,)``.

        Args:
            dtype: Of the volume.
            threshold: See `mask_level`.

        Raises:
            FormatError: It names a value that the volume cannot hold.
        """
        found = np.zeros(int(np.iinfo(dtype).max) + 1, bool)
        if self.is_fractional:
            found[self.mask_level(threshold) :] = True
        elif all(0 < value < len(found) for value in self.values):
            found[list(self.values)] = True
        else:
            raise _broken(ValueError())
        return found

    def fill(self, index: int, shape: tuple[int, int]) -> Pixels | None:
        """Fill the region's outlines, or else its box, in a slice that has no mask of it.

        Args:
            index: Of the slice.
            shape: Its rows and columns.

        Returns:
            ``(rows, columns)`` of 0 and 1; None if the region has no area there.

        Raises:
            FormatError: An outline is not pairs of finite numbers.
        """
        place = self.places.get(index)
        if place is None:
            return None
        if place.outlines:
            return self._enclosed(place, shape) if place.is_closed else None
        if place.box is None:
            return None
        rows, columns = shape
        first, top, last, bottom = (max(0, math.ceil(edge - 0.5)) for edge in place.box)
        filled = np.zeros(shape, np.uint8)
        filled[min(top, rows) : min(bottom, rows), min(first, columns) : min(last, columns)] = 1
        return filled

    def _enclosed(self, place: RegionPlace, shape: tuple[int, int]) -> Pixels:
        try:
            outlines = [np.asarray(each, np.float64).reshape(-1, 2) for each in place.outlines]
        except (TypeError, ValueError) as error:
            raise _broken(error) from None
        if not all(np.isfinite(each).all() for each in outlines):
            raise _broken(ValueError())
        if self.source in ("coco", "lidc-xml"):
            return unite_outlines(outlines, *shape, is_border_outside=self.source == "lidc-xml")
        return fill_outlines(outlines, *shape)


def read_regions(payload: bytes) -> list[Region]:
    """Read ``annotations.json``.

    Args:
        payload: The field's bytes.

    Returns:
        The regions by number, a region in several series once for each.

    Raises:
        FormatError: It is no such list.
    """
    try:
        found = [_region(each) for each in json.loads(payload)["rois"]]
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise _broken(error) from None
    return sorted(found, key=lambda region: region.number)


def _region(entry: Mapping[str, Any]) -> Region:
    label, code = entry.get("label"), entry.get("code")
    names = frozenset(one for one in (label, None if code is None else code["value"]) if one is not None)
    polygons = entry.get("polygons") or [()] * len(entry["slices"])
    places = {
        int(place["slice"]): _place(place, outlines, entry.get("kind"))
        for place, outlines in zip(entry["slices"], polygons, strict=True)
    }
    is_fractional = "fractional" in entry.get("flags", ())
    reader, mask = entry.get("reader"), entry.get("mask")
    volume = parse_volume_field(f"{mask}.b2nd") if mask is not None else None
    return Region(
        int(entry["roi"]),
        int(entry["series"]),
        names,
        str(entry.get("source")),
        is_fractional,
        places,
        None if reader is None else int(reader),
        None if volume is None else volume[1],
        tuple(map(int, entry.get("values", ()))) if volume is not None else (),
    )


def _place(facts: Mapping[str, Any], outlines: Sequence[Sequence[float]], kind: object) -> RegionPlace:
    box, fraction = facts.get("box_px"), facts.get("fraction")
    if box is not None:
        x0, y0, x1, y1 = (float(edge) for edge in box)
        box = (x0, y0, x1, y1)
        if not all(map(math.isfinite, box)):
            raise ValueError("a box that is not finite")
    is_closed = kind in _AREA_KINDS if fraction is None else fraction > 0
    return RegionPlace(box, outlines, is_closed)


def _broken(error: Exception) -> FormatError:
    return FormatError(
        "annotations.json must list regions as docs/format.md, section 4, says, got "
        f"{type(error).__name__} while reading them; verify the dataset."
    )


def fill_outlines(outlines: Sequence[Outline], rows: int, columns: int) -> Pixels:
    """Fill closed outlines by the even-odd rule at pixel centers, over all of them together.

    A ring inside a ring is a hole, and a keyhole works as well.

    Args:
        outlines: Each closed by itself: the last point is joined to the first.
        rows: Rows of the slice.
        columns: Columns of the slice.

    Returns:
        ``(rows, columns)`` of 0 and 1. What lies outside of the slice is not there.
    """
    starts = [outline for outline in outlines if len(outline) >= 3]
    turns = np.zeros((rows, columns + 1), np.int32)
    if starts:
        a = np.concatenate(starts)
        b = np.concatenate([np.roll(outline, -1, axis=0) for outline in starts])
        _count_turns(a, b, turns)
    filled: Pixels = (np.cumsum(turns[:, :columns], axis=1, dtype=np.int32) & 1).astype(np.uint8)
    return filled


def unite_outlines(
    outlines: Sequence[Outline], rows: int, columns: int, *, is_border_outside: bool = False
) -> Pixels:
    """Fill closed outlines each by itself; a pixel in any of them is set.

    Args:
        outlines: As for `fill_outlines`.
        rows: Rows of the slice.
        columns: Columns of the slice.
        is_border_outside: Whether pixels whose centers lie on an outline are outside of it. Else those of
            its upper and left borders are inside, as for `fill_outlines`.
    """
    united: Pixels = np.zeros((rows, columns), np.uint8)
    for outline in outlines:
        filled = fill_outlines([outline], rows, columns)
        if is_border_outside:
            # From the other corner, lower and right borders are inside instead; corners may be both times.
            filled &= fill_outlines([np.array([columns, rows]) - outline], rows, columns)[::-1, ::-1]
            column, row = np.floor(outline).astype(np.int64).T
            is_inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
            filled[row[is_inside], column[is_inside]] = 0
        united |= filled
    return united


def _count_turns(a: Outline, b: Outline, turns: NDArray[np.int32]) -> None:
    """Count, for each row of pixel centers, the edges that begin left of each center."""
    rows, columns = turns.shape[0], turns.shape[1] - 1
    upper = np.where((a[:, 1] <= b[:, 1])[:, None], a, b)
    lower = np.where((a[:, 1] <= b[:, 1])[:, None], b, a)
    # Centers with upper y <= center < lower y: a vertex on a row of centers counts once.
    first = np.clip(np.ceil(upper[:, 1] - 0.5), 0, rows).astype(np.int64)
    stop = np.clip(np.ceil(lower[:, 1] - 0.5), 0, rows).astype(np.int64)
    spans = stop - first
    crossed = np.flatnonzero(spans > 0)
    batches = np.cumsum(spans[crossed]) // _MAX_CROSSINGS
    for part in np.split(crossed, np.flatnonzero(np.diff(batches)) + 1):
        counts = spans[part]
        edge = np.repeat(part, counts)
        row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
        share = (row + 0.5 - upper[edge, 1]) / (lower[edge, 1] - upper[edge, 1])
        x = upper[edge, 0] + share * (lower[edge, 0] - upper[edge, 0])
        column = np.clip(np.ceil(x - 0.5), 0, columns).astype(np.int64)
        np.add.at(turns, (row, column), 1)
