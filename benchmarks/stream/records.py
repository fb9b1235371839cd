"""What all contestants share: the records, and the code that makes samples and batches of them.

Imported in a peer's own environment too, which has no shardflow installed: of ours it takes the decoder of
the codec alone, by its path. CT studies and radiographs are the members of our tars, which every peer gets as
bytes, in its own format where it has one; texts are token ids as JSON in plain tars, as people store them.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "BATCH",
    "CONTENT",
    "NUM_SLICES",
    "SIZE",
    "Collate",
    "Loop",
    "collate",
    "decode",
    "records",
    "size",
    "tars",
]

NUM_SLICES, SIZE = 40, 512
BATCH = {"ct": 1, "cxr": 16, "gray": 16, "text": 256}
CONTENT = {"gray": "cxr"}
"""Workloads that read the records of another one."""
# Yields None once imports and opening are behind it, then the number of samples of each batch.
Loop = Iterator[int | None]


def tars(workload: str, folder: Path) -> list[Path]:
    """Return the tars with a workload's records."""
    return sorted((folder / ("json" if workload == "text" else "ours/shards")).glob("*.tar"))


def records(workload: str, folder: Path) -> Iterator[dict[str, bytes]]:
    """Yield the fields of each sample."""
    for path in tars(workload, folder):
        with tarfile.open(path) as tar:
            key = ""
            fields: dict[str, bytes] = {}
            for member in tar:
                name, _, field = member.name.partition(".")
                if name != key and fields:
                    yield fields
                    fields = {}
                key = name
                stream = tar.extractfile(member)
                if stream is not None:
                    fields[field] = stream.read()
            yield fields


def decode(workload: str, fields: dict[str, Any]) -> Any:
    """Make of a sample what training gets: a volume, a picture with its report, token ids."""
    if workload == "text":
        return np.array(json.loads(bytes(fields["tokens.json"])), np.uint16)
    import torch

    if workload == "ct":
        volume = torch.empty((NUM_SLICES, SIZE, SIZE), dtype=torch.int16)
        decode_study(fields, volume.numpy(), slice_decoder())
        return volume
    report = bytes(fields["report.txt"]).decode()
    if workload == "gray":
        return torch.from_numpy(decode_gray(fields["image.jpg"])), report
    image = torch.empty((1024, 1024, 3), dtype=torch.uint8)
    decode_picture(fields["image.jpg"], image.numpy())
    return image, report


def decode_study(fields: dict[str, Any], out: Any, decode_slice: Callable[[memoryview, Any], None]) -> None:
    """Decode the slices of a study into ``(slices, rows, columns)``."""
    for place, name in enumerate(sorted(name for name in fields if name.endswith("b2nd"))):
        decode_slice(memoryview(fields[name]), out[place])


def decode_gray(data: bytes) -> Any:
    """Decode a gray JPEG to ``(rows, columns)``, the fastest way that OpenCV has."""
    import cv2

    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION)


def decode_picture(data: bytes, out: Any) -> None:
    """Decode a gray JPEG to RGB, the fastest way that OpenCV has: as gray, a third of the memory."""
    import cv2

    cv2.cvtColor(decode_gray(data), cv2.COLOR_GRAY2RGB, dst=out)


def slice_decoder() -> Callable[[memoryview, Any], None]:
    """Return the decoder of our codec."""
    from shardflow.format.slice_codecs import b2nd

    return b2nd.decode


def collate(workload: str, samples: list[Any]) -> Any:
    """Make a batch of decoded samples."""
    if workload == "ct":
        return samples[0][None]
    import torch

    if workload == "text":
        sizes = torch.tensor([len(ids) for ids in samples])
        return torch.from_numpy(np.concatenate(samples)), sizes
    return torch.stack([image for image, _ in samples]), [report for _, report in samples]


def size(workload: str, batch: Any) -> int:
    """Return the number of samples of a batch."""
    return len(batch) if workload == "ct" else len(batch[1])


class Collate:
    """A collate function that crosses to worker processes.

    Args:
        workload: Which.
        is_decoded: Whether samples come decoded.
        dot: What stands for a dot in the names of fields.
    """

    def __init__(self, workload: str, *, is_decoded: bool = False, dot: str = ".") -> None:
        self._workload, self._is_decoded, self._dot = workload, is_decoded, dot

    def __call__(self, samples: list[Any]) -> Any:
        """Make a batch."""
        if not self._is_decoded:
            samples = [
                decode(self._workload, {name.replace(self._dot, "."): data for name, data in sample.items()})
                for sample in samples
            ]
        return collate(self._workload, samples)
