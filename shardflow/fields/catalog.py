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
from shardflow.format import Dataset
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
        parts: dict[int, _TablePart] = {}
        self._parts = [parts.setdefault(id(table), _TablePart(table, expression)) for table in catalog.tables]
        self._populations = populations
        self._datasets: tuple[Dataset, ...] = catalog.datasets

    # ---- the population --------------------------------------------------------------------------

    def num_images(self, component: int) -> Int64Array:
        """Return how many images of each sample are selected, ``(num_samples,)``."""
        return self._parts[component].images_of_samples

    def num_series(self, component: int) -> Int64Array:
        """Return how many series of each sample have a selected image, ``(num_samples,)``."""
        return self._parts[component].series_of_samples

    def values(self, name: str) -> list[Any]:
        """Return the distinct values of a column over the selected series of the population, ascending."""
        found: set[Any] = set()
        for part, population in zip(self._parts, self._populations, strict=True):
            chosen = part.is_selected & np.repeat(population, np.diff(part.first_series))
            values = np.unique(part.table.array(name)[chosen]).tolist()
            names = part.table.column(name).names
            found |= {value if names is None else names[value] for value in values}
        return sorted(found)

    def shapes(self) -> Int64Array:
        """Return the distinct rows and columns of the selected images of the population, ``(n, 2)``."""
        found = [
            part.shapes[part.is_selected & np.repeat(population, np.diff(part.first_series)), 1:]
            for part, population in zip(self._parts, self._populations, strict=True)
        ]
        return np.unique(np.concatenate(found).astype(np.int64), axis=0)

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
            used = np.repeat(population, np.diff(part.first_series))
            num_delivered = part.delivered(max_images, max_series)
            role, names = part.table.array(_ROLE), part.table.vocabulary(_ROLE)
            for code in np.unique(role).tolist():
                here = used & (role == code)
                num_here = int(num_delivered[here].sum())
                delivered[names[code]] += num_here
                left_out[names[code]] += int(part.selected_images[here].sum()) - num_here
        return +delivered, +left_out

    # ---- one sample ------------------------------------------------------------------------------

    def of_sample(self, component: int, row: int) -> list[SeriesImages]:
        """Return the selected images of a sample, by series in the order of acquisition."""
        return self._parts[component].of_sample(row)


class _TablePart:
    """What an expression selects of one series table."""

    def __init__(self, table: SeriesTable, expression: Expression | None) -> None:
        self.table = table
        self.first_series = table.first_series()
        self._first_image = table.first_image()
        num_slices = table.array("num_slices").astype(np.int64)
        is_mixed = np.diff(self._first_image) > 0
        if expression is None:
            self.is_selected = np.ones(table.num_series, bool)
            self._is_image_selected = np.ones(int(self._first_image[-1]), bool)
        else:
            columns = {name: _column(table, name) for name in expression.names}
            self.is_selected = expression.select(columns, table.num_series).rows
            self._is_image_selected = self._select_images(expression, columns)
        of_mixed = np.zeros(table.num_series, np.int64)
        owners = np.repeat(np.arange(table.num_series), np.diff(self._first_image))
        np.add.at(of_mixed, owners[self._is_image_selected], 1)
        self.is_selected = np.where(is_mixed, of_mixed > 0, self.is_selected)
        self.selected_images: Int64Array = np.where(is_mixed, of_mixed, num_slices * self.is_selected)
        self.images_of_samples = _sums(self.selected_images, self.first_series)
        self.series_of_samples = _sums(self.is_selected.astype(np.int64), self.first_series)
        self._series = table.array("series")
        self._order = table.array("acquisition_order")
        self.shapes = np.stack([table.array(name) for name in ("channels", "rows", "columns")], axis=1)

    def _select_images(self, expression: Expression, columns: Mapping[str, FactColumn]) -> NDArray[np.bool_]:
        """Return which images of series with several roles are selected."""
        owners = np.repeat(np.arange(self.table.num_series), np.diff(self._first_image))
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

    def delivered(self, max_images: int | None, max_series: int | None) -> Int64Array:
        """Return how many images of each series are delivered, ``(num_series,)``."""
        owner = np.repeat(np.arange(len(self.first_series) - 1), np.diff(self.first_series))
        by_acquisition = np.lexsort((self._order, owner))
        images, series = (
            self.selected_images[by_acquisition],
            self.is_selected[by_acquisition].astype(np.int64),
        )
        first = np.repeat(self.first_series[:-1], np.diff(self.first_series))
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
        start, stop = int(self.first_series[row]), int(self.first_series[row + 1])
        rows = [each for each in range(start, stop) if self.is_selected[each]]
        rows.sort(key=lambda each: (int(self._order[each]), each))
        found = []
        for each in rows:
            first, last = int(self._first_image[each]), int(self._first_image[each + 1])
            indexes: Sequence[int] = range(int(self.selected_images[each]))
            if last > first:
                indexes = np.flatnonzero(self._is_image_selected[first:last]).tolist()
            channels, rows_px, columns_px = self.shapes[each].tolist()
            found.append(SeriesImages(int(self._series[each]), indexes, (channels, rows_px, columns_px)))
        return found


def _column(table: SeriesTable, name: str) -> FactColumn:
    """Return a column, all missing where this table lacks it (a flag that none of its series has)."""
    if name in table.column_names:
        return table.column(name)
    return FactColumn(np.zeros(table.num_series, bool))


def _sums(values: Int64Array, starts: Int64Array) -> Int64Array:
    """Return the sum of each span of values."""
    totals = np.concatenate(([0], np.cumsum(values)))
    sums: Int64Array = totals[starts[1:]] - totals[starts[:-1]]
    return sums
