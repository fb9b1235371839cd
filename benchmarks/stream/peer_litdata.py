"""LitData: chunks of records as bytes, or of typed columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from litdata import StreamingDataLoader, StreamingDataset, optimize

from benchmarks.stream.records import BATCH, Collate, Loop, collate, records, size


def _same(record: Any) -> Any:
    return record


def prepare(workload: str, folder: Path) -> None:
    inputs = list(records(workload, folder))
    kinds: dict[str, list[Any]] = {"litdata": inputs}
    if workload == "text":
        ids = [np.array(json.loads(fields["tokens.json"]), np.uint16) for fields in inputs]
        kinds["litdata_typed"] = [{"ids": values} for values in ids]
    for name, written in kinds.items():
        optimize(fn=_same, inputs=written, output_dir=str(folder / name), num_workers=1, chunk_bytes="64MB")


def _loader(workload: str, folder: Path, num_workers: int) -> Any:
    dataset: Any = StreamingDataset(str(folder / "litdata"), shuffle=True)
    collate_fn = Collate(workload)
    return StreamingDataLoader(
        dataset, batch_size=BATCH[workload], num_workers=num_workers, collate_fn=collate_fn
    )


def loop(workload: str, folder: Path, num_workers: int) -> Loop:
    loader = _loader(workload, folder, num_workers)
    yield None
    for batch in loader:
        yield size(workload, batch)


def resumed(workload: str, folder: Path, num_workers: int) -> Loop:
    loader = _loader(workload, folder, num_workers)
    half = len(loader) // 2
    for number, _ in enumerate(loader, start=1):
        if number == half:
            break
    state = loader.state_dict()
    del loader
    loader = _loader(workload, folder, num_workers)
    loader.load_state_dict(state)
    yield None
    for batch in loader:
        yield size(workload, batch)


def _collate_ids(samples: list[Any]) -> Any:
    return collate("text", [np.asarray(sample["ids"]) for sample in samples])


def typed(workload: str, folder: Path, num_workers: int) -> Loop:
    """Token ids in a typed column, with nothing to parse."""
    dataset: Any = StreamingDataset(str(folder / "litdata_typed"), shuffle=True)
    loader: Any = StreamingDataLoader(
        dataset, batch_size=BATCH[workload], num_workers=num_workers, collate_fn=_collate_ids
    )
    yield None
    for batch in loader:
        yield size(workload, batch)
