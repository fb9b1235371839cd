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

from benchmarks.plan.scale import DATASET_ID, processor
from shardflow import __version__
from shardflow.epochs import (
    BatchSpec,
    CostRule,
    EpochPlan,
    RankSchedule,
    SampleLayout,
    TokenBudget,
    choose_lanes,
    measure_plan,
)


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
                "plan": lanes,
                "measured": found,
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
