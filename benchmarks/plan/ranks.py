"""1,024 ranks over 10^8 samples in one process: plan, schedule, states, 20 kills and resizes, hot shards.

    python -m benchmarks.plan.ranks --output benchmarks/results/ranks_1024.json

The dataset is simulated (shards of drawn sizes, samples of even sizes in them; nothing is stored), the code
that plans it is the library's. Each start has another number of ranks. In a step that is about to be killed
each rank has consumed another number of its micro-batches; the states that ranks would save must be equal,
and the run goes on from the newest checkpoint, which repeats some steps. The steps that stand are counted row
by row: every sample comes once. Threads are what is in flight: the next micro-batches of each rank.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.about import about_run
from shardflow.sampling import BatchSpec, EpochPlan, LoaderState, Position, RankSchedule, SampleLayout
from shardflow.sampling.layout import EvenOffsets

__all__ = ["Cluster", "Outcome", "layout_of", "main", "plan_cost", "reading", "simulate"]

DATASET_ID: Final = "0123456789abcdef" * 4
_RANKS_PER_NODE: Final = 8
_CHECKPOINT_STEPS: Final = 50
_CHECKED_STEPS: Final = 400
"""Of so many steps one is also planned rank by rank."""


@dataclass(frozen=True)
class Cluster:
    """Ranks and loader threads of a run, and the seed of what happens to them."""

    num_ranks: int = 1024
    num_threads: int = 16
    num_kills: int = 20
    seed: int = 0


@dataclass
class Outcome:
    """What a simulated epoch was."""

    num_steps: int = 0
    num_repeated_steps: int = 0
    world_sizes: list[int] = field(default_factory=list)
    num_states: int = 0
    state_bytes: int = 0
    num_lost: int = 0
    num_doubled: int = 0


def layout_of(num_samples: int, num_shards: int, *, seed: int = 0) -> SampleLayout:
    """Simulate shards of 100 MB to 1 GB with even numbers of samples."""
    shard_rows = np.linspace(0, num_samples, num_shards + 1).astype(np.int64)
    shard_bytes = np.random.default_rng(seed).integers(100 << 20, 1 << 30, num_shards)
    return SampleLayout(
        dataset_id=DATASET_ID,
        population=range(num_samples),
        shard_rows=shard_rows,
        shard_end_bytes=shard_bytes,
        offset_bytes=EvenOffsets(shard_rows, shard_bytes),
    )


def simulate(layout: SampleLayout, spec: BatchSpec, cluster: Cluster) -> Outcome:
    """Run one epoch with kills and resizes.

    Raises:
        RuntimeError: Ranks have epochs of other lengths or other states, a micro-batch has no rank or two, or
            a repeated step is another one.
    """
    rng = np.random.default_rng(cluster.seed)
    state = LoaderState(dataset_id=DATASET_ID, manifest_version=1, split="train", seed=7, spec=spec)
    seen = np.zeros(layout.num_samples, bool)
    found, digests = Outcome(), dict[int, bytes]()
    num_slots = step = 0
    num_steps = EpochPlan(layout.population, spec, seed=7, epoch=0, layout=layout).num_steps
    kills = np.sort(rng.choice(np.arange(1, num_steps), min(cluster.num_kills, num_steps - 1), replace=False))
    for killed_at in [*kills.tolist(), None]:
        # What a start does: read the state, compare it, plan; on another number of ranks each time.
        world_size = _world_size(rng, cluster, spec) if found.world_sizes else cluster.num_ranks
        found.world_sizes.append(world_size)
        saved = LoaderState.from_json(json.loads(json.dumps(state.to_json())))
        saved.check_matches(state)
        saved.check_within(num_steps)
        plan = EpochPlan(layout.population, spec, seed=saved.seed, epoch=saved.epoch, layout=layout)
        schedule = RankSchedule(
            spec.micro_batches_per_step,
            world_size,
            lanes=spec.lanes,
            ranks_per_node=_RANKS_PER_NODE if world_size % _RANKS_PER_NODE == 0 else 0,
        )
        shares = _shares(schedule)
        for step in range(saved.step, plan.num_steps if killed_at is None else killed_at + 1):
            rows, weights = plan.step(step)
            digest = hashlib.sha256(rows.tobytes()).digest()
            if digests.setdefault(step, digest) != digest:
                raise RuntimeError(f"step {step} has other samples on {world_size} ranks")
            if step % _CHECKED_STEPS == saved.step % _CHECKED_STEPS:
                _check_step(plan, step, shares, rows)
            if step == killed_at:
                break  # before its update: the step does not count
            if step >= found.num_steps:
                used = rows[weights > 0]
                found.num_doubled += int(seen[used].sum())
                seen[used] = True
                num_slots += len(used)
                found.num_steps = step + 1
        if killed_at is None:
            break
        found.num_repeated_steps += killed_at - killed_at // _CHECKPOINT_STEPS * _CHECKPOINT_STEPS
        exchanged = _exchange(state, schedule, plan.num_steps, killed_at, rng)
        found.num_states, found.state_bytes = found.num_states + world_size, len(exchanged)
        # The checkpoint is of an earlier step; `state` of the step itself is what a SIGTERM would have saved.
        state = LoaderState.from_json(json.loads(exchanged))
        state = state.at(Position(0, state.step // _CHECKPOINT_STEPS * _CHECKPOINT_STEPS))
    found.num_lost = int((~seen).sum()) - plan.num_dropped
    found.num_doubled += num_slots - int(seen.sum())
    return found


def _world_size(rng: np.random.Generator, cluster: Cluster, spec: BatchSpec) -> int:
    """Draw another number of ranks: half of the time whole nodes, else any."""
    most = min(spec.micro_batches_per_step, cluster.num_ranks)
    drawn = int(rng.integers(max(most // 4, 1), most + 1))
    return max(drawn // _RANKS_PER_NODE * _RANKS_PER_NODE, 1) if rng.integers(2) else drawn


def _shares(schedule: RankSchedule) -> list[list[int]]:
    """Return the micro-batches of each rank; all ranks have as many, and together each once."""
    shares = [list(schedule.micros(rank)) for rank in range(schedule.world_size)]
    if {len(share) for share in shares} != {schedule.num_micro_batches_per_rank}:
        raise RuntimeError("ranks run different numbers of micro-batches")
    num = schedule.micro_batches_per_step + schedule.num_padding_micro_batches
    if sorted(micro for share in shares for micro in share) != list(range(num)):
        raise RuntimeError("a micro-batch has no rank, or two")
    return shares


def _check_step(plan: EpochPlan, step: int, shares: list[list[int]], rows: NDArray[np.int64]) -> None:
    """Plan a step as each rank does, and compare it with the whole step."""
    per_step = plan.spec.micro_batches_per_step
    for share in shares:
        for micro in share:
            own = plan.micro_batch(step, micro)
            right = rows[micro] if micro < per_step else np.full(own.rows.shape, -1)
            if not np.array_equal(own.rows, right):
                raise RuntimeError(f"micro-batch {micro} of step {step} differs on its rank")


def _exchange(
    state: LoaderState, schedule: RankSchedule, num_steps: int, step: int, rng: np.random.Generator
) -> str:
    """Return the state that all ranks have in a step that each of them has consumed another part of."""
    per_rank = schedule.num_micro_batches_per_rank
    parts = rng.integers(0, per_rank, schedule.world_size) + step * per_rank
    positions = [
        Position.after(
            epoch=0, num_consumed=consumed, num_micro_batches_per_rank=per_rank, num_steps=num_steps
        )
        for consumed in parts.tolist()
    ]
    states = {json.dumps(state.at(position).to_json()) for position in positions}
    if len(states) != 1:
        raise RuntimeError(f"ranks have {len(states)} states at step {step}")
    return states.pop()


def plan_cost(layout: SampleLayout, spec: BatchSpec, cluster: Cluster, ranks: list[int]) -> dict[str, Any]:
    """Measure what each of some ranks pays: a plan of its own, a seek, and the micro-batches in flight.

    Memory is what was allocated at most, in a second run, which is slower.
    """

    def plan_and_seek(rank: int) -> None:
        start = time.process_time()
        plan = EpochPlan(layout.population, spec, seed=7, epoch=0, layout=layout)
        schedule = RankSchedule(
            spec.micro_batches_per_step, cluster.num_ranks, lanes=spec.lanes, ranks_per_node=_RANKS_PER_NODE
        )
        seconds.append(time.process_time() - start)
        start = time.process_time()
        micros = _in_flight(plan, schedule, rank, plan.num_steps // 2, cluster.num_threads)
        num_read = sum(len(rows) for rows in micros)
        seeks.append(time.process_time() - start)
        if not num_read:
            raise RuntimeError(f"rank {rank} reads nothing")

    seconds, seeks, peaks = list[float](), list[float](), list[float]()
    for rank in ranks:
        plan_and_seek(rank)
        tracemalloc.start()
        plan_and_seek(rank)
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
        seconds.pop()
        seeks.pop()
    return {
        "ranks": ranks,
        "plan_processor_s": seconds,
        "seek_and_first_micro_batches_processor_s": seeks,
        "allocated_mb": peaks,
    }


def _in_flight(
    plan: EpochPlan, schedule: RankSchedule, rank: int, step: int, num_threads: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of the next micro-batches of a rank, one for each of its threads."""
    per_rank = schedule.num_micro_batches_per_rank
    for number in range(num_threads):
        further, slot = divmod(number, per_rank)
        if step + further < plan.num_steps:
            rows = plan.micro_batch(step + further, schedule.micro(rank, slot)).rows
            yield rows[rows >= 0]


def reading(layout: SampleLayout, spec: BatchSpec, cluster: Cluster, num_moments: int) -> dict[str, Any]:
    """Measure what nodes read: shards and bytes of a step, and readers of a shard at a moment.

    A reader is a micro-batch in flight that has a sample of the shard.
    """
    plan = EpochPlan(layout.population, spec, seed=7, epoch=0, layout=layout)
    schedule = RankSchedule(
        spec.micro_batches_per_step, cluster.num_ranks, lanes=spec.lanes, ranks_per_node=_RANKS_PER_NODE
    )
    num_nodes = cluster.num_ranks // _RANKS_PER_NODE
    node_of_micro = np.empty(spec.micro_batches_per_step, np.int64)
    for rank, share in enumerate(_shares(schedule)):
        node_of_micro[[micro for micro in share if micro < len(node_of_micro)]] = rank // _RANKS_PER_NODE
    sample_bytes = layout.shard_end_bytes / np.diff(layout.shard_rows)
    shards_per_node, bytes_per_node, readers, touched = [], [], [], []
    depth = -(-cluster.num_threads // schedule.num_micro_batches_per_rank)
    opened = np.zeros((num_nodes, layout.num_shards), bool)
    for first in np.linspace(0, max(plan.num_steps - depth - 1, 0), num_moments).astype(int).tolist():
        window = []
        for step in range(first, min(first + depth, plan.num_steps)):
            rows, _ = plan.step(step)
            shards = np.where(rows < 0, -1, np.searchsorted(layout.shard_rows, rows, side="right") - 1)
            window.append(shards)
            if step == first:
                for node in range(num_nodes):
                    own = shards[node_of_micro == node]
                    own = own[own >= 0]
                    opened[node, own] = True
                    shards_per_node.append(len(np.unique(own)))
                    bytes_per_node.append(float(sample_bytes[own].sum()))
        flat = np.concatenate(window)
        pairs = np.unique(np.arange(len(flat))[:, None] * layout.num_shards + flat)  # a reader counts once
        counts = np.bincount(pairs % layout.num_shards, minlength=layout.num_shards)
        counts = counts[counts > 0]
        readers.append(counts)
        touched.append(len(counts))
    counts = np.concatenate(readers)
    percents = (50, 90, 99, 99.9)
    return {
        "moments": num_moments,
        "shards_of_a_node_a_step": _spread(shards_per_node),
        "megabytes_of_a_node_a_step": _spread([found / 1e6 for found in bytes_per_node]),
        "micro_batches_in_flight": cluster.num_ranks * cluster.num_threads,
        "shards_in_flight": _spread(touched),
        "readers_of_a_shard": {
            **dict(
                zip((f"p{one}" for one in percents), np.percentile(counts, percents).tolist(), strict=True)
            ),
            "mean": float(counts.mean()),
            "max": int(counts.max()),
        },
        "nodes_of_a_shard_at_all_moments": _spread(opened.sum(axis=0).tolist()),
    }


def _spread(values: list[Any]) -> dict[str, float]:
    return {"min": float(min(values)), "mean": float(np.mean(values)), "max": float(max(values))}


def main() -> int:
    """Simulate the specs, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--samples", type=int, default=10**8)
    parser.add_argument("--shards", type=int, default=10**5)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    layout = layout_of(settings.samples, settings.shards)
    cluster = Cluster(num_ranks=settings.ranks)
    size = {"micro_batch_size": 8, "micro_batches_per_step": 2 * settings.ranks, "tail": "mask"}
    specs = {"full shuffle": BatchSpec(**size), "lanes": BatchSpec(**size, lanes=2 * settings.ranks)}
    rows = []
    for name, spec in specs.items():
        row: dict[str, Any] = {"order": name, "batch": spec.to_json()}
        row |= plan_cost(layout, spec, cluster, np.linspace(0, settings.ranks - 1, 8).astype(int).tolist())
        row |= reading(layout, spec, cluster, settings.moments)
        start = time.process_time()
        row |= vars(simulate(layout, spec, cluster))
        row["simulation_processor_s"] = time.process_time() - start
        rows.append(row)
        sys.stderr.write(json.dumps(row) + "\n")
    command = f"python -m benchmarks.plan.ranks --output {settings.output}"
    content = {
        "about": about_run(["numpy"]),
        "command": command,
        "samples": settings.samples,
        "shards": settings.shards,
        "simulated": True,
        "ranks": settings.ranks,
        "threads_per_rank": cluster.num_threads,
        "ranks_per_node": _RANKS_PER_NODE,
        "checkpoint_steps": _CHECKPOINT_STEPS,
        "rows": rows,
    }
    settings.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
