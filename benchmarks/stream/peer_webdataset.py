"""WebDataset in a WebLoader, as its documentation puts them together."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

from benchmarks.stream.records import BATCH, NUM_SLICES, SIZE, Collate, Loop, decode, records, size, tars


class _Decoded:
    def __init__(self, workload: str) -> None:
        self._workload = workload

    def __call__(self, sample: dict[str, Any]) -> Any:
        return decode(self._workload, sample)


def _loader(workload: str, folder: Path, num_workers: int, num_skipped: int = 0) -> Any:
    dataset = webdataset.WebDataset([str(path) for path in tars(workload, folder)], shardshuffle=False)
    if num_skipped:
        # It keeps no position: each worker reads over its share of what was seen.
        dataset = dataset.slice(num_skipped // max(num_workers, 1), None)
    dataset = dataset.map(_Decoded(workload))
    dataset = dataset.batched(BATCH[workload], collation_fn=Collate(workload, is_decoded=True))
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=num_workers)


def loop(workload: str, folder: Path, num_workers: int) -> Loop:
    loader = _loader(workload, folder, num_workers)
    yield None
    for batch in loader:
        yield size(workload, batch)


def resumed(workload: str, folder: Path, num_workers: int) -> Loop:
    num_samples = sum(1 for _ in records(workload, folder))
    loader = _loader(workload, folder, num_workers, num_samples // 2)
    yield None
    for batch in loader:
        yield size(workload, batch)


def png(_: str, folder: Path, num_workers: int) -> Loop:
    """Slices as PNG of 16 bits, as CT is mostly put into tars."""
    urls = sorted(str(path) for path in (folder / "png").glob("*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=False).map(_decode_png)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=num_workers)
    yield None
    for _batch in loader:
        yield 1


def _decode_png(sample: dict[str, Any]) -> Any:
    import cv2
    import torch

    volume = torch.empty((NUM_SLICES, SIZE, SIZE), dtype=torch.int16)
    pixels = volume.numpy()
    names = sorted(name for name in sample if name.endswith("png"))
    for index, name in enumerate(islice(names, NUM_SLICES)):
        decoded: Any = cv2.imdecode(np.frombuffer(sample[name], np.uint8), cv2.IMREAD_UNCHANGED)
        np.bitwise_xor(decoded, 0x8000, out=pixels[index].view(np.uint16))  # stored with an offset of 32,768
    return volume
