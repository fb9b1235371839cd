"""Volumes: a region is where its affine says, equal on every way there; only its slices are read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - as everyone does
import torch
from numpy.typing import NDArray

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.keys import slice_field
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec
from shardflow.storage import ByteRange
from tests.integration.loader_support import (
    batches_of,
    flip_bit,
    hooked,
    locate,
    open_loader,
    slots_of,
)
from tests.volume_cases import VolumeSeries, affine_of, make_volumes, stored_volume

pytestmark = pytest.mark.fast

NUM_SAMPLES = 10
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
ROI = (6, 7, 9)
WITHOUT = 7
"""Number of a study without a volume."""


@cache
def series_of(number: int) -> list[VolumeSeries]:
    """Volumes of many shapes, dtypes and orientations; a larger one that was acquired later beside them."""
    random = np.random.default_rng(number)
    shape = random.integers(4, 15, 3)
    dtype = ("int16", "int8", "uint8")[number % 3]
    limits = np.iinfo(dtype)
    voxels = random.integers(max(limits.min, -1000), min(limits.max, 2000), shape).astype(dtype)
    affine = affine_of(
        random.uniform(0.5, 4, 3), turn=0.7 * (number % 4), tilt=0.2 * (number % 2), flip=number % 5 == 1
    )
    later = VolumeSeries(voxels=np.full((20, 20, 20), 7, np.int16), affine=affine)
    localizer = VolumeSeries(voxels=np.zeros((1, 8, 8), np.int16), kind="localizer")
    bricks = (3, 5, 4) if number % 2 else None
    first = VolumeSeries(voxels=voxels, affine=affine, brick_shape=bricks)
    return [localizer] if number == WITHOUT else [first, localizer, later]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_volumes(tmp_path_factory.mktemp("volumes") / "data", series_of, num_samples=NUM_SAMPLES)


def loader_of(source: Dataset | str, volume: sf.Field, **settings: Any) -> Loader:
    return open_loader(source, SPEC, {"ct": volume}, **settings)


def places_of(
    affine: NDArray[np.float64], shape: Sequence[int], stored: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the stored indices of each voxel of a delivered array, ``(D, H, W, 3)``."""
    indices = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    inverse = np.linalg.inv(stored) @ affine
    return indices @ inverse[:3, :3].T + inverse[:3, 3]


def expected(
    dataset: Dataset, row: int, affine: NDArray[np.float64], stored: NDArray[np.float64], shape: Sequence[int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the voxels at the places of a delivered array, which are stored ones, and which are inside."""
    volume = stored_volume(dataset, row).astype(int)
    places = places_of(affine, shape, stored)
    nearest = np.rint(places).astype(int)
    assert np.abs(places - nearest).max() < 1e-6
    is_inside = np.asarray(((nearest >= 0) & (nearest < volume.shape)).all(axis=-1))
    clipped = np.clip(nearest, 0, np.array(volume.shape) - 1)
    return np.where(is_inside, volume[tuple(np.moveaxis(clipped, -1, 0))], -1024), is_inside


@pytest.mark.parametrize("orientation", [None, "RAS", "SPL", "PIR"])
def test_a_region_holds_the_stored_voxels_of_its_affine(dataset: Dataset, orientation: str | None) -> None:
    volume = sf.Volume(roi_size=ROI, orientation=orientation, valid_mask=True, missing="pad")
    starts, num_slots = set(), 0
    with loader_of(dataset, volume) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            for batch in loader:
                assert batch["ct"].shape == (2, 1, *ROI)
                assert batch["ct"].dtype == np.int16
                for slot, number in slots_of(batch):
                    if number == WITHOUT:
                        assert batch["ct_mask"][slot] == 0
                        assert (batch["ct"][slot] == -1024).all()
                        assert not batch["ct_valid"][slot].any()
                        continue
                    stored, affine = series_of(number)[0].affine, batch["ct_affine"][slot]
                    voxels, is_inside = expected(dataset, number, affine, stored, ROI)
                    assert (batch["ct"][slot, 0] == voxels).all()
                    assert (batch["ct_valid"][slot, 0] == is_inside).all()
                    assert batch["ct_range"][slot].tolist() == [-100, 300 + number]
                    # A region is inside along every axis that is long enough.
                    lengths = places_of(affine, ROI, stored)[[0, -1], [0, -1], [0, -1]]
                    lowest, highest = lengths.min(axis=0), lengths.max(axis=0)
                    sides = stored_volume(dataset, number).shape
                    needed = highest - lowest + 1
                    assert ((lowest > -0.5) | (needed > np.array(sides))).all()
                    starts.add((number, *affine[:3, 3]))
                    num_slots += 1
    assert num_slots == 3 * (NUM_SAMPLES - 1)
    assert len(starts) > 2 * NUM_SAMPLES


def test_axes_run_where_the_codes_say(dataset: Dataset) -> None:
    for codes, axes in {"RAS": [(0, -1), (1, -1), (2, 1)], "SPL": [(2, 1), (1, 1), (0, 1)]}.items():
        with loader_of(
            dataset, sf.Volume(roi_size=ROI, orientation=codes, missing="drop"), where=None
        ) as loader:
            for batch in loader:
                for slot, number in slots_of(batch):
                    if number % 4 == 0:  # others are turned by more than 45 degrees
                        directions = batch["ct_affine"][slot, :3, :3]
                        for column, (axis, sign) in zip(directions.T, axes, strict=True):
                            assert np.abs(column).argmax() == axis
                            assert np.sign(column[axis]) == sign


def test_only_the_slices_of_a_region_are_read(dataset: Dataset) -> None:
    num_read = {}
    for depth in (3, 20):
        ranges: list[ByteRange] = []
        opened, _ = hooked(dataset.store.url, lambda _, wanted, ranges=ranges: ranges.extend(wanted))  # type: ignore[misc]
        volume = sf.Volume(series="rows == 20", roi_size=(depth, 20, 20), missing="drop")
        with loader_of(opened, volume) as loader:
            for _ in loader:
                pass
        num_read[depth] = len(ranges)
    num_samples = NUM_SAMPLES - 1
    assert num_read == {3: num_samples * 4, 20: num_samples * 21}  # and the description of each study


def test_a_bad_slice_masks_the_slot(dataset: Dataset, tmp_path: Path) -> None:
    copied = make_volumes(tmp_path / "data", series_of, num_samples=NUM_SAMPLES)
    path, offset, num_bytes = locate(copied, 2, slice_field(0, 1, "b2nd"))
    flip_bit(path, offset + num_bytes // 2)
    whole = sf.Volume(roi_size=(15, 15, 15), center="middle", missing="pad")
    with loader_of(copied, whole) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                is_bad = number == 2
                assert batch.info.weight[slot] == (0 if is_bad else 1)
                if is_bad:
                    assert (batch["ct"][slot] == -1024).all()
                    assert batch["ct_mask"][slot] == 0
                    assert (batch["ct_affine"][slot] == np.eye(4)).all()
        (row,) = loader.quarantined
    assert row.reason == "CHECKSUM_MISMATCH"


def test_a_bad_brick_masks_the_slots_that_need_it(tmp_path: Path) -> None:
    copied = make_volumes(tmp_path / "data", series_of, num_samples=NUM_SAMPLES)
    volume = sf.Volume(roi_size=(15, 15, 15), center="middle", missing="pad")
    bricks = copied.shard_index(1).volume(copied.shard_index(1).volumes_of(0)[0])  # of study 3
    plan = bricks.plan((0, 0, 0), (1, 1, 1))
    path = Path(copied.store.url) / copied.manifest.shards[1].path
    flip_bit(path, int(plan.offsets[0]) + int(plan.num_bytes[0]) // 2)
    with loader_of(copied, volume) as loader:
        masked = {
            number for batch in loader for slot, number in slots_of(batch) if not batch.info.weight[slot]
        }
        assert masked == {3}
        assert loader.quarantined[0].reason == "CHECKSUM_MISMATCH"
    inside = sf.Volume(roi_size=(1, 1, 1), center="middle", missing="pad")
    with loader_of(copied, inside) as loader:  # other bricks are read
        assert all(batch.info.weight.all() for batch in loader if None not in batch.info.sample_keys)


def test_a_sample_without_a_series(dataset: Dataset) -> None:
    with pytest.raises(
        ConfigError, match="1 of 10 samples have no series for the field 'ct'; write missing="
    ):
        loader_of(dataset, sf.Volume(roi_size=ROI))
    with loader_of(dataset, sf.Volume(roi_size=ROI, missing="drop")) as loader:
        assert WITHOUT not in {number for batch in loader for _, number in slots_of(batch)}


def test_evaluation_takes_the_middle(dataset: Dataset) -> None:
    volume = sf.Volume(roi_size=ROI, missing="pad").for_evaluation()
    assert volume == sf.Volume(roi_size=ROI, missing="pad", center="middle")
    assert (
        batches_of(loader_of(dataset, volume, seed=1)).keys() == batches_of(loader_of(dataset, volume)).keys()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"roi_size": (96, 96)}, r"roi_size is voxels \(D, H, W\), such as \(96, 96, 96\)"),
        ({"roi_size": (96, 96, 0)}, "each side of roi_size is a number from 1 to 2,048"),
        (
            {"center": "anywhere"},
            "center is one of 'random', 'foreground', 'body', 'finding', 'middle', 'whole'",
        ),
        ({"orientation": "RAR"}, "orientation is three letters"),
        ({"spacing_mm": (1, 0, 1)}, r"spacing_mm is three numbers from 0\.01 to 1000 of millimeters"),
        ({"spacing_mm": (1e9, 1, 1)}, r"spacing_mm is three numbers from 0\.01 to 1000 of millimeters"),
        ({"spacing_mm": (1, 1, 1), "center": "whole"}, "leave spacing_mm out, or write center='middle'"),
        ({"placement": "itk", "spacing_mm": (1, 1, 1)}, "placement is one of 'centered', 'monai', 'torch'"),
        ({"placement": "monai"}, "placement='monai' is of points in millimeters; write spacing_mm"),
        ({"interpolation": "sinc"}, "interpolation is one of 'linear', 'nearest', 'cubic'"),
        ({"spacing_mm": "123"}, "spacing_mm is three numbers"),
        ({"spacing_mm": (True, 1, 1)}, "spacing_mm is three numbers"),
        ({"windows": "lung"}, r"write windows=\['lung'\]"),
        ({"windows": (40, 400)}, r"write windows=\[\(40, 400\)\]"),
        ({"windows": None}, "windows is a list of windows, such as"),
        ({"windows": [("40", "400")]}, r"each window is \(center, width\)"),
        ({"center": "foreground", "labels": 5}, "labels is a list of different names"),
        ({"windows": [(40, 0)]}, r"each window is \(center, width\)"),
        ({"windows": [(40, 400)], "dtype": "int16"}, "windows are delivered as float32"),
        ({"margin": -1}, "margin is a number of voxels"),
        ({"series": " "}, "series is an expression"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sf.Volume(**{"roi_size": ROI, **settings})


def test_arrays_of_numpy_are_sizes_and_distances() -> None:
    plain = sf.Volume(roi_size=ROI, spacing_mm=(1.5, 1.0, 2.0), windows=[(40, 400)])
    array = sf.Volume(
        roi_size=np.array(ROI),  # type: ignore[arg-type]
        spacing_mm=np.array([1.5, 1.0, 2.0], np.float32),  # type: ignore[arg-type]
        windows=np.array([[40, 400]]),  # type: ignore[arg-type]
    )
    assert array == plain


@pytest.mark.parametrize("fill", ["air", True])
def test_what_is_no_number_fills_nothing(dataset: Dataset, fill: Any) -> None:
    with pytest.raises(ConfigError, match="fill of the field 'ct' is a number, such as 0, got"):
        loader_of(dataset, sf.Volume(roi_size=ROI, fill=fill, missing="pad"))


def test_a_selection_of_nothing_names_what_there_is(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"matches no image .*modality == 'MR'.* Modalities: CT\. Kinds"):
        loader_of(dataset, sf.Volume(roi_size=ROI, series="modality == 'MR'", missing="pad"))


def test_series_that_cannot_be_delivered_are_refused(tmp_path: Path) -> None:
    voxels = np.zeros((4, 8, 8), np.int16)
    cases = {
        "flags.irregular_spacing": VolumeSeries(
            voxels=voxels, affine=affine_of((1, 1, 1)), flags=["irregular_spacing"]
        ),
        "flags.missing_slices": VolumeSeries(
            voxels=voxels, affine=affine_of((1, 1, 1)), flags=["missing_slices"]
        ),
        "known place in millimeters": VolumeSeries(voxels=voxels),
    }
    for message, series in cases.items():
        made = make_volumes(tmp_path / message.replace(" ", "-"), {0: [series]}.__getitem__, num_samples=1)
        with pytest.raises(ConfigError, match=message):
            loader_of(made, sf.Volume(roi_size=ROI, spacing_mm=(1, 1, 1)))
    with loader_of(made, sf.Volume(roi_size=ROI)) as loader:  # its own grid needs no geometry
        assert np.isnan(next(iter(loader))["ct_affine"][0]).all()


# ---- grids in millimeters ------------------------------------------------------------------------------


def by_itk(
    series: VolumeSeries, codes: str, spacing: Sequence[float], roi: Sequence[int]
) -> NDArray[np.float32]:
    """Resample, and cut or pad around the middle, as preprocessing with SimpleITK does; axes as ``codes``."""
    image = sitk.GetImageFromArray(series.voxels.astype(np.float32))
    columns = series.affine[:3, [2, 1, 0]]
    steps = np.linalg.norm(columns, axis=0)
    image.SetSpacing(steps.tolist())
    image.SetDirection((columns / steps).ravel().tolist())
    image.SetOrigin(series.affine[:3, 3].tolist())
    image = sitk.DICOMOrient(image, codes)
    old, size = np.array(image.GetSpacing()), np.array(image.GetSize())
    new = np.maximum(np.rint(size * old / spacing), 1)
    direction = np.array(image.GetDirection()).reshape(3, 3)
    middle = np.array(image.GetOrigin()) + direction @ ((size - 1) / 2 * old)
    first = (new - np.array(roi)) // 2 - (new - 1) / 2
    origin = middle + direction @ (first * spacing)
    cut = sitk.Resample(
        image,
        list(roi),
        sitk.Transform(),
        sitk.sitkLinear,
        origin.tolist(),
        list(spacing),
        image.GetDirection(),
        -1024.0,
    )
    return np.asarray(sitk.GetArrayFromImage(cut).transpose(2, 1, 0))


@pytest.mark.parametrize(
    ("codes", "spacing", "roi"),
    [
        # The parameters of CT-CLIP (0.75 x 0.75 x 1.5 mm, -1000 to 1000 HU) and Merlin (RAS, 1.5 x 1.5 x 3
        # mm), on volumes of a tenth of the size.
        ("LPS", (0.75, 0.75, 1.5), (48, 48, 24)),
        ("RAS", (1.5, 1.5, 3.0), (22, 22, 16)),
    ],
)
def test_published_preprocessing_equals_itk(
    tmp_path: Path, codes: str, spacing: tuple[float, float, float], roi: tuple[int, int, int]
) -> None:
    @cache
    def tenth(number: int) -> list[VolumeSeries]:
        random = np.random.default_rng(number)
        shape = (random.integers(6, 30), random.integers(20, 60), random.integers(20, 60))
        noise = random.normal(0, 600, shape)
        affine = affine_of(random.uniform(0.6, 3, 3), turn=0.2 * (number % 3), flip=number % 2 == 1)
        return [VolumeSeries(voxels=np.clip(noise, -1024, 3071).astype(np.int16), affine=affine)]

    made = make_volumes(tmp_path / "data", tenth, num_samples=6)
    fields = {
        "ct": sf.Volume(
            roi_size=roi,
            spacing_mm=spacing,
            orientation=codes,
            center="middle",
            dtype="float32",
            valid_mask=True,
        ),
        "shown": sf.Volume(
            roi_size=roi, spacing_mm=spacing, orientation=codes, center="middle", windows=[(0, 2000), "lung"]
        ),
        "rounded": sf.Volume(roi_size=roi, spacing_mm=spacing, orientation=codes, center="middle"),
    }
    num_slots = 0
    with open_loader(made, SPEC, fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                wanted = by_itk(tenth(number)[0], codes, spacing, roi)
                is_inside = batch["ct_valid"][slot, 0] == 1
                # On the border of the box ITK's rounding may differ from ours by a voxel.
                assert (is_inside == (wanted != -1024)).mean() > 0.98
                both = is_inside & (wanted != -1024)
                assert np.abs(batch["ct"][slot, 0] - wanted)[both].max() < 1
                assert (batch["ct"][slot, 0][~is_inside] == -1024).all()
                assert np.abs(batch["rounded"][slot, 0] - batch["ct"][slot, 0]).max() <= 0.5
                shown = np.clip((batch["ct"][slot, 0] + 1000) / 2000, 0, 1)
                assert np.abs(batch["shown"][slot, 0] - shown).max() < 1e-5
                lung = np.clip((batch["ct"][slot, 0] + 1350) / 1500, 0, 1)
                assert np.abs(batch["shown"][slot, 1] - lung).max() < 1e-5
                num_slots += 1
    assert num_slots == 6


@cache
def scanned(number: int, *, is_flipped: bool = False) -> list[VolumeSeries]:
    """Return a CT along the axes of the patient, of odd and even sizes."""
    random = np.random.default_rng(number)
    shape = (7 + 5 * number, 33 + 8 * number, 50 - 7 * number)
    # CT-CLIP clips before it interpolates, Merlin and shardflow afterwards: equal only where nothing is cut.
    voxels = np.clip(random.normal(0, 600, shape), -1000, 1000 + 1000 * is_flipped).astype(np.int16)
    # Of the first one every second length halves to a half, which rounds to even.
    between, within = random.uniform(0.6, 2.9, 2) if number else (1.5, 0.75)
    affine = affine_of((between, within, within), flip=is_flipped and number % 2 == 1)
    return [VolumeSeries(voxels=voxels, affine=affine)]


def by_merlin(series: VolumeSeries, roi: Sequence[int]) -> NDArray[np.float32]:
    """Preprocess as Merlin does, with MONAI's transforms and its parameters but for the size."""
    from monai.data import MetaTensor
    from monai.transforms import CenterSpatialCrop, Compose, Orientation, ScaleIntensityRange, SpatialPad
    from monai.transforms import Spacing as MonaiSpacing

    ras = np.diag([-1, -1, 1, 1]) @ series.affine[:, [2, 1, 0, 3]]
    image = MetaTensor(
        torch.from_numpy(series.voxels.transpose(2, 1, 0).astype(np.float32))[None], affine=ras
    )
    steps = [
        Orientation("RAS", labels=None),
        MonaiSpacing((1.5, 1.5, 3.0), mode="bilinear"),
        ScaleIntensityRange(-1000, 1000, 0.0, 1.0, clip=True),
        SpatialPad(roi),
        CenterSpatialCrop(roi),
    ]
    return np.asarray(Compose(steps)(image)[0])


def by_ct_clip(series: VolumeSeries, roi: Sequence[int]) -> NDArray[np.float32]:
    """Preprocess as CT-CLIP does: clip, resize by trilinear interpolation, cut and pad around the middle."""
    spacing = np.linalg.norm(series.affine[:3, :3], axis=0)
    voxels = torch.from_numpy(np.clip(series.voxels.transpose(0, 2, 1), -1000, 1000).astype(np.float64))
    ratios = np.array([spacing[0] / 1.5, spacing[2] / 0.75, spacing[1] / 0.75])
    size = [int(length * ratio) for length, ratio in zip(voxels.shape, ratios, strict=True)]
    found = torch.nn.functional.interpolate(voxels[None, None], size=size, mode="trilinear")[0, 0] / 1000
    for axis, (length, side) in enumerate(zip(size, roi, strict=True)):
        found = found.narrow(axis, max((length - side) // 2, 0), min(length, side))
        before = max(side - length, 0) // 2
        pads = [0, 0] * (2 - axis) + [before, max(side - length, 0) - before]
        found = torch.nn.functional.pad(found, pads, value=-1)
    return np.asarray(found.float())


@pytest.mark.parametrize("model", ["merlin", "ct_clip"])
def test_tensors_of_published_code_are_delivered(tmp_path: Path, model: str) -> None:
    scan, roi = partial(scanned, is_flipped=model == "merlin"), (30, 24, 12)
    settings: dict[str, Any] = {"orientation": "RAS", "spacing_mm": (1.5, 1.5, 3.0), "placement": "monai"}
    if model == "ct_clip":  # whose axes are those of its files: slice, x, y
        roi = (24, 60, 75)
        settings = {"orientation": "SLP", "spacing_mm": (1.5, 0.75, 0.75), "placement": "torch"}
    made = make_volumes(tmp_path / "data", scan, num_samples=6)
    volume = sf.Volume(roi_size=roi, center="middle", windows=[(0, 2000)], valid_mask=True, **settings)
    num_inside = 0
    with open_loader(made, SPEC, {"ct": volume}) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                series = scan(number)[0]
                wanted = by_merlin(series, roi) if model == "merlin" else (by_ct_clip(series, roi) + 1) / 2
                # MONAI's grid may go on behind the volume, where it repeats the last voxel.
                is_inside = batch["ct_valid"][slot, 0] == 1
                assert np.abs(batch["ct"][slot, 0] - wanted)[is_inside].max() < 1 / 2000  # 1 HU
                beyond = wanted[~is_inside]
                assert not beyond.any() or (
                    model == "merlin" and np.count_nonzero(beyond) < 0.1 * wanted.size
                )
                num_inside += int(is_inside.sum())
    assert num_inside > 0.3 * 6 * np.prod(roi)


def test_slices_at_irregular_distances_are_taken_where_they_are(tmp_path: Path) -> None:
    """A volume whose value is its height is right at every height, though slices are missing."""
    heights = [0.0, 2.0, 4.0, 10.0, 12.0, 13.0, 15.0]
    voxels = np.broadcast_to(np.rint(np.array(heights) * 100)[:, None, None], (7, 5, 6)).astype(np.int16)
    series = VolumeSeries(
        voxels=voxels,
        affine=affine_of((2.0, 1.0, 1.0)),
        flags=["irregular_spacing", "missing_slices"],
        extra={"slice_offsets_mm": heights},
    )
    made = make_volumes(tmp_path / "data", {0: [series]}.__getitem__, num_samples=1)
    grids: list[dict[str, Any]] = [{}, {"spacing_mm": (0.5, 1.0, 1.0)}, {"orientation": "RAS"}]
    for settings in grids:
        volume = sf.Volume(roi_size=(3, 4, 3), irregular="resample", **settings)
        with loader_of(made, volume) as loader:
            for epoch in range(4):
                loader.set_epoch(epoch)
                batch = next(iter(loader))
                places = np.stack(np.meshgrid(*map(np.arange, (3, 4, 3)), indexing="ij"), axis=-1)
                at = places @ batch["ct_affine"][0, :3, :3].T + batch["ct_affine"][0, :3, 3]
                height = np.clip((at[..., 2] - 4.0) * 100, 0, 1500)  # edges repeat the outermost slice
                assert np.abs(batch["ct"][0, 0] - height).max() <= 0.5
