"""Stored volumes as tables describe them, and which of their voxels a region needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.volumes.geometry import ONE, Affine, Grid, Shape
from shardflow.fields.volumes.resampling import Region
from shardflow.format.series import SeriesTable


@dataclass(frozen=True, slots=True)
class StoredVolume:
    """Series that is stored as slices, as tables describe it."""

    series: int
    """Number of the series in its sample."""
    shape: Shape
    """Slices, rows and columns."""
    dtype: np.dtype[Any]
    affine: Affine | None
    """None where the geometry is unknown."""


@dataclass(frozen=True, slots=True)
class Crop:
    """Part of a stored volume to deliver."""

    stored: StoredVolume
    grid: Grid
    """The delivered voxels, in stored coordinates."""
    region: Region | None
    """Stored voxels that are needed; None for none."""


class VolumeTable:
    """Columns of a series table that describe volumes."""

    def __init__(self, table: SeriesTable) -> None:
        self._first = table.array("first_series")
        self._sides = [table.array(name) for name in ("num_slices", "rows", "columns")]
        self._dtype, self._dtypes = table.array("dtype"), table.vocabulary("dtype")
        self._affine = table.array("affine_lps")

    def volume(self, study: int, series: int) -> StoredVolume:
        """Return a series of a study."""
        row = int(self._first[study]) + series
        slices, rows, columns = (int(side[row]) for side in self._sides)
        dtype = np.dtype(self._dtypes[int(self._dtype[row])])
        return StoredVolume(series, (slices, rows, columns), dtype, Affine.of_series(self._affine[row]))


def is_covered(crop: Crop) -> bool:
    """Return whether every delivered voxel is inside of the stored volume."""
    half = ONE >> 1
    sides = zip(crop.grid.extent(), crop.stored.shape, strict=True)
    return all(low >= -half and high < length * ONE - half for (low, high), length in sides)


def stored_view(target: NDArray[Any], grid: Grid, region: Region) -> NDArray[Any]:
    """Return the delivered voxels that are those of a region, with the axes of the stored volume.

    Args:
        target: ``(D, H, W)``, of the grid's shape.
        grid: One whose points are stored voxels.
        region: Stored voxels that it shows.
    """
    order = grid.order
    view = target.transpose(order)
    spans = []
    for a, k in enumerate(order):
        base = int(grid.origin[a])
        if grid.steps[a][k] < 0:
            view = np.flip(view, a)
            base -= grid.shape[k] - 1
        spans.append(slice(region.start[a] - base, region.stop[a] - base))
    return view[tuple(spans)]
