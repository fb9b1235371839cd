"""MosaicML Streaming 0.13.0: MDS shards, one plan of sample ids for all ranks, a state of a few numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.task import SEED, SHARDS, Task

# The package imports torchvision, whose compiled part does not load beside a CPU build of torch and whose
# Python part then misses these operators. They are declared, so that the import succeeds; nothing runs them.
_DECLARED = torch.library.Library("torchvision", "DEF")
_DECLARED.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_DECLARED.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

SETTINGS: dict[str, dict[str, Any]] = {
    "shuffle, defaults": {},
    "shuffle, num_canonical_nodes=1": {"num_canonical_nodes": 1},
    "shuffle, num_canonical_nodes=4": {"num_canonical_nodes": 4},
    "shuffle, num_canonical_nodes=1, drop_last=True": {"num_canonical_nodes": 1, "drop_last": True},
}


def prepare(folder: Path) -> None:
    """Write MDS shards of the same samples: the size limit is that of a shard of 15."""
    with MDSWriter(out=str(folder), columns={"key": "str"}, size_limit=_shard_bytes()) as writer:
        for keys in SHARDS:
            for key in keys:
                writer.write({"key": key})


def _shard_bytes() -> int:
    # A sample is its key, its size and its offset; the rest is the header of a shard of this one column.
    return 15 * (len(SHARDS[0][0]) + 4 + 4) + 175


class MosaicStream:
    """`StreamingDataset` in a `StreamingDataLoader`."""

    def __init__(self, folder: Path, task: Task) -> None:
        clean_stale_shared_memory()
        options = dict(task.options)
        drop_last = options.pop("drop_last", False)
        dataset = StreamingDataset(
            local=str(folder), shuffle=True, shuffle_seed=SEED, batch_size=task.batch_size, **options
        )
        self._loader = StreamingDataLoader(
            dataset, batch_size=task.batch_size, num_workers=task.num_workers, drop_last=drop_last
        )

    def length(self) -> int | None:
        return len(self._loader)

    def batches(self) -> Iterator[list[str]]:
        for batch in self._loader:
            yield list(batch["key"])

    def save(self, folder: Path, rank: int) -> None:
        state = self._loader.state_dict()
        if rank == 0:
            (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path, rank: int) -> None:
        self._loader.load_state_dict(json.loads((folder / "state.json").read_text(encoding="utf-8")))


def open_stream(folder: Path, task: Task, rank: int) -> MosaicStream:
    """Open the loader; rank and world size come from the environment."""
    return MosaicStream(folder, task)
