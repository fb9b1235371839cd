"""torch's DataLoader over folders of DICOM files, as many trainings read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stream.records import Loop


class _Studies:
    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def __len__(self) -> int:
        return len(self._folders)

    def __getitem__(self, number: int) -> Any:
        import pydicom
        import torch

        images = [pydicom.dcmread(path) for path in sorted(self._folders[number].iterdir())]
        pixels = np.stack([image.pixel_array for image in images])
        slope, intercept = int(images[0].RescaleSlope), int(images[0].RescaleIntercept)
        return torch.from_numpy((pixels * slope + intercept).astype(np.int16))


def loop(_: str, folder: Path, num_workers: int) -> Loop:
    """Read every study."""
    from torch.utils.data import DataLoader

    dataset: Any = _Studies(sorted((folder / "dicom").iterdir()))
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    yield None
    for _batch in loader:
        yield 1
