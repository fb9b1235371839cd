"""Contracts S1 to S5 on random blends: draws by hand, equal use over epochs, lanes, budgets, tails.

Components of 1 to 10,000 samples, whole splits and subsets, repeats from a thousandth to many.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import event, example, given, seed, settings
from hypothesis import strategies as st

from shardflow.errors import PlanError
from shardflow.sampling import BatchSpec, EpochPlan, RankSchedule, SampleLayout, TokenBudget, choose_lanes
from shardflow.sampling.blend import (
    Blend,
    BlendComponent,
    blend_layout,
    draws_by_repeat,
    draws_by_weight,
    split_draws,
)
from shardflow.sampling.layout import Rows, RowSet, chosen_layout, rows_digest, select_rows
from shardflow.sampling.measures import measure_mix
from shardflow.sampling.spec import TAILS
from tests.layouts import DATASET_ID, layout_of


@dataclass(frozen=True)
class Case:
    """The numbers of one random blend."""

    parts: list[tuple[int, int, bool, int]]
    """Samples, draws, whether a subset, shards; of each component."""
    spec: BatchSpec
    seed: int
    epoch: int


def component_of(
    number: int, num_rows: int, count: int, is_subset: bool, num_shards: int
) -> tuple[BlendComponent, SampleLayout]:
    start = 7 * number
    layout = layout_of(num_rows, num_shards, start=start, seed=number)
    rows: Rows = layout.population
    if is_subset:
        rows = select_rows(layout.population, lambda low, high: np.arange(low, high) % 3 != 1) or rows
    if isinstance(rows, RowSet):
        whole = np.arange(start + num_rows)
        shard = np.where(whole < start, 0, layout.shards_of(np.maximum(whole, start)) + 1)
        layout = chosen_layout(
            rows,
            dataset_id=DATASET_ID,
            shard=shard,
            num_bytes=np.full(start + num_rows, 3000),
            facts=layout.facts,
        )
    elif rows != layout.population:
        rows = layout.population
    component = BlendComponent(
        dataset_id=DATASET_ID,
        manifest_version=1,
        split="train",
        rows=rows,
        subset=rows_digest(rows) if isinstance(rows, RowSet) else None,
        count=count,
        num_table_rows=start + num_rows + 5,
    )
    return component, layout


def plan_of(case: Case, epoch: int | None = None) -> EpochPlan:
    made = [component_of(number, *part) for number, part in enumerate(case.parts)]
    blend = Blend([component for component, _ in made])
    layout = blend_layout(blend, [found for _, found in made]) if case.spec.lanes else None
    epoch = case.epoch if epoch is None else epoch
    return EpochPlan(blend, case.spec, seed=case.seed, epoch=epoch, layout=layout)


@st.composite
def cases(draw: st.DrawFn, max_samples: int) -> Case:
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.one_of(st.integers(1, 60), st.integers(1, max_samples)))
        repeat = draw(st.sampled_from([0.001, 0.3, 0.5, 1.0, 1.0, 2.0, 2.5, 7.25]))
        parts.append(
            (size, max(1, draws_by_repeat(size, repeat)), draw(st.booleans()), draw(st.integers(1, 40)))
        )
    kind = draw(st.sampled_from(["full", "lanes", "budget"]))
    per_step = draw(st.integers(1, 12))
    spec = BatchSpec(
        micro_batch_size=0 if kind == "budget" else draw(st.integers(1, 8)),
        budget=TokenBudget(max_tokens=4096, max_samples=16) if kind == "budget" else None,
        micro_batches_per_step=per_step,
        tail=draw(st.sampled_from(TAILS)),
        lanes=0 if kind == "full" else draw(st.integers(1, 9)),
        window_bytes=draw(st.sampled_from([20_000, 200_000, 2**40])),
    )
    return Case(parts, spec, draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 50)))


def samples_of(plan: EpochPlan) -> Counter[int]:
    found: Counter[int] = Counter()
    for step in range(plan.num_steps):
        rows, weights = plan.step(step)
        assert (weights == (rows >= 0)).all()
        found.update(rows[weights == 1].tolist())
    return found


def check_case(case: Case) -> None:
    """Prove that steps are what was promised, that all worlds run them, and that samples are used equally."""
    try:
        plan = plan_of(case)
    except PlanError as error:
        event("no step")
        assert "num_steps must be at least 1" in error.message  # noqa: PT017
        return
    blend = plan.population
    assert isinstance(blend, Blend)
    event(f"{case.spec.kind}, tail {case.spec.tail}, {'lanes' if case.spec.lanes else 'full shuffle'}")
    rows = set(blend)
    found = samples_of(plan)
    assert set(found) <= rows
    assert plan.num_samples == sum(part[1] for part in case.parts) == blend.num_draws
    assert found.total() == plan.num_samples - plan.num_dropped + plan.num_repeated
    for world_size in {1, case.spec.micro_batches_per_step, max(1, case.spec.micro_batches_per_step - 1)}:
        schedule = RankSchedule(case.spec.micro_batches_per_step, world_size, lanes=case.spec.lanes)
        dealt = [micro for rank in range(world_size) for micro in schedule.micros(rank)]
        assert sorted(dealt) == list(
            range(case.spec.micro_batches_per_step + schedule.num_padding_micro_batches)
        )
    # Another plan that comes from another epoch finds the same steps, backwards.
    try:
        other = plan_of(case, case.epoch + 3).for_epoch(case.epoch)
    except PlanError as error:
        # Under a budget a few samples may fill one step in this epoch and none in that one.
        event("no step in another epoch")
        assert "num_steps must be at least 1" in error.message  # noqa: PT017
        other = plan_of(case)
    for step in {0, plan.num_steps // 2, plan.num_steps - 1}:
        assert other.step(step)[0].tolist() == plan.step(step)[0].tolist()
        for micro in range(case.spec.micro_batches_per_step):
            held = plan.micro_batch(step, micro).rows.tolist()
            assert held == plan.step(step)[0][micro][: len(held)].tolist()
    if case.spec.tail == "mask":
        check_use(case, plan, blend, found)


def check_use(case: Case, plan: EpochPlan, blend: Blend, found: Counter[int]) -> None:
    """Every component has its draws in every epoch, and its samples are drawn equally often, but for one."""
    base = 0
    total: Counter[int] = Counter()
    for epoch in range(4):
        total.update(samples_of(plan.for_epoch(epoch)))
    for component in blend.components:
        rows = [row + base for row in component.rows]
        base += component.num_table_rows
        assert sum(found[row] for row in rows) == component.count
        uses = [total[row] for row in rows]
        assert max(uses) - min(uses) <= 1
        assert sum(uses) == 4 * component.count


@pytest.mark.fast
@settings(max_examples=30, deadline=None)
@given(cases(max_samples=120))
def test_small_blends(case: Case) -> None:
    check_case(case)


@settings(max_examples=15, deadline=None)
@given(cases(max_samples=2000))
def test_blends(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_many_blends(part: int) -> None:
    """In parts that can run beside each other; each draws its own examples."""

    @seed(part)
    @settings(max_examples=250, deadline=None)
    @given(cases(max_samples=10_000))
    def check(case: Case) -> None:
        check_case(case)

    check()


@pytest.mark.fast
@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_draws_are_split_as_they_fall_due(sizes: list[int]) -> None:
    """Against a list of all samples by their time; so no part ever gives a draw back."""
    due = sorted((((2 * j + 1) << 31) // size, part) for part, size in enumerate(sizes) for j in range(size))
    for num_draws in range(len(due) + 1):
        by_hand = Counter(part for _, part in due[:num_draws])
        found = split_draws(np.array(sizes, np.int64), num_draws).tolist()
        assert found == [by_hand[part] for part in range(len(sizes))]


@pytest.mark.fast
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.1, 0.25, 1.0, 1 / 3, 7.0]), min_size=1, max_size=9), st.integers(1, 5000))
def test_weights_become_counts_by_the_largest_remainder(weights: list[float], num_draws: int) -> None:
    counts = draws_by_weight(weights, num_draws)
    assert sum(counts) == num_draws
    exact = [Fraction(repr(weight)) for weight in weights]
    assert all(
        abs(count - weight * num_draws / sum(exact)) < 1 for count, weight in zip(counts, exact, strict=True)
    )


@pytest.mark.fast
def test_repeats_round_halves_up() -> None:
    assert [draws_by_repeat(10, repeat) for repeat in (0.3, 2.5, 0.05, 0.04, 1.0)] == [3, 25, 1, 0, 10]
    assert draws_by_repeat(3, 0.1) == 0
    assert draws_by_repeat(200_000_000, 0.1) == 20_000_000  # which binary fractions would miss


@pytest.mark.fast
@pytest.mark.parametrize("per_step", [4, 8, 16])
def test_lanes_mix_every_step_near_the_declared_shares(per_step: int) -> None:
    """Far better than chance would: each micro-batch is of one lane, and so mostly of one component."""
    parts = [(6000, 6000, False, 60), (2000, 2000, True, 20), (1000, 4000, False, 10)]
    spec = BatchSpec(
        micro_batch_size=4, micro_batches_per_step=per_step, lanes=16, window_bytes=100_000, tail="mask"
    )
    mix = measure_mix(plan_of(Case(parts, spec, 7, 0)))
    assert mix is not None
    assert mix.shares == pytest.approx((0.5, 1 / 6, 1 / 3))
    assert mix.mean_deviation < 1 / per_step
    assert mix.max_deviation < 2.5 / per_step


@pytest.mark.fast
def test_lanes_of_a_blend_read_as_locally_as_those_of_a_dataset() -> None:
    """A partial repeat reads a part of its shards, and a lane the same shards in every epoch."""
    parts = [(4000, 4000, False, 40), (4000, 1200, False, 40)]
    spec = BatchSpec(micro_batch_size=4, micro_batches_per_step=8, lanes=8, window_bytes=2**40, tail="mask")
    plan = plan_of(Case(parts, spec, 7, 0))
    assert plan.lane_plan is not None
    read = []
    for epoch in range(2):
        windows = plan.for_epoch(epoch).lane_plan.windows  # type: ignore[union-attr]
        read.append([windows.shards(lane, 0) for lane in range(8)])
    for lane in range(8):
        assert len(read[0][lane]) <= 14
    second = {int(shard) for shards in read[0] for shard in shards if shard >= 40}
    assert len(second) <= 24
    assert plan.lane_plan.summary().remainder_share < 0.1


@pytest.mark.fast
def test_lanes_are_chosen_by_what_an_epoch_draws() -> None:
    """A large corpus of which an epoch takes little does not fill many lanes."""
    spec = BatchSpec(
        budget=TokenBudget(max_tokens=4096, max_samples=8), micro_batches_per_step=4, tail="mask", lanes=1
    )
    plan = plan_of(Case([(40_000, 2000, False, 40)], spec, 7, 0))
    assert plan.layout is not None
    # 2,000 draws are 250 micro-batches or more; a lane should have about 128.
    assert choose_lanes(plan.layout, spec) == choose_lanes(layout_of(2000, 40), spec) <= 2


PARTIAL = [(50, 15, False, 5), (20, 50, False, 2), (9, 4, True, 1)]


@pytest.mark.fast
@settings(max_examples=2, deadline=None)
@given(st.sampled_from([0, 3]))
@example(0)
@example(3)
def test_a_partial_repeat_goes_on_where_it_stopped(lanes: int) -> None:
    """Fixed numbers, so that no draw of examples misses them: 0.3, 2.5, and a subset."""
    spec = BatchSpec(micro_batch_size=3, micro_batches_per_step=2, tail="mask", lanes=lanes)
    check_case(Case(PARTIAL, spec, seed=5, epoch=2))


@pytest.mark.fast
@settings(max_examples=8, deadline=None)
@given(st.booleans(), st.integers(0, 3))
@example(False, 1)
@example(True, 1)
def test_a_lane_may_have_no_draw_in_an_epoch(has_budget: bool, epoch: int) -> None:
    """Three draws an epoch in five lanes: those that gave theirs before wait for their turn."""
    spec = BatchSpec(
        micro_batch_size=0 if has_budget else 2,
        budget=TokenBudget(max_tokens=4096, max_samples=2) if has_budget else None,
        micro_batches_per_step=2,
        tail="mask",
        lanes=5,
    )
    check_case(Case([(40, 3, False, 2)], spec, seed=5, epoch=epoch))
