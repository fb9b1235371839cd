"""Publish a dataset whose shards all stand: samples table, ledger, and last of all the manifest.

Before the manifest there is no dataset: whoever opens the folder finds none, however much of it stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardflow.errors import ShardflowError
from shardflow.packing.assembly import load_record
from shardflow.packing.fragment import StudyOutcome
from shardflow.packing.inventory import (
    NO_STUDY,
    count_outcomes,
    count_reasons,
    reason_code,
    reason_name,
)
from shardflow.shards.ledger import LedgerChain, LedgerRow
from shardflow.shards.manifest import FileEntry, LedgerEntry, Manifest, ShardEntry, commit
from shardflow.shards.outcomes import OutcomeCounts
from shardflow.shards.samples import SampleEntry, SampleFacts, SamplesTable
from shardflow.sources.reasons import Outcome, outcome_of
from shardflow.storage import LocalStore
from shardflow.storage.atomic import write_atomic

if TYPE_CHECKING:
    from shardflow.packing.config import PackConfig
    from shardflow.packing.inventory import FileTable
    from shardflow.packing.linking import ReportTable
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.progress import Progress
    from shardflow.packing.workplace import Workplace

__all__ = ["Settled", "created_with", "publish", "settle"]

SAMPLES_PATH: Final = "samples/samples-000001.tbl"
LEDGER_PATH: Final = "ledger.jsonl"
_MANIFEST_VERSION: Final = 1
# The packages whose versions decide the bytes of a dataset.
_PACKAGES: Final = ("blosc2", "imagecodecs", "numpy", "pillow", "pydicom", "shardflow")


def created_with() -> dict[str, str]:
    """Return the versions of the packages that decide the bytes."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A finished plan: every input has its outcome, every shard its record."""

    shards: tuple[ShardEntry, ...]
    samples: tuple[SampleEntry, ...]
    outcomes: dict[str, int]
    """Inputs by outcome; their sum is the number of inputs."""
    reasons: dict[str, int]
    """Inputs by reason, for those that are not packed."""
    studies: dict[str, int]
    """Studies by outcome."""


def settle(place: Workplace, plan: PackPlan, files: FileTable, reports: ReportTable) -> Settled:
    """Give every input its outcome from the records of the shards.

    Raises:
        ShardflowError: A shard has no record, or an input no outcome; an internal error.
    """
    shards: list[ShardEntry] = []
    samples: list[SampleEntry] = []
    study_reason = plan.study_reason.copy()
    for planned in plan.shards:
        record = load_record(place.records, planned.name)
        if record is None:
            raise ShardflowError(f"{planned.name} must have a record, found none; this is an internal error.")
        for study in planned.studies:
            outcome = StudyOutcome.from_json(record["outcomes"][files.studies.keys[study]])
            files.decide(study, outcome.reason, outcome.instances)
            study_reason[study] = reason_code(outcome.reason)
        if record["tar"] is not None:
            samples.extend(_entries(record, len(shards)))
            shards.append(_shard_entry(planned.split, record))
    reports.decide(study_reason)
    outcomes = count_outcomes(files.reason, reports.reason)
    if sum(outcomes.values()) != len(files) + len(reports):
        raise ShardflowError("inputs must be packed + skipped + quarantined; this is an internal error.")
    studies = count_outcomes(study_reason)
    if studies["packed"] != len(samples):
        raise ShardflowError("packed studies must be the samples; this is an internal error.")
    return Settled(
        shards=tuple(shards),
        samples=tuple(samples),
        outcomes=outcomes,
        reasons=count_reasons(files.reason, reports.reason),
        studies=studies,
    )


def publish(
    place: Workplace,
    config: PackConfig,
    plan: PackPlan,
    files: FileTable,
    reports: ReportTable,
    settled: Settled,
    progress: Progress,
    *,
    key_id: str,
) -> Manifest:
    """Write the samples table, the ledger and the manifest.

    Raises:
        StorageError: A file cannot be written.
    """
    progress.phase("samples", 0)
    table = SamplesTable.encode(settled.samples, shard_splits=[shard.split for shard in settled.shards])
    write_atomic(place.output / SAMPLES_PATH, [table], replace=True)
    progress.phase("ledger", 0)
    ledger = _LedgerWriter(files, reports)
    write_atomic(place.output / LEDGER_PATH, ledger.chunks(), replace=True)
    manifest = Manifest(
        manifest_version=_MANIFEST_VERSION,
        shards=settled.shards,
        samples=FileEntry(path=SAMPLES_PATH, num_bytes=len(table), sha256=hashlib.sha256(table).hexdigest()),
        ledger=LedgerEntry(
            path=LEDGER_PATH, num_bytes=ledger.num_bytes, sha256=ledger.sha256.hexdigest(), head=ledger.head
        ),
        counts=OutcomeCounts(**settled.outcomes),
        created_with=created_with(),
        config_digest=config.content_digest(),
        key_id=key_id,
        extra={
            "config": config.content(),
            "num_slices": sum(entry.facts.num_slices for entry in settled.samples),
            "plan_digest": plan.digest,
            "reasons": settled.reasons,
            "studies": settled.studies,
        },
    )
    _remove_strangers(place, manifest)
    progress.phase("manifest", 0)
    commit(LocalStore(place.output), manifest)
    return manifest


class _LedgerWriter:
    """Streams the ledger, sorted by surrogate: its size never shows in memory."""

    def __init__(self, files: FileTable, reports: ReportTable) -> None:
        self._files = files
        self._reports = reports
        self._chain = LedgerChain()
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()

    @property
    def head(self) -> str:
        return self._chain.head

    def chunks(self) -> Iterator[bytes]:
        surrogates = np.concatenate([self._files.surrogate, self._reports.surrogate])
        for position in np.argsort(surrogates, kind="stable").tolist():
            yield self._count(self._chain.append(self._row(position, surrogates[position].decode())))
        yield self._count(self._chain.close())

    def _row(self, position: int, surrogate: str) -> LedgerRow:
        is_file = position < len(self._files)
        number = position if is_file else position - len(self._files)
        table = self._files if is_file else self._reports
        reason = reason_name(int(table.reason[number]))
        study = int(table.study[number])
        outcome: Any = Outcome.PACKED if reason is None else outcome_of(reason)
        return LedgerRow(
            input=surrogate,
            kind="dicom" if is_file else "report",
            outcome=outcome.value,
            reason=reason,
            sample_key=None if study == NO_STUDY else self._files.studies.keys[study],
        )

    def _count(self, line: bytes) -> bytes:
        self.num_bytes += len(line)
        self.sha256.update(line)
        return line


def _entries(record: dict[str, Any], shard: int) -> Iterator[SampleEntry]:
    for row, sample in enumerate(record["samples"]):
        yield SampleEntry(
            sample_key=sample["sample_key"],
            shard=shard,
            row_in_shard=row,
            offset_bytes=sample["offset_bytes"],
            num_bytes=sample["num_bytes"],
            facts=SampleFacts(**sample["facts"]),
        )


def _shard_entry(split: str, record: dict[str, Any]) -> ShardEntry:
    name = record["name"]
    return ShardEntry(
        name=name,
        split=split,
        path=f"shards/{name}.tar",
        num_bytes=record["tar"]["num_bytes"],
        sha256=record["tar"]["sha256"],
        index=FileEntry(path=f"shards/{name}.idx", **record["index"]),
        num_samples=len(record["samples"]),
        num_fields=sum(sample["num_fields"] for sample in record["samples"]),
    )


def _remove_strangers(place: Workplace, manifest: Manifest) -> None:
    """Remove what former, unpublished plans and killed writers left: no manifest ever named it."""
    named = {entry.path for entry in manifest.files()}
    for folder in ("shards", "samples"):
        for path in (place.output / folder).glob("*"):
            if f"{folder}/{path.name}" not in named:
                path.unlink()
