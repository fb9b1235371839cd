"""Pack plan: the shard of every study, fixed by headers alone; and the checks that come before any work.

The plan is a pure function of the inventory, the reports and the settings that decide content. Studies are
sorted by (split, sample key), a keyed hash, so that the order reveals nothing about time or place of an
examination, and cut into shards by the sizes that headers declare. A study that turns out to be unreadable
leaves a gap and moves no other.

A patient stays in the split where it was first packed (P6). A keyed hash never moves anybody, but tables of
official splits are edited. If the new table names no split for a packed patient, the patient stays; if it
names another one, the patient's new studies are quarantined, because either table may be wrong
(docs/adr/0034).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.format.keys import shard_name
from shardflow.format.reasons import Outcome, Reason, outcome_of
from shardflow.format.tar import BLOCK_NUM_BYTES
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.inventory import (
    ATTACHMENT_KIND,
    CARRIED,
    NO_STUDY,
    UNDECIDED,
    FileTable,
    count_reasons,
    reason_code,
    reason_name,
)
from shardflow.packing.scan import NUM_BUCKETS

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.format.manifest import Manifest
    from shardflow.packing.config import ShardsConfig
    from shardflow.packing.inventory import StudyTable
    from shardflow.packing.linking import ReportTable
    from shardflow.packing.progress import Progress
    from shardflow.packing.settings import PolicyConfig
    from shardflow.storage import ByteStore


_PLAN_VERSION: Final = 1
# Approximate compression of each codec. The cut of shards depends on it, so it is never tuned.
_SIZE_RATIOS: Final = {"b2nd": (1, 2), "fast": (1, 2), "htj2k": (1, 2), "npy": (1, 1), "png16": (1, 2)}
_NUM_THREADS: Final = 8
"""Concurrent requests for file sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRules:
    """Settings that decide a plan."""

    splits: Mapping[str, int]
    """Parts of each split."""
    shards: ShardsConfig
    policy: PolicyConfig
    max_study_bytes: int
    config_digest: str
    key_id: str


def keep_splits(
    studies: StudyTable, packed: Mapping[str, str], splits: Sequence[str], study_reason: NDArray[np.uint8]
) -> int:
    """Assign studies of packed patients to the split of their patient, or quarantine them.

    Args:
        studies: Studies that were found; their buckets are set to those of the packed splits.
        packed: Split of every packed patient, by the patient's surrogate.
        splits: Names of all splits, in the order of the settings.
        study_reason: ``(num_studies,)``; set for studies that the layout assigns to another split.

    Returns:
        Number of packed patients that the layout assigns to another split.
    """
    moved: set[str] = set()
    for study, (patient, bucket) in enumerate(zip(studies.patients, studies.buckets, strict=True)):
        split = packed.get(patient) if patient else None
        if split is None:
            continue
        stays = NUM_BUCKETS + splits.index(split)
        # Buckets below NUM_BUCKETS are keyed, of patients without a split in the layout.
        if bucket >= NUM_BUCKETS and bucket != stays:
            moved.add(patient)
            if study_reason[study] == UNDECIDED:
                study_reason[study] = reason_code(Reason.SPLIT_CHANGED)
        studies.buckets[study] = stays
    return len(moved)


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard of the plan, with the numbers of its studies in the order of the tar."""

    name: str
    split: str
    studies: tuple[int, ...]
    estimated_bytes: int


@dataclass(frozen=True, slots=True)
class PackPlan:
    """The studies of every shard."""

    shards: tuple[PlannedShard, ...]
    study_reason: NDArray[np.uint8]
    """``(num_studies,)``: `UNDECIDED` for planned studies, or the reason why a study is not planned."""
    empty_splits: tuple[str, ...]
    """Splits of the settings that got no study."""
    digest: str
    """Digest of inputs, headers, reports and settings: equal plans give equal datasets."""

    @property
    def num_studies(self) -> int:
        """Number of studies in the plan."""
        return sum(len(shard.studies) for shard in self.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBasis:
    """Facts of the previous version that a plan builds on."""

    parent: str
    """Its ``dataset_id``."""
    next_shards: Mapping[str, int]
    """First number of each split's new shards; 0 if missing."""
    study_reason: NDArray[np.uint8]
    """``(num_studies,)``: `UNDECIDED` for studies that may be planned."""


def build_plan(
    rules: PlanRules, files: FileTable, reports: ReportTable, basis: PlanBasis | None = None
) -> PackPlan:
    """Plan the shards, and set the reasons that headers and reports alone decide.

    Raises:
        ConfigError: The layout assigns a patient to two splits.
    """
    if files.studies.num_torn_patients:
        raise ConfigError(
            f"the layout assigns {files.studies.num_torn_patients} patients to two splits; correct the "
            "splits: a patient in the training data must not be tested on."
        )
    given = np.full(len(files.studies), UNDECIDED, np.uint8) if basis is None else basis.study_reason
    digest = _begin_digest(rules, None if basis is None else basis.parent, files, reports)
    reasons = _study_reasons(rules, files, reports, given)
    for study in np.flatnonzero((reasons != UNDECIDED) & (reasons != CARRIED)).tolist():
        files.decide(study, reason_name(int(reasons[study])), {})
    reports.decide(reasons)
    studies = np.flatnonzero(reasons == UNDECIDED).tolist()
    shards = _cut(rules, files, studies, {} if basis is None else basis.next_shards)
    seen = {shard.split for shard in shards}
    return PackPlan(
        shards=shards,
        study_reason=reasons,
        empty_splits=tuple(
            sorted(name for name, parts in rules.splits.items() if parts and name not in seen)
        ),
        digest=_end_digest(digest, files, shards),
    )


def split_of_bucket(splits: Mapping[str, int], bucket: int) -> str:
    """Return the split that owns a bucket.

    Depends on the parts and the bucket alone: a patient stays in its split however many others come.

    Args:
        splits: Parts of each split.
        bucket: ``[0, NUM_BUCKETS)``.
    """
    total, end = sum(splits.values()), 0
    for name, parts in splits.items():
        end += parts
        if bucket * total < end * NUM_BUCKETS:
            return name
    raise ValueError("a bucket must lie below NUM_BUCKETS")


def _split_of(splits: Mapping[str, int], bucket: int) -> str:
    """Return the split of a patient: the official one, where the layout names it, else by its bucket."""
    return list(splits)[bucket - NUM_BUCKETS] if bucket >= NUM_BUCKETS else split_of_bucket(splits, bucket)


def _study_reasons(
    rules: PlanRules, files: FileTable, reports: ReportTable, given: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Return the reasons of studies that need not be packed."""
    reasons = given.copy()
    decoded = files.sum_by_study(files.decoded_bytes)
    for study in np.flatnonzero(given == UNDECIDED).tolist():
        if files.studies.is_conflicting[study]:
            reasons[study] = reason_code(Reason.CONFLICTING_IDENTIFIER)
        elif study in reports.unusable:
            reasons[study] = reason_code(Reason.STUDY_QUARANTINED)
        elif decoded[study] > rules.max_study_bytes:
            reasons[study] = reason_code(Reason.LIMIT_EXCEEDED)
        elif rules.policy.require_report and study not in reports.report_of:
            reasons[study] = reason_code(Reason.STUDY_WITHOUT_REPORT)
    # An attachment that cannot be packed is no reason against its study.
    is_judged = (files.reason != UNDECIDED) & (files.reason != CARRIED) & (files.kind != ATTACHMENT_KIND)
    for file in np.flatnonzero(is_judged & (files.study != NO_STUDY)).tolist():
        _judge_bad_file(rules, files, file, reasons)
    return reasons


def _judge_bad_file(rules: PlanRules, files: FileTable, file: int, reasons: NDArray[np.uint8]) -> None:
    """Quarantine the study of a bad file, or leave out the file, as the policy says.

    A damaged copy of an image that is intact in another file changes nothing.
    """
    study, code = int(files.study[file]), int(files.reason[file])
    name = reason_name(code)
    if reasons[study] != UNDECIDED or name is None:
        return
    good = files.images_of(study)
    good = good[files.reason[good] == UNDECIDED]
    if not len(good):
        reasons[study] = reason_code(Reason.STUDY_QUARANTINED) if _takes_study(rules, name) else code
    elif _takes_study(rules, name) and files.instance[file] not in files.instance[good]:
        reasons[study] = reason_code(Reason.STUDY_QUARANTINED)


def _takes_study(rules: PlanRules, reason: str) -> bool:
    is_bad = outcome_of(reason) is Outcome.QUARANTINED
    return is_bad and rules.policy.takes_study(reason)


def _cut(
    rules: PlanRules, files: FileTable, studies: list[int], next_shards: Mapping[str, int]
) -> tuple[PlannedShard, ...]:
    split_of = [_split_of(rules.splits, bucket) for bucket in files.studies.buckets]
    keys = files.studies.keys
    studies.sort(key=lambda study: (split_of[study], keys[study]))
    numerator, denominator = _SIZE_RATIOS[rules.shards.codec]
    decoded, slices = files.sum_by_study(files.decoded_bytes), files.sum_by_study(files.num_slices)
    # A header and half a block of padding per slice, and as much for study.json and the report.
    estimates = decoded * numerator // denominator + (slices + 4) * (BLOCK_NUM_BYTES + BLOCK_NUM_BYTES // 2)
    shards: list[PlannedShard] = []
    numbers: dict[str, int] = {}
    open_studies: list[int] = []
    size, limit = 0, rules.shards.target_bytes

    def close() -> None:
        split = split_of[open_studies[0]]
        number = numbers.get(split, next_shards.get(split, 0))
        numbers[split] = number + 1
        shards.append(PlannedShard(shard_name(split, number), split, tuple(open_studies), size))

    for study in studies:
        estimate = int(estimates[study])
        is_full = size + estimate > limit or len(open_studies) >= rules.shards.max_samples
        if open_studies and (is_full or split_of[study] != split_of[open_studies[0]]):
            close()
            open_studies, size = [], 0
        open_studies.append(study)
        size += estimate
    if open_studies:
        close()
    return tuple(shards)


def _begin_digest(
    rules: PlanRules, parent: str | None, files: FileTable, reports: ReportTable
) -> hashlib._Hash:
    """Digest the settings and the inputs that the plan decides; other inputs do not count."""
    facts = [_PLAN_VERSION, rules.config_digest, rules.key_id, *([] if parent is None else [parent])]
    hasher = hashlib.sha256(json.dumps(facts).encode())
    for table in (files, reports):
        order = np.argsort(table.surrogate, kind="stable")
        order = order[table.reason[order] != CARRIED]
        hasher.update(len(order).to_bytes(8, "little"))
        for column in (table.surrogate, table.digest):
            hasher.update(np.ascontiguousarray(column[order]).tobytes())
    # An attachment may be linked with another study although no file changed: a study was added or removed.
    for row in sorted(files.attachments, key=lambda row: bytes(files.surrogate[row])):
        if files.reason[row] != CARRIED and files.study[row] != NO_STUDY:
            attachment, sample_key = files.attachments[row], files.studies.keys[files.study[row]]
            hasher.update(json.dumps([sample_key, attachment.kind, attachment.items]).encode("ascii"))
    return hasher


def _end_digest(hasher: hashlib._Hash, files: FileTable, shards: tuple[PlannedShard, ...]) -> str:
    for shard in shards:
        members = [[files.studies.keys[study], files.studies.patients[study]] for study in shard.studies]
        for member, person in zip(members, map(files.studies.person_of, shard.studies), strict=True):
            member += [] if person is None else [person.patient_key]
        hasher.update(json.dumps([shard.name, members]).encode())
    return hasher.hexdigest()


def load_key(key_file: Path, *, may_create: bool) -> SecretKey:
    """Load the secret key; the first run of a dataset creates it.

    Args:
        key_file: Its file.
        may_create: Whether a missing key is created; not if the settings name a file of their own.

    Raises:
        ConfigError: The key cannot be used or created.
    """
    if may_create and not key_file.exists():
        try:
            return SecretKey.create(key_file)
        except ConfigError:
            if not key_file.exists():
                raise
            # Another task of the same job has just created it.
    return SecretKey.load(key_file)


def check_same_settings(key: SecretKey, config_digest: str, finished: Manifest) -> None:
    """Refuse settings that cannot be those of a finished dataset, or of its next version.

    They hold the parts of the splits: with other parts, patients would change their split.

    Raises:
        ConfigError: Key or settings differ.
    """
    for name, found, expected in (
        ("another secret key", finished.key_id, key.key_id),
        ("other settings", finished.config_digest, config_digest),
    ):
        if found != expected:
            raise ConfigError(
                f"output holds a dataset that was packed with {name}; name another output, or use those of "
                "the dataset."
            )


def check_reports(reports: Path | None, *, is_required: bool) -> None:
    """Check that the reports exist.

    Raises:
        ConfigError: They are named and missing, or required and not named.
    """
    if reports is not None and not reports.exists():
        raise ConfigError(
            "inputs.reports must be an existing file or folder; correct it, or leave it out to pack images "
            "alone."
        )
    if is_required and reports is None:
        raise ConfigError("policy.require_report needs inputs.reports; name the reports.")


def check_files(store: ByteStore, manifest: Manifest) -> None:
    """Check that every file of a version exists with its size.

    Raises:
        FormatError: One is missing or has another size.
        StorageError: The store cannot be reached.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sizes = pool.map(lambda entry: _size(store, entry.path), manifest.files())
    for entry, num_bytes in zip(manifest.files(), sizes, strict=True):
        if num_bytes != entry.num_bytes:
            raise FormatError(
                f"{entry.path} must exist with {entry.num_bytes} bytes, found another size or nothing; run "
                "`shardflow verify`, and pack into a new output if it is damaged."
            )


def _size(store: ByteStore, path: str) -> int | None:
    try:
        return store.size(path)
    except NotFoundError:
        return None


def nothing_to_pack(files: FileTable) -> ConfigError:
    """Return the error for inputs without any image."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in count_reasons(files.reason).items())
    return ConfigError(
        f"inputs.dicom must hold DICOM images, got {len(files)} files and none of them ({reasons}); "
        "correct the folders."
    )


def note_missing_reports(plan: PackPlan, reports: ReportTable, progress: Progress) -> None:
    """Report studies without a report, while the job can still be stopped: wrong identifiers are no error."""
    count = sum(study not in reports.report_of for shard in plan.shards for study in shard.studies)
    if count:
        progress.note(f"{count} of {plan.num_studies} studies have no report, and are packed without one")
