"""The pack plan: which study goes into which shard, fixed by headers alone before anything is decoded.

A pure function of the inventory, the reports and the settings that decide content. Studies are sorted by
(split, sample key) - a keyed hash, so the order says nothing about time or place of an examination - and cut
into shards by what the headers declare. A study that turns out to be unreadable leaves a gap and moves no
other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shardflow.packing.inventory import NO_STUDY, UNDECIDED, FileTable, reason_code, reason_name
from shardflow.packing.scan import NUM_BUCKETS
from shardflow.shards.keys import shard_name
from shardflow.shards.tar import BLOCK_NUM_BYTES
from shardflow.sources.reasons import Outcome, Reason, outcome_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardflow.packing.config import PackConfig
    from shardflow.packing.linking import ReportTable

__all__ = ["PackPlan", "PlannedShard", "build_plan", "split_of_bucket"]

_PLAN_VERSION: Final = 1

# What a codec leaves of decoded bytes, about; the cut of shards depends on it, so it is never tuned.
_SIZE_RATIOS: Final = {"b2nd": (1, 2), "npy": (1, 1)}


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


def build_plan(config: PackConfig, key_id: str, files: FileTable, reports: ReportTable) -> PackPlan:
    """Plan the shards, and decide at once what headers and reports decide.

    Files and reports of studies that are not in the plan get their reason here.
    """
    reasons = _study_reasons(config, files, reports)
    for study in np.flatnonzero(reasons != UNDECIDED).tolist():
        files.decide(study, reason_name(int(reasons[study])), {})
    reports.decide(reasons)
    shards = _cut(config, files, np.flatnonzero(reasons == UNDECIDED).tolist())
    seen = {shard.split for shard in shards}
    return PackPlan(
        shards=shards,
        study_reason=reasons,
        empty_splits=tuple(
            sorted(name for name, parts in config.splits.items() if parts and name not in seen)
        ),
        digest=_digest(config, key_id, files, reports, shards),
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


def _study_reasons(config: PackConfig, files: FileTable, reports: ReportTable) -> NDArray[np.uint8]:
    """Find the studies that no process needs to look at."""
    reasons = np.full(len(files.studies), UNDECIDED, np.uint8)
    decoded = files.sum_by_study(files.decoded_bytes)
    for study in range(len(reasons)):
        if files.studies.is_conflicting[study]:
            reasons[study] = reason_code(Reason.CONFLICTING_IDENTIFIER)
        elif study in reports.unusable:
            reasons[study] = reason_code(Reason.STUDY_QUARANTINED)
        elif decoded[study] > config.limits.max_study_bytes:
            reasons[study] = reason_code(Reason.LIMIT_EXCEEDED)
        elif config.policy.require_report and study not in reports.report_of:
            reasons[study] = reason_code(Reason.STUDY_WITHOUT_REPORT)
    for file in np.flatnonzero((files.reason != UNDECIDED) & (files.study != NO_STUDY)).tolist():
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
    good = files.files_of(study)
    good = good[files.reason[good] == UNDECIDED]
    if not len(good):
        reasons[study] = reason_code(Reason.STUDY_QUARANTINED) if _takes_study(config, name) else code
    elif _takes_study(config, name) and files.instance[file] not in files.instance[good]:
        reasons[study] = reason_code(Reason.STUDY_QUARANTINED)


def _takes_study(config: PackConfig, reason: str) -> bool:
    is_bad = outcome_of(reason) is Outcome.QUARANTINED
    return is_bad and config.policy.on_bad_instance == "quarantine_study"


def _cut(config: PackConfig, files: FileTable, studies: list[int]) -> tuple[PlannedShard, ...]:
    split_of = [split_of_bucket(config.splits, bucket) for bucket in files.studies.buckets]
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
        numbers[split] = numbers.get(split, -1) + 1
        shards.append(PlannedShard(shard_name(split, numbers[split]), split, tuple(open_studies), size))

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


def _digest(
    config: PackConfig, key_id: str, files: FileTable, reports: ReportTable, shards: tuple[PlannedShard, ...]
) -> str:
    hasher = hashlib.sha256()
    hasher.update(json.dumps([_PLAN_VERSION, config.content_digest(), key_id]).encode())
    for table in (files, reports):
        order = np.argsort(table.surrogate, kind="stable")
        hasher.update(len(table).to_bytes(8, "little"))
        for column in (table.surrogate, table.digest):
            hasher.update(np.ascontiguousarray(column[order]).tobytes())
    for shard in shards:
        members = [[files.studies.keys[study], files.studies.patients[study]] for study in shard.studies]
        hasher.update(json.dumps([shard.name, members]).encode())
    return hasher.hexdigest()
