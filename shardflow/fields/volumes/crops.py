"""Positions of regions: anywhere, around a voxel of a class, at a finding, or in the middle.

All are integers of the plan's keyed generator, so a region is the same on any number of ranks, in any
execution and after a resume.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.catalog import SelectedSeries
from shardflow.fields.field import DrawKey, FieldContext
from shardflow.fields.volumes.geometry import Grid, Shape, Vector
from shardflow.format.facts.sampling import BODY
from shardflow.format.facts.voxels import VoxelsManifest, VoxelTable
from shardflow.sampling import Permutation
from shardflow.seeds import derive

_LOGGER = logging.getLogger(__name__)
_WORD_BITS: Final = 64
_MAX_LISTED: Final = 12
_MAX_ORDERS: Final = 4


def random_start(lengths: Shape, size: Shape, draw: DrawKey) -> Shape:
    """Return where a region begins that is anywhere inside; along a shorter axis it is centered."""
    found = []
    for axis, (length, side) in enumerate(zip(lengths, size, strict=True)):
        room = length - side
        word = draw.derive(f"volume-start-{axis}") if room > 0 else 0
        found.append((room + 1) * word >> _WORD_BITS if room > 0 else room // 2)
    return found[0], found[1], found[2]


def start_around(grid: Grid, size: Shape, place: Vector) -> Shape:
    """Return where a region begins around a place among the stored voxels, moved so that it is inside.

    Along an axis that is shorter than the region it is centered, as MONAI's crops with ``allow_smaller``.
    """
    found = []
    for length, side, at in zip(grid.shape, size, grid.point(place), strict=True):
        room = length - side
        found.append(min(max(int(at + 0.5) - side // 2, 0), room) if room > 0 else room // 2)
    return found[0], found[1], found[2]


class Foreground:
    """Rule that deals regions around voxels of classes among the samples. Safe for many threads.

    Of every ``pos + neg`` regions of an epoch ``pos`` are around a voxel of a class, exactly (rounded down):
    the samples that have one take turns in a keyed order of the epoch. Where they are too few, all of theirs
    are. In a blend, and with weights, a sample may come several times, and each region is drawn by itself.

    Args:
        name: Name of the field.
        labels: Classes; None for all.
        pos: Weight of regions around a voxel of a class.
        neg: Weight of regions anywhere.
        num_crops: Regions of each sample.
        selected: Series that the field selects.
        context: The samples and their tables.

    Raises:
        ConfigError: A dataset has no voxel table, or no sample has any of the labels.
    """

    def __init__(
        self,
        name: str,
        labels: Sequence[str] | None,
        *,
        pos: float,
        neg: float,
        num_crops: int,
        selected: SelectedSeries,
        context: FieldContext,
    ) -> None:
        self._num_crops = num_crops
        opened: dict[str, tuple[VoxelTable, str]] = {}
        for dataset in context.samples.datasets:
            if dataset.manifest.dataset_id not in opened:
                opened[dataset.manifest.dataset_id] = VoxelsManifest.open(dataset)
        found = [opened[dataset.manifest.dataset_id] for dataset in context.samples.datasets]
        self._tables = [table for table, _ in found]
        self.digests = [digest for _, digest in found]
        self._check_labels(name, labels)
        self._is_wanted = [
            np.array([one != BODY and (labels is None or one in labels) for one in table.names], bool)
            for table in self._tables
        ]
        self._rows: list[NDArray[np.int64]] = []
        self._shares: list[Fraction] = []
        wanted = Fraction(str(pos)) / (Fraction(str(pos)) + Fraction(str(neg)))
        for place, population in enumerate(context.populations):
            delivered = selected.first_series(place)
            has_voxels = self._series_with(place, selected.catalog.tables[place].first_series())
            has_class = population & (delivered >= 0)
            num_samples = int(np.count_nonzero(has_class))
            has_class[has_class] = has_voxels[delivered[has_class]]
            rows = np.flatnonzero(has_class)
            self._rows.append(rows)
            self._shares.append(min(Fraction(1), wanted * num_samples / max(len(rows), 1)))
            if wanted * num_samples > len(rows):
                _LOGGER.warning(
                    "field %r: %d of %d samples have a voxel of its labels, too few for %.3g of the regions",
                    name,
                    len(rows),
                    num_samples,
                    float(wanted),
                )
        if not any(len(rows) for rows in self._rows):
            raise ConfigError(
                f"No sample has a voxel of the labels of the field {name!r}; write center='random', or other "
                "labels."
            )
        self._orders: dict[tuple[int, int, int], Permutation] = {}

    def _check_labels(self, name: str, labels: Sequence[str] | None) -> None:
        known = sorted({one for table in self._tables for one in table.names} - {"", BODY})
        for label in labels or ():
            if label not in known:
                near = difflib.get_close_matches(label, known, n=1)
                there = ", ".join(map(repr, known[:_MAX_LISTED])) or "none"
                hint = f"did you mean {near[0]!r}?" if near else f"there are {there}."
                raise ConfigError(f"The label {label!r} of the field {name!r} is of no region; {hint}")

    def _series_with(self, place: int, first_series: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which series of a dataset have a voxel of a wanted class."""
        table = self._tables[place]
        studies = np.repeat(np.arange(table.num_samples), np.diff(table.first_entry))
        wanted = self._is_wanted[place][table.name]
        found = np.zeros(int(first_series[-1]), bool)
        found[(first_series[studies] + table.series)[wanted]] = True
        return found

    def place(self, draw: DrawKey, component: int, study: int, series: int) -> Vector | None:
        """Return the stored voxel that a region is around; None for a region anywhere.

        Args:
            draw: Key of the region.
            component: Component of a blend.
            study: Row of the study.
            series: Number of the delivered series.
        """
        if not self._is_foreground(draw, component):
            return None
        table, wanted = self._tables[component], self._is_wanted[component]
        first, stop = table.first_entry[study : study + 2].tolist()
        entries = [
            entry
            for entry in range(first, stop)
            if int(table.series[entry]) == series and wanted[int(table.name[entry])]
        ]
        if not entries:
            return None
        # A class that few voxels have is as likely as any other, as in nnU-Net.
        entry = entries[len(entries) * draw.derive("volume-class") >> _WORD_BITS]
        voxels = table.voxels(entry)
        z, y, x = voxels[len(voxels) * draw.derive("volume-voxel") >> _WORD_BITS].tolist()
        return float(z), float(y), float(x)

    def _is_foreground(self, draw: DrawKey, component: int) -> bool:
        rows, share = self._rows[component], self._shares[component]
        rank = int(np.searchsorted(rows, draw.table_row))
        if rank >= len(rows) or int(rows[rank]) != draw.table_row:
            return False
        if draw.place:
            return draw.derive("volume-foreground") * share.denominator < share.numerator << _WORD_BITS
        key = draw.seed, draw.epoch, component
        order = self._orders.get(key)
        if order is None:
            if len(self._orders) >= _MAX_ORDERS:
                self._orders.clear()
            order = Permutation(len(rows), derive(draw.seed, "volume-foreground", draw.epoch, component))
            self._orders[key] = order
        turn = int(order(np.array([rank]))[0]) * self._num_crops + draw.crop
        return turn * share.numerator % share.denominator + share.numerator >= share.denominator
