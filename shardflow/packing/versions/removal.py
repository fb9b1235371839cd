"""Removal of studies or patients from a dataset for good, because consent was withdrawn.

The next version lacks their samples, their inputs are `CONSENT_WITHDRAWN`, and no later job packs them again.
The bytes stay in the shards and in earlier versions until `shardflow.packing.versions.compaction` rewrites
the shards and deletes the versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from shardflow.errors import ConfigError
from shardflow.format.dataset import Dataset
from shardflow.format.keys import SAMPLE_KEY_PATTERN
from shardflow.format.reasons import Reason
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.inventory import NO_STUDY, reason_code
from shardflow.packing.progress import SilentProgress
from shardflow.packing.studies.privacy import counts_without
from shardflow.packing.versions.base import sample_entries
from shardflow.packing.versions.files import encode_entry, open_newest
from shardflow.packing.workspace import CrashLog
from shardflow.storage import LocalStore
from shardflow.storage.local import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.format.manifest import Manifest, ShardEntry
    from shardflow.format.samples import SampleEntry
    from shardflow.packing.progress import Progress
    from shardflow.packing.versions.base import Base
    from shardflow.packing.versions.files import NewestVersion

_Status: TypeAlias = Literal["removed", "nothing_new"]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Withdrawn:
    """Patients and studies to remove. Holds identifiers, which never go into a message, log or dataset."""

    patients: Collection[str] = ()
    """Patient IDs of the DICOM headers."""
    studies: Collection[str] = ()
    """Study Instance UIDs."""
    sample_keys: Collection[str] = ()

    def __repr__(self) -> str:
        counts = len(self.patients), len(self.studies), len(self.sample_keys)
        return "Withdrawn({} patients, {} studies, {} sample keys)".format(*counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovalSummary:
    """Result of a removal."""

    status: _Status
    """``removed``, or ``nothing_new``: all of it was removed before."""
    dataset_id: str
    manifest_version: int
    num_studies: int
    """Studies removed by this run, packed or not."""
    num_samples: int
    """Samples among them."""
    num_unknown: int
    """Given patients and studies that the dataset does not know; later jobs will not pack them either."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Removed:
    studies: frozenset[str]
    patients: frozenset[str]


def remove(
    output: Path,
    private: Path,
    withdrawn: Withdrawn,
    *,
    key_file: Path | None = None,
    progress: Progress | None = None,
) -> RemovalSummary:
    """Write a version without the given studies and patients.

    A published dataset is updated at its address too.

    Args:
        output: The dataset.
        private: Its private folder.
        withdrawn: Patients and studies to remove.
        key_file: The secret key, if it is not in the private folder.
        progress: Receives the progress of the job.

    Raises:
        ConfigError: Nothing is given, key or folder are another dataset's, or no sample would be left.
        StorageError: Something cannot be written; the same call resumes.
    """
    if not (withdrawn.patients or withdrawn.studies or withdrawn.sample_keys):
        raise ConfigError("a removal must name a patient, study or sample key, got none; give one.")
    if not all(SAMPLE_KEY_PATTERN.fullmatch(key) for key in withdrawn.sample_keys):
        raise ConfigError(
            "a sample key must match [a-z0-9]{1,64}, got another text; take it from the ledger."
        )
    with open_newest(output, private) as newest:
        workspace, base, uploader = newest.workspace, newest.base, newest.uploader
        manifest = base.manifest
        key = SecretKey.load(key_file or workspace.private / "secret.key")
        if key.key_id != manifest.key_id:
            raise ConfigError(
                "the secret key must be the one that the dataset was packed with, got another one; "
                "name its file."
            )
        removed, num_unknown = _resolve(base, key, withdrawn)
        packed = base.packed_keys()
        before = base.removed_studies
        is_new = not (removed.studies <= before and removed.patients <= base.removed_patients)
        if is_new:
            manifest = _write(newest, removed, progress or SilentProgress())
        if uploader is not None:
            uploader.finish()
            uploader.erase_unnamed()
        # An earlier, interrupted job may have logged crashes of the removed studies.
        CrashLog(workspace.crash_log).lift(removed.studies)
        return RemovalSummary(
            status="removed" if is_new else "nothing_new",
            dataset_id=manifest.dataset_id,
            manifest_version=manifest.manifest_version,
            num_studies=len(removed.studies - before),
            num_samples=len((removed.studies - before) & packed),
            num_unknown=num_unknown,
        )


def _resolve(base: Base, key: SecretKey, withdrawn: Withdrawn) -> tuple[_Removed, int]:
    """Resolve identifiers to surrogates of studies and patients."""
    patients = {key.surrogate("patient", patient) for patient in withdrawn.patients}
    studies = {key.surrogate("study", study) for study in withdrawn.studies} | {*withdrawn.sample_keys}
    num_unknown = len(studies - {*base.known.keys})
    found: set[str] = set()
    if patients:
        for entry in base.known.entries(range(len(base.known))):
            if entry.get("patient") in patients and entry["sample_key"] is not None:
                found.add(entry["patient"])
                studies.add(entry["sample_key"])
    num_unknown += len(patients - found - base.removed_patients)
    removed = _Removed(studies=base.removed_studies | studies, patients=base.removed_patients | patients)
    return removed, num_unknown


def _write(newest: NewestVersion, removed: _Removed, progress: Progress) -> Manifest:
    workspace, base, manifest = newest.workspace, newest.base, newest.base.manifest
    kept = [
        entry
        for entry in sample_entries(base.samples, {n: n for n in range(len(manifest.shards))})
        if entry.sample_key not in removed.studies
    ]
    if not kept:
        raise ConfigError(
            "a dataset must keep at least one sample, got a removal of all; delete the dataset's folder and "
            "its private folder instead."
        )
    facts = [manifest.dataset_id, sorted(removed.studies), sorted(removed.patients)]
    plan_digest = hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()
    write_atomic(workspace.private_ledger(plan_digest), _forget(base, removed), replace=True, mode=0o600)
    reason = base.known.reason.copy()
    reason[_is_removed(base, removed)] = reason_code(Reason.CONSENT_WITHDRAWN)
    return newest.replace(
        _count_removed(manifest.shards, kept),
        kept,
        reason,
        progress,
        deidentification=_deidentification(newest, removed),
        plan_digest=plan_digest,
        removed={"patients": sorted(removed.patients), "studies": sorted(removed.studies)},
    )


def _deidentification(newest: NewestVersion, removed: _Removed) -> dict[str, Any]:
    base, manifest, uploader = newest.base, newest.base.manifest, newest.uploader
    store = LocalStore(newest.workspace.output) if uploader is None else uploader.store(manifest)
    keys = base.samples.column("sample_key").tolist()
    rows = [row for row, key in enumerate(keys) if key.decode("ascii") in removed.studies]
    recorded: Any = manifest.extra.get("deidentification", {})
    return counts_without(recorded, Dataset(store, manifest), rows)


def _count_removed(shards: tuple[ShardEntry, ...], kept: list[SampleEntry]) -> list[ShardEntry]:
    counts = np.bincount([entry.shard for entry in kept], minlength=len(shards)).tolist()
    return [
        # A shard without samples is left out of the next version.
        replace(shard, num_removed=shard.num_samples - count if count else 0)
        for shard, count in zip(shards, counts, strict=True)
    ]


def _is_removed(base: Base, removed: _Removed) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    known = base.known
    by_study = np.array([key in removed.studies for key in known.keys], np.bool_)
    inside = known.study != NO_STUDY
    chosen = np.zeros(len(known), np.bool_)
    chosen[inside] = by_study[known.study[inside]]
    return chosen


def _forget(base: Base, removed: _Removed) -> Iterator[bytes]:
    """Yield the private ledger, without paths and patients of removed inputs."""
    for entry in base.known.entries(range(len(base.known))):
        if entry["sample_key"] in removed.studies:
            for name in ("path", "place", "patient"):
                entry.pop(name, None)
            entry["reason"] = Reason.CONSENT_WITHDRAWN.value
        yield encode_entry(entry)
