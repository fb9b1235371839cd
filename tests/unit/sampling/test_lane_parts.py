"""Lanes, windows, rounds, the remainder, and what is measured of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardflow.errors import PlanError
from shardflow.sampling import (
    BatchSpec,
    CostRule,
    EpochPlan,
    RankSchedule,
    TokenBudget,
    choose_lanes,
    measure_plan,
    with_lanes,
)
from shardflow.sampling import (
    measures as measure,
)
from shardflow.sampling.budget_batches import BudgetMicroBatches
from shardflow.sampling.lanes import Interleave, LaneMap, LaneWindows, Recent
from tests.layouts import layout_of

pytestmark = pytest.mark.fast

LANES = BatchSpec(micro_batch_size=4, micro_batches_per_step=64, lanes=64, window_bytes=100_000)
BUDGET = TokenBudget(max_tokens=16_384, max_samples=64)


def plan_of(spec: BatchSpec, num_samples: int, num_shards: int, epoch: int = 0, seed: int = 7) -> EpochPlan:
    layout = layout_of(num_samples, num_shards)
    return EpochPlan(layout.population, spec, seed=seed, epoch=epoch, layout=layout)


# ---- lanes ---------------------------------------------------------------------------------------


def test_lanes_are_the_same_in_every_epoch_and_others_for_another_seed() -> None:
    layout = layout_of(5000, 200)
    one, other = (LaneMap.of(layout, 8, seed=seed) for seed in (7, 8))
    first, second = plan_of(LANES, 5000, 200), plan_of(LANES, 5000, 200, epoch=1)
    assert first.lane_plan is not None
    assert second.lane_plan is not None
    lanes, again = first.lane_plan.lanes, second.lane_plan.lanes
    assert isinstance(lanes, LaneMap)
    assert isinstance(again, LaneMap)
    assert np.array_equal(lanes.first_row, again.first_row)
    assert first.for_epoch(1).lane_plan.lanes is first.lane_plan.lanes  # type: ignore[union-attr]
    assert not np.array_equal(one.first_row, other.first_row)
    assert first.step(0)[0].tolist() != second.step(0)[0].tolist()


def test_forty_shards_make_sixty_four_near_equal_lanes() -> None:
    """Whole shards would leave 24 lanes empty and pool everything."""
    plan = plan_of(LANES, 40_000, 40)
    assert plan.lane_plan is not None
    lanes = plan.lane_plan.lanes
    assert isinstance(lanes, LaneMap)
    samples = lanes.lane_samples()
    assert samples.min() > 0.96 * samples.mean()
    assert plan.lane_plan.summary().remainder_share < 0.05


def test_many_shards_stay_whole() -> None:
    """A shard that is read by one lane is read by one node."""
    layout = layout_of(20_000, 500)
    lanes = LaneMap.of(layout, 8, seed=7)
    lane_of_chunk = np.repeat(np.arange(8), np.diff(lanes.lane_chunks))
    shared = [shard for shard in range(500) if len(set(lane_of_chunk[lanes.shard == shard])) > 1]
    assert len(shared) <= 7
    assert lanes.lane_samples().tolist() == [2500] * 8


def test_more_lanes_than_samples_pool_everything() -> None:
    plan = plan_of(replace(LANES, tail="mask"), 10, 3)
    assert plan.lane_plan is not None
    assert plan.lane_plan.summary().remainder_share == 1
    assert sorted(row for row in plan.step(0)[0].ravel().tolist() if row >= 0) == list(range(10))


def test_bytes_that_do_not_ascend_are_refused() -> None:
    layout = layout_of(100, 1)
    broken = replace(layout, offset_bytes=layout.offset_bytes[::-1].copy())
    with pytest.raises(PlanError, match="offset_bytes must ascend"):
        EpochPlan(layout.population, LANES, seed=7, epoch=0, layout=broken)


def test_a_layout_must_be_there_and_fit() -> None:
    with pytest.raises(PlanError, match="layout must be given"):
        EpochPlan(range(10), LANES, seed=7, epoch=0)
    with pytest.raises(PlanError, match="population must be the layout's"):
        EpochPlan(range(10), LANES, seed=7, epoch=0, layout=layout_of(11, 2))


# ---- how many ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "num_shards", "size", "per_step", "lanes"),
    [
        (100_000, 400, 4, 64, 64),
        (100_000, 3, 4, 64, 64),
        (2000, 40, 4, 8, 32),
        (100, 10, 8, 8, 1),
        (1, 1, 1, 1, 1),
    ],
)
def test_as_many_lanes_as_leave_little_for_the_pool(
    num_samples: int, num_shards: int, size: int, per_step: int, lanes: int
) -> None:
    spec = BatchSpec(micro_batch_size=size, micro_batches_per_step=per_step, tail="mask")
    layout = layout_of(num_samples, num_shards)
    assert choose_lanes(layout, spec) == lanes
    chosen = with_lanes(spec, layout)
    plan = EpochPlan(layout.population, chosen, seed=7, epoch=3, layout=layout)
    assert plan.lane_plan is not None
    assert lanes == 1 or plan.lane_plan.summary().remainder_share <= 0.05


def test_lanes_are_chosen_for_budgets_too() -> None:
    spec = BatchSpec(budget=BUDGET, micro_batches_per_step=64, lanes=1, window_bytes=10**8)
    layout = layout_of(200_000, 100)
    chosen = with_lanes(spec, layout)
    plan = EpochPlan(layout.population, chosen, seed=7, epoch=0, layout=layout)
    assert plan.lane_plan is not None
    assert chosen.lanes == 32
    assert plan.lane_plan.summary().remainder_share <= 0.06  # an estimate before any window is filled


# ---- windows -------------------------------------------------------------------------------------


def test_windows_have_about_the_bytes_they_should_and_walk_the_lane_once() -> None:
    layout = layout_of(20_000, 30)
    lanes = LaneMap.of(layout, 4, seed=7)
    windows = LaneWindows(layout, lanes, window_bytes=10**6, seed=7, epoch=0)
    seen = []
    for lane in range(4):
        for window in range(int(np.diff(windows.lane_windows)[lane])):
            rows = windows.rows(lane, window)
            seen += rows.tolist()
            assert len(rows) == windows.size(lane, window)
            assert 0.9e6 < layout.sample_bytes(rows).sum() < 1.1e6
            assert sorted(windows.mixed_rows(lane, window).tolist()) == sorted(rows.tolist())
            assert set(windows.shards(lane, window)) == set(layout.shards_of(rows))
    assert sorted(seen) == list(range(20_000))


def test_a_window_may_be_smaller_than_a_sample() -> None:
    layout = layout_of(50, 3)
    windows = LaneWindows(layout, LaneMap.of(layout, 2, seed=7), window_bytes=1, seed=7, epoch=0)
    assert 25 < windows.num_windows <= 50
    assert all(windows.size(0, window) >= 1 for window in range(int(windows.lane_windows[1])))


def test_few_shards_are_open() -> None:
    plan = plan_of(replace(LANES, lanes=4, window_bytes=300_000), 40_000, 400)
    assert plan.lane_plan is not None
    assert plan.lane_plan.summary().num_shards_open < 40


# ---- rounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_micros", "per_step", "group_micros"),
    [([10, 12, 11], 3, 4), ([10, 12, 11], 4, 4), ([100, 107], 8, 10), ([0, 5], 2, 3), ([7], 3, 1)],
)
def test_rounds_are_whole_steps_and_equal_for_all_lanes(
    num_micros: list[int], per_step: int, group_micros: int
) -> None:
    rounds = Interleave.of(np.array(num_micros), per_step, group_micros=group_micros)
    assert rounds.bounds[0] == 0
    assert rounds.bounds[-1] == rounds.num_common <= min(num_micros)
    assert not (rounds.bounds * len(num_micros) % per_step).any()
    assert rounds.num_remainder == sum(num_micros) - rounds.num_common * len(num_micros)
    places = [rounds.group_of(step) for step in range(rounds.num_lane_steps)]
    assert [
        place
        for number in dict.fromkeys(p[0] for p in places)
        for place in range(next(p[2] for p in places if p[0] == number))
    ] == [place for _, place, _ in places]


def test_no_more_than_asked_is_kept() -> None:
    kept: Recent[str] = Recent(2)
    calls: list[int] = []

    def value(key: int) -> str:
        def compute() -> str:
            calls.append(key)
            return str(key)

        return kept.get(key, compute)

    assert [value(key) for key in (1, 2, 1, 3, 2, 1)] == ["1", "2", "1", "3", "2", "1"]
    assert calls == [1, 2, 3, 1]


# ---- budgets: padding and balance ------------------------------------------------------------------


@pytest.mark.parametrize(("num_samples", "num_lanes"), [(3000, 1), (20_000, 2), (100_000, 16), (400_000, 64)])
def test_lanes_that_are_chosen_pad_by_less_than_one_percent(num_samples: int, num_lanes: int) -> None:
    """Lanes are so long that windows of report-like lengths are filled well."""
    spec = BatchSpec(budget=BUDGET, micro_batches_per_step=16, lanes=1)
    layout = layout_of(num_samples, 40)
    spec = with_lanes(spec, layout)
    assert spec.lanes == num_lanes
    plan = EpochPlan(layout.population, spec, seed=3, epoch=0, layout=layout)
    found = measure_plan(plan, layout, RankSchedule(16, 16), ranks_per_node=8)
    assert found.padding_share is not None
    assert found.padding_share <= (0.01 if num_samples > 3000 else 0.03)


def test_most_steps_are_balanced_and_the_worst_one_is_told() -> None:
    budget = replace(BUDGET, cost=CostRule(quadratic_tokens=2048))
    layout = layout_of(400_000, 40)
    spec = with_lanes(BatchSpec(budget=budget, micro_batches_per_step=64, lanes=1), layout)
    plan = EpochPlan(layout.population, spec, seed=3, epoch=0, layout=layout)
    assert plan.lane_plan is not None
    micros = plan.lane_plan.micros
    assert isinstance(micros, BudgetMicroBatches)
    found = measure_plan(plan, layout, RankSchedule(64, 64), ranks_per_node=8)
    costs = [[micros.cost(step * 64 + micro)[0] for micro in range(64)] for step in range(plan.num_steps)]
    by_hand = [max(step) * 64 / sum(step) for step in costs]
    assert found.imbalance == pytest.approx(sum(by_hand) / len(by_hand))
    assert found.imbalance_max == pytest.approx(max(by_hand))
    assert found.balanced_share == pytest.approx(sum(value <= 1.05 for value in by_hand) / len(by_hand))
    assert found.imbalance is not None
    assert found.balanced_share is not None
    assert found.budget_used is not None
    assert found.imbalance <= 1.05
    assert found.balanced_share > 0.9
    assert found.budget_used > 0.9


def test_ranking_beats_random_dealing() -> None:
    """Micro-batches of one cost rank meet; dealt at random, a step waits for its longest reports."""
    budget = replace(BUDGET, cost=CostRule(quadratic_tokens=500))
    spec = BatchSpec(budget=budget, micro_batches_per_step=16, lanes=16, window_bytes=10_000 * 3000)
    layout = layout_of(160_000, 40)
    plan = EpochPlan(layout.population, spec, seed=3, epoch=0, layout=layout)
    assert plan.lane_plan is not None
    micros = plan.lane_plan.micros
    assert isinstance(micros, BudgetMicroBatches)
    costs = np.array([micros.cost(number)[0] for number in range(plan.num_steps * 16)], np.float64)
    mixed = np.random.default_rng(0).permutation(costs).reshape(-1, 16)
    ranked = costs.reshape(-1, 16)
    random = (mixed.max(axis=1) / mixed.mean(axis=1)).mean()
    zipped = (ranked.max(axis=1) / ranked.mean(axis=1)).mean()
    assert zipped < 1.05 < 1.2 < random


@pytest.mark.parametrize("over_budget", ["alone", "skip", "truncate"])
def test_samples_over_the_budget_are_counted_and_treated_as_said(over_budget: str) -> None:
    budget = TokenBudget(max_tokens=600, max_samples=8, over_budget=over_budget)  # type: ignore[arg-type]
    spec = BatchSpec(budget=budget, micro_batches_per_step=8, tail="mask", lanes=4)
    layout = layout_of(3000, 10)
    plan = EpochPlan(layout.population, spec, seed=3, epoch=0, layout=layout)
    lengths = budget.cost.lengths(layout.facts)
    over = int((lengths > 600).sum())
    summary = plan.summary(RankSchedule(8, 2))
    assert summary.lanes is not None
    assert summary.lanes.num_over_budget == over > 100
    assert summary.num_skipped == plan.num_dropped == (over if over_budget == "skip" else 0)
    fate = "skipped by rule" if over_budget == "skip" else "alone in a micro-batch, or cut"
    assert any(f"{over:,} samples, {fate}" in line for line in summary.lines())
    assert summary.to_json()["max_tokens"] == 600


@pytest.mark.parametrize(("num_samples", "per_step"), [(3000, 9), (40, 64), (1, 5)])
def test_repeat_begins_again_at_the_first_micro_batch(num_samples: int, per_step: int) -> None:
    """Where a budget leaves fewer micro-batches than one step has, it goes round and round."""
    spec = BatchSpec(budget=BUDGET, micro_batches_per_step=per_step, tail="repeat", lanes=4)
    plan = plan_of(spec, num_samples, 20)
    assert plan.lane_plan is not None
    micros = plan.lane_plan.micros
    assert isinstance(micros, BudgetMicroBatches)
    assert micros.num_micros % per_step
    found = [
        plan.micro_batch(step, micro).rows.tolist()
        for step in range(plan.num_steps)
        for micro in range(per_step)
    ]
    again = range(micros.num_micros, len(found))
    assert [found[number] for number in again] == [found[number % micros.num_micros] for number in again]
    assert [micros.cost(number) for number in again] == [
        micros.cost(number % micros.num_micros) for number in again
    ]
    assert plan.num_repeated == sum(len(found[number]) for number in again)
    assert {row for rows in found for row in rows} == set(plan.population)


def test_everything_over_the_budget_leaves_no_step() -> None:
    budget = TokenBudget(max_tokens=1, max_samples=8, over_budget="skip")
    spec = BatchSpec(budget=budget, micro_batches_per_step=8, tail="mask", lanes=4)
    with pytest.raises(PlanError, match="num_steps must be at least 1, got 0"):
        plan_of(spec, 100, 3)


def test_a_missing_fact_is_named() -> None:
    layout = replace(layout_of(100, 3), facts={})
    spec = BatchSpec(budget=BUDGET, micro_batches_per_step=2, lanes=4)
    with pytest.raises(PlanError, match="the fact 'text_bytes'"):
        EpochPlan(layout.population, spec, seed=3, epoch=0, layout=layout)


# ---- what is measured ------------------------------------------------------------------------------


def test_a_node_reads_its_own_shards_and_the_shuffle_is_nearly_full() -> None:
    layout = layout_of(60_000, 600)
    schedule = RankSchedule(64, 64, lanes=64, ranks_per_node=8)
    assert (schedule.num_nodes, schedule.node_of_lane(8), schedule.node_of_lane(7)) == (8, 1, 0)
    found = {}
    for name, spec in {
        "plain": BatchSpec(micro_batch_size=4, micro_batches_per_step=64),
        "lanes": replace(LANES, lanes=8, window_bytes=20_000_000),
    }.items():
        plan = EpochPlan(layout.population, spec, seed=3, epoch=0, layout=layout)
        dealt = RankSchedule(64, 64, lanes=spec.lanes, ranks_per_node=8)
        found[name] = measure_plan(plan, layout, dealt, ranks_per_node=8)
    plain, lanes = found["plain"], found["lanes"]
    assert plain.shards_per_node is not None
    assert lanes.shards_per_node is not None
    assert plain.shards_per_node > 550  # all but the smallest
    assert lanes.shards_per_node < 2 * 600 / 8
    assert lanes.most_bytes_per_node is not None
    assert lanes.most_bytes_per_node < 1.1 * layout.sample_bytes(np.arange(60_000)).sum() / 8
    assert plain.neighbor_spread == pytest.approx(1, abs=0.02)
    assert lanes.neighbor_spread is not None
    assert 0.3 < lanes.neighbor_spread < 1.02
    assert lanes.to_json()["num_nodes"] == 8


def test_a_part_of_a_large_epoch_tells_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(60_000, 600)
    spec = replace(LANES, lanes=8, window_bytes=2_000_000)
    plan = EpochPlan(layout.population, spec, seed=3, epoch=0, layout=layout)
    schedule = RankSchedule(64, 64, lanes=8, ranks_per_node=8)
    whole = measure_plan(plan, layout, schedule, ranks_per_node=8)
    monkeypatch.setattr(measure, "_MOST_SAMPLES", 10_000)
    part = measure_plan(plan, layout, schedule, ranks_per_node=8)
    assert part.walked_share == pytest.approx(1 / 6, abs=0.01)
    assert part.bytes_per_node == pytest.approx(whole.bytes_per_node, rel=0.03)
    assert whole.shards_per_node is not None
    assert part.shards_per_node == pytest.approx(whole.shards_per_node, rel=0.05)
    assert part.neighbor_spread is None
    plain = EpochPlan(layout.population, replace(spec, lanes=0), seed=3, epoch=0)
    assert measure_plan(plain, layout, RankSchedule(64, 64), ranks_per_node=8).shards_per_node is None
