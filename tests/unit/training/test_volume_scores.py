"""Dice of volumes whose windows many ranks ran: equal to that of whole volumes, on any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shardflow as sf
from shardflow.format import Dataset
from shardflow.loading import World
from shardflow.training.tasks.scores import VolumeMeter
from tests.integration.loader_support import flip_bit, locate
from tests.volume_cases import VolumeSeries, affine_of, make_volumes, stored_volume

ROI = (4, 6, 5)
NAMES = ("low", "high")
NUM_VOLUMES, BROKEN = 5, 2
Scores = dict[str, float | None]


@dataclass
class _Exchange:
    """What threads that stand in for ranks give each other, one exchange after the other."""

    barrier: threading.Barrier
    values: dict[int, Any] = field(default_factory=dict)


class _Ranks:
    """The collectives of `shardflow.training.distributed.Ranks`, between threads."""

    timeouts = SimpleNamespace(control_s=60.0)

    def __init__(self, rank: int, world_size: int, exchange: _Exchange) -> None:
        self.rank, self.world_size, self._exchange = rank, world_size, exchange

    def all_gather_json(self, value: Any) -> list[Any]:
        self._exchange.values[self.rank] = value
        self._exchange.barrier.wait(300)
        found = [self._exchange.values[rank] for rank in range(self.world_size)]
        self._exchange.barrier.wait(300)
        return found

    def all_gather_numbers(self, values: Any, timeout_s: float) -> torch.Tensor:
        return torch.stack([torch.as_tensor(np.array(one)) for one in self.all_gather_json(values)]).double()

    def reduce_integers(self, values: torch.Tensor, rank: int, *, is_largest: bool = False) -> None:
        every = torch.stack(self.all_gather_json(values.clone()))
        if rank == self.rank:
            values.copy_(every.amax(dim=0) if is_largest else every.sum(dim=0))


def series_of(number: int) -> Sequence[VolumeSeries]:
    random = np.random.default_rng(number)
    voxels = random.integers(-1000, 1000, random.integers(3, 12, 3)).astype("int16")
    return [VolumeSeries(voxels=voxels, affine=affine_of((2, 1, 1)))]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    found = make_volumes(tmp_path_factory.mktemp("scores") / "data", series_of, num_samples=NUM_VOLUMES)
    path, offset, _ = locate(found, BROKEN, "s000.i0000")
    flip_bit(path, offset + 20)
    return found


def classes_of(voxels: NDArray[Any]) -> NDArray[np.uint8]:
    return np.asarray(np.digitize(voxels, (-200, 500)), np.uint8)


def outputs_of(voxels: NDArray[Any]) -> NDArray[np.float32]:
    """Logits that are right for most voxels, whatever window they are in."""
    steps = (np.zeros_like(voxels), voxels + 100.0, 1.7 * voxels - 350.0)
    return np.stack(steps, axis=-4).astype(np.float32)


def measured(dataset: Dataset, world_size: int, *, has_overlaps: bool) -> list[Scores]:
    """Return what each rank measures of the volumes."""
    spec = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
    fields = {"image": sf.Volume(roi_size=ROI, center="grid", overlap=0.5)}
    exchange = _Exchange(threading.Barrier(world_size))
    task = SimpleNamespace(names=NAMES, has_overlaps=has_overlaps, num_outputs=2 if has_overlaps else 3)
    config = sf.LoaderConfig(num_threads=1, max_bad_samples=999, max_bad_share=1.0)

    def run(rank: int) -> Scores:
        world = World(rank=rank, world_size=world_size)
        with sf.Loader(
            dataset,
            split="train",
            seed=0,
            unit="window",
            batch=spec,
            fields=fields,
            world=world,
            config=config,
        ) as loader:
            ranks: Any = _Ranks(rank, world_size, exchange)
            meter = VolumeMeter(task, loader.selection, ranks, roi_size=ROI, mode="gaussian")
            for batch in loader:
                image = batch["image"][:, 0].astype(float)
                classes, outputs = classes_of(image)[:, None], outputs_of(image)
                if has_overlaps:
                    classes = np.concatenate([classes >= 1, classes >= 2], axis=1).astype(np.uint8)
                    outputs = outputs[:, 1:]
                tensors = {
                    "row": torch.from_numpy(batch.arrays["row"].copy()),
                    "start": torch.from_numpy(batch["image_start"].copy()),
                    "shape": torch.from_numpy(batch["image_shape"].copy()),
                    "is_known": torch.from_numpy(batch.info.weight > 0),
                    "target": torch.from_numpy(classes),
                }
                weights = torch.from_numpy(batch.info.weight.copy())
                meter.add(SimpleNamespace(tensors=tensors, weights_B=weights), torch.from_numpy(outputs))
            return meter.finish()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


@pytest.mark.parametrize("has_overlaps", [False, True])
def test_dice_is_that_of_whole_volumes_on_any_number_of_ranks(
    dataset: Dataset, has_overlaps: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[list[float]] = [[], []]
    for row in range(NUM_VOLUMES):
        if row == BROKEN:
            continue
        voxels = stored_volume(dataset, row).astype(float)
        outputs, classes = outputs_of(voxels), classes_of(voxels)
        for label in range(2):
            predicted = outputs[label + 1] > 0 if has_overlaps else outputs.argmax(axis=0) == label + 1
            marked = classes >= label + 1 if has_overlaps else classes == label + 1
            if predicted.any() or marked.any():
                expected[label].append(2 * (predicted & marked).sum() / (predicted.sum() + marked.sum()))
    (one,) = measured(dataset, 1, has_overlaps=has_overlaps)
    assert one["dice/low"] == pytest.approx(np.mean(expected[0]), abs=1e-12)
    assert one["dice/high"] == pytest.approx(np.mean(expected[1]), abs=1e-12)
    assert 0.5 < float(one["dice"] or 0) < 1
    counted = [one[f"num_{name}volumes"] for name in ("", "incomplete_", "unannotated_")]
    assert counted == [NUM_VOLUMES - 1, 1, 0]
    assert dataset.samples.sample_key(BROKEN) in caplog.text
    monkeypatch.setattr("shardflow.training.tasks.scores._SLAB_BYTES", 1000)  # several slabs a volume
    for world_size in (2, 4):
        for found in measured(dataset, world_size, has_overlaps=has_overlaps):
            assert found == one
