"""Make slices smaller by averaging areas: exact, so that the bytes are the same on every machine.

A pixel of the result is the mean of the pixels under it, those at its edges by their part. For integers of
up to 16 bits all sums are integers and the mean is rounded once, half up. A mean keeps the unit (HU of the
mean attenuation) and never leaves the range of its pixels, as sharper filters do. Padding is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["fit_within", "scale_affine", "shrink"]

Matrix = list[list[float]]


def fit_within(rows: int, columns: int, max_side: int) -> tuple[int, int]:
    """Return the size of a smaller version with the same shape; the size itself where it fits.

    Example:
        >>> fit_within(512, 384, 128), fit_within(100, 60, 128)
        ((128, 96), (100, 60))
    """
    longest = max(rows, columns)
    if longest <= max_side:
        return rows, columns
    small = [max((2 * side * max_side + longest) // (2 * longest), 1) for side in (rows, columns)]
    return small[0], small[1]


def shrink(
    pixels: NDArray[Any],
    rows: int,
    columns: int,
    *,
    valid: NDArray[np.bool_] | None = None,
    fill: float = 0,
) -> NDArray[Any]:
    """Average a slice to a smaller size.

    Args:
        pixels: ``(R, C)`` or ``(R, C, samples)``.
        rows: At most R.
        columns: At most C.
        valid: ``(R, C)``, False at padding, which takes no part.
        fill: What a pixel becomes under which all is padding.

    Returns:
        ``(rows, columns)`` or ``(rows, columns, samples)`` of the same dtype.
    """
    is_exact = pixels.dtype.kind in "iub" and pixels.dtype.itemsize <= 2
    exact = np.dtype(np.int64 if is_exact else np.float64)
    mask = None if valid is None else valid.reshape(*valid.shape, *(1,) * (pixels.ndim - 2))
    values = pixels if mask is None else np.where(mask, pixels, pixels.dtype.type(0))
    sums = _sums(values, rows, columns, exact)
    # Every pixel of the result has R x C units of area, if none of them is padding.
    areas: Any = exact.type(pixels.shape[0] * pixels.shape[1])
    if mask is not None:
        areas = _sums(mask, rows, columns, exact)
    known = np.maximum(areas, 1)
    means = (2 * sums + known) // (2 * known) if is_exact else sums / known
    return np.where(areas > 0, means, fill).astype(pixels.dtype)


def _sums(values: NDArray[Any], rows: int, columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Sum what lies under each pixel of the result, weighted by area, in units of 1 / (rows x columns)."""
    by_rows = _sum_rows(values, rows, dtype)
    return np.swapaxes(_sum_rows(np.ascontiguousarray(np.swapaxes(by_rows, 0, 1)), columns, dtype), 0, 1)


def _sum_rows(values: NDArray[Any], num_rows: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    size = len(values)
    if size % num_rows == 0:
        parts = values.reshape(num_rows, size // num_rows, *values.shape[1:])
        return np.asarray(parts.sum(axis=1, dtype=dtype) * dtype.type(num_rows))
    sums = np.empty((num_rows, *values.shape[1:]), dtype)
    for row in range(num_rows):
        # Each row of the source is num_rows units long, each of the result size units.
        first, start = divmod(row * size, num_rows)
        last, stop = divmod((row + 1) * size - 1, num_rows)
        sums[row] = values[first].astype(dtype) * dtype.type(num_rows - start)
        sums[row] += values[last].astype(dtype) * dtype.type(stop + 1)
        sums[row] += values[first + 1 : last].sum(axis=0, dtype=dtype) * dtype.type(num_rows)
        if first == last:
            sums[row] = values[first].astype(dtype) * dtype.type(size)
    return sums


def scale_affine(affine: Matrix, row_factor: float, column_factor: float) -> Matrix:
    """Return the affine of a version whose pixels are larger.

    The corners of the image stay where they are, so the centre of the first pixel moves by half of what the
    pixels grow.

    Args:
        affine: 4 x 4: maps ``(column, row, slice, 1)`` to mm, at pixel centres.
        row_factor: How much the distance between rows grows.
        column_factor: How much the distance between columns grows.
    """
    shift_column, shift_row = (column_factor - 1) / 2, (row_factor - 1) / 2
    return [
        [
            line[0] * column_factor,
            line[1] * row_factor,
            line[2],
            line[3] + line[0] * shift_column + line[1] * shift_row,
        ]
        for line in affine
    ]
