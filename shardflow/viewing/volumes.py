"""Planes of volumes along each of their axes, with regions: from slices and from bricks alike.

Of a series in bricks only the layer of bricks is read that a plane crosses; of one in slices a plane across
them needs all, which are read once. What was read last is kept, so that scrolling costs no read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.format import Dataset
from shardflow.format.regions import Region, read_regions
from shardflow.viewing.studies import MAX_BYTES, RawArray, Studies, raw_pixels

_AXES: Final = ("slices", "rows", "columns")


class Volumes:
    """Reads planes of volumes; safe to share between threads.

    Args:
        dataset: The dataset.
        studies: Its slices and masks.
    """

    def __init__(self, dataset: Dataset, studies: Studies) -> None:
        self._dataset = dataset
        self._studies = studies
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, NDArray[Any]] = OrderedDict()

    def plane(self, row: int, series: int, axis: int, index: int) -> RawArray:
        """Return a plane of a volume in the unit of its series.

        Args:
            row: Of the sample.
            series: Number of the series.
            axis: 0 for a slice; 1 for all slices at one row, ``(slices, columns)``; 2 for all slices at one
                column, ``(slices, rows)``.
            index: Of the slice, row or column.

        Raises:
            ConfigError: There is no such plane, or the volume is too large to be drawn.
            ShardflowError: It is damaged.
        """
        self._studies.check_row(row)
        volume = self._dataset.volume(row, series)
        if volume is None:
            if axis == 0:
                return self._studies.slice(row, series, index)
            _check_index(axis, index, self._studies.shape(row, series))
            stack = self._hold((row, series), lambda: self._stack(row, series))
            return raw_pixels(stack.take(index, axis=axis))
        _check_index(axis, index, volume.shape)
        side = volume.brick_shape[axis]
        first = index // side * side
        start, stop = [0, 0, 0], [*volume.shape]
        start[axis], stop[axis] = first, min(first + side, volume.shape[axis])
        sides = [last - begin for begin, last in zip(start, stop, strict=True)]
        _check_size(sides, volume.dtype)
        slab = self._hold(
            (row, series, axis, first), lambda: self._dataset.read_volume(row, series, start, stop)
        )
        return raw_pixels(slab.take(index - first, axis=axis))

    def region(self, row: int, series: int, number: int, axis: int, index: int) -> RawArray:
        """Return where a region covers a plane: uint8, 0 and 1, of stored fractions up to 255.

        Stored masks, in slices or bricks, else filled outlines or boxes.

        Args:
            row: Of the sample.
            series: Number of the series.
            number: Of the region in ``annotations.json``.
            axis: As of `plane`.
            index: Likewise.

        Raises:
            ConfigError: There is no such region or plane.
            ShardflowError: It is damaged.
        """
        shape = self._studies.shape(row, series)
        _check_index(axis, index, shape)
        found = read_regions(self._studies.annotations(row))
        regions = [one for one in found if (one.number, one.series) == (number, series) and one.places]
        if not regions:
            raise ConfigError("the series has no such region.")
        region = regions[0]
        first, last = min(region.places), max(region.places)
        if not 0 <= first <= last < shape[0]:
            raise FormatError("annotations.json names slices that the series does not have.")
        if axis == 0 and region.volume is None:
            return raw_pixels(self._slice_of(row, region, index, shape))
        covered = self._hold(
            (row, series, "region", number), lambda: self._covered(row, region, slice(first, last + 1), shape)
        )
        plane = np.zeros([side for k, side in enumerate(shape) if k != axis], np.uint8)
        if axis:
            plane[first : last + 1] = covered.take(index, axis=axis)
        elif first <= index <= last:
            plane = covered[index - first]
        return raw_pixels(plane)

    def _stack(self, row: int, series: int) -> NDArray[Any]:
        shape = self._studies.shape(row, series)
        planes: NDArray[Any] | None = None
        for index in range(shape[0]):
            plane = self._studies.pixels(row, series, index)
            if planes is None:
                _check_size(shape, plane.dtype)
                planes = np.empty((shape[0], *plane.shape), plane.dtype)
            if plane.shape != planes.shape[1:] or plane.ndim != 2:
                raise ConfigError("planes across slices need slices of one size, without color.")
            planes[index] = plane
        assert planes is not None  # noqa: S101 - a series has slices
        return planes

    def _covered(
        self, row: int, region: Region, slices: slice, shape: tuple[int, int, int]
    ) -> NDArray[np.uint8]:
        """Return what a region covers of some slices, ``(slices, rows, columns)``."""
        _check_size((slices.stop - slices.start, *shape[1:]), np.dtype(np.uint8))
        if region.volume is not None:
            values = self._dataset.read_masks(row, region.series, region.volume, slices)
            is_parts = region.is_fractional
            return np.asarray(values if is_parts else region.table(values.dtype)[values], np.uint8)
        planes = [self._slice_of(row, region, index, shape) for index in range(slices.start, slices.stop)]
        return np.stack(planes)

    def _slice_of(
        self, row: int, region: Region, index: int, shape: tuple[int, int, int]
    ) -> NDArray[np.uint8]:
        mask = self._studies.mask(row, region.series, region.number, index)
        mask = region.fill(index, shape[1:]) if mask is None else mask
        return np.zeros(shape[1:], np.uint8) if mask is None else mask

    def _hold(self, key: Hashable, read: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        # Serialized: concurrent requests mostly want the same volume.
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            found = self._held[key] = read()
            num_bytes = sum(one.nbytes for one in self._held.values())
            while num_bytes > MAX_BYTES and len(self._held) > 1:
                num_bytes -= self._held.popitem(last=False)[1].nbytes
            return found


def _check_index(axis: int, index: int, shape: tuple[int, ...]) -> None:
    if axis >= len(_AXES) or index >= shape[axis]:
        sides = ", ".join(f"{side} {name}" for side, name in zip(shape, _AXES, strict=False))
        raise ConfigError(f"the volume has {sides}; there is no plane {index} of axis {axis}.")


def _check_size(shape: Any, dtype: np.dtype[Any]) -> None:
    num_bytes = int(np.prod([*shape], dtype=np.int64)) * dtype.itemsize
    if num_bytes > MAX_BYTES:
        raise ConfigError(
            f"volumes of at most {MAX_BYTES >> 20} MiB can be drawn across their slices; this one has "
            f"{num_bytes >> 20} MiB. Read a region of it from Python."
        )
