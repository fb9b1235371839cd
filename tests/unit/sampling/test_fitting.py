"""Best-fit decreasing: what a loop over single samples packs, and how full sequences of mixed lengths are."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import ConfigError
from shardflow.sampling import BatchSpec, CostRule, EpochPlan, SampleLayout, TokenBudget
from shardflow.sampling.budget import COUNTED_TOKENS
from shardflow.sampling.budget_batches import count_sequences, pack_sequences
from tests.layouts import DATASET_ID
from tests.sweeps import sampled

pytestmark = pytest.mark.fast


def by_hand(lengths: list[int], max_tokens: int, max_samples: int) -> list[list[int]]:
    """Each sample into the fullest sequence that has room for it."""
    found: list[list[int]] = []
    for length in lengths:
        fitting = [one for one in found if sum(one) + length <= max_tokens and len(one) < max_samples]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            found.append([length])
    return found


@given(
    st.lists(st.integers(1, 60), max_size=60),
    st.integers(5, 60),
    st.integers(1, 9),
)
def test_sequences_are_those_of_a_loop_over_samples(
    lengths: list[int], max_tokens: int, max_samples: int
) -> None:
    lengths.sort(reverse=True)
    values = np.array(lengths, np.int64)
    order, cuts = pack_sequences(values, max_tokens=max_tokens, max_samples=max_samples)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    found = [values[order[a:b]].tolist() for a, b in pairwise(cuts.tolist())]
    wanted = by_hand(lengths, max_tokens, max_samples)
    assert sorted(map(sorted, found)) == sorted(map(sorted, wanted))
    limits = {"max_tokens": max_tokens, "max_samples": max_samples}
    assert count_sequences(values.astype(np.uint16), **limits) == len(found)


LENGTHS = {
    "answers": lambda rng, num: np.clip(rng.lognormal(6, 1, num), 16, 4096),
    "images": lambda rng, num: rng.integers(20, 300, num) + 576 * rng.integers(0, 4, num),
    "uniform": lambda rng, num: rng.integers(1, 4097, num),
}


def counted_plan(kind: str, num_samples: int, fit: Any) -> tuple[EpochPlan, Any]:
    """A plan of made up lengths, and these."""
    lengths = LENGTHS[kind](np.random.default_rng(5), num_samples).astype(np.uint32)
    layout = SampleLayout.of_columns(
        range(num_samples),
        dataset_id=DATASET_ID,
        shard=np.zeros(num_samples, np.uint32),
        offset_bytes=np.arange(num_samples, dtype=np.uint64) * 1000,
        num_bytes=np.full(num_samples, 1000, np.uint64),
        facts={COUNTED_TOKENS: lengths},
    )
    cost = CostRule(counted="0" * 64)
    budget = TokenBudget(max_tokens=8192, max_samples=4096, padded=False, cost=cost, fit=fit)
    spec = BatchSpec(budget=budget, micro_batches_per_step=4, lanes=2, window_bytes=num_samples * 250)
    return EpochPlan(layout.population, spec, seed=1, epoch=0, layout=layout), lengths


@pytest.mark.parametrize("kind", sampled(LENGTHS, {"answers", "images"}))
def test_sequences_of_mixed_lengths_are_full(kind: str) -> None:
    """Of an epoch in shuffle windows, all but the last sequences of a window hardly have room."""
    fill = {}
    for fit in ("neighbors", "best"):
        plan, lengths = counted_plan(kind, 24_000, fit)
        held = [
            int(lengths[row[row >= 0]].sum()) for step in range(plan.num_steps) for row in plan.step(step)[0]
        ]
        assert max(held) <= 8192
        fill[fit] = float(np.mean(held)) / 8192
    assert fill["best"] >= 0.99
    assert fill["best"] > fill["neighbors"]


def test_budgets_without_it_keep_their_identity_and_others_come_back() -> None:
    plain = TokenBudget(max_tokens=10, max_samples=10, padded=False)
    assert "fit" not in plain.to_json()
    assert "counted" not in plain.cost.to_json()
    cost = CostRule(counted="a" * 64, quadratic_tokens=7)
    packed = TokenBudget(max_tokens=10, max_samples=10, padded=False, fit="best", cost=cost)
    for one in (plain, packed):
        assert TokenBudget.from_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(ConfigError, match=r"best needs padded=False"):
        TokenBudget(max_tokens=10, max_samples=10, fit="best")
    with pytest.raises(ConfigError, match=r"counted leaves no other setting"):
        CostRule(counted="a" * 64, max_text_tokens=5)
    with pytest.raises(ConfigError, match=r"counted is filled in by a loader"):
        CostRule(counted="a")
