"""Order, spacing, affine and values of real series, against SimpleITK and highdicom."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import highdicom
import numpy as np
import pydicom
import pytest
import SimpleITK

from shardflow.packing.sources.dicom.stacks import Stack, StackKind, build_studies
from tests.stacks import iter_stack
from tests.unit.packing.sources.dicom.corpus import read_corpus, without_zeros

Array = np.ndarray[Any, np.dtype[Any]]

SERIES = {
    "ct_philips_phantom/S21570/S2010": 28,
    "dcmqi_ct_seg_sr/segmentations/ct-3slice": 3,
    "dicom2nifti_small/ge/anatomical/001": 4,
    "dicom2nifti_small/generic/anatomical/001_implicit": 4,
    "dicom2nifti_small/generic/compressed_jpegls/001": 4,
    "dicom2nifti_small/hitachi/anatomical/001": 4,
    "mr_ge_fruit": 100,
    "mr_oblique_20/volume": 20,
}
"""Folders that hold one regular series, and its slices."""


@pytest.fixture(scope="module", params=SERIES, ids=lambda folder: folder.replace("/", "-"))
def series(request: pytest.FixtureRequest, shared_data: Path) -> tuple[Path, Stack, Array, list[Path]]:
    """Folder, stack, volume ``(slice, row, column)`` without padding rules, and files in our order."""
    folder = shared_data / request.param
    corpus = read_corpus(folder)
    (study,) = build_studies(corpus.headers).studies
    (stack,) = study.stacks
    assert len(stack.slices) == SERIES[request.param]
    volume = np.stack([one.pixels for one in iter_stack(stack, corpus.locate)])
    return folder, stack, volume, [corpus.locate(one.instance) for one in stack.slices]


def _itk(folder: Path, series: list[Path], links: Path) -> tuple[list[Path], SimpleITK.Image]:
    for path in folder.iterdir():
        found = without_zeros(path, links) if path in series else path
        if found == path:
            (links / path.name).symlink_to(path)
    reader = SimpleITK.ImageSeriesReader()
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    names = reader.GetGDCMSeriesFileNames(str(links))
    reader.SetFileNames(names)
    return [folder / Path(name).name for name in names], reader.Execute()


def _padding(stack: Stack, files: list[Path]) -> Array:
    """Where padding was replaced, so where values may differ from those of a reader that keeps it."""
    stored = [pydicom.dcmread(path).pixel_array for path in files]
    padding = stack.slices[0].instance.padding
    if padding is None:
        return np.zeros(np.shape(stored), bool)
    return (np.array(stored) >= padding[0]) & (np.array(stored) <= padding[1])


def test_order_affine_and_values_equal_simpleitks(
    series: tuple[Path, Stack, Array, list[Path]], tmp_path: Path
) -> None:
    folder, stack, volume, files = series
    itk_files, image = _itk(folder, files, tmp_path)
    assert files in (itk_files, itk_files[::-1])
    values = SimpleITK.GetArrayFromImage(image)
    origin, direction = np.array(image.GetOrigin()), np.array(image.GetDirection()).reshape(3, 3)
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = direction * np.array(image.GetSpacing()), origin
    if files != itk_files:
        values = values[::-1]
        affine = affine @ np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, len(files) - 1], [0, 0, 0, 1]])
    kept = ~_padding(stack, files)
    np.testing.assert_allclose(volume[kept], values[kept], rtol=1e-6)
    ours = np.array(stack.geometry.affine_lps)
    # ITK spans the volume from first to last position, ours takes the median gap: they differ where gaps do.
    tolerance = 0.5 if "irregular_spacing" in stack.geometry.flags else 1e-3
    np.testing.assert_allclose(ours[:3, :2], affine[:3, :2], atol=1e-5)
    np.testing.assert_allclose(ours[:3, 3], affine[:3, 3], atol=1e-5)
    last = np.array([0, 0, len(files) - 1, 1])
    np.testing.assert_allclose(ours @ last, affine @ last, atol=tolerance * len(files))
    np.testing.assert_allclose(ours[:3, 2], affine[:3, 2], atol=tolerance)


def test_order_and_spacing_equal_highdicoms(series: tuple[Path, Stack, Array, list[Path]]) -> None:
    folder, stack, _, files = series
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = {path: pydicom.dcmread(path, stop_before_pixels=True) for path in files}
        spacing, positions = highdicom.spatial.get_series_volume_positions(list(datasets.values()), rtol=0.05)
    assert spacing is not None
    assert positions is not None
    order = [path for _, path in sorted(zip(positions, datasets, strict=True))]
    assert files in (order, order[::-1])
    assert stack.geometry.slice_spacing_mm == pytest.approx(spacing, rel=0.02)
    assert ("irregular_spacing" in stack.flags) == (folder.name == "volume")


@pytest.mark.parametrize("size", ["23x38x3", "24x38x3"])
def test_enhanced_frames_equal_highdicoms_volume(shared_data: Path, size: str) -> None:
    path = shared_data / "dcmqi_ct_seg_sr" / "segmentations" / size / "multiframe" / "mf.dcm"
    stack, ours = _enhanced(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        volume = highdicom.imread(path).get_volume(dtype=np.float32, apply_real_world_transform=False)
    theirs = volume.array
    # highdicom indexes (slice, row, column) and may run along the normal the other way.
    affine = np.array(volume.affine)[:, [2, 1, 0, 3]]
    if np.dot(affine[:3, 2], np.array(stack.geometry.affine_lps)[:3, 2]) < 0:
        theirs = theirs[::-1]
        affine = affine @ np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, len(ours) - 1], [0, 0, 0, 1]])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(np.array(stack.geometry.affine_lps), affine, atol=1e-3)


@pytest.mark.parametrize("name", ["anatomical/001/IM-0001-0170-0001.dcm", "anatomical/001_implicit/IM1.dcm"])
def test_enhanced_frames_are_ordered_and_scaled_by_their_own_groups(shared_data: Path, name: str) -> None:
    path = shared_data / "dicom2nifti_small" / "philips_enhanced" / name
    stack, ours = _enhanced(path)
    assert stack.kind is StackKind.VOLUME
    dataset = pydicom.dcmread(path)
    places, frames = [], []
    for group, stored in zip(dataset.PerFrameFunctionalGroupsSequence, dataset.pixel_array, strict=True):
        rescale = group.PixelValueTransformationSequence[0]
        frames.append(stored * float(rescale.RescaleSlope) + float(rescale.RescaleIntercept))
        orientation = np.array(group.PlaneOrientationSequence[0].ImageOrientationPatient)
        normal = np.cross(orientation[:3], orientation[3:])
        places.append(np.dot(normal, np.array(group.PlanePositionSequence[0].ImagePositionPatient, float)))
    order = np.argsort(places)
    assert [one.frame for one in stack.slices] == order.tolist()
    np.testing.assert_allclose(ours, np.array(frames)[order], rtol=1e-6)
    assert stack.geometry.slice_spacing_mm == pytest.approx(
        np.median(np.diff(np.array(places)[order])), rel=1e-4
    )


def _enhanced(path: Path) -> tuple[Stack, Array]:
    (study,) = build_studies(read_corpus(path).headers).studies
    (stack,) = study.stacks
    return stack, np.stack([one.pixels for one in iter_stack(stack, lambda _: path)])


def test_known_oddities_of_the_shared_data(shared_data: Path) -> None:
    """The facts that its README names."""
    oblique = read_corpus(shared_data / "mr_oblique_20")
    (stack,) = build_studies(oblique.headers).studies[0].stacks
    assert stack.slices[0].instance.spacing_between_slices == 2.0
    assert stack.geometry.slice_spacing_mm == pytest.approx(7, abs=0.1)
    phantom = read_corpus(shared_data / "ct_philips_phantom")
    (study,) = build_studies(phantom.headers).studies
    assert [stack.kind.value for stack in study.stacks].count(
        "localizer"
    ) == 4  # the scout, and its marked copies
    assert {stack.kind.value for stack in study.stacks if stack.series_number == 401} == {
        "localizer",
        "secondary",
    }
    assert [
        (one.instance.image.bits_stored, one.instance.image.bits_allocated)
        for one in study.stacks[1].slices[:1]
    ] == [(12, 16)]
    assert sorted(phantom.outcomes.values()) == ["DICOM_DIRECTORY"] * 3 + ["NOT_DICOM"]
    rising, falling = 0, 0
    for folder in SERIES:
        corpus = read_corpus(shared_data / folder)
        (stack,) = build_studies(corpus.headers).studies[0].stacks
        numbers = [one.number or 0 for one in stack.slices]
        rising += numbers == sorted(numbers)
        falling += numbers == sorted(numbers, reverse=True)
    assert rising > 0
    assert falling > 0
