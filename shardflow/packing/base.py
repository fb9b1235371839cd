"""The version that a job builds on: its manifest, its samples, and what is known of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shardflow.errors import ConfigError, FormatError
from shardflow.packing.config import PageConfig
from shardflow.packing.inventory import count_outcomes
from shardflow.packing.known import KnownInputs
from shardflow.shards.manifest import Manifest, ShardEntry
from shardflow.shards.samples import FACT_COLUMNS, SampleEntry, SampleFacts, SamplesTable
from shardflow.shards.table import Table
from shardflow.storage import LocalStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardflow.packing.workplace import Workplace

__all__ = ["Base", "sample_entries", "shard_number"]

_NEXT_SHARDS = "next_shards"
_REMOVED = "removed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A published version, open for a job that makes the next one."""

    manifest: Manifest
    samples: SamplesTable
    known: KnownInputs

    @classmethod
    def open(cls, place: Workplace, manifest: Manifest) -> Self:
        """Open a version.

        Raises:
            ConfigError: The private folder holds nothing of this version, or it is of texts.
            FormatError: The samples table or the private ledger is damaged.
        """
        plan_digest = manifest.extra.get("plan_digest")
        if not isinstance(plan_digest, str):
            raise ConfigError(
                "the dataset must be one that shardflow packed, got one of another writer; "
                "pack into a new output."
            )
        if manifest.line_outcomes is not None:
            raise ConfigError(
                "the dataset must hold studies, got a text corpus; pack it anew without the lines to remove."
            )
        known = KnownInputs(place.private_ledger(plan_digest))
        counts = count_outcomes(known.reason)
        if counts != {
            "packed": manifest.counts.packed,
            "skipped": manifest.counts.skipped,
            "quarantined": manifest.counts.quarantined,
        }:
            raise FormatError(
                "the private ledger must hold the inputs of the dataset's newest version, got other numbers "
                "(inputs-*.jsonl); restore it from a copy."
            )
        table = Table(LocalStore(place.output).map(manifest.samples.path), name=manifest.samples.path)
        return cls(manifest=manifest, samples=SamplesTable(table), known=known)

    @property
    def next_version(self) -> int:
        """Number of the version to make."""
        return self.manifest.manifest_version + 1

    @property
    def extra(self) -> dict[str, Any]:
        """Facts that the next version takes over; the page is made anew."""
        return {name: value for name, value in self.manifest.extra.items() if name != "page"}

    @property
    def page(self) -> PageConfig:
        """Settings of the page that the dataset was packed with."""
        settings = _mapping(_mapping(self.manifest.extra.get("config")).get("page"))
        return PageConfig(**settings)

    @property
    def next_shards(self) -> dict[str, int]:
        """First unused number of each split's shards; a number is never used again."""
        numbers = dict(_mapping(self.manifest.extra.get(_NEXT_SHARDS)))
        for shard in self.manifest.shards:
            numbers[shard.split] = max(numbers.get(shard.split, 0), shard_number(shard) + 1)
        return numbers

    @property
    def removed_studies(self) -> frozenset[str]:
        """Sample keys of the studies that were removed; they never come back."""
        return frozenset(_mapping(self.manifest.extra.get(_REMOVED)).get("studies", ()))

    @property
    def removed_patients(self) -> frozenset[str]:
        """Surrogates of the patients that were removed."""
        return frozenset(_mapping(self.manifest.extra.get(_REMOVED)).get("patients", ()))

    def patient_splits(self) -> dict[str, str]:
        """Split of every packed patient, by the patient's surrogate."""
        patients = dict(zip(self.known.keys, self.known.patients, strict=True))
        splits = [shard.split for shard in self.manifest.shards]
        keys, shards = self.samples.column("sample_key").tolist(), self.samples.column("shard").tolist()
        found = {
            patients.get(key.decode("ascii"), ""): splits[n] for key, n in zip(keys, shards, strict=True)
        }
        found.pop("", None)
        return found

    def packed_keys(self) -> set[str]:
        """Sample keys of the version."""
        return {key.decode("ascii") for key in self.samples.column("sample_key").tolist()}


def shard_number(shard: ShardEntry) -> int:
    """Return the number in a shard's name.

    Raises:
        FormatError: There is none: another writer named it.
    """
    number = shard.name.rpartition("-")[2]
    if not number.isdecimal():
        raise FormatError(
            f"a shard must be named <split>-<number>, got {shard.name}; is it of another writer?"
        )
    return int(number)


def sample_entries(samples: SamplesTable, shard_numbers: Mapping[int, int]) -> Iterator[SampleEntry]:
    """Read rows of a samples table back.

    Args:
        samples: The table.
        shard_numbers: New position of each shard that is kept, by its position in the table.
    """
    names = ("sample_key", "shard", "row_in_shard", "offset_bytes", "num_bytes", *FACT_COLUMNS, "modality")
    columns: Sequence[list[Any]] = [_plain(samples.column(name)) for name in names]
    for key, shard, row, offset, num_bytes, *facts, modality in zip(*columns, strict=True):
        if shard in shard_numbers:
            yield SampleEntry(
                sample_key=key.decode("ascii"),
                shard=shard_numbers[shard],
                row_in_shard=row,
                offset_bytes=offset,
                num_bytes=num_bytes,
                facts=SampleFacts(
                    **dict(zip(FACT_COLUMNS, facts, strict=True)), modality=samples.modalities[modality]
                ),
            )


def _plain(column: NDArray[Any]) -> list[Any]:
    values: list[Any] = np.asarray(column).tolist()
    return values


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
