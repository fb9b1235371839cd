"""The cost rule and the token budget: integers, bounds, JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import ConfigError, PlanError
from shardflow.sampling import BatchSpec, CostRule, TokenBudget

pytestmark = pytest.mark.fast

TEXT = np.array([0, 1, 4, 5, 4000, 2**32 - 1], np.uint32)
SLICES = np.array([0, 1, 8, 9, 300, 2**32 - 1], np.uint32)


def test_text_is_counted_up_and_no_sample_costs_nothing() -> None:
    rule = CostRule()
    assert rule.lengths({"text_bytes": TEXT}).tolist() == [2, 3, 3, 4, 1002, 1_073_741_826]
    assert CostRule(max_text_tokens=3).lengths({"text_bytes": TEXT}).tolist() == [2, 3, 3, 4, 5, 5]


def test_images_count_as_many_slices_as_the_view_takes() -> None:
    rule = CostRule(text_tokens_per_1000_bytes=0, image_tokens_per_slice=10, max_slices=8)
    assert rule.used_facts() == ("num_slices",)
    assert rule.lengths({"num_slices": SLICES}).tolist() == [2, 12, 82, 82, 82, 82]
    both = CostRule(image_tokens_per_slice=10, max_slices=8)
    assert both.lengths({"text_bytes": TEXT[:2], "num_slices": SLICES[:2]}).tolist() == [2, 13]


def test_a_rule_without_facts_gives_every_sample_the_same() -> None:
    rule = CostRule(text_tokens_per_1000_bytes=0)
    assert rule.lengths({"text_bytes": TEXT}).tolist() == [2] * 6


def test_attention_grows_with_the_square() -> None:
    lengths = np.array([1, 100, 1000, 2**35], np.int64)
    assert CostRule().costs(lengths).tolist() == lengths.tolist()
    costs = CostRule(quadratic_tokens=1000).costs(lengths)
    assert costs[:3].tolist() == [1, 110, 2000]
    assert costs[3] > 2**35  # bounded, not wrapped


def test_a_missing_column_is_named() -> None:
    with pytest.raises(PlanError, match="the column 'num_slices'"):
        CostRule(image_tokens_per_slice=1, max_slices=1).lengths({"text_bytes": TEXT})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_per_sample", 0),
        ("text_tokens_per_1000_bytes", -1),
        ("text_tokens_per_1000_bytes", 0.25),
        ("quadratic_tokens", True),
        ("max_slices", 2**17 + 1),
    ],
)
def test_rules_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be"):
        CostRule(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_samples", 0),
        ("padded", 1),
        ("over_budget", "drop"),
    ],
)
def test_budgets_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"max_tokens": 10, "max_samples": 10, field: value}
    with pytest.raises(ConfigError, match=f"^{field} must be"):
        TokenBudget(**fields)


SPEC = BatchSpec(
    budget=TokenBudget(max_tokens=2**31 - 2, max_samples=2**24, padded=False, over_budget="truncate"),
    micro_batches_per_step=2**24,
    tail="repeat",
    lanes=2**16,
    window_bytes=2**63 - 1,
)


def test_json_there_and_back() -> None:
    assert BatchSpec.from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC
    lanes = BatchSpec(micro_batch_size=1, micro_batches_per_step=2, lanes=3, window_bytes=4)
    assert BatchSpec.from_json(json.loads(json.dumps(lanes.to_json()))) == lanes


def test_a_window_is_no_part_of_a_spec_without_lanes() -> None:
    one = BatchSpec(micro_batch_size=1, micro_batches_per_step=2, window_bytes=5)
    assert one == BatchSpec(micro_batch_size=1, micro_batches_per_step=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": None}, "token budget must be a JSON object"),
        ({"budget": {**SPEC.to_json()["budget"], "cost": {}}}, "cost rule must have the keys"),
        ({"lanes": 0}, "lanes must be an integer"),
        ({"micro_batch_size": 4}, "'micro_batch_size'] unknown"),
    ],
)
def test_other_objects_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BatchSpec.from_json({**SPEC.to_json(), **changes})


def test_parts_that_do_not_go_together_are_refused() -> None:
    budget = TokenBudget(max_tokens=10, max_samples=10)
    with pytest.raises(ConfigError, match=r"^lanes must be an integer in \[1, "):
        BatchSpec(budget=budget, micro_batches_per_step=2)
    with pytest.raises(ConfigError, match=r"^micro_batch_size must be left out where there is a budget"):
        BatchSpec(budget=budget, micro_batch_size=2, micro_batches_per_step=2, lanes=1)


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=20),
    st.sampled_from([0, 1, 250, 2**13]),
    st.sampled_from([0, 300]),
    st.sampled_from([(0, 0), (16, 8), (2**17, 2**17)]),
)
def test_short_words_hold_the_same_lengths(
    facts: list[tuple[int, int]], rate: int, most: int, image: tuple[int, int]
) -> None:
    rule = CostRule(
        text_tokens_per_1000_bytes=rate,
        max_text_tokens=most,
        image_tokens_per_slice=image[0],
        max_slices=image[1],
    )
    by_hand = []
    for text, slices in facts:
        tokens = -(-text * rate // 1000)
        by_hand.append(2 + (min(tokens, most) if most else tokens) + min(slices, image[1]) * image[0])
    for top in (2**32, 2**16, 200):  # where 32 bits do, and where they do not
        fits = [number for number, (text, _) in enumerate(facts) if text < top]
        columns = {
            "text_bytes": np.array([facts[number][0] for number in fits], np.uint32),
            "num_slices": np.array([facts[number][1] for number in fits], np.uint32),
        }
        expected = [by_hand[number] for number in fits]
        assert rule.short_lengths(columns).tolist() == expected
        assert rule.lengths(columns).tolist() == expected
        assert rule.lengths(columns).dtype == np.int64
        signed = {name: column.astype(np.int64) for name, column in columns.items()}
        assert rule.short_lengths(signed).tolist() == expected
