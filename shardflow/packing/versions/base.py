"""Previous version of a dataset: its manifest, its samples, and its inputs as the private ledger has them.

Known inputs take some 70 bytes each, and 200 a study. Paths stay in the file, and are read back for the few
inputs that are ingested again. An input is recognized by its content, not by its name alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, naming_os_errors
from shardflow.format.manifest import SAMPLES_BLOCKS, Manifest, ShardEntry
from shardflow.format.samples import FACT_COLUMNS, KeySet, SamplesTable
from shardflow.format.table import Table
from shardflow.packing.config import PageConfig
from shardflow.packing.inventory import (
    ATTACHMENT_KIND,
    INPUT_KINDS,
    NO_STUDY,
    REPORT_KIND,
    count_outcomes,
    known_code,
    set_columns,
)
from shardflow.packing.workspace import reading_private
from shardflow.storage import LocalStore

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shardflow.packing.workspace import Workspace

# Odd, so that multiplication is a bijection of 64 bits.
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


def file_identity(digest: NDArray[np.uint64], num_bytes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 bits of each file's content, ``(n,)``: the digest of its header, and its size."""
    return digest + num_bytes.astype(np.uint64) * _MIX


def path_digest(path: str) -> int:
    """Return 64 bits of a path."""
    encoded = path.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def ranked(identity: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Make equal identities distinct by their rank among each other, ``(n,)``."""
    order = np.argsort(identity, kind="stable")
    ordered = identity[order]
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    position = np.arange(len(ordered))
    rank = np.empty(len(ordered), np.uint64)
    rank[order] = position - np.maximum.accumulate(np.where(is_first, position, 0))
    return identity + rank * _MIX


_COLUMNS: Final = {
    "surrogate": "S26",
    "kind": "u1",
    "reason": "u1",
    "study": "i4",
    "identity": "u8",
    "path": "u8",
    "pixels": "u8",
    "_offset": "i8",
}


class KnownInputs:
    """The inputs of a published version, in the order of its private ledger.

    Args:
        path: The private ledger.

    Attributes:
        keys: Sample keys of the studies that inputs belong to, packed or not.
        patients: Surrogate of the patient of each of them; ``""`` if it was removed.
        surrogate: ``(n,)`` S26.
        kind: ``(n,)`` uint8 into `shardflow.packing.inventory.INPUT_KINDS`.
        reason: ``(n,)`` uint8, as in `shardflow.packing.inventory.FileTable`; never undecided.
        study: ``(n,)`` int32 into ``keys``, or `NO_STUDY`.
        identity: ``(n,)`` uint64 of the content.
        path: ``(n,)`` uint64: `path_digest` of its location; 0 if that was removed.
        pixels: ``(n,)`` uint64 of its stored pixels; 0 if unknown.

    Raises:
        ConfigError: The file does not exist.
        FormatError: It is damaged.
        StorageError: It cannot be read.
    """

    surrogate: NDArray[np.bytes_]
    kind: NDArray[np.uint8]
    reason: NDArray[np.uint8]
    study: NDArray[np.int32]
    identity: NDArray[np.uint64]
    path: NDArray[np.uint64]
    pixels: NDArray[np.uint64]
    _offset: NDArray[np.int64]

    def __init__(self, path: Path) -> None:
        self._path = path
        self.keys: list[str] = []
        self.patients: list[str] = []
        if not path.exists():
            raise ConfigError(
                "private_dir must hold the private ledger of the dataset's newest version (inputs-*.jsonl), "
                "found none; name the private folder that the dataset was packed with."
            )
        numbers: dict[str, int] = {}
        rows: list[tuple[Any, ...]] = []
        with reading_private("the private ledger (inputs-*.jsonl)"):
            for offset, fields in self._lines():
                key = fields["sample_key"]
                if key is not None and key not in numbers:
                    numbers[key] = len(self.keys)
                    self.keys.append(key)
                    self.patients.append(fields.get("patient") or "")
                rows.append(
                    (
                        fields["input"].encode("ascii"),
                        INPUT_KINDS.index(fields["kind"]),
                        known_code(fields["reason"]),
                        NO_STUDY if key is None else numbers[key],
                        int(fields["identity"], 16),
                        0 if fields.get("path") is None else path_digest(_location(fields)),
                        int(fields.get("pixels", "0"), 16),
                        offset,
                    )
                )
        set_columns(self, _COLUMNS, rows)

    def __len__(self) -> int:
        return len(self.surrogate)

    @property
    def is_report(self) -> NDArray[np.bool_]:
        """Mask of the reports, ``(n,)``."""
        found: NDArray[np.bool_] = self.kind == REPORT_KIND
        return found

    @property
    def is_image(self) -> NDArray[np.bool_]:
        """Mask of the image files, ``(n,)``."""
        found: NDArray[np.bool_] = (self.kind != REPORT_KIND) & (self.kind != ATTACHMENT_KIND)
        return found

    def entries(self, rows: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Read lines of the private ledger; they hold paths."""
        with naming_os_errors("reading the private ledger"), self._path.open("rb") as file:
            for row in rows:
                file.seek(int(self._offset[row]))
                yield json.loads(file.readline())

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        offset = 0
        with self._path.open("rb") as file:
            for line in file:
                yield offset, json.loads(line)
                offset += len(line)


def _location(fields: dict[str, Any]) -> str:
    """Return the path of a file, or the source of a report and the place in it."""
    return f"{fields['path']}:{fields['place']}" if fields["kind"] == "report" else str(fields["path"])


_NEXT_SHARDS = "next_shards"
_REMOVED = "removed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The published version that a job builds on."""

    manifest: Manifest
    samples: SamplesTable
    known: KnownInputs

    @classmethod
    def open(cls, workspace: Workspace, manifest: Manifest) -> Self:
        """Open a version.

        Raises:
            ConfigError: It is of another writer or a text corpus, or the private folder lacks its ledger.
            FormatError: The samples table or the private ledger is damaged.
        """
        plan_digest = manifest.extra.get("plan_digest")
        if not isinstance(plan_digest, str):
            raise ConfigError("the dataset was not packed by shardflow; pack into a new output.")
        if manifest.line_outcomes is not None:
            raise ConfigError(
                "the dataset must hold studies, got a text corpus; pack it again without the lines to remove."
            )
        known = KnownInputs(workspace.private_ledger(plan_digest))
        counts = count_outcomes(known.reason)
        if counts != {
            "packed": manifest.counts.packed,
            "skipped": manifest.counts.skipped,
            "quarantined": manifest.counts.quarantined,
        }:
            raise FormatError(
                "the private ledger (inputs-*.jsonl) does not match the dataset's newest version; restore "
                "it from a copy."
            )
        table = Table(LocalStore(workspace.output).map(manifest.samples.path), name=manifest.samples.path)
        return cls(manifest=manifest, samples=SamplesTable(table), known=known)

    @property
    def next_version(self) -> int:
        """Number of the next version."""
        return self.manifest.manifest_version + 1

    @property
    def extra(self) -> dict[str, Any]:
        """Facts that the next version takes over, without the files of this one."""
        own = ("page", SAMPLES_BLOCKS)
        return {name: value for name, value in self.manifest.extra.items() if name not in own}

    @property
    def page(self) -> PageConfig:
        """Settings of the page that the dataset was packed with."""
        settings = _mapping(_mapping(self.manifest.extra.get("config")).get("page"))
        return PageConfig(**settings)

    @property
    def next_shards(self) -> dict[str, int]:
        """First unused shard number of each split; numbers are never reused."""
        numbers = dict(_mapping(self.manifest.extra.get(_NEXT_SHARDS)))
        for shard in self.manifest.shards:
            numbers[shard.split] = max(numbers.get(shard.split, 0), shard_number(shard) + 1)
        return numbers

    @property
    def removed_studies(self) -> frozenset[str]:
        """Sample keys of removed studies, which are never packed again."""
        return frozenset(_mapping(self.manifest.extra.get(_REMOVED)).get("studies", ()))

    @property
    def removed_patients(self) -> frozenset[str]:
        """Surrogates of removed patients."""
        return frozenset(_mapping(self.manifest.extra.get(_REMOVED)).get("patients", ()))

    def patient_splits(self) -> dict[str, str]:
        """Return the split of every packed patient, by surrogate."""
        patients = dict(zip(self.known.keys, self.known.patients, strict=True))
        found = {
            patients.get(key, ""): rows.shard.split
            for rows in self.shard_rows()
            for key in rows.sample_keys()
        }
        found.pop("", None)
        return found

    def packed_keys(self) -> KeySet:
        """Return the sample keys of the version."""
        return KeySet(self.samples.sample_keys())

    def shard_rows(self) -> list[ShardRows]:
        """Return the samples of each shard."""
        shards = self.manifest.shards
        stops = np.cumsum([shard.num_samples - shard.num_removed for shard in shards]).tolist()
        starts = [0, *stops]
        return [
            ShardRows(shard, self.samples, range(start, stop))
            for shard, start, stop in zip(shards, starts, stops, strict=False)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class ShardRows:
    """A shard of a version, and where the rows of its samples are; they are read when they are written."""

    shard: ShardEntry
    source: SamplesTable | RowSpool
    """Table of the previous version, or rows that this job made."""
    rows: range | NDArray[np.int64]
    """Of the source."""

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of the samples table, ``(num_samples,)``; modalities by the codes of the source."""
        rows = np.arange(self.rows.start, self.rows.stop) if isinstance(self.rows, range) else self.rows
        return self.source.gather(name, rows)

    def sample_keys(self) -> list[str]:
        """Return the sample keys."""
        return [key.decode("ascii") for key in self.column("sample_key").tolist()]

    def without(self, removed: Collection[str]) -> ShardRows:
        """Return the shard without some samples, by key; their bytes stay in it."""
        rows = [row for row, key in zip(self.rows, self.sample_keys(), strict=True) if key not in removed]
        if len(rows) == len(self):
            return self
        # A shard without samples is left out of the next version.
        num_removed = self.shard.num_samples - len(rows) if rows else 0
        return ShardRows(replace(self.shard, num_removed=num_removed), self.source, np.array(rows, np.int64))


_ROW: Final = np.dtype(
    [
        ("sample_key", "S64"),
        ("row_in_shard", "<u4"),
        ("offset_bytes", "<u8"),
        ("num_bytes", "<u8"),
        *((name, "<u4") for name in FACT_COLUMNS),
        ("modality", "<u2"),
    ]
)


class RowSpool:
    """Rows of the samples table that a job makes, in a file until the table is written; none is in memory.

    Args:
        path: The file, in the work folder; what an earlier job left there is overwritten.

    Attributes:
        modalities: Names that the column ``modality`` points into.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_rows = 0
        self.modalities: list[str] = []

    def add(self, columns: Mapping[str, Sequence[Any] | NDArray[Any]], modality: Sequence[str]) -> range:
        """Append rows; return their numbers.

        Args:
            columns: All columns but ``shard`` and ``modality``.
            modality: Of each sample, by name.

        Raises:
            StorageError: The file cannot be written.
        """
        rows = np.zeros(len(modality), _ROW)
        for name, values in columns.items():
            rows[name] = values
        for name in sorted({*modality} - {*self.modalities}):
            self.modalities.append(name)
        codes = {name: code for code, name in enumerate(self.modalities)}
        rows["modality"] = [codes[name] for name in modality]
        mode = "ab" if self._num_rows else "wb"
        with naming_os_errors("writing rows of samples to the work folder"), self._path.open(mode) as file:
            file.write(rows.tobytes())
        self._num_rows += len(rows)
        return range(self._num_rows - len(rows), self._num_rows)

    def gather(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return some rows of a column; all rows between them are read.

        Raises:
            StorageError: The file cannot be read.
        """
        if not len(rows):
            return np.zeros(0, _ROW[name])
        start, stop = int(rows[0]), int(rows[-1]) + 1
        with naming_os_errors("reading rows of samples from the work folder"):
            read = np.fromfile(self._path, _ROW, stop - start, offset=start * _ROW.itemsize)
        return np.asarray(read[name][rows - start])


def shard_number(shard: ShardEntry) -> int:
    """Return the number in a shard's name.

    Raises:
        FormatError: There is none: it is of another writer.
    """
    number = shard.name.rpartition("-")[2]
    if not number.isdecimal():
        raise FormatError(
            f"a shard must be named <split>-<number>, got {shard.name}; is it of another writer?"
        )
    return int(number)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
