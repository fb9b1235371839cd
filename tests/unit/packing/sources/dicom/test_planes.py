"""Functional groups: per frame before shared before root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence

from shardflow.format.reasons import PHASE_NAMES
from shardflow.packing.sources.dicom.pixels import form_of
from shardflow.packing.sources.dicom.stacks import split_series
from tests.unit.packing.sources.dicom.factory import AXIAL, header_of, make_dataset, make_file, write

pytestmark = pytest.mark.fast


def _item(**attributes: Any) -> Sequence:
    item = Dataset()
    for keyword, value in attributes.items():
        setattr(item, keyword, value)
    return Sequence([item])


def _group(**groups: Sequence) -> Dataset:
    item = Dataset()
    for keyword, value in groups.items():
        setattr(item, keyword, value)
    return item


def _enhanced(num_groups: int = 3) -> Dataset:
    dataset = make_dataset(
        pixels=np.zeros((3, 2, 2), np.uint16),
        position=(9, 9, 9),
        RescaleSlope=5,
        RescaleIntercept=6,
    )
    dataset.SharedFunctionalGroupsSequence = Sequence(
        [
            _group(
                PixelMeasuresSequence=_item(PixelSpacing=[2, 3], SliceThickness=4),
                PlaneOrientationSequence=_item(ImageOrientationPatient=list(AXIAL)),
                PixelValueTransformationSequence=_item(RescaleSlope=2, RescaleIntercept=-7),
            )
        ]
    )
    dataset.PerFrameFunctionalGroupsSequence = Sequence(
        [
            _group(
                PlanePositionSequence=_item(ImagePositionPatient=[0, 0, frame]),
                FrameContentSequence=_item(StackID="1", TemporalPositionIndex=frame + 1),
                MREchoSequence=_item(EffectiveEchoTime=1.5 * frame),
                MRDiffusionSequence=_item(
                    DiffusionBValue=1000.0,
                    DiffusionGradientDirectionSequence=_item(DiffusionGradientOrientation=[1.0, 0.0, 0.5]),
                ),
                MRImageFrameTypeSequence=_item(FrameType=["ORIGINAL", "PRIMARY", "M_FFE"]),
                **({"PixelValueTransformationSequence": _item(RescaleSlope=8)} if frame == 2 else {}),
            )
            for frame in range(num_groups)
        ]
    )
    return dataset


@pytest.fixture
def enhanced(tmp_path: Path) -> Path:
    return write(tmp_path / "a.dcm", _enhanced())


def test_the_nearest_statement_wins(enhanced: Path) -> None:
    header = header_of(enhanced)
    assert len(header.planes) == 3
    assert [plane.position for plane in header.planes] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 2),
    ]  # per frame, not root
    assert {plane.orientation for plane in header.planes} == {AXIAL}  # shared
    assert {plane.pixel_spacing for plane in header.planes} == {(2.0, 3.0)}
    assert {plane.slice_thickness for plane in header.planes} == {4.0}
    assert [plane.slope for plane in header.planes] == [2.0, 2.0, 8.0]  # the last one says it itself
    assert [plane.intercept for plane in header.planes] == [-7.0, -7.0, -7.0]
    assert header.plane(2) is header.planes[2]


@pytest.mark.parametrize(
    ("root", "shared", "last", "unit"),
    [
        (None, "HU", None, "HU"),
        (None, "Z_EFF", None, "Z_EFF"),  # a map of a dual-energy CT: seven point four is no Hounsfield unit
        ("HU", "ED", None, "ED"),
        ("HU", None, None, "HU"),
        (None, "HU", "MGML", "OTHER"),
        (None, None, None, ""),
    ],
)
def test_the_unit_is_that_of_the_groups(
    tmp_path: Path, root: str | None, shared: str | None, last: str | None, unit: str
) -> None:
    dataset = _enhanced()
    groups = dataset.SharedFunctionalGroupsSequence[0], dataset.PerFrameFunctionalGroupsSequence[2]
    stated = [
        (dataset, root),
        *zip((one.PixelValueTransformationSequence[0] for one in groups), (shared, last), strict=True),
    ]
    for place, rescale_type in stated:
        if rescale_type is not None:
            place.RescaleType = rescale_type
    header = header_of(write(tmp_path / "a.dcm", dataset))
    assert header.unit == unit
    assert form_of([header]).unit == {"OTHER": "raw", "": "HU"}.get(unit, unit)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"PixelSpacing": [19400312, 1]}, "pixel_spacing"),
        ({"position": (0, 0, 19400312)}, "position"),
        ({"WindowCenter": 19400312, "WindowWidth": 5}, "window"),
        ({"WindowCenter": 5, "WindowWidth": 19400312}, "window"),
    ],
)
def test_a_number_that_no_image_has_is_taken_for_none(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    (plane,) = header_of(make_file(tmp_path / "a.dcm", **options)).planes
    assert getattr(plane, name) is None


def test_a_thickness_that_no_slice_has_is_taken_for_none(tmp_path: Path) -> None:
    header = header_of(make_file(tmp_path / "a.dcm", position=(0, 0, 1), SliceThickness=19400312))
    (stack,) = split_series([header])
    assert stack.geometry.slice_spacing_mm is None


def test_phases_are_read_from_the_groups(enhanced: Path) -> None:
    first, second, _ = (
        dict(zip(PHASE_NAMES, plane.phase, strict=True)) for plane in header_of(enhanced).planes
    )
    assert (first["stack_id"], first["diffusion_b_value"]) == ("1", "1000")
    assert first["diffusion_direction"] == "1\\0\\0.5"
    assert (first["temporal_position"], second["temporal_position"]) == ("1", "2")
    assert (first["echo_time"], second["echo_time"]) == ("0", "1.5")
    assert first["image_type"] == "M_FFE"


def test_groups_that_do_not_match_the_frames_are_not_believed(tmp_path: Path) -> None:
    dataset = _enhanced(num_groups=2)
    header = header_of(write(tmp_path / "a.dcm", dataset))
    assert len(header.planes) == 1
    assert header.flags == ("functional_groups_mismatch",)
    assert header.planes[0].slope == 2.0  # shared groups stand


@pytest.mark.parametrize(
    "orientation",
    [(1, 0, 0, 1, 0, 0), (2, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 1), (0.7, 0.7, 0, 0, 1, 0)],
)
def test_an_orientation_that_is_none_is_dropped(tmp_path: Path, orientation: tuple[float, ...]) -> None:
    path = write(tmp_path / "a.dcm", make_dataset(orientation=orientation))
    assert header_of(path).planes[0].orientation is None


def test_classic_phases_are_read_from_the_root(tmp_path: Path) -> None:
    dataset = make_dataset(
        AcquisitionNumber=3,
        EchoNumbers=2,
        EchoTime="12.5",
        TemporalPositionIdentifier=4,
        TriggerTime="200",
        SequenceName="ep_b1000#3",
        ConvolutionKernel="B30f",
        ContrastBolusAgent="agent",
        ImageType=["ORIGINAL", "PRIMARY", "P", "ND"],
    )
    (plane,) = header_of(write(tmp_path / "a.dcm", dataset)).planes
    assert dict(zip(PHASE_NAMES, plane.phase, strict=True)) == {
        "stack_id": "",
        "acquisition_number": "3",
        "echo_number": "2",
        "echo_time": "12.5",
        "temporal_position": "4",
        "trigger_time": "200",
        "diffusion_b_value": "",
        "diffusion_direction": "",
        "sequence_name": "ep_b1000#3",
        "image_type": "P\\ND",
        "convolution_kernel": "B30f",
        "contrast": "contrast",
    }
