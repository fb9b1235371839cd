"""What a variant that was made when packing saves a loader, and what it costs on disk.

``python -m benchmarks.augmentation.run --output benchmarks/results/augmentation.json``. The CT phantom beside
the repository, or where it is missing a generated study, is packed with three variants. Then the same slices
are loaded in turns: originals, stored variants, and originals that are turned and bent as the first variant
was, by NumPy as in packing, by OpenCV, and by the device's operators on a CPU (turned alone: they bend
nothing). Processor time of one thread; two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.about import about_run
from benchmarks.stream.content import PHANTOM
from shardflow.cli.main import main as shardflow
from shardflow.config import load_config
from shardflow.fields.augmentation import Draw, Warp
from shardflow.fields.types.pictures import Slices
from shardflow.format import Dataset
from shardflow.format.keys import parse_slice_field, parse_variant_field
from shardflow.loading import Loader, LoaderConfig
from shardflow.packing import PackConfig, pack
from shardflow.sampling import BatchSpec
from shardflow.training.device.images import ImageParameters, ImagePipeline, stack_draws

ROUNDS = 7
NUM_VARIANTS = 3
SIZE = 512
_CONFIG = """
output = "{folder}/dataset"
private_dir = "{folder}/private"
[inputs]
dicom = ["{dicom}"]
[splits]
train = 1
val = 0
test = 0
[variants.augment]
num_variants = {num_variants}
"""

Images = NDArray[Any]
Change = Callable[[Images, tuple[float, float]], Any]


def make_dataset(folder: Path) -> tuple[Dataset, str]:
    """Pack a study with variants; returns what it is, too."""
    dicom, kind = PHANTOM, "the CT phantom, slices of 512 x 512 int16"
    if not dicom.is_dir():
        dicom, kind = folder / "dicom", "a generated CT of 24 slices of 512 x 512 int16"
        told = ["--studies", "1", "--seed", "7", "--size", str(SIZE), "--slices", "24:24", "--modality", "CT"]
        if shardflow(["synth", str(dicom), *told]):
            raise RuntimeError("shardflow synth made no study")
    (folder / "private").mkdir(mode=0o700)
    key = folder / "private" / "secret.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(32))
    file = folder / "pack.toml"
    file.write_text(_CONFIG.format(folder=folder, dicom=dicom, num_variants=NUM_VARIANTS), encoding="utf-8")
    pack(load_config(PackConfig, file))
    return Dataset.open(folder / "dataset"), kind


def describe(dataset: Dataset) -> tuple[Draw, dict[str, Any]]:
    """Return what the first variant got, and what is stored."""
    _, fields = dataset.sample_fields(0)
    slices = [field.num_bytes for field in fields if parse_slice_field(field.name)]
    varied = [field.num_bytes for field in fields if parse_variant_field(field.name)]
    study = json.loads(dataset.read_fields(0, ["study.json"])["study.json"])
    said = study["series"][0]["variants"]["augmented"][0]
    return Draw.from_json(said), {
        "num_slices": len(slices),
        "slice_bytes": sum(slices) // len(slices),
        "variant_slice_bytes": sum(varied) // len(varied),
        "extra_share_per_variant": round(sum(varied) / NUM_VARIANTS / sum(slices), 3),
    }


def changes(draw: Draw) -> dict[str, Change]:
    """Name the ways to turn a batch online, each of one thread."""
    straight = Draw.from_json({**draw.to_json(), "elastic": 0.0})
    affine, _ = stack_draws([straight], rows=SIZE, columns=SIZE)
    pipeline, there = ImagePipeline(SIZE, SIZE), torch.from_numpy(affine)

    def with_numpy(images: Images, _window: tuple[float, float]) -> Any:
        warp = Warp(draw, SIZE, SIZE)
        return [warp.image(one, fill=-1024) for one in images]

    def with_opencv(images: Images, _window: tuple[float, float]) -> Any:
        ((_, at_row, at_column),) = Warp(draw, SIZE, SIZE)._places()
        columns, rows = at_column.astype(np.float32) / 128, at_row.astype(np.float32) / 128
        return [cv2.remap(one, columns, rows, cv2.INTER_LINEAR, borderValue=-1024) for one in images]

    def with_torch(images: Images, window: tuple[float, float]) -> Any:
        tensors = torch.from_numpy(images)[None]
        with torch.no_grad():
            return pipeline(
                tensors,
                torch.ones(tensors.shape[:2], dtype=torch.bool),
                ImageParameters(display_range=torch.tensor([window]), affine_B23=there),
            )

    return {"numpy": with_numpy, "opencv": with_opencv, "torch, turned alone": with_torch}


def load_ms(dataset: Dataset, pool: float, change: Change | None, num_slices: int) -> float:
    """Return the processor time of an image, over an epoch."""
    fields = {"image": Slices(num_slices=num_slices, size=(SIZE, SIZE), augment_pool=pool)}
    config = LoaderConfig(num_threads=1)
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=1)
    with Loader(dataset, split="train", batch=spec, seed=3, fields=fields, config=config) as loader:
        list(loader)  # opens files and warms memory
        begin, num_images = time.process_time(), 0
        for _ in range(3):
            for batch in loader:
                images = batch["image"][0, batch["image_mask"][0].astype(bool), 0]
                num_images += len(images)
                if change is not None:
                    low, high = batch["image_range"][0].tolist()
                    change(images, (low, high))
        return (time.process_time() - begin) / num_images * 1000


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        dataset, kind = make_dataset(Path(folder))
        draw, stored = describe(dataset)
        ways: dict[str, tuple[float, Change | None]] = {
            "original, not turned": (0.0, None),
            "stored variant": (1.0, None),
            **{f"online, {name}": (0.0, change) for name, change in changes(draw).items()},
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, (pool, change) in ways.items():
                times[name].append(round(load_ms(dataset, pool, change, stored["num_slices"]), 3))
    medians = {name: statistics.median(found) for name, found in times.items()}
    result = {
        "what": f"loading {kind}, unresized; milliseconds of processor time an image",
        "command": "python -m benchmarks.augmentation.run",
        **about_run(["shardflow", "numpy", "blosc2", "torch", "opencv-python-headless"]),
        "storage": stored,
        "median_ms": medians,
        "against_stored_variant": {
            name: round(value / medians["stored variant"], 2) for name, value in medians.items()
        },
        "turning_alone_ms": {
            name: round(value - medians["original, not turned"], 3)
            for name, value in medians.items()
            if name.startswith("online")
        },
        "rounds_ms": times,
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
