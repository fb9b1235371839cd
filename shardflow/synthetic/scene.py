"""Slices through solids: conics on a plane, painted with soft edges.

The whole anatomy is reduced to arrays of quadrics once; a plane then gives all conics in a few vector
operations, and only the bodies that the plane cuts are painted, each within its own rectangle. Every
operation is elementwise and exactly defined, so the pixels are the same on every machine (no dot products:
their order of summation is not).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardflow.synthetic.planes import Plane
from shardflow.synthetic.solids import Quadric, Solid
from shardflow.synthetic.vectors import Vector, move

__all__ = ["Conic", "Rectangle", "Scene", "conic_field", "coverage", "cut", "inside_mask", "rectangle_of"]

_Array = np.ndarray[Any, np.dtype[Any]]
_FLAT = 1e-9
_ORIGIN: Vector = (0.0, 0.0, 0.0)


class Conic(NamedTuple):
    """``a c2 + 2 b c r + d r2 + 2 e c + 2 f r + g`` over column c and row r; at most 1 inside."""

    a: float
    b: float
    d: float
    e: float
    f: float
    g: float


class Rectangle(NamedTuple):
    """Rows and columns, half open."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def is_empty(self) -> bool:
        """Whether it holds no pixel."""
        return self.top >= self.bottom or self.left >= self.right

    def within(self, other: Rectangle) -> Rectangle:
        """Return the common part."""
        return Rectangle(
            max(self.top, other.top),
            min(self.bottom, other.bottom),
            max(self.left, other.left),
            min(self.right, other.right),
        )


def cut(quadric: Quadric, plane: Plane) -> Conic:
    """Return the conic in which a plane cuts one quadric."""
    return Conic._make(column[0] for column in _Quadrics((quadric,)).cut(plane).tolist())


class Scene:
    """Solids ready to be cut by planes."""

    def __init__(self, solids: Sequence[Solid]) -> None:
        self.solids = tuple(solids)
        quadrics: list[Quadric] = []
        self._ranges: list[tuple[int, int, int]] = []
        for solid in self.solids:
            start = len(quadrics)
            quadrics.extend(solid.parts)
            end_of_parts = len(quadrics)
            if solid.hollow is not None:
                quadrics.append(solid.hollow)
            self._ranges.append((start, end_of_parts, len(quadrics)))
        self._quadrics = _Quadrics(quadrics)

    def paint(self, canvas: _Array, plane: Plane, values: Sequence[float], edge_pixels: float) -> None:
        """Paint all solids that a plane cuts, in order.

        Args:
            canvas: ``(rows, columns)`` float32; changed in place.
            plane: Where to cut.
            values: What each solid is painted with.
            edge_pixels: Width of an edge, about the blur of a reconstruction kernel.
        """
        for number, rectangle, alpha in self.coverages(plane, edge_pixels):
            part = canvas[rectangle.top : rectangle.bottom, rectangle.left : rectangle.right]
            part += alpha * (np.float32(values[number]) - part)

    def coverages(self, plane: Plane, edge_pixels: float) -> Iterator[tuple[int, Rectangle, _Array]]:
        """Yield (solid number, rectangle, share of each pixel that the solid covers, float32)."""
        columns = self._quadrics.cut(plane)
        is_missed = _missed(columns, edge_pixels).tolist()
        rows = columns.T.tolist()
        whole = Rectangle(0, plane.grid.rows, 0, plane.grid.columns)
        for number, (start, end_of_parts, stop) in enumerate(self._ranges):
            if any(is_missed[start:end_of_parts]):
                continue
            parts = [Conic._make(row) for row in rows[start:end_of_parts]]
            rectangle = whole
            for conic in parts:
                rectangle = rectangle.within(rectangle_of(conic, edge_pixels, whole))
            if rectangle.is_empty:
                continue
            alpha = coverage(parts[0], rectangle, edge_pixels)
            for conic in parts[1:]:
                np.minimum(alpha, coverage(conic, rectangle, edge_pixels), out=alpha)
            for row in rows[end_of_parts:stop]:
                removed = coverage(Conic._make(row), rectangle, edge_pixels)
                np.minimum(alpha, np.float32(1) - removed, out=alpha)
            yield number, rectangle, alpha


class _Quadrics:
    """Centres and matrices as columns, so that one plane cuts all of them at once."""

    def __init__(self, quadrics: Sequence[Quadric]) -> None:
        centers = np.array([quadric.center for quadric in quadrics], dtype=np.float64)
        matrices = np.array([quadric.matrix for quadric in quadrics], dtype=np.float64)
        self._centers = np.ascontiguousarray(centers.reshape(-1, 3).T)
        self._matrices = np.ascontiguousarray(matrices.reshape(-1, 6).T)

    def cut(self, plane: Plane) -> _Array:
        """Return the six numbers of each conic, ``(6, quadrics)`` float64."""
        u = move(_ORIGIN, plane.row_direction, plane.grid.column_spacing_mm)
        v = move(_ORIGIN, plane.column_direction, plane.grid.row_spacing_mm)
        x, y, z = (plane.position[axis] - self._centers[axis] for axis in range(3))
        along_u, along_v = self._times(*u), self._times(*v)
        along_w = self._times(x, y, z)
        return np.stack(
            (
                *(_inner(u, along_u), _inner(v, along_u), _inner(v, along_v)),
                *(_inner(u, along_w), _inner(v, along_w), x * along_w[0] + y * along_w[1] + z * along_w[2]),
            )
        )

    def _times(self, x: Any, y: Any, z: Any) -> tuple[_Array, _Array, _Array]:
        """Multiply every matrix with one vector, or with one of its own."""
        xx, xy, xz, yy, yz, zz = self._matrices
        return xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z


def _inner(vector: Vector, arrays: tuple[_Array, _Array, _Array]) -> _Array:
    total: _Array = vector[0] * arrays[0] + vector[1] * arrays[1] + vector[2] * arrays[2]
    return total


def _missed(columns: _Array, edge_pixels: float) -> _Array:
    """Which conics surely cover nothing, anywhere on the plane; asked before the rest is computed."""
    a, b, d, e, f, g = columns
    determinant = a * d - b * b
    is_closed = determinant > _FLAT * a * d
    safe = np.where(is_closed, determinant, 1.0)
    lowest = g + (e * (b * f - d * e) + f * (b * e - a * f)) / safe
    level = 1 + edge_pixels * np.sqrt(np.maximum(a, d)) + 1e-6
    missed: _Array = is_closed & (lowest > level)
    return missed


def _sharpness(conic: Conic, edge_pixels: float) -> float:
    """How steeply coverage falls with the conic's value, so that an edge is ``edge_pixels`` wide."""
    bend = max(conic.a, conic.d)
    return 0.5 / (edge_pixels * math.sqrt(bend)) if bend > _FLAT else 1e6


def rectangle_of(conic: Conic, edge_pixels: float, whole: Rectangle) -> Rectangle:
    """Return the rectangle outside of which coverage is 0."""
    a, b, d, e, f, g = conic
    level = 1 + 0.5 / _sharpness(conic, edge_pixels)
    determinant = a * d - b * b
    if determinant > _FLAT * a * d and determinant > 0:
        column, row = (b * f - d * e) / determinant, (b * e - a * f) / determinant
        room = level - (g + e * column + f * row)
        if room <= 0:
            return Rectangle(0, 0, 0, 0)
        half_columns = math.sqrt(room * d / determinant)
        half_rows = math.sqrt(room * a / determinant)
        return _rectangle(
            row - half_rows, row + half_rows, column - half_columns, column + half_columns, whole
        )
    top, bottom, left, right = 0.0, float(whole.bottom), 0.0, float(whole.right)
    if a <= _FLAT and d <= _FLAT:
        return whole if g <= level else Rectangle(0, 0, 0, 0)
    if a <= _FLAT * d:
        top, bottom = _interval(d, f, g, level)
    elif d <= _FLAT * a:
        left, right = _interval(a, e, g, level)
    return _rectangle(top, bottom, left, right, whole)


def _interval(square: float, linear: float, constant: float, level: float) -> tuple[float, float]:
    """Where ``square x2 + 2 linear x + constant <= level``; an empty interval where nowhere."""
    middle = -linear / square
    room = level - (constant + linear * middle)
    if room <= 0:
        return 1.0, -1.0
    half = math.sqrt(room / square)
    return middle - half, middle + half


def _rectangle(top: float, bottom: float, left: float, right: float, whole: Rectangle) -> Rectangle:
    far = whole.bottom + whole.right
    top, bottom, left, right = (min(max(value, -far), far) for value in (top, bottom, left, right))
    found = Rectangle(math.ceil(top), math.floor(bottom) + 1, math.ceil(left), math.floor(right) + 1)
    return found.within(whole)


def coverage(conic: Conic, rectangle: Rectangle, edge_pixels: float) -> _Array:
    """Return the share of each pixel of a rectangle inside a conic, float32 from 0 to 1, with a soft edge."""
    slope = _sharpness(conic, edge_pixels)
    field = conic_field(conic, rectangle, -slope, 0.5 + slope, np.float32)
    return np.clip(field, np.float32(0), np.float32(1), out=field)


def inside_mask(conic: Conic, rectangle: Rectangle) -> _Array:
    """Return the pixels of a rectangle whose centre lies inside a conic, bool."""
    inside: _Array = conic_field(conic, rectangle, 1.0, 0.0, np.float64) <= 1
    return inside


def conic_field(conic: Conic, rectangle: Rectangle, factor: float, offset: float, dtype: type) -> _Array:
    """Return ``factor * conic + offset`` over a rectangle.

    One-dimensional terms are taken in float64 from the rectangle's middle: far from the origin, float32
    would lose what counts.
    """
    a, b, d, e, f, g = conic
    row, column = (rectangle.top + rectangle.bottom) // 2, (rectangle.left + rectangle.right) // 2
    rows = np.arange(rectangle.top - row, rectangle.bottom - row, dtype=np.float64)
    columns = np.arange(rectangle.left - column, rectangle.right - column, dtype=np.float64)
    e_here, f_here = e + a * column + b * row, f + b * column + d * row
    g_here = g + 2 * e * column + 2 * f * row + a * column * column + 2 * b * column * row + d * row * row
    down = factor * (d * rows * rows + 2 * f_here * rows + g_here) + offset
    across = factor * (a * columns * columns + 2 * e_here * columns)
    field: _Array = down.astype(dtype)[:, None] + across.astype(dtype)[None, :]
    if abs(b) > _FLAT * math.sqrt(abs(a * d)):
        field += (2 * factor * b * rows).astype(dtype)[:, None] * columns.astype(dtype)[None, :]
    return field
