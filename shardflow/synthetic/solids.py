"""Bodies that an anatomy is built of: parts of space bounded by quadrics.

A plane cuts a quadric in a conic and a beam crosses it along a closed form, so slices of any orientation and
projections are computed from the same few numbers, and the truth about a lesion needs no pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardflow.synthetic.vectors import IDENTITY, Frame, Vector, move

__all__ = ["Quadric", "Solid", "ellipsoid", "pillar", "slab"]

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
        """Return 0 in the centre, 1 on the surface."""
        x, y, z = move(point, self.center, -1.0)
        xx, xy, xz, yy, yz, zz = self.matrix
        return xx * x * x + yy * y * y + zz * z * z + 2 * (xy * x * y + xz * x * z + yz * y * z)


@dataclass(frozen=True, kw_only=True, slots=True)
class Solid:
    """One body of one tissue: the common points of its parts, without its hollow."""

    tissue: str
    parts: tuple[Quadric, ...]
    """The first bounds the body along a beam; a projection asks of the others only for slabs."""
    parent: str
    """Tissue that it displaces; projections add the difference."""
    hollow: Quadric | None = None

    def contains(self, point: Vector) -> bool:
        """Say whether a point lies inside."""
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
    """Return the space between two planes, ``half_mm`` to both sides of the centre."""
    x, y, z = (value / half_mm for value in normal)
    return Quadric(center=center, matrix=(x * x, x * y, x * z, y * y, y * z, z * z), normal=(x, y, z))


def pillar(center: Vector, radius_x_mm: float, radius_y_mm: float, half_mm: float) -> tuple[Quadric, Quadric]:
    """Return the parts of an upright elliptic pillar."""
    return (
        ellipsoid(center, (radius_x_mm, radius_y_mm, math.inf)),
        slab(center, IDENTITY[2], half_mm),
    )
