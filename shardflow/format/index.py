"""Shard index: the place and crc32c of every field of every sample of one shard.

An index is stored beside its tar (``train-000000.idx``) as a table (docs/format.md, section 6). Looking up a
sample creates objects for that sample only.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.keys import (
    REPORT_FIELD,
    Json,
    check_field,
    check_sample_key,
    parse_level_field,
    parse_volume_field,
)
from shardflow.format.table import Table, encode_table
from shardflow.format.tar import BLOCK_NUM_BYTES, member_num_bytes
from shardflow.format.volumes.bricks import BrickTable, BrickVolume, StoredVolume, brick_columns

KIND = "shard-index"
FORMAT_VERSION = 1
_COLUMNS = (
    "sample_key",
    "sample_first_field",
    "field_name",
    "field_offset",
    "field_num_bytes",
    "field_crc32c",
)


@dataclass(frozen=True, slots=True)
class FieldLocation:
    """Where a field's payload lies in its shard, in bytes, and the crc32c of that payload."""

    name: str
    offset: int
    num_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """What readers of a shard read by itself and check, in no order: four arrays of one length."""

    offsets: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    crc32c: NDArray[np.uint32]
    fields: NDArray[np.int64]
    """Number of the field that each one belongs to."""


@dataclass(frozen=True, slots=True)
class TextPlaces:
    """Places of the texts of some samples in their shards."""

    keys: NDArray[np.bytes_]
    """``(n,)`` sample keys."""
    offsets: NDArray[np.int64]
    """``(n,)`` bytes."""
    num_bytes: NDArray[np.int64]
    """``(n,)``; 0 for a sample without a text."""
    crc32c: NDArray[np.uint32]
    """``(n,)``."""

    @classmethod
    def none(cls, num_samples: int) -> TextPlaces:
        """Return places of samples that have no key and no text."""
        nothing = np.zeros(num_samples, np.int64)
        return cls(np.zeros(num_samples, "S64"), nothing, nothing.copy(), np.zeros(num_samples, np.uint32))

    def put(self, samples: slice, places: TextPlaces) -> None:
        """Set the places of some of the samples."""
        self.keys[samples], self.offsets[samples] = places.keys, places.offsets
        self.num_bytes[samples], self.crc32c[samples] = places.num_bytes, places.crc32c


class ShardIndex:
    """An index, open for reading. Safe for many threads.

    Attributes:
        shard: Name of the shard, such as ``"train-000000"``.
        shard_num_bytes: Size of the tar.
        num_samples: Number of samples.
        num_fields: Number of fields of all samples.
        field_names: The distinct field names; `field_name_ids` points into it.
        sample_keys: ``(num_samples,)`` bytes.
        first_field: ``(num_samples + 1,)`` uint32: the fields of sample ``i`` are ``first_field[i]`` up to
            ``first_field[i + 1]``.
        field_name_ids: ``(num_fields,)`` uint32.
        field_offsets: ``(num_fields,)`` uint64, of the payloads, in bytes.
        field_num_bytes: ``(num_fields,)`` uint64, of the payloads.
        field_crc32c: ``(num_fields,)`` uint32, of the payloads.
        is_foreign: Whether others wrote the tar: its headers are theirs, and fields may lie anywhere.
        text_field: The field whose size the samples table has as ``text_bytes``.
        original_keys: ``(num_samples,)`` bytes, the keys in a foreign tar; None for any other.
        bricks: Volumes in bricks; None in a shard without any.

    Args:
        shard: Name of the shard.
        shard_num_bytes: Size of the tar.
        field_names: The names that the column ``field_name`` points into.
        columns: The columns of docs/format.md, section 6.
        foreign_text_field: Text field of a tar that others wrote; None for any other.
        bricks: Volumes in bricks; None for none.
    """

    def __init__(
        self,
        shard: str,
        shard_num_bytes: int,
        field_names: tuple[str, ...],
        columns: Mapping[str, NDArray[Any]],
        foreign_text_field: str | None = None,
        bricks: BrickTable | None = None,
    ) -> None:
        self.shard, self.shard_num_bytes, self.field_names = shard, shard_num_bytes, field_names
        self.sample_keys: NDArray[np.bytes_] = columns["sample_key"]
        self.first_field: NDArray[np.uint32] = columns["sample_first_field"]
        self.field_name_ids: NDArray[np.uint32] = columns["field_name"]
        self.field_offsets: NDArray[np.uint64] = columns["field_offset"]
        self.field_num_bytes: NDArray[np.uint64] = columns["field_num_bytes"]
        self.field_crc32c: NDArray[np.uint32] = columns["field_crc32c"]
        self.original_keys: NDArray[np.bytes_] | None = columns.get("original_key")
        self.is_foreign = foreign_text_field is not None
        self.text_field = foreign_text_field or REPORT_FIELD
        self.bricks = bricks
        self.num_samples = len(self.sample_keys)
        self.num_fields = len(self.field_offsets)

    @classmethod
    def decode(cls, table: Table) -> ShardIndex:
        """Return the index that a table holds.

        Raises:
            FormatError: The table is no shard index of format 1.
            ChecksumError: The table is damaged.
        """
        table.expect_kind(KIND, FORMAT_VERSION)
        shard, num_bytes = table.meta.get("shard", ""), table.meta.get("shard_num_bytes", -1)
        names = table.meta.get("field_names")
        if not (isinstance(shard, str) and isinstance(num_bytes, int) and isinstance(names, list)):
            raise FormatError(f"{table.name} must name its shard and fields, got other meta data.")
        is_foreign = table.meta.get("foreign") is True
        text_field = table.meta.get("text_field") if is_foreign else None
        if is_foreign and not isinstance(text_field, str):
            text_field = REPORT_FIELD
        columns = {
            name: table.column(name) for name in (*_COLUMNS, *(("original_key",) if is_foreign else ()))
        }
        # The same few names recur in every index of a dataset: keep one string of each per process.
        interned = tuple(sys.intern(str(name)) for name in names)
        bricks = BrickTable(table) if BrickTable.is_in(table) else None
        found = cls(shard, num_bytes, interned, columns, text_field, bricks)
        if not found._is_consistent():
            raise FormatError(
                f"{table.name} must agree with itself, got columns that do not; verify the dataset."
            )
        return found

    @staticmethod
    def encode(
        shard: str,
        shard_num_bytes: int,
        samples: Sequence[tuple[str, Sequence[FieldLocation]]],
        volumes: Sequence[tuple[int, StoredVolume]] = (),
    ) -> bytes:
        """Encode the index of a shard.

        Args:
            shard: Name of the shard.
            shard_num_bytes: Size of the tar.
            samples: Sample keys with their fields, both in the order of the tar.
            volumes: Volumes in bricks, by the number of their field, ascending.

        Raises:
            FormatError: A name is none, a sample is empty, its fields do not ascend by name, or the members
                do not follow one another without a gap.
        """
        names = sorted({check_field(field.name) for _, fields in samples for field in fields})
        number = {name: position for position, name in enumerate(names)}
        end = 0
        for key, fields in samples:
            check_sample_key(key)
            order = [field.name for field in fields]
            if not order or any(name >= following for name, following in itertools.pairwise(order)):
                raise FormatError(f"a sample's fields must ascend by name, got another order ({shard}).")
            for field in fields:
                if field.offset != end + BLOCK_NUM_BYTES:
                    raise FormatError(
                        f"a field must begin at {end + BLOCK_NUM_BYTES}, got {field.offset} "
                        f"({shard}, {field.name}); give samples and fields in the order of the tar."
                    )
                end += member_num_bytes(field.num_bytes)
        columns, meta = _columns(samples, number), _meta(shard, shard_num_bytes, names)
        if volumes:
            columns |= brick_columns(volumes)
        return encode_table(columns, meta)

    @staticmethod
    def encode_columns(
        shard: str, shard_num_bytes: int, field_names: Sequence[str], columns: Mapping[str, NDArray[Any]]
    ) -> bytes:
        """Encode the index of a shard from its columns; the same bytes as of `encode`.

        Args:
            shard: Name of the shard.
            shard_num_bytes: Size of the tar.
            field_names: The distinct field names, ascending.
            columns: The columns of docs/format.md, section 6, in that order; their writer vouches for them.
        """
        return encode_table(columns, _meta(shard, shard_num_bytes, list(field_names)))

    @staticmethod
    def encode_foreign(
        shard: str,
        shard_num_bytes: int,
        samples: Sequence[tuple[str, Sequence[FieldLocation]]],
        *,
        original_keys: Sequence[bytes],
        text_field: str,
    ) -> bytes:
        """Encode the index of a tar that others wrote (docs/format.md, section 14).

        Args:
            shard: Name of the shard.
            shard_num_bytes: Size of the tar.
            samples: Sample keys with their fields, in the order of the first and of all members; the
                fields of a sample need not follow each other.
            original_keys: Of each sample, as the tar has it.
            text_field: The field whose size is the samples' ``text_bytes``.

        Raises:
            FormatError: A sample key is none, or a sample is empty.
        """
        for key, fields in samples:
            check_sample_key(key)
            if not fields:
                raise FormatError(f"a sample must have fields, got none ({shard}).")
        names = sorted({field.name for _, fields in samples for field in fields})
        columns = _columns(samples, {name: position for position, name in enumerate(names)})
        columns["original_key"] = np.array(list(original_keys), "S")
        meta = _meta(shard, shard_num_bytes, names) | {"foreign": True, "text_field": text_field}
        return encode_table(columns, meta)

    def sample_key(self, row: int) -> str:
        """Return the key of a sample by its place in the shard."""
        key: bytes = self.sample_keys[row]
        return key.decode("ascii")

    def fields(self, row: int) -> list[FieldLocation]:
        """Return the fields of a sample, in the order of the tar."""
        span = self._span(row)
        return [
            FieldLocation(self.field_names[name], offset, num_bytes, crc)
            for name, offset, num_bytes, crc in zip(
                self.field_name_ids[span].tolist(),
                self.field_offsets[span].tolist(),
                self.field_num_bytes[span].tolist(),
                self.field_crc32c[span].tolist(),
                strict=True,
            )
        ]

    def field(self, row: int, name: str) -> FieldLocation:
        """Return one field of a sample.

        Raises:
            FormatError: The sample has no such field.
        """
        for found in self.fields(row):
            if found.name == name:
                return found
        raise FormatError(
            f"sample {self.sample_key(row)} must have a field {name!a}, got none ({self.shard}, row {row})."
        )

    @cached_property
    def text_fields(self) -> NDArray[np.int64]:
        """Numbers of the texts of all samples, ``(num_samples,)``; -1 for none."""
        numbers = np.full(self.num_samples, -1, np.int64)
        if self.text_field in self.field_names:
            found = np.flatnonzero(self.field_name_ids == self.field_names.index(self.text_field))
            numbers[np.searchsorted(self.first_field, found, side="right") - 1] = found
        return numbers

    def texts(self, rows: NDArray[np.int64]) -> TextPlaces:
        """Return the places of the texts of some samples, by their rows in the shard."""
        fields = self.text_fields[rows]
        return TextPlaces(
            self.sample_keys[rows],
            self.field_offsets[fields].astype(np.int64),
            np.where(fields >= 0, self.field_num_bytes[fields], 0).astype(np.int64),
            self.field_crc32c[fields],
        )

    def pieces(self) -> Pieces:
        """Return what readers read by itself and check: fields; of a volume in bricks, each stored brick."""
        offsets, sizes = self.field_offsets.astype(np.int64), self.field_num_bytes.astype(np.int64)
        fields, checksums = np.arange(self.num_fields), self.field_crc32c
        if self.bricks is None:
            return Pieces(offsets, sizes, checksums, fields)
        volumes = self.bricks.fields.astype(np.int64)
        others = np.setdiff1d(fields, volumes)
        bricks = [self.volume(field) for field in volumes.tolist()]
        counts = [len(volume.starts) for volume in bricks]
        offsets = np.concatenate([offsets[others], *(volume.starts for volume in bricks)])
        stored = [volume.columns["num_bytes"].astype(np.int64) for volume in bricks]
        sizes = np.concatenate([sizes[others], *stored])
        checksums = np.concatenate([checksums[others], *(volume.columns["crc32c"] for volume in bricks)])
        fields = np.concatenate([others, np.repeat(volumes, counts)])
        has_bytes = sizes > 0
        return Pieces(offsets[has_bytes], sizes[has_bytes], checksums[has_bytes], fields[has_bytes])

    def volume(self, field: int) -> BrickVolume:
        """Return the bricks of a volume by the number of its field.

        Raises:
            FormatError: The field is no volume in bricks.
        """
        row = None if self.bricks is None else self.bricks.row_of(field)
        if self.bricks is None or row is None:
            raise FormatError(f"a field must be a volume in bricks, got another one ({self.shard}).")
        name = self.field_names[int(self.field_name_ids[field])]
        return self.bricks.volume(
            row,
            place=f"{self.shard}, {name}",
            offset=int(self.field_offsets[field]),
            num_bytes=int(self.field_num_bytes[field]),
            is_tiled=parse_level_field(name) is not None,
        )

    def levels_of(self, row: int, series: int) -> list[int]:
        """Return the fields of a sample that hold the levels of a slide, finest first.

        Args:
            row: Place of the sample in the shard.
            series: Number of the slide among the series of the sample.
        """
        levels: dict[int, int] = {}
        if self.bricks is None:
            return []
        for volume in self._volume_rows(row):
            field = int(self.bricks.fields[volume])
            parsed = parse_level_field(self.field_names[int(self.field_name_ids[field])])
            if parsed is not None and parsed[0] == series:
                levels[parsed[1]] = field
        return [levels[level] for level in sorted(levels)]

    def volumes_of(self, row: int, region: int | None = None) -> dict[int, int]:
        """Return the fields of a sample that hold its series in bricks, by number of the series.

        Args:
            row: Place of the sample in the shard.
            region: Return instead the masks in bricks that are named after this region.
        """
        found: dict[int, int] = {}
        if self.bricks is None:
            return found
        for volume in self._volume_rows(row):
            field = int(self.bricks.fields[volume])
            parsed = parse_volume_field(self.field_names[int(self.field_name_ids[field])])
            if parsed is not None and parsed[1] == region:
                found[parsed[0]] = field
        return found

    def volumes_in(self, row: int, *, first_field: int) -> list[tuple[int, StoredVolume]]:
        """Return the volumes of a sample for an index in which its fields have other numbers.

        Args:
            row: Place of the sample in the shard.
            first_field: Number of its first field there.
        """
        if self.bricks is None:
            return []
        shift = first_field - self._span(row).start
        return [
            (int(self.bricks.fields[volume]) + shift, self.bricks.stored(volume))
            for volume in self._volume_rows(row)
        ]

    def _volume_rows(self, row: int) -> range:
        """Return the rows of a sample in the table of bricks."""
        if self.bricks is None:
            return range(0)
        span = self._span(row)
        return range(*np.searchsorted(self.bricks.fields, [span.start, span.stop]).tolist())

    def _span(self, row: int) -> slice:
        if not 0 <= row < self.num_samples:
            raise IndexError(f"a row must lie in [0, {self.num_samples}), got {row} ({self.shard}).")
        return slice(int(self.first_field[row]), int(self.first_field[row + 1]))

    def _is_consistent(self) -> bool:
        """Tell whether lookups stay inside the columns and the fields inside the tar."""
        columns: tuple[NDArray[Any], ...] = (self.field_name_ids, self.field_num_bytes, self.field_crc32c)
        if any(len(column) != self.num_fields for column in columns):
            return False
        first = self.first_field.astype(np.int64)
        stops = self.field_offsets + self.field_num_bytes
        return bool(
            len(first) == self.num_samples + 1
            and (self.original_keys is None or len(self.original_keys) == self.num_samples)
            and first[0] == 0
            and first[-1] == self.num_fields
            and (np.diff(first) > 0).all()
            and (not self.num_fields or int(self.field_name_ids.max()) < len(self.field_names))
            and (not self.num_fields or int(stops.max()) <= self.shard_num_bytes)
            and (self.bricks is None or self.bricks.fields.max(initial=0) < self.num_fields)
        )


def _columns(
    samples: Sequence[tuple[str, Sequence[FieldLocation]]], number: Mapping[str, int]
) -> dict[str, NDArray[Any]]:
    counts = [len(fields) for _, fields in samples]
    every = [field for _, fields in samples for field in fields]
    return {
        "sample_key": np.array([key.encode("ascii") for key, _ in samples], "S"),
        "sample_first_field": np.cumsum([0, *counts]).astype("<u4"),
        "field_name": np.array([number[field.name] for field in every], "<u4"),
        "field_offset": np.array([field.offset for field in every], "<u8"),
        "field_num_bytes": np.array([field.num_bytes for field in every], "<u8"),
        "field_crc32c": np.array([field.crc32c for field in every], "<u4"),
    }


def _meta(shard: str, shard_num_bytes: int, names: list[str]) -> dict[str, Json]:
    return {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "shard": shard,
        "shard_num_bytes": shard_num_bytes,
        "field_names": names,
    }
