"""Columns of a dataset by name, aligned with its rows: what expressions, fields and weights read.

`open_columns` collects the sources, each a table whose rows are studies, series or images; a value of a study
repeats for its series and images. Nothing is read before a column is asked for, and then from memory maps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.format.dataset import Dataset
from shardflow.format.facts.series import FLAG_PREFIX, KINDS, SeriesTable, open_series, starts_of
from shardflow.format.facts.studies import STUDY_NUMBERS, STUDY_STRINGS, StudyTable, open_studies
from shardflow.format.facts.units import UnitTable
from shardflow.format.table import Table
from shardflow.format.tables import (
    ROWS_NAME,
    ColumnKind,
    ColumnsTable,
    ColumnValues,
    TablePlace,
    TableUnit,
    open_columns_table,
    write_table,
)
from shardflow.storage import ByteStore
from shardflow.storage.node_files import own_bytes

FACTS_PREFIX: Final = "facts."
SERIES_PREFIX: Final = "series."


@dataclass(frozen=True, slots=True)
class ColumnInfo:
    """Description of a column, without its values."""

    name: str
    """``facts.NAME`` of a study, ``series.NAME`` of a series, ``TABLE.COLUMN`` of an attached table."""
    unit: TableUnit
    """What has a value: a study, a series or an image."""
    kind: ColumnKind
    """``bool``, ``int``, ``float``, ``category``, ``string``, or ``floats`` for lists of floats."""
    names: tuple[str, ...] = ()
    """Values of a category, ascending."""


class ColumnSource(ABC):
    """Columns of one table, by its own rows.

    Attributes:
        unit: What a row is: studies as in the samples table, series as in the series table, images as in
            `image_starts`.
    """

    unit: TableUnit

    @property
    @abstractmethod
    def digest(self) -> str:
        """Identity of the content; empty if that is part of the dataset's own."""

    @abstractmethod
    def infos(self) -> Mapping[str, ColumnInfo]:
        """Return the columns by their full names."""

    @abstractmethod
    def gather(self, name: str, rows: NDArray[np.int64] | None) -> ColumnValues:
        """Return some rows of a column, or all; only what they need is read."""


class Columns(Mapping[str, ColumnInfo]):
    """Columns of a dataset by name, aligned with the rows of its own table. Safe for many threads.

    Args:
        dataset: The dataset; its rows are studies, series, images or findings.
        sources: Tables of columns; a name is in one of them.
    """

    def __init__(self, dataset: Dataset, sources: list[ColumnSource]) -> None:
        self._dataset = dataset
        self._sources = {name: source for source in sources for name in source.infos()}
        self._infos = {name: info for source in sources for name, info in source.infos().items()}

    def __getitem__(self, name: str) -> ColumnInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def column(self, name: str) -> ColumnValues:
        """Return a whole column, ``(num_rows,)``; a view of the mapped file where rows are the table's own.

        Raises:
            ConfigError: The column is of series or images, and rows of the dataset are larger.
            ChecksumError: The table is damaged.
        """
        source = self._sources[name]
        if source.unit == "study" and self._dataset.samples is self._dataset.studies:
            return source.gather(name, None)
        return self.gather(name, np.arange(self._dataset.samples.num_samples))

    def gather(self, name: str, rows: NDArray[np.int64]) -> ColumnValues:
        """Return some rows of a column, ``(n,)``; only their blocks are read. Errors as of `column`."""
        source = self._sources[name]
        return source.gather(name, self._source_rows(name, source.unit, rows))

    @property
    def num_rows(self) -> int:
        """Rows of the dataset's own table."""
        return self._dataset.samples.num_samples

    def digest(self, name: str) -> str:
        """Return the identity of the table that a column is in."""
        return self._sources[name].digest

    def stored(self, name: str, rows: NDArray[np.int64] | None = None) -> ColumnValues:
        """Return rows of a column by its own unit, not aligned with the dataset; by default all."""
        return self._sources[name].gather(name, rows)

    def _source_rows(self, name: str, unit: TableUnit, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        samples = self._dataset.samples
        if unit == "study":
            return self._dataset.study_rows(rows)
        own = samples.unit if isinstance(samples, UnitTable) else "study"
        if not isinstance(samples, UnitTable) or (unit == "image" and own == "series"):
            raise ConfigError(
                f"The column {name} has a value for each {unit}, and samples are of unit {own!r}; write "
                f"unit={unit!r} for the loader."
            )
        series = samples.series_rows(rows)
        return series if unit == "series" else self._image_starts[series] + samples.images(rows)

    @cached_property
    def _image_starts(self) -> NDArray[np.int64]:
        return image_starts(self._dataset)


def image_starts(dataset: Dataset) -> NDArray[np.int64]:
    """Return the row of the first image of each series in a table of images, ``(num_series + 1,)``.

    Images are numbered through the series table, those of a series by their position in it.

    Raises:
        ConfigError: The dataset has no series table.
    """
    return starts_of(open_series(dataset)[0].array("num_slices")).astype(np.int64)


class _TableSource(ColumnSource):
    """Attached table."""

    def __init__(self, dataset: Dataset, name: str, place: TablePlace) -> None:
        self._dataset, self._place, self._name = dataset, place, name
        self.unit = place.manifest.unit

    @property
    def digest(self) -> str:
        return self._place.manifest.digest

    @cached_property
    def table(self) -> ColumnsTable:
        """The table, opened when it is first needed."""
        manifest, dataset = self._place.manifest, self._dataset
        path = f"{manifest.folder}/{ROWS_NAME}"
        sha256, num_bytes = manifest.sha256, manifest.num_bytes
        if self._place.store is not None:
            opened = Table(own_bytes(self._place.store, path, sha256=sha256, num_bytes=num_bytes), name=path)
        else:
            rows = range(dataset.studies.num_samples)
            opened = dataset.table_beside(path, sha256=sha256, num_bytes=num_bytes, rows=rows)
        table = open_columns_table(opened, manifest)
        expected = num_unit_rows(dataset, self.unit)
        if table.num_rows != expected:
            raise FormatError(
                f"{path} has {table.num_rows:,} rows instead of {expected:,}; attach the table again."
            )
        return table

    def infos(self) -> Mapping[str, ColumnInfo]:
        found = {}
        for one in self._place.manifest.columns:
            names = self.table.names(one.name) if one.kind == "category" else ()
            full = f"{self._name}.{one.name}"
            found[full] = ColumnInfo(full, self.unit, one.kind, names)
        return found

    def gather(self, name: str, rows: NDArray[np.int64] | None) -> ColumnValues:
        stored = self.table.gather(name.partition(".")[2], rows)
        names = stored.names if stored.kind in ("category", "string") else None
        return ColumnValues(stored.values, stored.is_missing if stored.is_missing.any() else None, names)


_SAMPLE_COUNTS: Final = ("num_series", "num_slices", "rows", "columns", "text_bytes", "num_bytes")
"""Columns of the samples table that are facts of a study."""


class _StudySource(ColumnSource):
    """Facts of studies: the samples table and, where there is one, the table of study facts."""

    unit = "study"

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    @cached_property
    def _table(self) -> StudyTable:
        return open_studies(self._dataset)[0]

    @property
    def digest(self) -> str:
        with suppress(ConfigError):  # there may be the facts of the samples table alone
            return open_studies(self._dataset)[1]
        return ""

    def infos(self) -> Mapping[str, ColumnInfo]:
        kinds: dict[str, ColumnKind] = {"modality": "category", "has_report": "bool"}
        kinds |= dict.fromkeys(_SAMPLE_COUNTS, "int")
        names = {"modality": tuple(filter(None, self._dataset.studies.modalities))}
        if not self._dataset.is_foreign:
            kinds |= dict.fromkeys(STUDY_STRINGS, "category")
            kinds |= {name: "int" if dtype == "<i4" else "float" for name, dtype in STUDY_NUMBERS.items()}
            kinds |= {"patient_key": "string", "previous_row": "int"}
            with suppress(ConfigError):  # without the table, its columns are an error when they are read
                names |= {name: self._table.vocabulary(name)[1:] for name in STUDY_STRINGS}
        return {
            FACTS_PREFIX + name: ColumnInfo(FACTS_PREFIX + name, self.unit, kind, names.get(name, ()))
            for name, kind in kinds.items()
        }

    def gather(self, name: str, rows: NDArray[np.int64] | None) -> ColumnValues:
        studies, name, places = self._dataset.studies, name.removeprefix(FACTS_PREFIX), _places(rows)
        if name == "modality":
            return _named(ColumnValues(studies.column(name)[places], names=tuple(studies.modalities)))
        if name == "has_report":
            return ColumnValues(studies.column("text_bytes")[places] > 0)
        if name in _SAMPLE_COUNTS:
            return ColumnValues(studies.column(name)[places])
        return _named(self._table.column(name, places))


class _SeriesSource(ColumnSource):
    """Facts of series: the series table."""

    unit = "series"

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    @cached_property
    def _table(self) -> SeriesTable:
        return open_series(self._dataset)[0]

    @property
    def digest(self) -> str:
        return open_series(self._dataset)[1]

    def infos(self) -> Mapping[str, ColumnInfo]:
        if self._dataset.is_foreign:
            return {}
        kinds: dict[str, ColumnKind] = {name: kind.read_as for name, kind in KINDS.items()}
        names: dict[str, tuple[str, ...]] = {}
        with suppress(ConfigError):  # without the table, its columns are an error when they are read
            names = {name: self._table.vocabulary(name)[1:] for name in kinds if kinds[name] == "category"}
            kinds |= {name: "bool" for name in self._table.column_names if name.startswith(FLAG_PREFIX)}
        return {
            SERIES_PREFIX + name: ColumnInfo(SERIES_PREFIX + name, self.unit, kind, names.get(name, ()))
            for name, kind in kinds.items()
        }

    def gather(self, name: str, rows: NDArray[np.int64] | None) -> ColumnValues:
        return _named(self._table.column(name.removeprefix(SERIES_PREFIX), _places(rows)))


def _named(column: ColumnValues) -> ColumnValues:
    """Return a column whose empty name, always the first, is a missing value and no category."""
    codes, names = column.values, column.names
    if names is None or names[:1] != ("",):
        return column
    # What is missing becomes the largest number of the type: the others stay positions in the names.
    return ColumnValues(codes - codes.dtype.type(1), codes == 0, names[1:])


def _places(rows: NDArray[np.int64] | None) -> Any:
    """Return an index of rows; a slice where they follow each other, which copies nothing."""
    if rows is None:
        return slice(None)
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def num_unit_rows(dataset: Dataset, unit: TableUnit) -> int:
    """Return how many rows a table of a unit has beside a dataset."""
    if unit == "study":
        return dataset.studies.num_samples
    return open_series(dataset)[0].num_series if unit == "series" else int(image_starts(dataset)[-1])


def open_columns(dataset: Dataset) -> Columns:
    """Return the columns of a dataset: facts of studies and series, and those of its attached tables.

    Args:
        dataset: The dataset; its rows are studies, series, images or findings.

    Raises:
        FormatError: A table cannot be trusted.
        StorageError: Reading failed.
    """
    tables = [_TableSource(dataset, name, place) for name, place in dataset.tables.places.items()]
    return Columns(dataset, [_StudySource(dataset), _SeriesSource(dataset), *tables])


def carry_tables(store: ByteStore, former: Dataset, new: Dataset) -> None:
    """Write the newest tables of a version for the next one, before it is published.

    Samples keep their values by their keys; new samples have none. Rows of series and images are carried
    where the study has the same series, with as many images each.

    Args:
        store: Of the dataset.
        former: The version that has the tables.
        new: The next version, with its series table.

    Raises:
        FormatError: A table cannot be trusted.
        StorageError: It cannot be read or written.
    """
    for name, place in former.tables.places.items():
        manifest = place.manifest
        source = _TableSource(former, name, place)
        rows = _former_rows(former, new, manifest.unit)
        columns = [source.table.gather(one.name).take(rows) for one in manifest.columns]
        write_table(store, new.manifest.dataset_id, name, manifest.unit, columns, number=manifest.number)


def _former_rows(former: Dataset, new: Dataset, unit: TableUnit) -> NDArray[np.int64]:
    """Return the row that each row of a unit had in an earlier version; -1 where it had none."""
    keys, wanted = (np.asarray(one.studies.column("sample_key")) for one in (former, new))
    order = np.argsort(keys, kind="stable")
    places = np.minimum(np.searchsorted(keys, wanted, sorter=order), max(len(keys) - 1, 0))
    studies = np.where(keys[order[places]] == wanted, order[places], -1) if len(keys) else places - 1
    if unit == "study":
        return studies
    before, after = open_series(former)[0], open_series(new)[0]
    series = _matched(before.first_series(), after.first_series(), studies)
    old, now = before.array("num_slices"), after.array("num_slices")
    is_same = (series >= 0) & (old[series] == now if len(old) else False)
    # One series of other images makes all of its study new: nothing says which is which.
    owner = np.repeat(np.arange(len(studies)), np.diff(after.first_series()))
    is_torn = np.zeros(len(studies), bool)
    is_torn[owner[~is_same]] = True
    series = np.where(is_torn[owner], -1, series)
    return series if unit == "series" else _matched(image_starts(former), image_starts(new), series)


def _matched(
    before: NDArray[np.int64], after: NDArray[np.int64], owners: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the rows of the parts of owners that had as many parts before; -1 for those of others."""
    num_parts = np.diff(after)
    is_same = (owners >= 0) & (np.diff(before)[owners] == num_parts if len(before) > 1 else False)
    first = np.where(is_same, before[owners], 0)
    inside = np.arange(int(after[-1])) - np.repeat(after[:-1], num_parts)
    return np.where(np.repeat(is_same, num_parts), np.repeat(first, num_parts) + inside, -1)
