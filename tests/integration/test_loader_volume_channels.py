"""Volumes that are like another one: the same region of another series, at the same places in the patient."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - as everyone does
from numpy.typing import NDArray

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.volumes.geometry import Affine, Grid, alongside
from shardflow.format import Dataset
from shardflow.sampling import BatchSpec
from tests.integration.loader_support import check_everywhere, open_loader, slots_of
from tests.volume_cases import VolumeSeries, affine_of, make_volumes

NUM_SAMPLES = 8
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
ROI = (6, 7, 9)
WITHOUT = 5
"""Number of a study without the second sequence."""
CT, PET = "modality == 'CT'", "modality == 'PT'"


@cache
def series_of(number: int) -> list[VolumeSeries]:
    """A CT, one on its grid, and a PET of another grid, turned against it in every third study."""
    random = np.random.default_rng(number)
    affine = affine_of(random.uniform(0.7, 2, 3), turn=0.3 * (number % 2), flip=number % 4 == 1)
    voxels = random.integers(-1000, 2000, (9, 12, 13)).astype(np.int16)
    ct = VolumeSeries(voxels=voxels, affine=affine, brick_shape=(3, 5, 4) if number % 2 else None)
    # As files round: the third axis is off by a fraction of a micrometer.
    near = affine + np.array([[1e-7], [-1e-7], [1e-7], [0]])
    twin = replace(ct, voxels=(voxels // 2).astype(np.int16), affine=near, modality="MR", unit="raw")
    other = affine_of(random.uniform(1.5, 3, 3), turn=0.3 * (number % 2) + 0.2 * (number % 3 == 0))
    other[:3, 3] = affine[:3, 3] - 2
    smooth = np.add.outer(np.add.outer(np.arange(8) * 40.0, np.arange(9) * 9), np.arange(10) * 3)
    pet = VolumeSeries(voxels=smooth.astype(np.uint16), affine=other, modality="PT", unit="BQML")
    return [ct] if number == WITHOUT else [ct, twin, pet]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_volumes(tmp_path_factory.mktemp("volumes") / "data", series_of, num_samples=NUM_SAMPLES)


def fields_of(**settings: Any) -> dict[str, sf.Field]:
    return {
        "pet": sf.Volume(like="ct", series=PET, dtype="float32", missing="pad", valid_mask=True),
        "ct": sf.Volume(series=CT, roi_size=ROI, **settings),
        "twin": sf.Volume(like="ct", series="modality == 'MR'", missing="pad"),
    }


def by_itk(series: VolumeSeries, affine: NDArray[np.float64], fill: float) -> NDArray[np.float32]:
    """Resample a series on the grid that an affine of delivered voxels states."""

    def placed(image: sitk.Image, own: NDArray[np.float64]) -> sitk.Image:
        columns = own[:3, [2, 1, 0]]
        steps = np.linalg.norm(columns, axis=0)
        image.SetSpacing(steps.tolist())
        image.SetDirection((columns / steps).ravel().tolist())
        image.SetOrigin(own[:3, 3].tolist())
        return image

    moving = placed(sitk.GetImageFromArray(series.voxels.astype(np.float32)), series.affine)
    grid = placed(sitk.GetImageFromArray(np.zeros(ROI, np.float32)), affine)
    return np.asarray(
        sitk.GetArrayFromImage(sitk.Resample(moving, grid, sitk.Transform(), sitk.sitkLinear, fill))
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"orientation": "RAS", "spacing_mm": (1.5, 1.0, 2.0)}, {"margin": 1, "center": "middle"}],
    ids=["stored", "spaced", "margin"],
)
def test_it_is_the_same_region_of_another_series(dataset: Dataset, settings: dict[str, Any]) -> None:
    if "margin" in settings:
        settings = {**settings, "roi_size": tuple(side - 2 for side in ROI)}
    fields = fields_of(**{key: value for key, value in settings.items() if key != "roi_size"})
    if "roi_size" in settings:
        fields["ct"] = sf.Volume(series=CT, **settings)
    seen = set()
    with open_loader(dataset, SPEC, fields) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader:
                assert batch["pet"].shape == batch["ct"].shape == batch["twin"].shape == (2, 1, *ROI)
                for slot, number in slots_of(batch):
                    seen.add(number)
                    if number == WITHOUT:
                        assert batch["pet_mask"][slot] == batch["twin_mask"][slot] == 0
                        assert not batch["pet_valid"][slot].any()
                        continue
                    affine = batch["ct_affine"][slot]
                    np.testing.assert_allclose(batch["twin_affine"][slot], affine, atol=0.02)
                    np.testing.assert_allclose(batch["pet_affine"][slot], affine, atol=0.02)
                    itk = by_itk(series_of(number)[2], batch["pet_affine"][slot], 0.0)
                    # Half-way points are inside by one rule or the other: compared where both say so.
                    both = batch["pet_valid"][slot, 0].astype(bool) & (itk > 0)
                    np.testing.assert_allclose(batch["pet"][slot, 0][both], itk[both], atol=0.05)
                    assert (batch["pet"][slot, 0][batch["pet_valid"][slot, 0] == 0] == 0).all()
                    if not settings:
                        inside = batch["ct"][slot] != -1024
                        assert (batch["twin"][slot][inside] == batch["ct"][slot][inside] // 2).all()
    assert len(seen) == NUM_SAMPLES


def test_it_is_equal_everywhere_and_after_a_resume(dataset: Dataset) -> None:
    fields = fields_of(num_samples=2)
    found = check_everywhere(lambda **settings: open_loader(dataset, SPEC, fields, **settings))
    assert len(found) == NUM_SAMPLES


def test_windows_of_an_evaluation_show_all_series(dataset: Dataset) -> None:
    fields = fields_of(center="grid", overlap=0.0)
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=1, tail="mask")
    num_windows = 0
    with open_loader(dataset, spec, fields, unit="window") as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is not None and batch["twin_mask"][slot]:
                    inside = batch["ct"][slot] != -1024
                    assert (batch["twin"][slot][inside] == batch["ct"][slot][inside] // 2).all()
                    num_windows += 1
    assert num_windows > NUM_SAMPLES


def test_masks_follow_volumes_that_are_like_another(dataset: Dataset) -> None:
    fields = {"mask": sf.Mask(like="twin"), **fields_of()}
    with open_loader(dataset, SPEC, fields) as loader:
        assert next(iter(loader))["mask"].shape == (2, 1, *ROI)


def test_a_series_that_is_missing_may_be_dropped(dataset: Dataset) -> None:
    fields = {"ct": sf.Volume(series=CT, roi_size=ROI), "mr": sf.Volume(like="ct", series="modality == 'MR'")}
    with pytest.raises(ConfigError, match="1 of 8 samples have no series for the field 'mr'"):
        open_loader(dataset, SPEC, fields)
    fields["mr"] = replace(fields["mr"], missing="drop")
    with open_loader(dataset, SPEC, fields) as loader:
        assert {number for batch in loader for _, number in slots_of(batch)} == {*range(NUM_SAMPLES)} - {
            WITHOUT
        }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"a": {"like": "b"}}, "name one of: none"),
        ({"a": {"like": "a"}}, "name one of: none"),
        ({"a": {"like": "b"}, "b": {"like": "a"}}, "name one of: none"),
        ({"a": {"like": "b"}, "b": {"like": "c"}, "c": {"roi_size": ROI}}, "name one of: c"),
        ({"a": {"like": "b", "roi_size": ROI}}, "like='b' delivers the region of that field, which roi_size"),
        ({"a": {"like": "b", "spacing_mm": (1, 1, 1)}}, "which spacing_mm"),
        ({"a": {"like": "b", "num_samples": 2}}, "which num_samples"),
        ({"a": {"like": 3}}, "like is the name"),
        ({"a": {}}, "A volume needs roi_size"),
    ],
)
def test_slips_are_one_sentence(dataset: Dataset, fields: dict[str, dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_loader(dataset, SPEC, {name: sf.Volume(**one) for name, one in fields.items()})


def test_series_without_a_place_cannot_be_brought_together(tmp_path: Path) -> None:
    unknown = VolumeSeries(voxels=np.zeros((4, 5, 6), np.int16), modality="MR")
    made = make_volumes(tmp_path / "data", lambda _: [series_of(1)[0], unknown], num_samples=2)
    fields: dict[str, sf.Field] = {
        "ct": sf.Volume(series=CT, roi_size=ROI),
        "mr": sf.Volume(like="ct", series="modality == 'MR'"),
    }
    with pytest.raises(ConfigError, match="2 series of the field 'mr' have no known place"):
        open_loader(made, SPEC, fields)
    fields = {"mr": sf.Volume(series="modality == 'MR'", roi_size=ROI), "ct": sf.Volume(like="mr", series=CT)}
    with pytest.raises(ConfigError, match="2 series of the field 'mr' have no known place"):
        open_loader(made, SPEC, fields)


def test_other_frames_of_reference_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def of(frames: tuple[str | None, str | None], number: int) -> list[VolumeSeries]:
        both = zip(series_of(number)[:2], frames, strict=True)
        return [replace(one, extra={"frame_of_reference_key": frame}) for one, frame in both]

    for frames, num_said in ((("a", "b"), 1), (("a", "a"), 0), (("a", None), 0)):
        made = make_volumes(tmp_path / f"{frames[1]}", partial(of, frames), num_samples=4)
        fields = {name: one for name, one in fields_of().items() if name != "pet"}
        caplog.clear()
        with caplog.at_level(logging.WARNING), open_loader(made, SPEC, fields) as loader:
            assert list(loader)
        said = [one for one in caplog.messages if "frame of reference" in one]
        assert len(said) == num_said


def test_grids_that_differ_by_rounding_alone_are_copied() -> None:
    affine = Affine.of_series(np.column_stack([np.diag([0.7, 0.8, 2.0]), [1, 2, 3]]))
    near = Affine.of_series(np.column_stack([np.diag([0.7, 0.8, 2.0]) + 1e-7, [1.001, 2, 3]]))
    turned = Affine.of_series(np.column_stack([np.diag([0.7, 0.8, 2.0]) + 1e-3, [1, 2, 3]]))
    assert affine is not None
    assert near is not None
    assert turned is not None
    grid = Grid((64, 64, 64)).cropped((3, 4, 5), (32, 32, 32))
    assert alongside(grid, affine, near).is_copy
    assert alongside(grid, affine, affine) == grid
    found = alongside(grid, affine, turned)
    assert found.axes is None
    ends = np.array([(0, 0, 0), (31, 31, 31)], float)
    for end in ends:
        place = grid.affine(affine).to_array() @ [*end, 1]
        other = turned.to_array() @ [*found.stored((end[0], end[1], end[2])), 1]
        np.testing.assert_allclose(place, other, atol=1e-9)
