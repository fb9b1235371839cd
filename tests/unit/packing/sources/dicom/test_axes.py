"""Volumes that repeat their positions are points of one axis, in the order and place of dcm2niix; mosaics."""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

from shardflow.format.reasons import PHASE_NAMES
from shardflow.packing.sources.dicom.headers import InstanceHeader, read_header
from shardflow.packing.sources.dicom.stacks import Stack, StackKind, split_series
from tests.stacks import iter_stack
from tests.unit.packing.sources.dicom.factory import UID_ROOT, make_header

pytestmark = pytest.mark.fast

MOSAICS = [Path(str(files("nibabel"))) / f"nicom/tests/data/siemens_dwi_{b}.dcm.gz" for b in (0, 1000)]


def _read(paths: Sequence[Path]) -> tuple[Stack, ...]:
    headers = []
    for number, path in enumerate(paths):
        # Some files of nibabel lack their identifiers.
        header = read_header(
            path,
            file_index=number,
            identify=lambda said, number=number: {  # type: ignore[misc]
                name: text or f"1.2.{number if name == 'sop_instance_uid' else 0}"
                for name, text in said.items()
            },
        )
        assert isinstance(header, InstanceHeader), header
        headers.append(header)
    return split_series(headers)


def _along(stacks: Sequence[Stack]) -> list[Stack]:
    """Stacks of one object in the order of its axis."""
    assert all(stack.axis is not None and stack.axis.num == len(stacks) for stack in stacks)
    assert len({stack.axis.first for stack in stacks if stack.axis}) == 1
    return sorted(stacks, key=lambda stack: stack.axis.index or 0 if stack.axis else 0)


# Affine (RAS), number of rows, and mean of each volume over that of the first, by dcm2niix 1.0.20260724.
DCM2NIIX: list[tuple[str, str, list[list[float]], int, list[float]]] = [
    (
        "ge/dti/001",
        "order",
        [[-2.0, 0.0, 0.0, 126.875], [0.0, 2.0, 0.0, -110.12399], [0.0, 0.0, 2.0, -61.4995]],
        128,
        [1.0, 0.999982],
    ),
    (
        "ge/dti/002",
        "order",
        [
            [-3.4375, 0.0, 0.0, 108.281],
            [0.0, -0.02486, -3.8, 116.70238],
            [0.0, 3.43741, -0.02749, -93.01284],
        ],
        64,
        [1.0, 1.002178, 1.003287, 0.996637],
    ),
    (
        "ge/fmri/001",
        "order",
        [[-3.0, 0.0, 0.0, 95.0], [0.0, 3.0, 0.0, -76.999], [0.0, 0.0, 3.6, -61.2995]],
        64,
        [1.0, 0.992539],
    ),
    (
        "philips_enhanced/fmri/001",
        "time",
        [[-3.3125, 0.0, 0.0, 105.45055], [0.0, 3.3125, 0.0, -91.36604], [0.0, 0.0, 3.313, -69.03745]],
        64,
        [1.0, 0.995123, 0.998228, 1.000863],
    ),
]


def _as_nifti(affine: Any, rows: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Affine of a stack in NIfTI's axes: RAS, rows from the last one."""
    flip = np.diag([1.0, -1.0, 1.0, 1.0])
    flip[1, 3] = rows - 1
    return np.asarray(np.diag([-1.0, -1.0, 1.0, 1.0]) @ np.array(affine) @ flip)[:3]


@pytest.mark.parametrize(("folder", "axis", "affine", "rows", "means"), DCM2NIIX)
def test_volumes_have_the_order_and_place_of_dcm2niix(
    shared_data: Path, folder: str, axis: str, affine: list[list[float]], rows: int, means: list[float]
) -> None:
    paths = sorted((shared_data / "dicom2nifti_small" / folder).iterdir())
    points = _along(_read(paths))
    assert {stack.axis.name for stack in points if stack.axis} == {axis}
    found = []
    for stack in points:
        ours = _as_nifti(stack.geometry.affine_lps, rows)
        if not np.allclose(ours[:, 2], np.array(affine)[:, 2], atol=2e-3):  # slices the other way round
            ours[:, 3] += ours[:, 2] * (len(stack.slices) - 1)
            ours[:, 2] *= -1
        np.testing.assert_allclose(ours, affine, atol=4e-3)
        volume = np.stack([one.pixels for one in iter_stack(stack, lambda header: paths[header.file_index])])
        found.append(volume.astype(np.float64).mean())
    np.testing.assert_allclose(np.array(found) / found[0], means, atol=2e-6)


def test_enhanced_diffusion_has_the_order_of_dicom2nifti(shared_data: Path) -> None:
    folder = shared_data / "dicom2nifti_small" / "philips_enhanced" / "dti"
    points = _along(_read(sorted((folder / "001").iterdir())))
    truth = [float(word) for word in (folder / "001_ground_truth.bval").read_text().split()]
    assert [stack.axis.value for stack in points if stack.axis] == truth
    assert {stack.axis.name for stack in points if stack.axis} == {"diffusion"}


def test_mosaics_are_unfolded_as_nibabel_and_dcm2niix_do(tmp_path: Path) -> None:
    points = _along(_read(MOSAICS))
    assert [(stack.axis.name, stack.axis.value) for stack in points if stack.axis] == [
        ("diffusion", 0.0),
        ("diffusion", 1000.0),
    ]
    by_dcm2niix = [
        [-1.79688, 0.0, 0.0, 115.0],
        [0.0, 1.79685, -0.01571, -93.17148],
        [0.0, 0.00941, 2.99996, -79.90535],
    ]
    for path, stack in zip(MOSAICS, points, strict=True):
        assert (stack.kind, len(stack.slices), stack.rows) == (StackKind.VOLUME, 48, 128)
        assert "mosaic_unfolded" in stack.flags
        assert "mosaic" not in stack.flags
        wrapped = _wrap(pydicom.dcmread(_inflated(path, tmp_path)))
        theirs = wrapped.affine @ np.eye(4)[[1, 0, 2, 3]]  # nibabel counts (row, column, slice)
        np.testing.assert_allclose(np.array(stack.geometry.affine_lps), theirs, atol=1e-4)
        np.testing.assert_allclose(_as_nifti(stack.geometry.affine_lps, 128), by_dcm2niix, atol=1e-3)


def _wrap(dataset: pydicom.Dataset) -> Any:
    """Mosaic as nibabel reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nibabel calls its readers experimental
        from nibabel.nicom import dicomwrappers

        read: Any = dicomwrappers.wrapper_from_data
        return read(dataset)


def _inflated(path: Path, folder: Path) -> Path:
    found = folder / path.name.removesuffix(".gz")
    found.write_bytes(gzip.decompress(path.read_bytes()))
    return found


def test_tiles_of_a_mosaic_are_the_slices_that_nibabel_reads(tmp_path: Path) -> None:
    path = _inflated(MOSAICS[0], tmp_path)
    dataset = pydicom.dcmread(path)
    pixels = np.random.default_rng(1).integers(0, 4096, (dataset.Rows, dataset.Columns)).astype(np.uint16)
    dataset.PixelData = pixels.tobytes()
    dataset.save_as(path)
    (stack,) = _read([path])
    volume = np.stack([one.pixels for one in iter_stack(stack, lambda _: path)])
    theirs = _wrap(dataset).get_data()
    np.testing.assert_array_equal(volume, theirs.transpose(2, 0, 1))


@pytest.mark.parametrize("damage", ["creator", "short", "empty"])
def test_a_mosaic_whose_header_is_gone_stays_as_it_is(tmp_path: Path, damage: str) -> None:
    path = _inflated(MOSAICS[0], tmp_path)
    dataset = pydicom.dcmread(path)
    if damage == "creator":
        del dataset[0x0029, 0x0010]
    else:
        element = dataset[0x0029, 0x1010]
        element.value = element.value[:200] if damage == "short" else b""
    dataset.save_as(path)
    (stack,) = _read([path])
    assert (stack.kind, len(stack.slices), stack.rows) == (StackKind.IMAGES, 1, 896)
    assert "mosaic" in stack.flags
    assert "mosaic_unfolded" not in stack.flags


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> InstanceHeader:
    return make_header(tmp_path_factory.mktemp("template"), 1, modality="MR")


def _series(
    template: InstanceHeader, volumes: Sequence[dict[str, str]], num_slices: int = 4
) -> list[InstanceHeader]:
    """Volumes at the same positions, numbered volume by volume; ``acquired`` of a volume is no phase."""
    found = []
    for at, one in enumerate(volumes):
        phases = {name: text for name, text in one.items() if name != "acquired"}
        values = tuple(phases.get(name, "") for name in PHASE_NAMES)
        for index in range(num_slices):
            number = at * num_slices + index + 1
            found.append(
                replace(
                    template,
                    file_index=number,
                    sop_instance_uid=f"{UID_ROOT}3.{number}",
                    instance_number=number,
                    acquired=one.get("acquired", ""),
                    planes=(replace(template.planes[0], position=(0.0, 0.0, 3.0 * index), phase=values),),
                )
            )
    return found


@pytest.mark.parametrize(
    ("volumes", "name", "order", "along"),
    [
        ([{"echo_time": "9.8"}, {"echo_time": "19.6"}], "echo", [0, 1], [9.8, 19.6]),
        ([{"echo_time": "19.6"}, {"echo_time": "9.8"}], "echo", [1, 0], [9.8, 19.6]),
        ([{"trigger_time": "500"}, {"trigger_time": "50"}], "time", [1, 0], [0.0, 0.45]),
        ([{"temporal_position": "10"}, {"temporal_position": "9"}], "time", [1, 0], [None, None]),
        (
            [{"acquired": "20240102235959.5"}, {"acquired": "20240103000001.25"}],
            "time",
            [0, 1],
            [0.0, 1.75],
        ),
        ([{"acquired": "20240102100000"}, {"acquired": "20240102100000"}], "order", [0, 1], [None, None]),
        (
            [{"acquisition_number": "1"}, {"acquisition_number": "2", "diffusion_b_value": "700"}],
            "diffusion",
            [0, 1],
            [None, 700.0],
        ),
        ([{"sequence_name": "*ep_b0"}, {"sequence_name": "*ep_b700#2"}], "diffusion", [0, 1], [None, None]),
    ],
)
def test_an_axis_is_named_by_what_differs(
    template: InstanceHeader,
    volumes: list[dict[str, str]],
    name: str,
    order: list[int],
    along: list[float | None],
) -> None:
    stacks = split_series(_series(template, volumes))
    points = _along(stacks)
    assert [stack.axis.name for stack in points if stack.axis] == [name] * len(volumes)
    assert [(stack.slices[0].number or 0) // 4 for stack in points] == order
    assert [stack.axis.value for stack in points if stack.axis] == along


def test_images_of_another_kind_are_objects_of_their_own(template: InstanceHeader) -> None:
    """Magnitude and phase of three times: two objects of three points."""
    volumes = [
        {"image_type": kind, "temporal_position": str(time)} for time in range(3) for kind in ("M", "P")
    ]
    stacks = split_series(_series(template, volumes))
    objects = {stack.axis.first for stack in stacks if stack.axis}
    assert len(objects) == 2
    for first in objects:
        points = [stack for stack in stacks if stack.axis and stack.axis.first == first]
        assert [stack.axis.num for stack in points if stack.axis] == [3, 3, 3]
        assert len({stack.slices[0].plane.phase[PHASE_NAMES.index("image_type")] for stack in points}) == 1


def test_echoes_of_a_time_series_are_objects_with_time_as_their_axis(template: InstanceHeader) -> None:
    volumes = [{"echo_time": echo, "acquisition_number": str(t)} for t in range(4) for echo in ("12", "30")]
    stacks = split_series(_series(template, volumes))
    axes = [stack.axis for stack in stacks if stack.axis]
    assert len({axis.first for axis in axes}) == 2
    assert {(axis.name, axis.num) for axis in axes} == {("time", 4)}


def test_a_volume_that_was_cut_short_is_no_point(template: InstanceHeader) -> None:
    headers = _series(template, [{"temporal_position": str(time)} for time in range(3)])[:-1]
    stacks = split_series(headers)
    assert [len(stack.slices) for stack in stacks] == [4, 4, 3]
    assert [None if stack.axis is None else stack.axis.num for stack in stacks] == [2, 2, None]
    assert "incomplete_volume" in stacks[2].flags


def test_scouts_and_single_stacks_have_no_axis(template: InstanceHeader) -> None:
    scouts = [
        replace(one, is_localizer=True)
        for one in _series(template, [{"acquisition_number": "1"}, {"acquisition_number": "2"}])
    ]
    assert [stack.axis for stack in split_series(scouts)] == [None, None]
    assert [stack.axis for stack in split_series(_series(template, [{}]))] == [None]


def test_each_run_of_an_angiography_is_one_series_of_frames(tmp_path: Path) -> None:
    """Two runs and a still of one series: frames of different runs never mix."""
    headers = [
        make_header(
            tmp_path,
            number,
            modality="US",
            pixels=np.zeros(shape, np.uint8),
            position=None,
            orientation=None,
        )
        for number, shape in enumerate([(5, 3, 4), (3, 4), (7, 3, 4)])
    ]
    stacks = split_series(headers)
    assert [(stack.kind, len(stack.slices)) for stack in stacks] == [
        (StackKind.FRAMES, 5),
        (StackKind.IMAGES, 1),
        (StackKind.FRAMES, 7),
    ]
    assert [stack.axis and (stack.axis.name, stack.axis.index, stack.axis.num) for stack in stacks] == [
        ("time", None, 5),
        None,
        ("time", None, 7),
    ]
