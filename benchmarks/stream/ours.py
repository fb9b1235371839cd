"""shardflow's loader: with threads, with a process beside, resumed at half an epoch, over stored tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.stream.records import BATCH, NUM_SLICES, SIZE, Loop
from shardflow.fields.field import Field
from shardflow.fields.types.pictures import Image, Slices
from shardflow.fields.types.text import Text
from shardflow.fields.types.tokens import Tokens
from shardflow.format import Dataset
from shardflow.loading import Loader, LoaderConfig
from shardflow.sampling import BatchSpec

_FIELDS: dict[str, dict[str, Field]] = {
    "ct": {"image": Slices(num_slices=NUM_SLICES, size=(SIZE, SIZE)), "report": Text()},
    "cxr": {"image": Image(member="image.jpg", size=(1024, 1024), channels=3), "report": Text()},
    "gray": {"image": Image(member="image.jpg", size=(1024, 1024), channels=1), "report": Text()},
    "text": {"report": Text()},
}
_TOKENS: dict[str, Field] = {"tokens": Tokens(tokenizer="0" * 64, flat=True)}
_TOKENS_BYTES = 32 << 20


def _loop(
    fields: dict[str, Field], batch: int, folder: Path, *, is_resumed: bool = False, **settings: Any
) -> Loop:
    config = LoaderConfig(**{"prefetch_bytes": 160 << 20, **settings})
    spec = BatchSpec(micro_batch_size=batch, micro_batches_per_step=1)
    dataset = Dataset.open(folder / "ours")
    loader = Loader(dataset, split="train", batch=spec, seed=1, fields=fields, config=config)
    if is_resumed:
        state = json.loads(json.dumps(loader.state_dict()))
        state["step"] = len(loader) // 2
        loader.load_state_dict(state)
    yield None
    for batch in loader:
        yield batch.num_slots


def loop(workload: str, folder: Path, num_workers: int) -> Loop:
    """Images, or texts as they are stored."""
    yield from _loop(_FIELDS[workload], BATCH[workload], folder, num_threads=num_workers)


def process(workload: str, folder: Path, num_workers: int) -> Loop:
    """In a process beside."""
    settings = {"num_threads": num_workers, "execution": "process"}
    yield from _loop(_FIELDS[workload], BATCH[workload], folder, **settings)


def resumed(workload: str, folder: Path, num_workers: int) -> Loop:
    """Goes on at half an epoch."""
    yield from _loop(_FIELDS[workload], BATCH[workload], folder, is_resumed=True, num_threads=num_workers)


def tokens(workload: str, folder: Path, num_workers: int) -> Loop:
    """Token ids mapped from their table in place of texts."""
    settings = {"num_threads": num_workers, "prefetch_bytes": _TOKENS_BYTES}
    yield from _loop(_TOKENS, BATCH[workload], folder, **settings)


def tokens_resumed(workload: str, folder: Path, num_workers: int) -> Loop:
    """The same, going on at half an epoch."""
    settings = {"num_threads": num_workers, "prefetch_bytes": _TOKENS_BYTES}
    yield from _loop(_TOKENS, BATCH[workload], folder, is_resumed=True, **settings)
