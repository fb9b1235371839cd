"""Change class ITERATION ORDER, for subsets and blends; see ``test_order.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from shardflow.sampling import BatchSpec, EpochPlan, LoaderState, SampleLayout, TokenBudget
from shardflow.sampling.blend import (
    BLEND_SPLIT,
    Blend,
    BlendComponent,
    blend_layout,
    draws_by_repeat,
    draws_by_weight,
    split_draws,
)
from shardflow.sampling.layout import RowSet, chosen_layout, rows_digest, select_rows

pytestmark = pytest.mark.fast

Golden = Callable[[str, object], None]

DATASET_ID = "0123456789abcdef" * 4
FULL = BatchSpec(micro_batch_size=3, micro_batches_per_step=4, tail="mask")
SPECS = {
    "full shuffle": FULL,
    "lanes": BatchSpec(
        micro_batch_size=3, micro_batches_per_step=4, tail="mask", lanes=8, window_bytes=60_000
    ),
    "budget": BatchSpec(
        budget=TokenBudget(max_tokens=8192, max_samples=16),
        micro_batches_per_step=4,
        tail="mask",
        lanes=8,
        window_bytes=60_000,
    ),
}
# Rows of the table, shards, every how many rows are chosen, repeat. Component 3 is component 1 again.
PARTS = [(900, 30, 1, 1.0), (5000, 50, 3, 0.3), (900, 30, 1, 0.25), (7, 1, 1, 2.5)]


def made(num_rows: int, num_shards: int, every: int, repeat: float) -> tuple[BlendComponent, SampleLayout]:
    """A table by integer arithmetic only."""
    table = np.arange(num_rows)
    shard = table * num_shards // num_rows
    num_bytes = 512 * (1 + table * 40_503 % 13)
    before = np.cumsum(num_bytes) - num_bytes
    facts = {"text_bytes": 60 + (table * 40_503 % 131) ** 2, "num_slices": table % 40}
    rows = select_rows(range(num_rows), lambda low, high: np.arange(low, high) % every == 0)
    if isinstance(rows, RowSet):
        layout = chosen_layout(rows, dataset_id=DATASET_ID, shard=shard, num_bytes=num_bytes, facts=facts)
    else:
        layout = SampleLayout.of_columns(
            rows,
            dataset_id=DATASET_ID,
            shard=shard,
            offset_bytes=before - before[np.searchsorted(shard, shard)],
            num_bytes=num_bytes,
            facts=facts,
        )
    component = BlendComponent(
        dataset_id=DATASET_ID,
        manifest_version=1,
        split="train",
        rows=rows,
        subset=rows_digest(rows) if isinstance(rows, RowSet) else None,
        count=draws_by_repeat(len(rows), repeat),
        num_table_rows=num_rows,
    )
    return component, layout


def digest(plan: EpochPlan) -> str:
    rows = np.concatenate([plan.step(step)[0].ravel() for step in range(plan.num_steps)])
    return f"{plan.num_steps} steps {hashlib.sha256(rows.astype('<i8').tobytes()).hexdigest()[:32]}"


def test_order_is_the_recorded_one(golden: Golden) -> None:
    parts = [made(*part) for part in PARTS]
    blend = Blend([component for component, _ in parts])
    joined = blend_layout(blend, [layout for _, layout in parts])
    subset, subset_layout = parts[1]
    assert isinstance(subset.rows, RowSet)
    run = LoaderState(
        dataset_id=blend.digest,
        manifest_version=0,
        split=BLEND_SPLIT,
        seed=7,
        spec=FULL,
        components=blend.states(),
    )
    chosen = LoaderState(
        dataset_id=DATASET_ID, manifest_version=1, split="train", seed=7, spec=FULL, subset=subset.subset
    )
    golden(
        "order-blends",
        {
            "draws": [component.count for component in blend.components],
            "draws by weight": draws_by_weight([0.5, 0.25, 0.25, 1 / 3], 1001),
            "first draws of parts of 9, 2 and 31": {
                str(count): split_draws(np.array([9, 2, 31]), count).tolist()
                for count in (0, 1, 5, 20, 41, 42)
            },
            "blend digest": blend.digest,
            "states": {"blend": run.to_json(), "subset": chosen.to_json()},
            "subsets": {
                f"{name}, epoch {epoch}": digest(
                    EpochPlan(subset.rows, spec, seed=7, epoch=epoch, layout=subset_layout)
                )
                for name, spec in SPECS.items()
                for epoch in (0, 3)
            },
            "blends": {
                f"{name}, epoch {epoch}": digest(EpochPlan(blend, spec, seed=7, epoch=epoch, layout=joined))
                for name, spec in SPECS.items()
                for epoch in (0, 1, 2, 17)
            },
        },
    )
