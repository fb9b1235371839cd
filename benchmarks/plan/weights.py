"""Time and memory to open a plan of 200 million rows with weights, and to find micro-batches of it.

    python -m benchmarks.plan.weights [--rows N] [--repeats N] --output benchmarks/results/plan_weights.json

Weights are a generated column of small integers in a mapped file, as attached tables store them. Memory is
what the process holds beyond the mapped column.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from benchmarks.about import about_run
from shardflow.sampling import BatchSpec, EpochPlan
from shardflow.sampling.blend import BlendComponent, Mixture
from shardflow.sampling.weights import CodeArray, Levels, WeightClasses, find_levels

_BLOCK = 2**20
_STEPS = 4


class _Codes:
    def __init__(self, column: np.memmap, levels: Levels) -> None:
        self._column, self._levels = column, levels

    def __call__(self, start: int, stop: int) -> CodeArray:
        return self._levels.codes(np.asarray(self._column[start:stop]))


def _opened(column: np.memmap, count: int) -> Mixture:
    blocks = (np.asarray(column[start : start + _BLOCK]) for start in range(0, len(column), _BLOCK))
    levels = find_levels(blocks, name="weight")
    rows = range(len(column))
    classes = WeightClasses(rows, _Codes(column, levels), levels.weights[None], len(levels.weights))
    component = BlendComponent(
        dataset_id="0" * 64,
        manifest_version=1,
        split="train",
        rows=rows,
        subset=None,
        count=count,
        num_table_rows=len(column),
        classes=classes,
    )
    return Mixture([component])


def measure(name: str, most: int, num_rows: int, repeats: int) -> dict[str, object]:
    """Open the plan of one column several times, and find some of its steps."""
    spec = BatchSpec(micro_batch_size=64, micro_batches_per_step=64)
    with tempfile.TemporaryDirectory() as folder:
        column = np.memmap(Path(folder) / "column", np.uint8, "w+", shape=(num_rows,))
        random = np.random.default_rng(7)
        for start in range(0, num_rows, _BLOCK):
            stop = min(start + _BLOCK, num_rows)
            column[start:stop] = random.integers(0, most, stop - start, np.uint8)
        opened_s, cpu_s = [], []
        for _ in range(repeats):
            started, cpu_started = time.perf_counter(), time.process_time()
            plan = EpochPlan(_opened(column, num_rows), spec, seed=7, epoch=3)
            opened_s.append(round(time.perf_counter() - started, 3))
            cpu_s.append(round(time.process_time() - cpu_started, 3))
        started = time.process_time()
        for step in range(_STEPS):
            plan.step(step * plan.num_steps // _STEPS)
        step_s = (time.process_time() - started) / _STEPS
        tracemalloc.start()
        EpochPlan(_opened(column, num_rows), spec, seed=7, epoch=3)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return {
        "weights": name,
        "opened_s": opened_s,
        "median_opened_s": statistics.median(opened_s),
        "cpu_s": cpu_s,
        "peak_bytes": most_bytes,
        "samples_per_step": spec.samples_per_step,
        "cpu_s_per_step": round(step_s, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [measure(f"{most} values", most, arguments.rows, arguments.repeats) for most in (5, 200)]
    result = {
        "what": "opening a plan with weights, a generated mapped column of uint8; memory beyond the column",
        "command": " ".join(["python", "-m", "benchmarks.plan.weights", *sys.argv[1:]]),
        **about_run(["shardflow", "numpy"]),
        "goal_seconds": 2,
        "goal_bytes": 150_000_000,
        "rows": arguments.rows,
        "measured": rows,
    }
    text = json.dumps(result, indent=1)
    arguments.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
