"""Shares of a job: every shard has one task, no task has much more than another, nothing waits at the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedule.simulate import Workload, dealt, makespan, workload
from shardflow.errors import ConfigError
from shardflow.packing.inventory import UNDECIDED
from shardflow.packing.plan import PackPlan, PlannedShard
from shardflow.packing.scheduling import assign_shards, missing_tasks, opening_order
from shardflow.packing.workspace import ArrayTask

pytestmark = pytest.mark.fast


def _plan(sizes: list[int]) -> PackPlan:
    shards = tuple(
        PlannedShard(f"train-{number:06d}", "train", (number,), size) for number, size in enumerate(sizes)
    )
    return PackPlan(
        shards=shards,
        study_reason=np.full(len(sizes), UNDECIDED, np.uint8),
        empty_splits=(),
        digest="",
    )


@pytest.mark.parametrize("text", ["", "1", "a/b", "-1/2", "2/2", "0/0", "1/100001", "0/2 ", "0/1/2"])
def test_what_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a task must be i/n"):
        ArrayTask.parse(text)


def test_a_task_is_read() -> None:
    assert ArrayTask.parse("3/8") == ArrayTask(3, 8)
    assert str(ArrayTask(3, 8)) == "3/8"
    assert ArrayTask(3, 8).name == "task-00003-of-00008"


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 20))
def test_every_shard_has_one_task_and_the_loads_are_even(sizes: list[int], count: int) -> None:
    owners = assign_shards(_plan(sizes), count)
    assert len(owners) == len(sizes)
    loads = [0] * count
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += max(1, size)
    # Largest first never leaves two tasks further apart than one shard.
    assert max(loads) - min(loads) <= max([1, *sizes])
    assert missing_tasks(_plan(sizes), count, range(len(sizes))) == tuple(sorted(set(owners)))
    assert missing_tasks(_plan(sizes), count, []) == ()


@given(st.integers(1, 12), st.integers(0, 40))
def test_every_task_comes_by_every_batch_its_own_first(count: int, num_batches: int) -> None:
    batches = list(range(0, num_batches * 128, 128))
    own: list[int] = []
    for index in range(count):
        order = ArrayTask(index, count).order(batches)
        assert sorted(order) == batches
        size = len(batches) * (index + 1) // count - len(batches) * index // count
        own += order[:size]
    assert own == batches


def test_two_tasks_that_read_for_a_third_do_not_meet() -> None:
    batches = list(range(0, 3 * 128 * 200, 128))
    orders = [
        [batch for batch in ArrayTask(index, 3).order(batches) if batch in set(batches[400:])]
        for index in (0, 1)
    ]
    assert sum(one == other for one, other in zip(*orders, strict=True)) < 10


def test_the_largest_study_is_opened_first() -> None:
    assert opening_order({0: 5, 1: 9, 2: 9, 3: 1}) == [1, 2, 0, 3]


def test_many_workers_are_busy_to_the_end() -> None:
    """A sixteenth of 1,920 processes; ``python -m benchmarks.schedule.simulate`` prints all of them."""
    load = workload(60_000, seed=1)
    best = max(load.seconds.sum() / 120, load.seconds.max())
    ours = makespan(load, 120, is_planned_order=False)
    assert ours.end_s <= 1.05 * best
    assert ours.end_s <= makespan(load, 120, is_planned_order=True).end_s
    assert dealt(load, num_tasks=15, num_slots=15, num_processes=8).end_s <= 1.1 * best


def test_the_simulation_counts_right() -> None:
    seconds = np.array([3.0, 1.0, 1.0, 1.0, 2.0])
    load = Workload(seconds=seconds, starts=np.array([0, 3, 5]))
    assert makespan(load, 2, is_planned_order=False).end_s == 4.0
    assert makespan(load, 8, is_planned_order=False).end_s == 3.0
    assert makespan(load, 1, is_planned_order=True).end_s == 8.0
