"""Epoch plans: pure integers that say, before step 0, which samples make which step.

Owns: the order of an epoch, micro-batches, steps, who runs what, and where a run stands. Does not own: any
byte, file, clock or process. Invariant: the samples of step k depend on dataset, seed, epoch and batch spec
only, never on the world size, the workers or the machine.
"""

from __future__ import annotations

from shardflow.epochs.buckets import ImageBucket
from shardflow.epochs.budget import TokenBudget
from shardflow.epochs.choose import choose_lanes, with_lanes
from shardflow.epochs.cost import CostRule
from shardflow.epochs.elastic import RankSchedule
from shardflow.epochs.identity import plan_id
from shardflow.epochs.lane_plan import LaneSummary
from shardflow.epochs.layout import SampleLayout
from shardflow.epochs.measure import PlanMeasures, measure_plan
from shardflow.epochs.micros import MicroBatch
from shardflow.epochs.permutation import Permutation
from shardflow.epochs.plan import EpochPlan
from shardflow.epochs.position import Position
from shardflow.epochs.spec import BatchSpec
from shardflow.epochs.state import LoaderState
from shardflow.epochs.summary import PlanSummary
from shardflow.epochs.tiles import TileRule

__all__ = [
    "BatchSpec",
    "CostRule",
    "EpochPlan",
    "ImageBucket",
    "LaneSummary",
    "LoaderState",
    "MicroBatch",
    "Permutation",
    "PlanMeasures",
    "PlanSummary",
    "Position",
    "RankSchedule",
    "SampleLayout",
    "TileRule",
    "TokenBudget",
    "choose_lanes",
    "measure_plan",
    "plan_id",
    "with_lanes",
]
