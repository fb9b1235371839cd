"""Scene: tissues and solids as pixels, in slices and in projections.

Tissue values are round textbook values for a phantom that looks right, not measurements: Hounsfield units in
four contrast phases, signal in seven MR weightings. Radiographs use the CT column without contrast:
attenuation relative to water is ``1 + HU / 1000``.

The anatomy is reduced to arrays of quadrics once. A plane then gives all conics in a few vector operations,
and only the bodies that it cuts are painted, with soft edges, each within its own rectangle. Every operation
is elementwise and exactly defined, so the pixels are the same on every machine (no dot products: their order
of summation is not). Projections are parallel beams along a plane's normal: a solid adds its length on the
beam times its attenuation over its parent's. Overlaps are therefore exact only for nested solids, as in an
anatomy; a table is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardflow.synthetic.geometry import Plane, Quadric, Solid, Vector, dot, move

CT_PHASES = ("native", "arterial", "portal", "delayed")
MR_WEIGHTINGS = ("t1", "t2", "flair", "dwi-b0", "dwi-b1000", "t1-contrast")
_CONTRASTS = CT_PHASES + MR_WEIGHTINGS

_Row = tuple[float, float, float, float, float, float, float, float, float, float]

TISSUES: dict[str, _Row] = {
    #              native arterial portal delayed  t1   t2   flair b0  b1000  t1c
    "air": (-1000, -1000, -1000, -1000, 2, 2, 2, 2, 1, 2),
    "bile": (6, 6, 7, 8, 230, 960, 300, 700, 60, 230),
    "blood": (42, 310, 165, 110, 60, 50, 60, 60, 10, 520),
    "bowel": (32, 45, 70, 60, 300, 380, 300, 300, 60, 420),
    "brain-gray": (38, 40, 44, 43, 480, 600, 590, 480, 210, 500),
    "brain-white": (29, 30, 34, 33, 620, 440, 450, 380, 190, 635),
    "cartilage": (70, 72, 78, 78, 260, 180, 200, 150, 30, 280),
    "cord": (38, 38, 40, 40, 480, 360, 380, 300, 160, 490),
    "cortical-bone": (950, 950, 950, 950, 15, 15, 15, 10, 5, 15),
    "csf": (8, 8, 8, 8, 140, 1000, 80, 900, 40, 140),
    "disc": (85, 85, 88, 88, 330, 560, 420, 350, 60, 340),
    "fat": (-100, -100, -98, -98, 920, 640, 560, 60, 20, 920),
    "gland": (15, 20, 25, 25, 420, 450, 350, 200, 40, 500),
    "heart": (44, 225, 150, 108, 260, 210, 240, 200, 40, 430),
    "kidney": (34, 145, 178, 150, 330, 540, 420, 500, 190, 640),
    "liver": (58, 72, 114, 92, 480, 270, 300, 260, 70, 640),
    "lung": (-860, -858, -855, -856, 14, 18, 15, 12, 3, 16),
    "lung-border": (-430, -430, -430, -430, 300, 200, 200, 60, 15, 320),
    "mediastinum": (-10, 0, 15, 10, 640, 420, 400, 120, 30, 660),
    "meninges": (55, 70, 88, 85, 380, 320, 340, 260, 80, 820),
    "muscle": (55, 58, 66, 64, 320, 170, 210, 150, 40, 380),
    "pancreas": (42, 112, 92, 76, 520, 310, 330, 280, 80, 640),
    "rib": (430, 430, 430, 430, 300, 200, 180, 60, 15, 310),
    "skin": (10, 12, 18, 18, 380, 260, 260, 90, 20, 420),
    "spleen": (48, 122, 120, 98, 330, 470, 420, 480, 230, 600),
    "spongy-bone": (190, 192, 198, 196, 560, 360, 340, 130, 30, 590),
    "table-top": (40, 40, 40, 40, 2, 2, 2, 2, 1, 2),
    "table": (-740, -740, -740, -740, 2, 2, 2, 2, 1, 2),
    "water": (6, 6, 6, 6, 150, 1000, 120, 880, 30, 150),
}
"""Value of every tissue in every contrast, in the order of `CT_PHASES` and then `MR_WEIGHTINGS`."""

LESION_CONTRASTS: dict[str, _Row] = {
    "brain metastasis": (33, 44, 66, 62, 380, 720, 820, 560, 330, 900),
    "calcified granuloma": (380, 380, 380, 380, 60, 50, 60, 40, 10, 60),
    "ground-glass nodule": (-610, -600, -595, -598, 90, 120, 110, 80, 20, 100),
    "hepatic cyst": (5, 5, 6, 6, 150, 990, 300, 760, 40, 150),
    "hepatic hemangioma": (38, 150, 142, 128, 330, 760, 600, 620, 200, 800),
    "hepatic metastasis": (38, 50, 66, 72, 310, 460, 480, 480, 330, 420),
    "intracranial hemorrhage": (70, 70, 71, 71, 700, 240, 640, 200, 260, 700),
    "lacunar infarct": (16, 16, 17, 17, 230, 880, 260, 780, 60, 230),
    "lytic bone lesion": (35, 60, 72, 70, 250, 560, 520, 420, 300, 620),
    "meningioma": (52, 90, 118, 112, 430, 640, 690, 500, 280, 960),
    "pulmonary nodule": (42, 60, 72, 70, 320, 380, 360, 300, 180, 480),
    "renal calculus": (620, 620, 620, 620, 20, 15, 20, 10, 5, 20),
    "renal cyst": (7, 7, 8, 8, 150, 1000, 160, 820, 40, 150),
    "sclerotic bone lesion": (760, 760, 760, 760, 60, 60, 70, 40, 20, 90),
    "splenic cyst": (8, 8, 9, 9, 150, 980, 200, 780, 40, 150),
    "white matter lesion": (21, 21, 23, 23, 430, 840, 900, 620, 300, 450),
}
"""The same for each kind of lesion."""


def contrast_index(contrast: str) -> int:
    """Return the column of a phase or weighting."""
    return _CONTRASTS.index(contrast)


def attenuation(tissue_hu: float) -> float:
    """Return the attenuation relative to water."""
    return max(0.0, 1 + tissue_hu / 1000)


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
    """Centers and matrices as columns, so that one plane cuts all of them at once."""

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
        """Multiply every matrix by one vector, or by a vector of its own."""
        xx, xy, xz, yy, yz, zz = self._matrices
        return xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z


def _inner(vector: Vector, arrays: tuple[_Array, _Array, _Array]) -> _Array:
    total: _Array = vector[0] * arrays[0] + vector[1] * arrays[1] + vector[2] * arrays[2]
    return total


def _missed(columns: _Array, edge_pixels: float) -> _Array:
    """Return the conics that surely cover nothing on the plane; computed before the rest."""
    a, b, d, e, f, g = columns
    determinant = a * d - b * b
    is_closed = determinant > _FLAT * a * d
    safe = np.where(is_closed, determinant, 1.0)
    lowest = g + (e * (b * f - d * e) + f * (b * e - a * f)) / safe
    level = 1 + edge_pixels * np.sqrt(np.maximum(a, d)) + 1e-6
    missed: _Array = is_closed & (lowest > level)
    return missed


def _sharpness(conic: Conic, edge_pixels: float) -> float:
    """Return the slope of coverage over the conic's value that makes an edge ``edge_pixels`` wide."""
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
    """Solve ``square x2 + 2 linear x + constant <= level``; an empty interval if there is no solution."""
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
    """Return the pixels of a rectangle whose center lies inside a conic, bool."""
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


_UNSEEN = {"table", "table-top"}
_EDGE_PIXELS = 1.2


def project(solids: Sequence[Solid], plane: Plane) -> _Array:
    """Sum the attenuation along the normal of every pixel.

    Returns:
        ``(rows, columns)`` float32: millimeters of water that attenuate as much.
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
    """Return the outline, and the quadric's curvature along the beam (0 if the beam never leaves it)."""
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
    """Return half the length of each beam inside a quadric, mm, float32."""
    if curvature <= 0:
        return np.zeros((rectangle.bottom - rectangle.top, rectangle.right - rectangle.left), np.float32)
    room = conic_field(outline, rectangle, -1 / curvature, 1 / curvature, np.float32)
    half: _Array = np.sqrt(np.maximum(room, np.float32(0), out=room))
    return half


def _slab_share(slab: Quadric, plane: Plane, body: Quadric, half: _Array, rectangle: Rectangle) -> _Array:
    """Return the share of the body's near and far wall in a slab: exact for thin shells such as ribs."""
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
    """Return the rows that a slab can reach within the body; all of them if it is not level."""
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
