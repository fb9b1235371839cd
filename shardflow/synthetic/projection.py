"""Projections through solids: radiographs and scouts, as parallel beams along a plane's normal.

A beam crosses a quadric over a length that is a closed form of the pixel's place; what a solid adds is that
length times its attenuation over its parent's. Overlaps are therefore exact only for nested solids, which
is what an anatomy is made of; a table is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardflow.synthetic.planes import Plane
from shardflow.synthetic.scene import Conic, Rectangle, conic_field, coverage, cut, rectangle_of
from shardflow.synthetic.solids import Quadric, Solid
from shardflow.synthetic.tissues import TISSUES, attenuation
from shardflow.synthetic.vectors import Vector, dot, move

__all__ = ["project", "project_lesion", "silhouette"]

_Array = np.ndarray[Any, np.dtype[Any]]
_UNSEEN = {"table", "table-top"}
_EDGE_PIXELS = 1.2


def project(solids: Sequence[Solid], plane: Plane) -> _Array:
    """Sum up attenuation along the normal of every pixel.

    Returns:
        ``(rows, columns)`` float32: millimetres of water that attenuate as much.
    """
    total = np.zeros((plane.grid.rows, plane.grid.columns), dtype=np.float32)
    for solid in solids:
        if solid.tissue in _UNSEEN or solid.parent in _UNSEEN:
            continue
        gain = attenuation(TISSUES[solid.tissue][0]) - attenuation(TISSUES[solid.parent][0])
        _add(total, solid, plane, gain)
    return np.maximum(total, np.float32(0), out=total)


def project_lesion(total: _Array, lesion: Quadric, plane: Plane, gain: float) -> None:
    """Add one lesion; ``gain`` is its attenuation over its organ's."""
    _add(total, Solid(tissue="", parts=(lesion,), parent=""), plane, gain)


def silhouette(quadric: Quadric, plane: Plane) -> Conic:
    """Return the outline of a quadric along the plane's normal; 1 or less inside."""
    flat, _ = _silhouette(quadric, plane)
    return flat


def _add(total: _Array, solid: Solid, plane: Plane, gain: float) -> None:
    body, *slabs = solid.parts
    outline, along = _silhouette(body, plane)
    if along <= 0:
        return
    whole = Rectangle(0, plane.grid.rows, 0, plane.grid.columns)
    rectangle = rectangle_of(outline, _EDGE_PIXELS, whole)
    for part in slabs:
        if part.normal is not None:
            rectangle = rectangle.within(_shadow(part, plane, body, whole))
    if rectangle.is_empty:
        return
    half = _half_length(outline, along, rectangle)
    length = 2 * half
    if solid.hollow is not None:
        inner, inner_along = _silhouette(solid.hollow, plane)
        length -= 2 * _half_length(inner, inner_along, rectangle)
        length = np.maximum(length, np.float32(0), out=length)
    for part in slabs:
        if part.normal is not None:
            length *= _slab_share(part, plane, body, half, rectangle)
    total[rectangle.top : rectangle.bottom, rectangle.left : rectangle.right] += length * np.float32(gain)


def _silhouette(quadric: Quadric, plane: Plane) -> tuple[Conic, float]:
    """The outline, and the quadric's curvature along the beam (0: the beam runs along it for ever)."""
    u, v, d = _axes(plane)
    along = _times(quadric, d)
    curvature = dot(d, along)
    conic = cut(quadric, plane)
    if curvature <= 1e-12:
        return conic, 0.0
    w = move(plane.position, quadric.center, -1.0)
    across, down, offset = dot(u, along), dot(v, along), dot(w, along)
    return (
        Conic(
            conic.a - across * across / curvature,
            conic.b - across * down / curvature,
            conic.d - down * down / curvature,
            conic.e - across * offset / curvature,
            conic.f - down * offset / curvature,
            conic.g - offset * offset / curvature,
        ),
        curvature,
    )


def _half_length(outline: Conic, curvature: float, rectangle: Rectangle) -> _Array:
    """Half the way of each beam through a quadric, mm, float32."""
    if curvature <= 0:
        return np.zeros((rectangle.bottom - rectangle.top, rectangle.right - rectangle.left), np.float32)
    room = conic_field(outline, rectangle, -1 / curvature, 1 / curvature, np.float32)
    half: _Array = np.sqrt(np.maximum(room, np.float32(0), out=room))
    return half


def _slab_share(slab: Quadric, plane: Plane, body: Quadric, half: _Array, rectangle: Rectangle) -> _Array:
    """Share of the body's near and far wall that lies in a slab: exact for thin shells such as ribs."""
    u, v, d = _axes(plane)
    normal = slab.normal or (0.0, 0.0, 0.0)
    slope = dot(normal, d)
    if abs(slope) < 1e-9:
        return coverage(cut(slab, plane), rectangle, _EDGE_PIXELS)
    # The middle of a beam within the body: q's linear term along the beam over its curvature.
    along = _times(body, d)
    curvature = dot(d, along)
    from_body = move(plane.position, body.center, -1.0)
    from_slab = move(plane.position, slab.center, -1.0)
    down, across = (dot(normal, step) - slope * dot(step, along) / curvature for step in (v, u))
    constant = dot(normal, from_slab) - slope * dot(from_body, along) / curvature
    rows = np.arange(rectangle.top, rectangle.bottom, dtype=np.float64)
    columns = np.arange(rectangle.left, rectangle.right, dtype=np.float64)
    middle = (down * rows + constant).astype(np.float32)[:, None] + (across * columns).astype(np.float32)[
        None, :
    ]
    step = half * np.float32(slope)
    sharpness = np.float32(0.5 / max(abs(down), abs(across), 1e-3))
    share = np.zeros_like(middle)
    for wall in (middle - step, middle + step):
        depth = (np.float32(1) - np.abs(wall)) * sharpness + np.float32(0.5)
        share += np.clip(depth, np.float32(0), np.float32(1))
    share *= np.float32(0.5)
    return share


def _shadow(slab: Quadric, plane: Plane, body: Quadric, whole: Rectangle) -> Rectangle:
    """Rows that a slab can reach within the body; all of them where it is not level enough to say."""
    _, v, d = _axes(plane)
    normal = slab.normal or (0.0, 0.0, 0.0)
    down = dot(normal, v)
    if abs(down) < 1e-9 or abs(dot(normal, plane.row_direction)) > 1e-9:
        return whole
    curvature = dot(d, _times(body, d))
    reach = 1.2 + abs(dot(normal, d)) / math.sqrt(curvature)
    middle = -dot(normal, move(plane.position, slab.center, -1.0))
    middle += dot(normal, d) * dot(move(plane.position, body.center, -1.0), d)
    first, last = sorted(((middle - reach) / down, (middle + reach) / down))
    return Rectangle(math.floor(first) - 2, math.ceil(last) + 3, 0, whole.right).within(whole)


def _axes(plane: Plane) -> tuple[Vector, Vector, Vector]:
    grid = plane.grid
    u = move((0.0, 0.0, 0.0), plane.row_direction, grid.column_spacing_mm)
    v = move((0.0, 0.0, 0.0), plane.column_direction, grid.row_spacing_mm)
    return u, v, plane.normal


def _times(quadric: Quadric, vector: Vector) -> Vector:
    xx, xy, xz, yy, yz, zz = quadric.matrix
    x, y, z = vector
    return (xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z)
