"""Removal of studies or patients from a dataset, and compaction, which deletes their bytes.

Removal, for consent that was withdrawn: the next version lacks the samples, their inputs are
`CONSENT_WITHDRAWN`, and no later job packs them again. The bytes stay in the shards and in earlier versions
until compaction.

Compaction never changes a shard: the remaining samples become a new shard with the next number of the split,
and the next version names the new shards. On request, earlier manifests are deleted after that, and then
every file that only they named.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from shardflow.errors import ConfigError, ShardflowError
from shardflow.format.dataset import Dataset, check_field_bytes
from shardflow.format.entities import view_digests
from shardflow.format.facts.voxels import carry_shard_voxels
from shardflow.format.file_blocks import has_stale_digests
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import REPORT_COUNTS, REPORT_JSON_FIELD, SAMPLE_KEY_PATTERN, shard_name
from shardflow.format.manifest import Manifest, ShardEntry, manifest_path, versions
from shardflow.format.reasons import Reason
from shardflow.format.samples import FACT_COLUMNS
from shardflow.format.shard_files import write_file
from shardflow.format.tar import BLOCK_NUM_BYTES, END_OF_ARCHIVE, encode_member
from shardflow.format.volumes.bricks import StoredVolume
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.inventory import of_inputs, reason_code
from shardflow.packing.people import encode_evidence, read_evidence
from shardflow.packing.progress import SilentProgress
from shardflow.packing.studies.pictures import read_pictures
from shardflow.packing.studies.privacy import counts_without
from shardflow.packing.studies.report_content import UNKNOWN_RULES, rules_of
from shardflow.packing.versions.base import RowSpool, ShardRows
from shardflow.packing.versions.files import encode_entry, open_newest, remove_strangers
from shardflow.packing.workspace import CrashLog
from shardflow.storage import LocalStore
from shardflow.storage.local import fsync_directory, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from shardflow.packing.progress import Progress
    from shardflow.packing.versions.base import Base
    from shardflow.packing.versions.files import NewestVersion
    from shardflow.packing.workspace import Workspace

_ALIGNMENT: Final = "alignment.json"
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
    num_linked: int = 0
    """Further patient IDs of the removed persons, whose studies stay: they were not given."""

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
) -> RemovalSummary:
    """Write a version without the given studies and patients.

    A published dataset is updated at its address too.

    Args:
        output: The dataset.
        private: Its private folder.
        withdrawn: Patients and studies to remove.
        key_file: The secret key, if it is not in the private folder.

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
        num_linked = _count_linked(workspace, base, removed)
        packed = base.packed_keys()
        before = base.removed_studies
        is_new = not (removed.studies <= before and removed.patients <= base.removed_patients)
        if is_new:
            manifest = _write(newest, removed, SilentProgress())
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
            num_samples=sum(key in packed for key in removed.studies - before),
            num_unknown=num_unknown,
            num_linked=num_linked,
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


def _count_linked(workspace: Workspace, base: Base, removed: _Removed) -> int:
    """Count patients who are one person with a removed one and have studies that stay."""
    entries = [
        (entry["patient"], entry["person"])
        for entry in read_evidence(workspace.people_ledger(str(base.manifest.extra["plan_digest"])))
        if "person" in entry
    ]
    persons = {person for patient, person in entries if patient in removed.patients}
    known = zip(base.known.keys, base.known.patients, strict=True)
    staying = {patient for key, patient in known if key not in removed.studies}
    return sum(person in persons and patient in staying - removed.patients for patient, person in entries)


def _write(newest: NewestVersion, removed: _Removed, progress: Progress) -> Manifest:
    workspace, base, manifest = newest.workspace, newest.base, newest.base.manifest
    kept = [rows.without(removed.studies) for rows in base.shard_rows()]
    if not any(map(len, kept)):
        raise ConfigError(
            "a dataset must keep at least one sample, got a removal of all; delete the dataset's folder and "
            "its private folder instead."
        )
    facts = [manifest.dataset_id, sorted(removed.studies), sorted(removed.patients)]
    plan_digest = hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()
    write_atomic(workspace.private_ledger(plan_digest), _forget(base, removed), replace=True, mode=0o600)
    evidence = read_evidence(workspace.people_ledger(str(manifest.extra["plan_digest"])))
    kept_lines = (encode_evidence(entry) for entry in evidence if entry["patient"] not in removed.patients)
    write_atomic(workspace.people_ledger(plan_digest), kept_lines, replace=True, mode=0o600)
    pictures = read_pictures(workspace.pictures(str(manifest.extra["plan_digest"])))
    shown = (encode_entry(one) for one in pictures if one["sample_key"] not in removed.studies)
    write_atomic(workspace.pictures(plan_digest), shown, replace=True, mode=0o600)
    reason = base.known.reason.copy()
    reason[_is_removed(base, removed)] = reason_code(Reason.CONSENT_WITHDRAWN)
    return newest.replace(
        kept,
        reason,
        progress,
        deidentification=_deidentification(newest, removed),
        plan_digest=plan_digest,
        removed={"patients": sorted(removed.patients), "studies": sorted(removed.studies)},
        **_report_counts(newest, removed),
    )


def _deidentification(newest: NewestVersion, removed: _Removed) -> dict[str, Any]:
    recorded: Any = newest.base.manifest.extra.get("deidentification", {})
    return counts_without(recorded, *_rows_of(newest, removed))


def _report_counts(newest: NewestVersion, removed: _Removed) -> dict[str, Any]:
    """Return the counts of reports without those of removed samples, as far as these can be read."""
    recorded: Any = newest.base.manifest.extra.get(REPORT_COUNTS)
    if recorded is None:
        return {}
    counts = {name: Counter(recorded[name]) for name in recorded}
    dataset, rows = _rows_of(newest, removed)
    for row in rows:
        with suppress(ShardflowError, ValueError, KeyError, TypeError):
            stored = {field.name for field in dataset.sample_fields(row)[1]}
            fields = dataset.read_fields(row, stored & {REPORT_JSON_FIELD, _ALIGNMENT})
            content, alignment = (
                json.loads(fields.get(name, b"null")) for name in (REPORT_JSON_FIELD, _ALIGNMENT)
            )
            counts["languages"].subtract(["+".join(sorted(content["languages"]))])
            counts["unread"].subtract({one["reason"] for one in content["unread"]})
            if "rules" in counts:
                rules = rules_of(content, alignment)
                counts["rules"].subtract([rules if rules in counts["rules"] else UNKNOWN_RULES])
    return {REPORT_COUNTS: {name: dict(sorted((+one).items())) for name, one in counts.items()}}


def _rows_of(newest: NewestVersion, removed: _Removed) -> tuple[Dataset, list[int]]:
    base, manifest, uploader = newest.base, newest.base.manifest, newest.uploader
    store = LocalStore(newest.workspace.output) if uploader is None else uploader.store(manifest)
    rows = [
        row
        for shard in base.shard_rows()
        for row, key in zip(shard.rows, shard.sample_keys(), strict=True)
        if key in removed.studies
    ]
    return Dataset(store, manifest), rows


def _is_removed(base: Base, removed: _Removed) -> NDArray[np.bool_]:
    by_study = np.array([key in removed.studies for key in base.known.keys], np.bool_)
    return of_inputs(by_study, base.known.study)


def _forget(base: Base, removed: _Removed) -> Iterator[bytes]:
    """Yield the private ledger, without paths and patients of removed inputs."""
    for entry in base.known.entries(range(len(base.known))):
        if entry["sample_key"] in removed.studies:
            for name in ("path", "place", "patient", "accession", "pixels", "rules", "blanked"):
                entry.pop(name, None)
            entry["reason"] = Reason.CONSENT_WITHDRAWN.value
        yield encode_entry(entry)


_CompactionStatus: TypeAlias = Literal["compacted", "nothing_new"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactionSummary:
    """Result of a compaction."""

    status: _CompactionStatus
    """``compacted``, or ``nothing_new``: no shard holds a removed sample, no digests of another samples table
    are named, and no version was deleted."""
    dataset_id: str
    manifest_version: int
    num_shards: int
    """Rewritten shards."""
    deleted_versions: tuple[int, ...]
    """Deleted versions."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        return {**asdict(self), "deleted_versions": list(self.deleted_versions)}


def compact(output: Path, private: Path, *, deletes_old: bool = False) -> CompactionSummary:
    """Write a version whose shards hold no removed sample, and whose samples table has digests of its own.

    A published dataset is updated at its address too, and versions are deleted in both places.

    Args:
        output: The dataset.
        private: Its private folder.
        deletes_old: Delete all earlier versions, so that nothing of a removed study is left in the dataset,
            and earlier ledgers of the private folder.

    Raises:
        ChecksumError: A shard is damaged; nothing is published.
        ConfigError: The folders are no dataset and its private folder, or another job works there.
        StorageError: Something cannot be written; the same call resumes.
    """
    shown = SilentProgress()
    with open_newest(output, private) as newest:
        store, manifest, uploader = LocalStore(newest.workspace.output), newest.base.manifest, newest.uploader
        holed = [shard for shard in manifest.shards if shard.num_removed]
        renews = has_stale_digests(store, manifest)
        if holed or renews:
            manifest = _write_compacted(newest, shown)
        if uploader is not None:
            uploader.finish()
        deleted = tuple(number for number in versions(store) if number != manifest.manifest_version)
        if deletes_old:
            _delete_old(newest.workspace, manifest, deleted)
            if uploader is not None:
                uploader.erase_unnamed()
    shown.phase("done", 0)
    return CompactionSummary(
        status="compacted" if holed or renews or (deletes_old and deleted) else "nothing_new",
        dataset_id=manifest.dataset_id,
        manifest_version=manifest.manifest_version,
        num_shards=len(holed),
        deleted_versions=deleted if deletes_old else (),
    )


def _write_compacted(newest: NewestVersion, progress: Progress) -> Manifest:
    base, uploader = newest.base, newest.uploader
    dataset = Dataset(LocalStore(newest.workspace.output), base.manifest)
    spool = RowSpool(newest.workspace.rows)
    next_shards = base.next_shards
    progress.phase("shards", sum(bool(shard.num_removed) for shard in base.manifest.shards))
    shards: list[ShardRows] = []
    for number, kept in enumerate(base.shard_rows()):
        shard = kept.shard
        if not shard.num_removed:
            shards.append(kept)
            continue
        name = shard_name(shard.split, next_shards[shard.split])
        next_shards[shard.split] += 1
        if uploader is not None:
            uploader.fetch(shard)
        moved = _rewrite(dataset, number, kept, name, spool)
        former = kept.column("row_in_shard").tolist()
        carry_shard_voxels(dataset, number, former, newest.workspace.records, moved.shard.sha256)
        if uploader is not None:
            uploader.send(moved.shard)
            uploader.release(shard)
        shards.append(moved)
        progress.advance()
    return newest.replace(shards, base.known.reason, progress, next_shards=next_shards)


def _rewrite(dataset: Dataset, number: int, kept: ShardRows, name: str, spool: RowSpool) -> ShardRows:
    """Write the remaining samples of a shard, verifying every field."""
    old, index = dataset.manifest.shards[number], dataset.shard_index(number)
    source = dataset.store.map(old.path)
    located: list[tuple[str, list[FieldLocation]]] = []
    starts, sizes = array("Q"), array("Q")
    volumes: list[tuple[int, StoredVolume]] = []
    offset = num_fields = 0
    keys = kept.sample_keys()

    def pieces() -> Iterator[bytes]:
        nonlocal offset, num_fields
        for key, row in zip(keys, kept.column("row_in_shard").tolist(), strict=True):
            starts.append(offset)
            fields = []
            volumes.extend(index.volumes_in(row, first_field=num_fields))
            for field in index.fields(row):
                payload = source[field.offset : field.offset + field.num_bytes]
                check_field_bytes(field, payload, path=old.path, sample_key=key)
                fields.append(replace(field, offset=offset + BLOCK_NUM_BYTES))
                member = encode_member(f"{key}.{field.name}", payload)
                offset += len(member)
                yield member
            num_fields += len(fields)
            located.append((key, fields))
            sizes.append(offset - starts[-1])
        offset += len(END_OF_ARCHIVE)
        yield END_OF_ARCHIVE

    root = LocalStore(dataset.store.url).root
    tar = write_file(root, f"shards/{name}.tar", pieces())
    table = ShardIndex.encode(name, tar.num_bytes, located, volumes)
    shard = ShardEntry(
        name=name,
        split=old.split,
        path=tar.path,
        num_bytes=tar.num_bytes,
        sha256=tar.sha256,
        index=write_file(root, f"shards/{name}.idx", [table]),
        num_samples=len(keys),
        num_fields=num_fields,
        num_volumes=len(volumes),
    )
    columns = {name: kept.column(name) for name in FACT_COLUMNS}
    columns |= {
        "sample_key": kept.column("sample_key"),
        "row_in_shard": np.arange(len(keys)),
        "offset_bytes": np.asarray(starts),
        "num_bytes": np.asarray(sizes),
    }
    modality = [kept.source.modalities[code] for code in kept.column("modality").tolist()]
    return ShardRows(shard, spool, spool.add(columns, modality))


def _delete_old(workspace: Workspace, manifest: Manifest, numbers: Sequence[int]) -> None:
    """Delete earlier versions, oldest first, so that the remaining ones are always complete."""
    for number in numbers:
        (workspace.output / manifest_path(number)).unlink(missing_ok=True)
    fsync_directory(workspace.output)
    remove_strangers(workspace.output, [manifest])
    for page in workspace.output.glob("report*.html"):
        if manifest.page is None or page.name != manifest.page.path:
            page.unlink()
    # Token counts and entity views belong to single versions; `remove_strangers` knows tables of facts.
    kept = {manifest.dataset_id, *view_digests(LocalStore(workspace.output), [manifest])}
    for folder in [*workspace.output.glob("tokens/*/*"), *workspace.output.glob("views/*/*")]:
        if folder.is_dir() and folder.name not in kept:
            shutil.rmtree(folder)
    digest = str(manifest.extra["plan_digest"])
    current = {
        workspace.private_ledger(digest),
        workspace.people_ledger(digest),
        workspace.pictures(digest),
    }
    for pattern in ("inputs-*.jsonl", "people-*.jsonl", "pictures-*.jsonl"):
        for ledger in workspace.private.glob(pattern):
            if ledger not in current:
                ledger.unlink()
    # They may name removed patients; the next job writes them anew.
    for name in ("copies.csv", "identities.csv"):
        (workspace.private / name).unlink(missing_ok=True)
