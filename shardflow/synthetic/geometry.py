"""Geometry in patient space (mm, LPS): vectors, image planes, and solids bounded by quadrics.

Only ``+ - * /`` and square roots are used: IEEE 754 defines them exactly, while sine, cosine and exponential
differ in the last bit between math libraries. Rotations therefore come from quaternions of small integers. A
plane cuts a quadric in a conic, and a beam crosses it along a closed form, so slices of any orientation and
projections are computed from the same few numbers, and the truth about a lesion needs no pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Vector = tuple[float, float, float]
"""x to the patient's left, y to the back, z to the head."""
Frame = tuple[Vector, Vector, Vector]
"""Three orthogonal unit vectors."""

IDENTITY: Frame = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
_DIRECTION_DECIMALS = 10


def dot(a: Vector, b: Vector) -> float:
    """Return the inner product."""
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def cross(a: Vector, b: Vector) -> Vector:
    """Return the cross product."""
    return (a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])


def move(point: Vector, direction: Vector, distance: float = 1.0) -> Vector:
    """Return the point moved by ``distance`` along ``direction``."""
    return (
        point[0] + direction[0] * distance,
        point[1] + direction[1] * distance,
        point[2] + direction[2] * distance,
    )


def unit(vector: Vector) -> Vector:
    """Return the vector with length 1."""
    length = math.sqrt(dot(vector, vector))
    return (vector[0] / length, vector[1] / length, vector[2] / length)


def round_vector(vector: Vector, decimals: int = 6) -> Vector:
    """Return the vector as it is written to a file; ``-0.0`` becomes ``0.0``."""
    x, y, z = (round(value, decimals) + 0.0 for value in vector)
    return (x, y, z)


def rotation(a: int, b: int, c: int, d: int) -> Frame:
    """Return the images of the three axes under the rotation of the quaternion ``a + bi + cj + dk``.

    The angle is ``2 atan(|(b, c, d)| / a)`` about the direction ``(b, c, d)``.
    """
    n = a * a + b * b + c * c + d * d
    columns = (
        (a * a + b * b - c * c - d * d, 2 * (b * c + a * d), 2 * (b * d - a * c)),
        (2 * (b * c - a * d), a * a - b * b + c * c - d * d, 2 * (c * d + a * b)),
        (2 * (b * d + a * c), 2 * (c * d - a * b), a * a - b * b - c * c + d * d),
    )
    x, y, z = (
        round_vector((column[0] / n, column[1] / n, column[2] / n), _DIRECTION_DECIMALS) for column in columns
    )
    return (x, y, z)


def rotate(frame: Frame, vector: Vector) -> Vector:
    """Return the image of a vector, its directions rounded as they are written."""
    x, y, z = frame
    turned = move(move((x[0] * vector[0], x[1] * vector[0], x[2] * vector[0]), y, vector[1]), z, vector[2])
    return round_vector(turned, _DIRECTION_DECIMALS)


AXIAL: tuple[Vector, Vector] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
CORONAL: tuple[Vector, Vector] = ((1.0, 0.0, 0.0), (0.0, 0.0, -1.0))
SAGITTAL: tuple[Vector, Vector] = ((0.0, 1.0, 0.0), (0.0, 0.0, -1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Pixels of a plane."""

    rows: int
    columns: int
    row_spacing_mm: float
    """Between the centers of neighboring rows: the first value of Pixel Spacing."""
    column_spacing_mm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """One image plane, with the numbers as they are written to the file."""

    grid: Grid
    position: Vector
    """Center of the first pixel, mm: (0020,0032) Image Position (Patient)."""
    row_direction: Vector
    """Along a row, column index growing: first half of (0020,0037) Image Orientation (Patient)."""
    column_direction: Vector
    """Down a column, row index growing."""

    @property
    def normal(self) -> Vector:
        """Cross product of row and column direction."""
        return cross(self.row_direction, self.column_direction)

    def moved(self, direction: Vector, distance_mm: float) -> Plane:
        """Return the plane further along a direction."""
        return Plane(
            grid=self.grid,
            position=move(self.position, direction, distance_mm),
            row_direction=self.row_direction,
            column_direction=self.column_direction,
        )


def centered_steps(count: int, spacing_mm: float) -> list[float]:
    """Return evenly spaced places around 0."""
    return [spacing_mm * (place - (count - 1) / 2) for place in range(count)]


def stack_of_planes(
    grid: Grid,
    center: Vector,
    orientation: tuple[Vector, Vector],
    steps: Iterable[float],
    *,
    turn: Frame = IDENTITY,
    advance: Vector | None = None,
) -> list[Plane]:
    """Return parallel planes around a point.

    Args:
        grid: Pixels of each.
        center: The middle of the stack, mm.
        orientation: Row and column direction before ``turn``.
        steps: Places of the planes along their normal from the center, mm.
        turn: Rotation of the whole stack (oblique), or of the planes alone where ``advance`` is given.
        advance: Direction in which the planes are stacked; their normal by default. With a tilted gantry,
            planes are turned and still stacked along the table.
    """
    row_direction = rotate(turn, orientation[0])
    column_direction = rotate(turn, orientation[1])
    along = advance or cross(row_direction, column_direction)
    corner = move(center, row_direction, -grid.column_spacing_mm * (grid.columns - 1) / 2)
    corner = move(corner, column_direction, -grid.row_spacing_mm * (grid.rows - 1) / 2)
    return [
        Plane(
            grid=grid,
            position=round_vector(move(corner, along, step)),
            row_direction=row_direction,
            column_direction=column_direction,
        )
        for step in steps
    ]


Symmetric = tuple[float, float, float, float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quadric:
    """The points p with ``(p - center)' M (p - center) <= 1``."""

    center: Vector
    matrix: Symmetric
    """M as (xx, xy, xz, yy, yz, zz), 1/mm2; a zero direction is an unbounded one."""
    normal: Vector | None = None
    """Of a slab only: its normal divided by its half height."""

    def value(self, point: Vector) -> float:
        """Return 0 in the center, 1 on the surface."""
        x, y, z = move(point, self.center, -1.0)
        xx, xy, xz, yy, yz, zz = self.matrix
        return xx * x * x + yy * y * y + zz * z * z + 2 * (xy * x * y + xz * x * z + yz * y * z)


@dataclass(frozen=True, kw_only=True, slots=True)
class Solid:
    """A body of one tissue: the intersection of its parts, minus its hollow."""

    tissue: str
    parts: tuple[Quadric, ...]
    """The first bounds the body along a beam; a projection asks of the others only for slabs."""
    parent: str
    """Tissue that it replaces; projections add the difference."""
    hollow: Quadric | None = None

    def contains(self, point: Vector) -> bool:
        """Return whether a point lies inside."""
        inside = all(part.value(point) <= 1 for part in self.parts)
        return inside and (self.hollow is None or self.hollow.value(point) > 1)


def ellipsoid(center: Vector, semi_axes: Vector, frame: Frame = IDENTITY) -> Quadric:
    """Return an ellipsoid; an infinite semi-axis makes a cylinder.

    Args:
        center: mm, LPS.
        semi_axes: Along the three directions of ``frame``, mm.
        frame: Directions of the axes.
    """
    weights = tuple(0.0 if math.isinf(axis) else 1.0 / (axis * axis) for axis in semi_axes)

    def entry(i: int, j: int) -> float:
        return (
            weights[0] * frame[0][i] * frame[0][j]
            + weights[1] * frame[1][i] * frame[1][j]
            + weights[2] * frame[2][i] * frame[2][j]
        )

    pairs = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
    xx, xy, xz, yy, yz, zz = (entry(i, j) for i, j in pairs)
    return Quadric(center=center, matrix=(xx, xy, xz, yy, yz, zz))


def slab(center: Vector, normal: Vector, half_mm: float) -> Quadric:
    """Return the space between two planes, ``half_mm`` to both sides of the center."""
    x, y, z = (value / half_mm for value in normal)
    return Quadric(center=center, matrix=(x * x, x * y, x * z, y * y, y * z, z * z), normal=(x, y, z))


def pillar(center: Vector, radius_x_mm: float, radius_y_mm: float, half_mm: float) -> tuple[Quadric, Quadric]:
    """Return the parts of an upright elliptic pillar."""
    return (
        ellipsoid(center, (radius_x_mm, radius_y_mm, math.inf)),
        slab(center, IDENTITY[2], half_mm),
    )
