"""Facts that make values usable: against QIBA's formula, dicom2nifti's gradients, dcm2niix and real files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset

from shardflow.packing.deid.allowlist import KEYWORDS, allow_technical
from shardflow.packing.sources.dicom.acquisition import AcquisitionFacts, read_acquisition
from shardflow.packing.sources.dicom.attributes import read_frame_attributes
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import InstanceHeader, read_header
from shardflow.packing.sources.dicom.stacks import Stack, split_series
from tests.unit.packing.sources.dicom.factory import make_dataset, make_file, write

pytestmark = pytest.mark.fast


def _stacks(path: Path) -> tuple[Stack, ...]:
    header = read_header(path, identify=lambda said: {name: text or "1.2" for name, text in said.items()})
    assert isinstance(header, InstanceHeader), header
    return split_series([header])


def _facts(path: Path) -> AcquisitionFacts:
    (stack,) = _stacks(path)
    return read_acquisition(path, stack.slices, limits=HeaderLimits())


def _pet(path: Path, change: Callable[[Dataset], None] | None = None) -> Path:
    """A slice of a whole-body FDG PET: 370 MBq at 9:00, scanned from 10:02, this bed at 10:05."""
    tracer = Dataset()
    tracer.RadionuclideTotalDose = "370000000"
    tracer.RadionuclideHalfLife = "6586.2"
    tracer.RadiopharmaceuticalStartTime = "090000.00"
    dataset = make_dataset(
        modality="PT",
        PatientWeight="72.5",
        Units="BQML",
        DecayCorrection="START",
        CorrectedImage=["DECY", "ATTN"],
        RadiopharmaceuticalInformationSequence=[tracer],
        StudyDate="20240102",
        SeriesDate="20240102",
        SeriesTime="100200",
        AcquisitionDate="20240102",
        AcquisitionTime="100500.000",
        FrameReferenceTime="255000",
        ActualFrameDuration="150000",
        RescaleSlope="1",
        RescaleIntercept="0",
    )
    if change is not None:
        change(dataset)
    return write(path, dataset)


def _qiba(dataset: Dataset, scan: str | None = None) -> float:
    """SUVbwScaleFactor, transcribed from QIBA's vendor-neutral pseudo-code (happy path and its remarks)."""

    def seconds(moment: str) -> float:
        clock = moment[8:]
        return int(moment[6:8]) * 86400 + int(clock[:2]) * 3600 + int(clock[2:4]) * 60 + float(clock[4:] or 0)

    assert {"ATTN", "DECY"} <= set(dataset.CorrectedImage)
    assert dataset.DecayCorrection == "START"
    assert dataset.Units == "BQML"
    tracer = dataset.RadiopharmaceuticalInformationSequence[0]
    half_life = float(tracer.RadionuclideHalfLife)
    scan_time = seconds(scan or dataset.SeriesDate + dataset.SeriesTime)
    start_time = seconds(dataset.SeriesDate + tracer.RadiopharmaceuticalStartTime)
    decay_time = scan_time - start_time
    injected_dose = float(tracer.RadionuclideTotalDose)
    decayed_dose = injected_dose * math.pow(2, -decay_time / half_life)
    return float(dataset.PatientWeight) * 1000 / decayed_dose


def test_uptake_value_is_that_of_qibas_formula(tmp_path: Path) -> None:
    path = _pet(tmp_path / "pet.dcm")
    facts = _facts(path)
    pet = facts.published["pet"]
    assert pet["suvbw_factor"] == pytest.approx(_qiba(pydicom.dcmread(path)), rel=1e-3)
    assert pet == {
        "decay_correction": "START",
        "half_life_s": 6586.2,
        "injected_dose_bq": 3.7e8,
        "patient_weight_kg": 72.5,
        "suvbw_factor": pytest.approx(72500 / (3.7e8 * 2 ** (-3720 / 6586.2)), rel=1e-9),
    }
    assert facts.injection_to_scan_s == 3720


def _later_series(dataset: Dataset) -> None:
    """A series that was reconstructed again: its time says nothing of the scan."""
    dataset.SeriesTime = "160000"


def _of_ge(dataset: Dataset) -> None:
    _later_series(dataset)
    dataset.private_block(0x0009, "GEMS_PETD_01", create=True).add_new(0x0D, "DT", "20240102100200.00")


def _without_frame(dataset: Dataset) -> None:
    _later_series(dataset)
    del dataset.FrameReferenceTime


@pytest.mark.parametrize(
    ("change", "scan"),
    [
        (_of_ge, "20240102100200"),
        # 255 s to the average count rate, which of this half-life is 74.9 s into a frame of 150 s.
        (_later_series, "20240102100159.901"),
        (_without_frame, "20240102100500"),
    ],
)
def test_scan_of_a_series_made_anew_is_found_as_qiba_says(
    tmp_path: Path, change: Callable[[Dataset], None], scan: str
) -> None:
    path = _pet(tmp_path / "pet.dcm", change)
    assert _facts(path).published["pet"]["suvbw_factor"] == pytest.approx(
        _qiba(pydicom.dcmread(path), scan), rel=1e-4
    )


def _over_midnight(dataset: Dataset) -> None:
    dataset.SeriesTime, dataset.AcquisitionTime = "002000", "002100"
    dataset.RadiopharmaceuticalInformationSequence[0].RadiopharmaceuticalStartTime = "233000"


def _at_administration(dataset: Dataset) -> None:
    dataset.DecayCorrection = "ADMIN"


def _philips_counts(dataset: Dataset) -> None:
    dataset.Units = "CNTS"
    block = dataset.private_block(0x7053, "Philips PET Private Group", create=True)
    block.add_new(0x00, "DS", "0.000247")


@pytest.mark.parametrize(
    ("change", "factor", "interval"),
    [
        (_over_midnight, 72500 / (3.7e8 * 2 ** (-3000 / 6586.2)), 3000),
        (_at_administration, 72500 / 3.7e8, 3900),
        (_philips_counts, 0.000247, 3720),
        (lambda dataset: setattr(dataset, "Units", "GML"), 1.0, 3720),
        (lambda dataset: setattr(dataset, "Units", "PROPCPS"), None, 3720),
        (lambda dataset: setattr(dataset, "DecayCorrection", "NONE"), None, 3900),
        (lambda dataset: setattr(dataset, "PatientWeight", None), None, 3720),
        (lambda dataset: setattr(dataset, "PatientWeight", "72500"), None, 3720),
        (
            lambda dataset: setattr(
                dataset.RadiopharmaceuticalInformationSequence[0], "RadionuclideTotalDose", "370"
            ),
            None,
            3720,
        ),
        (lambda dataset: dataset.RadiopharmaceuticalInformationSequence.append(Dataset()), None, None),
    ],
    ids=[
        *("midnight", "administration", "philips", "gml", "counts", "not corrected", "no weight", "grams"),
        *("megabecquerel", "two tracers"),
    ],
)
def test_factor_is_given_where_it_is_known_and_nowhere_else(
    tmp_path: Path, change: Callable[[Dataset], None], factor: float | None, interval: float | None
) -> None:
    facts = _facts(_pet(tmp_path / "pet.dcm", change))
    found = facts.published["pet"].get("suvbw_factor")
    assert found == (None if factor is None else pytest.approx(factor, rel=1e-9))
    assert facts.injection_to_scan_s == interval


def test_proportional_counts_are_a_unit(tmp_path: Path) -> None:
    header = read_header(_pet(tmp_path / "a.dcm", lambda dataset: setattr(dataset, "Units", "PROPCPS")))
    assert isinstance(header, InstanceHeader)
    assert header.unit == "PROPCPS"


@pytest.mark.parametrize("folder", ["philips_enhanced/dti", "ge/dti"])
def test_b_values_and_directions_are_those_of_dicom2nifti(shared_data: Path, folder: str) -> None:
    root = shared_data / "dicom2nifti_small" / folder
    b_values = np.loadtxt(root / "001_ground_truth.bval", ndmin=1)
    directions = np.loadtxt(root / "001_ground_truth.bvec", ndmin=2).T
    paths = sorted((root / "001").iterdir())
    headers = [read_header(path, file_index=at) for at, path in enumerate(paths)]
    stacks = split_series([header for header in headers if isinstance(header, InstanceHeader)])
    assert len(stacks) == len(b_values)
    for stack, b_value, direction in zip(stacks, b_values, directions, strict=True):
        path = paths[stack.slices[0].instance.file_index]
        found = read_acquisition(path, stack.slices, limits=HeaderLimits()).published["diffusion"]
        assert found["b_value_s_mm2"] == b_value
        if b_value and folder.startswith("philips"):
            # Theirs are in the axes of the image, which here are those of the patient but for signs.
            np.testing.assert_allclose(np.abs(found["direction_lps"]), np.abs(direction), atol=1e-5)
        if folder.startswith("ge"):
            # No phase encoding direction: what GE's axes mean is not known.
            assert "direction_lps" not in found


def test_diffusion_of_a_siemens_mosaic_is_that_of_dcm2niix() -> None:
    path = Path(str(files("nibabel"))) / "nicom/tests/data/siemens_dwi_1000.dcm.gz"
    found = _facts(path).published["diffusion"]
    assert found["b_value_s_mm2"] == 1000
    image_axes = np.array([[1, 0, 0], [0, 0.99998609, -0.00523596], [0, 0.00523596, 0.99998629]])
    in_image = image_axes @ np.array(found["direction_lps"])
    # dcm2niix counts rows from below: its second axis runs the other way.
    np.testing.assert_allclose(in_image * [1, -1, 1], [0.999975, -0.00507649, -0.00502361], atol=1e-4)


# Columns: what the unit vectors of GE's axes become along row, column and normal, by dcm2niix 1.0.20260724;
# a direction has no sign, so neither has a matrix.
_AXIAL, _SAGITTAL, _CORONAL = (1, 0, 0, 0, 1, 0), (0, 1, 0, 0, 0, -1), (1, 0, 0, 0, 0, -1)


@pytest.mark.parametrize(
    ("orientation", "encoding", "expected"),
    [
        (_AXIAL, "COL", [[-1, 0, 0], [0, -1, 0], [0, 0, 1]]),
        (_AXIAL, "ROW", [[0, -1, 0], [1, 0, 0], [0, 0, 1]]),
        (_SAGITTAL, "COL", [[1, 0, 0], [0, 1, 0], [0, 0, -1]]),
        (_SAGITTAL, "ROW", [[0, 1, 0], [-1, 0, 0], [0, 0, -1]]),
        (_CORONAL, "COL", [[-1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        (_CORONAL, "ROW", [[0, 1, 0], [1, 0, 0], [0, 0, 1]]),
    ],
)
def test_directions_of_ge_are_turned_as_dcm2niix_turns_them(
    tmp_path: Path, orientation: tuple[float, ...], encoding: str, expected: list[list[float]]
) -> None:
    vector = np.array([0.6, -0.48, 0.64])
    dataset = make_dataset(
        modality="MR",
        orientation=orientation,
        Manufacturer="GE MEDICAL SYSTEMS",
        InPlanePhaseEncodingDirection=encoding,
    )
    acquisition = dataset.private_block(0x0019, "GEMS_ACQU_01", create=True)
    for element, part in zip((0xBB, 0xBC, 0xBD), vector, strict=True):
        acquisition.add_new(element, "DS", f"{part:.6f}")
    dataset.private_block(0x0043, "GEMS_PARM_01", create=True).add_new(0x39, "IS", ["800", "8", "0", "0"])
    found = _facts(write(tmp_path / "ge.dcm", dataset)).published["diffusion"]
    row, column = np.array(orientation[:3]), np.array(orientation[3:])
    axes = np.stack([row, column, np.cross(row, column)], axis=1)
    theirs = axes @ np.array(expected) @ vector
    assert found["b_value_s_mm2"] == 800
    np.testing.assert_allclose(abs(np.dot(found["direction_lps"], theirs)), 1, atol=1e-6)


def test_slices_of_several_b_values_have_none(tmp_path: Path) -> None:
    headers = []
    for number, b_value in enumerate((0, 500, 1000, 1000)):
        dataset = make_dataset(modality="MR", number=number, position=(0, 0, 3.0 * number))
        dataset.DiffusionBValue = float(b_value)
        path = write(tmp_path / f"{number}.dcm", dataset)
        header = read_header(path, file_index=number)
        assert isinstance(header, InstanceHeader)
        headers.append(header)
    (stack,) = split_series(headers)
    assert read_acquisition(tmp_path / "0.dcm", stack.slices, limits=HeaderLimits()).published == {}


@pytest.mark.parametrize("name", ["examples_palette.dcm", "examples_ybr_color.dcm"])
def test_regions_of_a_real_ultrasound_are_pydicoms(name: str) -> None:
    path = Path(get_testdata_file(name) or "")
    dataset = pydicom.dcmread(path, stop_before_pixels=True)
    regions = _facts(path).published["ultrasound_regions"]
    assert len(regions) == len(dataset.SequenceOfUltrasoundRegions)
    for found, item in zip(regions, dataset.SequenceOfUltrasoundRegions, strict=True):
        assert found["box_px"] == [
            item.RegionLocationMinX0,
            item.RegionLocationMinY0,
            item.RegionLocationMaxX1 + 1,
            item.RegionLocationMaxY1 + 1,
        ]
        assert (found["x_step"], found["y_step"]) == (item.PhysicalDeltaX, item.PhysicalDeltaY)
        if item.PhysicalUnitsXDirection == item.PhysicalUnitsYDirection == 3:
            assert found["pixel_spacing_mm"] == [item.PhysicalDeltaY * 10, item.PhysicalDeltaX * 10]
    assert (regions[0]["spatial_format"], regions[0]["data_type"]) == ("2d", "tissue")


def _cine(path: Path, **attributes: Any) -> AcquisitionFacts:
    pixels = np.zeros((4, 3, 4), np.uint8)
    flat: dict[str, Any] = {"modality": "US", "position": None, "orientation": None}
    return _facts(make_file(path, pixels=pixels, **flat, **attributes))


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"FrameTime": "33.3"}, {"frame_time_ms": 33.3}),
        ({"CineRate": "25"}, {"frame_time_ms": 40.0}),
        (
            {"FrameTimeVector": ["0", "30", "40", "30"]},
            {"frame_time_ms": 30, "frame_times_ms": [0, 30, 70, 100]},
        ),
        ({"FrameTimeVector": ["0", "30"], "FrameTime": "31"}, {"frame_time_ms": 31}),
        ({"FrameTime": "0"}, {}),
    ],
)
def test_times_of_frames(tmp_path: Path, attributes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert _cine(tmp_path / "cine.dcm", **attributes).published == expected


def test_frames_of_a_real_cine_have_their_time() -> None:
    path = Path(get_testdata_file("examples_ybr_color.dcm") or "")
    expected = float(pydicom.dcmread(path, stop_before_pixels=True).FrameTime)
    assert _facts(path).published["frame_time_ms"] == expected


def _technical(path: Path, frames: Sequence[int]) -> list[dict[str, Any]]:
    return [dict(allow_technical(found)) for found in read_frame_attributes(path, KEYWORDS, frames)]


@pytest.mark.parametrize("kind", ["dti", "fmri", "anatomical"])
def test_enhanced_objects_state_their_settings_in_groups(shared_data: Path, kind: str) -> None:
    (path,) = (shared_data / "dicom2nifti_small" / "philips_enhanced" / kind / "001").iterdir()
    dataset = pydicom.dcmread(path, stop_before_pixels=True)
    shared = dataset.SharedFunctionalGroupsSequence[0]
    for frame, found in enumerate(_technical(path, range(3))):
        own = dataset.PerFrameFunctionalGroupsSequence[frame]
        level = own if "MREchoSequence" in own else shared
        timing = own if "MRTimingAndRelatedParametersSequence" in own else shared
        assert found["echo_time"] == level.MREchoSequence[0].EffectiveEchoTime
        assert found["repetition_time"] == float(
            timing.MRTimingAndRelatedParametersSequence[0].RepetitionTime
        )


@pytest.mark.parametrize(
    ("primary", "secondary", "expected"),
    [
        ("1.5", "-0.5", [(30.0, 10.0), (31.5, 9.5), (33.0, 9.0)]),
        (["0", "2", "7"], "", [(30.0, 10.0), (32.0, 10.0), (37.0, 10.0)]),
        (["0", "2"], "", [(30.0, 10.0), (32.0, 10.0), (None, 10.0)]),
        ("", "", [(30.0, 10.0)] * 3),
    ],
)
def test_angles_of_a_run_are_those_of_its_frames(
    tmp_path: Path, primary: Any, secondary: Any, expected: list[tuple[float | None, float]]
) -> None:
    """One step a frame, or offsets from the angle of the first frame (PS3.3, C.8.7.5.1.3)."""
    path = make_file(
        tmp_path / "run.dcm",
        pixels=np.zeros((4, 3, 4), np.uint8),
        modality="US",
        position=None,
        orientation=None,
        PositionerPrimaryAngle="30",
        PositionerSecondaryAngle="10",
        PositionerPrimaryAngleIncrement=primary,
        PositionerSecondaryAngleIncrement=secondary,
    )
    found = _technical(path, range(3))
    angles = [(one.get("positioner_primary_angle"), one["positioner_secondary_angle"]) for one in found]
    assert angles == expected


def test_view_of_a_mammogram_may_be_a_code(tmp_path: Path) -> None:
    code = Dataset()
    code.CodeValue, code.CodingSchemeDesignator, code.CodeMeaning = (
        "399368009",
        "SCT",
        "medio-lateral oblique",
    )
    path = make_file(
        tmp_path / "mg.dcm",
        modality="DX",
        position=None,
        orientation=None,
        Modality="MG",
        ViewCodeSequence=[code],
        ImageLaterality="L",
        BreastImplantPresent="NO",
        CompressionForce="91.5",
        BodyPartThickness="52",
    )
    (found,) = _technical(path, [0])
    assert found["view_position"] == "MLO"
    assert found["breast_implant_present"] == "NO"
    assert (found["compression_force"], found["body_part_thickness"]) == (91.5, 52.0)
