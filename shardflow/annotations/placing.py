"""Points in space, found in the slices of a series: what contours and 3D coordinates share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardflow.annotations.book import Dangling
from shardflow.annotations.targets import Floats, Target

__all__ = ["Placed", "nearest_plane", "place_outline", "place_points"]

Placed = tuple[Target, int, Floats, float]
"""A series, a slice, ``(n, 2)`` pixel coordinates in it, and how far in front of it they lie, mm."""

_ONE_PLANE = 0.05
"""Share of a slice's thickness by which outlines of one plane may lie apart."""


def nearest_plane(outlines: Sequence[tuple[float, Floats]], thickness_mm: float) -> list[Floats]:
    """Take the outlines of one plane from those that fell into one slice.

    Where slices are thicker than the ones that were drawn on, several planes fall into one. They are
    sections of one body: filled together they would cut holes into each other.

    Args:
        outlines: Distance from the slice, mm, and points of each.
        thickness_mm: Of the slice.

    Returns:
        Those of the plane that is nearest to the slice; of two that are equally near, of the one behind it.
    """
    nearest = min((height for height, _ in outlines), key=lambda height: (round(abs(height), 4), height))
    return [points for height, points in outlines if abs(height - nearest) <= _ONE_PLANE * thickness_mm]


def place_outline(
    points_mm: Floats, targets: Sequence[Target], named: Sequence[tuple[Target, int]] = ()
) -> list[Placed] | Dangling:
    """Find the slices that an outline lies in, one of each series.

    Args:
        points_mm: ``(n, 3)``, LPS.
        targets: Series of the frame of reference of the points.
        named: Slices of the images that the outline names. Where one of them holds the points, only those do.

    Returns:
        The places; or why there is none. An outline that leaves its slice has none: it was drawn on a plane
        that is not stored.
    """
    by_name = [
        (target, index, *target.plane(index).to_pixels(points_mm))
        for target, index in named
        if target.affine_lps is not None
    ]
    found = [
        (target, index, pixels, float(distances.mean()))
        for target, index, pixels, distances in by_name
        if np.abs(distances).max() <= target.thickness_mm / 2 * (1 + 1e-6)
    ]
    if found:
        return found
    why: Dangling = "FRAME_OF_REFERENCE_UNKNOWN"
    for target in targets:
        _, distances = target.plane(0).to_pixels(points_mm)
        if np.ptp(distances) > target.thickness_mm / 2:
            why = "NOT_PLANAR"
            continue
        index = target.slice_at(float(distances.mean()))
        if index is None:
            why = "OUTSIDE"
            continue
        pixels, distances = target.plane(index).to_pixels(points_mm)
        found.append((target, index, pixels, float(distances.mean())))
    return found or why


def place_points(points_mm: Floats, targets: Sequence[Target]) -> list[Placed]:
    """Find the slices of points that need not lie in one plane; points outside are left out.

    Args:
        points_mm: ``(n, 3)``, LPS.
        targets: Series of their frame of reference.
    """
    found = []
    for target in targets:
        _, distances = target.plane(0).to_pixels(points_mm)
        slices = [target.slice_at(distance) for distance in distances.tolist()]
        for index in sorted({one for one in slices if one is not None}):
            chosen = points_mm[[one == index for one in slices]]
            pixels, distances = target.plane(index).to_pixels(chosen)
            found.append((target, index, pixels, float(distances.mean())))
    return found
