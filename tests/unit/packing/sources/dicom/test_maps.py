"""Dose grids and parametric maps: values in their unit and places, against other readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import highdicom as hd
import numpy as np
import pydicom
import pydicom.data
import pytest
import SimpleITK
from pydicom.dataset import Dataset
from pydicom.sr.coding import Code

from shardflow.format.facts.making import series_of_study
from shardflow.format.reasons import Reason
from shardflow.packing.sources.dicom.acquisition import read_acquisition
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import BrokenInstance, InstanceHeader, read_header
from shardflow.packing.sources.dicom.pixels import SliceForm, form_of, iter_slices
from shardflow.packing.sources.dicom.stacks import Stack, StackKind, build_studies
from tests.unit.packing.sources.dicom.factory import (
    make_dataset,
    make_parametric_map,
    value_mapping,
    write,
)

_BUNDLED = Path(pydicom.data.__file__).parent / "test_files"
_DOSES = ("rtdose.dcm", "rtdose_expb.dcm", "rtdose_rle.dcm")
_LIMITS = HeaderLimits()


def _read(*paths: Path) -> tuple[list[Stack], list[np.ndarray[Any, np.dtype[Any]]], list[SliceForm]]:
    """Return the stacks of files of one study, their values ``(slices, rows, columns)`` and their forms."""
    headers = [read_header(path, file_index=index) for index, path in enumerate(paths)]
    assert all(isinstance(header, InstanceHeader) for header in headers), headers
    (study,) = build_studies([header for header in headers if isinstance(header, InstanceHeader)]).studies
    volumes, forms = [], []
    for stack in study.stacks:
        form = form_of([one.instance for one in stack.slices])
        slices = [
            next(iter_slices(paths[one.instance.file_index], one.instance, form=form, frames=[one.frame]))
            for one in stack.slices
        ]
        volumes.append(np.stack([one.pixels for one in slices]))
        forms.append(form)
    return list(study.stacks), volumes, forms


def _reference(path: Path) -> np.ndarray[Any, np.dtype[Any]]:
    dataset = pydicom.dcmread(path)
    return np.asarray(dataset.pixel_array) * float(dataset.DoseGridScaling)


@pytest.mark.parametrize("name", _DOSES)
def test_a_dose_grid_equals_arithmetic_and_the_geometry_of_itk(name: str) -> None:
    (stack,), (volume,), (form,) = _read(_BUNDLED / name)
    expected = _reference(_BUNDLED / name)
    assert (stack.kind, form.dtype) == (StackKind.VOLUME, "float32")
    np.testing.assert_allclose(volume, expected, rtol=1e-7)
    image = SimpleITK.ReadImage(str(_BUNDLED / "rtdose.dcm"))
    affine = np.array(stack.geometry.affine_lps)
    size = image.GetSize()
    for index in ((0, 0, 0), (size[0] - 1, 2, 3), (1, size[1] - 1, size[2] - 1)):
        place = image.TransformIndexToPhysicalPoint(index)
        np.testing.assert_allclose((affine @ (*index, 1))[:3], place, atol=1e-4)
    # The file states doses relative to a value that it does not name.
    assert form.unit == "raw"
    facts = read_acquisition(_BUNDLED / name, stack.slices, limits=_LIMITS)
    assert facts.published["dose"] == {"summation": "beam", "type": "physical"}


@pytest.mark.parametrize("name", ["rtdose_1frame.dcm", "rtdose_expb_1frame.dcm", "rtdose_rle_1frame.dcm"])
def test_a_dose_plane_is_one_image(name: str) -> None:
    (stack,), (volume,), _ = _read(_BUNDLED / name)
    assert (stack.kind, len(stack.slices)) == (StackKind.IMAGES, 1)
    np.testing.assert_allclose(volume[0], _reference(_BUNDLED / name), rtol=1e-7)


def _dose(folder: Path, name: str = "dose.dcm", **attributes: Any) -> Path:
    """A copy of the real dose grid, in gray, with other attributes; None removes one."""
    dataset = pydicom.dcmread(_BUNDLED / "rtdose.dcm")
    for keyword, value in {"DoseUnits": "GY", **attributes}.items():
        if value is None:
            delattr(dataset, keyword)
        else:
            setattr(dataset, keyword, value)
    dataset.save_as(folder / name)
    return folder / name


_STEPS = [5.0 * number for number in range(15)]
_FIRST = (189.43125, 199.43125, -761.87)


@pytest.mark.parametrize(
    ("attributes", "last", "is_reversed"),
    [
        ({}, (189.43125, 199.43125, -691.87), False),
        ({"GridFrameOffsetVector": [-761.87 + step for step in _STEPS]}, (*_FIRST[:2], -691.87), False),
        ({"GridFrameOffsetVector": [-step for step in _STEPS]}, (*_FIRST[:2], -831.87), True),
        ({"GridFrameOffsetVector": [-761.87 - step for step in _STEPS]}, (*_FIRST[:2], -831.87), True),
        (
            {"ImageOrientationPatient": [1, 0, 0, 0, 0, -1]},
            (189.43125, 199.43125 + 70, -761.87),
            False,
        ),
        ({"ImageOrientationPatient": [-1, 0, 0, 0, 1, 0]}, (*_FIRST[:2], -831.87), False),
        (
            {
                "ImageOrientationPatient": [-1, 0, 0, 0, 1, 0],
                "GridFrameOffsetVector": [-761.87 + step for step in _STEPS],
            },
            (*_FIRST[:2], -691.87),
            True,
        ),
    ],
    ids=["relative", "absolute", "down", "absolute-down", "coronal", "prone", "prone-absolute"],
)
def test_offsets_of_frames_are_read_as_the_standard_says(
    tmp_path: Path, attributes: dict[str, Any], last: tuple[float, ...], is_reversed: bool
) -> None:
    path = _dose(tmp_path, **attributes)
    (stack,), (volume,), (form,) = _read(path)
    assert form.unit == "GY"
    frames = [one.frame for one in stack.slices]
    assert frames == (list(range(15))[::-1] if is_reversed else list(range(15)))
    np.testing.assert_allclose(volume, _reference(path)[frames], rtol=1e-7)
    at = next(one for one in stack.slices if one.frame == 14)
    np.testing.assert_allclose(at.plane.position or (), last, atol=1e-6)
    affine = np.array(stack.geometry.affine_lps)
    np.testing.assert_allclose((affine @ (0, 0, frames.index(0), 1))[:3], _FIRST, atol=1e-6)


@pytest.mark.parametrize(
    "offsets",
    [None, _STEPS[:-1], [1.0 + step for step in _STEPS], [0.0] * 15],
    ids=["missing", "short", "of nothing", "equal"],
)
def test_a_dose_without_usable_offsets_has_no_place(tmp_path: Path, offsets: list[float] | None) -> None:
    (stack,), (volume,), _ = _read(path := _dose(tmp_path, GridFrameOffsetVector=offsets))
    assert stack.kind is StackKind.FRAMES
    assert "frame_offsets_unusable" in stack.flags
    assert stack.geometry.affine_lps is None
    np.testing.assert_allclose(volume, _reference(path), rtol=1e-7)


def test_a_dose_of_32_bits_and_one_without_scaling(tmp_path: Path) -> None:
    stored = np.random.default_rng(0).integers(0, 2**32 - 1, (15, 10, 10), np.uint32)
    path = _dose(tmp_path, BitsAllocated=32, BitsStored=32, HighBit=31, DoseGridScaling="1.1e-8")
    dataset = pydicom.dcmread(path)
    dataset.PixelData = stored.tobytes()
    dataset.save_as(path)
    _, (volume,), (form,) = _read(path)
    assert (form.unit, form.dtype) == ("GY", "float32")
    np.testing.assert_allclose(volume, stored * 1.1e-8, rtol=1e-7)
    _, (volume,), (form,) = _read(_dose(tmp_path, DoseGridScaling=None))
    assert form.unit == "raw"


def test_each_dose_of_a_series_is_a_volume_and_none_precedes_the_images(tmp_path: Path) -> None:
    paths = [
        _dose(tmp_path, "plan.dcm"),
        _dose(tmp_path, "beam.dcm", SOPInstanceUID="1.2.3", DoseSummationType="BEAM"),
    ]
    dose = pydicom.dcmread(paths[0])
    for number in range(2):
        image = make_dataset(number=number + 1, position=(0.0, 0.0, 2.5 * number))
        image.PatientID, image.StudyInstanceUID = dose.PatientID, dose.StudyInstanceUID
        paths.append(write(tmp_path / f"{number}.dcm", image))
    stacks, _, _ = _read(*paths)
    assert sorted((stack.modality, len(stack.slices)) for stack in stacks) == [
        ("CT", 2),
        ("RTDOSE", 15),
        ("RTDOSE", 15),
    ]
    assert min(stacks, key=lambda stack: stack.primary_rank).modality == "CT"
    assert all(stack.axis is None for stack in stacks)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint16"])
def test_a_parametric_map_equals_what_highdicom_says_of_it(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(1).random((6, 5, 4)) * 1000
    mapping = value_mapping(Code("um2/s", "UCUM", "um2/s"), 0.5 if dtype == "uint16" else 2.0, 3.0)
    path = make_parametric_map(tmp_path, values.astype(dtype), mapping)
    (stack,), (volume,), (form,) = _read(path)
    # What was made of a modality is of another one.
    assert (stack.kind, stack.modality) == (StackKind.VOLUME, "OT")
    assert (form.dtype, form.unit) == ("float32", "um2/s")
    frames = mapping.apply(hd.imread(path).pixel_array)
    np.testing.assert_allclose(volume, frames[[one.frame for one in stack.slices]], rtol=1e-6)
    np.testing.assert_allclose(np.array(stack.geometry.affine_lps)[:3, 2], [0, -2.4, 3.2], atol=1e-6)
    facts = read_acquisition(path, stack.slices, limits=_LIMITS)
    assert facts.published == {"parametric_map": {"quantity": "DCM:113041"}}


def test_a_map_without_a_known_unit_or_a_mapping_is_raw(tmp_path: Path) -> None:
    pixels = np.ones((6, 5, 4), np.float32)
    named = Code("123", "99OURS", "a name of a patient")
    path = make_parametric_map(tmp_path, pixels, value_mapping(named, 2.0, 0.0, named))
    (stack,), (volume,), (form,) = _read(path)
    assert (form.unit, volume[0, 0, 0]) == ("raw", 2.0)
    assert read_acquisition(path, stack.slices, limits=_LIMITS).published == {}

    def without(dataset: Dataset) -> None:
        del dataset.SharedFunctionalGroupsSequence[0].RealWorldValueMappingSequence

    path = make_parametric_map(tmp_path, pixels, value_mapping(named, 2.0, 0.0), without)
    (stack,), (volume,), (form,) = _read(path)
    assert (form.unit, volume[0, 0, 0]) == ("raw", 1.0)
    assert "no_real_world_value" in stack.flags


def test_what_is_no_number_or_padding_is_filled(tmp_path: Path) -> None:
    pixels = np.full((6, 5, 4), 3.0, np.float32)
    pixels[2, 1, 1], pixels[3, 0, 0] = np.nan, -9999.25

    def padded(dataset: Dataset) -> None:
        dataset.add_new(0x00280122, "FL", -9999.25)

    unit = Code("mm2/s", "UCUM", "mm2/s")
    _, (volume,), _ = _read(make_parametric_map(tmp_path, pixels, value_mapping(unit, 2.0, 1.0), padded))
    assert (volume[2, 1, 1], volume[3, 0, 0], volume[0, 0, 0]) == (0.0, 0.0, 7.0)
    assert np.count_nonzero(volume) == volume.size - 2


def test_a_float_image_that_is_no_map_is_refused(tmp_path: Path) -> None:
    unit = Code("mm2/s", "UCUM", "mm2/s")

    def disguised(dataset: Dataset) -> None:
        dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = "1.2.840.10008.5.1.4.1.1.4.1"

    header = read_header(
        make_parametric_map(
            tmp_path, np.ones((6, 5, 4), np.float32), value_mapping(unit, 2.0, 0.0), disguised
        )
    )
    assert isinstance(header, BrokenInstance)
    assert header.reason is Reason.INVALID_IMAGE_DESCRIPTION

    def halved(dataset: Dataset) -> None:
        dataset.BitsAllocated = 16

    header = read_header(
        make_parametric_map(tmp_path, np.ones((6, 5, 4), np.float32), value_mapping(unit, 2.0, 0.0), halved)
    )
    assert isinstance(header, BrokenInstance)
    assert header.reason is Reason.INVALID_IMAGE_DESCRIPTION


@pytest.mark.parametrize(
    ("facts", "role"),
    [
        ({"modality": "RTDOSE", "dose": {"summation": "plan"}}, "dose"),
        ({"modality": "MR", "parametric_map": {"quantity": "DCM:113041"}}, "adc"),
        (
            {
                "modality": "MR",
                "parametric_map": {},
                "technical": {"repetition_time": 500.0, "echo_time": 10.0},
            },
            "parametric_map",
        ),
    ],
)
def test_roles_say_what_was_computed(facts: dict[str, Any], role: str) -> None:
    series = {"kind": "volume", "num_slices": 4, "rows": 4, "columns": 4, "dtype": "float32", "codec": "b2nd"}
    (found,) = series_of_study({"series": [{**series, **facts}]})
    assert found.strings["role"] == role


def _reconstruction(folder: Path, spacing: float, num_slots: int = 1, **attributes: Any) -> Path:
    """Six transverse slices of a SPECT, of each of some time slots, as gamma cameras write them."""
    pixels = np.arange(6 * num_slots * 20, dtype=np.uint16).reshape(6 * num_slots, 5, 4)
    image = make_dataset(modality="NM", pixels=pixels, position=None, orientation=None)
    detector = Dataset()
    detector.ImagePositionPatient, detector.ImageOrientationPatient = (
        [-10.0, -20.0, 300.0],
        [1, 0, 0, 0, 1, 0],
    )
    image.DetectorInformationSequence = [detector]
    image.ImageType = [
        "DERIVED",
        "PRIMARY",
        "RECON TOMO" if num_slots == 1 else "RECON GATED TOMO",
        "EMISSION",
    ]
    image.SpacingBetweenSlices = spacing
    image.SliceVector = [*range(1, 7)] * num_slots
    if num_slots > 1:
        image.TimeSlotVector = [slot for slot in range(1, num_slots + 1) for _ in range(6)]
        image.RRIntervalVector = [1] * (6 * num_slots)
    image.RescaleSlope, image.RescaleIntercept = 1, 0
    for keyword, value in attributes.items():
        setattr(image, keyword, value)
    return write(folder / "spect.dcm", image)


@pytest.mark.parametrize("spacing", [4.0, -4.0])
def test_slices_of_a_spect_lie_where_its_detector_says(tmp_path: Path, spacing: float) -> None:
    path = _reconstruction(tmp_path, spacing)
    (stack,), (volume,), _ = _read(path)
    assert stack.kind is StackKind.VOLUME
    stored = pydicom.dcmread(path).pixel_array
    np.testing.assert_array_equal(volume, stored if spacing > 0 else stored[::-1])
    expected = np.diag([0.75, 0.5, 4.0, 1.0])
    expected[:3, 3] = -10, -20, 300 if spacing > 0 else 280
    np.testing.assert_allclose(np.array(stack.geometry.affine_lps), expected, atol=1e-9)
    image = SimpleITK.ReadImage(str(path))
    for one in stack.slices:
        place = image.TransformIndexToPhysicalPoint((0, 0, one.frame))
        np.testing.assert_allclose(one.plane.position or (), place, atol=1e-6)


def test_slots_of_a_gated_spect_are_points_in_time(tmp_path: Path) -> None:
    stacks, volumes, _ = _read(path := _reconstruction(tmp_path, -4.0, num_slots=3))
    places = [(stack.axis.name, stack.axis.index) if stack.axis else None for stack in stacks]
    assert places == [("time", 0), ("time", 1), ("time", 2)]
    stored = pydicom.dcmread(path).pixel_array.reshape(3, 6, 5, 4)
    np.testing.assert_array_equal(np.stack(volumes), stored[:, ::-1])


@pytest.mark.parametrize(
    "attributes",
    [
        {"ImageType": ["ORIGINAL", "PRIMARY", "TOMO", "EMISSION"]},
        {"DetectorInformationSequence": []},
        {"SliceVector": [1, 2, 3]},
        {"SpacingBetweenSlices": None},
    ],
    ids=["projections", "no detector", "short", "no spacing"],
)
def test_frames_of_nuclear_medicine_without_a_place_stay_frames(
    tmp_path: Path, attributes: dict[str, Any]
) -> None:
    (stack,), _, _ = _read(_reconstruction(tmp_path, 4.0, **attributes))
    assert (stack.kind, stack.geometry.affine_lps) == (StackKind.FRAMES, None)
