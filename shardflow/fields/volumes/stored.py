"""Stored volumes as tables describe them, and which of their voxels a region needs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.volumes.geometry import ONE, Affine, Grid, Shape
from shardflow.fields.volumes.resampling import Region
from shardflow.format.facts.series import SeriesTable
from shardflow.format.keys import STUDY_FIELD
from shardflow.format.volumes.bricks import RegionPlan
from shardflow.storage import ByteRange
from shardflow.storage.cache.store import read_afresh


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
    spacing_mm: float
    """Distance of slices along their normal; the median of those of an irregular series."""
    is_irregular: bool
    """Whether slices are missing, or at irregular distances."""


@dataclass(frozen=True, slots=True)
class Crop:
    """Part of a stored volume to deliver."""

    stored: StoredVolume
    grid: Grid
    """The delivered voxels, in stored coordinates."""
    region: Region | None
    """Stored voxels that are needed; None for none."""
    like: int | None = None
    """Series whose region it is; None for its own."""


class VolumeTable:
    """Columns of a series table that describe volumes."""

    def __init__(self, table: SeriesTable) -> None:
        self._first = table.array("first_series")
        self._sides = [table.array(name) for name in ("num_slices", "rows", "columns")]
        self._dtype, self._dtypes = table.array("dtype"), table.vocabulary("dtype")
        self._affine, self._spacing = table.array("affine_lps"), table.array("slice_spacing_mm")
        self._flags, irregular = table.array("flags"), ("irregular_spacing", "missing_slices")
        self._irregular = sum(1 << place for place, flag in enumerate(table.flags) if flag in irregular)

    def volume(self, study: int, series: int) -> StoredVolume:
        """Return a series of a study."""
        row = int(self._first[study]) + series
        slices, rows, columns = (int(side[row]) for side in self._sides)
        dtype = np.dtype(self._dtypes[int(self._dtype[row])])
        return StoredVolume(
            series,
            (slices, rows, columns),
            dtype,
            Affine.of_series(self._affine[row]),
            float(self._spacing[row]),
            bool(int(self._flags[row]) & self._irregular),
        )

    def geometry(self, studies: NDArray[np.int64], series: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return shape and axes of series, ``(n, 12)``: what decides the shape of an upright grid."""
        rows = self._first[studies].astype(np.int64) + series
        sides = [side[rows].astype(np.float64)[:, None] for side in self._sides]
        return np.concatenate([*sides, self._affine[rows][:, :3, :3].reshape(len(rows), 9)], axis=1)


def slice_knots(shard: Shard, row: int, stored: StoredVolume) -> tuple[float, ...]:
    """Return where the slices of an irregular series lie, in steps of its affine, see `Grid.knots`.

    They are in the description of the study alone, which is read for it.

    Args:
        shard: Holds the sample.
        row: Of the sample in the shard.
        stored: The series.

    Raises:
        BadSample: The description is damaged, or does not state them.
    """
    number = shard.study(row)
    if number is None:
        raise shard.bad(BadSampleReason.FIELD_MISSING, STUDY_FIELD)
    span = ByteRange(int(shard.index.field_offsets[number]), shard.num_bytes(number))
    payload = np.empty(span.num_bytes, np.uint8)
    for read in (shard.store.read_ranges, partial(read_afresh, shard.store)):
        read(shard.path, [span], [payload.data])
        if google_crc32c.value(payload) == int(shard.index.field_crc32c[number]):
            break
    else:
        raise shard.bad(BadSampleReason.CHECKSUM_MISMATCH, number)
    try:
        offsets = json.loads(payload.tobytes())["series"][stored.series]["slice_offsets_mm"]
        knots = tuple(float(offset) / stored.spacing_mm for offset in offsets)
    except (ValueError, TypeError, LookupError, ZeroDivisionError, RecursionError) as error:
        raise shard.bad(BadSampleReason.TEXT_UNREADABLE, number, type(error).__name__) from None
    is_ascending = all(before < after for before, after in pairwise(knots))
    if len(knots) != stored.shape[0] or knots[0] != 0 or not is_ascending or not math.isfinite(knots[-1]):
        raise shard.bad(BadSampleReason.TEXT_UNREADABLE, number, "slice_offsets_mm")
    return knots


def slice_fields(shard: Shard, row: int, crop: Crop | None) -> list[int]:
    """Return the numbers of the slices of a region, and behind them that of the study's description.

    Of a volume in bricks there are no slices, see `brick_plan`.

    Args:
        shard: Holds the sample.
        row: Of the sample in the shard.
        crop: The region; None for none.

    Raises:
        BadSample: Slices are missing.
    """
    if crop is None:
        return []
    study = shard.study(row)
    beside = [] if study is None else [study]
    if crop.region is None or shard.volume_field(row, crop.stored.series) is not None:
        return beside
    stored = shard.slices(row, "full", crop.stored.series)
    if len(stored) != crop.stored.shape[0]:
        detail = f"{len(stored)} slices of series {crop.stored.series}, of {crop.stored.shape[0]}"
        raise shard.bad(BadSampleReason.FIELD_MISSING, "", detail)
    return [*stored[crop.region.slices[0]].tolist(), *beside]


def brick_plan(shard: Shard, row: int, crop: Crop | None) -> RegionPlan | None:
    """Return what to read of a volume in bricks; None where it is stored in slices. Arguments as above.

    Raises:
        BadSample: The stored volume is another one than tables describe.
    """
    if crop is None or crop.region is None:
        return None
    number = shard.volume_field(row, crop.stored.series)
    if number is None:
        return None
    volume = shard.index.volume(number)
    if volume.shape != crop.stored.shape or not np.can_cast(volume.dtype, crop.stored.dtype):
        raise shard.bad(BadSampleReason.SIZE_MISMATCH, number, "another volume than in the series table")
    return volume.plan(crop.region.start, crop.region.stop)


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
