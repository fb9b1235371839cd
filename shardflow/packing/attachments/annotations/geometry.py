"""Geometry of annotations: shapes of few points, points in space, and label volumes sampled at slices.

Each pixel of a slice takes the label of the plane that is nearest to its center along the planes' normal, and
there of the nearest pixel; beyond the planes, and beyond half their pitch, there is none. On the grid that
the labels were drawn on this copies them, turned and flipped as needed.

Source: DICOM PS3.3, C.18.6.1.2 (SCOORD), C.18.9.1.2 (SCOORD3D) and C.10.5.1.2 (graphic types).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.packing.attachments.annotations.region_writer import (
    Dangling,
    OpenRegion,
    RegionWriter,
    ellipse_outline,
)
from shardflow.packing.attachments.annotations.targets import Floats, Plane, Target

Placed = tuple[Target, int, Floats, float]
"""A series, a slice, ``(n, 2)`` pixel coordinates in it, and how far in front of it they lie, mm."""

_ONE_PLANE: Final = 0.05
"""Share of a slice's thickness by which outlines of one plane may lie apart."""
_ON_SLICE: Final = 0.05
"""Share of a slice's thickness within which a plane lies in the slice."""
_STRAIGHT: Final = 1e-3
"""Share of a pixel by which a grid may be askew and still be read row by row and column by column."""
_POINTS: Final = frozenset({"MULTIPOINT", "POINT"})

Plate = NDArray[Any]
"""Pixels of one plane, ``(rows, columns)``."""


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
    """Find the slices of an outline, one of each series.

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
        center = (points[0] + points[1]) / 2
        first, second = (points[1] - points[0]) / 2, (points[3] - points[2]) / 2
        if min(np.linalg.norm(first), np.linalg.norm(second)) > 0:
            return ellipse_outline(center, first, second), True
    if kind in ("INTERPOLATED", "POLYGON", "POLYLINE") and num_points >= 2:
        is_closed = num_points >= 4 and bool(np.allclose(points[0], points[-1], rtol=0, atol=1e-6))
        if kind == "POLYGON" and not is_closed and num_points >= 3:
            return points, True
        return (points[:-1], True) if is_closed else (points, False)
    return None


class Drawing:
    """Shapes of one region. Closed outlines are stored together, because one may be a hole in another.

    Args:
        region: The region.
        writer: Counts shapes that have no place.
    """

    def __init__(self, region: OpenRegion, writer: RegionWriter) -> None:
        self._region = region
        self._writer = writer
        self._closed: dict[tuple[int, int], tuple[Target, list[tuple[float, Floats]]]] = {}

    def add_closed(self, target: Target, index: int, points: Floats, height_mm: float = 0.0) -> None:
        """Add a closed outline of one slice.

        Args:
            target: The series.
            index: Index of the slice.
            points: ``(n, 2)`` pixel coordinates.
            height_mm: Distance in front of the slice.
        """
        self._closed.setdefault((target.number, index), (target, []))[1].append((height_mm, points))

    def add(self, kind: str, numbers: Floats, target: Target, index: int) -> None:
        """Add a shape in the pixels of one slice.

        Args:
            kind: Graphic type.
            numbers: x, y, x, y, ...; pixel coordinates, edges.
            target: The series.
            index: Index of the slice.
        """
        drawn = None if len(numbers) % 2 else drawn_shape(kind, numbers.reshape(-1, 2))
        if drawn is None:
            self._writer.dangling("UNSUPPORTED_SHAPE" if len(numbers) else "DEGENERATE")
            return
        points, is_closed = drawn
        (self.add_closed if is_closed else self._region.add_open)(target, index, points)

    def add_in_space(self, kind: str, numbers: Floats, targets: Sequence[Target]) -> None:
        """Add a shape in space to the slices that it lies in.

        Args:
            kind: Graphic type, or ``ELLIPSOID``.
            numbers: x, y, z, x, y, z, ...; mm, LPS.
            targets: Series of the frame of reference of the numbers.
        """
        points = numbers.reshape(-1, 3) if len(numbers) % 3 == 0 else numbers[:0].reshape(0, 3)
        if not targets:
            self._writer.dangling("FRAME_OF_REFERENCE_UNKNOWN")
            return
        if kind == "ELLIPSOID" and len(points) == 6:
            self._add_ellipsoid(points, targets)
            return
        drawn = drawn_shape(kind, points) if len(points) else None
        if drawn is None:
            self._writer.dangling("UNSUPPORTED_SHAPE" if len(points) else "DEGENERATE")
            return
        outline, is_closed = drawn
        places: Sequence[Placed] | Dangling
        places = place_outline(outline, targets) if is_closed else place_points(outline, targets) or "OUTSIDE"
        if isinstance(places, str):
            self._writer.dangling(places)
            return
        for target, index, pixels, height_mm in places:
            if is_closed:
                self.add_closed(target, index, pixels, height_mm)
            else:
                self._region.add_open(target, index, pixels)

    def store(self) -> None:
        """Store the closed outlines of all slices in the region."""
        for (_, index), (target, outlines) in self._closed.items():
            self._region.add_outlines(target, index, nearest_plane(outlines, target.thickness_mm))

    def _add_ellipsoid(self, points: Floats, targets: Sequence[Target]) -> None:
        """Cut an ellipsoid, given by the ends of its three axes, with every slice."""
        ends = points.reshape(3, 2, 3)
        center = ends.mean(axis=(0, 1))
        axes = (ends[:, 1] - ends[:, 0]) / 2
        lengths = np.linalg.norm(axes, axis=1)
        if lengths.min() <= 0:
            self._writer.dangling("DEGENERATE")
            return
        # The unit sphere in coordinates along the axes: x such that |shrink @ (x - center)| = 1.
        shrink = axes / (lengths**2)[:, None]
        is_met = False
        for target in targets:
            for index in range(target.num_slices):
                section = _section(target, index, center, shrink)
                if section is not None:
                    is_met = True
                    self.add_closed(target, index, section)
        if not is_met:
            self._writer.dangling("OUTSIDE")


def _section(target: Target, index: int, center: Floats, shrink: Floats) -> Floats | None:
    """Return the outline of the ellipsoid in one slice, pixel coordinates."""
    plane = target.plane(index)
    # |a x + b y + c| = 1 for the column x and the row y: a conic, with its center where the gradient is 0.
    a, b, c = shrink @ plane.per_column, shrink @ plane.per_row, shrink @ (plane.origin - center)
    shape = np.array([[a @ a, a @ b], [a @ b, b @ b]])
    middle = np.linalg.solve(shape, -np.array([a @ c, b @ c]))
    nearest = a * middle[0] + b * middle[1] + c
    room = 1 - nearest @ nearest
    if room <= 0:
        return None
    values, vectors = np.linalg.eigh(shape)
    radii = np.sqrt(room / values)
    return ellipse_outline(middle + 0.5, vectors[:, 0] * radii[0], vectors[:, 1] * radii[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Pixels of one slice, located in a stack of planes."""

    shape: tuple[int, int]
    """Rows and columns of a plane."""
    position: NDArray[np.int64]
    """Plane of each pixel, -1 for none: ``()`` where the slice lies in one, else ``(rows, columns)``."""
    row: NDArray[np.int64]
    """Row in the plane: ``(rows, 1)`` or ``(rows, columns)``."""
    column: NDArray[np.int64]
    """Column in the plane: ``(1, columns)`` or ``(rows, columns)``."""

    def planes(self) -> list[int]:
        """Return the positions of the planes that the slice meets, ascending."""
        found = np.unique(self.position)
        return [int(position) for position in found if position >= 0]

    def read(self, plates: Callable[[int], Plate | None]) -> Plate:
        """Take the label of every pixel.

        Args:
            plates: Gives the pixels of a plane by its position, or None for an empty one.

        Returns:
            ``(rows, columns)`` of the slice, in the dtype of the planes; 0 where there is none.
        """
        rows, columns = self.shape
        is_inside = (self.row >= 0) & (self.row < rows) & (self.column >= 0) & (self.column < columns)
        at_row, at_column = np.clip(self.row, 0, rows - 1), np.clip(self.column, 0, columns - 1)
        labels: Plate = np.zeros(is_inside.shape, np.uint8)
        for position in self.planes():
            plate = plates(position)
            if plate is not None:
                labels = labels.astype(plate.dtype, copy=False)
                np.copyto(labels, plate[at_row, at_column], where=is_inside & (self.position == position))
        return labels


class PlaneStack:
    """Parallel planes of one pixel grid; which of them a slice meets, and where.

    Args:
        planes: In any order; those at one place are one position.
        shape: Rows and columns of each.
        pitch_mm: Stated distance between planes (or thickness of one), or None. Planes never reach farther
            than half of it, nor than half of the smallest gap between two: some may be left out.
    """

    def __init__(self, planes: Sequence[Plane], shape: tuple[int, int], pitch_mm: float | None) -> None:
        self._shape = shape
        first = planes[0]
        self._normal = first.normal
        self._basis = np.linalg.inv(np.stack([first.per_column, first.per_row, self._normal], axis=1))
        origins = np.stack([plane.origin for plane in planes])
        along = origins @ self._normal
        tolerance = max(1e-4, 1e-3 * (pitch_mm or 1.0))
        order = np.argsort(along, kind="stable")
        is_new = np.diff(along[order], prepend=-np.inf) > tolerance
        self._along = along[order][is_new]
        self._origins = origins[order][is_new]
        self.position_of = np.empty(len(planes), np.int64)
        self.position_of[order] = np.cumsum(is_new) - 1
        """Position of each given plane."""
        gap = float(np.diff(self._along).min()) if len(self._along) > 1 else None
        pitches = [pitch for pitch in (pitch_mm, gap) if pitch]
        self._pitch_mm = min(pitches) if pitches else None

    @property
    def num_positions(self) -> int:
        """Different places along the normal."""
        return len(self._along)

    def reach_mm(self, target: Target, *, is_source: bool) -> float:
        """Return the distance that a plane reaches to each side.

        Args:
            target: The series whose slices are to be read.
            is_source: Whether the planes were drawn on that series: then one that lies in a slice is that
                slice's alone, however thick it is said to be.
        """
        half = (self._pitch_mm or target.thickness_mm) / 2
        if not is_source or abs(float(target.plane(0).normal @ self._normal)) < 1 - 1e-6:
            return half
        near = _ON_SLICE * target.thickness_mm
        slices = [float(target.plane(index).origin @ self._normal) for index in range(target.num_slices)]
        gaps = np.abs(np.asarray(slices)[:, None] - self._along[None, :]).min(axis=0)
        return near if (gaps <= near).all() else half

    def footprint(self, plane: Plane, shape: tuple[int, int], reach_mm: float) -> Footprint | None:
        """Locate the pixels of a slice.

        Args:
            plane: The slice.
            shape: Its rows and columns.
            reach_mm: How far a plane of the stack reaches to each side.

        Returns:
            None where the slice meets no plane.
        """
        rows, columns = shape
        origin, per_column, per_row = plane.origin, plane.per_column, plane.per_row
        corners = [origin + x * per_column + y * per_row for x in (0, columns - 1) for y in (0, rows - 1)]
        heights = np.stack(corners) @ self._normal
        if heights.max() < self._along[0] - reach_mm or heights.min() > self._along[-1] + reach_mm:
            return None
        y, x = np.arange(rows, dtype=np.float64)[:, None], np.arange(columns, dtype=np.float64)[None, :]
        if np.ptp(heights) <= 1e-3 * max(reach_mm, 1e-3):
            height = np.asarray(heights.mean())
        else:
            height = origin @ self._normal + x * (per_column @ self._normal) + y * (per_row @ self._normal)
        position = self._nearest(height, reach_mm * (1 + 1e-6))
        if (position < 0).all():
            return None
        step_x, step_y = (self._basis @ per_column)[:2], (self._basis @ per_row)[:2]
        offset = (origin - self._origins[np.maximum(position, 0)]) @ self._basis.T
        column: Floats = offset[..., 0] + x * step_x[0] + y * step_y[0]
        row: Floats = offset[..., 1] + x * step_x[1] + y * step_y[1]
        if position.ndim == 0 and abs(step_y[0]) * rows < _STRAIGHT and abs(step_x[1]) * columns < _STRAIGHT:
            column, row = column[:1], row[:, :1]
        return Footprint(
            shape=self._shape, position=position, row=_nearest_index(row), column=_nearest_index(column)
        )

    def _nearest(self, height: Floats, reach_mm: float) -> NDArray[np.int64]:
        middles = (self._along[1:] + self._along[:-1]) / 2
        position = np.asarray(np.searchsorted(middles, height), np.int64)
        is_near = np.abs(self._along[position] - height) <= reach_mm
        return np.where(is_near, position, -1)


def _nearest_index(at: Floats) -> NDArray[np.int64]:
    """Round to a pixel; a little less than half, so that grids which differ by rounding errors agree."""
    return np.floor(at + 0.5 + 1e-6).astype(np.int64)
