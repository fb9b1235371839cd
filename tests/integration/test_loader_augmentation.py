"""Augmented volumes of a loader: sampled where their affines say, equal on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, World
from shardflow.sampling import BatchSpec
from tests.integration.loader_support import open_loader, slots_of
from tests.integration.test_loader_volume_regions import NUM_SAMPLES, UNSEEN, extra_of, regions_of, series_of
from tests.volume_cases import make_volumes

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
ROI = (5, 6, 7)
MARGIN = (4, 4, 3)
SIZE = tuple(side + 2 * more for side, more in zip(ROI, MARGIN, strict=True))
ALWAYS: dict[str, Any] = {
    "rotate_prob": 1.0,
    "zoom_prob": 1.0,
    "zoom": (0.6, 0.9),
    "flip_prob": (0.5, 0.5, 0.5),
}
EVERYTHING: dict[str, Any] = {
    **ALWAYS,
    "elastic_prob": 1.0,
    "noise_prob": 1.0,
    "blur_prob": 1.0,
    "gamma_prob": 1.0,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("augmented") / "data"
    return make_volumes(folder, series_of, num_samples=NUM_SAMPLES, extra_of=extra_of)


def open_volumes(source: Dataset, **settings: Any) -> Loader:
    fields = {
        "ct": sf.Volume(roi_size=ROI, margin=MARGIN, valid_mask=True, **settings.pop("volume", {})),
        "nodule": sf.Mask(like="ct", labels=["nodule"]),
        "box": sf.Boxes(like="ct", labels=["nodule"]),
    }
    return open_loader(source, settings.pop("batch", SPEC), fields, **settings)


@pytest.mark.parametrize("spacing", [None, (1.0, 0.9, 1.2)])
def test_volumes_and_masks_are_where_the_affine_says(
    dataset: Dataset, spacing: tuple[float, float, float] | None
) -> None:
    augmentation = sf.VolumeAugmentation(roi_size=ROI, spacing_mm=spacing, seed=5, **ALWAYS)
    grid = np.stack(np.meshgrid(*map(np.arange, ROI), indexing="ij"), axis=-1)
    num_seen = 0
    with open_volumes(dataset) as loader:
        for batch in loader:
            found = augmentation(batch)
            assert found["ct"].shape == (2, 1, *ROI)
            assert found["ct"].dtype == torch.float32
            assert torch.equal(found["weight"], batch.torch()["weight"])
            for slot, number in slots_of(batch):
                affine = found["ct_affine"][slot].numpy()
                points = grid @ affine[:3, :3].T + affine[:3, 3]
                series = series_of(number)[0]
                _check_grid(affine, spacing or np.linalg.norm(series.affine[:3, :3], axis=0))
                at = _indices(points, series.affine)
                in_region = _indices(points, batch["ct_affine"][slot])
                is_known = _is_within(at, series.voxels.shape, 0.0) & _is_within(in_region, SIZE, 0.0)
                expected = ndimage.map_coordinates(series.voxels.astype(float), at, order=1)
                values = found["ct"][slot, 0].numpy()
                np.testing.assert_allclose(values[is_known], expected[is_known], atol=0.05)  # HU
                assert (found["ct_valid"][slot, 0].numpy()[is_known] == 1).all()
                is_outside = ~_is_within(at, series.voxels.shape, 0.5 + 1e-6)
                assert (found["ct_valid"][slot, 0].numpy()[is_outside] == 0).all()
                num_seen += int(is_known.sum())
                assert found["nodule_mask"][slot] == (number != UNSEEN)
                if number != UNSEEN:
                    _check_regions(found, slot, number, at, is_known)
    assert num_seen > 500


def _check_grid(affine: np.ndarray[Any, Any], spacing: Any) -> None:
    """Axes are perpendicular, and voxels have the wanted sides, all zoomed by one factor."""
    squares = affine[:3, :3].T @ affine[:3, :3]
    zooms = np.sqrt(np.diag(squares)) / np.array(spacing)
    np.testing.assert_allclose(squares - np.diag(np.diag(squares)), 0, atol=1e-9)
    np.testing.assert_allclose(zooms, zooms[0], rtol=1e-9)
    assert 0.6 <= zooms[0] <= 0.9


def _indices(points: np.ndarray[Any, Any], affine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.moveaxis((points - affine[:3, 3]) @ np.linalg.inv(affine[:3, :3]).T, -1, 0)


def _is_within(at: np.ndarray[Any, Any], shape: Any, more: float) -> Any:
    last = np.array(shape).reshape(3, 1, 1, 1) - 1
    found: Any = ((at >= -more) & (at <= last + more)).all(axis=0)
    return found


def _check_regions(found: Any, slot: int, number: int, at: Any, is_known: Any) -> None:
    shown: Any = np.zeros(ROI, bool)
    nearest = np.rint(at).astype(int)
    is_sure = is_known & (np.abs(at % 1 - 0.5) > 1e-6).all(axis=0)
    for one in regions_of(number):
        if one["label"] == "nodule":
            covered = one["voxels"] > 0
            shown |= covered[tuple(np.clip(nearest, 0, np.array(covered.shape).reshape(3, 1, 1, 1) - 1))]
    mask = found["nodule"][slot, 0].numpy()
    assert (mask[is_sure] == shown[is_sure]).all()
    boxes = found["box"][slot].numpy()[found["box_mask"][slot].numpy() == 1]
    for voxel in np.argwhere(mask):
        inside = [((box[:3] <= voxel + 1) & (box[3:] >= voxel)).all() for box in boxes]
        assert any(inside)
    assert (found["box_label"][slot].numpy()[found["box_mask"][slot].numpy() == 0] == -1).all()


def _contents(augmentation: sf.VolumeAugmentation, batch: Batch) -> dict[str, bytes]:
    return {
        name: value.numpy().tobytes()
        for name, value in augmentation(batch).items()
        if isinstance(value, torch.Tensor)
    }


def test_batches_are_equal_on_any_number_of_ranks_and_after_a_resume(dataset: Dataset) -> None:
    augmentation = sf.VolumeAugmentation(roi_size=ROI, seed=5, **EVERYTHING)

    def batches(**settings: Any) -> dict[tuple[int, int], dict[str, bytes]]:
        state = settings.pop("state", None)
        with open_volumes(dataset, batch=spec, **settings) as loader:
            if state is not None:
                loader.load_state_dict(state)
            return {(one.step, one.micro): _contents(augmentation, one) for one in loader}

    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=4, tail="mask")
    whole = batches()
    assert len({one["ct"] for one in whole.values()}) == len(whole)
    for world_size in (2, 4):
        parts: dict[tuple[int, int], dict[str, bytes]] = {}
        for rank in range(world_size):
            parts |= batches(world=World(rank=rank, world_size=world_size))
        assert parts == whole
    with open_volumes(dataset, batch=spec) as loader:
        for batch in loader:
            if batch.micro == spec.micro_batches_per_step - 1:
                break
        state = loader.state_dict()
    assert batches(state=state) == {place: one for place, one in whole.items() if place[0] >= 1}


def test_another_seed_and_epoch_are_another_augmentation(dataset: Dataset) -> None:
    def values(seed: int, epoch: int) -> list[bytes]:
        augmentation = sf.VolumeAugmentation(roi_size=ROI, seed=seed, **EVERYTHING)
        loader.set_epoch(epoch)
        return [_contents(augmentation, batch)["ct"] for batch in loader]

    with open_volumes(dataset, volume={"center": "middle"}) as loader:
        first = values(5, 0)
        assert values(5, 0) == first
        assert not {*first} & {*values(6, 0), *values(5, 1)}


def test_for_evaluation_only_the_size_changes(dataset: Dataset) -> None:
    augmentation = sf.VolumeAugmentation(roi_size=ROI, seed=5, **EVERYTHING).for_evaluation()
    inner = tuple(slice(more, more + side) for side, more in zip(ROI, MARGIN, strict=True))
    with open_volumes(dataset) as loader:
        for batch in loader:
            found = augmentation(batch)
            for slot, number in slots_of(batch):
                if number % 2:
                    continue  # tilted: the result is upright
                assert (found["ct"][slot, 0].numpy() == batch["ct"][slot, 0][inner]).all()
                assert (found["nodule"][slot, 0].numpy() == batch["nodule"][slot, 0][inner]).all()


def test_a_region_that_is_too_small_is_logged_once(
    dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    augmentation = sf.VolumeAugmentation.preset("geometry", roi_size=ROI)
    for name, more, num_lines in (("forgotten", (0, 0, 0), 1), ("given", (20, 20, 20), 0)):
        caplog.clear()
        with open_loader(dataset, SPEC, {name: sf.Volume(roi_size=ROI, margin=more)}) as loader:
            for batch in loader:
                augmentation(batch)
        lines = [
            one.getMessage() for one in caplog.records if "margin=augmentation.margin" in one.getMessage()
        ]
        assert len(lines) == num_lines
        assert all("delivers 5 x 6 x 7 voxels" in line for line in lines)


def test_what_cannot_be_augmented_is_one_sentence(dataset: Dataset, tmp_path: Path) -> None:
    augmentation = sf.VolumeAugmentation(roi_size=ROI, seed=5, spacing_mm=(1, 1, 1))
    with (
        open_loader(dataset, SPEC, {"slices": sf.Slices(num_slices=2, size=(8, 8))}) as loader,
        pytest.raises(ConfigError, match=r"no field of type volume .* sf.Volume"),
    ):
        augmentation(next(iter(loader)))

    def unplaced(number: int) -> Any:
        return [type(series_of(number)[0])(voxels=series_of(number)[0].voxels)]

    made = make_volumes(tmp_path / "data", unplaced, num_samples=4)
    with (
        open_loader(made, SPEC, {"ct": sf.Volume(roi_size=ROI, margin=MARGIN)}) as loader,
        pytest.raises(ConfigError, match="no known place in millimeters"),
    ):
        augmentation(next(iter(loader)))
