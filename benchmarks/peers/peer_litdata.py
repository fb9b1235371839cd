"""LitData 0.2.76: chunks, dealt to ranks and workers; an elastic resume since 2026."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, optimize

from benchmarks.peers.task import SEED, SHARDS, Task

SETTINGS: dict[str, dict[str, Any]] = {
    "shuffle, defaults": {},
    "shuffle, drop_last=True": {"drop_last": True},
    "shuffle, drop_last=False": {"drop_last": False},
    "shuffle, num_canonical_nodes=1": {"num_canonical_nodes": 1},
}


def _same(key: str) -> dict[str, str]:
    return {"key": key}


def prepare(folder: Path) -> None:
    """Write chunks of 15 samples."""
    keys = [key for shard in SHARDS for key in shard]
    optimize(fn=_same, inputs=keys, output_dir=str(folder), num_workers=1, chunk_size=15)


class LitStream:
    """`StreamingDataset` in a `StreamingDataLoader`."""

    def __init__(self, folder: Path, task: Task) -> None:
        dataset = StreamingDataset(str(folder), shuffle=True, seed=SEED, **task.options)
        self._loader = StreamingDataLoader(dataset, batch_size=task.batch_size, num_workers=task.num_workers)

    def length(self) -> int | None:
        return len(self._loader)

    def batches(self) -> Iterator[list[str]]:
        for batch in self._loader:
            yield list(batch["key"])

    def save(self, folder: Path, rank: int) -> None:
        state = self._loader.state_dict()
        if rank == 0:
            torch.save(state, folder / "state.pt")

    def load(self, folder: Path, rank: int) -> None:
        self._loader.load_state_dict(torch.load(folder / "state.pt", weights_only=False))


def open_stream(folder: Path, task: Task, rank: int) -> LitStream:
    """Open the loader; rank and world size come from torch.distributed."""
    return LitStream(folder, task)
