"""shardflow: this repository, through the same harness and torch's DataLoader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.peers.task import GLOBAL_BATCH, NUM_SAMPLES, SEED, SHARDS, Task
from shardflow.fields.types.text import Text
from shardflow.format import Dataset
from shardflow.loading import Batch, LoaderConfig, World
from shardflow.loading.torch_dataset import ShardIterableDataset
from shardflow.sampling import BatchSpec, RankSchedule
from tests.factories import make_dataset, sample_key

SETTINGS: dict[str, dict[str, Any]] = {
    "tail=drop": {"tail": "drop"},
    "tail=repeat": {"tail": "repeat"},
    "tail=mask": {"tail": "mask"},
    "tail=mask, lanes=2": {"tail": "mask", "lanes": 2, "window_bytes": 20_000},
}
_MICRO_BATCH = 4


def prepare(folder: Path) -> None:
    """Write a dataset of the same samples in the same shards."""
    make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=len(SHARDS[0]))


class ShardflowStream:
    """`ShardIterableDataset` in a `DataLoader`; a step is the micro-batches of this rank."""

    def __init__(self, folder: Path, task: Task, rank: int) -> None:
        spec = BatchSpec(
            micro_batch_size=_MICRO_BATCH, micro_batches_per_step=GLOBAL_BATCH // _MICRO_BATCH, **task.options
        )
        self._dataset = ShardIterableDataset(
            Dataset.open(folder),
            split="train",
            batch=spec,
            seed=SEED,
            world=World(rank=rank, world_size=task.world_size),
            fields={"report": Text()},
            config=LoaderConfig(num_threads=1),
        )
        schedule = RankSchedule(spec.micro_batches_per_step, task.world_size)
        self._per_step = schedule.num_micro_batches_per_rank
        self._loader: DataLoader[Batch] = DataLoader(
            self._dataset, batch_size=None, num_workers=task.num_workers
        )
        self._names = {sample_key(number): f"s{number:06d}" for number in range(NUM_SAMPLES)}

    def length(self) -> int | None:
        return len(self._dataset) // self._per_step

    def batches(self) -> Iterator[list[str]]:
        keys: list[str] = []
        for batch in self._loader:
            keys += [self._names[key] for key in batch.sample_keys if key is not None]
            if batch.slot == self._per_step - 1:
                yield keys
                keys = []

    def save(self, folder: Path, rank: int) -> None:
        if rank == 0:
            (folder / "state.json").write_text(json.dumps(self._dataset.state_dict()), encoding="utf-8")

    def load(self, folder: Path, rank: int) -> None:
        self._dataset.load_state_dict(json.loads((folder / "state.json").read_text(encoding="utf-8")))


def open_stream(folder: Path, task: Task, rank: int) -> ShardflowStream:
    """Open the loader."""
    return ShardflowStream(folder, task, rank)
