"""Summary of a packing job: its result, or, after a dry run, the expected one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

from shardflow.format.keys import REPORT_COUNTS
from shardflow.packing.inventory import CARRIED, PACKED, UNDECIDED, count_outcomes, count_reasons

if TYPE_CHECKING:
    from shardflow.format.manifest import Manifest
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.versions.ingest import Ingested

Status: TypeAlias = Literal[
    "packed", "already_packed", "nothing_new", "planned", "quarantine_limit", "task_done", "tasks_missing"
]

_EXIT_CODES: Final[Mapping[Status, int]] = {"quarantine_limit": 3, "tasks_missing": 4}
"""Exit codes other than 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary:
    """Counts and costs of a job, without anything from an input."""

    status: Status
    """``packed``; ``already_packed`` and ``nothing_new``: there was nothing to do; ``planned``: a dry run,
    with expected numbers; ``quarantine_limit``: nothing was published; ``task_done``: the shards of one
    array task are packed; ``tasks_missing``: some tasks have to run before the merge."""
    inputs: dict[str, int]
    """Files and reports: ``total``, ``packed``, ``skipped``, ``quarantined``; after a stop, those known so
    far."""
    reasons: dict[str, int]
    """Inputs by reason code, for those that are not packed."""
    studies: dict[str, int] = field(default_factory=dict)
    """Studies: ``packed``, ``skipped``, ``quarantined``."""
    dataset_id: str | None = None
    """Digest of the manifest; None where none was published."""
    manifest_version: int | None = None
    """Version of the dataset that ``dataset_id`` is of."""
    num_known_inputs: int = 0
    """Inputs that the previous version already has."""
    identities: dict[str, int] = field(default_factory=dict)
    """Patient IDs that were ``joined`` to persons, ``uncertain`` and ``decided`` pairs of them, persons
    ``in_two_splits`` since an earlier version, ``copied_studies``; zeros are left out."""
    reports: dict[str, dict[str, int]] = field(default_factory=dict)
    """Reports that were read: ``languages`` counts them by language (``english+german`` is a mixed one),
    ``rules`` by the rules that read and aligned them, ``unread`` those that were not read whole, by reason;
    empty without any."""
    splits: dict[str, int] = field(default_factory=dict)
    """Samples by split."""
    missing_tasks: tuple[int, ...] = ()
    """Numbers of the array tasks that have to run before the merge."""
    num_shards: int = 0
    num_slices: int = 0
    num_bytes: int = 0
    """Size of all files of the dataset."""
    notes: tuple[str, ...] = ()
    """What remains to be done, a sentence each: most reports name no study, tables lack the values of new
    samples."""
    seconds: float = 0.0
    """Wall time of this run."""
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    """Peak resident memory of the ``job`` and of any packing ``process``."""

    @classmethod
    def of_manifest(
        cls,
        status: Status,
        manifest: Manifest,
        *,
        seconds: float,
        peak_memory_bytes: dict[str, int],
        num_known_inputs: int = 0,
        identities: Mapping[str, int] | None = None,
        notes: tuple[str, ...] = (),
    ) -> Self:
        """Summarize a published dataset."""
        counts = asdict(manifest.counts)
        extra: Mapping[str, Any] = manifest.extra
        return cls(
            status=status,
            inputs={"total": sum(counts.values()), **counts},
            reasons=dict(extra["reasons"]),
            studies=dict(extra["studies"]),
            dataset_id=manifest.dataset_id,
            manifest_version=manifest.manifest_version,
            num_known_inputs=num_known_inputs,
            identities=dict(identities or {}),
            reports=dict(extra.get(REPORT_COUNTS, {})),
            splits={name: numbers["num_samples"] for name, numbers in manifest.splits.items()},
            num_shards=len(manifest.shards),
            num_slices=extra["num_slices"],
            num_bytes=sum(entry.num_bytes for entry in manifest.files()) + len(manifest.encode()),
            notes=notes,
            seconds=seconds,
            peak_memory_bytes=peak_memory_bytes,
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the job: 0 done, 3 quarantine over its limit, 4 tasks are missing."""
        return _EXIT_CODES.get(self.status, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON; the command's last line."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def forecast(
    plan: PackPlan, ingested: Ingested, *, seconds: float, peak_memory_bytes: dict[str, int]
) -> PackSummary:
    """Summarize a plan; inputs that headers and reports leave undecided count as packed.

    Pixels are not read, so a file that cannot be decoded shows only when it is packed.

    Args:
        plan: The plan.
        ingested: The inputs.
        seconds: Wall time so far.
        peak_memory_bytes: As in the summary.
    """
    files, reports = ingested.files, ingested.reports
    columns = [table.reason.copy() for table in (files, reports)]
    study_reason = plan.study_reason.copy()
    for column in (*columns, study_reason):
        column[column == UNDECIDED] = PACKED
    slices = files.sum_by_study(files.num_slices)
    splits: dict[str, int] = {}
    for shard in plan.shards:
        splits[shard.split] = splits.get(shard.split, 0) + len(shard.studies)
    return PackSummary(
        status="planned",
        inputs={
            "total": sum(int((column != CARRIED).sum()) for column in columns),
            **count_outcomes(*columns),
        },
        reasons=count_reasons(*columns),
        studies=count_outcomes(study_reason),
        splits=dict(sorted(splits.items())),
        num_shards=len(plan.shards),
        num_slices=sum(int(slices[study]) for shard in plan.shards for study in shard.studies),
        num_bytes=sum(shard.estimated_bytes for shard in plan.shards),
        num_known_inputs=0 if ingested.scope is None else ingested.scope.num_known,
        identities=ingested.identity_counts,
        notes=ingested.notes,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
    )
