"""Where: the rows of a dataset for which an expression over its columns is true, block by block.

Columns are facts of studies (``facts.age_years``), attached tables (``chexpert.pneumonia``) and, under
``any()`` and ``all()``, facts of series (``series.role``); rows of series and images name those of their
series directly. Of a series whose images differ in role, each image counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.columns import SERIES_PREFIX, ColumnValues, open_columns
from shardflow.format.entities import ASSERTIONS, RADGRAPH, EntityTable
from shardflow.format.series import SeriesTable, open_series
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
        self._own = _own_columns(dataset)
        of_unit = {unit: [name for name, one in self._columns.items() if one.unit == unit] for unit in _UNITS}
        self._expression = parse_where(text, [*self._own, *of_unit["study"]], of_unit["series"])
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


_UNITS: Final = ("study", "series", "image")


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


def _spans(starts: NDArray[np.unsignedinteger], chosen: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the positions that chosen spans cover, and the place of each one's span among the chosen."""
    first = starts[chosen].astype(np.int64)
    lengths = starts[chosen + 1].astype(np.int64) - first
    owners = np.repeat(np.arange(len(chosen)), lengths)
    before = np.cumsum(lengths) - lengths
    return np.arange(len(owners)) + (first - before)[owners], owners


def _own_columns(dataset: Dataset) -> Mapping[str, Callable[[Int64Array], ExpressionColumn]]:
    """Return the columns of findings, which an expression names directly; none for studies."""
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

    Columns of series are named directly, those of studies as elsewhere.

    Args:
        dataset: The dataset.
        text: The expression.

    Raises:
        ConfigError: It is malformed, or names a column that there is not.
    """

    def __init__(self, dataset: Dataset, text: str) -> None:
        columns, self._table = open_columns(dataset), open_series(dataset)[0]
        known = {
            name.removeprefix(SERIES_PREFIX) if one.unit == "series" else name: one
            for name, one in columns.items()
            if one.unit != "image"
        }
        self.expression = parse_where(text, known)
        _, owners = _spans(self._table.array("first_series"), np.arange(dataset.studies.num_samples))
        self.columns = {
            name: columns.stored(known[name].name, owners if known[name].unit == "study" else None)
            for name in self.expression.names
        }
