"""Who packs which shard, and in which order, so that nobody works long after all others have ended."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardflow.errors import ConfigError
from shardflow.packing.assembly import load_record

if TYPE_CHECKING:
    from shardflow.packing.plan import PackPlan
    from shardflow.packing.shares import Share
    from shardflow.packing.workplace import Workplace

__all__ = ["count_studies", "deal", "missing_tasks", "opening_order", "own_shards"]


def deal(plan: PackPlan, count: int) -> list[int]:
    """Deal the shards to tasks: largest first, each to the task that has least.

    Returns:
        For each shard of the plan the task that packs it.
    """
    loads = [(0, task) for task in range(count)]
    owners = [0] * len(plan.shards)
    sizes = [shard.estimated_bytes for shard in plan.shards]
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        load, owners[number] = loads[0]
        heapq.heapreplace(loads, (load + max(1, sizes[number]), owners[number]))
    return owners


def own_shards(plan: PackPlan, share: Share | None) -> list[int] | None:
    """Return the numbers of a task's shards; None, for all, where there are no tasks."""
    if share is None:
        return None
    return [number for number, owner in enumerate(deal(plan, share.count)) if owner == share.index]


def opening_order(largest: Mapping[int, int]) -> list[int]:
    """Order shards so that no large study is the last one.

    Args:
        largest: Size of the largest study of each shard, by the shard's number.
    """
    return sorted(largest, key=lambda number: (-largest[number], number))


def missing_tasks(plan: PackPlan, count: int | None, missing: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the tasks whose shards are missing.

    Raises:
        ConfigError: Shards are missing, and no task has ever run here.
    """
    if not missing:
        return ()
    if count is None:
        raise ConfigError(
            "output must hold the shards of tasks for --merge, got none; run every --task i/n before."
        )
    owners = deal(plan, count)
    return tuple(sorted({owners[number] for number in missing}))


def count_studies(place: Workplace, plan: PackPlan, shards: Sequence[int]) -> dict[str, int]:
    """Count the studies of shards that stand, by outcome."""
    counts = {"packed": 0, "skipped": 0, "quarantined": 0}
    for number in shards:
        record = load_record(place.records, plan.shards[number].name)
        for outcome in () if record is None else record["outcomes"].values():
            counts[outcome["outcome"]] += 1
    return counts
