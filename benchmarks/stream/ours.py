"""shardflow's loader: with threads, with a process beside, resumed at half an epoch, over stored tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.stream.records import BATCH, NUM_SLICES, SIZE, Loop
from shardflow.fields.tokens import StoredTokens
from shardflow.format import Dataset
from shardflow.loading import FieldsView, ImageView, Loader, LoaderConfig
from shardflow.sampling import BatchSpec

_VIEWS = {
    "ct": ImageView(num_slices=NUM_SLICES, rows=SIZE, columns=SIZE),
    "cxr": FieldsView(fields=("image.jpg",)),
    "text": None,
}


def _loop(
    workload: str, folder: Path, num_workers: int, *, is_resumed: bool = False, **settings: Any
) -> Loop:
    config = LoaderConfig(
        **{"view": _VIEWS[workload], "num_threads": num_workers, "prefetch_bytes": 96 << 20, **settings}
    )
    spec = BatchSpec(micro_batch_size=BATCH[workload], micro_batches_per_step=1)
    loader = Loader(Dataset.open(folder / "ours"), split="train", batch=spec, seed=1, config=config)
    if is_resumed:
        state = json.loads(json.dumps(loader.state_dict()))
        state["step"] = len(loader) // 2
        loader.load_state_dict(state)
    yield None
    for batch in loader:
        yield batch.num_slots


def loop(workload: str, folder: Path, num_workers: int) -> Loop:
    """Images, or texts as they are stored."""
    yield from _loop(workload, folder, num_workers)


def process(workload: str, folder: Path, num_workers: int) -> Loop:
    """In a process beside."""
    yield from _loop(workload, folder, num_workers, execution="process")


def resumed(workload: str, folder: Path, num_workers: int) -> Loop:
    """Goes on at half an epoch."""
    yield from _loop(workload, folder, num_workers, is_resumed=True)


_TOKENS = {"text": False, "tokens": StoredTokens(tokenizer="0" * 64), "prefetch_bytes": 32 << 20}


def tokens(workload: str, folder: Path, num_workers: int) -> Loop:
    """Token ids mapped from their table in place of texts."""
    yield from _loop(workload, folder, num_workers, **_TOKENS)


def tokens_resumed(workload: str, folder: Path, num_workers: int) -> Loop:
    """The same, going on at half an epoch."""
    yield from _loop(workload, folder, num_workers, is_resumed=True, **_TOKENS)
