"""Hit rates and bytes fetched of eviction policies, over the reads of real plans; counts, no times.

    python -m benchmarks.stream.cache_policies --output benchmarks/results/cache_policies.json --page

A made-up data set of 3,000 samples in 60 shards is read for three epochs by the first node of a world of four
ranks. A sample is a block. What the cache knows of the future is what the loader tells it: this epoch and the
next. ``--page`` rewrites the table of docs/caching.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.stream.cache_simulation import next_uses, simulate
from shardflow import __version__
from shardflow.sampling import BatchSpec, EpochPlan, RankSchedule, SampleLayout, TokenBudget
from shardflow.sampling.blend import Blend, BlendComponent
from shardflow.storage.cache.config import EvictionPolicy

__all__ = ["PAGE", "RESULTS", "node_reads", "page_with_tables", "plans"]

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "cache_policies.json"
PAGE = REPOSITORY / "docs" / "caching.md"
_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"

NUM_SAMPLES, NUM_SHARDS = 3_000, 60
WORLD_SIZE, NUM_EPOCHS, SEED = 4, 3, 11
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
POLICIES: tuple[EvictionPolicy, ...] = ("belady", "lru", "lfu-decay")
MEAN_BYTES = 20_000_000
_SHOWN = (
    ("one node", "whole epoch mixed", 4),
    ("1 of 4 nodes", "whole epoch mixed", 1),
    ("1 of 4 nodes, 8 lanes", "8 lanes", 1),
)
"""Rows of the page's table: title, plan and ranks on the node."""
_SHOWN_POLICIES = ("belady", "lru", "lru of whole shards")
_SHOWN_SHARES = (0.05, 0.2, 0.4, 0.8)
_DATASET_ID = "5" * 64

Int64Array = npt.NDArray[np.int64]


def sample_bytes(sizes: str) -> Int64Array:
    """Return the size of each sample: all equal, or as uneven as studies are."""
    if sizes == "equal":
        return np.full(NUM_SAMPLES, MEAN_BYTES, np.int64)
    drawn = np.random.default_rng(2).lognormal(0.0, 1.0, NUM_SAMPLES)
    scaled: npt.NDArray[np.float64] = drawn / drawn.mean() * MEAN_BYTES
    return np.maximum(scaled, 1).astype(np.int64)


def shard_of_samples() -> Int64Array:
    return np.arange(NUM_SAMPLES) * NUM_SHARDS // NUM_SAMPLES


def make_layout(num_bytes: Int64Array) -> SampleLayout:
    shard = shard_of_samples()
    before = np.cumsum(num_bytes) - num_bytes
    text = np.random.default_rng(3).lognormal(7.2, 0.6, NUM_SAMPLES)
    return SampleLayout.of_columns(
        range(NUM_SAMPLES),
        dataset_id=_DATASET_ID,
        shard=shard.astype(np.uint32),
        offset_bytes=(before - before[np.searchsorted(shard, shard)]).astype(np.uint64),
        num_bytes=num_bytes.astype(np.uint64),
        facts={"text_bytes": np.clip(text, 8, 20_000).astype(np.uint32)},
    )


def plans(num_bytes: Int64Array) -> dict[str, EpochPlan]:
    """Return the first epoch of each kind of plan."""
    layout = make_layout(num_bytes)
    window_bytes = 3 * MEAN_BYTES * NUM_SAMPLES // NUM_SHARDS
    mixed = BatchSpec(micro_batch_size=4, micro_batches_per_step=8, tail="mask")
    lanes = BatchSpec(
        micro_batch_size=4, micro_batches_per_step=8, tail="mask", lanes=8, window_bytes=window_bytes
    )
    budget = BatchSpec(
        budget=TokenBudget(max_tokens=4_096, max_samples=8),
        micro_batches_per_step=8,
        tail="mask",
        lanes=8,
        window_bytes=window_bytes,
    )
    third = NUM_SAMPLES // 3
    parts = [(range(third), int(2.5 * third)), (range(third, NUM_SAMPLES), third)]
    blend = Blend(
        [
            BlendComponent(
                dataset_id=_DATASET_ID,
                manifest_version=1,
                split="train",
                rows=rows,
                subset=None,
                count=count,
                num_table_rows=NUM_SAMPLES,
            )
            for rows, count in parts
        ]
    )
    return {
        "whole epoch mixed": EpochPlan(range(NUM_SAMPLES), mixed, seed=SEED, epoch=0),
        "8 lanes": EpochPlan(range(NUM_SAMPLES), lanes, seed=SEED, epoch=0, layout=layout),
        "8 lanes, token budget": EpochPlan(range(NUM_SAMPLES), budget, seed=SEED, epoch=0, layout=layout),
        "blend, 2.5 and 0.5 times": EpochPlan(blend, mixed, seed=SEED, epoch=0),
    }


def node_reads(plan: EpochPlan, ranks_per_node: int) -> list[int]:
    """Return the samples that the first node reads in an epoch, in order of step and rank slot."""
    spec = plan.spec
    schedule = RankSchedule(
        spec.micro_batches_per_step, WORLD_SIZE, lanes=spec.lanes, ranks_per_node=ranks_per_node
    )
    micros = [
        schedule.micro(rank, slot)
        for slot in range(schedule.num_micro_batches_per_rank)
        for rank in range(ranks_per_node)
    ]
    found: list[int] = []
    for step in range(plan.num_steps):
        rows = plan.step(step)[0][micros].ravel()
        # A blend's rows count one table after the other; here both components are of one table.
        found += (rows[rows >= 0] % NUM_SAMPLES).tolist()
    return found


def measure() -> Iterator[dict[str, Any]]:
    for sizes in ("equal", "unequal"):
        num_bytes = sample_bytes(sizes)
        shard_bytes = np.bincount(shard_of_samples(), weights=num_bytes).astype(np.int64)
        for kind, plan in plans(num_bytes).items():
            for ranks_per_node in (1, 2, 4):
                epochs = [
                    node_reads(plan.for_epoch(epoch), ranks_per_node) for epoch in range(NUM_EPOCHS + 1)
                ]
                ends = np.cumsum([len(reads) for reads in epochs]).tolist()
                every = [read for reads in epochs for read in reads]
                horizon = [
                    ends[min(epoch + 1, NUM_EPOCHS)] for epoch, reads in enumerate(epochs) for _ in reads
                ]
                future = next_uses(every, horizon=horizon)[: ends[NUM_EPOCHS - 1]]
                reads = every[: ends[NUM_EPOCHS - 1]]
                shards = shard_of_samples()[reads].tolist()
                asked = int(num_bytes[reads].sum())
                for share in SHARES:
                    capacity = int(share * num_bytes.sum())
                    found = {
                        policy: simulate(policy, reads, num_bytes, capacity, future=future)
                        for policy in POLICIES
                    }
                    whole = simulate("lru", shards, shard_bytes, capacity)
                    yield {
                        "sizes": sizes,
                        "plan": kind,
                        "ranks_per_node": ranks_per_node,
                        "cache_share": share,
                        "reads": len(reads),
                        "read_bytes": asked,
                        "hits": {policy: outcome.num_hits for policy, outcome in found.items()},
                        "fetched_bytes": {
                            **{policy: outcome.fetched_bytes for policy, outcome in found.items()},
                            "lru of whole shards": whole.fetched_bytes,
                        },
                    }


def page_with_tables(page: str, results: dict[str, Any]) -> str:
    """Return the page with the tables of these results between its markers."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{_tables(results['rows'])}\n{_END}{after}"


def _tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page's table: bytes fetched of those read, for a single node and for one of four."""
    shares = " | ".join(f"{share:.0%}" for share in _SHOWN_SHARES)
    lines = [f"| plan | policy | {shares} |", f"|---|---|{'---|' * len(_SHOWN_SHARES)}"]
    for title, plan, ranks_per_node in _SHOWN:
        chosen = [
            row
            for row in rows
            if (row["sizes"], row["plan"], row["ranks_per_node"]) == ("unequal", plan, ranks_per_node)
            and row["cache_share"] in _SHOWN_SHARES
        ]
        for policy in _SHOWN_POLICIES:
            cells = [f"{row['fetched_bytes'][policy] / row['read_bytes']:.0%}" for row in chosen]
            lines.append(f"| {title} | {policy} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="rewrite the table of docs/caching.md")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "command": f"python -m benchmarks.stream.cache_policies --output {arguments.output}",
        "versions": {
            "shardflow": __version__,
            "python": sys.version.split()[0],
            "numpy": np.__version__,
        },
        "samples": NUM_SAMPLES,
        "shards": NUM_SHARDS,
        "world_size": WORLD_SIZE,
        "epochs": NUM_EPOCHS,
        "rows": list(measure()),
    }
    arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if arguments.page:
        PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    for row in results["rows"]:
        rates = ", ".join(f"{policy} {hits / row['reads']:.3f}" for policy, hits in row["hits"].items())
        print(row["sizes"], row["plan"], row["ranks_per_node"], row["cache_share"], rates)


if __name__ == "__main__":
    main()
