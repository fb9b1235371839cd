"""Change class ITERATION ORDER, for weights, classes and curricula; see ``test_order.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from shardflow.sampling import BatchSpec, EpochPlan, LoaderState, SampleLayout, TokenBudget
from shardflow.sampling.blend import BlendComponent, Mixture, blend_layout
from shardflow.sampling.layout import chosen_layout
from shardflow.sampling.weights import CodeArray, WeightClasses

pytestmark = pytest.mark.fast

Golden = Callable[[str, object], None]

DATASET_ID = "0123456789abcdef" * 4
NUM_ROWS = 6000
FULL = BatchSpec(micro_batch_size=3, micro_batches_per_step=4, tail="mask")
LANES = replace(FULL, lanes=8, window_bytes=60_000)
BUDGET = BatchSpec(
    budget=TokenBudget(max_tokens=8192, max_samples=16),
    micro_batches_per_step=4,
    tail="mask",
    lanes=8,
    window_bytes=60_000,
)
SPECS = {"full shuffle": FULL, "lanes": LANES, "budget": BUDGET}


@dataclass(frozen=True)
class ArithmeticCodes:
    """Classes by integer arithmetic only: the last of five is rare."""

    def __call__(self, start: int, stop: int) -> CodeArray:
        rows = np.arange(start, stop)
        return np.where(rows % 97 == 0, 4, rows * 40_503 % 4).astype(np.uint16)


WEIGHTS = {
    "weights": (np.array([[1, 2, 7, 0, 30]]), (0,)),
    "classes": (None, (0,)),
    "curriculum": (np.array([[1, 0, 0, 0, 0], [1, 1, 3, 1, 100]]), (0, 2)),
}


def made(name: str) -> tuple[Mixture, SampleLayout]:
    table = np.arange(NUM_ROWS)
    weights, starts = WEIGHTS[name]
    classes = WeightClasses(range(NUM_ROWS), ArithmeticCodes(), weights, 5, starts)
    component = BlendComponent(
        dataset_id=DATASET_ID,
        manifest_version=1,
        split="train",
        rows=range(NUM_ROWS),
        subset=None,
        count=2501,
        num_table_rows=NUM_ROWS,
        classes=classes,
    )
    mixture, listed = Mixture([component]), classes.listed()
    parts = [
        chosen_layout(
            listed[code],
            dataset_id=DATASET_ID,
            shard=table * 50 // NUM_ROWS,
            num_bytes=512 * (1 + table * 40_503 % 13),
            facts={"text_bytes": 60 + (table * 40_503 % 131) ** 2, "num_slices": table % 40},
        )
        for code in component.strata
    ]
    return mixture, blend_layout(mixture, parts)


def digest(plan: EpochPlan) -> str:
    rows = np.concatenate([plan.step(step)[0].ravel() for step in range(plan.num_steps)])
    return f"{plan.num_steps} steps {hashlib.sha256(rows.astype('<i8').tobytes()).hexdigest()[:32]}"


def test_order_is_the_recorded_one(golden: Golden) -> None:
    found: dict[str, object] = {}
    for name in WEIGHTS:
        mixture, layout = made(name)
        state = LoaderState(
            dataset_id=DATASET_ID,
            manifest_version=1,
            split="train",
            seed=7,
            spec=FULL,
            sampling=mixture.digest,
        )
        found[name] = {
            "state": state.to_json(),
            "draws of classes": {str(epoch): mixture.counts(epoch).tolist() for epoch in (0, 1, 2, 17)},
            "orders": {
                f"{kind}, epoch {epoch}": digest(EpochPlan(mixture, spec, seed=7, epoch=epoch, layout=layout))
                for kind, spec in SPECS.items()
                for epoch in (0, 3, 17)
            },
        }
    golden("order-weights", found)
