"""A patient stays in the split where it was first packed (P6), whatever a layout says of it later.

A keyed hash never moves anybody, but tables of official splits are edited. Where the newer table names no
split for a packed patient, the patient stays; where it names another one, nobody knows which of the two
tables is right, so the patient's new studies are held in quarantine (docs/adr/0034).

The pack plan: which study goes into which shard, fixed by headers alone before anything is decoded.

A pure function of the inventory, the reports and the settings that decide content. Studies are sorted by
(split, sample key) - a keyed hash, so the order says nothing about time or place of an examination - and cut
into shards by what the headers declare. A study that turns out to be unreadable leaves a gap and moves no
other.

What must hold before a job does anything: key, settings, reports; each refusal says what to do.
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
    from shardflow.format.manifest import Manifest
    from shardflow.packing.config import PackConfig
    from shardflow.packing.inventory import StudyTable
    from shardflow.packing.linking import ReportTable
    from shardflow.packing.progress import Progress
    from shardflow.storage import ByteStore


def keep_splits(
    studies: StudyTable, packed: Mapping[str, str], splits: Sequence[str], study_reason: NDArray[np.uint8]
) -> int:
    """Put studies of packed patients into the split of their patient, or into quarantine.

    Args:
        studies: What was found; its buckets become those of the packed splits.
        packed: Split of every packed patient, by the patient's surrogate.
        splits: Names of all splits, in the order of the settings.
        study_reason: ``(num_studies,)``; studies to pack that the layout puts elsewhere get their reason.

    Returns:
        Number of packed patients that the layout puts into another split.
    """
    moved: set[str] = set()
    for study, (patient, bucket) in enumerate(zip(studies.patients, studies.buckets, strict=True)):
        split = packed.get(patient) if patient else None
        if split is None:
            continue
        stays = NUM_BUCKETS + splits.index(split)
        # Below NUM_BUCKETS lie the keyed buckets of patients that the layout gives no split.
        if bucket >= NUM_BUCKETS and bucket != stays:
            moved.add(patient)
            if study_reason[study] == UNDECIDED:
                study_reason[study] = reason_code(Reason.SPLIT_CHANGED)
        studies.buckets[study] = stays
    return len(moved)


_PLAN_VERSION: Final = 1

# What a codec leaves of decoded bytes, about; the cut of shards depends on it, so it is never tuned.
_SIZE_RATIOS: Final = {"b2nd": (1, 2), "htj2k": (1, 2), "npy": (1, 1), "png16": (1, 2)}


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard: its studies by number, in the order of the tar."""

    name: str
    split: str
    studies: tuple[int, ...]
    estimated_bytes: int


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What will be packed where."""

    shards: tuple[PlannedShard, ...]
    study_reason: NDArray[np.uint8]
    """``(num_studies,)``: `UNDECIDED` for planned studies, else the reason why a study is not in the plan."""
    empty_splits: tuple[str, ...]
    """Splits that have parts in the settings and no study."""
    digest: str
    """Of all inputs, their headers, the reports and the settings: equal plans give equal datasets."""

    @property
    def num_studies(self) -> int:
        """Number of studies in the plan."""
        return sum(len(shard.studies) for shard in self.shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBasis:
    """What a plan takes over from the version before."""

    parent: str
    """The ``dataset_id`` of that version."""
    next_shards: Mapping[str, int]
    """First number of each split's new shards; 0 where it is not named."""
    study_reason: NDArray[np.uint8]
    """``(num_studies,)``: `UNDECIDED` for studies that the plan may take."""


def build_plan(
    config: PackConfig, key_id: str, files: FileTable, reports: ReportTable, basis: PlanBasis | None = None
) -> PackPlan:
    """Plan the shards, and decide at once what headers and reports decide.

    Files and reports of studies that are not in the plan get their reason here.

    Raises:
        ConfigError: The layout puts a patient into two splits.
    """
    if files.studies.num_torn_patients:
        raise ConfigError(
            "each patient must be in one split, got "
            f"{files.studies.num_torn_patients} that the layout puts into two; correct the splits: a patient "
            "that is trained on must not be tested on."
        )
    given = np.full(len(files.studies), UNDECIDED, np.uint8) if basis is None else basis.study_reason
    digest = _begin_digest(config, key_id, None if basis is None else basis.parent, files, reports)
    reasons = _study_reasons(config, files, reports, given)
    for study in np.flatnonzero((reasons != UNDECIDED) & (reasons != CARRIED)).tolist():
        files.decide(study, reason_name(int(reasons[study])), {})
    reports.decide(reasons)
    studies = np.flatnonzero(reasons == UNDECIDED).tolist()
    shards = _cut(config, files, studies, {} if basis is None else basis.next_shards)
    seen = {shard.split for shard in shards}
    return PackPlan(
        shards=shards,
        study_reason=reasons,
        empty_splits=tuple(
            sorted(name for name, parts in config.splits.items() if parts and name not in seen)
        ),
        digest=_end_digest(digest, files, shards),
    )


def split_of_bucket(splits: dict[str, int], bucket: int) -> str:
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


def _split_of(splits: dict[str, int], bucket: int) -> str:
    """Return the split of a patient: the official one, where the layout names it, else by its bucket."""
    return list(splits)[bucket - NUM_BUCKETS] if bucket >= NUM_BUCKETS else split_of_bucket(splits, bucket)


def _study_reasons(
    config: PackConfig, files: FileTable, reports: ReportTable, given: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Find the studies that no process needs to look at."""
    reasons = given.copy()
    decoded = files.sum_by_study(files.decoded_bytes)
    for study in np.flatnonzero(given == UNDECIDED).tolist():
        if files.studies.is_conflicting[study]:
            reasons[study] = reason_code(Reason.CONFLICTING_IDENTIFIER)
        elif study in reports.unusable:
            reasons[study] = reason_code(Reason.STUDY_QUARANTINED)
        elif decoded[study] > config.limits.max_study_bytes:
            reasons[study] = reason_code(Reason.LIMIT_EXCEEDED)
        elif config.policy.require_report and study not in reports.report_of:
            reasons[study] = reason_code(Reason.STUDY_WITHOUT_REPORT)
    # An attachment that cannot be packed is no reason against its study.
    is_judged = (files.reason != UNDECIDED) & (files.reason != CARRIED) & (files.kind != ATTACHMENT_KIND)
    for file in np.flatnonzero(is_judged & (files.study != NO_STUDY)).tolist():
        _judge_bad_file(config, files, file, reasons)
    return reasons


def _judge_bad_file(config: PackConfig, files: FileTable, file: int, reasons: NDArray[np.uint8]) -> None:
    """A header that cannot be packed takes its study with it, or is left out: the policy says which.

    A damaged copy of an image that is whole in another file takes nothing with it.
    """
    study, code = int(files.study[file]), int(files.reason[file])
    name = reason_name(code)
    if reasons[study] != UNDECIDED or name is None:
        return
    good = files.images_of(study)
    good = good[files.reason[good] == UNDECIDED]
    if not len(good):
        reasons[study] = reason_code(Reason.STUDY_QUARANTINED) if _takes_study(config, name) else code
    elif _takes_study(config, name) and files.instance[file] not in files.instance[good]:
        reasons[study] = reason_code(Reason.STUDY_QUARANTINED)


def _takes_study(config: PackConfig, reason: str) -> bool:
    is_bad = outcome_of(reason) is Outcome.QUARANTINED
    return is_bad and config.policy.on_bad_instance == "quarantine_study"


def _cut(
    config: PackConfig, files: FileTable, studies: list[int], next_shards: Mapping[str, int]
) -> tuple[PlannedShard, ...]:
    split_of = [_split_of(config.splits, bucket) for bucket in files.studies.buckets]
    keys = files.studies.keys
    studies.sort(key=lambda study: (split_of[study], keys[study]))
    numerator, denominator = _SIZE_RATIOS[config.shards.codec]
    decoded, slices = files.sum_by_study(files.decoded_bytes), files.sum_by_study(files.num_slices)
    # A header and half a block of padding per slice, and as much for study.json and the report.
    estimates = decoded * numerator // denominator + (slices + 4) * (BLOCK_NUM_BYTES + BLOCK_NUM_BYTES // 2)
    shards: list[PlannedShard] = []
    numbers: dict[str, int] = {}
    open_studies: list[int] = []
    size, limit = 0, config.shards.target_bytes

    def close() -> None:
        split = split_of[open_studies[0]]
        number = numbers.get(split, next_shards.get(split, 0))
        numbers[split] = number + 1
        shards.append(PlannedShard(shard_name(split, number), split, tuple(open_studies), size))

    for study in studies:
        estimate = int(estimates[study])
        is_full = size + estimate > limit or len(open_studies) >= config.shards.max_samples
        if open_studies and (is_full or split_of[study] != split_of[open_studies[0]]):
            close()
            open_studies, size = [], 0
        open_studies.append(study)
        size += estimate
    if open_studies:
        close()
    return tuple(shards)


def _begin_digest(
    config: PackConfig, key_id: str, parent: str | None, files: FileTable, reports: ReportTable
) -> hashlib._Hash:
    """Digest the settings and the inputs that the plan decides; whatever else was found does not show."""
    facts = [_PLAN_VERSION, config.content_digest(), key_id, *([] if parent is None else [parent])]
    hasher = hashlib.sha256(json.dumps(facts).encode())
    for table in (files, reports):
        order = np.argsort(table.surrogate, kind="stable")
        order = order[table.reason[order] != CARRIED]
        hasher.update(len(order).to_bytes(8, "little"))
        for column in (table.surrogate, table.digest):
            hasher.update(np.ascontiguousarray(column[order]).tobytes())
    # Which study an attachment is linked with may change while no file does: a study came, or went.
    for row in sorted(files.attachments, key=lambda row: bytes(files.surrogate[row])):
        if files.reason[row] != CARRIED and files.study[row] != NO_STUDY:
            attachment, sample_key = files.attachments[row], files.studies.keys[files.study[row]]
            hasher.update(json.dumps([sample_key, attachment.kind, attachment.items]).encode("ascii"))
    return hasher


def _end_digest(hasher: hashlib._Hash, files: FileTable, shards: tuple[PlannedShard, ...]) -> str:
    for shard in shards:
        members = [[files.studies.keys[study], files.studies.patients[study]] for study in shard.studies]
        hasher.update(json.dumps([shard.name, members]).encode())
    return hasher.hexdigest()


_NUM_THREADS: Final = 8
"""Sizes that are asked for at once."""


def load_key(config: PackConfig) -> SecretKey:
    """Load the secret key; the first run of a dataset makes one, unless the settings name a file.

    Raises:
        ConfigError: The key cannot be used or made.
    """
    if config.identity.key_file is None and not config.key_file.exists():
        try:
            return SecretKey.create(config.key_file)
        except ConfigError:
            if not config.key_file.exists():
                raise
            # Another task of the same job was faster.
    return SecretKey.load(config.key_file)


def check_same_settings(config: PackConfig, key: SecretKey, finished: Manifest) -> None:
    """Refuse at once what could not be the dataset that stands, or a version of it.

    Settings hold the parts of the splits: with others, patients would change their split.

    Raises:
        ConfigError: Key or settings are others.
    """
    for what, stands, asked in (
        ("secret key", finished.key_id, key.key_id),
        ("settings", finished.config_digest, config.content_digest()),
    ):
        if stands != asked:
            raise ConfigError(
                f"output must be new, or hold a dataset of the same {what}, got one of another; "
                "name another output."
            )


def check_reports(config: PackConfig) -> None:
    """Refuse reports that are not there.

    Raises:
        ConfigError: They are named and absent, or asked for and not named.
    """
    reports = config.inputs.reports
    if reports is not None and not reports.exists():
        raise ConfigError(
            "inputs.reports must be an existing file or folder, got none; correct it, or leave it out to "
            "pack images alone."
        )
    if config.policy.require_report and reports is None:
        raise ConfigError(
            "policy.require_report must be false without inputs.reports, got true; name the reports."
        )


def check_files(store: ByteStore, manifest: Manifest) -> None:
    """Look whether every file of a version stands with its size.

    Raises:
        FormatError: One does not.
        StorageError: The store cannot be asked.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sizes = pool.map(lambda entry: _size(store, entry.path), manifest.files())
    for entry, num_bytes in zip(manifest.files(), sizes, strict=True):
        if num_bytes != entry.num_bytes:
            raise FormatError(
                f"{entry.path} must stand with {entry.num_bytes} bytes, got another file or none; "
                "run `shardflow verify`, and pack into a new output if it is damaged."
            )


def _size(store: ByteStore, path: str) -> int | None:
    try:
        return store.size(path)
    except NotFoundError:
        return None


def nothing_to_pack(files: FileTable) -> ConfigError:
    """Make the error for inputs that hold no image."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in count_reasons(files.reason).items())
    return ConfigError(
        f"inputs.dicom must hold DICOM images, got {len(files)} files and none of them ({reasons}); "
        "correct the folders."
    )


def note_missing_reports(
    config: PackConfig, plan: PackPlan, reports: ReportTable, progress: Progress
) -> None:
    """Say it while the job can be stopped: a table whose identifiers fit no study is no error."""
    if config.inputs.reports is None:
        return
    count = sum(study not in reports.report_of for shard in plan.shards for study in shard.studies)
    if count:
        progress.note(f"{count} of {plan.num_studies} studies have no report, and are packed without one")
