"""The plan of an epoch: what each step holds, and that it costs nothing per sample."""

from __future__ import annotations

import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shardflow.errors import PlanError
from shardflow.sampling import BatchSpec, EpochPlan, RankSchedule
from shardflow.sampling.spec import TAILS, Tail

pytestmark = pytest.mark.fast


def plan_of(num_samples: int, size: int, per_step: int, tail: Tail = "drop", **changes: Any) -> EpochPlan:
    spec = BatchSpec(micro_batch_size=size, micro_batches_per_step=per_step, tail=tail)
    return EpochPlan(
        **{"population": range(1000, 1000 + num_samples), "spec": spec, "seed": 1, "epoch": 0, **changes}
    )


def all_rows(plan: EpochPlan) -> list[int]:
    return [row for step in range(plan.num_steps) for row in plan.step(step)[0].ravel().tolist()]


def test_mask_gives_every_sample_once_and_padding_no_weight() -> None:
    plan = plan_of(29, 2, 4, "mask")
    rows = all_rows(plan)
    assert sorted(row for row in rows if row >= 0) == list(range(1000, 1029))
    assert rows[29:] == [-1, -1, -1]
    assert plan.step(3)[1].tolist() == [[1, 1], [1, 1], [1, 0], [0, 0]]
    assert (plan.num_steps, plan.num_samples, plan.num_padding_slots) == (4, 29, 3)


def test_drop_leaves_out_what_fills_no_step() -> None:
    plan = plan_of(29, 2, 4, "drop")
    rows = all_rows(plan)
    assert len(rows) == len(set(rows)) == 24
    assert set(rows) < set(range(1000, 1029))
    assert (plan.num_steps, plan.num_dropped) == (3, 5)


def test_another_epoch_drops_other_samples() -> None:
    kept = [frozenset(all_rows(plan_of(29, 2, 4, epoch=epoch))) for epoch in range(8)]
    assert len(set(kept)) > 4
    assert frozenset[int]().union(*kept) == set(range(1000, 1029))


def test_repeat_fills_the_last_step_from_the_start_at_full_weight() -> None:
    plan = plan_of(29, 2, 4, "repeat")
    rows = all_rows(plan)
    assert sorted(rows[:29]) == list(range(1000, 1029))
    assert rows[29:] == rows[:3]
    assert plan.step(3)[1].tolist() == [[1, 1]] * 4
    assert (plan.num_steps, plan.num_repeated) == (4, 3)


def test_tails_agree_on_the_steps_that_are_full() -> None:
    dropped, repeated, masked = (all_rows(plan_of(29, 2, 4, tail)) for tail in TAILS)
    assert dropped == repeated[:24] == masked[:24]
    assert repeated[:29] == masked[:29]


def test_seed_and_epoch_choose_the_order() -> None:
    orders = {
        tuple(all_rows(plan_of(24, 2, 4, seed=seed, epoch=epoch))) for seed in (1, 2) for epoch in (0, 1, 2)
    }
    assert len(orders) == 6
    assert all_rows(plan_of(24, 2, 4).for_epoch(2)) == all_rows(plan_of(24, 2, 4, epoch=2))


@pytest.mark.parametrize(
    ("num_samples", "size", "per_step"),
    [
        (100, 1, 1),
        (20_000, 3, 7),  # blocks of whole steps
        (20_000, 4096, 2),  # a block is a step
        (30_000, 1000, 10),  # a step is larger than a block, a micro-batch is not
        (30_000, 9000, 3),  # a micro-batch is larger than a block
    ],
)
@pytest.mark.parametrize("tail", ["drop", "repeat", "mask"])
def test_micro_batches_are_those_of_the_step_in_any_order(
    num_samples: int, size: int, per_step: int, tail: Tail
) -> None:
    plan = plan_of(num_samples, size, per_step, tail)
    places = [(step, micro) for step in range(plan.num_steps) for micro in range(per_step)]
    picked = [places[i] for i in np.random.default_rng(0).permutation(len(places))[:200]]
    for step, micro in [*picked, places[-1], places[0]]:
        batch = plan.micro_batch(step, micro)
        rows, weights = plan_of(num_samples, size, per_step, tail).step(step)
        assert rows.shape == weights.shape == (per_step, size)
        assert batch.rows.dtype == np.int64
        assert batch.weights.dtype == np.uint8
        assert np.array_equal(batch.rows, rows[micro])
        assert np.array_equal(batch.weights, weights[micro])
        assert np.array_equal(batch.weights == 1, batch.rows >= 0)
        assert batch.num_samples == int(weights[micro].sum())


def test_micro_batches_behind_the_step_are_fillers() -> None:
    plan = plan_of(24, 2, 4)
    for micro in (4, 7):
        filler = plan.micro_batch(0, micro)
        assert filler.rows.tolist() == [-1, -1]
        assert filler.weights.tolist() == [0, 0]
        assert filler.num_samples == 0


def test_arrays_cannot_be_changed() -> None:
    plan = plan_of(24, 2, 4)
    batch, filler = plan.micro_batch(0, 0), plan.micro_batch(0, 4)
    for array in (batch.rows, batch.weights, filler.rows, filler.weights, *plan.step(1)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


@pytest.mark.parametrize(("step", "micro"), [(-1, 0), (3, 0), (0, -1), (0, 8), (True, 0), (0.0, 0), ("0", 0)])
def test_steps_and_micro_batches_outside_are_refused(step: Any, micro: Any) -> None:
    with pytest.raises(PlanError):
        plan_of(24, 2, 4).micro_batch(step, micro)


@pytest.mark.parametrize("step", [-1, 3, None])
def test_steps_outside_are_refused(step: Any) -> None:
    with pytest.raises(PlanError):
        plan_of(24, 2, 4).step(step)


@pytest.mark.parametrize("tail", ["drop", "repeat", "mask"])
def test_no_samples_no_plan(tail: Tail) -> None:
    with pytest.raises(PlanError, match="num_samples must be at least 1, got 0"):
        plan_of(0, 2, 4, tail)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 1.0},
        {"seed": None},
        {"epoch": -1},
        {"epoch": True},
        {"population": [1, 2, 3]},
        {"population": 5},
        {"population": range(-3, 20)},
        {"population": range(20, -20, -1)},
    ],
)
def test_arguments_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        plan_of(24, 2, 4, **change)


def test_200_million_samples_are_planned_at_once_and_in_no_memory() -> None:
    tracemalloc.start()
    started = time.process_time()
    try:
        plan = plan_of(200_000_000, 4, 64, "mask", epoch=3)
        last = plan.micro_batch(plan.num_steps - 1, 63)
        plan.step(plan.num_steps // 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert plan.num_steps == 781_250
    assert last.num_samples == 4
    assert peak < 2_000_000
    assert time.process_time() - started < 1  # measured: 1 ms


def test_a_plan_keeps_two_blocks_only() -> None:
    plan = plan_of(600_000, 4, 64, "mask")
    tracemalloc.start()
    try:
        for step in range(0, plan.num_steps, 16):
            plan.micro_batch(step, 0)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_threads_share_a_plan() -> None:
    plan = plan_of(50_000, 4, 8)
    fresh = [plan_of(50_000, 4, 8).step(step)[0].tolist() for step in range(0, plan.num_steps, 97)]

    def read(offset: int) -> list[list[list[int]]]:
        steps = list(range(0, plan.num_steps, 97))
        shifted = steps[offset:] + steps[:offset]
        found = {step: [plan.micro_batch(step, m).rows.tolist() for m in range(8)] for step in shifted}
        return [found[step] for step in steps]

    with ThreadPoolExecutor(8) as pool:
        assert all(found == fresh for found in pool.map(read, range(8)))


def test_summary_belongs_to_the_same_batch_spec() -> None:
    plan = plan_of(24, 2, 4)
    assert plan.summary(RankSchedule(4, 2)).num_micro_batches_per_rank == 6
    with pytest.raises(PlanError, match="micro_batches_per_step of the schedule must be 4, got 8"):
        plan.summary(RankSchedule(8, 2))
