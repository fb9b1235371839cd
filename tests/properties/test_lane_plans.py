"""Contracts S1 to S5 on random epochs in lanes, with micro-batches of a fixed size and under token budgets.

Sizes of 1 to 10,000, shards of 1 to 500, lanes up to more than there are samples, outliers over the budget,
every tail. What a budget makes of a window is compared with one that is filled by hand.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import gcd

import numpy as np
import pytest
from hypothesis import event, given, seed, settings
from hypothesis import strategies as st

from shardflow.errors import PlanError
from shardflow.sampling import (
    BatchSpec,
    CostRule,
    EpochPlan,
    LoaderState,
    Position,
    RankSchedule,
    SampleLayout,
    TokenBudget,
)
from shardflow.sampling.budget import OVER_BUDGET, Fit, count_micro_batches, cut_micro_batches
from shardflow.sampling.lanes import LaneMap
from shardflow.sampling.spec import TAILS
from tests.layouts import DATASET_ID, layout_of

Steps = list[list[tuple[list[int], list[int]]]]
Ranks = tuple[int, int, int]
"""World size, ranks of a node, workers of a rank."""


@dataclass(frozen=True)
class LaneEpoch:
    """The numbers of one random epoch."""

    num_samples: int
    num_shards: int
    start: int
    spec: BatchSpec
    seed: int
    epoch: int

    def layout(self) -> SampleLayout:
        return layout_of(self.num_samples, self.num_shards, start=self.start, seed=self.seed % 1000)

    def plan(self, layout: SampleLayout) -> EpochPlan:
        return EpochPlan(layout.population, self.spec, seed=self.seed, epoch=self.epoch, layout=layout)


@st.composite
def budgets(draw: st.DrawFn) -> TokenBudget:
    """Draw a budget; reports have some 300 tokens, so small ones leave many samples over the budget."""
    fits: list[tuple[bool, Fit]] = [(True, "neighbors"), (False, "neighbors"), (False, "best")]
    padded, fit = draw(st.sampled_from(fits))
    return TokenBudget(
        max_tokens=draw(st.sampled_from([100, 700, 2048, 16_384, 100_000])),
        max_samples=draw(st.integers(1, 64)),
        padded=padded,
        fit=fit,
        over_budget=draw(st.sampled_from(OVER_BUDGET)),
        cost=CostRule(
            image_tokens_per_slice=draw(st.sampled_from([0, 16])),
            max_slices=8,
            quadratic_tokens=draw(st.sampled_from([0, 1024])),
        ),
    )


@st.composite
def epochs(draw: st.DrawFn, max_samples: int) -> LaneEpoch:
    """Draw an epoch; every third one has a token budget."""
    budget = draw(st.one_of(st.none(), st.none(), budgets()))
    # Half of the epochs have rounds of lanes, the others are mostly pool.
    if draw(st.booleans()):
        size, per_step, lanes = draw(
            st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 8))
        )
    else:
        size, per_step, lanes = draw(st.tuples(st.integers(1, 20), st.integers(1, 64), st.integers(1, 80)))
    size = size if budget is None else 0
    num_samples = draw(st.one_of(st.integers(1, 400), st.integers(1, max_samples)))
    if size and draw(st.booleans()):
        num_samples = max(1, num_samples // (size * per_step) * size * per_step + draw(st.integers(-1, 1)))
    return LaneEpoch(
        num_samples=min(num_samples, max_samples),
        num_shards=draw(st.integers(1, 500)),
        start=draw(st.sampled_from([0, 1, 345])),
        spec=BatchSpec(
            micro_batch_size=size,
            budget=budget,
            micro_batches_per_step=per_step,
            tail=draw(st.sampled_from(TAILS)),
            lanes=lanes,
            # Windows of one sample, or a few, are right and slow.
            window_bytes=draw(
                st.sampled_from([1 if num_samples <= 300 else max(20_000, num_samples * 20), 200_000, 2**40])
            ),
        ),
        seed=draw(st.integers(0, 2**63 - 1)),
        epoch=draw(st.integers(0, 50)),
    )


def all_steps(plan: EpochPlan) -> Steps:
    return [
        [
            (batch.rows.tolist(), batch.weights.tolist())
            for micro in range(plan.spec.micro_batches_per_step)
            for batch in [plan.micro_batch(step, micro)]
        ]
        for step in range(plan.num_steps)
    ]


def check_numbers(plan: EpochPlan, steps: Steps, over: set[int]) -> None:
    """What is reported before step 0 is what the steps hold (S1, S3)."""
    rows = [row for step in steps for rows, _ in step for row in rows]
    assert all(weights == [int(row >= 0) for row in rows] for step in steps for rows, weights in step)
    counts = Counter(row for row in rows if row >= 0)
    population = set(plan.population)
    skips = plan.spec.budget is not None and plan.spec.budget.over_budget == "skip"
    wanted = population - over if skips else population
    assert set(counts) <= wanted
    assert sum(counts.values()) - len(counts) <= plan.num_repeated
    assert plan.num_samples - plan.num_dropped + plan.num_repeated == sum(counts.values())
    assert len(population - set(counts)) == plan.num_dropped
    if plan.spec.tail != "drop":
        assert set(counts) == wanted
    if plan.spec.tail == "mask":
        assert not plan.num_repeated
        assert max(counts.values()) == 1
    if plan.spec.budget is None:
        assert rows.count(-1) == plan.num_padding_slots
        assert len(rows) == plan.num_steps * plan.spec.samples_per_step
    else:
        assert sum(rows == [-1] for step in steps for rows, _ in step) == plan.num_padding_slots


def check_budget(plan: EpochPlan, budget: TokenBudget, steps: Steps, lengths: dict[int, int]) -> None:
    """No micro-batch is over the budget but for a sample alone (or cut by the consumer)."""
    for step in steps:
        for rows, _ in step:
            held = [min(lengths[row], budget.max_tokens) for row in rows if row >= 0]
            if len(held) == 1:
                assert budget.over_budget != "skip" or lengths[rows[0]] <= budget.max_tokens
                continue
            assert len(held) <= budget.max_samples
            tokens = len(held) * max(held, default=0) if budget.padded else sum(held)
            assert tokens <= budget.max_tokens
    assert plan.lane_plan is not None
    assert plan.lane_plan.summary().num_over_budget == sum(
        value > budget.max_tokens for value in lengths.values()
    )


def check_lanes(plan: EpochPlan, steps: Steps) -> None:
    """Steps take equally from all lanes until the remainder begins, micro-batch m from m mod gcd(M, L)."""
    assert plan.lane_plan is not None
    lanes, per_step = plan.lane_plan.lanes, plan.spec.micro_batches_per_step
    assert isinstance(lanes, LaneMap)
    lane_of_row: dict[int, int] = {}
    for lane in range(lanes.num_lanes):
        chunks = lanes.chunks(lane)
        for first, size in zip(lanes.first_row[chunks], lanes.num_samples[chunks], strict=True):
            lane_of_row.update(dict.fromkeys(range(int(first), int(first + size)), lane))
    assert sorted(lane_of_row) == list(plan.population)
    num_lane_steps, group = plan.lane_plan.micros.interleave.num_lane_steps, gcd(per_step, lanes.num_lanes)
    taken: Counter[int] = Counter()
    for step in steps[:num_lane_steps]:
        for micro, (rows, _) in enumerate(step):
            lane = lane_of_row[rows[0]]
            assert {lane_of_row[row] for row in rows} == {lane}
            assert lane % group == micro % group
            taken[lane] += 1
    assert len(set(taken.values())) <= 1
    if num_lane_steps:
        assert len(taken) == lanes.num_lanes


def delivered(numbers: range, num_workers: int) -> list[int]:
    """What a rank receives of workers that take every so manieth number, and are asked in turn."""
    dealt = [list(numbers[worker::num_workers]) for worker in range(num_workers)]
    return [number for turn in zip_longest(*dealt) for number in turn if number is not None]


def check_worlds(plan: EpochPlan, worlds: list[Ranks]) -> None:
    """Every rank runs as many micro-batches as every other; together they run each exactly once (S1-S3).

    Workers of a rank do not change what it receives, wherever it starts.
    """
    per_step = plan.spec.micro_batches_per_step
    for world_size, ranks_per_node, num_workers in worlds:
        schedule = RankSchedule(
            per_step, world_size, lanes=plan.spec.lanes, ranks_per_node=min(ranks_per_node, world_size)
        )
        dealt = [micro for rank in range(world_size) for micro in schedule.micros(rank)]
        assert len(dealt) == world_size * schedule.num_micro_batches_per_rank
        assert sorted(dealt) == list(range(per_step + schedule.num_padding_micro_batches))
        for micro in dealt:
            if schedule.is_padding(micro):
                assert not plan.micro_batch(0, micro).weights.any()
        per_rank = schedule.num_micro_batches_per_rank
        for step in {0, plan.num_steps // 2}:
            numbers = range(step * per_rank, plan.num_steps * per_rank)
            assert delivered(numbers, num_workers or 1) == list(numbers)


def check_resume(epoch: LaneEpoch, layout: SampleLayout, steps: Steps) -> None:
    """A fresh plan gives the same step at every step, without those before it; a state finds it (S4, S5)."""
    other = epoch.plan(layout).for_epoch(epoch.epoch + 1).for_epoch(epoch.epoch)
    for number in reversed(range(len(steps))):
        rows, weights = other.step(number)
        for found, weight, (wanted, _) in zip(rows.tolist(), weights.tolist(), steps[number], strict=True):
            assert found[: len(wanted)] == wanted
            assert set(found[len(wanted) :]) <= {-1}
            assert weight == [int(row >= 0) for row in found]
    middle = len(steps) // 2
    assert epoch.plan(layout).micro_batch(middle, 0).rows.tolist() == steps[middle][0][0]
    state = LoaderState(
        dataset_id=DATASET_ID, manifest_version=1, split="train", seed=epoch.seed, spec=epoch.spec
    ).at(Position(epoch.epoch, len(steps) - 1))
    text = json.dumps(state.to_json())
    assert len(text) < 1024
    assert LoaderState.from_json(json.loads(text)) == state


def check_epoch(epoch: LaneEpoch, worlds: list[Ranks]) -> None:
    """Prove all contracts on one epoch."""
    layout, budget = epoch.layout(), epoch.spec.budget
    lengths: dict[int, int] = {}
    if budget is not None:
        found = budget.cost.lengths({name: column[epoch.start :] for name, column in layout.facts.items()})
        lengths = dict(zip(layout.population, found.tolist(), strict=True))
    try:
        plan = epoch.plan(layout)
    except PlanError as error:
        event("no step")
        assert "num_steps must be at least 1" in error.message  # noqa: PT017
        return
    steps = all_steps(plan)
    assert plan.lane_plan is not None
    rounds = plan.lane_plan.micros.interleave
    event(f"{epoch.spec.kind}, tail {epoch.spec.tail}, {'lanes' if rounds.num_lane_steps else 'pool only'}")
    check_numbers(
        plan, steps, {row for row, value in lengths.items() if budget and value > budget.max_tokens}
    )
    if budget is not None:
        check_budget(plan, budget, steps, lengths)
    check_lanes(plan, steps)
    check_worlds(plan, [(1, 1, 0), (epoch.spec.micro_batches_per_step, 0, 3), *worlds])
    check_resume(epoch, layout, steps)


@st.composite
def runs(draw: st.DrawFn, max_samples: int) -> tuple[LaneEpoch, list[Ranks]]:
    """Draw an epoch, world sizes, ranks of a node and workers of a rank."""
    epoch = draw(epochs(max_samples))
    world = st.integers(1, epoch.spec.micro_batches_per_step)
    ranks = st.tuples(world, st.integers(1, 8), st.integers(0, 16))
    return epoch, draw(st.lists(ranks, min_size=3, max_size=3))


@pytest.mark.fast
@settings(max_examples=40, deadline=None)
@given(runs(max_samples=300))
def test_small_epochs(run: tuple[LaneEpoch, list[Ranks]]) -> None:
    check_epoch(*run)


@settings(max_examples=20, deadline=None)
@given(runs(max_samples=10_000))
def test_epochs(run: tuple[LaneEpoch, list[Ranks]]) -> None:
    check_epoch(*run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(16))
def test_ten_thousand_epochs(part: int) -> None:
    """In parts that can run beside each other; each draws its own examples."""

    @seed(part)
    @settings(max_examples=625, deadline=None)
    @given(runs(max_samples=10_000))
    def check(run: tuple[LaneEpoch, list[Ranks]]) -> None:
        check_epoch(*run)

    check()


def fill_by_hand(lengths: list[int], budget: TokenBudget) -> list[list[int]]:
    """Fill micro-batches from the longest sample to the shortest."""
    micros: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        if micros:
            held = [*micros[-1], length]
            tokens = len(held) * held[0] if budget.padded else sum(held)
            if tokens <= budget.max_tokens and len(held) <= budget.max_samples:
                micros[-1] = held
                continue
        micros.append([length])
    return micros


@pytest.mark.fast
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3000), max_size=60), min_size=1, max_size=6),
    st.integers(1, 5000),
    st.integers(1, 20),
    st.booleans(),
)
def test_windows_are_filled_as_by_hand_and_then_evenly(
    windows: list[list[int]], max_tokens: int, max_samples: int, padded: bool
) -> None:
    budget = TokenBudget(max_tokens=max_tokens, max_samples=max_samples, padded=padded)
    sizes = np.array([len(window) for window in windows])
    stops = np.cumsum(sizes)
    flat = np.array([value for window in windows for value in sorted(window, reverse=True)], np.int64)
    counts, tokens, samples = count_micro_batches(flat, stops - sizes, stops, budget)
    for number, window in enumerate(windows):
        by_hand = fill_by_hand(window, budget)
        assert len(by_hand) == counts[number]
        lengths = np.array(sorted(window, reverse=True), np.int64)
        cuts = cut_micro_batches(lengths, max_tokens=max_tokens, max_samples=max_samples, padded=padded)
        assert [lengths[a:b].tolist() for a, b in pairwise(cuts.tolist())] == by_hand
        evenly = cut_micro_batches(
            lengths, max_tokens=int(tokens[number]), max_samples=int(samples[number]), padded=padded
        )
        assert len(evenly) == len(cuts)
        assert tokens[number] <= max_tokens
        assert samples[number] <= max_samples
