"""The size of image that a sample gets: keyed, as likely as its weight, and frozen."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import ConfigError
from shardflow.sampling import (
    BatchSpec,
    CostRule,
    EpochPlan,
    ImageBucket,
    SampleLayout,
    TileRule,
    TokenBudget,
)
from shardflow.sampling.image_sizes import BucketDraw

pytestmark = pytest.mark.fast

SMALL = ImageBucket(weight=3, max_slices=4, tokens_per_slice=16)
LARGE = ImageBucket(weight=1, max_slices=8, tokens_per_slice=64)
RULE = CostRule(buckets=(SMALL, LARGE))


def test_choices_are_frozen() -> None:
    """Change class ITERATION ORDER: another choice is another plan."""
    chosen = BucketDraw.of(7, 2).choose(np.arange(24), [3, 1, 2])
    assert "".join(map(str, chosen.tolist())) == "000201010000202002210000"


def test_a_bucket_comes_as_often_as_its_weight_says() -> None:
    chosen = BucketDraw.of(1, 0).choose(np.arange(60_000), [3, 1, 2])
    assert (np.abs(np.bincount(chosen, minlength=3) - [30_000, 10_000, 20_000]) < 500).all()


def test_another_epoch_and_another_seed_choose_others_and_neighbours_are_independent() -> None:
    rows = np.arange(20_000)
    drawn = [BucketDraw.of(seed, epoch).choose(rows, [1, 1]) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for one in range(3):
        for other in range(one):
            assert abs((drawn[one] == drawn[other]).mean() - 0.5) < 0.02
        assert abs((drawn[one][1:] == drawn[one][:-1]).mean() - 0.5) < 0.02


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.integers(0, 2**63))
def test_a_choice_is_the_rows_own(rows: list[int], key: int) -> None:
    """Asked for alone or among others, in any integer type."""
    together = BucketDraw(key).choose(np.array(rows), [1, 5, 2])
    for row, chosen in zip(rows, together.tolist(), strict=True):
        assert BucketDraw(key).choose(np.array([row], np.uint64), [1, 5, 2]).tolist() == [chosen]


def facts(num_samples: int = 500) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "text_bytes": generator.integers(0, 4000, num_samples).astype(np.uint32),
        "num_slices": generator.integers(0, 20, num_samples).astype(np.uint32),
        "rows": generator.integers(1, 3000, num_samples).astype(np.uint32),
        "columns": generator.integers(1, 3000, num_samples).astype(np.uint32),
        "row": np.arange(num_samples),
    }


def test_the_length_of_a_sample_is_that_of_its_bucket() -> None:
    columns, draw = facts(), BucketDraw.of(3, 4)
    chosen = draw.choose(columns["row"], [3, 1])
    text = -(-columns["text_bytes"].astype(int) * 250 // 1000) + 2
    image = [
        min(int(number), (4, 8)[bucket]) * (16, 64)[bucket]
        for number, bucket in zip(columns["num_slices"], chosen, strict=True)
    ]
    lengths = RULE.lengths(columns, draw)
    assert (lengths == text + image).all()
    wide = {name: column.astype(np.int64) for name, column in columns.items()}
    assert (RULE.lengths(wide, draw) == lengths).all()
    assert RULE.used_facts() == ("text_bytes", "num_slices", "row")


def test_without_an_epoch_a_sample_counts_with_the_mean() -> None:
    columns = facts()
    epochs = [RULE.lengths(columns, BucketDraw.of(3, epoch)) for epoch in range(400)]
    assert np.abs(np.mean(epochs, axis=0) - RULE.lengths(columns)).max() < 0.2 * 8 * 64


def test_tiles_count_what_an_image_is_cut_into() -> None:
    tiles = TileRule(rows=224, columns=224, max_tiles=12)
    rule = CostRule(max_slices=1, image_tokens_per_slice=10, tiles=tiles, text_tokens_per_1000_bytes=0)
    columns = {
        "num_slices": np.array([1, 1, 1, 0, 3], np.uint32),
        "rows": np.array([224, 225, 3000, 500, 100], np.uint32),
        "columns": np.array([200, 448, 2500, 500, 100], np.uint32),
    }
    # 1; 2 x 2 and an overview; 14 x 12 cut down to 4 x 3 and an overview; no slice; one of the slices.
    assert rule.lengths(columns).tolist() == [2 + 10, 2 + 50, 2 + 130, 2, 2 + 10]
    assert set(rule.used_facts()) == {"num_slices", "rows", "columns"}


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 40), st.integers(1, 600))
def test_a_grid_of_tiles_covers_the_image_or_is_as_large_as_allowed(
    rows: int, columns: int, max_tiles: int, side: int
) -> None:
    rule = TileRule(rows=side, columns=side, max_tiles=max_tiles)
    high, wide = (int(grid[0]) for grid in rule.grids(np.array([rows]), np.array([columns])))
    assert high >= 1
    assert wide >= 1
    assert high * wide <= max_tiles
    covers = high * side >= rows and wide * side >= columns
    assert covers or high * wide + max(high, wide) > max_tiles
    assert int(rule.num_places(np.array([rows]), np.array([columns]))[0]) <= rule.most_places


def test_rules_that_know_neither_keep_their_identity() -> None:
    assert set(CostRule().to_json()) == {
        "text_tokens_per_1000_bytes", "max_text_tokens", "image_tokens_per_slice", "max_slices",
        "tokens_per_sample", "quadratic_tokens",
    }  # fmt: skip


@pytest.mark.parametrize(
    "rule",
    [RULE, CostRule(max_slices=2, image_tokens_per_slice=3, tiles=TileRule(rows=2, columns=3, max_tiles=4))],
)
def test_rules_survive_being_written_and_read(rule: CostRule) -> None:
    assert CostRule.from_json(json.loads(json.dumps(rule.to_json()))) == rule


@pytest.mark.parametrize(
    "change",
    [
        {"buckets": [[1, 2]]}, {"buckets": [[0, 1, 1]]}, {"buckets": 3}, {"buckets": []}, {"tiles": {}},
        {"tiles": {"rows": 1}}, {"tiles": None}, {"max_slices": 3}, {"buckets": [[1, 1, 1]] * 17},
        {"buckets": [["1", 1, 1]]}, {"more": 1},
    ],
)  # fmt: skip
def test_a_damaged_rule_is_refused(change: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError):
        CostRule.from_json({**RULE.to_json(), **change})


def test_too_many_image_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="image tokens"):
        CostRule(
            max_slices=2**17, image_tokens_per_slice=2**17, tiles=TileRule(rows=1, columns=1, max_tiles=2)
        )


def test_the_plan_fills_micro_batches_by_the_sizes_of_the_epoch() -> None:
    """What a micro-batch holds, counted anew from the choices, is within the budget."""
    num_samples = 400
    columns = facts(num_samples)
    budget = TokenBudget(max_tokens=1200, max_samples=64, padded=False, cost=RULE)
    spec = BatchSpec(budget=budget, micro_batches_per_step=2, tail="mask", lanes=2, window_bytes=50_000)
    layout = SampleLayout.of_columns(
        range(num_samples),
        dataset_id="a" * 64,
        shard=np.arange(num_samples) // 50,
        offset_bytes=np.arange(num_samples) % 50 * 1000,
        num_bytes=np.full(num_samples, 1000),
        facts=columns,
    )
    orders = []
    for epoch in (0, 1):
        plan = EpochPlan(range(num_samples), spec, seed=5, epoch=epoch, layout=layout)
        lengths = RULE.lengths(columns, BucketDraw.of(5, epoch))
        seen: list[int] = []
        for step in range(plan.num_steps):
            for micro in range(2):
                rows = plan.micro_batch(step, micro).rows
                rows = rows[rows >= 0]
                assert len(rows) <= 1 or lengths[rows].sum() <= 1200
                seen += rows.tolist()
        assert sorted(seen) == list(range(num_samples))
        orders.append(seen)
    assert orders[0] != orders[1]
