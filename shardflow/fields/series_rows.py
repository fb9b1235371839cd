"""Selected series and images of one series table, and what of them each row of a unit has.

An expression selects series, and single images of series whose images differ in role. Nothing here opens a
shard. Ties are ordered by acquisition, never by a surrogate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.format import Dataset
from shardflow.format.entities import EntityTable
from shardflow.format.facts.series import SeriesTable
from shardflow.format.facts.units import NumberedTable, UnitTable
from shardflow.format.tables import ColumnValues
from shardflow.sampling.expressions import Expression, ExpressionColumn

Int64Array = NDArray[np.int64]
Weights: TypeAlias = Callable[[NDArray[Any], NDArray[Any]], Int64Array]
_ROLE: Final = "role"
_NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class SeriesImages:
    """Selected images of one series of a sample."""

    series: int
    """Number of the series in the sample, SSS of its fields."""
    indexes: Sequence[int]
    """Positions of the images in the series, ascending."""
    shape: tuple[int, int, int]
    """Channels, rows and columns of each image."""
    center: int | None = None
    """Position of the image that shows a finding best; None where rows are no findings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Places of a field for the images that it selects of a sample; None is no limit."""

    max_images: int | None = None
    """Images of a sample, in the order of acquisition."""
    max_series: int | None = None
    """Series of a sample, likewise."""
    max_of_series: int | None = None
    """Images of a series."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageSet:
    """Images of one series table."""

    counts: Int64Array
    """``(num_series,)``: images of each series."""
    is_chosen: NDArray[np.bool_]
    """``(num_image_roles,)``: which images of series with several roles, as ``image_role``."""

    def __or__(self, other: ImageSet) -> ImageSet:
        """Return the union; of two parts of a series, the larger one."""
        return ImageSet(np.maximum(self.counts, other.counts), self.is_chosen | other.is_chosen)

    def only(self, table: SeriesTable, used: NDArray[np.bool_]) -> ImageSet:
        """Return the images of some series, ``(num_series,)``."""
        starts = table.array("first_image").astype(np.int64)
        return ImageSet(self.counts * used, self.is_chosen & np.repeat(used, starts[1:] - starts[:-1]))

    def count_roles(self, table: SeriesTable) -> Counter[str]:
        """Return the number of images of each role."""
        starts = table.array("first_image").astype(np.int64)
        has_one_role = starts[1:] == starts[:-1]
        found: Counter[str] = Counter()
        for column, chosen, counts in (
            (_ROLE, has_one_role, self.counts[has_one_role]),
            ("image_role", self.is_chosen, None),
        ):
            totals = np.bincount(table.array(column)[chosen], weights=counts).tolist()
            names = table.vocabulary(column)
            found.update({name: int(total) for name, total in zip(names, totals, strict=False)})
        return +found


class TableSelection:
    """Selection of one series table by an expression.

    Only a flag per series and per image of mixed series stays in memory; columns are mapped, and sums over
    them are made when they are asked for, which is when a loader is made.

    Args:
        table: The series table.
        expression: What is selected; None for all.
        columns: The columns that it names, by the rows of the table; by default those of the table.

    Attributes:
        num_missing: Series that are not selected because a value is missing.
    """

    def __init__(
        self,
        table: SeriesTable,
        expression: Expression | None,
        columns: Mapping[str, ExpressionColumn] | None = None,
    ) -> None:
        self.table = table
        self._first_series, self._first_image = table.array("first_series"), table.array("first_image")
        self.num_missing = 0
        self._order, self._number = table.array("acquisition_order"), table.array("series")
        self._columns = [table.array(name) for name in ("num_slices", "channels", "rows", "columns")]
        if expression is None:
            self.is_selected = np.ones(table.num_series, bool)
            self._is_image_selected = np.ones(int(self._first_image[-1]), bool)
        else:
            if columns is None:
                columns = {name: _column(table, name) for name in expression.names}
            found = expression.select(columns, table.num_series)
            self.is_selected, self.num_missing = found.rows, found.num_missing
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

    def _select_images(
        self, expression: Expression, columns: Mapping[str, ExpressionColumn]
    ) -> NDArray[np.bool_]:
        """Return which images of series with several roles are selected."""
        starts = self._first_image.astype(np.int64)
        owners = np.repeat(np.arange(self.table.num_series), starts[1:] - starts[:-1])
        of_images: dict[str, ExpressionColumn] = {
            name: ColumnValues(
                column.values[owners],
                None if column.is_missing is None else column.is_missing[owners],
                column.names,
            )
            for name, column in columns.items()
        }
        if _ROLE in of_images:
            role = self.table.array("image_role")
            of_images[_ROLE] = ColumnValues(role, role == 0, self.table.vocabulary("image_role"))
        return expression.select(of_images, len(owners)).rows

    @property
    def image_ids(self) -> Int64Array:
        """Numbers of the selected images among the image roles of the table, ascending."""
        return np.flatnonzero(self._is_image_selected)

    def has_image(self, series: Int64Array, images: Int64Array) -> NDArray[np.bool_]:
        """Return which images are selected, given the row of the series and the position in it of each."""
        found: NDArray[np.bool_] = self.is_selected[series]
        first, last = (self._first_image[series + beyond].astype(np.int64) for beyond in (0, 1))
        is_mixed = last > first
        found[is_mixed] = self._is_image_selected[(first + images)[is_mixed]]
        return found

    def shapes(self, used: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the rows and the columns of selected series among those used, ``(n,)`` each."""
        chosen = self.is_selected & used
        return self._columns[2][chosen], self._columns[3][chosen]

    def images(self, limits: Limits) -> ImageSet:
        """Return the selected images of all samples that there are places for."""
        if limits == Limits():
            return ImageSet(self.selected_images, self._is_image_selected)
        lengths = self.num_series_of_samples
        owner = np.repeat(np.arange(len(lengths)), lengths)
        by_acquisition = np.lexsort((self._order, owner))
        images = self.selected_images[by_acquisition]
        series = self.is_selected[by_acquisition].astype(np.int64)
        first = self._first_series[:-1].astype(np.int64)[owner]
        delivered = images
        if limits.max_images is not None:
            before = np.cumsum(images) - images
            delivered = np.clip(limits.max_images - (before - before[first]), 0, images)
        if limits.max_series is not None:
            before = np.cumsum(series) - series
            delivered = np.where(before - before[first] < limits.max_series, delivered, 0)
        if limits.max_of_series is not None:
            delivered = np.minimum(delivered, limits.max_of_series)
        counts = np.empty(self.table.num_series, np.int64)
        counts[by_acquisition] = delivered
        return ImageSet(counts, self.first_images(counts))

    def first_images(self, counts: Int64Array) -> NDArray[np.bool_]:
        """Return the first selected images of each series of several roles, by image role."""
        starts = self._first_image.astype(np.int64)
        lengths = starts[1:] - starts[:-1]
        before = np.cumsum(self._is_image_selected) - self._is_image_selected
        ranks = before - before[np.repeat(starts[:-1], lengths)]
        first: NDArray[np.bool_] = self._is_image_selected & (ranks < np.repeat(counts, lengths))
        return first

    def place_of_images(self, series: Int64Array, images: Int64Array) -> Int64Array:
        """Return the numbers of images of series of several roles among the image roles of the table."""
        first, last = (self._first_image[series + beyond].astype(np.int64) for beyond in (0, 1))
        return (first + images)[last > first]

    def weighed(self, weights: Weights | None) -> Int64Array:
        """Return the places that an image of each series takes, ``(num_series,)``."""
        if weights is None:
            return np.ones(self.table.num_series, np.int64)
        return weights(self._columns[2], self._columns[3])

    def first_series(self, studies: NDArray[Any] | slice) -> Int64Array:
        """Return the row of the first series of some studies."""
        return np.asarray(self._first_series[studies], np.int64)

    def first_selected(self) -> Int64Array:
        """Return the row of the first selected series of each sample, by acquisition; -1 for none."""
        lengths = self.num_series_of_samples
        owner = np.repeat(np.arange(len(lengths)), lengths)
        by_acquisition = np.lexsort((self._order, owner))
        chosen = by_acquisition[self.is_selected[by_acquisition]]
        owners, places = np.unique(owner[chosen], return_index=True)
        found = np.full(len(lengths), -1, np.int64)
        found[owners] = chosen[places]
        return found

    def of_span(self, start: int, stop: int) -> list[SeriesImages]:
        """Return the selected images of consecutive series, by series in the order of acquisition."""
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


class StudyRows:
    """Rows that are studies."""

    def __init__(self, part: TableSelection) -> None:
        self.part = part

    @property
    def num_images(self) -> Int64Array:
        """Number of selected images of each row, ``(num_rows,)``."""
        return self.part.images_of_samples

    def num_delivered(self, limits: Limits, weights: Weights | None) -> Int64Array:
        """Return how many selected images of each row there are places for, see `SelectedSeries`."""
        counts = self.part.images(limits).counts * self.part.weighed(weights)
        totals = np.concatenate(([0], np.cumsum(counts)))
        return np.diff(totals[self.part.first_series(slice(None))])

    def used(self, population: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which series belong to rows of a population, ``(num_series,)``."""
        return np.repeat(population, self.part.num_series_of_samples)

    def values(self, name: str, population: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the values of a column for the selected series of a population, in any order."""
        return np.asarray(self.part.table.array(name)[self.part.is_selected & self.used(population)])

    def first_selected(self) -> Int64Array:
        """Return the row of the first selected series of each row; -1 for none."""
        return self.part.first_selected()

    def images(self, population: NDArray[np.bool_], limits: Limits) -> ImageSet:
        """Return the selected images of the rows of a population that there are places for."""
        return self.part.images(limits).only(self.part.table, self.used(population))

    def of_row(self, row: int) -> list[SeriesImages]:
        """Return the selected images of a row, by series in the order of acquisition."""
        start, stop = self.part.first_series(np.array([row, row + 1])).tolist()
        return self.part.of_span(start, stop)


class _SeriesRows(StudyRows):
    """Rows that belong to one series each.

    Args:
        part: What is selected.
        num_rows: Number of rows.
        series: Returns the row of the series table of some rows.
    """

    def __init__(
        self, part: TableSelection, num_rows: int, series: Callable[[Int64Array], Int64Array]
    ) -> None:
        super().__init__(part)
        self._num_rows, self._series = num_rows, series

    @property
    def num_images(self) -> Int64Array:
        return self._count(np.arange(self._num_rows))

    def _count(self, rows: Int64Array) -> Int64Array:
        """Return how many images of some rows are selected."""
        return self.part.selected_images[self._series(rows)]

    def first_selected(self) -> Int64Array:
        rows = np.arange(self._num_rows)
        return np.where(self._count(rows) > 0, self._series(rows), -1)

    def used(self, population: NDArray[np.bool_]) -> NDArray[np.bool_]:
        rows = np.flatnonzero(population)
        used = np.zeros(self.part.table.num_series, bool)
        used[self._series(rows[self._count(rows) > 0])] = True
        return used

    def num_delivered(self, limits: Limits, weights: Weights | None) -> Int64Array:
        rows = np.arange(self._num_rows)
        return self._limited(rows, limits) * self.part.weighed(weights)[self._series(rows)]

    def _limited(self, rows: Int64Array, limits: Limits) -> Int64Array:
        """Return how many images of some rows there are places for."""
        most = min(_NO_LIMIT if one is None else one for one in (limits.max_images, limits.max_of_series))
        return np.minimum(self._count(rows), most)

    def images(self, population: NDArray[np.bool_], limits: Limits) -> ImageSet:
        rows = np.flatnonzero(population)
        counts = np.zeros(self.part.table.num_series, np.int64)
        np.add.at(counts, self._series(rows), self._limited(rows, limits))
        return ImageSet(counts, self._chosen(rows, counts))

    def _chosen(self, rows: Int64Array, counts: Int64Array) -> NDArray[np.bool_]:  # noqa: ARG002
        """Return which images of series of several roles some rows have, by image role."""
        return self.part.first_images(counts)

    def of_row(self, row: int) -> list[SeriesImages]:
        series = int(self._series(np.array([row]))[0])
        return self.part.of_span(series, series + 1)


class _NumberedRows(StudyRows):
    """Rows that are windows or parts of studies: each has the series of its study."""

    def __init__(self, part: TableSelection, table: NumberedTable) -> None:
        super().__init__(part)
        self._table = table

    def _of_studies(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return numbers of studies by row."""
        return values[self._table.study_rows(np.arange(self._table.num_samples))]

    @property
    def num_images(self) -> Int64Array:
        return self._of_studies(super().num_images)

    def num_delivered(self, limits: Limits, weights: Weights | None) -> Int64Array:
        return self._of_studies(super().num_delivered(limits, weights))

    def used(self, population: NDArray[np.bool_]) -> NDArray[np.bool_]:
        studies = np.zeros(len(self.part.num_series_of_samples), bool)
        studies[self._table.study_rows(np.flatnonzero(population))] = True
        return super().used(studies)

    def first_selected(self) -> Int64Array:
        return self._of_studies(super().first_selected())

    def of_row(self, row: int) -> list[SeriesImages]:
        return super().of_row(int(self._table.study_rows(np.array([row]))[0]))


class _ImageRows(_SeriesRows):
    """Rows that are images."""

    def __init__(self, part: TableSelection, table: UnitTable) -> None:
        super().__init__(part, table.num_samples, table.series_rows)
        self._table = table

    def _chosen(self, rows: Int64Array, counts: Int64Array) -> NDArray[np.bool_]:  # noqa: ARG002
        rows = rows[self._count(rows) > 0]
        chosen = np.zeros(len(self.part.table.array("image_role")), bool)
        chosen[self.part.place_of_images(self._series(rows), self._table.images(rows))] = True
        return chosen

    def _count(self, rows: Int64Array) -> Int64Array:
        return self.part.has_image(self._series(rows), self._table.images(rows)).astype(np.int64)

    def values(self, name: str, population: NDArray[np.bool_]) -> NDArray[Any]:
        return np.ones(1, np.int64) if name == "num_slices" else super().values(name, population)

    def of_row(self, row: int) -> list[SeriesImages]:
        image = int(self._table.images(np.array([row]))[0])
        return [replace(one, indexes=[image]) for one in super().of_row(row) if image in one.indexes]


class _EntityRows(_SeriesRows):
    """Rows that are findings, each with the slices that show it."""

    def __init__(self, part: TableSelection, table: EntityTable) -> None:
        super().__init__(part, table.num_samples, self._series_of)
        self._table = table

    def _series_of(self, rows: Int64Array) -> Int64Array:
        studies = self._table.gather("study", rows)
        series: Int64Array = self.part.first_series(studies) + self._table.gather("series", rows)
        return series

    def _count(self, rows: Int64Array) -> Int64Array:
        num_slices = self._table.gather("num_slices", rows).astype(np.int64)
        return np.minimum(super()._count(rows), num_slices)

    def values(self, name: str, population: NDArray[np.bool_]) -> NDArray[Any]:
        if name == "num_slices":
            num_images = self._count(np.flatnonzero(population))
            return num_images[num_images > 0]
        return super().values(name, population)

    def of_row(self, row: int) -> list[SeriesImages]:
        place = self._table.place(row)
        shown = set(place.slices.tolist())
        center = int(place.slices[place.centre]) if shown else None
        return [
            replace(one, indexes=[index for index in one.indexes if index in shown], center=center)
            for one in super().of_row(row)
        ]


def rows_of(dataset: Dataset, part: TableSelection) -> StudyRows:
    """Return the selection by the rows of a dataset, whose unit decides what a row has."""
    table = dataset.samples
    if isinstance(table, EntityTable):
        return _EntityRows(part, table)
    if isinstance(table, NumberedTable):
        return _NumberedRows(part, table)
    if isinstance(table, UnitTable):
        if table.unit == "image":
            return _ImageRows(part, table)
        return _SeriesRows(part, table.num_samples, table.series_rows)
    return StudyRows(part)


def _column(table: SeriesTable, name: str) -> ColumnValues:
    """Return a column, all missing where this table lacks it (a flag that none of its series has)."""
    if name in table.column_names:
        return table.column(name)
    return ColumnValues(np.zeros(table.num_series, bool))
