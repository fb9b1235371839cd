"""Contracts S1 to S5 and S11 on random weights: exact shares, any epoch and world size, lanes, budgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from shardflow.errors import PlanError
from shardflow.sampling import BatchSpec, EpochPlan, RankSchedule, SampleLayout, TokenBudget
from shardflow.sampling.blend import Blend, BlendComponent, Mixture, blend_layout
from shardflow.sampling.layout import Rows, chosen_layout, select_rows
from shardflow.sampling.spec import TAILS
from shardflow.sampling.weights import Apportionment, CodeArray, WeightClasses
from tests.layouts import DATASET_ID, layout_of

START = 5


@dataclass(frozen=True)
class TableCodes:
    codes: CodeArray

    def __call__(self, start: int, stop: int) -> CodeArray:
        return self.codes[start:stop]


@dataclass(frozen=True)
class Case:
    """Weights of the rows of one component, and its draws."""

    weights: list[int]
    is_subset: bool
    is_balanced: bool
    count: int
    changes: tuple[tuple[int, list[int]], ...] = ()
    """First epochs of other weights."""

    def made(self) -> tuple[BlendComponent, dict[int, list[Fraction]], SampleLayout]:
        """The component, the share of each row in an epoch of each segment, and a layout of the table."""
        num_rows = len(self.weights)
        layout = layout_of(num_rows, min(9, num_rows), start=START, seed=1)
        rows: Rows = layout.population
        if self.is_subset:
            rows = select_rows(layout.population, lambda low, high: np.arange(low, high) % 3 != 1) or rows
        segments = [self.weights, *(weights for _, weights in self.changes)]
        joint = sorted(set(zip(*segments, strict=True)))
        codes = np.zeros(START + num_rows, np.uint16)
        codes[START:] = [joint.index(one) for one in zip(*segments, strict=True)]
        classes = WeightClasses(
            rows,
            TableCodes(codes),
            None if self.is_balanced else np.array(joint, np.int64).T.reshape(len(segments), -1),
            len(joint),
            (0,) if self.is_balanced else (0, *(epoch for epoch, _ in self.changes)),
        )
        component = BlendComponent(
            dataset_id=DATASET_ID,
            manifest_version=1,
            split="train",
            rows=rows,
            subset=None,
            count=self.count,
            num_table_rows=START + num_rows,
            classes=classes,
        )
        shares: dict[int, list[Fraction]] = {row: [] for row in rows}
        for weights in segments[: 1 if self.is_balanced else None]:
            of_class = Counter(int(codes[row]) for row in rows)
            total = sum(weights[row - START] for row in rows)
            for row in rows:
                if self.is_balanced:
                    share = Fraction(1, len(of_class) * of_class[int(codes[row])])
                else:
                    share = Fraction(weights[row - START], total)
                shares[row].append(share * self.count)
        return component, shares, layout


def layout_for(mixture: Mixture, tables: list[SampleLayout]) -> SampleLayout:
    parts = []
    for component, table in zip(mixture.components, tables, strict=True):
        if component.classes is None:
            parts.append(table)
            continue
        whole = np.arange(component.num_table_rows)
        shard = np.where(whole < START, 0, table.shards_of(np.maximum(whole, START)) + 1)
        for code in component.strata:
            rows = component.classes.listed()[code]
            num_bytes = np.full(len(whole), 3000)
            parts.append(
                chosen_layout(
                    rows, dataset_id=DATASET_ID, shard=shard, num_bytes=num_bytes, facts=table.facts
                )
            )
    return blend_layout(mixture, parts)


weights = st.one_of(st.integers(0, 4), st.integers(0, 1000), st.sampled_from([0, 1, 1, 1, 1000, 2**31 - 1]))


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 60) -> Case:
    num_rows = draw(st.integers(1, max_rows))
    rows = st.lists(weights, min_size=num_rows, max_size=num_rows)
    count = draw(st.one_of(st.integers(1, 5), st.integers(1, 3 * num_rows)))
    is_balanced = draw(st.booleans())
    starts = [] if is_balanced else sorted(draw(st.sets(st.integers(1, 9), max_size=2)))
    changes = tuple((start, draw(rows)) for start in starts)
    return Case(draw(rows), draw(st.booleans()), is_balanced, count, changes)


@example(Case([9, 1], is_subset=False, is_balanced=False, count=1))
@example(Case([1000, 1, 1, 1], is_subset=False, is_balanced=False, count=7, changes=((3, [0, 1, 1, 9]),)))
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_each_row_is_within_one_draw_of_its_exact_share(case: Case) -> None:
    try:
        component, shares, _ = case.made()
    except PlanError:
        event("all weights 0")
        return
    mixture = Mixture([component])
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
    plan = EpochPlan(mixture, spec, seed=3, epoch=0)
    starts = [*component.classes.starts, 10**6] if component.classes else []
    for segment, (first, last) in enumerate(pairwise(starts)):
        drawn: Counter[int] = Counter()
        for epoch in range(first, min(last, 13)):
            now = plan.for_epoch(epoch)
            assert now.num_samples == case.count
            drawn.update(
                int(row) for step in range(now.num_steps) for row in now.step(step)[0].ravel() if row >= 0
            )
            assert drawn.total() == (epoch + 1 - first) * case.count
            for row, share in shares.items():
                assert abs(drawn[row] - (epoch + 1 - first) * share[segment]) < 1
            assert set(drawn) <= set(shares)


@given(
    totals=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10**9)), min_size=1, max_size=40).filter(any),
    count=st.integers(1, 100),
    epoch=st.integers(0, 400),
)
@settings(max_examples=80, deadline=None)
def test_any_epoch_is_found_without_those_before_it(totals: list[int], count: int, epoch: int) -> None:
    made = np.array([totals], np.int64)
    steady = Apportionment(made, (0,), lambda at: at * count)
    for at in range(0, epoch + 1, 1):
        found = steady.before(at)
    alone = Apportionment(made, (0,), lambda at: at * count).before(epoch)
    assert alone.tolist() == found.tolist()
    shares = [Fraction(epoch * count * total, sum(totals)) for total in totals]
    assert all(abs(int(n) - share) < 1 for n, share in zip(alone, shares, strict=True))


@st.composite
def specs(draw: st.DrawFn) -> BatchSpec:
    kind = draw(st.sampled_from(["full", "lanes", "budget"]))
    return BatchSpec(
        micro_batch_size=0 if kind == "budget" else draw(st.integers(1, 6)),
        budget=TokenBudget(max_tokens=4096, max_samples=16) if kind == "budget" else None,
        micro_batches_per_step=draw(st.integers(1, 8)),
        tail=draw(st.sampled_from(TAILS)),
        lanes=0 if kind == "full" else draw(st.integers(1, 6)),
        window_bytes=draw(st.sampled_from([20_000, 200_000, 2**40])),
    )


@given(
    parts=st.lists(cases(40), min_size=1, max_size=3),
    spec=specs(),
    epoch=st.integers(0, 12),
    world_size=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_every_world_runs_the_draws_of_the_epoch(
    parts: list[Case], spec: BatchSpec, epoch: int, world_size: int
) -> None:
    try:
        made = [case.made() for case in parts]
        mixture = (Mixture if len(parts) == 1 else Blend)([component for component, _, _ in made])
        layout = layout_for(mixture, [table for _, _, table in made]) if spec.lanes else None
        plan = EpochPlan(mixture, spec, seed=11, epoch=epoch, layout=layout)
    except PlanError:
        event("no step, or all weights 0")
        return
    event(f"{spec.kind}, tail {spec.tail}, {'lanes' if spec.lanes else 'full shuffle'}")
    assert plan.num_samples == sum(case.count for case in parts)
    found: Counter[int] = Counter()
    for step in range(plan.num_steps):
        rows, _ = plan.step(step)
        found.update(rows[rows >= 0].tolist())
    assert found.total() == plan.num_samples - plan.num_dropped + plan.num_repeated
    starts, counts = mixture.starts(), mixture.counts(epoch)
    if not plan.num_dropped and not plan.num_repeated:
        of_stratum = np.zeros(len(counts), np.int64)
        numbers = {row: n for n, row in enumerate(mixture.rows(np.arange(starts[-1])).tolist())}
        assert len(numbers) == mixture.num_samples
        for row, times in found.items():
            of_stratum[np.searchsorted(starts, numbers[row], side="right") - 1] += times
        assert of_stratum.tolist() == counts.tolist()
    # Ranks of any number deal out the same micro-batches, and a plan that begins here finds the same steps.
    world_size = min(world_size, spec.micro_batches_per_step)
    schedule = RankSchedule(spec.micro_batches_per_step, world_size, lanes=spec.lanes)
    dealt = sorted(micro for rank in range(world_size) for micro in schedule.micros(rank))
    assert dealt == list(range(spec.micro_batches_per_step + schedule.num_padding_micro_batches))
    again = EpochPlan(
        (Mixture if len(parts) == 1 else Blend)([case.made()[0] for case in parts]),
        spec,
        seed=11,
        epoch=epoch,
        layout=layout,
    )
    for step in {plan.num_steps - 1, 0}:
        assert again.step(step)[0].tolist() == plan.step(step)[0].tolist()
        for micro in range(spec.micro_batches_per_step):
            held = again.micro_batch(step, micro).rows.tolist()
            assert held == plan.step(step)[0][micro][: len(held)].tolist()


def test_neighbors_are_not_always_drawn_together() -> None:
    case = Case([1] * 200 + [2] * 100, is_subset=False, is_balanced=False, count=100)
    component, _, _ = case.made()
    spec = BatchSpec(micro_batch_size=10, micro_batches_per_step=10)
    plan = EpochPlan(Mixture([component]), spec, seed=1, epoch=0)
    together = np.zeros((300, 300), np.int64)
    for epoch in range(40):
        rows = np.unique(plan.for_epoch(epoch).step(0)[0]) - START
        together[np.ix_(rows, rows)] += 1
    # Each row of weight 1 is drawn in one epoch of four: two of them together in 40 / 16 on average.
    pairs = together[:200, :200][~np.eye(200, dtype=bool)]
    assert 1.5 < pairs.mean() < 3.5
    assert pairs.max() < 10


@pytest.mark.parametrize("wrong", [[0, 0, 0], [2**31 - 1] * 3])
def test_weights_that_cannot_be_drawn_by(wrong: list[int]) -> None:
    codes = TableCodes(np.zeros(3, np.uint16))
    if any(wrong):
        with pytest.raises(PlanError, match="must add up to less than"):
            WeightClasses(range(3), codes, np.array([[2**61]], np.int64), 1)
    else:
        with pytest.raises(PlanError, match="are all 0"):
            WeightClasses(range(3), codes, np.array([[0]], np.int64), 1)
