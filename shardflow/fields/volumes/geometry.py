"""Grids of points in a stored volume: orientation by axis codes, spacing, crops, and their affines.

A stored volume is indexed ``(slice, row, column)``, and its affine maps these indices to LPS millimeters. A
`Grid` is described in these indices: which stored coordinate each of its points has. All is computed with
scalar Python floats and without ``sum``, so results are the same on every machine, and sampled in integers
(`Grid.fixed`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError

Shape: TypeAlias = tuple[int, int, int]
Vector: TypeAlias = tuple[float, float, float]
Matrix: TypeAlias = tuple[Vector, Vector, Vector]
"""Rows of a 3 x 3 matrix."""

FRACTION_BITS: Final = 32
"""Binary places of a stored coordinate in integers."""
ONE: Final = 1 << FRACTION_BITS
_AXES: Final = (0, 1, 2)
# The directions in which LPS coordinates grow and fall.
_CODES: Final = {"L": (0, 1), "R": (0, -1), "P": (1, 1), "A": (1, -1), "S": (2, 1), "I": (2, -1)}
_MAX_TILT: Final = math.sin(math.radians(0.5))
"""Axes that are closer to perpendicular count as such; packing flags `gantry_tilt` by the same angle."""
_CLOSE: Final = 0.01
"""Voxels by which two grids may differ and still be the same."""
Placement: TypeAlias = Literal["centered", "monai", "torch"]
_IDENTITY: Final[Matrix] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Affine:
    """Map of array indices to LPS millimeters at voxel centers."""

    columns: Matrix
    """``columns[k]``: where a step along axis k of the array leads, mm."""
    origin: Vector
    """Place of index (0, 0, 0), mm."""

    @classmethod
    def of_series(cls, affine_lps: NDArray[Any]) -> Affine | None:
        """Return the affine of a stored volume, whose axes are slice, row and column.

        Args:
            affine_lps: ``(3 or 4, 4)`` of the series table, which maps ``(column, row, slice, 1)``.

        Returns:
            None where the geometry of the series is unknown.
        """
        rows = [[float(value) for value in row] for row in affine_lps[:3]]
        if not all(math.isfinite(value) for row in rows for value in row):
            return None
        column, row, step, origin = ((rows[0][k], rows[1][k], rows[2][k]) for k in range(4))
        return cls((step, row, column), origin)

    def to_array(self) -> NDArray[np.float64]:
        """Return it as ``(4, 4)``."""
        found = np.eye(4)
        for axis, column in enumerate((*self.columns, self.origin)):
            found[:3, axis] = column
        return found

    @property
    def spacing_mm(self) -> Vector:
        """Distance of neighbors along each axis."""
        return _vector(math.sqrt(_dot(column, column)) for column in self.columns)

    def inverse(self) -> Matrix:
        """Return the rows of the matrix that maps a difference in mm to one of indices.

        Raises:
            ConfigError: The axes do not span a volume.
        """
        a, b, c = self.columns
        volume = _dot(a, _cross(b, c))
        if volume == 0:
            raise ConfigError("The axes of a volume's affine do not span a volume; leave the series out.")
        rows = (_cross(b, c), _cross(c, a), _cross(a, b))
        return _matrix(tuple(value / volume for value in row) for row in rows)


@dataclass(frozen=True, slots=True)
class Grid:
    """Regular grid of points in a stored volume.

    Attributes:
        shape: Number of points along each axis of the grid.
        steps: ``steps[a][k]``: how far a step along axis k leads along stored axis a, in stored voxels.
        origin: Stored coordinates of point (0, 0, 0).
        knots: Where each stored slice lies, in steps of the affine, if slices are missing or irregular:
        stored
            coordinates then count these steps, and `places` counts slices. None where both are the same.
    """

    shape: Shape
    steps: Matrix = _IDENTITY
    origin: Vector = (0.0, 0.0, 0.0)
    knots: tuple[float, ...] | None = None

    def cropped(self, start: Shape, shape: Shape) -> Grid:
        """Return the part that begins at a point, which may be outside."""
        return replace(self, shape=shape, origin=self.stored(start))

    def boxed(self, box: Sequence[int]) -> Grid:
        """Return the smallest part whose points cover a box of stored voxels; at least one point.

        Args:
            box: First slice, row and column, and those after the last.
        """
        ends = ((low, high - 1) for low, high in zip(box[:3], box[3:], strict=True))
        corners = [self.point(_vector(corner)) for corner in itertools.product(*ends)]
        start, stop = [0] * 3, [0] * 3
        for k in _AXES:
            places = [corner[k] for corner in corners]
            start[k] = min(max(math.floor(min(places)), 0), self.shape[k] - 1)
            stop[k] = max(min(math.ceil(max(places)), self.shape[k] - 1), start[k]) + 1
        lengths = (stop[0] - start[0], stop[1] - start[1], stop[2] - start[2])
        return self.cropped((start[0], start[1], start[2]), lengths)

    def stored(self, point: Vector) -> Vector:
        """Return the stored coordinates of a point."""
        return _vector(self.origin[a] + _dot(self.steps[a], point) for a in _AXES)

    def point(self, place: Vector) -> Vector:
        """Return the grid coordinates of a place among the stored voxels."""
        stored = (self._step(place[0]), place[1], place[2])
        inverse = Affine(_transposed(self.steps), self.origin).inverse()
        moved = _vector(stored[a] - self.origin[a] for a in _AXES)
        return _vector(_dot(row, moved) for row in inverse)

    def _step(self, index: float) -> float:
        """Return where a slice, or a place between two, lies in steps of the affine."""
        if self.knots is None:
            return index
        last = len(self.knots) - 1
        before = min(max(math.floor(index), 0), max(last - 1, 0))
        if last == 0 or not 0 <= index <= last:  # beyond the outermost slices a step is one slice
            return self.knots[0] + index if index < 0 or last == 0 else self.knots[last] + index - last
        gap = self.knots[before + 1] - self.knots[before]
        return self.knots[before] + (index - before) * gap

    def affine(self, stored: Affine) -> Affine:
        """Return the map of its indices to LPS millimeters.

        Args:
            stored: That of the stored volume.
        """
        rows, steps = _transposed(stored.columns), _transposed(self.steps)
        columns = _matrix(tuple(_dot(row, step) for row in rows) for step in steps)
        origin = _vector(stored.origin[i] + _dot(rows[i], self.origin) for i in _AXES)
        return Affine(columns, origin)

    @property
    def axes(self) -> Shape | None:
        """The stored axis that each axis of the grid runs along; None if one runs askew."""
        found = tuple(
            next(
                (a for a in _AXES if self.steps[a][k] and not any(self.steps[b][k] for b in _AXES if b != a)),
                -1,
            )
            for k in _AXES
        )
        return (found[0], found[1], found[2]) if sorted(found) == [0, 1, 2] else None

    @property
    def order(self) -> list[int]:
        """The axes of a grid that runs along the stored axes, in the order of these."""
        axes = self.axes or _AXES
        return [axes.index(a) for a in _AXES]

    @property
    def is_copy(self) -> bool:
        """Whether its points are stored voxels, one after another, so that nothing is interpolated."""
        values = (value for row in self.steps for value in row)
        return (
            self.axes is not None
            and self.knots is None
            and all(value in (-1.0, 0.0, 1.0) for value in values)
            and all(value.is_integer() for value in self.origin)
        )

    def fixed(self) -> tuple[tuple[Shape, Shape, Shape], Shape]:
        """Return steps and origin as integers of `FRACTION_BITS` binary places."""
        steps = [[round(value * ONE) for value in row] for row in self.steps]
        origin = [round(value * ONE) for value in self.origin]
        rows = [(row[0], row[1], row[2]) for row in steps]
        return (rows[0], rows[1], rows[2]), (origin[0], origin[1], origin[2])

    def extent(self) -> tuple[tuple[int, int], ...]:
        """Return the least and the greatest stored coordinate along each stored axis, as `fixed` integers."""
        steps, origin = self.fixed()
        found = []
        for a in _AXES:
            ends = [steps[a][k] * (self.shape[k] - 1) for k in _AXES]
            both = np.array([sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends)], np.int64)
            low, high = self.places(origin[a] + both, a).tolist()
            found.append((low, high))
        return tuple(found)

    def places(self, coordinates: NDArray[Any], a: int) -> NDArray[Any]:
        """Return where `fixed` coordinates along a stored axis lie among its voxels."""
        if self.knots is None or a:
            return coordinates
        knots = np.array([round(knot * ONE) for knot in self.knots], np.int64)
        if len(knots) == 1:
            return np.asarray(coordinates - knots[0])
        before = np.clip(np.searchsorted(knots, coordinates, "right") - 1, 0, len(knots) - 2)
        offset, gap = coordinates - knots[before], knots[before + 1] - knots[before]
        between = (before << FRACTION_BITS) + np.rint(offset / gap * ONE).astype(np.int64)
        # Beyond the outermost slices a step is one slice.
        last = ((len(knots) - 1) << FRACTION_BITS) + coordinates - knots[-1]
        return np.where(offset < 0, offset, np.where(coordinates > knots[-1], last, between))


def check_orientation(codes: object) -> None:
    """Refuse what are no axis codes.

    Raises:
        ConfigError: They are not three of different axes.
    """
    is_word = isinstance(codes, str) and len(codes) == 3 and all(code in _CODES for code in codes)
    if not is_word or len({_CODES[code][0] for code in str(codes)}) < 3:
        raise ConfigError(
            "orientation is three letters, one of L or R, one of A or P, one of S or I, for the directions "
            "in "
            f"which the three axes of the array run, such as 'RAS' or 'SPL', got {codes!r}."
        )


def _world_axes(affine: Affine) -> Shape:
    """Return the axis of LPS that each axis of an array follows most closely, each one once."""
    spacing = affine.spacing_mm

    def closeness(order: Shape) -> float:
        a, b, c = (abs(affine.columns[k][order[k]]) / (spacing[k] or 1.0) for k in _AXES)
        return a + b + c

    best = max(itertools.permutations(_AXES), key=lambda order: closeness((order[0], order[1], order[2])))
    return best[0], best[1], best[2]


def finest_spacing(affines_lps: NDArray[Any], codes: str | None) -> Vector | None:
    """Return the least distance of neighboring voxels along each axis, over many stored volumes.

    Args:
        affines_lps: ``(n, 3 or 4, 4)`` of a series table, which map ``(column, row, slice, 1)``; volumes of
            unknown geometry do not count.
        codes: Directions in which the axes run, see `oriented`; None for slice, row and column.

    Returns:
        Millimeters; None where no volume has a known geometry.
    """
    axes = np.asarray(affines_lps, np.float64)[:, :3, [2, 1, 0]]
    lengths = np.sqrt((axes * axes).sum(axis=1))
    is_known = np.isfinite(lengths).all(axis=1) & (lengths > 0).all(axis=1)
    axes, lengths = axes[is_known], lengths[is_known]
    if not len(lengths):
        return None
    if codes is not None:
        closeness = np.abs(axes) / lengths[:, None]  # of each axis of LPS to each stored one
        orders = np.array([*itertools.permutations(_AXES)])
        totals = sum(closeness[:, orders[:, a], a] for a in _AXES)
        world = orders[np.argmax(totals, axis=1)]
        wanted = np.array([_CODES[code][0] for code in codes])
        stored = np.argmax(world[:, None, :] == wanted[:, None], axis=2)
        lengths = np.take_along_axis(lengths, stored, axis=1)
    return _vector(lengths.min(axis=0).tolist())


def oriented(grid: Grid, affine: Affine, codes: str) -> Grid:
    """Return the stored voxels with axes that run in given directions: axes are swapped and reversed.

    Args:
        grid: All stored voxels.
        affine: Of the stored volume.
        codes: Such as ``RAS``: the first axis of the array runs to the right, the second to the front, the
            third up. An oblique axis counts as the direction that it is closest to.
    """
    shape, world = grid.shape, _world_axes(affine)
    steps, origin, lengths = [[0.0] * 3 for _ in _AXES], [0.0] * 3, [0] * 3
    for k, code in enumerate(codes):
        axis, sign = _CODES[code]
        stored = world.index(axis)
        is_reversed = (affine.columns[stored][axis] >= 0) != (sign > 0)
        steps[stored][k] = -1.0 if is_reversed else 1.0
        lengths[k] = shape[stored]
        origin[stored] = shape[stored] - 1.0 if is_reversed else 0.0
    turned = (lengths[0], lengths[1], lengths[2])
    return replace(grid, shape=turned, steps=_matrix(map(tuple, steps)), origin=_vector(origin))


def spaced(grid: Grid, affine: Affine, spacing_mm: Vector, placement: Placement = "centered") -> Grid:
    """Return a grid of another spacing that covers the same box.

    Its axes are those of ``grid`` where these are perpendicular; of a tilted series the axis across the
    slices becomes their normal. ``centered``: along each axis there are as many points as come closest to the
    length of the box, and they are centered in it (voxels fill the box, as with ``align_corners=False``).

    Args:
        grid: From `oriented`, or all stored voxels.
        affine: Of the stored volume.
        spacing_mm: Along each axis of the grid.
        placement: Where the points are, see `Volume`; those of a tilted series are centered.
    """
    own = grid.affine(affine)
    lengths = own.spacing_mm
    units = [_scaled(column, 1 / length) for column, length in zip(own.columns, lengths, strict=True)]
    if is_perpendicular(own.columns):
        ratios = [spacing_mm[k] / lengths[k] for k in _AXES]
        if placement == "torch":
            counts = [max(1, int(grid.shape[k] * (lengths[k] / spacing_mm[k]))) for k in _AXES]
            return stretched(grid, (counts[0], counts[1], counts[2]))
        counts = [max(1, round(grid.shape[k] / ratios[k])) for k in _AXES]
        if placement == "monai":
            counts = [round((grid.shape[k] - 1) / ratios[k] + 1) for k in _AXES]  # half to even, as NumPy
        first = (0.0, 0.0, 0.0)
        if placement == "centered":
            first = _vector((grid.shape[k] - 1) / 2 - (counts[k] - 1) / 2 * ratios[k] for k in _AXES)
        steps = _matrix(tuple(grid.steps[a][k] * ratios[k] for k in _AXES) for a in _AXES)
        counted = (counts[0], counts[1], counts[2])
        return replace(grid, shape=counted, steps=steps, origin=grid.stored(first))
    return _upright(grid, affine, own, units, spacing_mm)


def middle_start(lengths: Shape, size: Shape, placement: Placement) -> Shape:
    """Return where a region in the middle of a volume begins; negative where the volume is shorter.

    Of an odd difference the smaller half is in front where something is cut, and the larger one where
    something is added; MONAI's and torch's users add the smaller one in front.

    Args:
        lengths: Of the volume.
        size: Of the region.
        placement: See `spaced`.
    """
    found = []
    for length, side in zip(lengths, size, strict=True):
        room = length - side
        if placement == "monai" and room > 0:
            found.append(length // 2 - side // 2)
        else:
            found.append(room // 2 if placement == "centered" or room > 0 else -(-room // 2))
    return found[0], found[1], found[2]


def is_perpendicular(columns: Matrix) -> bool:
    """Whether the axes of an affine are perpendicular, or so close to it that they count as such."""
    units = [_scaled(column, 1 / math.sqrt(_dot(column, column))) for column in columns]
    return all(abs(_dot(units[a], units[b])) <= _MAX_TILT for a, b in ((0, 1), (1, 2), (2, 0)))


def alongside(grid: Grid, affine: Affine, other: Affine, knots: tuple[float, ...] | None = None) -> Grid:
    """Return the points of a grid in another stored volume: those of the same places in millimeters.

    Axes that run along those of the other volume within a hundredth of a voxel over the whole grid do so, and
    points that are as close to voxels are these: affines differ by the rounding of files.

    Args:
        grid: The points.
        affine: Of the stored volume that they are in.
        other: Of the other one.
        knots: Of the other one, see `Grid`.
    """
    if other == affine and grid.knots is None:
        return replace(grid, knots=knots)
    own, inverse = grid.affine(affine), other.inverse()
    exact = _matrix(tuple(_dot(inverse[a], own.columns[k]) for k in _AXES) for a in _AXES)
    steps = _matrix(tuple(_near(exact[a][k], _CLOSE / grid.shape[k]) for k in _AXES) for a in _AXES)
    rows = _transposed(own.columns)
    middle = _vector((length - 1) / 2 for length in grid.shape)
    place = _vector(own.origin[i] + _dot(rows[i], middle) - other.origin[i] for i in _AXES)
    origin = _vector(_dot(inverse[a], place) - _dot(steps[a], middle) for a in _AXES)
    found = Grid(grid.shape, steps, origin, knots)
    if found.axes is not None and all(value in (-1.0, 0.0, 1.0) for row in steps for value in row):
        snapped = (round(value) if abs(value - round(value)) <= _CLOSE else value for value in origin)
        found = replace(found, origin=_vector(snapped))
    return found


def _near(value: float, tolerance: float) -> float:
    """Return -1, 0 or 1 if a value is one of them but for a tolerance, else the value."""
    nearest = float(min(max(round(value), -1), 1))
    return nearest if abs(value - nearest) <= tolerance else value


def stretched(grid: Grid, shape: Shape) -> Grid:
    """Return a grid of a given shape that covers the same box; voxels fill it (``align_corners=False``)."""
    ratios = [length / size for length, size in zip(grid.shape, shape, strict=True)]
    first = _vector((ratio - 1) / 2 for ratio in ratios)
    steps = _matrix(tuple(grid.steps[a][k] * ratios[k] for k in _AXES) for a in _AXES)
    return replace(grid, shape=shape, steps=steps, origin=grid.stored(first))


def _upright(grid: Grid, affine: Affine, own: Affine, units: list[Vector], spacing_mm: Vector) -> Grid:
    """Return a perpendicular grid around a volume whose slices are shifted against each other."""
    across = next(k for k in _AXES if grid.steps[0][k])
    a, b = (k for k in _AXES if k != across)
    first = units[a]
    along = _dot(units[b], first)
    second = _unit(_vector(units[b][i] - along * first[i] for i in _AXES))
    normal = _unit(_cross(first, second))
    if _dot(normal, units[across]) < 0:
        normal = _scaled(normal, -1.0)
    directions = {a: first, b: second, across: normal}
    rows = _transposed(own.columns)
    ends = (_vector(end) for end in itertools.product(*((-0.5, length - 0.5) for length in grid.shape)))
    corners = [_vector(own.origin[i] + _dot(rows[i], end) for i in _AXES) for end in ends]
    inverse = affine.inverse()
    counts, columns, origin = [0] * 3, [(0.0, 0.0, 0.0)] * 3, (0.0, 0.0, 0.0)
    for k in _AXES:
        along_k = [_dot(corner, directions[k]) for corner in corners]
        low, high = min(along_k), max(along_k)
        counts[k] = max(1, round((high - low) / spacing_mm[k]))
        columns[k] = _scaled(directions[k], spacing_mm[k])
        middle = (low + high) / 2 - (counts[k] - 1) / 2 * spacing_mm[k]
        origin = _vector(origin[i] + directions[k][i] * middle for i in _AXES)
    moved = _vector(origin[i] - affine.origin[i] for i in _AXES)
    steps = _matrix(tuple(_dot(inverse[axis], columns[k]) for k in _AXES) for axis in _AXES)
    first = _vector(_dot(row, moved) for row in inverse)
    return replace(grid, shape=(counts[0], counts[1], counts[2]), steps=steps, origin=first)


def _vector(values: Any) -> Vector:
    x, y, z = values
    return float(x), float(y), float(z)


def _matrix(rows: Any) -> Matrix:
    a, b, c = rows
    return _vector(a), _vector(b), _vector(c)


def _transposed(rows: Matrix) -> Matrix:
    return _matrix(zip(*rows, strict=True))


def _dot(a: Vector, b: Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _cross(a: Vector, b: Vector) -> Vector:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def _scaled(a: Vector, factor: float) -> Vector:
    return a[0] * factor, a[1] * factor, a[2] * factor


def _unit(a: Vector) -> Vector:
    return _scaled(a, 1 / math.sqrt(_dot(a, a)))
