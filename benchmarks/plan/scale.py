"""An epoch of 200 million samples in 40,000 shards: its boundaries, memory, and how fast a seek is.

    python -m benchmarks.plan.scale --output benchmarks/results/plan_scale.json

The samples table is made up (columns that the plan reads, 4.8 GB, in a temporary folder) and memory-mapped.
Everything runs in one thread of this process; private memory is RssAnon, sampled every 5 ms. Wall and
processor time of every repetition are given as measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.about import processor
from shardflow import __version__
from shardflow.sampling import BatchSpec, CostRule, EpochPlan, SampleLayout, TokenBudget

DATASET_ID = "0123456789abcdef" * 4
BLOCK = 2**22


def make_table(folder: Path, num_samples: int, num_shards: int) -> None:
    """Write the columns, block by block.

    Report-like lengths (log-normal, median 1,300 bytes), studies of 0.5 to 20 KB, so that a shard of 5,000
    samples is some 50 MB.
    """
    rng = np.random.default_rng(0)
    types = {"shard": "<u4", "offset_bytes": "<u8", "num_bytes": "<u8", "text_bytes": "<u4"}
    columns = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (num_samples,))
        for name, dtype in types.items()
    }
    carried, last_shard = 0, 0
    for start in range(0, num_samples, BLOCK):
        rows = np.arange(start, min(num_samples, start + BLOCK))
        shard = rows * num_shards // num_samples
        num_bytes = rng.integers(512, 20_000, len(rows))
        before = np.concatenate(([0], np.cumsum(num_bytes)[:-1]))
        firsts = np.searchsorted(shard, shard)
        offsets = before - before[firsts]
        offsets[shard == last_shard] += carried
        ends = shard == shard[-1]
        carried, last_shard = int(offsets[-1] + num_bytes[-1]), int(shard[ends][0])
        columns["shard"][rows], columns["offset_bytes"][rows] = shard, offsets
        columns["num_bytes"][rows] = num_bytes
        columns["text_bytes"][rows] = np.clip(rng.lognormal(7.2, 0.6, len(rows)), 8, 20_000)
    for column in columns.values():
        column.flush()


def private_bytes(process: int | str = "self") -> int:
    """Private memory of a process."""
    with Path(f"/proc/{process}/status").open(encoding="ascii") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """The largest private memory while the body runs, above what there was at its start."""

    def __enter__(self) -> Peak:
        self.before = self.peak = private_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, private_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(layout: SampleLayout, spec: BatchSpec, *, repeats: int) -> dict[str, object]:
    """Measure one batch spec."""
    found: dict[str, object] = {"batch": spec.to_json()}
    with Peak() as memory:
        start = time.perf_counter()
        plan = EpochPlan(layout.population, spec, seed=7, epoch=0, layout=layout)
        found["first_epoch_with_lanes_s"] = time.perf_counter() - start
        boundaries, processor_s = [], []
        for epoch in range(1, 1 + repeats):
            start, used = time.perf_counter(), time.process_time()
            plan = plan.for_epoch(epoch)
            boundaries.append(time.perf_counter() - start)
            processor_s.append(time.process_time() - used)
        found["boundaries_of_an_epoch_s"] = boundaries
        found["boundaries_of_an_epoch_processor_s"] = processor_s
        found["num_steps"] = plan.num_steps
        # A rank of 64 on 8 nodes of 8: it runs micro-batch 0 of every step, of one lane where L divides M.
        seeks, seek_processor_s, rows = [], [], 0
        for number in range(20):
            cold = plan.for_epoch(plan.epoch) if number == 0 else plan
            step = (number * 7919 + 13) * plan.num_steps // (20 * 7919 + 13)
            start, used = time.perf_counter(), time.process_time()
            cold.micro_batch(step, 0)
            seeks.append(time.perf_counter() - start)
            seek_processor_s.append(time.process_time() - used)
        found["seek_one_lane_s"] = seeks
        found["seek_one_lane_processor_s"] = seek_processor_s
        start, used, first = time.perf_counter(), time.process_time(), plan.num_steps // 3
        for step in range(first, first + max(1, plan.num_steps // 200)):
            for micro in range(0, spec.micro_batches_per_step, 8):
                rows += len(plan.micro_batch(step, micro).rows)
        took, used = time.perf_counter() - start, time.process_time() - used
        found["materialised"] = {
            "samples": rows,
            "s": took,
            "processor_s": used,
            "samples_per_processor_s": rows / used,
        }
    found["peak_private_bytes_above_start"] = memory.peak - memory.before
    found["process_private_bytes"] = memory.peak
    found["median_boundaries_processor_s"] = statistics.median(processor_s)
    found["median_seek_processor_s"] = statistics.median(seek_processor_s)
    found["worst_seek_processor_s"] = max(seek_processor_s)
    if plan.lane_plan is not None:
        found["lanes"] = plan.lane_plan.summary().to_json()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200_000_000)
    parser.add_argument("--shards", type=int, default=40_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path, help="where the table lies, or is to be made and kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "text_bytes.npy").exists():
            make_table(folder, arguments.samples, arguments.shards)
        names = ("shard", "offset_bytes", "num_bytes", "text_bytes")
        columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names}
        for column in columns.values():  # warm: the pages are in the page cache
            int(column[:: 4096 // column.dtype.itemsize].sum())
        start = time.perf_counter()
        layout = SampleLayout.of_columns(
            range(arguments.samples),
            dataset_id=DATASET_ID,
            facts={"text_bytes": columns["text_bytes"]},
            **{name: columns[name] for name in names[:3]},
        )
        opened = time.perf_counter() - start
        window = 200 * 10**6
        budget = TokenBudget(max_tokens=16_384, max_samples=64, cost=CostRule(quadratic_tokens=4096))
        lanes = BatchSpec(micro_batch_size=32, micro_batches_per_step=512, lanes=64, window_bytes=window)
        packed = TokenBudget(max_tokens=16_384, max_samples=64, padded=False)
        specs = {
            "plain": BatchSpec(micro_batch_size=32, micro_batches_per_step=512),
            "lanes": lanes,
            "padded budget": replace(lanes, micro_batch_size=0, budget=budget),
            "packed budget": replace(lanes, micro_batch_size=0, budget=packed),
        }
        result = {
            "command": " ".join(["python", "-m", "benchmarks.plan.scale", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {
                "shardflow": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
            },
            "hardware": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
            "samples": arguments.samples,
            "shards": arguments.shards,
            "layout_of_columns_s": opened,
            "load_average_at_start": os.getloadavg(),
            "specs": {name: measure(layout, spec, repeats=arguments.repeats) for name, spec in specs.items()},
        }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
