"""Change class ITERATION ORDER: a run of an older version continues with the same samples.

If a digest here changes, every run that was stopped before the change continues with other samples. Then
``PLAN_VERSION`` is raised, which refuses such a resume, and the CHANGELOG says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from shardflow.sampling import (
    BatchSpec,
    CostRule,
    EpochPlan,
    LoaderState,
    Permutation,
    SampleLayout,
    TokenBudget,
)
from shardflow.sampling.plan import PLAN_VERSION
from shardflow.sampling.spec import TAILS
from shardflow.seeds import derive

pytestmark = pytest.mark.fast

Golden = Callable[[str, object], None]

# Both sides of the bound between table and network, squares, primes, and what does not fit into 32 bits.
SIZES = [
    1,
    2,
    3,
    4,
    5,
    10,
    1000,
    4095,
    4096,
    4097,
    4225,
    10_007,
    1_000_000,
    200_000_000,
    2**33 + 1,
    2**40,
    2**48,
]
KEYS = [0, 1, 2**64 - 1, 0x0123_4567_89AB_CDEF]
# samples, B, M, seed, epoch
EPOCHS = [
    (1, 1, 1, 0, 0),
    (29, 2, 4, 7, 0),
    (29, 2, 4, 7, 1),
    (29, 2, 4, 8, 0),
    (5000, 4, 8, 2**63 - 1, 12),
    (20_011, 16, 3, 7, 3),
]


def digest(values: npt.NDArray[np.int64]) -> str:
    """First 128 bits of the SHA-256 over little-endian 64-bit integers."""
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()[:32]


def permutation_digest(size: int, key: int) -> str:
    """Over the first 2,000 positions, 2,000 spread ones, and the last 2,000, or all."""
    spread = np.arange(2000) * (size // 2000)
    positions = (
        np.arange(size)
        if size <= 6000
        else np.concatenate([np.arange(2000), spread, np.arange(size - 2000, size)])
    )
    return digest(Permutation(size, key)(positions))


def epoch_digest(population: range, spec: BatchSpec, seed: int, epoch: int) -> str:
    plan = EpochPlan(population, spec, seed=seed, epoch=epoch)
    rows = [plan.step(step)[0].ravel() for step in range(plan.num_steps)]
    return f"{plan.num_steps} steps {digest(np.concatenate(rows))}"


def test_order_is_the_recorded_one(golden: Golden) -> None:
    golden(
        "order",
        {
            "plan_version": PLAN_VERSION,
            "seeds": {
                f"{seed} {label} {counters}": derive(seed, label, *counters)
                for seed, label, counters in (
                    (0, "epoch-order", (0,)),
                    (7, "epoch-order", (1,)),
                    (7, "x", (1, 2)),
                )
            },
            "permutations_in_full": {
                str(size): Permutation(size, key=1)(np.arange(size)).tolist() for size in (1, 2, 3, 10, 20)
            },
            "permutations": {
                f"size {size} key {key}": permutation_digest(size, key) for size in SIZES for key in KEYS
            },
            "epochs": {
                f"{n} samples B {size} M {per_step} seed {seed} epoch {epoch} tail {tail}": epoch_digest(
                    range(100, 100 + n),
                    BatchSpec(micro_batch_size=size, micro_batches_per_step=per_step, tail=tail),
                    seed,
                    epoch,
                )
                for n, size, per_step, seed, epoch in EPOCHS
                for tail in TAILS
            },
        },
    )


BUDGET = TokenBudget(
    max_tokens=4096,
    max_samples=32,
    cost=CostRule(image_tokens_per_slice=8, max_slices=16, quadratic_tokens=2048),
)
PACKED = TokenBudget(max_tokens=4096, max_samples=32, padded=False, over_budget="skip")
LANE_SPECS = {
    "fixed": BatchSpec(micro_batch_size=4, micro_batches_per_step=8, lanes=4, window_bytes=60_000),
    "fixed, 64 lanes": BatchSpec(micro_batch_size=3, micro_batches_per_step=5, lanes=64),
    "padded": BatchSpec(budget=BUDGET, micro_batches_per_step=8, lanes=8, window_bytes=200_000),
    "packed": BatchSpec(budget=PACKED, micro_batches_per_step=6, lanes=4, window_bytes=200_000),
}


def plain_layout(num_samples: int, num_shards: int) -> SampleLayout:
    """A table by integer arithmetic only: NumPy does not promise its random numbers."""
    rows = np.arange(num_samples)
    shard = rows * num_shards // num_samples
    num_bytes = 512 * (1 + rows * 40_503 % 13)
    before = np.cumsum(num_bytes) - num_bytes
    return SampleLayout.of_columns(
        range(num_samples),
        dataset_id="0123456789abcdef" * 4,
        shard=shard.astype(np.uint32),
        offset_bytes=(before - before[np.searchsorted(shard, shard)]).astype(np.uint64),
        num_bytes=num_bytes.astype(np.uint64),
        facts={"text_bytes": 60 + (rows * 40_503 % 131) ** 2, "num_slices": rows % 40},
    )


def lane_digest(spec: BatchSpec, num_shards: int) -> str:
    layout = plain_layout(3001, num_shards)
    plan = EpochPlan(layout.population, spec, seed=7, epoch=2, layout=layout)
    micros = [
        plan.micro_batch(step, micro).rows
        for step in range(plan.num_steps)
        for micro in range(spec.micro_batches_per_step)
    ]
    marked = [np.append(rows, -2) for rows in micros]  # where one ends is part of the order
    return f"{plan.num_steps} steps {digest(np.concatenate(marked))}"


def test_order_in_lanes_is_the_recorded_one(golden: Golden) -> None:
    golden(
        "order-lanes",
        {
            "plan_version": PLAN_VERSION,
            "epochs": {
                f"{name}, {num_shards} shards, tail {tail}": lane_digest(replace(spec, tail=tail), num_shards)
                for name, spec in LANE_SPECS.items()
                for num_shards in (7, 300)
                for tail in TAILS
            },
        },
    )


def test_batch_specs_are_the_recorded_ones(golden: Golden) -> None:
    """Change class CHECKPOINT STATE: what a state says of lanes and budgets."""
    golden("batch-specs", {name: spec.to_json() for name, spec in LANE_SPECS.items()})


def test_loader_state_is_the_recorded_one(golden: Golden) -> None:
    """Change class CHECKPOINT STATE, and the identity of a plan."""
    spec = BatchSpec(micro_batch_size=4, micro_batches_per_step=8, tail="mask")
    state = LoaderState(
        dataset_id="0123456789abcdef" * 4,
        manifest_version=2,
        split="train",
        seed=7,
        spec=spec,
        epoch=3,
        step=21,
    )
    golden("loader-state", state.to_json())


def test_a_state_of_version_1_is_read() -> None:
    recorded = json.loads((Path(__file__).parent / "loader-state-1.json").read_text(encoding="utf-8"))
    again = LoaderState.from_json(recorded)
    assert {**recorded, "version": 2, "subset": None, "components": []} == again.to_json()
