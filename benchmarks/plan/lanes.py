"""What lanes and windows cost and give: pooled share, shards open and read, shuffle, padding, balance.

    python -m benchmarks.plan.lanes --output benchmarks/results/plan_lanes.json

Made-up tables with report-like lengths (log-normal, median 1,300 bytes); no byte of a shard is read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.about import processor
from benchmarks.plan.scale import DATASET_ID
from shardflow import __version__
from shardflow.sampling import (
    BatchSpec,
    CostRule,
    EpochPlan,
    RankSchedule,
    SampleLayout,
    TokenBudget,
    choose_lanes,
    measure_plan,
    with_lanes,
)
from shardflow.sampling.budget_batches import BudgetMicroBatches


def make_layout(num_samples: int, num_shards: int) -> SampleLayout:
    rng = np.random.default_rng(0)
    rows = np.arange(num_samples)
    shard = rows * num_shards // num_samples
    num_bytes = rng.integers(512, 20_000, num_samples)
    before = np.cumsum(num_bytes) - num_bytes
    return SampleLayout.of_columns(
        range(num_samples),
        dataset_id=DATASET_ID,
        shard=shard.astype(np.uint32),
        offset_bytes=(before - before[np.searchsorted(shard, shard)]).astype(np.uint64),
        num_bytes=num_bytes.astype(np.uint64),
        facts={"text_bytes": np.clip(rng.lognormal(7.2, 0.6, num_samples), 8, 20_000).astype(np.uint32)},
    )


def sorted_over_the_epoch(plan: EpochPlan) -> dict[str, float] | None:
    """Return the balance of steps that no dealing betters: all micro-batches ranked together."""
    micros = plan.lane_plan.micros if plan.lane_plan else None
    if not isinstance(micros, BudgetMicroBatches):
        return None
    per_step = plan.spec.micro_batches_per_step
    costs = np.sort([micros.cost(number)[0] for number in range(plan.num_steps * per_step)])
    steps = costs.reshape(-1, per_step)
    ratios = steps.max(axis=1) / steps.mean(axis=1)
    return {
        "imbalance": float(ratios.mean()),
        "imbalance_p99": float(np.quantile(ratios, 0.99)),
        "imbalance_max": float(ratios.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    budget = TokenBudget(max_tokens=16_384, max_samples=64, cost=CostRule(quadratic_tokens=2048))
    fixed = BatchSpec(micro_batch_size=8, micro_batches_per_step=64)
    filled = BatchSpec(budget=budget, micro_batches_per_step=64, lanes=1)
    cases = [
        (num_samples, num_shards, replace(spec, lanes=lanes, window_bytes=window))
        for num_samples, num_shards in ((400_000, 400), (400_000, 40), (20_000, 40))
        for spec in (fixed, filled)
        for lanes in (0, 8, 64)
        for window in (2**24, 2**26, 2**28)
        if (lanes or spec is fixed) and (lanes or window == 2**24)
    ]
    sizes = ((20_000, 40), (100_000, 100), (400_000, 400), (1_600_000, 1600))
    linear = replace(filled, budget=replace(budget, cost=CostRule()))
    cases += [(*size, with_lanes(spec, make_layout(*size))) for size in sizes for spec in (filled, linear)]
    rows = []
    for num_samples, num_shards, spec in cases:
        layout = make_layout(num_samples, num_shards)
        plan = EpochPlan(layout.population, spec, seed=7, epoch=0, layout=layout)
        schedule = RankSchedule(64, 64, lanes=spec.lanes, ranks_per_node=8)
        found = measure_plan(plan, layout, schedule, ranks_per_node=8).to_json()
        lanes = plan.lane_plan.summary().to_json() if plan.lane_plan else None
        rows.append(
            {
                "samples": num_samples,
                "shards": num_shards,
                "kind": spec.kind,
                "lanes": spec.lanes,
                "window_bytes": spec.window_bytes if spec.lanes else None,
                "chosen_lanes": choose_lanes(layout, spec),
                "quadratic_tokens": spec.budget.cost.quadratic_tokens if spec.budget else None,
                "steps": plan.num_steps,
                "plan": lanes,
                "measured": found,
                "sorted_over_the_epoch": sorted_over_the_epoch(plan),
            }
        )
    result = {
        "command": " ".join(["python", "-m", "benchmarks.plan.lanes", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "shardflow": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "hardware": {"processor": processor(), "cores": os.cpu_count()},
        "ranks": 64,
        "ranks_per_node": 8,
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
