"""Transforms of MONAI, albumentations and torchvision: image, mask and boxes change and still match."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.field import Field
from shardflow.format import Dataset
from shardflow.loading import Loader, LoaderConfig
from shardflow.sampling import BatchSpec
from tests.field_cases import make_case_dataset
from tests.packages import install_beside

SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
FIELDS: Mapping[str, sf.Field] = {
    "image": sf.Image(series="modality in ('CR', 'DX')", size=(12, 16), missing="drop"),
    "report": sf.Text(missing="pad"),
}
SPECS: Mapping[str, Field] = {
    "image": sf.Image(size=(12, 16)),
    "pair": sf.Image(size=(12, 16), num_images=2),
    "ct": sf.Slices(num_slices=3, size=(12, 16)),
    "lungs": sf.Mask(like="image", labels=["a", "b"], merge="stack"),
    "lesions": sf.Mask(like="ct"),
    "spots": sf.Boxes(like="image", max_boxes=4),
    "report": sf.Text(),
}
LUNGS = (slice(2, 7), slice(3, 9))


@pytest.fixture(autouse=True)
def _no_update_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")


def _sample(seed: int) -> dict[str, Any]:
    """Return a sample whose image has the value 200 where the mask is 1, in the box of the spot."""
    image = np.full((1, 12, 16), 10, np.uint8)
    image[:, *LUNGS] = 200
    lungs = np.stack([image[0] > 100, image[0] < 100]).astype(np.uint8)
    boxes = np.zeros((4, 4), np.float32)
    boxes[0] = LUNGS[1].start, LUNGS[0].start, LUNGS[1].stop, LUNGS[0].stop
    boxes[1] = 0, 0, 1, 1
    return {
        "image": image,
        "pair": np.stack([image, image + np.uint8(1)]).astype(np.uint16),
        "ct": np.stack([image, image, image]).astype(np.int16) - 100,
        "lungs": lungs,
        "lesions": np.stack([lungs[:1]] * 3),
        "spots": boxes,
        "spots_mask": np.array([1, 1, 0, 0], np.uint8),
        "spots_label": np.array([5, 6, -1, -1]),
        "spots_index": np.array([0, 0, -1, -1]),
        "report": "clear",
        "__key__": "a",
        "__facts__": [],
        "__rng__": np.random.default_rng(seed),
    }


def _check_matching(found: dict[str, Any], *, has_boxes: bool = True) -> None:
    """Check that masks and boxes are where the image says."""
    image = np.asarray(found["image"], np.float32)
    assert image.shape[1:] == found["lungs"].shape[1:]
    assert np.array_equal(image[0] > 100, found["lungs"][0] == 1)
    assert np.array_equal(image[0] < 100, found["lungs"][1] == 1)
    assert found["lungs"].dtype == np.uint8
    assert np.array_equal(np.asarray(found["ct"], np.float32), np.stack([image] * 3) - 100)
    assert np.array_equal(found["lesions"], np.stack([found["lungs"][:1]] * 3))
    assert np.array_equal(np.asarray(found["pair"][1], np.float32), image + 1)
    assert found["report"] == "clear"
    if not has_boxes:
        return
    inside = found["lungs"][0] == 1
    kept = [label for label, is_box in zip(found["spots_label"], found["spots_mask"], strict=True) if is_box]
    assert (5 in kept) == bool(inside.any())
    if 5 in kept:
        rows, columns = np.nonzero(inside)
        wanted = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert found["spots"][kept.index(5)].tolist() == pytest.approx(wanted, abs=1e-4)
    assert not found["spots"][len(kept) :].any()


def _images(loader: Loader) -> dict[str, Any]:
    with loader:
        return {
            str(key): np.array(batch["image"][slot])
            for batch in loader
            for slot, key in enumerate(batch.info.sample_keys)
            if key is not None
        }


def _loader(dataset: Dataset, transform: Any, **settings: Any) -> Loader:
    return Loader(
        dataset,
        split="train",
        batch=SPEC,
        seed=5,
        fields=FIELDS,
        transform=transform,
        config=LoaderConfig(**settings),
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_case_dataset(tmp_path_factory.mktemp("libraries") / "a", num_samples=14)


def _albumentations() -> Any:
    import albumentations as library

    return library.Compose([library.HorizontalFlip(p=0.5), library.RandomCrop(9, 11)])


def _monai(keys: list[str]) -> Any:
    from monai import transforms as library

    return library.Compose(
        [
            library.RandFlipd(keys=keys, prob=0.5, spatial_axis=-1),
            library.RandFlipd(keys=keys, prob=0.5, spatial_axis=-2),
        ]
    )


def test_albumentations_moves_image_mask_and_boxes_together() -> None:
    transform = sf.adapters.albumentations(_albumentations()).for_fields(SPECS)
    seen = set()
    for seed in range(12):
        found = transform(_sample(seed))
        assert found["image"].shape == (1, 9, 11)
        _check_matching(found)
        seen.add(found["image"].tobytes())
        assert np.array_equal(found["image"], transform(_sample(seed))["image"])
    assert len(seen) > 3


def test_monai_moves_image_and_mask_together() -> None:
    keys = ["image", "pair", "ct", "lungs", "lesions"]
    transform = sf.adapters.monai(_monai(keys)).for_fields(SPECS)
    seen = set()
    for seed in range(12):
        found = transform(_sample(seed))
        plain = {name: np.asarray(value) if name in keys else value for name, value in found.items()}
        _check_matching(plain, has_boxes=False)
        seen.add(plain["image"].tobytes())
    assert len(seen) > 3


def test_monai_takes_a_volume_and_its_mask_as_they_are() -> None:
    from monai import transforms as library

    specs = {"ct": sf.Volume(roi_size=(6, 5, 4)), "lesion": sf.Mask(like="ct")}
    voxels = np.arange(120, dtype=np.int16).reshape(1, 6, 5, 4)
    sample = {"ct": voxels, "lesion": (voxels > 50).astype(np.uint8), "__rng__": np.random.default_rng(0)}
    flipped = library.RandFlipd(keys=["ct", "lesion"], prob=1, spatial_axis=0)
    found = sf.adapters.monai(flipped).for_fields(specs)(sample)
    assert np.array_equal(np.asarray(found["ct"]), voxels[:, ::-1])
    assert np.array_equal(np.asarray(found["lesion"]), voxels[:, ::-1] > 50)
    assert np.asarray(found["lesion"]).dtype == np.uint8
    with pytest.raises(ConfigError, match="cannot move the boxes 'boxes' of a volume"):
        sf.adapters.monai(flipped).for_fields({**specs, "boxes": sf.Boxes(like="ct")})


def test_an_array_transform_of_monai_needs_a_single_field_of_pixels() -> None:
    from monai.transforms import Flip

    with pytest.raises(ConfigError, match=r"take the dictionary transform Flipd\(keys=\[...\]\)"):
        sf.adapters.monai(Flip(spatial_axis=-1)).for_fields(SPECS)(_sample(0))
    alone = sf.adapters.monai(Flip(spatial_axis=-1)).for_fields(FIELDS)
    sample = {name: _sample(0)[name] for name in ("image", "report", "__rng__")}
    assert np.array_equal(np.asarray(alone(sample)["image"]), _sample(0)["image"][:, :, ::-1])


@pytest.mark.parametrize("library", ["albumentations", "monai"])
def test_bare_transforms_are_wrapped_and_equal_in_every_execution(dataset: Dataset, library: str) -> None:
    def make() -> Any:
        return _albumentations() if library == "albumentations" else _monai(["image"])

    plain = _images(_loader(dataset, None))
    one = _images(_loader(dataset, make()))
    assert any(
        image.shape != plain[key].shape or not np.array_equal(image, plain[key]) for key, image in one.items()
    )
    for settings in ({"num_threads": 4}, {"execution": "workers", "num_threads": 1}):
        other = _images(_loader(dataset, make(), **settings))
        assert all(np.array_equal(one[key], image) for key, image in other.items())
    states = []
    for _ in range(2):
        with _loader(dataset, make()) as loader:
            states.append(loader.state_dict()["content_id"])
    assert states[0] == states[1]


def test_torchvision_moves_image_mask_and_boxes_together() -> None:
    # Other libraries look for it, and fail where it was built for another torch.
    folder = install_beside("torchvision", "0.28.0")
    cases = Path(__file__).parent / "torchvision_cases.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(cases)]
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kinds\['x'\]"):
        sf.adapters.monai(object(), kinds={"x": "volume"})  # type: ignore[dict-item]
