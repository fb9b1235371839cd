"""Attached tables: columns joined to the samples of a dataset later, without touching a shard.

A sidecar, written by ``shardflow attach DATASET FILE --name NAME --on KEY``: ``tables/<name>-<number>/
<dataset_id>/`` holds ``rows.tbl``, one row per study, series or image in the order of the dataset, and
``manifest.json``, which names it and is written last. Both are immutable; who opens the dataset reads the
newest number. A version without columns says that the table was removed. No key of the source is stored. The
layout is in docs/format.md, section 18.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import (
    AlreadyExistsError,
    ConfigError,
    FormatError,
    NoListingError,
    StorageError,
    os_reason,
)
from shardflow.format.keys import DIGEST_PATTERN, Json, sha256_hex
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table, encode_table
from shardflow.storage import ByteStore, LocalStore

ROWS_NAME: Final = "rows.tbl"
TableUnit: TypeAlias = Literal["study", "series", "image"]
ColumnKind: TypeAlias = Literal["bool", "int", "float", "category", "string", "floats"]
TABLE_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
COLUMN_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
MAX_CLASSES: Final = 4096
"""Values that a category may have; a column of more is one of strings."""
_FOLDER: Final = re.compile(r"([a-z][a-z0-9_]{0,63})-(\d{6})", re.ASCII)
_KIND: Final = "columns"
_FORMAT_VERSION: Final = 1
_NUM_PARTS: Final = 4
RESERVED_TABLES: Final = frozenset({"facts", "series", "any", "all", "missing"})
"""Names that mean something else in an expression."""


@dataclass(frozen=True, slots=True)
class ColumnValues:
    """Values of a column, as an expression reads them."""

    values: NDArray[Any]
    """``(n,)`` numbers or booleans, of ``floats`` ``(n, d)``; with ``names`` integers that index them."""
    is_missing: NDArray[np.bool_] | None = None
    """``(n,)``, whose values are arbitrary; None if every row has a value."""
    names: tuple[str, ...] | None = None
    """Vocabulary of a category or of strings; None for ``facts.patient_key``, whose values are bytes."""
    also: tuple[frozenset[str], ...] | None = None
    """For each name, what else finds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredColumn:
    """Values of a column, in the order of the rows of a table."""

    name: str
    kind: ColumnKind
    values: NDArray[Any]
    """``(n,)``, of ``floats`` ``(n, d)``; of a category or strings the positions in ``names``."""
    is_missing: NDArray[np.bool_]
    """``(n,)``, whose values are arbitrary."""
    names: tuple[str, ...] = ()
    """Ascending; of a category or strings."""

    def take(self, rows: NDArray[np.int64]) -> StoredColumn:
        """Return some rows; -1 is a row without a value. Names that none of them has are left out."""
        is_missing = (rows < 0) | (self.is_missing[rows] if len(self.is_missing) else True)
        values = np.zeros((len(rows), *self.values.shape[1:]), self.values.dtype)
        if len(self.values):
            values[:] = self.values[rows]
        names = self.names
        if names:
            used, places = np.unique(values[~is_missing], return_inverse=True)
            values[~is_missing], names = places, tuple(names[code] for code in used.tolist())
        return StoredColumn(name=self.name, kind=self.kind, values=values, is_missing=is_missing, names=names)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnEntry:
    """A column in a manifest."""

    name: str
    kind: ColumnKind
    num_missing: int

    def __post_init__(self) -> None:
        if not COLUMN_NAME.fullmatch(self.name) or self.kind not in get_args(ColumnKind):
            raise FormatError(
                "a column of a table has a name of a-z, 0-9 and _ and a known kind; got others."
            )


@dataclass(frozen=True, kw_only=True)
class TableManifest(SidecarManifest):
    """Manifest of one version of a table; its digest identifies the content."""

    root = "tables"
    file_name = "manifest.json"
    head: ClassVar[Mapping[str, Json]] = {"format": "shardflow-table", "format_version": _FORMAT_VERSION}
    remedy = "attach the table again"

    dataset_id: str
    name: str
    number: int
    """Of the version of the table, from 1."""
    unit: TableUnit
    num_rows: int
    num_bytes: int
    sha256: str
    columns: tuple[ColumnEntry, ...]

    def body(self) -> dict[str, Json]:
        """Return the entries beside `head` and the digest."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> TableManifest:
        """Make a manifest of its entries."""
        return cls(**{**body, "columns": tuple(ColumnEntry(**entry) for entry in body["columns"])})

    def tables(self) -> dict[str, tuple[int | None, str]]:
        """Return size and SHA-256 of the table."""
        return {ROWS_NAME: (self.num_bytes, self.sha256)}

    @property
    def folder(self) -> str:
        """Path of its folder."""
        return table_folder(self.name, self.number, self.dataset_id)

    @property
    def is_removal(self) -> bool:
        """Whether it says that the table was removed: it has no columns."""
        return not self.columns

    def belongs_in(self, name: str, owner: str) -> bool:
        """Return whether this is the manifest of a version of a table and an owner."""
        return (f"{self.name}-{self.number:06d}", self.dataset_id) == (name, owner)

    @classmethod
    def is_name(cls, name: str) -> bool:
        """Return whether a folder of versions may have a name."""
        return _FOLDER.fullmatch(name) is not None


def table_folder(name: str, number: int, dataset_id: str) -> str:
    """Return where a version of a table is stored beside a version of a dataset."""
    return f"{TableManifest.root}/{name}-{number:06d}/{dataset_id}"


def check_table_name(name: str) -> None:
    """Refuse what cannot be the name of a table.

    Raises:
        ConfigError: It cannot.
    """
    if not TABLE_NAME.fullmatch(name) or name in RESERVED_TABLES:
        reserved = " and is none of " + ", ".join(sorted(RESERVED_TABLES)) if name in RESERVED_TABLES else ""
        raise ConfigError(
            f"The name of a table is 1 to 64 of a-z, 0-9 and _ after a letter{reserved}; got {name!r}."
        )


# ---- writing -------------------------------------------------------------------------------------------


def encode_columns(columns: Sequence[StoredColumn], unit: TableUnit, num_rows: int) -> bytes:
    """Encode a table.

    Args:
        columns: In order.
        unit: What a row is.
        num_rows: Rows of every column.
    """
    arrays: dict[str, NDArray[Any]] = {}
    described: list[Json] = []
    for column in columns:
        name, missing = column.name, column.is_missing
        described.append({"name": name, "kind": column.kind})
        values = column.values
        if column.kind == "bool":
            arrays[name] = np.where(missing, -1, values).astype("|i1")
            continue
        if column.kind == "float":
            arrays[name] = _smallest_float(np.where(missing, np.nan, values))
            continue
        if column.kind in ("category", "string"):
            codes = np.where(missing, len(column.names), values)
            arrays[name] = codes.astype(np.min_scalar_type(len(column.names)).newbyteorder("<"))
            data = [known.encode() for known in column.names]
            arrays[f"{name}:names"] = np.frombuffer(b"".join(data), "|u1")
            starts = np.zeros(len(data) + 1, "<u8")
            np.cumsum([len(one) for one in data], out=starts[1:])
            arrays[f"{name}:first_byte"] = starts
            continue
        cleared = np.where(missing.reshape(-1, *[1] * (values.ndim - 1)), 0, values)
        arrays[name] = cleared.astype("<f4") if column.kind == "floats" else _smallest_int(cleared)
        if missing.any():
            arrays[f"{name}:missing"] = missing.astype("|u1")
    return encode_table(
        arrays,
        {
            "kind": _KIND,
            "format_version": _FORMAT_VERSION,
            "unit": unit,
            "num_rows": num_rows,
            "columns": described,
        },
    )


def _smallest_int(values: NDArray[Any]) -> NDArray[Any]:
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    for size in (1, 2, 4):
        if -(1 << 8 * size - 1) <= low and high < 1 << 8 * size - 1:
            return values.astype(f"<i{size}")
    return values.astype("<i8")


def _smallest_float(values: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        single = values.astype("<f4")
    is_same = np.array_equal(single.astype("<f8"), values, equal_nan=True)
    return single if is_same else values.astype("<f8")


def describe_table(
    name: str,
    number: int,
    dataset_id: str,
    unit: TableUnit,
    columns: Sequence[StoredColumn],
    num_rows: int,
    data: bytes,
) -> TableManifest:
    """Return the manifest of an encoded table."""
    entries = [
        ColumnEntry(name=one.name, kind=one.kind, num_missing=int(one.is_missing.sum())) for one in columns
    ]
    return TableManifest(
        dataset_id=dataset_id,
        name=name,
        number=number,
        unit=unit,
        num_rows=num_rows,
        num_bytes=len(data),
        sha256=sha256_hex(data),
        columns=tuple(entries),
    )


# ---- reading -------------------------------------------------------------------------------------------


class ColumnsTable:
    """Table of attached columns, open for reading; memory-mapped, each block checked when it is first used.

    Attributes:
        unit: What a row is.
        num_rows: Number of rows.
        kinds: Kind of each column.

    Raises:
        FormatError: It is no table of columns of format 1.
    """

    def __init__(self, table: Table) -> None:
        table.expect_kind(_KIND, _FORMAT_VERSION)
        self._table = table
        self._names: dict[str, tuple[str, ...]] = {}
        try:
            self.unit: TableUnit = table.meta["unit"]
            self.num_rows = int(table.meta["num_rows"])
            self.kinds: dict[str, ColumnKind] = {one["name"]: one["kind"] for one in table.meta["columns"]}
            is_whole = self.unit in get_args(TableUnit) and all(
                kind in get_args(ColumnKind) and table.num_rows(name) == self.num_rows
                for name, kind in self.kinds.items()
            )
        except (KeyError, TypeError, ValueError, OverflowError, FormatError):
            is_whole = False
        if not is_whole:
            raise FormatError(f"{table.name} is no whole table of columns; {TableManifest.remedy}.")
        self._has_mask = {name for name in self.kinds if f"{name}:missing" in table.column_names}

    def names(self, column: str) -> tuple[str, ...]:
        """Return the vocabulary of a category or of strings, ascending; empty for other kinds."""
        if self.kinds[column] not in ("category", "string"):
            return ()
        if column not in self._names:
            data = self._table.column(f"{column}:names").tobytes()
            starts = self._table.column(f"{column}:first_byte").tolist()
            self._names[column] = tuple(data[start:stop].decode() for start, stop in pairwise(starts))
        return self._names[column]

    def width(self, column: str) -> int:
        """Return the length of the lists of a column of ``floats``."""
        return int(self._table.gather(column, np.zeros(0, np.int64)).shape[1])

    def gather(self, column: str, rows: NDArray[np.int64] | None = None) -> StoredColumn:
        """Return some rows of a column, or all; only their blocks are read.

        Raises:
            TableDamageError: A block is damaged.
            IndexError: A row is outside the table.
        """
        kind = self.kinds[column]
        stored = self._read(column, rows)
        if kind == "bool":
            return StoredColumn(name=column, kind=kind, values=stored == 1, is_missing=stored < 0)
        if kind == "float":
            return StoredColumn(name=column, kind=kind, values=stored, is_missing=np.isnan(stored))
        if kind in ("category", "string"):
            names = self.names(column)
            return StoredColumn(
                name=column, kind=kind, values=stored, is_missing=stored >= len(names), names=names
            )
        has_mask = column in self._has_mask
        missing = self._read(f"{column}:missing", rows) == 1 if has_mask else np.zeros(len(stored), bool)
        return StoredColumn(name=column, kind=kind, values=stored, is_missing=missing)

    def _read(self, name: str, rows: NDArray[np.int64] | None) -> NDArray[Any]:
        return self._table.column(name) if rows is None else self._table.gather(name, rows)

    def verify(self) -> None:
        """Check every byte, and that codes are those of names.

        Raises:
            FormatError: Something is damaged.
        """
        self._table.verify()
        for name in self.kinds:
            self.names(name)


def open_columns_table(opened: Table, manifest: TableManifest) -> ColumnsTable:
    """Return the table of a manifest, and compare the two.

    Raises:
        FormatError: They disagree.
    """
    table = ColumnsTable(opened)
    found = (table.unit, table.num_rows, tuple(table.kinds.items()))
    if found != (manifest.unit, manifest.num_rows, tuple((one.name, one.kind) for one in manifest.columns)):
        raise FormatError(f"{opened.name} is another table than its manifest names; {TableManifest.remedy}.")
    return table


# ---- versions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Version of a table that was chosen."""

    manifest: TableManifest
    store: ByteStore | None
    """Store of a folder of tables; None for one inside the dataset."""


def table_versions(store: ByteStore, dataset_id: str) -> dict[str, list[int]]:
    """Return the numbers of the finished versions of each table beside a version of a dataset, ascending.

    Empty where the store cannot list.
    """
    try:
        paths = store.list(f"{TableManifest.root}/")
    except NoListingError:
        return {}
    found: dict[str, list[int]] = {}
    for path in paths:
        parts = path.split("/")
        folder = _FOLDER.fullmatch(parts[1]) if len(parts) == _NUM_PARTS else None
        if folder is not None and parts[2:] == [dataset_id, TableManifest.file_name]:
            found.setdefault(folder[1], []).append(int(folder[2]))
    return {name: sorted(numbers) for name, numbers in sorted(found.items())}


def load_table_manifest(store: ByteStore, name: str, number: int, dataset_id: str) -> TableManifest:
    """Read the manifest of a version of a table; errors as of `SidecarManifest.load`."""
    return TableManifest.load(store, f"{name}-{number:06d}", dataset_id)


class AttachedTables(Mapping[str, str]):
    """Tables of a version of a dataset: digests by name. Crosses process boundaries as it was resolved.

    Args:
        places: The chosen version of each table.
    """

    def __init__(self, places: Mapping[str, TablePlace]) -> None:
        self.places = dict(places)

    @classmethod
    def newest(cls, store: ByteStore, dataset_id: str, beside: Iterable[ByteStore] = ()) -> AttachedTables:
        """Choose the newest version of each table.

        Args:
            store: Of the dataset.
            dataset_id: Digest of its manifest.
            beside: Folders of tables, as ``shardflow attach --to DIR`` writes them.

        Raises:
            ConfigError: A folder has no table of this version, or two tables have one name.
            FormatError: A manifest cannot be trusted.
        """
        places: dict[str, TablePlace] = {}
        for folder in (None, *beside):
            versions = table_versions(folder or store, dataset_id)
            if folder is not None and not versions:
                raise ConfigError(
                    "A folder of tables= holds no table of this version of the dataset; write one with: "
                    "shardflow attach DATASET FILE --name NAME --on KEY --to DIR"
                )
            for name, numbers in versions.items():
                if name in places:
                    raise ConfigError(
                        f"Two tables have the name {name!r}, one of them in a folder of tables=; attach it "
                        "under another --name."
                    )
                manifest = load_table_manifest(folder or store, name, numbers[-1], dataset_id)
                if not manifest.is_removal:
                    places[name] = TablePlace(manifest, folder)
        return cls(places)

    def pinned(self, store: ByteStore, dataset_id: str, digests: Mapping[str, str]) -> AttachedTables:
        """Return the versions that digests name, such as those of a lock file, and of others the same.

        Raises:
            ConfigError: There is no such version any more.
        """
        places = dict(self.places)
        for name, digest in digests.items():
            here = self.places.get(name)
            if here is None or here.manifest.digest != digest:
                here = _find(store if here is None else here.store or store, dataset_id, name, digest)
            places[name] = here
        return AttachedTables(places)

    def __getitem__(self, name: str) -> str:
        return self.places[name].manifest.digest

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _find(store: ByteStore, dataset_id: str, name: str, digest: str) -> TablePlace:
    for number in table_versions(store, dataset_id).get(name, ()):
        manifest = load_table_manifest(store, name, number, dataset_id)
        if manifest.digest == digest:
            return TablePlace(manifest, None)
    known = DIGEST_PATTERN.fullmatch(digest) is not None
    raise ConfigError(
        f"The run read the table {name!r} with digest {digest[:12] if known else 'unknown'}, which this "
        "version of the dataset no longer has; attach the same file again, or start a new run."
    )


def write_table(
    store: ByteStore,
    dataset_id: str,
    name: str,
    unit: TableUnit,
    columns: Sequence[StoredColumn],
    *,
    number: int | None = None,
) -> tuple[TableManifest, bool]:
    """Write the next version of a table, unless the newest one has the same content.

    Args:
        store: Of the dataset, or of a folder of tables.
        dataset_id: Digest of the manifest that the rows belong to.
        name: Of the table.
        unit: What a row is.
        columns: With a value for each row.
        number: Of the version; by default the next one.

    Returns:
        The manifest of the version, and whether it is new.

    Raises:
        ConfigError: The name is not allowed, or there is no column.
        AlreadyExistsError: Another job wrote this version meanwhile.
        StorageError: Writing failed.
    """
    check_table_name(name)
    if not columns:
        raise ConfigError("A table needs at least one column; none is left.")
    return _write(store, dataset_id, name, unit, columns, len(columns[0].is_missing), number)


def _write(
    store: ByteStore,
    dataset_id: str,
    name: str,
    unit: TableUnit,
    columns: Sequence[StoredColumn],
    num_rows: int,
    number: int | None = None,
) -> tuple[TableManifest, bool]:
    data = encode_columns(columns, unit, num_rows)
    numbers = table_versions(store, dataset_id).get(name, [])
    if numbers:
        newest = load_table_manifest(store, name, numbers[-1], dataset_id)
        if newest.sha256 == sha256_hex(data):
            return newest, False
    number = number or 1 + max(numbers, default=0)
    manifest = describe_table(name, number, dataset_id, unit, columns, num_rows, data)
    path = f"{manifest.folder}/{ROWS_NAME}"
    try:
        store.put_new(path, data)
    except AlreadyExistsError:
        if sha256_hex(store.read(path)) != manifest.sha256:  # of a job that was killed, with another file
            raise ConfigError(
                f"{manifest.folder} holds the rows of a job that was not finished; delete the folder."
            ) from None
    store.put_new(f"{manifest.folder}/{TableManifest.file_name}", manifest.encode())
    return manifest, True


def remove_table(store: LocalStore, dataset_id: str, name: str) -> TableManifest:
    """Write a version that says that a table was removed: loaders no longer see it, earlier versions stay.

    Args:
        store: Of the dataset, or of a folder of tables.
        dataset_id: Digest of the manifest that the rows belong to.
        name: Of the table.

    Raises:
        ConfigError: There is no such table.
        StorageError: Writing failed.
    """
    found = {one: numbers[-1] for one, numbers in table_versions(store, dataset_id).items()}
    manifests = {one: load_table_manifest(store, one, number, dataset_id) for one, number in found.items()}
    known = sorted(one for one, manifest in manifests.items() if not manifest.is_removal)
    if name not in known:
        raise ConfigError(
            f"There is no attached table {name!r} to remove; there are {', '.join(known) or 'none'}."
        )
    newest = manifests[name]
    return _write(store, dataset_id, name, newest.unit, (), newest.num_rows)[0]


def collect_tables(
    store: LocalStore, dataset_ids: Iterable[str], *, named: Collection[str], name: str | None = None
) -> tuple[list[TableManifest], list[TableManifest]]:
    """Delete versions of tables that are not the newest of their name.

    Args:
        store: Of the dataset, or of a folder of tables.
        dataset_ids: Digests of the versions of the dataset.
        named: Digests of tables that a run needs to resume; these versions stay.
        name: Of the one table whose versions are deleted; None for all.

    Returns:
        The deleted versions, and earlier ones that stay because they are named.

    Raises:
        FormatError: A manifest cannot be trusted.
        StorageError: Something cannot be deleted.
    """
    deleted, kept = [], []
    for owner in dataset_ids:
        for table, numbers in table_versions(store, owner).items():
            if name not in (None, table):
                continue
            *earlier, newest = [load_table_manifest(store, table, number, owner) for number in numbers]
            needed = [one for one in earlier if one.digest in named]
            gone = [one for one in earlier if one.digest not in named]
            if newest.is_removal and not needed:
                gone.append(newest)  # it only hides earlier ones
            for one in gone:
                folder = store.root / one.folder
                try:
                    # Without its manifest no reader takes what is left for a table.
                    (folder / TableManifest.file_name).unlink(missing_ok=True)
                    shutil.rmtree(folder)
                    if not any(folder.parent.iterdir()):
                        folder.parent.rmdir()
                except OSError as error:
                    raise StorageError(
                        f"{one.folder} cannot be deleted ({os_reason(error)}); run the command again."
                    ) from None
            deleted += gone
            kept += needed
    return deleted, kept
