"""Time and memory to open a plan of 200 million rows with weights, and to find micro-batches of it.

    python benchmarks/plan/weights.py [ROWS]

Weights are a generated column of small integers in a mapped file, as attached tables store them. Memory is
what the process holds beyond the mapped column.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from shardflow.sampling import BatchSpec, EpochPlan
from shardflow.sampling.blend import BlendComponent, Mixture
from shardflow.sampling.weights import CodeArray, Levels, WeightClasses, find_levels

_BLOCK = 2**20


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


def main(num_rows: int) -> None:
    """Measure, and print what was found."""
    spec = BatchSpec(micro_batch_size=64, micro_batches_per_step=64)
    with tempfile.TemporaryDirectory() as folder:
        for name, most in {"5 weights": 5, "200 weights": 200}.items():
            path = Path(folder) / "column"
            column = np.memmap(path, np.uint8, "w+", shape=(num_rows,))
            random = np.random.default_rng(7)
            for start in range(0, num_rows, _BLOCK):
                stop = min(start + _BLOCK, num_rows)
                column[start:stop] = random.integers(0, most, stop - start, np.uint8)
            started, cpu_started = time.perf_counter(), time.process_time()
            plan = EpochPlan(_opened(column, num_rows), spec, seed=7, epoch=3)
            opened_s = time.perf_counter() - started
            cpu_s = time.process_time() - cpu_started
            started = time.process_time()
            num_steps = 4
            for step in range(num_steps):
                plan.step(step * plan.num_steps // num_steps)
            step_s = (time.process_time() - started) / num_steps
            tracemalloc.start()
            held = EpochPlan(_opened(column, num_rows), spec, seed=7, epoch=3)
            _, most_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert held.num_steps == plan.num_steps
            print(
                f"{num_rows:,} rows, {name}: opened in {opened_s:.2f} s ({cpu_s:.2f} s of CPU) with "
                f"{most_bytes / 2**20:.0f} MiB; a step of {spec.samples_per_step:,} samples in "
                f"{step_s * 1000:.0f} ms of CPU"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000_000)
