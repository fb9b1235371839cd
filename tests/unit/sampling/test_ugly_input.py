"""Populations and settings that hardly anybody has: a clear error, or a plan that is right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shardflow.errors import PlanError
from shardflow.sampling import (
    BatchSpec,
    CostRule,
    EpochPlan,
    RankSchedule,
    SampleLayout,
    TokenBudget,
    measure_plan,
    with_lanes,
)
from shardflow.sampling.budget import OVER_BUDGET, OverBudget
from shardflow.sampling.spec import TAILS, Tail
from tests.layouts import layout_of

pytestmark = pytest.mark.fast

BUDGET = TokenBudget(max_tokens=2048, max_samples=16)
FIXED = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask", lanes=4)
FILLED = BatchSpec(budget=BUDGET, micro_batches_per_step=4, tail="mask", lanes=4)
SPECS = {"fixed": FIXED, "budget": FILLED, "packed": replace(FILLED, budget=replace(BUDGET, padded=False))}


def rows_of(layout: SampleLayout, spec: BatchSpec) -> Counter[int]:
    """Return how often each row comes in an epoch, and walk through what is measured of it."""
    plan = EpochPlan(layout.population, spec, seed=5, epoch=1, layout=layout)
    schedule = RankSchedule(spec.micro_batches_per_step, 1, lanes=spec.lanes, ranks_per_node=1)
    measure_plan(plan, layout, schedule, ranks_per_node=1)
    assert plan.summary(schedule).lines()
    steps = [plan.step(step)[0].ravel().tolist() for step in range(plan.num_steps)]
    return Counter(row for step in steps for row in step if row >= 0)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_no_samples(spec: BatchSpec) -> None:
    with pytest.raises(PlanError, match="num_samples must be at least 1, got 0"):
        EpochPlan(range(0), spec, seed=5, epoch=0)
    none = np.zeros(0, np.uint64)
    with pytest.raises(PlanError, match="at least one, got range\\(0, 0\\)"):
        SampleLayout.of_columns(range(0), dataset_id="ab" * 32, shard=none, offset_bytes=none, num_bytes=none)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_samples_without_text_cost_something(spec: BatchSpec) -> None:
    """Else a micro-batch of any number of them would be within any budget."""
    layout = layout_of(50, 4)
    layout = replace(layout, facts={name: np.zeros_like(column) for name, column in layout.facts.items()})
    assert rows_of(layout, spec) == Counter(range(50))
    free = replace(layout, facts={"text_bytes": layout.facts["text_bytes"], "num_slices": np.ones(50, int)})
    rule = CostRule(text_tokens_per_1000_bytes=0)
    if spec.budget is not None:
        assert rows_of(free, replace(spec, budget=replace(spec.budget, cost=rule))) == Counter(range(50))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
    ("num_samples", "num_shards", "num_lanes"),
    [
        (1, 1, 1),
        (1, 1, 64),
        (100, 1, 1),
        (100, 1, 8),
        (400, 40, 64),
        (20, 20, 64),
        (64, 64, 64),
        (7, 3, 1000),
    ],
)
def test_few_shards_and_many_lanes(
    spec: BatchSpec, num_samples: int, num_shards: int, num_lanes: int
) -> None:
    layout = layout_of(num_samples, num_shards) if num_samples > 1 else one_sample()
    assert rows_of(layout, replace(spec, lanes=num_lanes)) == Counter(range(num_samples))


def test_forty_shards_in_sixty_four_lanes_pool_little() -> None:
    """Whole-shard lanes would leave 24 of them empty, and pool everything."""
    layout = layout_of(40_000, 40)
    spec = BatchSpec(micro_batch_size=4, micro_batches_per_step=64, lanes=64)
    plan = EpochPlan(layout.population, spec, seed=5, epoch=0, layout=layout)
    assert plan.lane_plan is not None
    assert plan.lane_plan.summary().remainder_share < 0.02


def one_sample() -> SampleLayout:
    return SampleLayout.of_columns(
        range(1),
        dataset_id="ab" * 32,
        shard=np.zeros(1, np.uint32),
        offset_bytes=np.zeros(1, np.uint64),
        num_bytes=np.full(1, 512, np.uint64),
        facts={"text_bytes": np.full(1, 9, np.uint32), "num_slices": np.full(1, 9, np.uint32)},
    )


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("over_budget", OVER_BUDGET)
def test_a_budget_smaller_than_every_sample(over_budget: OverBudget, padded: bool, tail: Tail) -> None:
    layout = layout_of(90, 5)
    budget = TokenBudget(max_tokens=1, max_samples=16, padded=padded, over_budget=over_budget)
    spec = BatchSpec(budget=budget, micro_batches_per_step=4, tail=tail, lanes=2)
    if over_budget == "skip":
        with pytest.raises(PlanError, match=r"got 0 \(tail .*: 0 micro-batches under the token budget"):
            rows_of(layout, spec)
        return
    plan = EpochPlan(layout.population, spec, seed=5, epoch=1, layout=layout)
    assert plan.lane_plan is not None
    assert plan.lane_plan.summary().num_over_budget == 90
    # Alone or cut to one token: either way one sample fills a micro-batch.
    found = rows_of(layout, spec)
    assert plan.num_steps == (22 if tail == "drop" else 23)
    assert sum(found.values()) == {"drop": 88, "repeat": 92, "mask": 90}[tail]
    assert tail == "drop" or set(found) == set(range(90))


def test_lanes_are_chosen_for_any_population() -> None:
    for num_samples, num_shards in ((2, 1), (3, 3), (65, 64), (1000, 1)):
        layout = layout_of(num_samples, num_shards)
        for spec in SPECS.values():
            chosen = with_lanes(spec, layout)
            assert 1 <= chosen.lanes <= num_samples
            assert rows_of(layout, chosen) == Counter(range(num_samples))


@pytest.mark.parametrize("name", ["fixed", "budget"])
def test_more_ranks_than_micro_batches_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="world_size must be at most"):
        RankSchedule(SPECS[name].micro_batches_per_step, 5)


def test_shards_whose_bytes_do_not_ascend_are_refused() -> None:
    layout = layout_of(30, 3)
    offsets = layout.offset_bytes[::-1].copy()
    with pytest.raises(PlanError, match="offset_bytes must ascend inside a shard"):
        rows_of(replace(layout, offset_bytes=offsets), FIXED)
