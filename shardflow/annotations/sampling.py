"""A stack of labelled planes, read at the pixels of a stored slice.

Each pixel of a slice takes the label of the plane that is nearest to its centre along the planes' normal, and
there of the nearest pixel; beyond the planes, and beyond half their pitch, there is nothing. On the grid that
the labels were drawn on this copies them, turned and flipped as need be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.annotations.targets import Floats, Plane, Target

__all__ = ["Footprint", "PlaneStack"]

_ON_SLICE: float = 0.05
"""A plane lies in a slice when it is no farther away than this share of a slice's thickness."""
_STRAIGHT = 1e-3
"""Share of a pixel by which a grid may be askew and still be read row by row and column by column."""

Plate = NDArray[Any]
"""Pixels of one plane, ``(rows, columns)``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Where the pixels of one slice lie in a stack of planes."""

    shape: tuple[int, int]
    """Rows and columns of a plane."""
    position: NDArray[np.int64]
    """Plane of each pixel, -1 for none: ``()`` where the slice lies in one, else ``(rows, columns)``."""
    row: NDArray[np.int64]
    """Row in the plane: ``(rows, 1)`` or ``(rows, columns)``."""
    column: NDArray[np.int64]
    """Column in the plane: ``(1, columns)`` or ``(rows, columns)``."""

    def planes(self) -> list[int]:
        """Positions of the planes that the slice meets, ascending."""
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
        """How far a plane reaches to each side.

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
        """Find where the pixels of a slice lie.

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
