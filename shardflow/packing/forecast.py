"""What a job would do: the summary of a dry run, from headers and plan alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardflow.packing.inventory import CARRIED, PACKED, UNDECIDED, count_outcomes, count_reasons
from shardflow.packing.summary import PackSummary

if TYPE_CHECKING:
    from shardflow.packing.intake import Intake
    from shardflow.packing.plan import PackPlan

__all__ = ["forecast"]


def forecast(
    plan: PackPlan, intake: Intake, *, seconds: float, peak_memory_bytes: dict[str, int]
) -> PackSummary:
    """Sum up a plan; what headers and reports leave undecided is expected to be packed.

    Pixels are not read, so a file that cannot be decoded shows only when it is packed.

    Args:
        plan: What would be packed where.
        intake: The inputs.
        seconds: Wall time until now.
        peak_memory_bytes: As in the summary.
    """
    files, reports = intake.files, intake.reports
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
        num_known_inputs=0 if intake.scope is None else intake.scope.num_known,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
    )
