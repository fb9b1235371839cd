"""Where: the rows of a dataset for which an expression over its columns is true, block by block.

Columns are facts of studies (``facts.age_years``), attached tables (``chexpert.pneumonia``) and, under
``any()`` and ``all()``, facts of series (``series.role``); rows of series and images name those of their
series directly. Of a series whose images differ in role, each image counts, as does
every image where a column has values of images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.series_rows import TableSelection
from shardflow.format import Dataset
from shardflow.format.entities import ASSERTIONS, RADGRAPH, EntityTable
from shardflow.format.facts.columns import SERIES_PREFIX, Columns, image_starts, open_columns
from shardflow.format.facts.series import SeriesTable, open_series, spans_of
from shardflow.format.facts.units import ChosenSeries, DerivedUnit
from shardflow.format.tables import ColumnValues
from shardflow.sampling.expressions import (
    Expression,
    ExpressionColumn,
    Members,
    Selected,
    parse_expression,
)

Int64Array = NDArray[np.int64]
_ROLE: Final = f"{SERIES_PREFIX}role"
# Columns of places are no facts about a finding.
_PLACES: Final = frozenset({"sample_key", "shard", "row_in_shard", "offset_bytes"})
_FORMER_TERM: Final = re.compile(r"([a-z_]+)\s*(<=|>=|!=|=|<|>)\s*([^=<>!()]+)")


def parse_where(text: object, known: Collection[str], series: Collection[str] = ()) -> Expression:
    """Parse the expression of ``where=``, see `parse_expression`.

    Raises:
        ConfigError: It is no expression; a term of a former version is answered with what to write now.
    """
    if not isinstance(text, str):
        raise ConfigError(
            f"where= is one expression, such as \"facts.modality == 'CT'\", got {type(text).__name__}; join "
            "several with `and`."
        )
    try:
        return parse_expression(text, known, series)
    except ConfigError as error:
        former = _former_term(text.strip(), known)
        raise (error if former is None else ConfigError(former)) from None


def _former_term(text: str, known: Collection[str]) -> str | None:
    """Return what to write instead of a term of a former version; None if it is none."""
    found = _FORMER_TERM.fullmatch(text)
    if found is None:
        return None
    name, sign, value = found.groups()
    if name == "keys":
        return "where= takes no list of keys; write it as keys=, such as keys='wanted.txt'."
    name = name if name in known else f"facts.{name}"
    if name not in known:
        return None
    values = [one.strip(" '\"") for one in value.split(",")]
    if all(one.isdecimal() for one in values) and len(values) == 1:
        right = values[0]
    elif len(values) > 1:
        sign, right = {"=": "in", "!=": "not in"}.get(sign, sign), repr(tuple(values))
    else:
        right = repr(values[0])
    sign = "==" if sign == "=" else sign
    return f'This is written as in former versions; write where="{name} {sign} {right}".'


def attached_tables(dataset: Dataset, expression: Expression) -> tuple[str, ...]:
    """Return the names of the attached tables whose columns an expression names, ascending."""
    named = (*expression.names, *expression.series_names)
    return tuple(sorted({name.partition(".")[0] for name in named} & {*dataset.tables}))


class Where:
    """Expression over the columns of a dataset of studies or findings.

    Args:
        dataset: The dataset.
        text: The expression.

    Attributes:
        tables: Names of the attached tables that it reads.

    Raises:
        ConfigError: It is malformed, or names a column that there is not.
    """

    def __init__(self, dataset: Dataset, text: str) -> None:
        self._dataset, self._columns = dataset, open_columns(dataset)
        self._own = own_columns(dataset)
        of_study = [name for name, one in self._columns.items() if one.unit == "study"]
        self._expression = parse_where(text, [*self._own, *of_study], self._columns.keys() - of_study)
        self.tables = attached_tables(dataset, self._expression)

    def select(self, start: int, stop: int) -> Selected:
        """Return which of the rows ``[start, stop)`` are selected.

        Raises:
            ConfigError: A column is compared with a value of another type, or its table is missing.
            FormatError: A table cannot be trusted.
        """
        rows = np.arange(start, stop)
        columns = {
            name: self._own[name](rows) if name in self._own else self._columns.gather(name, rows)
            for name in self._expression.names
        }
        members = self._members(rows) if self._expression.series_names else None
        return self._expression.select(columns, len(rows), members)

    def _members(self, rows: Int64Array) -> Members:
        """Return the series of some rows; of a series of several roles its images."""
        table, _ = open_series(self._dataset)
        series, owners = _spans(table.array("first_series"), self._dataset.study_rows(rows))
        names = self._expression.series_names
        if _of_images(self._columns, names):
            images, own = _spans(image_starts(self._dataset), series)
            return Members(_image_columns(self._columns, table, names, series, images, own), owners[own])
        _, own = _spans(table.array("first_image"), series)
        images = np.bincount(own, minlength=len(series))
        is_mixed = images > 0
        repeats = np.maximum(images, 1)
        members = np.repeat(series, repeats) if is_mixed.any() else series
        columns: dict[str, ExpressionColumn] = {
            name: self._columns.stored(name, members) for name in self._expression.series_names
        }
        if _ROLE in columns and is_mixed.any():
            columns[_ROLE] = _image_roles(table, series, np.repeat(is_mixed, repeats), members)
        return Members(columns, np.repeat(owners, repeats))


def _of_images(columns: Columns, names: Collection[str]) -> bool:
    """Whether some of the columns have a value for each image."""
    return any(columns[name].unit == "image" for name in names)


def _image_columns(
    columns: Columns,
    table: SeriesTable,
    names: Collection[str],
    series: Int64Array,
    images: Int64Array,
    own: Int64Array,
) -> dict[str, ExpressionColumn]:
    """Return columns of series and images for all images of some series.

    Args:
        columns: The columns of the dataset.
        table: The series table.
        names: Which columns.
        series: ``(n,)`` rows of the series.
        images: ``(m,)`` rows of their images, see `image_starts`.
        own: ``(m,)`` place of each image's series in ``series``.
    """
    found: dict[str, ExpressionColumn] = {
        name: columns.stored(name, images if columns[name].unit == "image" else series[own]) for name in names
    }
    is_mixed = np.diff(table.first_image())[series] > 0
    if _ROLE in found and is_mixed.any():
        found[_ROLE] = _image_roles(table, series, is_mixed[own], series[own])
    return found


def _image_roles(
    table: SeriesTable, series: Int64Array, is_image: NDArray[np.bool_], of_members: Int64Array
) -> ColumnValues:
    """Return the roles of series and, where they differ inside of a series, of its images."""
    names = sorted({*table.vocabulary("role"), *table.vocabulary("image_role")})
    code = {name: place for place, name in enumerate(names)}
    of_series = np.array([code[name] for name in table.vocabulary("role")])
    of_images = np.array([code[name] for name in table.vocabulary("image_role")])
    images, _ = _spans(table.array("first_image"), series)
    codes = of_series[table.array("role")[of_members]]
    codes[is_image] = of_images[table.array("image_role")[images]]
    return ColumnValues(codes, codes == code[""], tuple(names))


def _spans(starts: NDArray[np.integer[Any]], chosen: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the positions that chosen spans cover, and the place of each one's span among the chosen."""
    lengths, covered = spans_of(starts, chosen)
    return covered, np.repeat(np.arange(len(chosen)), lengths)


def own_columns(dataset: Dataset) -> Mapping[str, Callable[[Int64Array], ExpressionColumn]]:
    """Return the columns of findings, which an expression names directly; none for studies.

    Each is a function of rows.
    """
    table = dataset.samples
    if not isinstance(table, EntityTable):
        return {}

    def column(name: str) -> Callable[[Int64Array], ExpressionColumn]:
        names = table.vocabularies.get(name)
        if names is None:
            return lambda rows: ColumnValues(table.gather(name, rows))
        also = table.label_names if name == "label" else None
        return of_codes(name, names, also)

    def of_codes(
        name: str, names: Sequence[str], also: tuple[frozenset[str], ...] | None = None
    ) -> Callable[[Int64Array], ExpressionColumn]:
        is_missing = np.array([not one for one in names], bool)
        return lambda rows: ColumnValues(
            table.gather(name, rows), is_missing[table.gather(name, rows)], tuple(names), also
        )

    numbers = {
        name
        for name in table.column_names
        if name not in _PLACES and table.gather(name, np.zeros(0, np.int64)).dtype.kind in "iuf"
    }
    return {
        **{name: column(name) for name in sorted(numbers | set(table.vocabularies))},
        # What labels and assertions stand for elsewhere.
        **{scheme: of_codes("label", names) for scheme, names in table.label_facts.items()},
        "radgraph": of_codes("assertion", tuple(RADGRAPH[one] for one in ASSERTIONS)),
    }


class SeriesWhere:
    """Expression over the series of a dataset of studies, for rows that are series or images.

    Columns of series are named directly, those of studies as elsewhere; columns of images directly where rows
    are images, and under ``any()`` and ``all()`` where they are series.

    Args:
        dataset: The dataset.
        text: The expression.
        unit: What a row is.

    Attributes:
        tables: Names of the attached tables that it reads.

    Raises:
        ConfigError: It is malformed, or names a column that there is not.
    """

    def __init__(self, dataset: Dataset, text: str, unit: DerivedUnit) -> None:
        self._dataset, self._columns, self._table = dataset, open_columns(dataset), open_series(dataset)[0]
        self._known = {name.removeprefix(SERIES_PREFIX): name for name in self._columns}
        of_images = [name for name, one in self._columns.items() if one.unit == "image"]
        direct = self._known.keys() - ([] if unit == "image" else of_images)
        self._expression = parse_where(text, direct, of_images if unit == "series" else [])
        self.tables = attached_tables(dataset, self._expression)

    def choose(self) -> tuple[ChosenSeries, int]:
        """Return the chosen series and images, and how many rows lack a value that the expression compares.

        Raises:
            ConfigError: A column is compared with a value of another type.
        """
        expression, table = self._expression, self._table
        _, owners = _spans(table.array("first_series"), np.arange(self._dataset.studies.num_samples))
        if _of_images(self._columns, [self._known[name] for name in expression.names]):
            return self._choose_images(owners)
        columns = {
            name: self._columns.stored(full, owners if self._columns[full].unit == "study" else None)
            for name, full in self._named()
        }
        if not expression.series_names:
            found = TableSelection(table, expression, columns)
            rows = np.flatnonzero(found.selected_images)
            return ChosenSeries(rows, found.selected_images[rows], found.image_ids), found.num_missing
        every = np.arange(table.num_series)
        images, own = _spans(image_starts(self._dataset), every)
        members = Members(
            _image_columns(self._columns, table, expression.series_names, every, images, own), own
        )
        selected = expression.select(columns, table.num_series, members)
        num_slices = table.array("num_slices").astype(np.int64)
        rows = np.flatnonzero(selected.rows & (num_slices > 0))
        return ChosenSeries(rows, num_slices[rows], np.zeros(0, np.int64)), selected.num_missing

    def _named(self) -> list[tuple[str, str]]:
        return [(name, self._known[name]) for name in self._expression.names]

    def _choose_images(self, owners: Int64Array) -> tuple[ChosenSeries, int]:
        table, starts = self._table, image_starts(self._dataset)
        every = np.arange(table.num_series)
        images, own = _spans(starts, every)
        of_studies = {one for one in self._columns if self._columns[one].unit == "study"}
        inside = [full for _, full in self._named() if full not in of_studies]
        found = _image_columns(self._columns, table, inside, every, images, own)
        found |= {
            full: self._columns.stored(full, owners[own]) for _, full in self._named() if full in of_studies
        }
        columns = {name: found[full] for name, full in self._named()}
        selected = self._expression.select(columns, len(images))
        counts = np.bincount(own[selected.rows], minlength=table.num_series)
        rows = np.flatnonzero(counts)
        is_mixed = np.diff(table.first_image()) > 0
        if (counts[rows] == np.diff(starts)[rows])[~is_mixed[rows]].all():
            # As by an expression over series: the same rows are the same dataset.
            ids = np.flatnonzero(selected.rows[is_mixed[own]])
            return ChosenSeries(rows, counts[rows], ids), selected.num_missing
        ids = np.flatnonzero(selected.rows)
        return ChosenSeries(rows, counts[rows], ids, starts), selected.num_missing
