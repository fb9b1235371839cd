"""webdataset 1.0.2: streams of whole shards; no index, no length, no state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset

from benchmarks.peers.tars import write_tars
from benchmarks.peers.task import GLOBAL_BATCH, NUM_SAMPLES, SEED, NotOfferedError, Task

SETTINGS: dict[str, dict[str, Any]] = {
    "split by node and worker": {},
    "split, empty_check=False": {"empty_check": False},
    "split, repeat(), with_epoch(n)": {"empty_check": False, "repeat": True},
    "resampled=True, with_epoch(n)": {"resampled": True},
}


def prepare(folder: Path) -> None:
    """Write plain tars."""
    write_tars(folder)


class WebStream:
    """`WebDataset` in a `WebLoader`, as the documentation of the package puts them together."""

    def __init__(self, folder: Path, task: Task) -> None:
        options = task.options
        urls = [str(path) for path in sorted(folder.glob("*.tar"))]
        common = {"nodesplitter": webdataset.split_by_node, "empty_check": options.get("empty_check", True)}
        if options.get("resampled"):
            dataset = webdataset.WebDataset(urls, resampled=True, seed=SEED, **common)
        else:
            dataset = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=SEED, **common)
        dataset = dataset.shuffle(100, seed=SEED).decode().to_tuple("txt").batched(task.batch_size)
        self._loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=task.num_workers)
        if options.get("repeat"):
            self._loader = self._loader.repeat()
        if options.get("repeat") or options.get("resampled"):
            self._loader = self._loader.with_epoch(-(-NUM_SAMPLES // GLOBAL_BATCH))

    def length(self) -> int | None:
        return None

    def batches(self) -> Iterator[list[str]]:
        for (texts,) in self._loader:
            yield list(texts)

    def save(self, folder: Path, rank: int) -> None:
        raise NotOfferedError

    def load(self, folder: Path, rank: int) -> None:
        raise NotOfferedError


def open_stream(folder: Path, task: Task, rank: int) -> WebStream:
    """Open the loader; rank and world size come from the environment."""
    return WebStream(folder, task)
