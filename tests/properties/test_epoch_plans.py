"""Contracts S1 to S4 on random epochs, against an epoch that is dealt out by hand.

The reference below shares nothing with the plan but the permutation: lists, no arrays, no closed forms. Here
ranks are loops; the loader's tests run the same with real workers and processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
import pytest
from hypothesis import event, given, seed, settings
from hypothesis import strategies as st

from shardflow.errors import PlanError
from shardflow.sampling import BatchSpec, EpochPlan, LoaderState, Permutation, Position, RankSchedule
from shardflow.sampling.spec import TAILS
from shardflow.seeds import derive

MicroBatches = list[tuple[list[int], list[int]]]
"""Rows and weights of each micro-batch of a step, in canonical order."""


@dataclass(frozen=True)
class Epoch:
    """The numbers of one random epoch."""

    num_samples: int
    start: int
    spec: BatchSpec
    seed: int
    epoch: int

    def plan(self) -> EpochPlan:
        population = range(self.start, self.start + self.num_samples)
        return EpochPlan(population, self.spec, seed=self.seed, epoch=self.epoch)

    def state(self, position: Position) -> LoaderState:
        return LoaderState(
            dataset_id="d" * 64, manifest_version=1, split="train", seed=self.seed, spec=self.spec
        ).at(position)


@st.composite
def epochs(draw: st.DrawFn, max_samples: int) -> Epoch:
    """Draw an epoch; every second one lies within one sample of full steps, where tails go wrong."""
    size, per_step = draw(st.integers(1, 20)), draw(st.integers(1, 64))
    if draw(st.booleans()):
        full = draw(st.integers(0, max_samples // (size * per_step))) * size * per_step
        num_samples = min(max(1, full + draw(st.integers(-1, 1))), max_samples)
    else:
        num_samples = draw(st.integers(1, max_samples))
    return Epoch(
        num_samples=num_samples,
        start=draw(st.sampled_from([0, 1, 12_345])),
        spec=BatchSpec(
            micro_batch_size=size, micro_batches_per_step=per_step, tail=draw(st.sampled_from(TAILS))
        ),
        seed=draw(st.integers(0, 2**63 - 1)),
        epoch=draw(st.integers(0, 50)),
    )


def reference_steps(epoch: Epoch) -> list[MicroBatches]:
    """Deal out an epoch by hand."""
    permutation = Permutation(epoch.num_samples, derive(epoch.seed, "epoch-order", epoch.epoch))
    order = [epoch.start + value for value in permutation(np.arange(epoch.num_samples)).tolist()]
    size, per_step = epoch.spec.micro_batch_size, epoch.spec.micro_batches_per_step
    match epoch.spec.tail:
        case "drop":
            slots = order[: len(order) // (size * per_step) * size * per_step]
        case "repeat":
            slots = list(islice(cycle(order), -(-len(order) // (size * per_step)) * size * per_step))
        case "mask":
            slots = order + [-1] * (-len(order) % (size * per_step))
    micros = [slots[i : i + size] for i in range(0, len(slots), size)]
    weighted = [(rows, [int(row != -1) for row in rows]) for rows in micros]
    return [weighted[i : i + per_step] for i in range(0, len(weighted), per_step)]


def run_rank(epoch: Epoch, schedule: RankSchedule, rank: int, first_step: int) -> list[tuple[int, int]]:
    """Return the (step, micro-batch) that a rank runs from a step to the epoch's end, as a loader would."""
    return [
        (step, schedule.micro(rank, slot))
        for step in range(first_step, epoch.plan().num_steps)
        for slot in range(schedule.num_micro_batches_per_rank)
    ]


def check_numbers(epoch: Epoch, plan: EpochPlan, steps: list[MicroBatches]) -> None:
    """What is reported before step 0 is what the steps hold (S1, S3)."""
    rows = [row for step in steps for rows, _ in step for row in rows]
    samples = [row for row in rows if row != -1]
    population = set(range(epoch.start, epoch.start + epoch.num_samples))
    assert plan.num_steps == len(steps)
    assert plan.num_padding_slots == rows.count(-1)
    assert plan.num_repeated == len(samples) - len(set(samples))
    assert plan.num_dropped == len(population - set(samples))
    assert set(samples) <= population
    if epoch.spec.tail == "mask":
        assert len(samples) == epoch.num_samples == len(set(samples))
    if epoch.spec.tail != "drop":
        assert set(samples) == population


def check_world(epoch: Epoch, plan: EpochPlan, steps: list[MicroBatches], world_size: int) -> None:
    """All ranks run equally many micro-batches, and together exactly the steps of the plan (S1, S2, S3)."""
    schedule = RankSchedule(epoch.spec.micro_batches_per_step, world_size)
    summary = plan.summary(schedule)
    held: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for rank in range(world_size):
        places = run_rank(epoch, schedule, rank, 0)
        assert len(places) == summary.num_micro_batches_per_rank
        for place in places:
            assert place not in held, "two ranks run the same micro-batch"
            batch = plan.micro_batch(*place)
            held[place] = (batch.rows.tolist(), batch.weights.tolist())
    for k, micros in enumerate(steps):
        assert [held.pop((k, micro)) for micro in range(len(micros))] == micros
    # What is left are the fillers.
    assert len(held) == summary.num_padding_micro_batches_per_step * plan.num_steps
    size = epoch.spec.micro_batch_size
    assert all(batch == ([-1] * size, [0] * size) for batch in held.values())


def check_resume_at_every_step(epoch: Epoch, steps: list[MicroBatches]) -> None:
    """A plan that was never asked for an earlier step gives the same step (S4, S5)."""
    for k, micros in enumerate(steps):
        rows, weights = epoch.plan().step(k)
        assert [(r, w) for r, w in zip(rows.tolist(), weights.tolist(), strict=True)] == micros


def check_stops(epoch: Epoch, worlds: list[int], consumed: list[float]) -> None:
    """Stop anywhere, go on with another world size, again and again: every step is run once (S2, S4).

    Args:
        epoch: The epoch.
        worlds: World size of each stage of the run.
        consumed: Share of what is left of the epoch that each stage but the last consumes.
    """
    num_steps = epoch.plan().num_steps
    committed: list[int] = []
    saved = json.dumps(epoch.state(Position(epoch.epoch, 0)).to_json())
    for world_size, share in zip(worlds, [*consumed, 1.0], strict=True):
        state = LoaderState.from_json(json.loads(saved))
        state.check_matches(epoch.state(Position(0, 0)))
        if state.epoch > epoch.epoch:
            break
        state.check_within(num_steps)
        schedule = RankSchedule(epoch.spec.micro_batches_per_step, world_size)
        per_rank = schedule.num_micro_batches_per_rank
        num_left = (num_steps - state.step) * per_rank
        stop = state.step * per_rank + round(share * num_left)
        # Ranks are stopped at different places inside one step; the state must not depend on that.
        lowest = stop - stop % per_rank
        highest = (
            min(lowest + per_rank - 1, num_steps * per_rank - 1) if stop < num_steps * per_rank else stop
        )
        positions = {
            Position.after(
                epoch=epoch.epoch,
                num_consumed=num_consumed,
                num_micro_batches_per_rank=per_rank,
                num_steps=num_steps,
            )
            for num_consumed in {lowest, stop, highest}
        }
        assert len(positions) == 1, "ranks inside one step disagree about the position"
        position = positions.pop()
        last = num_steps if position.epoch > epoch.epoch else position.step
        committed += range(state.step, last)
        states = {json.dumps(state.at(position).to_json()) for _rank in range(world_size)}
        saved = states.pop()
        assert not states
    assert committed == list(range(num_steps))
    assert LoaderState.from_json(json.loads(saved)).position == Position(epoch.epoch + 1, 0)


def check_epoch(epoch: Epoch, worlds: list[int], consumed: list[float]) -> None:
    """Prove all contracts on one epoch."""
    steps = reference_steps(epoch)
    event(f"tail {epoch.spec.tail}, {'no step' if not steps else 'steps'}")
    if not steps:
        assert epoch.spec.tail == "drop"
        with pytest.raises(PlanError, match="num_steps must be at least 1"):
            epoch.plan()
        return
    plan = epoch.plan()
    check_numbers(epoch, plan, steps)
    for world_size in {1, epoch.spec.micro_batches_per_step, *worlds}:
        check_world(epoch, plan, steps, world_size)
    check_resume_at_every_step(epoch, steps)
    check_stops(epoch, worlds, consumed)


@st.composite
def runs(draw: st.DrawFn, max_samples: int) -> tuple[Epoch, list[int], list[float]]:
    """Draw an epoch, the world sizes of three stages of a run, and where the first two stop."""
    epoch = draw(epochs(max_samples))
    worlds = draw(st.lists(st.integers(1, epoch.spec.micro_batches_per_step), min_size=3, max_size=3))
    return epoch, worlds, draw(st.lists(st.floats(0, 1), min_size=2, max_size=2))


@pytest.mark.fast
@settings(max_examples=60)
@given(runs(max_samples=300))
def test_small_epochs(run: tuple[Epoch, list[int], list[float]]) -> None:
    check_epoch(*run)


@settings(max_examples=60)
@given(runs(max_samples=10_000))
def test_epochs(run: tuple[Epoch, list[int], list[float]]) -> None:
    check_epoch(*run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_ten_thousand_epochs(part: int) -> None:
    """Ten minutes on one core, in parts that can run beside each other; each draws its own examples."""

    @seed(part)
    @settings(max_examples=1250)
    @given(runs(max_samples=10_000))
    def check(run: tuple[Epoch, list[int], list[float]]) -> None:
        check_epoch(*run)

    check()


@pytest.mark.fast
@settings(max_examples=100)
@given(st.integers(1, 20_000), st.integers(0, 2**64 - 1))
def test_permutations_are_bijections(size: int, key: int) -> None:
    permutation = Permutation(size, key)
    positions = np.arange(size)
    values = permutation(positions)
    assert np.array_equal(np.sort(values), positions)


@pytest.mark.fast
@settings(max_examples=100)
@given(st.data())
def test_large_permutations_map_distinct_positions_to_distinct_values(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 2**48))
    permutation = Permutation(size, data.draw(st.integers(0, 2**64 - 1)))
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    values = permutation(np.array(positions))
    assert all(0 <= value < size for value in values.tolist())
    assert len(set(values.tolist())) == len(positions)
