"""Shapes that DICOM draws with a few points: in the pixels of an image, and in space.

Source: DICOM PS3.3, C.18.6.1.2 (SCOORD), C.18.9.1.2 (SCOORD3D) and C.10.5.1.2 (graphic types).
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from shardflow.annotations.book import OpenRegion, RegionBook
from shardflow.annotations.outlines import ellipse_outline
from shardflow.annotations.placing import nearest_plane, place_outline, place_points
from shardflow.annotations.targets import Floats, Target

__all__ = ["BySlice", "add_shape", "add_shape_in_space", "drawn_shape", "store_outlines"]

BySlice: TypeAlias = MutableMapping[tuple[int, int], list[tuple[Target, float, Floats]]]
"""Closed outlines by series number and slice, each with its series and how far in front of the slice it lies,
mm; stored together, when all are there."""

_POINTS: Final = frozenset({"MULTIPOINT", "POINT"})


def drawn_shape(kind: str, points: Floats) -> tuple[Floats, bool] | None:
    """Make points of a shape.

    Args:
        kind: Graphic type.
        points: ``(n, d)`` as the type asks for.

    Returns:
        Points, and whether they are a closed outline; None for an unknown type or too few points.
    """
    num_points = len(points)
    if kind in _POINTS and num_points >= 1:
        return points, False
    if kind == "CIRCLE" and num_points == 2:
        radius = points[1] - points[0]
        # In a plane only; a circle in space is an ellipse there.
        across = np.array([-radius[1], radius[0]]) if len(radius) == 2 else None
        if across is not None and np.linalg.norm(radius) > 0:
            return ellipse_outline(points[0], radius, across), True
    if kind == "ELLIPSE" and num_points == 4:
        centre = (points[0] + points[1]) / 2
        first, second = (points[1] - points[0]) / 2, (points[3] - points[2]) / 2
        if min(np.linalg.norm(first), np.linalg.norm(second)) > 0:
            return ellipse_outline(centre, first, second), True
    if kind in ("INTERPOLATED", "POLYGON", "POLYLINE") and num_points >= 2:
        is_closed = num_points >= 4 and bool(np.allclose(points[0], points[-1], rtol=0, atol=1e-6))
        if kind == "POLYGON" and not is_closed and num_points >= 3:
            return points, True
        return (points[:-1], True) if is_closed else (points, False)
    return None


def add_shape(
    region: OpenRegion,
    kind: str,
    numbers: Floats,
    target: Target,
    index: int,
    book: RegionBook,
    by_slice: BySlice,
) -> None:
    """Add a shape in the pixels of one slice.

    Args:
        region: Takes what is open; what is closed goes into ``by_slice``.
        kind: Graphic type.
        numbers: x, y, x, y, ...; pixel coordinates, edges.
        target: The series.
        index: Of the slice.
        book: Counts.
        by_slice: Outlines so far.
    """
    drawn = None if len(numbers) % 2 else drawn_shape(kind, numbers.reshape(-1, 2))
    if drawn is None:
        book.dangling("UNSUPPORTED_SHAPE" if len(numbers) else "DEGENERATE")
        return
    points, is_closed = drawn
    if is_closed:
        by_slice.setdefault((target.number, index), []).append((target, 0.0, points))
    else:
        region.add_open(target, index, points)


def add_shape_in_space(
    region: OpenRegion,
    kind: str,
    numbers: Floats,
    targets: Sequence[Target],
    book: RegionBook,
    by_slice: BySlice,
) -> None:
    """Add a shape in space to the slices that it lies in; as `add_shape`, with x, y, z in mm, LPS.

    Args:
        region: As there.
        kind: As there, and ``ELLIPSOID``.
        numbers: x, y, z, x, y, z, ...
        targets: Series of the frame of reference of the numbers.
        book: As there.
        by_slice: As there.
    """
    points = numbers.reshape(-1, 3) if len(numbers) % 3 == 0 else numbers[:0].reshape(0, 3)
    if not targets:
        book.dangling("FRAME_OF_REFERENCE_UNKNOWN")
        return
    if kind == "ELLIPSOID" and len(points) == 6:
        _add_ellipsoid(points, targets, book, by_slice)
        return
    drawn = drawn_shape(kind, points) if len(points) else None
    if drawn is None:
        book.dangling("UNSUPPORTED_SHAPE" if len(points) else "DEGENERATE")
        return
    outline, is_closed = drawn
    if not is_closed:
        places = place_points(outline, targets)
        for target, index, pixels, _ in places:
            region.add_open(target, index, pixels)
        if not places:
            book.dangling("OUTSIDE")
        return
    found = place_outline(outline, targets)
    if isinstance(found, str):
        book.dangling(found)
        return
    for target, index, pixels, height_mm in found:
        by_slice.setdefault((target.number, index), []).append((target, height_mm, pixels))


def store_outlines(region: OpenRegion, by_slice: BySlice) -> None:
    """Add the outlines of all slices to their region."""
    for (_, index), found in by_slice.items():
        target = found[0][0]
        outlines = [(height_mm, points) for _, height_mm, points in found]
        region.add_outlines(target, index, nearest_plane(outlines, target.thickness_mm))


def _add_ellipsoid(points: Floats, targets: Sequence[Target], book: RegionBook, by_slice: BySlice) -> None:
    """Cut an ellipsoid, given by the ends of its three axes, with every slice."""
    ends = points.reshape(3, 2, 3)
    centre = ends.mean(axis=(0, 1))
    axes = (ends[:, 1] - ends[:, 0]) / 2
    lengths = np.linalg.norm(axes, axis=1)
    if lengths.min() <= 0:
        book.dangling("DEGENERATE")
        return
    # The unit sphere in coordinates along the axes: x such that |shrink @ (x - centre)| = 1.
    shrink = axes / (lengths**2)[:, None]
    is_met = False
    for target in targets:
        for index in range(target.num_slices):
            section = _section(target, index, centre, shrink)
            if section is not None:
                is_met = True
                by_slice.setdefault((target.number, index), []).append((target, 0.0, section))
    if not is_met:
        book.dangling("OUTSIDE")


def _section(target: Target, index: int, centre: Floats, shrink: Floats) -> Floats | None:
    """Outline of the ellipsoid in one slice, pixel coordinates."""
    plane = target.plane(index)
    # |a x + b y + c| = 1 for the column x and the row y: a conic, with its centre where the gradient is 0.
    a, b, c = shrink @ plane.per_column, shrink @ plane.per_row, shrink @ (plane.origin - centre)
    shape = np.array([[a @ a, a @ b], [a @ b, b @ b]])
    middle = np.linalg.solve(shape, -np.array([a @ c, b @ c]))
    nearest = a * middle[0] + b * middle[1] + c
    room = 1 - nearest @ nearest
    if room <= 0:
        return None
    values, vectors = np.linalg.eigh(shape)
    radii = np.sqrt(room / values)
    return ellipse_outline(middle + 0.5, vectors[:, 0] * radii[0], vectors[:, 1] * radii[1])
