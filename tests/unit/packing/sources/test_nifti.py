"""NIfTI volumes: every voxel stays where it lies, values are rescaled once, what is unknown stays unknown."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.pixels import form_of, iter_slices
from shardflow.packing.sources.dicom.stacks import Stack, build_studies
from shardflow.packing.sources.images import iter_stored_image, read_image
from shardflow.packing.sources.placement import Placement
from tests.layout_trees import write_nifti

pytestmark = pytest.mark.fast


def _placement(**more: Any) -> Placement:
    return Placement(
        form="nifti",
        patient="p",
        study="s",
        series="e",
        instance="i",
        attributes={},
        **{"modality": "MR", **more},
    )


def _stacks(path: Path, **more: Any) -> list[tuple[Stack, NDArray[Any]]]:
    """Group the volume as packing does and decode every stack, ``(slices, rows, columns)``."""
    header = read_image(path, _placement(**more), limits=HeaderLimits())
    (study,) = build_studies([header]).studies  # type: ignore[list-item]
    found = []
    for stack in study.stacks:
        form = form_of([header])  # type: ignore[list-item]
        frames = [one.frame for one in stack.slices]
        slices = iter_slices(path, header, form=form, frames=frames, read=iter_stored_image)  # type: ignore[arg-type]
        found.append((stack, np.stack([each.pixels for each in slices])))
    return found


def _rotations() -> list[NDArray[Any]]:
    found = []
    for axes in itertools.permutations(range(3)):
        for signs in itertools.product((-1.0, 1.0), repeat=3):
            matrix = np.zeros((3, 3))
            for column, (axis, sign) in enumerate(zip(axes, signs, strict=True)):
                matrix[axis, column] = sign
            found.append(matrix)
    return found


@settings(max_examples=48, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rotation=st.sampled_from(_rotations()),
    tilt=st.floats(-0.3, 0.3),
    is_gzip=st.booleans(),
)
def test_every_voxel_stays_where_it_lies(
    tmp_path: Path, rotation: NDArray[Any], tilt: float, is_gzip: bool
) -> None:
    cos, sin = np.cos(tilt), np.sin(tilt)
    oblique = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]) @ rotation
    affine = np.eye(4)
    affine[:3, :3] = oblique * (0.7, 0.9, 2.5)
    affine[:3, 3] = (5.0, -7.0, 11.0)
    voxels = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6)
    path = tmp_path / ("a.nii.gz" if is_gzip else "a.nii")
    write_nifti(path, voxels, affine)
    ((stack, array),) = _stacks(path)
    assert array.size == voxels.size
    lps_affine = np.array(stack.geometry.affine_lps)
    for slice_, row, column in [(0, 0, 0), (1, 2, 3), (array.shape[0] - 1, array.shape[1] - 1, 0)]:
        lps = lps_affine @ (column, row, slice_, 1)
        ijk = np.linalg.inv(affine) @ (lps * (-1, -1, 1, 1))
        i, j, k = np.rint(ijk[:3]).astype(int)
        assert np.allclose(ijk[:3], (i, j, k), atol=1e-3)
        assert array[slice_, row, column] == voxels[i, j, k]
    along_row, down_column = lps_affine[:3, 0], lps_affine[:3, 1]
    main = int(np.argmax(np.abs(along_row)))
    assert main in {0, 1}
    assert along_row[main] > 0  # to the left, or to the back
    main = int(np.argmax(np.abs(down_column)))
    assert (down_column[main] > 0) == (main == 1)  # to the back, or down


@pytest.mark.parametrize(
    ("slope", "intercept", "modality", "given", "unit"),
    [
        (1.0, -1024.0, "CT", None, "HU"),
        (None, 0.0, "CT", (1.0, -1024.0), "HU"),
        (2.0, 1.0, "MR", None, "raw"),
        (None, 0.0, "MR", None, "raw"),
    ],
)
def test_values_are_rescaled_once(
    tmp_path: Path,
    slope: float | None,
    intercept: float,
    modality: str,
    given: tuple[float, float] | None,
    unit: str,
) -> None:
    stored = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    write_nifti(tmp_path / "a.nii", stored, np.diag([-1.0, -1.0, 2.0, 1.0]), slope=slope, intercept=intercept)
    ((stack, array),) = _stacks(tmp_path / "a.nii", modality=modality, rescale=given)
    times, plus = given or (slope or 1.0, intercept)
    assert np.array_equal(array, stored.transpose(2, 1, 0) * times + plus)
    assert form_of([one.instance for one in stack.slices]).unit == unit


def test_a_rescale_that_is_stated_twice_is_refused(tmp_path: Path) -> None:
    write_nifti(tmp_path / "a.nii", np.zeros((2, 2, 2), np.int16), np.eye(4), slope=1.0, intercept=-1024.0)
    with pytest.raises(SourceError, match="both state slope") as caught:
        _stacks(tmp_path / "a.nii", rescale=(1.0, -1024.0))
    assert caught.value.reason == "INVALID_IMAGE_DESCRIPTION"


def test_floats_become_hu_only_for_ct_and_holes_are_padding(tmp_path: Path) -> None:
    stored = np.full((3, 4, 5), -700.4, np.float32)
    stored[0, 0, 0] = np.nan
    write_nifti(tmp_path / "a.nii", stored, np.diag([-1.0, -1.0, 2.0, 1.0]))
    ((_, ct),) = _stacks(tmp_path / "a.nii", modality="CT")
    assert ct.dtype == np.int16
    assert (ct[0, 0, 0], ct[1, 0, 0]) == (-1024, -700)
    ((_, raw),) = _stacks(tmp_path / "a.nii")
    assert raw.dtype == np.float32
    assert (raw[0, 0, 0], raw[1, 0, 0]) == (0, np.float32(-700.4))


def test_times_become_stacks(tmp_path: Path) -> None:
    voxels = np.arange(2 * 3 * 5 * 4, dtype=np.int16).reshape(2, 3, 5, 4)
    write_nifti(tmp_path / "a.nii", voxels, np.diag([-1.0, -1.0, 2.0, 1.0]))
    stacks = _stacks(tmp_path / "a.nii")
    assert len(stacks) == 4
    for time, (stack, array) in enumerate(stacks):
        assert np.array_equal(array, voxels[..., time].transpose(2, 1, 0))
        assert "split_by_temporal_position" in stack.flags


def test_a_volume_without_a_place_has_none(tmp_path: Path) -> None:
    write_nifti(tmp_path / "a.nii", np.zeros((2, 3, 4), np.int16), None)
    ((stack, array),) = _stacks(tmp_path / "a.nii")
    assert stack.geometry.affine_lps is None
    assert array.shape == (4, 3, 2)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_cut_volumes_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    voxels = np.random.default_rng(1).integers(0, 4000, (20, 20, 8)).astype(np.int16)
    write_nifti(path, voxels, np.eye(4))
    whole = path.read_bytes()
    for share in (0.05, 0.5, 0.95):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(SourceError) as caught:
            _stacks(path)
        assert caught.value.reason in {"PIXEL_DATA_TRUNCATED", "HEADER_UNREADABLE", "NOT_IMAGE"}


def test_what_a_header_declares_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.nii"
    write_nifti(path, np.zeros((2, 2, 2), np.int16), np.eye(4))
    data = bytearray(path.read_bytes())
    data[42:48] = np.array([32767, 32767, 32767], "<i2").tobytes()
    path.write_bytes(data)
    with pytest.raises(SourceError) as caught:
        _stacks(path)
    assert caught.value.reason == "LIMIT_EXCEEDED"


@pytest.mark.parametrize("dtype", [np.complex64, np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])])
def test_other_voxels_are_refused(tmp_path: Path, dtype: Any) -> None:
    image = nibabel.Nifti1Image(np.zeros((2, 2, 2), dtype), np.eye(4))  # type: ignore[no-untyped-call]
    image.to_filename(tmp_path / "a.nii")
    with pytest.raises(SourceError) as caught:
        _stacks(tmp_path / "a.nii")
    assert caught.value.reason == "INVALID_IMAGE_DESCRIPTION"


@pytest.mark.slow
def test_damaged_headers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.nii"
    write_nifti(path, np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4))
    whole = path.read_bytes()
    rng = np.random.default_rng(7)
    for _ in range(3000):
        data = bytearray(whole)
        for at in rng.integers(0, 352, 4):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        with contextlib.suppress(SourceError):
            _stacks(path)
