"""Review of a table by a person: rows go out as a CSV file, and corrections come back as its next version.

A file has the keys of each row (never more than keys of the dataset), the columns to correct, and others to
look at. A row that was deleted from it, or a cell that was not changed, changes nothing. What is read is
compared with the version that was written out, so corrections of two people, or of a file and a table that
went on, are merged, and a cell that both changed is refused.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, naming_os_errors
from shardflow.format.dataset import Dataset
from shardflow.format.facts.columns import Columns, image_starts, num_unit_rows, open_columns
from shardflow.format.facts.series import open_series
from shardflow.format.foreign.places import local_folder
from shardflow.format.manifest import load, versions
from shardflow.format.table import Table
from shardflow.format.tables import (
    COLUMN_NAME,
    MAX_CLASSES,
    ROWS_NAME,
    ColumnKind,
    ColumnsTable,
    ColumnValues,
    StoredColumn,
    TableManifest,
    TablePlace,
    TableUnit,
    check_table_name,
    load_table_manifest,
    open_columns_table,
    table_versions,
    write_table,
)
from shardflow.packing.tables.kinds import Profile, holds, parse_value
from shardflow.packing.tables.readers import open_table
from shardflow.storage import LocalStore
from shardflow.storage.node_files import own_bytes

_VERSION: Final = "table"
_NEW: Final = "new"
_MARK: Final = re.compile(r"([a-z][a-z0-9_]{0,63}):(\d{6}):([0-9a-f]{64})|([a-z][a-z0-9_]{0,63}):new")
_KEYS: Final[Mapping[TableUnit, tuple[str, ...]]] = {
    "study": ("sample_key",),
    "series": ("sample_key", "series"),
    "image": ("sample_key", "series", "image"),
}
"""Columns that name a row of a unit; another unit needs its names here, and its numbers in `_RowKeys`."""
_CORRECTED: Final = ("bool", "int", "float", "category")
_ROWS_AT_ONCE: Final = 1 << 14
_SAME: Final = 1e-5
"""Relative difference up to which a number is that of the table: spreadsheets round."""
_MAX_NAMED: Final = 5


class _RowKeys:
    """Keys of the rows of a unit: the key of the study, and the numbers of series and image in it from 0.

    Args:
        dataset: The dataset; its rows are studies.
        unit: What a row is.
    """

    def __init__(self, dataset: Dataset, unit: TableUnit) -> None:
        self.names, self._dataset = _KEYS[unit], dataset
        self.num_rows = num_unit_rows(dataset, unit)
        self._starts: list[NDArray[np.int64]] = []
        if unit != "study":
            self._starts.append(open_series(dataset)[0].first_series())
        if unit == "image":
            self._starts.append(image_starts(dataset))

    def of_studies(self, studies: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the unit that belong to studies, ascending."""
        rows = studies
        for starts in self._starts:
            lengths = starts[rows + 1] - starts[rows]
            before = np.cumsum(lengths) - lengths
            rows = np.arange(int(lengths.sum())) + np.repeat(starts[rows] - before, lengths)
        return rows

    def keys(self, rows: NDArray[np.int64]) -> list[list[str]]:
        """Return a list of texts for each of the names."""
        numbers: list[list[str]] = []
        for starts in reversed(self._starts):
            owners = np.searchsorted(starts, rows, side="right") - 1
            numbers.insert(0, (rows - starts[owners]).astype(str).tolist())
            rows = owners
        studies = self._dataset.studies.gather("sample_key", rows).astype("U").tolist()
        return [studies, *numbers]

    def studies(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the study that each row belongs to."""
        for starts in reversed(self._starts):
            rows = np.searchsorted(starts, rows, side="right") - 1
        return rows

    def find(self, keys: Sequence[Sequence[Any]]) -> NDArray[np.int64]:
        """Return the row that each combination of keys names, ``(n,)``; -1 where there is none."""
        column = np.asarray(self._dataset.studies.column("sample_key"))
        order = np.argsort(column, kind="stable")
        wanted = np.array([str(key).strip().encode("utf-8", "surrogatepass") for key in keys[0]], "S")
        places = np.minimum(np.searchsorted(column, wanted, sorter=order), len(column) - 1)
        rows = np.where(column[order[places]] == wanted, order[places], -1)
        for starts, numbers in zip(self._starts, keys[1:], strict=True):
            inside = np.array([_natural(number) for number in numbers], np.int64)
            there = (rows >= 0) & (inside >= 0)
            first = starts[np.where(there, rows, 0)]
            there &= first + inside < starts[np.where(there, rows, 0) + 1]
            rows = np.where(there, first + inside, -1)
        return rows


def _natural(value: Any) -> int:
    kind, number = parse_value(value)
    return int(number) if kind == "int" and number >= 0 else -1


# ---- writing out ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenRows:
    """Rows that were written out; counts alone."""

    table: str
    unit: TableUnit
    num_rows: int
    columns: tuple[str, ...]
    """To correct."""
    shown: tuple[str, ...]
    """To look at."""


def write_review(
    dataset: Dataset,
    studies: NDArray[np.int64],
    file: Path,
    *,
    table: str,
    columns: Sequence[str] | None = None,
    add: Sequence[str] = (),
    show: Sequence[str] = (),
    limit: int | None = None,
    seed: int = 0,
) -> WrittenRows:
    """Write rows of a table as a CSV file for a person.

    Args:
        dataset: The dataset; its rows are studies.
        studies: ``(n,)`` ascending rows of the studies whose rows are written.
        file: The CSV file, which must not exist.
        table: Name of the table; a new one if there is none, of studies.
        columns: Its columns to correct; by default all of bool, int, float and category.
        add: Names of further columns, which are empty.
        show: Full names of other columns to look at, such as ``predictions.edema``; these are not read back.
        limit: Most rows; of more a random sample, the same for the same seed.
        seed: Of that sample.

    Raises:
        ConfigError: A name is none, or the file exists.
        StorageError: It cannot be written.
    """
    known = open_columns(dataset)
    place = dataset.tables.places.get(table)
    unit: TableUnit = "study" if place is None else place.manifest.unit
    if place is None:
        check_table_name(table)
    chosen = _columns_to_correct(table, place, columns, add)
    for name in show:
        if name not in known:
            raise ConfigError(f"There is no column {name!r} to show; `shardflow columns DATASET` lists them.")
        if known[name].unit not in ("study", unit):
            raise ConfigError(f"{name} is of each {known[name].unit}, and the rows are of each {unit}.")
    keys = _RowKeys(dataset, unit)
    rows = keys.of_studies(studies)
    if limit is not None and len(rows) > limit:
        rows = np.sort(np.random.Generator(np.random.PCG64(seed)).choice(rows, limit, replace=False))
    mark = f"{table}:{_NEW}"
    if place is not None:
        mark = f"{table}:{place.manifest.number:06d}:{place.manifest.digest}"
    header = [*keys.names, *show, *(f"{table}.{name}" for name in chosen), _VERSION]
    if file.exists():
        raise ConfigError(f"{file.name} exists, and may hold corrections; name another file, or move it.")
    with naming_os_errors("writing rows for review"), file.open("x", newline="", encoding="utf-8") as out:
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(header)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            block = rows[start : start + _ROWS_AT_ONCE]
            texts = keys.keys(block)
            texts += [_texts(_of_rows(known, name, unit, keys, block)) for name in show]
            texts += [
                _texts(known.stored(f"{table}.{name}", block)) if name not in add else [""] * len(block)
                for name in chosen
            ]
            lines.writerows(zip(*texts, [mark] * len(block), strict=True))
    return WrittenRows(table=table, unit=unit, num_rows=len(rows), columns=tuple(chosen), shown=tuple(show))


def _columns_to_correct(
    table: str, place: TablePlace | None, columns: Sequence[str] | None, add: Sequence[str]
) -> list[str]:
    kinds = {} if place is None else {one.name: one.kind for one in place.manifest.columns}
    if columns is None:
        columns = [name for name, kind in kinds.items() if kind in _CORRECTED]
    for name in columns:
        if name not in kinds:
            there = ", ".join(kinds) or "none, for there is no such table"
            raise ConfigError(
                f"The table {table!r} has no column {name!r}; it has {there}. --add makes a new one."
            )
        if kinds[name] not in _CORRECTED:
            raise ConfigError(
                f"{table}.{name} is of the kind {kinds[name]}; a person corrects columns of "
                f"{', '.join(_CORRECTED)}."
            )
    for name in add:
        if not COLUMN_NAME.fullmatch(name) or name in kinds:
            raise ConfigError(
                f"--add names a new column, 1 to 64 of a-z, 0-9 and _ after a letter; got {name!r}."
            )
    found = [*columns, *add]
    if not found:
        raise ConfigError(
            f"The table {table!r} has no column to correct; name new ones with --add, such as --add finding."
        )
    return found


def _of_rows(
    known: Columns, name: str, unit: TableUnit, keys: _RowKeys, rows: NDArray[np.int64]
) -> ColumnValues:
    """Return values of a column for rows of a unit; one of a study repeats."""
    return known.stored(name, rows if known[name].unit == unit else keys.studies(rows))


def _texts(column: ColumnValues) -> list[str]:
    """Return the values of a column as a CSV has them; empty where missing."""
    values, missing = column.values, column.is_missing
    if column.names is not None:
        names = np.array([*column.names, ""], object)
        found: list[str] = names[np.minimum(values.astype(np.int64), len(column.names))].tolist()
    elif values.dtype == bool:
        found = np.where(values, "true", "false").tolist()
    elif values.dtype.kind == "S":
        found = values.astype("U").tolist()
    elif values.ndim > 1:
        found = [str([*map(float, row)]) for row in values]
    elif values.dtype.kind == "f":
        found = [repr(float(value)) for value in values.tolist()]
    else:
        found = [str(value) for value in values.tolist()]
    if missing is None:
        return found
    return ["" if gone else text for text, gone in zip(found, missing.tolist(), strict=True)]


# ---- reading back --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """Result of reading a file back; counts alone."""

    table: str
    number: int
    """Of the version of the table."""
    digest: str
    is_new: bool
    """Whether anything was changed."""
    num_rows: int
    """Rows of the file."""
    changed: Mapping[str, int]
    """Values that another one replaces, by column."""
    filled: Mapping[str, int]
    """Values where there was none."""
    cleared: Mapping[str, int]
    """Values that are missing now."""


def read_review(
    dataset: Dataset, file: Path, *, allows_new_classes: bool = False, mark: str | None = None
) -> Corrections:
    """Read a file of `write_review` back, and write the next version of its table.

    Args:
        dataset: The dataset; its rows are studies.
        file: The CSV file, as a person changed it.
        allows_new_classes: Whether a category may get a value that it does not have yet.
        mark: Column of bool that becomes true for every row of the file; None for no such column.

    Raises:
        ConfigError: The file is none of these, names unknown rows, holds a value that does not fit, or
            changes one that was changed meanwhile; nothing is written.
        StorageError: The table cannot be written.
    """
    rows = _read_rows(dataset, file)
    name, columns = rows.table, []
    place = dataset.tables.places.get(name)
    store = local_folder(dataset.store if place is None else place.store or dataset.store)
    if store is None:
        raise ConfigError(
            f"The table {name!r} is in a store that is remote; corrections are written beside a dataset in a "
            "local folder, or into a folder of tables= that holds the table."
        )
    newest = None if place is None else _open(store, place.manifest)
    exported = None if rows.number is None else _exported(dataset, store, rows)
    if (newest is None) != (exported is None):
        state = "was removed" if newest is None else "was made"
        raise ConfigError(
            f"The table {name!r} {state} after the file was written; write the rows out again, and copy the "
            "corrections."
        )
    counts: dict[str, tuple[int, int, int]] = {}
    kinds: dict[str, ColumnKind] = {} if newest is None else newest.kinds
    for column in [*kinds, *(one for one in rows.values if one not in kinds)]:
        stored = newest.gather(column) if newest is not None and column in kinds else None
        if column in rows.values:
            had = _exported_values(exported, column)
            stored, counts[column] = _corrected(
                rows, column, stored, had, allows_new_classes=allows_new_classes
            )
        if stored is not None:
            columns.append(stored)
    if mark is not None:
        columns = [*(one for one in columns if one.name != mark), _marked(columns, mark, rows)]
    manifest, is_new = write_table(store, dataset.manifest.dataset_id, name, rows.unit, columns)
    return Corrections(
        table=name,
        number=manifest.number,
        digest=manifest.digest,
        is_new=is_new,
        num_rows=len(rows.targets),
        changed={one: numbers[0] for one, numbers in counts.items() if numbers[0]},
        filled={one: numbers[1] for one, numbers in counts.items() if numbers[1]},
        cleared={one: numbers[2] for one, numbers in counts.items() if numbers[2]},
    )


@dataclass(slots=True)
class _Rows:
    """Rows of a file."""

    file: str
    table: str
    number: int | None
    """Of the version that was written out; None for a new table."""
    digest: str
    unit: TableUnit
    num_targets: int
    keys: list[list[Any]]
    targets: NDArray[np.int64]
    """``(n,)`` row of the unit."""
    values: dict[str, list[Any]] = field(default_factory=dict)
    """Parsed values of each column to correct, as pairs of kind and value."""


def _read_rows(dataset: Dataset, file: Path) -> _Rows:
    cells: dict[str, list[Any]] = {}
    if file.suffix.lower() != ".csv":
        raise ConfigError(f"{file.name} is no CSV file of `shardflow review`; name the file that it wrote.")
    for batch in open_table(file)(file):
        for name, values in batch.items():
            cells.setdefault(name, []).extend(values)
    marks = {str(one).strip() for one in cells.get(_VERSION, ())}
    found = _MARK.fullmatch(next(iter(marks), "")) if len(marks) == 1 else None
    if found is None or "sample_key" not in cells:
        raise ConfigError(
            f"{file.name} lacks the columns sample_key and {_VERSION} as `shardflow review` wrote them; put "
            "them back, equal in all rows of the column table."
        )
    table = found[1] or found[4]
    unit: TableUnit = "study"
    if found[2] is not None:
        place = dataset.tables.places.get(table)
        unit = "study" if place is None else place.manifest.unit
    keys = _RowKeys(dataset, unit)
    missing = [name for name in keys.names if name not in cells]
    if missing:
        raise ConfigError(f"{file.name} lacks the column {missing[0]}, which names its rows; put it back.")
    named = [cells[name] for name in keys.names]
    targets = keys.find(named)
    _refuse(file.name, np.flatnonzero(targets < 0), "name no row of this version of the dataset")
    order = np.argsort(targets, kind="stable")
    again = order[1:][targets[order[1:]] == targets[order[:-1]]]
    _refuse(file.name, np.sort(again), "repeat the key of an earlier row; keep one")
    prefix = f"{table}."
    chosen = {name.removeprefix(prefix): values for name, values in cells.items() if name.startswith(prefix)}
    for name in chosen:
        if not COLUMN_NAME.fullmatch(name):
            raise ConfigError(f"{prefix}{name} of {file.name} is no name of a column: a-z, 0-9 and _.")
    if not chosen:
        raise ConfigError(f"{file.name} has no column {prefix}NAME to read corrections from.")
    parsed = {name: [parse_value(_trimmed(one)) for one in column] for name, column in chosen.items()}
    number = None if found[2] is None else int(found[2])
    return _Rows(file.name, table, number, found[3] or "", unit, keys.num_rows, named, targets, parsed)


def _trimmed(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _refuse(file: str, places: NDArray[np.intp], problem: str) -> None:
    """Refuse rows of a file, by their lines."""
    if len(places):
        lines = ", ".join(str(place + 2) for place in places[:_MAX_NAMED].tolist())
        more = ", ..." if len(places) > _MAX_NAMED else ""
        raise ConfigError(f"{len(places):,} rows of {file} {problem} (lines {lines}{more}).")


def _open(store: LocalStore, manifest: TableManifest) -> ColumnsTable:
    path = f"{manifest.folder}/{ROWS_NAME}"
    buffer = own_bytes(store, path, sha256=manifest.sha256, num_bytes=manifest.num_bytes)
    return open_columns_table(Table(buffer, name=path), manifest)


def _exported(dataset: Dataset, store: LocalStore, rows: _Rows) -> tuple[ColumnsTable, NDArray[np.int64]]:
    """Return the version of the table that the file was written from, and its rows that the file has.

    It may belong to an earlier version of the dataset, to which samples have been added since.
    """
    for number in reversed(versions(dataset.store)):
        manifest = load(dataset.store, number)
        if rows.number in table_versions(store, manifest.dataset_id).get(rows.table, ()):
            found = load_table_manifest(store, rows.table, rows.number or 0, manifest.dataset_id)
            if found.digest == rows.digest:
                former = Dataset(dataset.store, manifest)
                return _open(store, found), _RowKeys(former, rows.unit).find(rows.keys)
    raise ConfigError(
        f"{rows.file} was written from version {rows.number} of the table {rows.table!r}, which was deleted; "
        "write the rows out again, and copy the corrections."
    )


def _exported_values(exported: tuple[ColumnsTable, NDArray[np.int64]] | None, name: str) -> list[Any] | None:
    """Return what the file held of a column when it was written; None if the table had no such column."""
    if exported is None or name not in exported[0].kinds:
        return None
    table, targets = exported
    return _plain(table.gather(name), targets)


def _corrected(
    rows: _Rows,
    name: str,
    stored: StoredColumn | None,
    exported: list[Any] | None,
    *,
    allows_new_classes: bool,
) -> tuple[StoredColumn | None, tuple[int, int, int]]:
    """Return a column with the corrections of a file, and how many values they replace, fill and clear."""
    full = f"{rows.table}.{name}"
    if stored is None:
        stored, allows_new_classes = _new_column(rows, name), True
        if stored is None:
            return None, (0, 0, 0)
    wanted, names = _wanted(rows, name, stored, allows_new_classes=allows_new_classes)
    current = _plain(stored, rows.targets)
    exported = current if exported is None else exported
    is_change = _differ(exported, wanted) & _differ(current, wanted)
    both = f"correct a value of {full} that a newer version changed too; write these rows out again"
    _refuse(rows.file, np.flatnonzero(is_change & _differ(exported, current)), both)
    values = np.array(stored.values, copy=True)
    if stored.kind == "category":
        code = {text: number for number, text in enumerate(names)}
        order = np.array([*(code[text] for text in stored.names), 0], np.int64)
        values = order[np.minimum(values.astype(np.int64), len(stored.names))]
        wanted = [None if text is None else code[text] for text in wanted]
    elif stored.kind in ("int", "float"):
        values = values.astype(np.int64 if stored.kind == "int" else np.float64)
    is_missing = np.array(stored.is_missing, copy=True)
    num_changed = num_filled = num_cleared = 0
    for place in np.flatnonzero(is_change).tolist():
        value, target = wanted[place], rows.targets[place]
        num_changed += value is not None and not is_missing[target]
        num_filled += value is not None and bool(is_missing[target])
        num_cleared += value is None
        is_missing[target] = value is None
        values[target] = 0 if value is None else value
    column = StoredColumn(name=name, kind=stored.kind, values=values, is_missing=is_missing, names=names)
    return column.take(np.arange(len(values))), (num_changed, num_filled, num_cleared)


def _wanted(
    rows: _Rows, name: str, stored: StoredColumn, *, allows_new_classes: bool
) -> tuple[list[Any], tuple[str, ...]]:
    """Return the values that a file has for a column, and the classes of it with those of the file.

    Raises:
        ConfigError: A value is of another kind, or a class is new.
    """
    parsed, kind, full = rows.values[name], stored.kind, f"{rows.table}.{name}"
    if kind not in _CORRECTED:
        raise ConfigError(
            f"{full} is of the kind {kind}; a person corrects columns of {', '.join(_CORRECTED)}."
        )
    _refuse(
        rows.file,
        np.flatnonzero([one != "missing" and not holds(kind, one, value) for one, value in parsed]),
        f"hold a value in {full} that is no {kind}",
    )
    if kind != "category":
        return [None if one == "missing" else value for one, value in parsed], ()
    texts = [None if one == "missing" else str(value) for one, value in parsed]
    known = {*stored.names}
    is_new = np.array([text is not None and text not in known for text in texts], bool)
    folded = {text.casefold() for text in known}
    is_slip = np.array([text is not None and text.casefold() in folded for text in texts], bool)
    _refuse(
        rows.file, np.flatnonzero(is_new & is_slip), f"write a class of {full} in another case than it has"
    )
    if not allows_new_classes:
        _refuse(
            rows.file,
            np.flatnonzero(is_new),
            f"hold a class that {full} does not have; --new-classes adds it",
        )
    known.update(text for text in texts if text is not None)
    if len(known) > MAX_CLASSES:
        raise ConfigError(f"{full} would have more than {MAX_CLASSES:,} classes; correct the file.")
    return texts, tuple(sorted(known))


def _differ(some: Sequence[Any], others: Sequence[Any]) -> NDArray[np.bool_]:
    return np.array([not _same(one, other) for one, other in zip(some, others, strict=True)], bool)


def _new_column(rows: _Rows, name: str) -> StoredColumn | None:
    """Return an empty column of the kind that the values of a file have; None if it has none."""
    profile = Profile(name)
    profile.add([value for kind, value in rows.values[name] if kind != "missing"])
    if not profile.num_values:
        return None
    refusal = profile.refusal()
    if refusal in ("DICOM UIDs", "free text", "dates"):
        raise ConfigError(
            f"{rows.table}.{name} of {rows.file} looks like {refusal}, which stays out of a dataset."
        )
    kind = profile.kind()
    dtype = {"bool": "?", "int": "<i8", "float": "<f8"}.get(kind, "<i8")
    return StoredColumn(
        name=name,
        kind=kind,
        values=np.zeros(rows.num_targets, dtype),
        is_missing=np.ones(rows.num_targets, bool),
    )


def _plain(column: StoredColumn, rows: NDArray[np.int64]) -> list[Any]:
    """Return values as Python has them, None where missing."""
    values, missing = column.values[rows], column.is_missing[rows] | (rows < 0)
    found = values.tolist()
    if column.kind == "category":
        names = (*column.names, "")
        found = [names[min(code, len(column.names))] for code in found]
    return [None if gone else value for value, gone in zip(found, missing.tolist(), strict=True)]


def _same(old: Any, new: Any) -> bool:
    if old is None or new is None:
        return old is new
    if isinstance(old, float) and isinstance(new, int | float):
        return math.isclose(old, new, rel_tol=_SAME)
    return bool(old == new)


def _marked(columns: Sequence[StoredColumn], name: str, rows: _Rows) -> StoredColumn:
    """Return a column of bool that is true for every row of a file, besides those that were before."""
    former = next((one for one in columns if one.name == name), None)
    if former is not None and former.kind != "bool":
        raise ConfigError(f"--mark names a column of bool, {rows.table}.{name} is of the kind {former.kind}.")
    if not COLUMN_NAME.fullmatch(name):
        raise ConfigError(f"--mark names a column, 1 to 64 of a-z, 0-9 and _ after a letter; got {name!r}.")
    values = np.zeros(rows.num_targets, bool)
    if former is not None:
        values |= former.values & ~former.is_missing
    values[rows.targets] = True
    return StoredColumn(name=name, kind="bool", values=values, is_missing=np.zeros(rows.num_targets, bool))
