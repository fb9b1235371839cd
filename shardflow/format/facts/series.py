"""Series table: one row per series of a dataset, with the facts that select, size and order what is read.

A sidecar, written by packing and, for existing datasets, by ``shardflow attach DATASET --facts``; no shard is
touched. ``facts/series/<dataset_id>/series.tbl`` has the order of the samples table; ``manifest.json`` beside
it names it and is written last. A new version of a dataset takes the series of the shards that it shares with
an earlier one from that one's table, and reads new shards alone. The layout is in docs/format.md, section 17.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.format.dataset import Dataset
from shardflow.format.keys import Json, sha256_hex
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table, encode_table
from shardflow.format.tables import ColumnKind, ColumnValues
from shardflow.storage import ByteStore
from shardflow.storage.node_files import own_bytes

SERIES_NAME: Final = "series.tbl"
_KIND: Final = "series"
_FORMAT_VERSION: Final = 1

STRINGS: Final = (
    "kind",
    "modality",
    "body_part",
    "role",
    "laterality",
    "unit",
    "dtype",
    "codec",
    "kernel",
    "manufacturer",
)
"""Columns of strings; an empty string is a missing value."""
COUNTS: Final = ("series", "acquisition_order", "num_slices", "rows", "columns", "channels")
"""Columns of integers; never missing."""
MEASURES: Final = (
    "row_spacing_mm",
    "column_spacing_mm",
    "slice_spacing_mm",
    "slice_thickness_mm",
    "kvp",
    "field_strength_t",
    "echo_time_ms",
    "repetition_time_ms",
    "inversion_time_ms",
    "flip_angle_deg",
)
"""Columns of numbers; NaN is a missing value."""
ANSWERS: Final = ("has_contrast",)
"""Columns of yes or no: 1, 0, and -1 for a missing value."""
OPTIONAL_STRINGS: Final = ("axis", "view", "decay_correction", "channel", "description_class")
OPTIONAL_COUNTS: Final = ("group", "axis_index", "axis_num", "num_regions")
"""Columns of integers; -1 is a missing value."""
OPTIONAL_MEASURES: Final = (
    "axis_value",
    "acquired_after_s",
    "content_after_s",
    "exposure_mas",
    "exposure_time_ms",
    "tube_current_ma",
    "primary_angle_deg",
    "secondary_angle_deg",
    "compression_force_n",
    "compressed_thickness_mm",
    "frame_time_ms",
    "region_row_spacing_mm",
    "region_column_spacing_mm",
    "b_value_s_mm2",
    "gradient_x",
    "gradient_y",
    "gradient_z",
    "patient_weight_kg",
    "injected_dose_bq",
    "half_life_s",
    "injection_to_scan_s",
    "suvbw_factor",
    "objective_power",
)
OPTIONAL_ANSWERS: Final = ("has_implant",)
OPTIONAL: Final = (*OPTIONAL_STRINGS, *OPTIONAL_COUNTS, *OPTIONAL_MEASURES, *OPTIONAL_ANSWERS)
"""Columns that a table stores only if a series has a value of them; elsewhere all values are missing."""
REVISION: Final = 3
"""Of the facts that a table may hold; tables of an earlier one (without: 1) are made again by
``shardflow attach DATASET --facts``."""
FLAG_PREFIX: Final = "flags."
ROLE_UNKNOWN: Final = "unknown"
ROLE_MIXED: Final = "mixed"
_MAX_FLAGS: Final = 64
_ALWAYS: Final = (*STRINGS, *COUNTS, *MEASURES, *ANSWERS)


class FactKind(NamedTuple):
    """Kind of a column of facts."""

    facts: str
    """Field of `SeriesFacts` that has the value."""
    read_as: ColumnKind
    """What an expression reads."""
    dtype: str
    missing: float
    """What stands for a missing value."""


KINDS: Final = {
    **dict.fromkeys((*STRINGS, *OPTIONAL_STRINGS), FactKind("strings", "category", "<u2", 0)),
    **dict.fromkeys(COUNTS, FactKind("counts", "int", "<u4", -1)),
    **dict.fromkeys(OPTIONAL_COUNTS, FactKind("counts", "int", "<i4", -1)),
    **dict.fromkeys((*MEASURES, *OPTIONAL_MEASURES), FactKind("measures", "float", "<f8", np.nan)),
    **dict.fromkeys((*ANSWERS, *OPTIONAL_ANSWERS), FactKind("answers", "bool", "|i1", -1)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesFacts:
    """Facts of one series: a row of the table."""

    strings: Mapping[str, str]
    """The columns of `STRINGS` and `OPTIONAL_STRINGS` that have a value."""
    counts: Mapping[str, int]
    """All columns of `COUNTS`, and those of `OPTIONAL_COUNTS` that have a value."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """The columns of `MEASURES` and `OPTIONAL_MEASURES` that have a value."""
    answers: Mapping[str, bool] = field(default_factory=dict)
    """The columns of `ANSWERS` and `OPTIONAL_ANSWERS` that have a value."""
    affine_lps: Sequence[Sequence[float]] | None = None
    """``(4, 4)``, maps ``(column, row, slice, 1)`` to millimeters in LPS at pixel centers."""
    flags: Sequence[str] = ()
    image_roles: Sequence[str] = ()
    """Role of each image of a series whose role is `ROLE_MIXED`; otherwise empty."""


def encode_series(samples: Iterable[Sequence[SeriesFacts]]) -> bytes:
    """Encode a table.

    Args:
        samples: For each sample, in the order of the samples table, the facts of its series by their number.

    Raises:
        FormatError: A column has too many different values.
    """
    by_sample = [list(each) for each in samples]
    rows = [series for each in by_sample for series in each]
    return _encode_rows(starts_of([len(each) for each in by_sample]), rows)


def encode_no_series(num_samples: int) -> bytes:
    """Encode the table of samples without series, such as texts."""
    return _encode_rows(np.zeros(num_samples + 1, "<u8"), [])


def _encode_rows(first_series: NDArray[np.uint64], rows: Sequence[SeriesFacts]) -> bytes:
    columns: dict[str, NDArray[Any]] = {"first_series": first_series}
    vocabularies: dict[str, Json] = {}

    def encode(name: str) -> None:
        facts, _, dtype, missing = KINDS[name]
        if facts == "strings":
            columns[name], vocabularies[name] = encode_names(
                name, [row.strings.get(name, "") for row in rows]
            )
        else:
            columns[name] = np.array([getattr(row, facts).get(name, missing) for row in rows], dtype)

    for name in _ALWAYS:
        encode(name)
    missing = np.full((3, 4), np.nan)
    affines = [missing if row.affine_lps is None else np.asarray(row.affine_lps)[:3] for row in rows]
    columns["affine_lps"] = np.array(affines, "<f8").reshape(-1, 3, 4)
    flags = sorted({flag for row in rows for flag in row.flags})
    if len(flags) > _MAX_FLAGS:
        raise FormatError(f"A series table holds at most {_MAX_FLAGS} kinds of flags, got {len(flags)}.")
    bit = {flag: 1 << place for place, flag in enumerate(flags)}
    columns["flags"] = np.array([sum(bit[flag] for flag in set(row.flags)) for row in rows], "<u8")
    columns["first_image"] = starts_of([len(row.image_roles) for row in rows])
    roles = [role for row in rows for role in row.image_roles]
    columns["image_role"], vocabularies["image_role"] = encode_names("image_role", roles)
    for name in OPTIONAL:
        if any(getattr(row, KINDS[name].facts).get(name, "") != "" for row in rows):
            encode(name)
    return encode_table(columns, _meta(vocabularies, flags))


def _meta(vocabularies: dict[str, Json], flags: Sequence[str]) -> dict[str, Json]:
    return {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "revision": REVISION,
        "vocabularies": vocabularies,
        "flags": list(flags),
    }


def starts_of(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.uint64]:
    """Return where spans of these lengths begin, one after another, and where the last one ends."""
    starts = np.zeros(len(lengths) + 1, "<u8")
    np.cumsum(lengths, out=starts[1:])
    return starts


def encode_names(column: str, values: Sequence[str]) -> tuple[NDArray[np.uint16], list[str]]:
    """Return the codes of strings and their vocabulary, ascending, which begins with the empty string."""
    names = sorted({*values, ""})
    if len(names) > np.iinfo(np.uint16).max:
        raise FormatError(f"A column of strings holds at most 65,535 values, got {len(names)} ({column}).")
    code = {name: place for place, name in enumerate(names)}
    return np.array([code[value] for value in values], "<u2"), names


def merge_names(parts: Iterable[tuple[Sequence[str], NDArray[Any]]]) -> tuple[NDArray[np.uint16], list[str]]:
    """Return the codes of columns of strings, one after another, and one vocabulary.

    Args:
        parts: The vocabulary of each column, and the codes of its chosen rows.
    """
    columns = list(parts)
    # Names that no chosen row has are left out, so that a removal leaves no trace.
    names = sorted({"", *(known[code] for known, codes in columns for code in np.unique(codes).tolist())})
    code = {name: place for place, name in enumerate(names)}
    merged = [np.array([code.get(name, 0) for name in known], "<u2")[codes] for known, codes in columns]
    return np.concatenate([np.zeros(0, "<u2"), *merged]), names


def merge_series(
    parts: Iterable[tuple[SeriesTable, NDArray[np.int64]]], *, codecs: Sequence[str] | None = None
) -> bytes:
    """Encode the series of chosen samples of tables: the bytes that `encode_series` makes of these samples.

    Args:
        parts: Tables, and the chosen samples of each, in order.
        codecs: How each of these series is stored now; as the tables say by default.
    """
    chosen = [
        _Chosen(table, np.concatenate([samples for _, samples in group]))
        for table, group in (
            (found[0][0], found)
            for _, each in itertools.groupby(parts, key=lambda part: id(part[0]))
            for found in [list(each)]
        )
    ]
    columns: dict[str, NDArray[Any]] = {}
    vocabularies: dict[str, Json] = {}
    nothing = np.zeros(0, np.int64)
    columns["first_series"] = starts_of(np.concatenate([nothing, *(part.num_series for part in chosen)]))
    columns["first_image"] = starts_of(np.concatenate([nothing, *(part.num_images for part in chosen)]))
    for name in (*STRINGS, "image_role", *OPTIONAL_STRINGS):
        codes, names = merge_names([(part.table.vocabulary(name), part.array(name)) for part in chosen])
        if name not in OPTIONAL or len(names) > 1:
            columns[name], vocabularies[name] = codes, list(names)
    if codecs is not None:
        columns["codec"], names = encode_names("codec", codecs)
        vocabularies["codec"] = list(names)
    affines = np.zeros((0, 3, 4), "<f8")
    for name, kind in KINDS.items():
        if kind.facts != "strings":
            values = np.concatenate([np.zeros(0, kind.dtype), *(part.array(name) for part in chosen)])
            if name not in OPTIONAL or not _is_missing(name, values).all():
                columns[name] = values
    columns["affine_lps"] = np.concatenate([affines, *(part.array("affine_lps") for part in chosen)])
    flags = sorted({flag for part in chosen for flag in part.flags()})
    bits = [np.zeros(0, "<u8")]
    for part in chosen:
        merged = np.zeros(len(part.series), "<u8")
        for place, flag in enumerate(part.table.flags):
            if flag in flags:
                is_set = part.array("flags") >> np.uint64(place) & np.uint64(1)
                merged |= is_set << np.uint64(flags.index(flag))
        bits.append(merged)
    columns["flags"] = np.concatenate(bits)
    order = ("first_series", *_ALWAYS, "affine_lps", "flags", "first_image", "image_role", *OPTIONAL)
    stored = {name: columns[name] for name in order if name in columns}
    return encode_table(stored, _meta(vocabularies, flags))


def _is_missing(name: str, values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values of a column are missing."""
    kind = KINDS[name]
    return np.asarray(np.isnan(values) if kind.facts == "measures" else values == kind.missing, np.bool_)


class _Chosen:
    """Series and images of some samples of a table."""

    def __init__(self, table: SeriesTable, samples: NDArray[np.int64]) -> None:
        self.table = table
        self.num_series, self.series = spans_of(table.first_series(), samples)
        self.num_images, self.images = spans_of(table.first_image(), self.series)

    def array(self, name: str) -> NDArray[Any]:
        chosen: NDArray[Any] = self.table.array(name)[self.images if name == "image_role" else self.series]
        return chosen

    def flags(self) -> list[str]:
        """Return the flags that a series has."""
        found = int(np.bitwise_or.reduce(self.array("flags"), initial=np.uint64(0)))
        return [flag for place, flag in enumerate(self.table.flags) if found >> place & 1]


def spans_of(
    starts: NDArray[np.integer[Any]], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lengths of chosen spans, and the positions that they cover, one span after another."""
    first = starts[chosen].astype(np.int64)
    lengths = starts[chosen + 1].astype(np.int64) - first
    before = np.cumsum(lengths) - lengths
    return lengths, np.arange(int(lengths.sum())) + np.repeat(first - before, lengths)


class SeriesTable:
    """Series table, open for reading; memory-mapped, each column checked when it is first used.

    Attributes:
        num_samples: Number of samples, as in the samples table.
        num_series: Number of rows.
        flags: Kinds of flags of its series.
        revision: That of the facts that it may hold.

    Raises:
        FormatError: The table is no series table of format 1.
        ChecksumError: It is damaged.
    """

    def __init__(self, table: Table) -> None:
        table.expect_kind(_KIND, _FORMAT_VERSION)
        self._table = table
        self._stored = frozenset(table.column_names)
        try:
            self._vocabularies = {name: tuple(names) for name, names in table.meta["vocabularies"].items()}
            self.flags = tuple(table.meta["flags"])
            self.revision = int(table.meta.get("revision", 1))
            self.num_samples = table.num_rows("first_series") - 1
            self.num_series = table.num_rows("series")
            is_whole = {*STRINGS, "image_role"} <= set(self._vocabularies) and {
                table.num_rows(name) for name in (*_ALWAYS, *self._stored.intersection(OPTIONAL), "flags")
            } == {self.num_series}
        except (KeyError, TypeError, AttributeError):
            is_whole = False
        if not is_whole:
            raise FormatError(
                f"{table.name} is no whole series table; delete its folder and run: shardflow attach DATASET "
                "--facts"
            )

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names that an expression may use."""
        return (*_ALWAYS, *OPTIONAL, *(FLAG_PREFIX + flag for flag in self.flags))

    def array(self, name: str) -> NDArray[Any]:
        """Return a column as a read-only view; of missing values if it is optional and not stored."""
        if name in OPTIONAL and name not in self._stored:
            kind = KINDS[name]
            return np.broadcast_to(np.array(kind.missing, kind.dtype), (self.num_series,))
        return self._table.column(name)

    def vocabulary(self, name: str) -> tuple[str, ...]:
        """Return the strings that a column of strings indexes; the first one is empty, a missing value."""
        return self._vocabularies[name] if name not in OPTIONAL else self._vocabularies.get(name, ("",))

    def column(self, name: str, rows: slice | NDArray[np.int64] = slice(None)) -> ColumnValues:
        """Return some rows of a column of `column_names` for an expression; by default all."""
        if name.startswith(FLAG_PREFIX):
            place = np.uint64(self.flags.index(name.removeprefix(FLAG_PREFIX)))
            return ColumnValues((self.array("flags")[rows] >> place & np.uint64(1)).astype(bool))
        values = self.array(name)[rows]
        if name in COUNTS:
            return ColumnValues(values)
        facts, is_missing = KINDS[name].facts, _is_missing(name, values)
        if facts == "strings":
            return ColumnValues(values, is_missing, self.vocabulary(name))
        return ColumnValues(values == 1 if facts == "answers" else values, is_missing)

    def count_roles(self) -> dict[str, int]:
        """Return the number of series of each role."""
        names = self.vocabulary("role")
        codes, counts = np.unique(self.array("role"), return_counts=True)
        return {names[code]: int(count) for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}

    def verify(self) -> None:
        """Check every column, whether or not it is used.

        Raises:
            FormatError: One is damaged.
        """
        self._table.verify()

    def first_series(self) -> NDArray[np.int64]:
        """Return where the series of each sample begin, ``(num_samples + 1,)``."""
        return self.array("first_series").astype(np.int64)

    def first_image(self) -> NDArray[np.int64]:
        """Return where the image roles of each series begin, ``(num_series + 1,)``."""
        return self.array("first_image").astype(np.int64)

    def facts_of(self, sample: int) -> list[dict[str, Any]]:
        """Return the facts of the series of a sample as plain values, by column; missing ones are left out.

        ``affine_lps`` is a list of four rows, ``flags`` a list of names, and ``image_roles`` the roles of the
        images of a series whose role is `ROLE_MIXED`.
        """
        start, stop = self.array("first_series")[sample : sample + 2].tolist()
        return [self._facts(row) for row in range(start, stop)]

    def _facts(self, row: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in KINDS:
            column = self.column(name, slice(row, row + 1))
            if column.is_missing is None or not column.is_missing[0]:
                value = column.values[0].item()
                found[name] = value if column.names is None else column.names[value]
        affine = self.array("affine_lps")[row]
        if not np.isnan(affine).any():
            found["affine_lps"] = [*affine.tolist(), [0.0, 0.0, 0.0, 1.0]]
        bits = int(self.array("flags")[row])
        found["flags"] = [flag for place, flag in enumerate(self.flags) if bits >> place & 1]
        first, last = self.array("first_image")[row : row + 2].tolist()
        if last > first:
            names = self._vocabularies["image_role"]
            found["image_roles"] = [names[code] for code in self.array("image_role")[first:last].tolist()]
        return found


class _FactsTable(Protocol):
    @property
    def num_samples(self) -> int: ...


TableT = TypeVar("TableT", bound=_FactsTable)


@dataclass(frozen=True, kw_only=True)
class FactsManifest(SidecarManifest, Generic[TableT]):
    """Manifest that makes a table of facts valid for one version of a dataset."""

    root = "facts"
    file_name = "manifest.json"
    remedy = "run: shardflow attach DATASET --facts"
    name: ClassVar[str]
    """Name of the sidecar among the facts."""
    table_name: ClassVar[str]
    """Name of the file of the table."""
    what: ClassVar[str]
    """What messages call the table."""
    counted: ClassVar[tuple[str, ...]] = ("num_samples",)
    """Numbers of the table that the manifest repeats."""

    dataset_id: str
    num_samples: int
    num_bytes: int
    """Of the table."""
    sha256: str

    @classmethod
    @abstractmethod
    def wrap(cls, table: Table) -> TableT:
        """Return a table as one of this kind."""

    @classmethod
    def of(cls, dataset_id: str, table: bytes) -> Self:
        """Describe an encoded table."""
        opened = cls.wrap(Table(memoryview(table), name=cls.table_name))
        numbers = {name: getattr(opened, name) for name in cls.counted}
        return cls(dataset_id=dataset_id, num_bytes=len(table), sha256=sha256_hex(table), **numbers)

    @classmethod
    def folder(cls, dataset_id: str) -> str:
        """Return the folder of the table of a version of a dataset."""
        return f"{cls.root}/{cls.name}/{dataset_id}"

    @classmethod
    def read(cls, store: ByteStore, dataset_id: str) -> TableT:
        """Read the table of a version without a cache.

        Raises:
            NotFoundError: There is none.
            FormatError: It cannot be trusted.
            StorageError: Reading failed.
        """
        manifest = cls.load(store, cls.name, dataset_id)
        path = f"{cls.folder(dataset_id)}/{cls.table_name}"
        buffer = own_bytes(store, path, sha256=manifest.sha256, num_bytes=manifest.num_bytes)
        return manifest.opened(Table(buffer, name=path))

    @classmethod
    def open(cls, dataset: Dataset) -> tuple[TableT, str]:
        """Return the table of a dataset, and its SHA-256.

        Args:
            dataset: The dataset, any store.

        Raises:
            ConfigError: There is none for this version; the message names the command that makes it.
            FormatError: It is another dataset's, or cannot be trusted.
        """
        dataset_id, num_samples = dataset.manifest.dataset_id, dataset.studies.num_samples
        try:
            manifest = cls.load(dataset.store, cls.name, dataset_id)
        except NotFoundError:
            raise ConfigError(
                f"This needs {cls.what}, and version {dataset.manifest_version} of the dataset has none; "
                f"{cls.remedy}"
            ) from None
        path = f"{cls.folder(dataset_id)}/{cls.table_name}"
        table = manifest.opened(
            dataset.table_beside(
                path, sha256=manifest.sha256, num_bytes=manifest.num_bytes, rows=range(num_samples)
            )
        )
        if table.num_samples != num_samples:
            raise FormatError(f"{path} is of another dataset; delete its folder and {cls.remedy}")
        return table, manifest.sha256

    def opened(self, table: Table) -> TableT:
        """Return the table as one of this kind, and compare it with this manifest.

        Raises:
            FormatError: They disagree.
        """
        wrapped = self.wrap(table)
        if any(getattr(wrapped, name) != getattr(self, name) for name in self.counted):
            raise FormatError(
                f"{table.name} is another table than its manifest names; fetch or make it again."
            )
        return wrapped

    def body(self) -> dict[str, Json]:
        """Return the entries beside `head` and the digest."""
        return {
            "dataset_id": self.dataset_id,
            **{name: getattr(self, name) for name in self.counted},
            "table": {"num_bytes": self.num_bytes, "sha256": self.sha256},
        }

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Self:
        """Make a manifest of its entries."""
        table = body.pop("table")
        return cls(**body, **table)

    def tables(self) -> dict[str, tuple[int | None, str]]:
        """Return size and SHA-256 of the table."""
        return {self.table_name: (self.num_bytes, self.sha256)}

    @classmethod
    def is_name(cls, name: str) -> bool:
        """Return whether facts may have a name; there is one sidecar of each kind."""
        return name == cls.name


@dataclass(frozen=True, kw_only=True)
class SeriesManifest(FactsManifest[SeriesTable]):
    """Manifest that makes a series table valid for one version of a dataset."""

    name: ClassVar[str] = "series"
    table_name = SERIES_NAME
    what = "the series table"
    head: ClassVar[Mapping[str, Json]] = {"format": "shardflow-facts", "format_version": _FORMAT_VERSION}
    counted = ("num_samples", "num_series")

    num_series: int

    @classmethod
    def wrap(cls, table: Table) -> SeriesTable:
        """Return a table as a series table."""
        return SeriesTable(table)


def open_series(dataset: Dataset) -> tuple[SeriesTable, str]:
    """Return the series table of a dataset, and its SHA-256; see `FactsManifest.open`."""
    return SeriesManifest.open(dataset)
