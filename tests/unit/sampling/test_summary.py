"""The numbers that are reported before step 0."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shardflow.sampling import BatchSpec, EpochPlan, PlanSummary, RankSchedule
from shardflow.sampling.spec import Tail

pytestmark = pytest.mark.fast


def summary_of(num_samples: int, tail: Tail, world_size: int) -> PlanSummary:
    spec = BatchSpec(micro_batch_size=4, micro_batches_per_step=8, tail=tail)
    return EpochPlan(range(num_samples), spec, seed=7, epoch=2).summary(RankSchedule(8, world_size))


def test_every_number() -> None:
    assert summary_of(1000, "repeat", 3).to_json() == {
        "seed": 7,
        "epoch": 2,
        "tail": "repeat",
        "num_samples": 1000,
        "num_steps": 32,
        "num_dropped": 0,
        "num_repeated": 24,
        "num_padding_slots": 0,
        "micro_batch_size": 4,
        "micro_batches_per_step": 8,
        "samples_per_step": 32,
        "world_size": 3,
        "num_micro_batches_per_rank_per_step": 3,
        "num_micro_batches_per_rank": 96,
        "num_fillers_per_step": 1,
        "efficiency": 8 / 9,
    }


def test_numbers_from_numpy_are_written_as_json() -> None:
    spec = BatchSpec(micro_batch_size=np.int64(4), micro_batches_per_step=np.int64(8))  # type: ignore[arg-type]
    plan = EpochPlan(range(np.int64(1000)), spec, seed=np.int64(7), epoch=np.int64(2))  # type: ignore[arg-type]
    text = json.dumps(plan.summary(RankSchedule(np.int64(8), np.int64(3))).to_json())  # type: ignore[arg-type]
    assert json.loads(text)["num_steps"] == 31


@pytest.mark.parametrize(
    ("num_samples", "tail", "line"),
    [
        (1000, "drop", "  tail drop    samples left out of this epoch: 8"),
        (1000, "repeat", "  tail repeat  slots that repeat a sample, at full weight: 24"),
        (1000, "mask", "  tail mask    padding slots of weight 0: 24"),
        (1024, "mask", "  tail mask    the samples fill every step"),
    ],
)
def test_lines_say_what_the_tail_did(num_samples: int, tail: Tail, line: str) -> None:
    assert line in summary_of(num_samples, tail, 8).lines()


def test_lines_say_what_a_world_size_costs() -> None:
    assert summary_of(1000, "mask", 8).lines()[-1] == "  efficiency   100.0%"
    title, steps, tail, ranks, efficiency = summary_of(1000, "mask", 3).lines()
    assert title == "epoch 2 with seed 7: 1,000 samples"
    assert steps == "  steps        32 of 32 samples (8 micro-batches of 4)"
    assert tail == "  tail mask    padding slots of weight 0: 24"
    assert ranks == "  ranks        3, each runs 3 micro-batches a step, 96 in the epoch"
    assert efficiency.startswith(
        "  efficiency   88.9%, because the ranks do not divide the micro-batches of a step"
    )
    assert efficiency.endswith("padding micro-batches in every step: 1")
