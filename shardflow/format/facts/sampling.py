"""Sample of the voxels of a study: of each class of its regions, and of the body of each volume.

Of each series and class (a label of regions, or the value of a code) at most 256 voxels are chosen, those
whose keyed hashes are the least, so they are spread over all voxels of the class and are the same for any
order of reading. Of a body they are the middles of cells that are no air. `shardflow.format.facts.voxels`
has the tables of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.format.codecs import codec_rank, decode_array
from shardflow.format.contents.regions import Region, read_regions
from shardflow.format.keys import parse_mask_field
from shardflow.format.volumes.bricks import Extents
from shardflow.seeds import derive

MAX_VOXELS: Final = 256
"""Voxels of a class in a series."""
BODY: Final = "@body"
"""Class of the voxels of a volume that are no air; no label has such a name."""
_MIN_VOXELS: Final = 64
_VOXELS_PER_SAMPLED: Final = 6000
"""A sampled voxel takes 6 bytes, and 0.1 % of an image's bytes, at 1 byte a voxel, are for all classes."""
_MAX_BODY_CELLS: Final = 64
_MAX_LAYERS: Final = 64
_CELL_PIXELS: Final = 8
_ONES: Final = np.ones(_CELL_PIXELS, np.float32)
_AIR_HU: Final = -500
_AIR_PERCENT: Final = 10
_THRESHOLD: Final = 0.5
"""Part of a voxel that a fractional mask covers at least."""


@dataclass(frozen=True, slots=True, eq=False)
class ClassVoxels:
    """Voxels of one class in one series."""

    series: int
    """Number of the series in its sample."""
    name: str
    """Label or value of a code; empty for regions that have neither."""
    num_voxels: int
    """Voxels of the class in all."""
    voxels: NDArray[np.uint16]
    """``(n, 3)``: slice, row and column of its sampled voxels, ascending."""
    box: tuple[int, ...]
    """First slice, row and column with a voxel of the class, and those after the last."""


class _Chosen:
    """The voxels of a class whose hashes are the least; slices may come in any order.

    Args:
        key: Of the hashes.
        most: Voxels to choose.
    """

    def __init__(self, key: int, most: int = MAX_VOXELS) -> None:
        self._key, self._most = np.uint64(key), most
        self._places, self._hashes = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        self._slices: dict[int, NDArray[np.bool_]] = {}
        self._low = np.full(3, np.iinfo(np.int64).max)
        self._high = np.zeros(3, np.int64)

    def add(self, index: int, mask: NDArray[np.bool_]) -> None:
        """Add the pixels of a slice."""
        known = self._slices.get(index)
        self._slices[index] = mask if known is None else known | mask

    def choose(self, voxels: NDArray[np.int64]) -> None:
        """Choose among further voxels, ``(n, 3)``."""
        if not len(voxels):
            return
        self._low = np.minimum(self._low, voxels.min(axis=0))
        self._high = np.maximum(self._high, voxels.max(axis=0) + 1)
        self.choose_places(_places(*voxels.astype(np.uint64).T))

    def choose_places(self, places: NDArray[np.uint64]) -> None:
        """Choose among further voxels, as `_places` has them; their box is not taken note of."""
        hashes = np.concatenate([self._hashes, _hash(places ^ self._key)])
        places = np.concatenate([self._places, places])
        if len(places) > self._most:
            least = np.argpartition(hashes, self._most)[: self._most]
            places, hashes = places[least], hashes[least]
        self._places, self._hashes = places, hashes

    def voxels(self) -> NDArray[np.uint16]:
        """Return the chosen voxels, ascending."""
        places = np.sort(self._places)
        parts = [places >> np.uint64(32), places >> np.uint64(16), places]
        return np.stack(parts, axis=1).astype(np.uint16)

    def entry(self, series: int, name: str) -> ClassVoxels | None:
        """Return the sampled voxels; None if there are none."""
        num_voxels = 0
        for index, mask in self._slices.items():
            rows, columns = np.nonzero(mask)
            num_voxels += len(rows)
            self.choose(np.stack([np.full(len(rows), index), rows, columns], axis=1))
        if not num_voxels:
            return None
        box = (*self._low.tolist(), *self._high.tolist())
        return ClassVoxels(series, name, num_voxels, self.voxels(), box)


def max_voxels(shape: Extents, num_classes: int) -> int:
    """Return how many voxels of each class are sampled, so that all take 0.1 % of the bytes of an image.

    Args:
        shape: Slices, rows and columns.
        num_classes: Classes in the series.
    """
    most = math.prod(shape) // _VOXELS_PER_SAMPLED // max(num_classes, 1)
    return min(max(most, _MIN_VOXELS), MAX_VOXELS)


def cell_shape(shape: Extents) -> Extents:
    """Return the slices, rows and columns of a cell of a body, by those of the volume."""
    return -(-shape[0] // _MAX_LAYERS), _CELL_PIXELS, _CELL_PIXELS


class BodyFinder:
    """Finder of the body in a volume, by the means of cells of at most 64 layers and 8 x 8 pixels.

    What is above -500 HU is no air; of another unit what is above a tenth of the way from the 1st to the 99th
    percentile. A table under the patient counts as body.

    Args:
        shape: Slices, rows and columns.
        unit: Of the voxels.

    Attributes:
        indices: Slices to add, the middle ones of the layers, ascending.
    """

    def __init__(self, shape: Extents, unit: str | None) -> None:
        self._shape, self._unit = shape, unit
        step = cell_shape(shape)[0]
        firsts = range(0, shape[0], step)
        self.indices: Sequence[int] = [min(first + step // 2, shape[0] - 1) for first in firsts]
        self._means: dict[int, NDArray[np.float64]] = {}

    def add(self, index: int, pixels: NDArray[Any]) -> None:
        """Take a slice, ``(rows, columns)``; one that is not wanted is ignored."""
        if index not in self.indices:
            return
        sides = self._shape[1:]
        missing = [(0, -side % _CELL_PIXELS) for side in sides]
        whole = pixels.reshape(sides)
        if any(more for _, more in missing):
            whole = np.pad(whole, missing, mode="edge")
        if whole.dtype.kind in "iu" and whole.itemsize <= 2:
            # Sums of 64 such integers are exact in 32-bit floats: a third of the time of integer sums.
            rows = _ONES @ whole.astype(np.float32).reshape(-1, _CELL_PIXELS, whole.shape[1])
            sums = (rows.reshape(len(rows), -1, _CELL_PIXELS) @ _ONES).astype(np.float64)
        else:
            kind = np.float64 if whole.dtype.kind == "f" else np.int64
            rows = whole.reshape(-1, _CELL_PIXELS, whole.shape[1]).sum(axis=1, dtype=kind)
            sums = rows.reshape(len(rows), -1, _CELL_PIXELS).sum(axis=2)
        self._means[index] = sums / _CELL_PIXELS**2

    def entry(self, series: int, key: str) -> ClassVoxels | None:
        """Return middles of cells of the body, and the box around these; None if there is nothing but air.

        Args:
            series: Number of the series.
            key: Of the sample.
        """
        means = np.stack([self._means[index] for index in self.indices])
        is_body = means > self._threshold(means)
        if not is_body.any():
            return None
        # Cells are a grid: what all of them have follows from its layers, rows and columns, without a list.
        sides, ends = cell_shape(self._shape), self._shape
        lows = [np.arange(0, end, side) for side, end in zip(sides, ends, strict=True)]
        highs = [np.minimum(low + side, end) for low, side, end in zip(lows, sides, ends, strict=True)]
        layers, rows, columns = (high - low for low, high in zip(lows, highs, strict=True))
        num_voxels = int(layers @ (is_body @ columns) @ rows)
        known = [np.flatnonzero(is_body.any(axis=others)) for others in ((1, 2), (0, 2), (0, 1))]
        firsts = [int(low[at[0]]) for low, at in zip(lows, known, strict=True)]
        stops = [int(high[at[-1]]) for high, at in zip(highs, known, strict=True)]
        middles = [((low + high) // 2).astype(np.uint64) for low, high in zip(lows, highs, strict=True)]
        chosen = _Chosen(derive(0, f"voxels {key} {BODY}", series), _MAX_BODY_CELLS)
        chosen.choose_places(_places(*np.ix_(*middles))[is_body])
        return ClassVoxels(series, BODY, num_voxels, chosen.voxels(), (*firsts, *stops))

    def _threshold(self, means: NDArray[np.float64]) -> float:
        if self._unit == "HU":
            return _AIR_HU
        known = np.sort(means[np.isfinite(means)])
        if not len(known):
            return math.inf
        low, high = (float(known[(len(known) - 1) * percent // 100]) for percent in (1, 99))
        return low + (high - low) * _AIR_PERCENT / 100


def _places(
    index: NDArray[np.uint64], rows: NDArray[np.uint64], columns: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return a number for each voxel, ascending as they are."""
    places: NDArray[np.uint64] = index << np.uint64(32) | rows << np.uint64(16) | columns
    return places


def _hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit integers (splitmix64, Steele et al. 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def sample_voxels(
    regions: Iterable[Region],
    masks: Callable[[Region, int], NDArray[np.bool_] | None],
    shapes: Mapping[int, Extents],
    *,
    key: str,
) -> list[ClassVoxels]:
    """Sample the voxels of each class in each series of a study.

    Args:
        regions: Of its annotations.
        masks: Returns the stored mask ``(rows, columns)`` of a region in a slice; None if there is none.
        shapes: Slices, rows and columns of each series, by its number.
        key: Key of the sample, which decides the choice.

    Raises:
        FormatError: An outline is malformed.
    """
    classes: dict[tuple[int, str], list[Region]] = {}
    for region in regions:
        for name in region.names or [""]:
            classes.setdefault((region.series, name), []).append(region)
    found = []
    num_classes = Counter(series for series, _ in classes)
    for (series, name), members in sorted(classes.items()):  # one at a time: its masks are in memory
        most = max_voxels(shapes[series], num_classes[series])
        chosen = _Chosen(derive(0, f"voxels {key} {name}", series), most)
        for region in members:
            for index in region.places:
                pixels = masks(region, index)
                if pixels is None and region.volume is None:
                    filled = region.fill(index, shapes[series][1:])
                    pixels = None if filled is None else filled > 0
                if pixels is not None:
                    chosen.add(index, pixels)
        entry = chosen.entry(series, name)
        if entry is not None:
            found.append(entry)
    return found


def voxels_of_study(
    annotations: bytes,
    fields: Mapping[str, bytes],
    shapes: Mapping[int, Extents],
    *,
    key: str,
    read_masks: Callable[[int, int], NDArray[Any]] | None = None,
) -> list[ClassVoxels]:
    """Sample the voxels of each class from what is stored of a study.

    Args:
        annotations: ``annotations.json``.
        fields: Its members; those that are masks are used.
        shapes: Slices, rows and columns of each series, by its number.
        key: Key of the sample.
        read_masks: Returns a volume of masks in bricks, of a series and named after a region.

    Raises:
        FormatError: A member is damaged.
    """
    stored: dict[tuple[int, int, int], tuple[str, bytes]] = {}
    for name, payload in fields.items():
        part = parse_mask_field(name)
        if part is not None and codec_rank(part.codec) is not None:
            stored[part.series, part.roi, part.index] = part.codec, payload
    held: dict[tuple[int, int], NDArray[Any]] = {}

    def mask(region: Region, index: int) -> NDArray[np.bool_] | None:
        if region.volume is not None and read_masks is not None:
            place = region.series, region.volume
            if place not in held:
                held.clear()  # one volume of small numbers is in memory
                held[place] = read_masks(*place)
            is_inside = region.table(held[place].dtype, _THRESHOLD)
            found: NDArray[np.bool_] = is_inside[held[place][index]]
            return found
        known = stored.get((region.series, region.number, index))
        return None if known is None else decode_array(*known) >= region.mask_level(_THRESHOLD)

    regions = [one for one in read_regions(annotations) if one.series in shapes]
    return sample_voxels(regions, mask, shapes, key=key)
