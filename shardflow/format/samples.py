"""Samples table: one row per sample of a dataset, and the only table that is read as a whole.

Rows are ordered by (split, shard, offset), so a split is a range of rows. Besides the place of each sample
the table holds facts, never cost: the cost of a sample depends on a view and a model, and is a rule over
these facts. The layout is in docs/format.md, section 7.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.index import ShardIndex
from shardflow.format.keys import (
    check_sample_key,
    parse_level_field,
    parse_slice_field,
    parse_volume_field,
)
from shardflow.format.table import Table, encode_table
from shardflow.format.tar import BLOCK_NUM_BYTES

KIND = "samples"
IMAGE_KINDS: Final = frozenset({"jpg", "jpeg", "png"})
"""Endings of the fields of foreign tars that are images."""
DERIVED_COLUMNS: Final = (
    "sample_key",
    "row_in_shard",
    "offset_bytes",
    "num_bytes",
    "text_bytes",
    "num_series",
    "num_slices",
)
"""Columns that the index of a shard determines, see `derived_column`."""
FORMAT_VERSION = 1
FACT_COLUMNS = ("text_bytes", "num_series", "num_slices", "rows", "columns")
COLUMNS = ("sample_key", "shard", "row_in_shard", "offset_bytes", "num_bytes", *FACT_COLUMNS, "modality")
MAX_MODALITIES: Final = 255
_KEYS_AT_ONCE: Final = 1 << 16
_NUM_KEY_TABLES: Final = 256
_FIRST_SLOTS: Final = 16
# Odd, so that multiplication is a bijection of 64 bits.
_MIX: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFacts:
    """What the plan may know of a sample without reading it."""

    text_bytes: int
    """Size of ``report.txt``; 0 without a report."""
    num_series: int
    """Number of series that have slices."""
    num_slices: int
    """Number of slices of all series."""
    rows: int
    """Height of the slices of the primary series (s000), in pixels; 0 without one."""
    columns: int
    """Width of the slices of the primary series, in pixels; 0 without one."""
    modality: str
    """DICOM modality of the primary series, such as ``"CT"``; empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEntry:
    """One row: a sample's key, its place, and its facts."""

    sample_key: str
    shard: int
    """Position of the shard in the manifest's list."""
    row_in_shard: int
    """Position of the sample in its shard's index."""
    offset_bytes: int
    """Where the sample's first tar header begins."""
    num_bytes: int
    """Size of the whole sample, headers and padding with it."""
    facts: SampleFacts


class SamplesTable:
    """The samples table, open for reading; memory-mapped, checked block by block as it is touched.

    Attributes:
        num_samples: Number of samples of all splits.
        splits: The rows of each split.
        modalities: Names that the column ``modality`` points into.

    Raises:
        FormatError: The table is no samples table of format 1.
        ChecksumError: Its header is damaged.
    """

    kind: ClassVar[str] = KIND

    def __init__(self, table: Table) -> None:
        table.expect_kind(self.kind, FORMAT_VERSION)
        self._table = table
        try:
            self.splits = {name: range(start, stop) for name, (start, stop) in table.meta["splits"].items()}
            self.modalities: tuple[str, ...] = tuple(table.meta["modalities"])
            self.num_samples = sum(len(rows) for rows in self.splits.values())
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise FormatError(f"{table.name} must name splits and modalities, got other meta data.") from None
        lengths = {table.num_rows(name) for name in COLUMNS}
        if lengths != {self.num_samples}:
            raise FormatError(
                f"{table.name} must have columns of {self.num_samples} rows, got {sorted(lengths)}; "
                "run `shardflow verify`."
            )

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of the table."""
        return self._table.column_names

    @property
    def vocabularies(self) -> Mapping[str, tuple[str, ...]]:
        """The columns whose numbers are positions in a list of names, and those names."""
        return {"modality": self.modalities}

    def sample_key(self, row: int) -> str:
        """Return the key of a sample."""
        key = bytes(self._table.gather("sample_key", row)[()])
        if not key.isascii():
            raise FormatError(f"{self._table.name} must hold sample keys in ASCII, got other bytes.")
        return key.decode("ascii")

    def sample_keys(self) -> Iterator[str]:
        """Yield the keys of all samples, without a list of them."""
        keys = self.column("sample_key")
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            for key in keys[start : start + _KEYS_AT_ONCE].tolist():
                yield key.decode("ascii")

    def column(self, name: str) -> NDArray[Any]:
        """Return a whole column as a read-only view, see `Table.column`."""
        return self._table.column(name)

    def gather(self, name: str, rows: NDArray[Any] | int) -> NDArray[Any]:
        """Return some rows of a column, checking no more than their blocks, see `Table.gather`."""
        return self._table.gather(name, rows)

    def modality(self, row: int) -> str:
        """Return the modality of a sample's primary series."""
        code = int(self._table.gather("modality", row))
        if code >= len(self.modalities):
            raise FormatError(
                f"{self._table.name} must name {len(self.modalities)} modalities at most, got number {code}."
            )
        return self.modalities[code]

    def find(self, key: str) -> int:
        """Return the row of a sample by its key; reads the whole key column.

        Raises:
            FormatError: No sample has this key.
        """
        wanted = np.bytes_(key.encode("utf-8"))
        rows: NDArray[np.intp] = np.flatnonzero(self.column("sample_key") == wanted)
        if not len(rows):
            raise FormatError("a sample key must be one of the dataset, got another one.")
        return int(rows[0])

    @staticmethod
    def encode(entries: Iterable[SampleEntry], *, shard_splits: Sequence[str]) -> bytes:
        """Encode the table.

        Args:
            entries: The samples, in any order.
            shard_splits: The split of each shard, by its position in the manifest's list.

        Raises:
            FormatError: A key is none or doubled, or there are more than 255 modalities.
        """
        rows = sorted(entries, key=lambda entry: (shard_splits[entry.shard], entry.shard, entry.offset_bytes))
        keys = [check_sample_key(entry.sample_key) for entry in rows]
        if len(set(keys)) != len(keys):
            raise FormatError("sample keys must be unique in a dataset, got one twice.")
        modalities = sorted({entry.facts.modality for entry in rows})
        if len(modalities) > MAX_MODALITIES:
            raise FormatError(
                f"a dataset must have at most {MAX_MODALITIES} modalities, got {len(modalities)}."
            )
        names = [shard_splits[entry.shard] for entry in rows]
        splits = {
            name: [names.index(name), names.index(name) + names.count(name)]
            for name in sorted(set(shard_splits))
            if name in names
        }
        columns: dict[str, NDArray[Any]] = {
            "sample_key": np.array([key.encode("ascii") for key in keys], "S"),
            "shard": np.array([entry.shard for entry in rows], "<u4"),
            "row_in_shard": np.array([entry.row_in_shard for entry in rows], "<u4"),
            "offset_bytes": np.array([entry.offset_bytes for entry in rows], "<u8"),
            "num_bytes": np.array([entry.num_bytes for entry in rows], "<u8"),
        }
        for name in FACT_COLUMNS:
            columns[name] = np.array([getattr(entry.facts, name) for entry in rows], "<u4")
        columns["modality"] = np.array([modalities.index(entry.facts.modality) for entry in rows], "u1")
        return encode_table(
            columns,
            {"kind": KIND, "format_version": FORMAT_VERSION, "splits": splits, "modalities": modalities},
        )


class KeySet:
    """Set of sample keys by their 128-bit digests, 21 to 32 bytes each.

    A set of Python objects takes 130. The digests are spread over many tables, so that the set never holds
    two copies of itself while it grows.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._tables = [array("Q", bytes(16 * _FIRST_SLOTS)) for _ in range(_NUM_KEY_TABLES)]
        self._counts = [0] * _NUM_KEY_TABLES
        for key in keys:
            self.add(key)

    def __len__(self) -> int:
        return sum(self._counts)

    def __contains__(self, key: str) -> bool:
        number, low, high = _digest(key)
        table = self._tables[number]
        return table[_slot(table, low, high)] != 0

    def add(self, key: str) -> None:
        """Add a key, unless it is there already."""
        number, low, high = _digest(key)
        table = self._tables[number]
        at = _slot(table, low, high)
        if table[at]:
            return
        table[at], table[at + 1] = low, high
        self._counts[number] += 1
        num_slots = len(table) // 2
        if 4 * self._counts[number] >= 3 * num_slots:
            grown = self._tables[number] = array("Q", bytes(16 * (num_slots + num_slots // 2)))
            for old in range(0, len(table), 2):
                if table[old]:
                    at = _slot(grown, table[old], table[old + 1])
                    grown[at], grown[at + 1] = table[old], table[old + 1]


def _digest(key: str) -> tuple[int, int, int]:
    """Return the table of a key, and its digest as two numbers, of which the first is not 0."""
    digest = hashlib.blake2b(key.encode("ascii"), digest_size=16).digest()
    low, high = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return high % _NUM_KEY_TABLES, low or 1, high


def _slot(table: array[int], low: int, high: int) -> int:
    """Return where a digest is in a table, or the free place where it belongs."""
    at = 2 * (low % (len(table) // 2))
    while table[at] and (table[at] != low or table[at + 1] != high):
        at = (at + 2) % len(table)
    return at


def key_hashes(keys: NDArray[np.bytes_]) -> NDArray[np.uint64]:
    """Return 64 bits of each key, ``(n,)``, whatever the length of the column that holds it."""
    width = -(-keys.dtype.itemsize // 8)
    words = keys.astype(f"S{8 * width}").view("<u8").reshape(len(keys), width)
    hashes = np.zeros(len(keys), np.uint64)
    for place in range(width):
        # A word of padding is 0 and adds nothing.
        mixed = words[:, place] * np.uint64((2 * place + 1) * _MIX % 2**64)
        hashes += (mixed ^ (mixed >> np.uint64(29))) * np.uint64(_MIX)
    return hashes


def repeated_hashes(pieces: Iterable[NDArray[np.bytes_]], num_keys: int) -> NDArray[np.uint64]:
    """Return the `key_hashes` that several of ``num_keys`` keys have: those of all keys that come twice.

    Takes 9 bytes a key, however long the keys are. Different keys share a hash once in 10^19 pairs.
    """
    hashes = np.empty(num_keys, np.uint64)
    at = 0
    for keys in pieces:
        hashes[at : at + len(keys)] = key_hashes(keys)
        at += len(keys)
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def repeated_key(pieces: Callable[[], Iterable[NDArray[np.bytes_]]], num_keys: int) -> str | None:
    """Return the first key in their order that comes twice; None if each comes once.

    Args:
        pieces: Yields all keys; called a second time if some may be equal.
        num_keys: Number of keys.
    """
    hashes = repeated_hashes(pieces(), num_keys)
    if not len(hashes):
        return None
    # By sorting: NumPy 2.0.0 looks 64-bit hashes up in a table, and overflows.
    found = (keys[np.isin(key_hashes(keys), hashes, kind="sort")] for keys in pieces())
    keys = np.sort(np.concatenate(list(found)))
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    return bytes(keys[repeated[0]]).decode("ascii") if len(repeated) else None


def derived_column(index: ShardIndex, name: str) -> NDArray[Any]:
    """Return a column of the samples table for all samples of a shard, as far as its index determines it.

    Args:
        index: The index of the shard; the samples are in its order.
        name: One of `DERIVED_COLUMNS`.
    """
    if name == "sample_key":
        return index.sample_keys
    if name == "row_in_shard":
        return np.arange(index.num_samples)
    first = index.first_field.astype(np.int64)
    if name == "offset_bytes":
        offsets: NDArray[Any] = index.field_offsets[first[:-1]] - np.uint64(BLOCK_NUM_BYTES)
        return offsets
    if name == "num_bytes":
        # The members of a sample follow each other, so the sum is where the last one ends.
        padded = -(-index.field_num_bytes.astype(np.int64) // BLOCK_NUM_BYTES) * BLOCK_NUM_BYTES
        if not index.num_samples:
            return padded
        sizes: NDArray[Any] = np.add.reduceat(padded + BLOCK_NUM_BYTES, first[:-1])
        return sizes
    samples = np.repeat(np.arange(index.num_samples), np.diff(first))
    if name == "text_bytes":
        is_text = np.array([field == index.text_field for field in index.field_names], bool)
        chosen = is_text[index.field_name_ids]
        text_bytes = np.zeros(index.num_samples, np.int64)
        text_bytes[samples[chosen]] = index.field_num_bytes[chosen]
        return text_bytes
    if index.is_foreign:
        is_image = np.array([field.rpartition(".")[2] in IMAGE_KINDS for field in index.field_names], bool)
        num_images = np.bincount(samples[is_image[index.field_name_ids]], minlength=index.num_samples)
        return np.minimum(num_images, 1) if name == "num_series" else num_images
    parsed = [parse_slice_field(field) for field in index.field_names]
    series = np.array([part.series if part else -1 for part in parsed], np.int64)[index.field_name_ids]
    slices = np.array([part.index if part else -1 for part in parsed], np.int64)[index.field_name_ids]
    triples = np.stack([samples, series, slices], axis=1)[series >= 0]
    found = np.zeros(index.num_samples, np.int64)
    if len(triples):  # np.unique would import numpy.ma
        # A slice in several codecs counts once.
        owners = np.unique(triples[:, : 2 if name == "num_series" else 3], axis=0)[:, 0]
        found = np.bincount(owners, minlength=index.num_samples)
    if index.bricks is not None:
        names = index.field_name_ids[index.bricks.fields]
        is_series = np.array(
            [(parse_volume_field(field) or (0, 0))[1] is None for field in index.field_names], bool
        )
        # A slide is one series of one image, however many levels of it are stored.
        is_slide = np.array(
            [(parse_level_field(field) or (0, 1))[1] == 0 for field in index.field_names], bool
        )
        of_series = (is_series | is_slide)[names]
        depths = np.where(is_slide[names], 1, index.bricks.shapes[:, 0])[of_series]
        counts = 1 if name == "num_series" else depths
        np.add.at(found, samples[index.bricks.fields[of_series]], counts)
    return found
