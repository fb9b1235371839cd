"""Series table: one row per series of a dataset, with the facts that select, size and order what is read.

A sidecar, written by packing and, for existing datasets, by ``shardflow attach DATASET --facts``; no shard is
touched. ``facts/shards/<sha256>.tbl`` holds the series of one shard and is named by the shard's digest, so a
new version of a dataset only adds the tables of its new shards. ``facts/<dataset_id>/series.tbl`` is their
concatenation in the order of the samples table; ``manifest.json`` beside it names it and is written last. The
layout is in docs/format.md, section 17.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.format.dataset import Dataset
from shardflow.format.keys import Json, canonical_json, parse_json, sha256_hex
from shardflow.format.table import Table, encode_table

SERIES_NAME: Final = "series.tbl"
MANIFEST_NAME: Final = "manifest.json"
_KIND: Final = "series"
_FORMAT: Final = "shardflow-facts"
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
FLAG_PREFIX: Final = "flags."
ROLE_UNKNOWN: Final = "unknown"
ROLE_MIXED: Final = "mixed"
_MAX_FLAGS: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesFacts:
    """Facts of one series: a row of the table."""

    strings: Mapping[str, str]
    """The columns of `STRINGS` that have a value."""
    counts: Mapping[str, int]
    """All columns of `COUNTS`."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """The columns of `MEASURES` that have a value."""
    answers: Mapping[str, bool] = field(default_factory=dict)
    """The columns of `ANSWERS` that have a value."""
    affine_lps: Sequence[Sequence[float]] | None = None
    """``(4, 4)``, maps ``(column, row, slice, 1)`` to millimeters in LPS at pixel centers."""
    flags: Sequence[str] = ()
    image_roles: Sequence[str] = ()
    """Role of each image of a series whose role is `ROLE_MIXED`; otherwise empty."""


@dataclass(frozen=True, slots=True)
class FactColumn:
    """Column of the table, as an expression reads it."""

    values: NDArray[Any]
    """``(n,)`` numbers or booleans; with ``names`` integers that index them."""
    is_missing: NDArray[np.bool_] | None = None
    """``(n,)``; None if every row has a value."""
    names: tuple[str, ...] | None = None
    """Vocabulary of a column of strings."""


def encode_series(samples: Iterable[Sequence[SeriesFacts]]) -> bytes:
    """Encode a table.

    Args:
        samples: For each sample, in the order of the samples table, the facts of its series by their number.

    Raises:
        FormatError: A column has too many different values.
    """
    by_sample = [list(each) for each in samples]
    rows = [series for each in by_sample for series in each]
    columns: dict[str, NDArray[Any]] = {"first_series": _starts([len(each) for each in by_sample])}
    vocabularies: dict[str, Json] = {}
    for name in STRINGS:
        columns[name], vocabularies[name] = _encode_names(name, [row.strings.get(name, "") for row in rows])
    for name in COUNTS:
        columns[name] = np.array([row.counts[name] for row in rows], "<u4")
    for name in MEASURES:
        columns[name] = np.array([row.measures.get(name, np.nan) for row in rows], "<f8")
    for name in ANSWERS:
        columns[name] = np.array([int(row.answers.get(name, -1)) for row in rows], "|i1")
    missing = np.full((3, 4), np.nan)
    affines = [missing if row.affine_lps is None else np.asarray(row.affine_lps)[:3] for row in rows]
    columns["affine_lps"] = np.array(affines, "<f8").reshape(-1, 3, 4)
    flags = sorted({flag for row in rows for flag in row.flags})
    if len(flags) > _MAX_FLAGS:
        raise FormatError(f"A series table holds at most {_MAX_FLAGS} kinds of flags, got {len(flags)}.")
    bit = {flag: 1 << place for place, flag in enumerate(flags)}
    columns["flags"] = np.array([sum(bit[flag] for flag in set(row.flags)) for row in rows], "<u8")
    columns["first_image"] = _starts([len(row.image_roles) for row in rows])
    roles = [role for row in rows for role in row.image_roles]
    columns["image_role"], vocabularies["image_role"] = _encode_names("image_role", roles)
    meta: dict[str, Json] = {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "vocabularies": vocabularies,
        "flags": flags,
    }
    return encode_table(columns, meta)


def _starts(lengths: Sequence[int]) -> NDArray[np.uint64]:
    starts = np.zeros(len(lengths) + 1, "<u8")
    np.cumsum(lengths, out=starts[1:])
    return starts


def _encode_names(column: str, values: Sequence[str]) -> tuple[NDArray[np.uint16], list[str]]:
    """Return the codes of strings and their vocabulary, ascending, which begins with the empty string."""
    names = sorted({*values, ""})
    if len(names) > np.iinfo(np.uint16).max:
        raise FormatError(f"A column of strings holds at most 65,535 values, got {len(names)} ({column}).")
    code = {name: place for place, name in enumerate(names)}
    return np.array([code[value] for value in values], "<u2"), names


def merge_series(tables: Sequence[SeriesTable]) -> bytes:
    """Encode the concatenation of tables, in order."""
    columns: dict[str, NDArray[Any]] = {}
    vocabularies: dict[str, Json] = {}
    for starts in ("first_series", "first_image"):
        lengths = [np.diff(table.array(starts).astype(np.int64)) for table in tables]
        columns[starts] = _starts(np.concatenate(lengths).tolist() if lengths else [])
    for name in (*STRINGS, "image_role"):
        names = sorted({"", *(known for table in tables for known in table.vocabulary(name))})
        code = {known: place for place, known in enumerate(names)}
        parts = [
            np.array([code[known] for known in table.vocabulary(name)], "<u2")[table.array(name)]
            for table in tables
        ]
        columns[name], vocabularies[name] = np.concatenate([np.zeros(0, "<u2"), *parts]), list(names)
    for name in (*COUNTS, *MEASURES, *ANSWERS, "affine_lps"):
        columns[name] = np.concatenate([table.array(name) for table in tables])
    flags = sorted({flag for table in tables for flag in table.flags})
    bits = []
    for table in tables:
        merged = np.zeros(table.num_series, "<u8")
        for place, flag in enumerate(table.flags):
            is_set = table.array("flags") >> np.uint64(place) & np.uint64(1)
            merged |= is_set << np.uint64(flags.index(flag))
        bits.append(merged)
    columns["flags"] = np.concatenate(bits)
    facts = (*STRINGS, *COUNTS, *MEASURES, *ANSWERS, "affine_lps", "flags")
    order = ("first_series", *facts, "first_image", "image_role")
    meta: dict[str, Json] = {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "vocabularies": vocabularies,
        "flags": flags,
    }
    return encode_table({name: columns[name] for name in order}, meta)


class SeriesTable:
    """Series table, open for reading; memory-mapped, each column checked when it is first used.

    Attributes:
        num_samples: Number of samples, as in the samples table.
        num_series: Number of rows.
        flags: Kinds of flags of its series.

    Raises:
        FormatError: The table is no series table of format 1.
        ChecksumError: It is damaged.
    """

    def __init__(self, table: Table) -> None:
        table.expect_kind(_KIND, _FORMAT_VERSION)
        self._table = table
        try:
            self._vocabularies = {name: tuple(names) for name, names in table.meta["vocabularies"].items()}
            self.flags = tuple(table.meta["flags"])
            self.num_samples = table.num_rows("first_series") - 1
            self.num_series = table.num_rows("series")
            is_whole = {*STRINGS, "image_role"} <= set(self._vocabularies) and {
                table.num_rows(name) for name in (*STRINGS, *COUNTS, *MEASURES, *ANSWERS, "flags")
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
        return (*STRINGS, *COUNTS, *MEASURES, *ANSWERS, *(FLAG_PREFIX + flag for flag in self.flags))

    def array(self, name: str) -> NDArray[Any]:
        """Return a stored column as a read-only view."""
        return self._table.column(name)

    def vocabulary(self, name: str) -> tuple[str, ...]:
        """Return the strings that a column of strings indexes; the first one is empty, a missing value."""
        return self._vocabularies[name]

    def column(self, name: str) -> FactColumn:
        """Return a column of `column_names` for an expression, ``(num_series,)``."""
        if name.startswith(FLAG_PREFIX):
            place = np.uint64(self.flags.index(name.removeprefix(FLAG_PREFIX)))
            return FactColumn((self.array("flags") >> place & np.uint64(1)).astype(bool))
        values = self.array(name)
        if name in self._vocabularies:
            return FactColumn(values, values == 0, self._vocabularies[name])
        if name in ANSWERS:
            return FactColumn(values == 1, values < 0)
        if name in MEASURES:
            return FactColumn(values, np.isnan(values))
        return FactColumn(values)

    def first_series(self) -> NDArray[np.int64]:
        """Return where the series of each sample begin, ``(num_samples + 1,)``."""
        return self.array("first_series").astype(np.int64)

    def first_image(self) -> NDArray[np.int64]:
        """Return where the image roles of each series begin, ``(num_series + 1,)``."""
        return self.array("first_image").astype(np.int64)


def series_folder(dataset_id: str) -> str:
    """Return the folder of the series table of a version of a dataset."""
    return f"facts/{dataset_id}"


def shard_series_path(sha256: str) -> str:
    """Return the path of the series of one shard."""
    return f"facts/shards/{sha256}.tbl"


def encode_manifest(dataset: Dataset, table: bytes) -> bytes:
    """Encode the manifest that makes a series table valid."""
    body: dict[str, Json] = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "dataset_id": dataset.dataset_id,
        "series": {"num_bytes": len(table), "sha256": sha256_hex(table)},
    }
    return canonical_json({**body, "digest": sha256_hex(canonical_json(body))}) + b"\n"


def open_series(dataset: Dataset) -> tuple[SeriesTable, str]:
    """Return the series table of a dataset, and its SHA-256.

    Args:
        dataset: The dataset, any store.

    Raises:
        ConfigError: There is none for this version; the message names the command that makes it.
        FormatError: It is another dataset's, or cannot be trusted.
    """
    folder = series_folder(dataset.manifest.dataset_id)
    name = f"{folder}/{MANIFEST_NAME}"
    try:
        data = dataset.store.read(name)
    except NotFoundError:
        raise ConfigError(
            f"This needs the series table, and version {dataset.manifest_version} of the dataset has none; "
            "run: shardflow attach DATASET --facts"
        ) from None
    body = parse_json(data.removesuffix(b"\n"), what=name)
    try:
        digest = body.pop("digest")
        is_whole = digest == sha256_hex(canonical_json(body)) and (
            body["format"],
            body["format_version"],
            body["dataset_id"],
        ) == (_FORMAT, _FORMAT_VERSION, dataset.manifest.dataset_id)
        sha256, num_bytes = str(body["series"]["sha256"]), int(body["series"]["num_bytes"])
    except (KeyError, TypeError, ValueError, AttributeError):
        is_whole, sha256, num_bytes = False, "", 0
    if not is_whole:
        raise FormatError(
            f"{name} does not describe the series of this dataset; delete its folder and run: shardflow "
            "attach DATASET --facts"
        )
    path = f"{folder}/{SERIES_NAME}"
    buffer = dataset.map_beside(
        path, sha256=sha256, num_bytes=num_bytes, rows=range(dataset.studies.num_samples)
    )
    if buffer.nbytes != num_bytes:
        raise FormatError(f"{path} has {buffer.nbytes} bytes instead of {num_bytes}; fetch or make it again.")
    table = SeriesTable(Table(buffer, name=path))
    if table.num_samples != dataset.studies.num_samples:
        raise FormatError(f"{path} is of another dataset; delete its folder and make it again.")
    return table, sha256
