"""Sampling: epoch plans in pure integers, which fix the samples of every step before step 0.

Covers the order of an epoch, micro-batches, steps, rank schedules and positions; touches no byte, file,
clock or process. The samples of step k depend on dataset, seed, epoch and batch spec only, never on the
world size, the workers or the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.sampling.budget import CostRule, TokenBudget
    from shardflow.sampling.image_sizes import ImageBucket, TileRule
    from shardflow.sampling.lanes import choose_lanes, with_lanes
    from shardflow.sampling.layout import SampleLayout
    from shardflow.sampling.measures import PlanMeasures, measure_plan
    from shardflow.sampling.permutation import Permutation
    from shardflow.sampling.plan import EpochPlan, PlanSummary, RankSchedule, plan_id
    from shardflow.sampling.spec import BatchSpec, Sampling
    from shardflow.sampling.state import LoaderState, Position

__all__ = [
    "BatchSpec",
    "CostRule",
    "EpochPlan",
    "ImageBucket",
    "LoaderState",
    "Permutation",
    "PlanMeasures",
    "PlanSummary",
    "Position",
    "RankSchedule",
    "SampleLayout",
    "Sampling",
    "TileRule",
    "TokenBudget",
    "choose_lanes",
    "measure_plan",
    "plan_id",
    "with_lanes",
]
_SOURCES: Final = {
    "BatchSpec": ".spec:BatchSpec",
    "CostRule": ".budget:CostRule",
    "EpochPlan": ".plan:EpochPlan",
    "ImageBucket": ".image_sizes:ImageBucket",
    "LoaderState": ".state:LoaderState",
    "Permutation": ".permutation:Permutation",
    "PlanMeasures": ".measures:PlanMeasures",
    "PlanSummary": ".plan:PlanSummary",
    "Position": ".state:Position",
    "RankSchedule": ".plan:RankSchedule",
    "SampleLayout": ".layout:SampleLayout",
    "Sampling": ".spec:Sampling",
    "TileRule": ".image_sizes:TileRule",
    "TokenBudget": ".budget:TokenBudget",
    "choose_lanes": ".lanes:choose_lanes",
    "measure_plan": ".measures:measure_plan",
    "plan_id": ".plan:plan_id",
    "with_lanes": ".lanes:with_lanes",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
