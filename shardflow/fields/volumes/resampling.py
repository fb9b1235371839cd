"""Resampling of a region of a stored volume onto a grid, once, by the true affine.

A point is inside where its center lies in the box of the stored voxels, and what interpolation needs beyond
the outermost voxels repeats them (cubic: mirrors them), as in ITK; all other points keep the fill. Grids
whose axes run along stored axes are separable; any other is sampled plane by plane. Coordinates are integers,
so which voxel is nearest, and whether a point is inside, is the same on every machine. NumPy releases the
interpreter's lock in every loop over voxels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.volumes.geometry import FRACTION_BITS, ONE, Grid, Shape

Interpolation: TypeAlias = Literal["linear", "nearest", "cubic"]
_HALF: Final = ONE >> 1
_CUBIC_MARGIN: Final = 12
"""Voxels that the prefilter of a cubic spline is given beyond a region: what lies farther weighs under
2e-7."""
_POLE: Final = 3.0**0.5 - 2.0
_AXES: Final = (0, 1, 2)
Int64Array: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """Box of stored voxels: first and behind the last along slices, rows and columns."""

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        """Voxels along each axis."""
        a, b, c = (stop - start for start, stop in zip(self.start, self.stop, strict=True))
        return a, b, c

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """The box as an index of the stored volume."""
        a, b, c = (slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))
        return a, b, c


def smoothing(grid: Grid) -> tuple[float, float, float]:
    """Return the standard deviation, in stored voxels, of a Gaussian that prevents aliasing on a grid.

    (r - 1) / 2 for a step of r voxels along a stored axis, 0 up to one voxel, as scikit-image's ``resize``.
    """
    a, b, c = (max(max(abs(step) for step in row) - 1.0, 0.0) / 2 for row in grid.steps)
    return a, b, c


def source_region(
    grid: Grid, stored: Shape, mode: Interpolation, sigmas: tuple[float, float, float] = (0.0, 0.0, 0.0)
) -> Region | None:
    """Return the stored voxels that the points of a grid depend on; None if no point is inside.

    Args:
        grid: The points.
        stored: Shape of the stored volume.
        mode: How to interpolate.
        sigmas: Of the smoothing before it.
    """
    start, stop = [0] * 3, [0] * 3
    for a, (low, high) in enumerate(grid.extent()):
        if high < -_HALF or low >= stored[a] * ONE - _HALF:
            return None
        margin = {"nearest": 0, "linear": 0, "cubic": 1 + _CUBIC_MARGIN}[mode] + _radius(sigmas[a])
        half = _HALF if mode == "nearest" else 0
        first = low + half >> FRACTION_BITS
        last = (high + half >> FRACTION_BITS) + (mode != "nearest")  # weight 0 where a point is on a voxel
        start[a] = min(max(first - margin, 0), stored[a] - 1)
        stop[a] = max(min(last + margin, stored[a] - 1), start[a]) + 1
    return Region((start[0], start[1], start[2]), (stop[0], stop[1], stop[2]))


def resample(
    voxels: NDArray[Any],
    region: Region,
    stored: Shape,
    grid: Grid,
    out: NDArray[Any],
    *,
    mode: Interpolation,
    sigmas: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> None:
    """Sample a region on a grid; points outside of the stored volume keep what ``out`` holds.

    Args:
        voxels: The voxels of `source_region`.
        region: It.
        stored: Shape of the whole stored volume.
        grid: The points.
        out: Array of the grid's shape, of any strides; with ``nearest`` of the dtype of the voxels, otherwise
            of floats.
        mode: How to interpolate.
        sigmas: Of a Gaussian along each stored axis, see `smoothing`.
    """
    if mode != "nearest":
        voxels = _smoothed(voxels, sigmas, out.dtype)
        if mode == "cubic":
            voxels = _spline_coefficients(voxels)
    if grid.axes is not None:
        _resample_along(voxels, region, stored, grid, out, mode)
    else:
        _resample_askew(voxels, region, stored, grid, out, mode)


def inside(grid: Grid, stored: Shape, out: NDArray[np.uint8]) -> None:
    """Set 1 for each point of a grid that is inside the stored volume, and 0 for the others.

    Args:
        grid: The points.
        stored: Shape of the stored volume.
        out: uint8 of the grid's shape.
    """
    if grid.axes is not None:
        spans = _inner_spans(grid, stored)
        out[...] = 0
        out[spans] = 1
        return
    for plane, places in enumerate(_planes(grid)):
        out[plane] = _is_inside(places, stored)


# ---- grids along the stored axes -------------------------------------------------------------------


def _coordinates(grid: Grid, k: int, a: int) -> Int64Array:
    steps, origin = grid.fixed()
    return grid.places(origin[a] + steps[a][k] * np.arange(grid.shape[k], dtype=np.int64), a)


def _inner_spans(grid: Grid, stored: Shape) -> tuple[slice, slice, slice]:
    """Return which points along each axis of the grid are inside."""
    found = []
    for k, a in enumerate(grid.axes or ()):
        places = _coordinates(grid, k, a)
        here = np.flatnonzero((places >= -_HALF) & (places < stored[a] * ONE - _HALF))
        found.append(slice(int(here[0]), int(here[-1]) + 1) if len(here) else slice(0, 0))
    first, second, third = found
    return first, second, third


def _resample_along(
    voxels: NDArray[Any],
    region: Region,
    stored: Shape,
    grid: Grid,
    out: NDArray[Any],
    mode: Interpolation,
) -> None:
    spans = _inner_spans(grid, stored)
    target = out[spans]
    # As the stored axes run; the first axis is then that of slices.
    order = grid.order
    target = target.transpose(order)
    if not target.size:
        return
    sources, weights = [], []
    for a, k in enumerate(order):
        places = _coordinates(grid, k, a)[spans[k]]
        indices, share = _taps(places, stored[a], mode)
        sources.append(indices - region.start[a])
        weights.append(share)
    if mode == "nearest":
        target[...] = voxels[np.ix_(*(each[0] for each in sources))]
        return
    dtype = out.dtype
    # The axis that shrinks most comes first, so that the others have less to do.
    passes = sorted(_AXES, key=lambda a: sources[a].shape[1] / voxels.shape[a])
    current: NDArray[Any] = voxels
    for place, a in enumerate(passes):
        # With other axes than the stored ones, the sums are made in order and copied once.
        is_last = place == len(passes) - 1 and order == [*_AXES]
        into = target if is_last else None
        current = _interpolate(current, a, sources[a], weights[a].astype(dtype), dtype, into)
    if current is not target:
        target[...] = current


def _interpolate(
    values: NDArray[Any],
    axis: int,
    sources: Int64Array,
    weights: NDArray[Any],
    dtype: np.dtype[Any],
    into: NDArray[Any] | None,
) -> NDArray[Any]:
    """Return weighted sums of neighbors along an axis."""
    shape = list(values.shape)
    shape[axis] = sources.shape[1]
    if (weights[0] == 1).all() and (weights[1:] == 0).all():
        found: NDArray[Any] = values.take(sources[0], axis=axis)
        if into is not None:
            into[...] = found
            return into
        return found
    total = np.empty(shape, dtype) if into is None else into
    along = [1, 1, 1]
    along[axis] = -1
    if axis == 0:  # plane by plane, which stays in the cache
        for place in range(shape[0]):
            np.multiply(values[sources[0, place]], weights[0, place], out=total[place], casting="unsafe")
            for tap in range(1, len(sources)):
                total[place] += values[sources[tap, place]] * weights[tap, place]
        return total
    for place, plane in enumerate(values):
        sums = plane.take(sources[0], axis=axis - 1) * weights[0].reshape(along[1:])
        for tap in range(1, len(sources)):
            sums += plane.take(sources[tap], axis=axis - 1) * weights[tap].reshape(along[1:])
        total[place] = sums
    return total


# ---- grids askew to the stored axes ----------------------------------------------------------------


def _planes(grid: Grid) -> Any:
    """Yield for each plane of a grid the stored coordinates of its points, three times ``(H, W)``."""
    steps, origin = grid.fixed()
    rows = np.arange(grid.shape[1], dtype=np.int64)[:, None]
    columns = np.arange(grid.shape[2], dtype=np.int64)[None]
    in_plane = [steps[a][1] * rows + steps[a][2] * columns for a in _AXES]
    for plane in range(grid.shape[0]):
        yield [grid.places(origin[a] + steps[a][0] * plane + in_plane[a], a) for a in _AXES]


def _is_inside(places: list[Int64Array], stored: Shape) -> NDArray[np.bool_]:
    found = np.ones(places[0].shape, bool)
    for a, each in enumerate(places):
        found &= (each >= -_HALF) & (each < stored[a] * ONE - _HALF)
    return found


def _resample_askew(
    voxels: NDArray[Any],
    region: Region,
    stored: Shape,
    grid: Grid,
    out: NDArray[Any],
    mode: Interpolation,
) -> None:
    flat = np.ascontiguousarray(voxels).reshape(-1)
    strides = (region.shape[1] * region.shape[2], region.shape[2], 1)
    for plane, places in enumerate(_planes(grid)):
        is_inside = _is_inside(places, stored)
        if not is_inside.any():
            continue
        taps = []
        for a, each in enumerate(places):
            indices, weights = _taps(each[is_inside], stored[a], mode)
            taps.append((((indices - region.start[a]) * strides[a]), weights.astype(out.dtype)))
        if mode == "nearest":
            out[plane][is_inside] = flat[taps[0][0][0] + taps[1][0][0] + taps[2][0][0]]
            continue
        total = np.zeros(int(is_inside.sum()), out.dtype)
        for z_at, z_weight in zip(*taps[0], strict=True):
            for y_at, y_weight in zip(*taps[1], strict=True):
                at, weight = z_at + y_at, z_weight * y_weight
                for x_at, x_weight in zip(*taps[2], strict=True):
                    total += flat[at + x_at] * (weight * x_weight)
        out[plane][is_inside] = total


# ---- weights ---------------------------------------------------------------------------------------


def _taps(places: Int64Array, length: int, mode: Interpolation) -> tuple[Int64Array, NDArray[np.float64]]:
    """Return the stored indices that each coordinate depends on, and their weights, ``(taps, n)`` each."""
    if mode == "nearest":
        nearest = np.clip((places + _HALF) >> FRACTION_BITS, 0, length - 1)
        return nearest[None], np.ones((1, len(places)))
    first = places >> FRACTION_BITS
    t = (places - (first << FRACTION_BITS)) / ONE
    if mode == "linear":
        indices = np.stack([first, first + 1])
        return np.clip(indices, 0, length - 1), np.stack([1 - t, t])
    indices = np.stack([first - 1, first, first + 1, first + 2])
    weights = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3])
    return _mirrored(indices, length), weights / 6


def _mirrored(indices: Int64Array, length: int) -> Int64Array:
    """Reflect indices at the centers of the outermost voxels."""
    if length == 1:
        return np.zeros_like(indices)
    period = 2 * (length - 1)
    folded: Int64Array = np.mod(indices, period)
    return np.minimum(folded, period - folded)


def _radius(sigma: float) -> int:
    return int(np.ceil(4 * sigma)) if sigma else 0


def _smoothed(voxels: NDArray[Any], sigmas: tuple[float, float, float], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convolve with a Gaussian along each axis, cut at 4 standard deviations; edges repeat."""
    for axis, sigma in enumerate(sigmas):
        if not sigma:
            continue
        radius = _radius(sigma)
        kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
        places = np.arange(voxels.shape[axis])
        sources = np.clip(places + np.arange(-radius, radius + 1)[:, None], 0, voxels.shape[axis] - 1)
        weights = np.repeat((kernel / kernel.sum())[:, None], len(places), axis=1).astype(dtype)
        voxels = _interpolate(voxels, axis, sources, weights, dtype, None)
    return voxels


def _spline_coefficients(voxels: NDArray[Any]) -> NDArray[Any]:
    """Return the coefficients of the cubic B-spline through voxels, float64 (Unser 1999, box 2).

    Mirrored at the edges of a region, which is right at the edges of the volume; elsewhere the region is
    `_CUBIC_MARGIN` larger than what is used, so that its edges do not matter.
    """
    found = np.array(voxels, np.float64)
    for axis in _AXES:
        line = np.moveaxis(found, axis, 0)
        length = len(line)
        if length == 1:
            continue
        line *= 6.0
        # Causal: the sum over the mirrored signal, cut where it no longer matters.
        first = line[0].copy()
        for place, power in zip(
            _mirrored(np.arange(1, 30), length).tolist(), (_POLE ** np.arange(1, 30)).tolist(), strict=True
        ):
            first += line[place] * power
        line[0] = first
        for place in range(1, length):
            line[place] += _POLE * line[place - 1]
        line[-1] = (_POLE / (_POLE * _POLE - 1.0)) * (line[-1] + _POLE * line[-2])
        for place in range(length - 2, -1, -1):
            line[place] = _POLE * (line[place + 1] - line[place])
    return found
