"""Positions of regions: anywhere, around a voxel of a class or of the body, at a place of a table.

All are integers of the plan's keyed generator, so a region is the same on any number of ranks, in any
execution and after a resume.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.catalog import SelectedSeries
from shardflow.fields.field import DrawKey, FieldContext
from shardflow.fields.types.columns import find_column
from shardflow.fields.volumes.geometry import Affine, Grid, Shape, Vector
from shardflow.fields.volumes.stored import StoredVolume
from shardflow.format.entities import EntityTable
from shardflow.format.facts.columns import open_columns
from shardflow.format.facts.sampling import BODY, cell_shape
from shardflow.format.facts.voxels import VoxelsManifest, VoxelTable
from shardflow.sampling import Permutation
from shardflow.seeds import derive

_LOGGER = logging.getLogger(__name__)
_WORD_BITS: Final = 64
_MAX_LISTED: Final = 12
_MAX_ORDERS: Final = 4
_POINT: Final = 3


def random_start(lengths: Shape, size: Shape, draw: DrawKey) -> Shape:
    """Return where a region begins that is anywhere inside; along a shorter axis it is centered."""
    found = []
    for axis, (length, side) in enumerate(zip(lengths, size, strict=True)):
        room = length - side
        word = draw.derive(f"volume-start-{axis}") if room > 0 else 0
        found.append((room + 1) * word >> _WORD_BITS if room > 0 else room // 2)
    return found[0], found[1], found[2]


def start_around(lengths: Shape, size: Shape, place: Vector) -> Shape:
    """Return where a region begins around a point, moved so that it is inside.

    Along an axis that is shorter than the region it is centered, as MONAI's crops with ``allow_smaller``.
    """
    found = []
    for length, side, at in zip(lengths, size, place, strict=True):
        room = length - side
        found.append(min(max(int(at + 0.5) - side // 2, 0), room) if room > 0 else room // 2)
    return found[0], found[1], found[2]


def start_at_box(lengths: Shape, size: Shape, low: Vector, high: Vector, draw: DrawKey) -> Shape:
    """Return where a region begins that holds a box, or along an axis where that is longer lies in it.

    It is one of all such places, moved so that it is inside of the volume; around a box of one point.

    Args:
        lengths: Of the volume.
        size: Of the region.
        low: Corner of the box, in points of the volume, between two of them too.
        high: The other corner, whose coordinates are no smaller.
        draw: Key of the region.
    """
    if low == high:
        return start_around(lengths, size, low)
    found = []
    for axis, (length, side, first, last) in enumerate(zip(lengths, size, low, high, strict=True)):
        # The voxels that the corners are in.
        ends = math.floor(first + 0.5), math.floor(last + 0.5) - side + 1
        room = length - side
        if room <= 0:
            found.append(room // 2)
            continue
        least, most = (min(max(end, 0), room) for end in sorted(ends))
        found.append(least + ((most - least + 1) * draw.derive(f"volume-box-{axis}") >> _WORD_BITS))
    return found[0], found[1], found[2]


class VoxelTables:
    """Voxel tables of the datasets of a field.

    Args:
        context: The samples and their tables.

    Raises:
        ConfigError: A dataset has none.
    """

    def __init__(self, context: FieldContext) -> None:
        opened: dict[str, tuple[VoxelTable, str]] = {}
        for dataset in context.samples.datasets:
            if dataset.manifest.dataset_id not in opened:
                opened[dataset.manifest.dataset_id] = VoxelsManifest.open(dataset)
        found = [opened[dataset.manifest.dataset_id] for dataset in context.samples.datasets]
        self.tables = [table for table, _ in found]
        self.digests = [digest for _, digest in found]

    def labels(self) -> list[str]:
        """Return the labels of regions that there are, ascending."""
        return sorted({one for table in self.tables for one in table.names} - {"", BODY})

    def entries(self, component: int, study: int, series: int, is_wanted: NDArray[np.bool_]) -> list[int]:
        """Return the entries of a series in the table of a dataset, of some of its classes."""
        table = self.tables[component]
        first, stop = table.first_entry[study : study + 2].tolist()
        return [
            entry
            for entry in range(first, stop)
            if int(table.series[entry]) == series and is_wanted[int(table.name[entry])]
        ]

    def check_boxes(self, name: str) -> None:
        """Refuse tables of former versions, which have neither boxes nor bodies.

        Raises:
            ConfigError: One is such.
        """
        if not all(table.has_boxes for table in self.tables):
            raise ConfigError(
                f"The voxel table that the field {name!r} needs has no boxes and no bodies yet; make it "
                "again: shardflow attach DATASET --voxels"
            )


class Body:
    """Places in the bodies of volumes, and the boxes around these or around classes.

    Args:
        name: Name of the field.
        labels: Classes whose box is wanted; None for the body.
        context: The samples and their tables.

    Raises:
        ConfigError: A dataset has no voxel table with bodies.
    """

    def __init__(self, name: str, labels: Sequence[str] | None, context: FieldContext) -> None:
        self._voxels = VoxelTables(context)
        self._voxels.check_boxes(name)
        wanted = {BODY} if labels is None else {*labels}
        if labels is not None:
            check_labels(name, labels, self._voxels)
        self._is_wanted = [
            np.array([one in wanted for one in each.names], bool) for each in self._voxels.tables
        ]
        self.digests = self._voxels.digests

    def box(self, component: int, study: int, series: int) -> tuple[int, ...] | None:
        """Return the box around the body, or around all of the classes; None where there are none."""
        entries = self._voxels.entries(component, study, series, self._is_wanted[component])
        if not entries:
            return None
        boxes = np.array([self._voxels.tables[component].box(entry) for entry in entries])
        return *boxes[:, :3].min(axis=0).tolist(), *boxes[:, 3:].max(axis=0).tolist()

    def place(self, draw: DrawKey, component: int, study: int, stored: StoredVolume) -> Vector | None:
        """Return a stored voxel of the body; None where there is none."""
        entries = self._voxels.entries(component, study, stored.series, self._is_wanted[component])
        if not entries:
            return None
        voxels = self._voxels.tables[component].voxels(entries[0])
        voxel = voxels[len(voxels) * draw.derive("volume-voxel") >> _WORD_BITS].tolist()
        found = []
        # The table has middles of cells; any of their voxels is meant.
        for axis, (at, side, length) in enumerate(
            zip(voxel, cell_shape(stored.shape), stored.shape, strict=True)
        ):
            moved = at - side // 2 + (side * draw.derive(f"volume-cell-{axis}") >> _WORD_BITS)
            found.append(float(min(max(moved, 0), length - 1)))
        return found[0], found[1], found[2]


class Findings:
    """Places of findings of an entity view. Safe for many threads.

    A view says which slices show a finding, and which best. Where in them it is, sampled voxels of regions
    with its label say, if the dataset has a voxel table; otherwise the middle is taken.

    Args:
        name: Name of the field.
        context: The samples and their tables.

    Raises:
        ConfigError: Samples are no findings.
    """

    def __init__(self, name: str, context: FieldContext) -> None:
        tables = [dataset.samples for dataset in context.samples.datasets]
        self._views = [table if isinstance(table, EntityTable) else None for table in tables]
        if not any(self._views):
            raise ConfigError(
                f"center='finding' of the field {name!r} is around a finding of a report, and samples "
                "are no findings; write unit='entity' for the loader, or center='foreground' for regions "
                "around annotations."
            )
        try:
            self._voxels: VoxelTables | None = VoxelTables(context)
        except ConfigError:
            _LOGGER.info(
                "field %r: regions are in the middle of the slices that show findings, as a dataset has no "
                "voxel table (`shardflow attach DATASET --voxels`)",
                name,
            )
            self._voxels = None
        self.digests = [] if self._voxels is None else self._voxels.digests

    def place(self, component: int, row: int, study: int, stored: StoredVolume, index: int) -> Vector:
        """Return the stored point that a region is around.

        Args:
            component: Component of a blend.
            row: Of the finding in its view.
            study: Row of its study.
            stored: The delivered volume.
            index: Of the slice that shows the finding best.
        """
        voxels = self._marked(component, row, study, stored.series)
        if not len(voxels):
            return float(index), (stored.shape[1] - 1) / 2, (stored.shape[2] - 1) / 2
        places = voxels[:, 1:]
        # Of several lesions the mean may be between them.
        nearest = np.square(places - places.mean(axis=0)).sum(axis=1).argmin()
        y, x = places[nearest].tolist()
        return float(index), float(y), float(x)

    def _marked(self, component: int, row: int, study: int, series: int) -> NDArray[np.int64]:
        """Return the sampled voxels of regions with the label of a finding, in the slices that show it."""
        nothing = np.zeros((0, 3), np.int64)
        view = self._views[component]
        if self._voxels is None or view is None:
            return nothing
        table = self._voxels.tables[component]
        label = int(view.gather("label", row))
        names = {view.labels[label]} if view.label_names is None else view.label_names[label]
        names = names | {view.labels[label]}
        is_wanted = np.array([one in names for one in table.names], bool)
        entries = self._voxels.entries(component, study, series, is_wanted)
        found = np.concatenate([nothing, *(table.voxels(entry) for entry in entries)])
        shown = view.place(row).slices[view.weights(row) > 0]
        return found[np.isin(found[:, 0], shown)]


class ColumnPlaces:
    """Places of regions in a column of an attached table: points or boxes in LPS millimeters.

    Args:
        name: Name of the field.
        column: Name of the column, of lists of 3 numbers (a point) or 6 (the corners of a box).
        context: The samples and their tables.

    Raises:
        ConfigError: There is no such column, it is of another kind, or no sample has a value.
    """

    def __init__(self, name: str, column: str, context: FieldContext) -> None:
        self._column = column
        self._columns = [open_columns(dataset) for dataset in context.samples.datasets]
        has_value = []
        for columns, population in zip(self._columns, context.populations, strict=True):
            find_column(column, columns)
            if columns[column].kind != "floats":
                raise self._wrong(name, columns[column].kind)
            width = columns.gather(column, np.zeros(0, np.int64)).values.shape[1]
            if width not in (_POINT, 2 * _POINT):
                raise self._wrong(name, f"lists of {width}")
            missing = columns.column(column).is_missing
            has_value.append(population if missing is None else population & ~missing)
        num_places = sum(int(np.count_nonzero(each)) for each in has_value)
        if not num_places:
            raise ConfigError(
                f"No sample has a value of {column} for center= of the field {name!r}; write another column, "
                "or center='random'."
            )
        if num_places < context.num_samples:
            _LOGGER.warning(
                "field %r: %d of %d samples have a place in %s; regions of the others are anywhere",
                name,
                num_places,
                context.num_samples,
                column,
            )
        self.digests = [*dict.fromkeys(columns.digest(column) for columns in self._columns)]

    def _wrong(self, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"center={self._column!r} of the field {name!r} is a column of places: lists of 3 numbers (a "
            f"point) or 6 (two corners of a box) in LPS mm, got {what}; attach such a table."
        )

    @property
    def table(self) -> str:
        """Name of the attached table."""
        return self._column.partition(".")[0]

    def corners(
        self, component: int, row: int, grid: Grid, affine: Affine | None
    ) -> tuple[Vector, Vector] | None:
        """Return the least and greatest coordinates of a sample's place in a grid; None where it has none.

        Args:
            component: Component of a blend.
            row: Of the sample in its dataset's own table.
            grid: Of the whole volume.
            affine: Of the stored volume.
        """
        found = self._columns[component].gather(self._column, np.array([row], np.int64))
        values = [float(value) for value in found.values[0]]
        is_missing = found.is_missing is not None and bool(found.is_missing[0])
        if affine is None or is_missing or not all(map(math.isfinite, values)):
            return None
        mapped = grid.affine(affine)
        ends = [*zip(values[:_POINT], values[-_POINT:], strict=True)]
        points = [
            tuple(
                sum(row[i] * (corner[i] - mapped.origin[i]) for i in range(_POINT))
                for row in mapped.inverse()
            )
            for corner in itertools.product(*ends)
        ]
        low, high = (tuple(end(axis) for axis in zip(*points, strict=True)) for end in (min, max))
        return (low[0], low[1], low[2]), (high[0], high[1], high[2])


def check_labels(name: str, labels: Sequence[str] | None, voxels: VoxelTables) -> None:
    """Refuse labels that no region has.

    Raises:
        ConfigError: One is such.
    """
    known = voxels.labels()
    for label in labels or ():
        if label not in known:
            near = difflib.get_close_matches(label, known, n=1)
            there = ", ".join(map(repr, known[:_MAX_LISTED])) or "none"
            hint = f"did you mean {near[0]!r}?" if near else f"there are {there}."
            raise ConfigError(f"The label {label!r} of the field {name!r} is of no region; {hint}")


class Turns:
    """Rule that deals a share of the crops of an epoch among samples, exactly. Safe for many threads.

    Of every `denominator` crops of a component `numerator` are dealt (rounded down): its samples take turns
    in a keyed order of the epoch. In a blend, and with weights, a sample may come several times, and each
    crop is drawn by itself.

    Args:
        key: Name of the choice.
        rows: For each component the rows of its own table that take turns, ascending.
        shares: Share of each component.
        num_crops: Crops of each sample.
    """

    def __init__(
        self, key: str, rows: Sequence[NDArray[np.int64]], shares: Sequence[Fraction], num_crops: int
    ) -> None:
        self._key, self._rows, self._shares, self._num_crops = key, rows, shares, num_crops
        self._orders: dict[tuple[int, int, int], Permutation] = {}

    def is_turn(self, draw: DrawKey, component: int) -> bool:
        """Return whether a crop is one of those that are dealt."""
        rows, share = self._rows[component], self._shares[component]
        rank = int(np.searchsorted(rows, draw.table_row))
        if rank >= len(rows) or int(rows[rank]) != draw.table_row:
            return False
        if draw.place:
            return draw.derive(self._key) * share.denominator < share.numerator << _WORD_BITS
        key = draw.seed, draw.epoch, component
        order = self._orders.get(key)
        if order is None:
            if len(self._orders) >= _MAX_ORDERS:
                self._orders.clear()
            order = Permutation(len(rows), derive(draw.seed, self._key, draw.epoch, component))
            self._orders[key] = order
        turn = int(order(np.array([rank]))[0]) * self._num_crops + draw.crop
        return turn * share.numerator % share.denominator + share.numerator >= share.denominator


class Foreground:
    """Rule that deals regions around voxels of classes among the samples. Safe for many threads.

    Of every ``pos + neg`` regions of an epoch ``pos`` are around a voxel of a class, dealt by `Turns` among
    the samples that have one. Where they are too few, all of theirs are.

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
        self._voxels = VoxelTables(context)
        self._tables, self.digests = self._voxels.tables, self._voxels.digests
        check_labels(name, labels, self._voxels)
        self._is_wanted = [
            np.array([one != BODY and (labels is None or one in labels) for one in table.names], bool)
            for table in self._tables
        ]
        every: list[NDArray[np.int64]] = []
        shares: list[Fraction] = []
        wanted = Fraction(str(pos)) / (Fraction(str(pos)) + Fraction(str(neg)))
        for place, population in enumerate(context.populations):
            delivered = selected.first_series(place)
            has_voxels = self._series_with(place, selected.catalog.tables[place].first_series())
            has_class = population & (delivered >= 0)
            num_samples = int(np.count_nonzero(has_class))
            has_class[has_class] = has_voxels[delivered[has_class]]
            rows = np.flatnonzero(has_class)
            every.append(rows)
            shares.append(min(Fraction(1), wanted * num_samples / max(len(rows), 1)))
            if wanted * num_samples > len(rows):
                _LOGGER.warning(
                    "field %r: %d of %d samples have a voxel of its labels, too few for %.3g of the regions",
                    name,
                    len(rows),
                    num_samples,
                    float(wanted),
                )
        if not any(map(len, every)):
            raise ConfigError(
                f"No sample has a voxel of the labels of the field {name!r}; write center='random', or other "
                "labels."
            )
        self._turns = Turns("volume-foreground", every, shares, num_crops)

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
        if not self._turns.is_turn(draw, component):
            return None
        table = self._tables[component]
        entries = self._voxels.entries(component, study, series, self._is_wanted[component])
        if not entries:
            return None
        # A class that few voxels have is as likely as any other, as in nnU-Net.
        entry = entries[len(entries) * draw.derive("volume-class") >> _WORD_BITS]
        voxels = table.voxels(entry)
        z, y, x = voxels[len(voxels) * draw.derive("volume-voxel") >> _WORD_BITS].tolist()
        return float(z), float(y), float(x)
