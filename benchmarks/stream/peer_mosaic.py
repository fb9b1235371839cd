"""MosaicML Streaming: MDS shards, `StreamingDataset` in a `StreamingDataLoader`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# See benchmarks/peers/peer_mosaic.py: the package imports torchvision, which needs these declared.
_LIBRARY = torch.library.Library("torchvision", "DEF")
_LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

from benchmarks.stream.records import BATCH, Collate, Loop, records, size  # noqa: E402

_DOT = "_"  # names of columns hold no dots


def prepare(workload: str, folder: Path) -> None:
    names = sorted(next(records(workload, folder)))
    columns = {name.replace(".", _DOT): "bytes" for name in names}
    with MDSWriter(out=str(folder / "mosaic"), columns=columns, size_limit=1 << 26) as writer:
        for fields in records(workload, folder):
            writer.write({name.replace(".", _DOT): fields[name] for name in names})


def _loader(workload: str, folder: Path, num_workers: int) -> Any:
    clean_stale_shared_memory()
    batch = BATCH[workload]
    dataset: Any = StreamingDataset(local=str(folder / "mosaic"), shuffle=True, batch_size=batch)
    collate = Collate(workload, dot=_DOT)
    return StreamingDataLoader(dataset, batch_size=batch, num_workers=num_workers, collate_fn=collate)


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
