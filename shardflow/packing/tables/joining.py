"""Joining of a table of a file to the samples of a dataset.

The file is read twice in batches: once for the kinds of its columns and the targets of its keys, once for the
values. What does not fit is counted, and listed in the private folder, because it names identifiers.
"""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.format.dataset import Dataset
from shardflow.format.foreign.places import local_folder
from shardflow.format.tables import ColumnKind, StoredColumn, TableUnit, check_table_name, write_table
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.settings import KeyKind, TableFile
from shardflow.packing.sources.layouts.base import LabelTable, restored
from shardflow.packing.tables.keys import (
    KeyIndex,
    PrivateFolder,
    default_unit,
    open_keys,
    study_keys,
)
from shardflow.packing.tables.kinds import ColumnBuilder, Profile, column_name
from shardflow.packing.tables.readers import Batch, TableReader, Values, open_table
from shardflow.storage import LocalStore, write_atomic

_LOGGER = logging.getLogger(__name__)
_MAX_LISTED: Final = 1_000_000
_ROWS: Final = 8_192
_TARGETS_AT_ONCE: Final = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSettings:
    """Settings of a join."""

    name: str
    """Of the table; its columns are ``NAME.COLUMN``."""
    on: KeyKind
    unit: str | None = None
    """What a row of the table is: ``study``, ``series`` or ``image``; by default what the key names."""
    key_column: str | None = None
    """Column of the file that holds the keys; by default the one named like ``on``."""
    columns: Sequence[str] | None = None
    """Columns to take; by default all that look like none of identifiers, dates or free text."""
    types: Mapping[str, ColumnKind] = field(default_factory=dict)
    """Kinds of columns that are not to be found from their values."""

    def __post_init__(self) -> None:
        check_table_name(self.name)
        default_unit(self.on, self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachedTable:
    """Result of a join; counts alone, no identifier."""

    name: str
    number: int
    """Of the version of the table."""
    digest: str
    is_new: bool
    """Whether the content differs from the newest version."""
    unit: TableUnit
    num_rows: int
    """Rows of the dataset."""
    num_without_row: int
    """Those without a row of the file."""
    num_file_rows: int
    num_unmatched: int
    """Rows of the file that name no sample."""
    num_ambiguous: int
    """Rows of the file whose path several samples have, or whose accession number several patients have."""
    num_without_key: int
    num_through_float: int
    """Keys that a writer stored as floating-point numbers."""
    num_duplicates: int
    """Rows that repeat an earlier one with equal values."""
    type_conflicts: Mapping[str, int]
    """By column the number of values that it cannot hold, which count as missing."""
    columns: Mapping[str, ColumnKind]
    left_out: Mapping[str, str]
    """Columns of the file that were not taken, and why."""
    taken_anyway: Mapping[str, str]
    """Columns that look like none of a dataset, and why; they were named."""


def attach_table(
    dataset: Dataset,
    file: Path,
    settings: TableSettings,
    *,
    private: PrivateFolder | None = None,
    to: Path | None = None,
) -> AttachedTable:
    """Join a file to the samples of a dataset, and write the table beside it.

    Args:
        dataset: A dataset in a folder; with ``to`` in any store.
        file: CSV, JSON lines or Parquet, or what a reader of `readers` takes.
        settings: Of the join.
        private: Private folder of the dataset.
        to: Folder for the table, for a dataset that is read-only; see ``sf.open(path, tables=[folder])``.

    Raises:
        ConfigError: The file, its key or a column cannot be used; the message says what to write instead.
        ShardflowError: The dataset cannot be read.
        StorageError: The table cannot be written.
    """
    store = local_folder(dataset.store) if to is None else LocalStore(to)
    if store is None:
        raise ConfigError(
            "A table is attached to a dataset in a local folder, this one is remote; write --to DIR, and "
            "open it with sf.open(path, tables=[DIR])."
        )
    unit = default_unit(settings.on, settings.unit)
    reader = open_table(file)
    index = open_keys(dataset, settings.on, unit, private)
    join = _Join(reader, file, settings, index)
    return _write(dataset, join, store, None if private is None else private.path)


def check_table_files(tables: Sequence[TableFile]) -> None:
    """Refuse tables of a job that cannot be joined, as far as their first rows tell.

    Raises:
        ConfigError: A file is missing or of no known kind, or lacks its key or a column.
    """
    for table in tables:
        settings = _settings(table)
        batch = next(iter(open_table(table.file)(table.file)), None)
        if batch is not None:
            check_columns(batch, table.file, settings)


def attach_table_files(
    dataset: Dataset, tables: Sequence[TableFile], private: PrivateFolder, output: Path
) -> list[AttachedTable]:
    """Attach the tables that the settings of a job name; one that does not fit is left out with a warning.

    Args:
        dataset: The version; it need not be published yet.
        tables: From the settings.
        private: Private folder of the dataset.
        output: Its folder.

    Raises:
        StorageError: A table cannot be written.
    """
    done = []
    for table in tables:
        try:
            done.append(attach_table(dataset, table.file, _settings(table), private=private, to=output))
        except ConfigError as error:
            _LOGGER.warning("table %s of the settings is not attached: %s", table.name, error.message)
    return done


def _settings(table: TableFile) -> TableSettings:
    return TableSettings(
        name=table.name,
        on=table.on,
        unit=table.unit,
        key_column=table.key_column,
        columns=table.columns,
        types=table.types,
    )


def attach_labels(
    dataset: Dataset, labels: Sequence[LabelTable], secret: SecretKey, output: Path, private: Path
) -> list[AttachedTable]:
    """Attach the tables of labels that a layout found; those without files are left out.

    A table that cannot be used is left out with a warning: labels that are wrong are no reason not to pack.

    Args:
        dataset: The version; it need not be published yet.
        labels: From `shardflow.packing.sources.layouts.base.PlacedLayout.labels`.
        secret: Key of the dataset.
        output: Its folder.
        private: Its private folder.

    Raises:
        StorageError: A table cannot be written.
    """
    done = []
    for table in labels:
        if not table.files and not table.rows:
            continue
        settings = TableSettings(name=table.name, on="study_instance_uid", columns=table.columns)
        try:
            reader = _LabelReader(table)
            if not reader.has_classes:  # a list of images alone
                continue
            settings = replace(settings, columns=reader.columns)
            file = table.files[0] if table.files else Path(table.name)
            join = _Join(reader, file, settings, study_keys(dataset, secret))
            done.append(_write(dataset, join, LocalStore(output), private))
        except ConfigError as error:
            _LOGGER.warning("labels %s of the layout are not attached: %s", table.name, error.message)
    return done


class _LabelReader:
    """Reader of the labels of a layout, which names the study of each row.

    Raises:
        ConfigError: A file cannot be read.
    """

    def __init__(self, table: LabelTable) -> None:
        self._table = table
        self._classes: dict[str, str] = {}
        self.has_classes = not table.classes
        if table.classes:
            for batch in self._batches():
                self.has_classes |= table.classes in batch
                for value in batch.get(table.classes, ()):
                    self._classes |= {column_name(one): one for one in _listed(value)}
        self.columns = table.columns
        if table.columns is not None:
            self.columns = (*table.columns, *self._classes)

    def __call__(self, _: Path) -> Iterator[Batch]:
        for batch in self._batches():
            yield dict(self._with_study(batch))

    def _batches(self) -> Iterator[Batch]:
        rows = self._table.rows
        for start in range(0, len(rows), _ROWS):
            block = rows[start : start + _ROWS]
            yield {name: [row[name] for row in block] for name in block[0]}
        for file in self._table.files:
            yield from open_table(file)(file)

    def _with_study(self, batch: Batch) -> Iterator[tuple[str, Values]]:
        table = self._table
        if any(key not in batch for key in table.keys):
            raise ConfigError(f"there is no column {table.keys[0]!r} of studies.")
        rows = zip(*(batch[key] for key in table.keys), strict=True)
        yield "study_instance_uid", [table.study([str(value).strip() for value in row]) for row in rows]
        for name, values in batch.items():
            if name not in table.keys and name != table.classes and column_name(name) != "study_instance_uid":
                yield name, values
        if table.classes:
            found = [frozenset(map(column_name, _listed(value))) for value in batch[table.classes]]
            known = [isinstance(value, str) and value.strip()[:1] == "[" for value in batch[table.classes]]
            for name in self._classes:
                pairs = zip(found, known, strict=True)
                yield name, [name in each if is_known else None for each, is_known in pairs]


def _listed(value: Any) -> list[str]:
    """Return the texts of a list as Python or JSON writes it."""
    try:
        found = ast.literal_eval(value) if isinstance(value, str) else []
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [one.strip() for one in found if isinstance(one, str) and one.strip()] if found else []


def _write(dataset: Dataset, join: _Join, store: LocalStore, private: Path | None) -> AttachedTable:
    """Join, write the table, and list what does not fit."""
    settings, index = join.settings, join.index
    unit = default_unit(settings.on, settings.unit)
    try:
        join.survey()
        columns = join.fill()
    finally:
        join.list_problems(dataset, private)
    rows = index.target_of_row
    stored = []
    while columns:  # one at a time, so that no column is in memory twice for long
        stored.append(columns.pop(0).take(rows))
    manifest, is_new = write_table(store, dataset.manifest.dataset_id, settings.name, unit, stored)
    return AttachedTable(
        name=settings.name,
        number=manifest.number,
        digest=manifest.digest,
        is_new=is_new,
        unit=unit,
        num_rows=len(rows),
        num_without_row=int(np.count_nonzero(~join.has_row())),
        num_file_rows=len(join.targets),
        num_unmatched=join.num_unmatched,
        num_ambiguous=join.num_ambiguous,
        num_without_key=join.num_without_key,
        num_through_float=join.num_through_float,
        num_duplicates=join.num_duplicates,
        type_conflicts=join.type_conflicts,
        columns={one.name: one.kind for one in stored},
        left_out=join.left_out,
        taken_anyway=join.taken_anyway,
    )


class _Join:
    def __init__(self, reader: TableReader, file: Path, settings: TableSettings, index: KeyIndex) -> None:
        self._read, self._file, self.settings, self.index = reader, file, settings, index
        self._profiles: dict[str, Profile] = {}
        self._key: str | None = None
        self._problems: list[dict[str, Any]] = []
        self.targets = np.zeros(0, np.int64)
        self.left_out: dict[str, str] = {}
        self.taken_anyway: dict[str, str] = {}
        self.num_unmatched = self.num_ambiguous = self.num_without_key = self.num_through_float = 0
        self.num_duplicates = 0
        self.type_conflicts: dict[str, int] = {}

    # ---- first pass ----------------------------------------------------------------------------------

    def survey(self) -> None:
        """Find the target of each row of the file, and the kinds of its columns."""
        targets = []
        first = 1
        for batch in self._read(self._file):
            self._check_columns(batch)
            num = _num_rows(batch)
            targets.append(self._find(batch.get(self._key or "", [None] * num), first))
            for name, values in batch.items():
                if name != self._key and self._is_wanted(name):
                    self._profiles.setdefault(name, Profile(name)).add(values)
            first += num
        if self._key is None:
            raise ConfigError(f"{self._file.name} holds no row; is it the right file?")
        self.targets = np.concatenate([np.zeros(0, np.int64), *targets])
        if len(self.targets) and not (self.targets >= 0).any():
            raise ConfigError(
                f"None of the {len(self.targets):,} rows of {self._file.name} names a sample by its "
                f"{self.settings.on}; is it the right column (--key-column), and the right dataset?"
            )

    def _check_columns(self, batch: Batch) -> None:
        if self._key is None:
            self._key = check_columns(batch, self._file, self.settings)

    def _is_wanted(self, name: str) -> bool:
        chosen = self.settings.columns
        return chosen is None or name in chosen or column_name(name) in chosen

    def _find(self, values: Values, first: int) -> NDArray[np.int64]:
        found = [restored(value) for value in values]
        targets = self.index.find([text for text, _ in found])
        through_float = sum(is_float for _, is_float in found)
        self.num_through_float += through_float
        for place in np.flatnonzero(targets < 0).tolist():
            text, is_float = found[place]
            if not text and not is_float:
                self.num_without_key += 1
                problem = "no key"
            elif targets[place] == -1:
                self.num_unmatched += 1
                problem = "a rounded key" if not text else "no sample"
            else:
                self.num_ambiguous += 1
                problem = "several samples"
            self._note(first + place, problem, key=str(values[place]))
        return targets

    # ---- columns -------------------------------------------------------------------------------------

    def _builders(self) -> list[tuple[str, ColumnBuilder]]:
        settings, builders = self.settings, []
        names: dict[str, str] = {}
        for source, profile in self._profiles.items():
            short = column_name(source)
            kind = settings.types.get(source) or settings.types.get(short)
            refusal = profile.refusal()
            if refusal == "DICOM UIDs" and settings.columns is not None:
                raise ConfigError(
                    f"The column {source!r} holds DICOM UIDs, which never enter a dataset; leave it out of "
                    "--columns."
                )
            is_named = settings.columns is not None or kind is not None
            if refusal is not None and not (is_named and profile.num_values):
                self.left_out[short] = refusal
                continue
            if refusal is not None:
                self.taken_anyway[short] = refusal
            if short in names:
                raise ConfigError(
                    f"The columns {names[short]!r} and {source!r} would both be {short}; rename one."
                )
            names[short] = source
            builders.append((source, ColumnBuilder(profile, kind or profile.kind(), self.index.num_targets)))
        if not builders:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
            raise ConfigError(
                f"No column of {self._file.name} is left to attach ({reasons or 'it has only the key'}); "
                "name columns that belong into the dataset with --columns."
            )
        return builders

    # ---- second pass ---------------------------------------------------------------------------------

    def fill(self) -> list[StoredColumn]:
        """Return the columns by target."""
        builders = self._builders()
        is_first = _are_first(self.targets, self.index.num_targets)
        num_different, first = 0, 0
        for batch in self._read(self._file):
            num = _num_rows(batch)
            rows = slice(first, first + num)
            targets, firsts = self.targets[rows], np.flatnonzero(is_first[rows])
            if len(targets) != num:
                break
            again = np.flatnonzero((targets >= 0) & ~is_first[rows])
            is_different = np.zeros(len(again), bool)
            for source, builder in builders:
                values, missing, conflicts = builder.convert(batch.get(source, [None] * num))
                builder.values[targets[firsts]] = values[firsts]
                builder.is_missing[targets[firsts]] = missing[firsts]
                for place in conflicts.tolist():
                    self._note(first + place + 1, "a value of another type", column=column_name(source))
                if len(again):
                    is_different |= _differs(builder, targets[again], values[again], missing[again])
            for place in again[is_different].tolist():
                self._note(first + place + 1, "other values than an earlier row of the same key")
            num_different += int(is_different.sum())
            self.num_duplicates += int((~is_different).sum())
            first += num
        if first != len(self.targets):
            raise ConfigError(f"{self._file.name} changed while it was read; try again.")
        if num_different:
            raise ConfigError(
                f"{num_different:,} rows of {self._file.name} repeat a key with other values than its first "
                "row, so none is right by itself; keep one row per key, or choose columns that agree with "
                "--columns. The rows are listed in the private folder."
            )
        self._count_conflicts(builders)
        self._profiles.clear()  # what was parsed takes more memory than what is stored
        columns = []
        for source, builder in builders:
            is_text = builder.kind in ("category", "string")
            names = builder.names() if is_text else ()
            columns.append(
                StoredColumn(
                    name=column_name(source),
                    kind=builder.kind,
                    values=builder.values,
                    is_missing=builder.is_missing,
                    names=names,
                )
            )
        return columns

    def _count_conflicts(self, builders: Sequence[tuple[str, ColumnBuilder]]) -> None:
        for source, builder in builders:
            if builder.num_conflicts:
                self.type_conflicts[column_name(source)] = builder.num_conflicts
                if builder.is_missing.all():
                    raise ConfigError(
                        f"No value of the column {source!r} of {self._file.name} is of the type "
                        f"{builder.kind}; name another one with --type, or leave the type to the file."
                    )

    def has_row(self) -> NDArray[np.bool_]:
        """Return which rows of the dataset a row of the file names."""
        is_named = np.zeros(self.index.num_targets + 1, bool)
        is_named[self.targets[self.targets >= 0]] = True
        is_named[-1] = False
        found: NDArray[np.bool_] = is_named[self.index.target_of_row]
        return found

    # ---- private list --------------------------------------------------------------------------------

    def _note(self, row: int, problem: str, **more: str) -> None:
        if len(self._problems) < _MAX_LISTED:
            self._problems.append({"row": row, "problem": problem, **more})

    def list_problems(self, dataset: Dataset, private: Path | None) -> None:
        """Write what does not fit into the private folder, one JSON object per line."""
        if private is None:
            return
        folder = private / "tables"
        folder.mkdir(mode=0o700, exist_ok=True)
        missing = [] if self.settings.unit not in (None, "study") else self._without_row(dataset)
        data = [json.dumps(line).encode() + b"\n" for line in (*self._problems, *missing)]
        write_atomic(folder / f"{self.settings.name}.jsonl", data, replace=True, mode=0o600)
        self._problems.clear()

    def _without_row(self, dataset: Dataset) -> list[dict[str, Any]]:
        if len(self.index.target_of_row) != dataset.studies.num_samples or not len(self.targets):
            return []
        keys = dataset.studies.gather("sample_key", np.flatnonzero(~self.has_row()))
        return [{"sample_key": key.decode(), "problem": "no row"} for key in keys[:_MAX_LISTED].tolist()]


def _are_first(targets: NDArray[np.int64], num_targets: int) -> NDArray[np.bool_]:
    """Return which rows of the file are the first of their target, in two bytes a row."""
    is_first, is_seen = np.zeros(len(targets), bool), np.zeros(num_targets + 1, bool)
    is_seen[-1] = True  # where negative numbers point: of rows that name nothing, none is the first
    for start in range(0, len(targets), _TARGETS_AT_ONCE):
        block = targets[start : start + _TARGETS_AT_ONCE]
        found, places = np.unique(block, return_index=True)
        is_new = ~is_seen[np.maximum(found, -1)]
        is_first[start + places[is_new]] = True
        is_seen[found[is_new]] = True
    return is_first


def check_columns(batch: Batch, file: Path, settings: TableSettings) -> str:
    """Return the column of the keys in the first rows of a file.

    Raises:
        ConfigError: It is missing, or a column that the settings name.
    """
    on, wanted = settings.on, settings.key_column
    names = {name: column_name(name) for name in batch}
    found = [name for name, short in names.items() if name == wanted or short == (wanted or on)]
    if len(found) != 1:
        flag = f"named {wanted!r}" if wanted else f"of {on}; name it with --key-column"
        raise ConfigError(
            f"{file.name} has {'several columns' if found else 'no column'} {flag}. It has "
            f"{', '.join(names)}."
        )
    for name in settings.columns or ():
        if name not in names and name not in names.values():
            raise ConfigError(f"{file.name} has no column {name!r}; it has {', '.join(names)}.")
    for name in settings.types:
        if name not in names and name not in names.values():
            raise ConfigError(f"--type names no column of {file.name}: {name!r}.")
    return found[0]


def _num_rows(batch: Batch) -> int:
    return len(next(iter(batch.values()), ()))


def _differs(
    builder: ColumnBuilder, targets: NDArray[np.int64], values: NDArray[Any], missing: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    same = builder.values[targets] == values
    is_same = same.all(axis=1) if same.ndim > 1 else same
    there = builder.is_missing[targets]
    found: NDArray[np.bool_] = np.where(missing | there, missing != there, ~is_same)
    return found
