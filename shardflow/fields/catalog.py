"""Series catalog: which images of which series each sample of a population has, from tables alone.

An expression over the series table selects series, and where the images of one series differ in role, single
images of it. Nothing here opens a shard. Ties are ordered by acquisition, never by a surrogate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.reader import Samples
from shardflow.format.series import FactColumn, SeriesTable, open_series
from shardflow.sampling.expressions import Expression, parse_expression

Int64Array = NDArray[np.int64]
_ROLE: Final = "role"


@dataclass(frozen=True, slots=True)
class SeriesImages:
    """Selected images of one series of a sample."""

    series: int
    """Number of the series in the sample, SSS of its fields."""
    indexes: Sequence[int]
    """Positions of the images in the series, ascending."""
    shape: tuple[int, int, int]
    """Channels, rows and columns of each image."""


class SeriesCatalog:
    """Series tables of a selection's datasets. Safe for many threads.

    Args:
        samples: The samples.

    Raises:
        ConfigError: A dataset has no series table.
        FormatError: A table cannot be trusted.
    """

    def __init__(self, samples: Samples) -> None:
        opened: dict[str, tuple[SeriesTable, str]] = {}
        for dataset in samples.datasets:
            if dataset.manifest.dataset_id not in opened:
                opened[dataset.manifest.dataset_id] = open_series(dataset)
        self.datasets = samples.datasets
        self.tables = [opened[dataset.manifest.dataset_id][0] for dataset in samples.datasets]
        self.digests = [opened[dataset.manifest.dataset_id][1] for dataset in samples.datasets]

    def select(self, text: str | None, populations: Sequence[NDArray[np.bool_]]) -> SelectedSeries:
        """Return the series, and single images, for which an expression is true; None selects all.

        Args:
            text: The expression, such as ``"role == 'frontal'"``.
            populations: For each dataset which of its samples are used, ``(num_samples,)``.

        Raises:
            ConfigError: The expression is malformed, names an unknown column, or selects nothing.
        """
        known = sorted({name for table in self.tables for name in table.column_names})
        expression = None if text is None else parse_expression(text, known)
        return SelectedSeries(self, expression, populations)


class SelectedSeries:
    """Series and images that an expression selects, by component and sample."""

    def __init__(
        self,
        catalog: SeriesCatalog,
        expression: Expression | None,
        populations: Sequence[NDArray[np.bool_]],
    ) -> None:
        self.catalog, self.expression = catalog, expression
        parts = {
            id(table): _TablePart(table, expression) for table in {id(t): t for t in catalog.tables}.values()
        }
        self._parts = [parts[id(table)] for table in catalog.tables]
        self._populations = populations

    # ---- the population --------------------------------------------------------------------------

    def num_images(self, component: int) -> Int64Array:
        """Return how many images of each sample are selected, ``(num_samples,)``."""
        return self._parts[component].images_of_samples

    def values(self, name: str) -> list[Any]:
        """Return the distinct values of a column over the selected series of the population, ascending."""
        found: set[Any] = set()
        for part, population in zip(self._parts, self._populations, strict=True):
            chosen = part.is_selected & part.used(population)
            column, names = part.table.array(name)[chosen], part.table.column(name).names
            is_small = column.dtype.kind in "iu" and int(column.max(initial=0)) < len(column)
            values = (np.flatnonzero(np.bincount(column)) if is_small else np.unique(column)).tolist()
            found |= {value if names is None else names[value] for value in values}
        return sorted(found)

    def shapes(self) -> Int64Array:
        """Return the distinct rows and columns of the selected images of the population, ``(n, 2)``."""
        pairs = zip(self._parts, self._populations, strict=True)
        found = [part.shapes(population) for part, population in pairs]
        # As one number each: sorting rows of an array takes ten times as long.
        packed = np.unique(np.concatenate([rows.astype(np.int64) << 32 | columns for rows, columns in found]))
        return np.stack([packed >> 32, packed & (2**32 - 1)], axis=1)

    def roles(
        self, *, max_images: int | None = None, max_series: int | None = None
    ) -> tuple[Counter[str], Counter[str]]:
        """Return how many selected images of the population are delivered and left out, by role.

        Args:
            max_images: Images of a sample that are delivered at most, in the order of acquisition.
            max_series: Series of a sample that are delivered at most, likewise.
        """
        delivered: Counter[str] = Counter()
        left_out: Counter[str] = Counter()
        for part, population in zip(self._parts, self._populations, strict=True):
            used, selected = part.used(population), part.selected_images
            num_delivered = part.delivered(max_images, max_series)
            role, names = part.table.array(_ROLE), part.table.vocabulary(_ROLE)
            for code in np.unique(role).tolist():
                here = used & (role == code)
                num_here = int(num_delivered[here].sum())
                delivered[names[code]] += num_here
                left_out[names[code]] += int(selected[here].sum()) - num_here
        return +delivered, +left_out

    # ---- one sample ------------------------------------------------------------------------------

    def of_sample(self, component: int, row: int) -> list[SeriesImages]:
        """Return the selected images of a sample, by series in the order of acquisition."""
        return self._parts[component].of_sample(row)


class _TablePart:
    """What an expression selects of one series table.

    Only a flag per series and per image of mixed series stays in memory; columns are mapped, and sums over
    them are made when they are asked for, which is when a loader is made.
    """

    def __init__(self, table: SeriesTable, expression: Expression | None) -> None:
        self.table = table
        self._first_series, self._first_image = table.array("first_series"), table.array("first_image")
        self._order, self._number = table.array("acquisition_order"), table.array("series")
        self._columns = [table.array(name) for name in ("num_slices", "channels", "rows", "columns")]
        if expression is None:
            self.is_selected = np.ones(table.num_series, bool)
            self._is_image_selected = np.ones(int(self._first_image[-1]), bool)
        else:
            columns = {name: _column(table, name) for name in expression.names}
            self.is_selected = expression.select(columns, table.num_series).rows
            self._is_image_selected = self._select_images(expression, columns)
        mixed, num_selected = self._mixed()
        self.is_selected[mixed] = num_selected > 0

    @property
    def num_series_of_samples(self) -> Int64Array:
        """Number of series of each sample, selected or not, ``(num_samples,)``."""
        starts = self._first_series.astype(np.int64)
        return np.asarray(starts[1:] - starts[:-1], np.int64)

    @property
    def selected_images(self) -> Int64Array:
        """Number of selected images of each series, ``(num_series,)``."""
        found = self._columns[0] * self.is_selected.astype(np.int64)
        mixed, num_selected = self._mixed()
        found[mixed] = num_selected
        return found

    @property
    def images_of_samples(self) -> Int64Array:
        """Number of selected images of each sample, ``(num_samples,)``."""
        totals = np.concatenate(([0], np.cumsum(self.selected_images)))
        ends = totals[self._first_series.astype(np.int64)]
        return np.asarray(ends[1:] - ends[:-1], np.int64)

    def _mixed(self) -> tuple[Int64Array, Int64Array]:
        """Return the series whose images have several roles, and how many images of each are selected."""
        starts = self._first_image.astype(np.int64)
        mixed = np.flatnonzero(np.diff(starts))
        totals = np.concatenate(([0], np.cumsum(self._is_image_selected)))
        num_selected: Int64Array = totals[starts[mixed + 1]] - totals[starts[mixed]]
        return mixed, num_selected

    def _select_images(self, expression: Expression, columns: Mapping[str, FactColumn]) -> NDArray[np.bool_]:
        """Return which images of series with several roles are selected."""
        starts = self._first_image.astype(np.int64)
        owners = np.repeat(np.arange(self.table.num_series), starts[1:] - starts[:-1])
        of_images = {
            name: FactColumn(
                column.values[owners],
                None if column.is_missing is None else column.is_missing[owners],
                column.names,
            )
            for name, column in columns.items()
        }
        if _ROLE in of_images:
            role = self.table.array("image_role")
            of_images[_ROLE] = FactColumn(role, role == 0, self.table.vocabulary("image_role"))
        return expression.select(of_images, len(owners)).rows

    def used(self, population: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which series are of samples of a population, ``(num_series,)``."""
        return np.repeat(population, self.num_series_of_samples)

    def shapes(self, population: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the rows and the columns of the selected series of a population, ``(n,)`` each."""
        chosen = self.is_selected & self.used(population)
        return self._columns[2][chosen], self._columns[3][chosen]

    def delivered(self, max_images: int | None, max_series: int | None) -> Int64Array:
        """Return how many images of each series are delivered, ``(num_series,)``."""
        lengths = self.num_series_of_samples
        owner = np.repeat(np.arange(len(lengths)), lengths)
        by_acquisition = np.lexsort((self._order, owner))
        images = self.selected_images[by_acquisition]
        series = self.is_selected[by_acquisition].astype(np.int64)
        first = self._first_series[:-1].astype(np.int64)[owner]
        delivered = images
        if max_images is not None:
            before = np.cumsum(images) - images
            delivered = np.clip(max_images - (before - before[first]), 0, images)
        if max_series is not None:
            before = np.cumsum(series) - series
            delivered = np.where(before - before[first] < max_series, delivered, 0)
        found = np.empty(self.table.num_series, np.int64)
        found[by_acquisition] = delivered
        return found

    def of_sample(self, row: int) -> list[SeriesImages]:
        start, stop = self._first_series[row : row + 2].tolist()
        rows = [start + place for place, here in enumerate(self.is_selected[start:stop].tolist()) if here]
        if len(rows) > 1:
            order = self._order[start:stop].tolist()
            rows.sort(key=lambda each: (order[each - start], each))
        found = []
        for each in rows:
            num_slices, *shape = [int(column[each]) for column in self._columns]
            first, last = self._first_image[each : each + 2].tolist()
            indexes: Sequence[int] = range(num_slices)
            if last > first:
                indexes = np.flatnonzero(self._is_image_selected[first:last]).tolist()
            found.append(SeriesImages(int(self._number[each]), indexes, (shape[0], shape[1], shape[2])))
        return found


def _column(table: SeriesTable, name: str) -> FactColumn:
    """Return a column, all missing where this table lacks it (a flag that none of its series has)."""
    if name in table.column_names:
        return table.column(name)
    return FactColumn(np.zeros(table.num_series, bool))
