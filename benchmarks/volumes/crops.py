"""Crops of the same places by MONAI and by nnU-Net: one contestant in a process of its own.

    python -m benchmarks.volumes.crops monai-nifti --content folder --places places.json --seconds 10

It imports nothing of shardflow, so that it runs in an environment of nnU-Net as well. Each crop ends as a
contiguous float32 array ``(1, crop, crop, crop)``. All places are taken once and compared by their crc32;
then the clock runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Crop = NDArray[np.float32]
Take = Callable[[str, Sequence[int]], Crop]
"""Takes a case and the crop's first voxel ``(slice, row, column)``."""


def main() -> None:
    """Measure a contestant, or write the files of nnU-Net."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("contestant", choices=(*CONTESTANTS, "write-nnunet"))
    parser.add_argument("--content", type=Path, required=True)
    parser.add_argument("--places", type=Path, help="list of [case, slice, row, column] and the crop's size")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evict", type=Path, help="folder that leaves the page cache before each pass")
    arguments = parser.parse_args()
    if arguments.contestant == "write-nnunet":
        write_nnunet(arguments.content)
        return
    told = json.loads(arguments.places.read_text())
    take = CONTESTANTS[arguments.contestant](arguments.content, told["crop"])
    print(json.dumps(measure(take, told["places"], arguments)))


def measure(take: Take, places: Sequence[Sequence[Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Take all places once, and then again until the time is over; from the disk after each eviction."""
    load, crc = os.getloadavg()[0], 0
    for case, *first in places:
        crc = zlib.crc32(take(case, first), crc)
    num_crops, seconds, cpu = 0, 0.0, 0.0
    while seconds < arguments.seconds:
        if arguments.evict is not None:
            evict(arguments.evict)
        start, start_cpu = time.perf_counter(), time.process_time()
        if arguments.evict is None:
            num_crops += repeat(take, places, arguments)
        else:
            for case, *first in places:
                take(case, first)
            num_crops += len(places)
        seconds += time.perf_counter() - start
        cpu += time.process_time() - start_cpu
    return {
        "crops_per_s": round(num_crops / seconds, 3),
        "cpu_ms_per_crop": round(1000 * cpu / num_crops, 3),
        "peak_mib": peak_mib(),
        "crc32": crc,
        "load": round(load, 2),
    }


def peak_mib() -> int:
    """Return the largest memory of this process; ``ru_maxrss`` also counts the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) >> 10


def evict(folder: Path) -> None:
    """Ask the kernel to forget the pages of all files of a folder."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def repeat(take: Take, places: Sequence[Sequence[Any]], arguments: argparse.Namespace) -> int:
    """Take places in turn until the time is over, in threads; return how many."""
    end = time.perf_counter() + arguments.seconds

    def work(thread: int) -> int:
        count, at = 0, thread
        while time.perf_counter() < end:
            case, *first = places[at % len(places)]
            take(case, first)
            count, at = count + 1, at + arguments.threads
        return count

    with ThreadPoolExecutor(arguments.threads) as pool:
        return sum(pool.map(work, range(arguments.threads)))


def _cut(crop: int, first: Sequence[int]) -> Any:
    from monai.transforms import SpatialCrop

    return SpatialCrop(roi_start=first, roi_end=[at + crop for at in first])


def _as_output(cut: Any) -> Crop:
    # NIfTI has (column, row, slice); the output has slices first.
    return np.ascontiguousarray(np.asarray(cut, np.float32).transpose(0, 3, 2, 1))


def monai_nifti(content: Path, crop: int) -> Take:
    """Read the ``.nii.gz`` of a case each time, as `LoadImage` does."""
    from monai.transforms import LoadImage

    load = LoadImage(image_only=True, ensure_channel_first=True)
    return lambda case, first: _as_output(_cut(crop, first[::-1])(load(content / "nifti" / f"{case}.nii.gz")))


def monai_persistent(content: Path, crop: int) -> Take:
    """Read what `PersistentDataset` has cached on the disk: the whole volume, as a tensor."""
    from monai.data import PersistentDataset
    from monai.transforms import LoadImage

    names = _cases(content)
    dataset = PersistentDataset(
        [str(content / "nifti" / f"{name}.nii.gz") for name in names],
        LoadImage(image_only=True, ensure_channel_first=True),
        cache_dir=content / "persistent",
    )
    for number in range(len(names)):
        dataset[number]
    return lambda case, first: _as_output(_cut(crop, first[::-1])(dataset[names.index(case)]))


def monai_cache(content: Path, crop: int) -> Take:
    """Cut from whole volumes in memory, as `CacheDataset` holds them."""
    from monai.data import CacheDataset
    from monai.transforms import LoadImage

    names = _cases(content)
    dataset = CacheDataset(
        [str(content / "nifti" / f"{name}.nii.gz") for name in names],
        LoadImage(image_only=True, ensure_channel_first=True),
        num_workers=1,
        progress=False,
    )
    return lambda case, first: _as_output(_cut(crop, first[::-1])(dataset[names.index(case)]))


def nnunet(content: Path, crop: int) -> Take:
    """Read from nnU-Net's Blosc2 files by its own dataset class, as its data loader cuts them."""
    from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetBlosc2

    dataset = nnUNetDatasetBlosc2(str(content / "nnunet"))

    def take(case: str, first: Sequence[int]) -> Crop:
        data, *_ = dataset[case]
        out = np.empty((1, crop, crop, crop), np.float32)
        out[...] = data[(slice(None), *(slice(at, at + crop) for at in first))]
        return out

    return take


def write_nnunet(content: Path) -> None:
    """Write stored volumes with blocks, chunks, codec and filters as nnU-Net chooses for a patch of 128."""
    from nnunetv2.training.dataloading.nnunet_dataset import comp_blosc2_params, nnUNetDatasetBlosc2

    folder = content / "nnunet"
    folder.mkdir(exist_ok=True)
    for path in sorted((content / "raw").glob("*.npy")):
        array = np.load(path)[None]
        blocks, chunks = comp_blosc2_params(array.shape, (128, 128, 128), array.dtype.itemsize)
        none = np.zeros((1, 1, 1, 1), np.uint8)
        nnUNetDatasetBlosc2.save_case(
            array, none, {}, str(folder / path.stem), chunks, blocks, none.shape, none.shape
        )


def _cases(content: Path) -> list[str]:
    return sorted(path.stem for path in (content / "raw").glob("*.npy"))


CONTESTANTS: dict[str, Callable[[Path, int], Take]] = {
    "monai-nifti": monai_nifti,
    "monai-persistent": monai_persistent,
    "monai-cache": monai_cache,
    "nnunet": nnunet,
}


if __name__ == "__main__":
    main()
