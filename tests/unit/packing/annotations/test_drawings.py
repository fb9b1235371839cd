"""Structured reports, presentation states and key objects; highdicom reads the same reports."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset

from shardflow.errors import SourceError
from shardflow.packing.attachments.annotations.dicom_drawings import (
    describe_report_object,
    read_key_objects,
    read_presentation_state,
    read_structured_report,
)
from shardflow.packing.attachments.annotations.targets import AnnotationLimits
from tests.unit.packing.annotations.made_objects import code, item, make_object, reference
from tests.unit.packing.annotations.scene import FRAME, SERIES, make_target, read

SR, GSPS, KO = (f"1.2.840.10008.5.1.4.1.1.{end}" for end in ("88.33", "11.1", "88.59"))


def container(*children: Dataset) -> Dataset:
    return item(
        RelationshipType="CONTAINS",
        ValueType="CONTAINER",
        ConceptNameCodeSequence=[code("125007", "DCM", "Measurement Group")],
        ContentSequence=list(children),
    )


def node(value_type: str, concept: Dataset, **values: Any) -> Dataset:
    return item(ValueType=value_type, ConceptNameCodeSequence=[concept], **values)


def drawn(kind: str, points: list[float], index: int | None = 2, **values: Any) -> Dataset:
    images = [] if index is None else [item(ValueType="IMAGE", ReferencedSOPSequence=[reference(index)])]
    return node(
        "SCOORD",
        code("111030", "DCM"),
        GraphicType=kind,
        GraphicData=points,
        ContentSequence=images,
        **values,
    )


def report(path: Path, *children: Dataset) -> Path:
    evidence = item(
        StudyInstanceUID="1.2",
        ReferencedSeriesSequence=[item(SeriesInstanceUID=SERIES, ReferencedSOPSequence=[reference(2)])],
    )
    return make_object(
        path,
        SR,
        ValueType="CONTAINER",
        ContentSequence=list(children),
        CurrentRequestedProcedureEvidenceSequence=[evidence],
    )


@pytest.mark.fast
def test_group_with_its_words_and_numbers(tmp_path: Path) -> None:
    right = node("CODE", code("272741003"), ConceptCodeSequence=[code("24028007", "SCT", "Right")])
    group = container(
        node("TEXT", code("112039", "DCM"), TextValue="Canary lesion of Mr Smith"),
        node("UIDREF", code("112040", "DCM"), UID="1.2.3.4"),
        node("CODE", code("121071", "DCM"), ConceptCodeSequence=[code("27925004", "SCT", "Nodule")]),
        node("CODE", code("363698007"), ConceptCodeSequence=[code("39607008", "SCT", "Lung")],
             ContentSequence=[right]),
        drawn("CIRCLE", [10.0, 8.0, 14.0, 8.0]),
        node("NUM", code("81827009", "SCT", "Diameter"), MeasuredValueSequence=[
            item(NumericValue="0.65", MeasurementUnitsCodeSequence=[code("cm", "UCUM")])]),
        node("NUM", code("1234", "99CANARY"), MeasuredValueSequence=[
            item(NumericValue="1", MeasurementUnitsCodeSequence=[code("mm", "UCUM")])]),
    )  # fmt: skip
    path = report(tmp_path / "sr.dcm", group)
    result = read(partial(read_structured_report, path), make_target())
    (roi,) = result.rois
    assert (roi["kind"], roi["label"], roi["anatomy"], roi["laterality"]) == (
        "contour",
        "nodule",
        "lung",
        "R",
    )
    assert roi["diameter_mm"] == 6.5
    assert roi["measurements"] == [
        {"code": {"scheme": "SCT", "value": "81827009"}, "unit": "cm", "value": 0.65}
    ]
    assert roi["tracking_key"] == "tracking7"
    y, x = np.mgrid[:24, :32] + 0.5
    np.testing.assert_array_equal(result.masks()[2], np.hypot(x - 10, y - 8) < 4)
    assert "anary" not in str(result.rois)
    assert describe_report_object(path, AnnotationLimits()).series_uids == (SERIES,)


@pytest.mark.fast
def test_shapes_and_references(tmp_path: Path) -> None:
    """The image of a coordinate may stand elsewhere; 1.1.1 is the first item of the first item."""
    image = item(ValueType="IMAGE", ReferencedSOPSequence=[reference(4)])
    by_place = drawn("POLYLINE", [1, 1, 9, 1, 9, 5, 1, 1], None)
    by_place.ContentSequence = [item(ReferencedContentItemIdentifier=[1, 1, 1])]
    circle = drawn("POINT", [3.0, 4.0], None)
    circle.ContentSequence = [item(ReferencedContentItemIdentifier=[1, 2])]  # its own container
    groups = [
        container(image, by_place),
        container(drawn("ELLIPSE", [4, 8, 20, 8, 12, 4, 12, 12]), drawn("SPIRAL", [1, 1, 2, 2])),
        container(circle, drawn("POINT", [3.0, 4.0]), drawn("POINT", [900.0, 4.0]), drawn("POINT", [1.0])),
        container(drawn("POLYLINE", [1, 1, 9, 1], 77)),
    ]
    result = read(partial(read_structured_report, report(tmp_path / "sr.dcm", *groups)), make_target())
    assert [(roi["kind"], roi["slices"][0]["slice"]) for roi in result.rois] == [
        ("contour", 4), ("contour", 2), ("point", 2),
    ]  # fmt: skip
    y, x = np.mgrid[:24, :32] + 0.5
    np.testing.assert_array_equal(result.masks(1)[2], ((x - 12) / 8) ** 2 + ((y - 8) / 4) ** 2 < 1)
    assert result.dangling == {"IMAGE_NOT_PACKED": 1, "NO_REFERENCE": 1, "OUTSIDE": 1, "UNSUPPORTED_SHAPE": 2}


@pytest.mark.fast
def test_coordinates_in_space(tmp_path: Path) -> None:
    """An ellipsoid is cut by every slice: voxels whose centres lie inside, counted one by one."""
    target = make_target(9, 24, 32)
    centre, radii = np.array([-8.0, -22.0, 14.0]), np.diag([5.0, 4.0, 6.0])
    ends = np.stack([end for radius in radii for end in (centre - radius, centre + radius)])
    shape = node(
        "SCOORD3D", code("111030", "DCM"), GraphicType="ELLIPSOID", GraphicData=ends.ravel().tolist(),
        ReferencedFrameOfReferenceUID=FRAME,
    )  # fmt: skip
    lost = node("SCOORD3D", code("111030", "DCM"), GraphicType="POINT", GraphicData=[1.0, 1.0, 1.0],
                ReferencedFrameOfReferenceUID="1.2.3")  # fmt: skip
    result = read(
        partial(read_structured_report, report(tmp_path / "sr.dcm", container(shape, lost))), target
    )
    index, y, x = np.mgrid[:9, :24, :32]
    steps = np.array(target.affine_lps)[:3, :3] @ np.stack([x, y, index]).reshape(3, -1)
    at = steps.T + np.array([-20.0, -30.0, 5.0])
    inside = (((at - centre) / (5, 4, 6)) ** 2).sum(axis=1).reshape(9, 24, 32) < 1
    # An outline of 72 points lies a little inside of the ellipse.
    assert (result.masks() != inside).sum() <= 0.02 * inside.sum()
    assert result.dangling == {"FRAME_OF_REFERENCE_UNKNOWN": 1}


@pytest.mark.fast
def test_trees_without_end(tmp_path: Path) -> None:
    """Too many items, too many levels, and a depth at which a parser gives up, written by hand."""
    wide = report(tmp_path / "wide.dcm", *[container() for _ in range(60)])
    tree = container()
    for _ in range(12):
        tree = container(tree)
    deep = report(tmp_path / "deep.dcm", tree)
    for path, limits in ((wide, AnnotationLimits(max_items=50)), (deep, AnnotationLimits(max_depth=10))):
        with pytest.raises(SourceError) as caught:
            read(partial(read_structured_report, path), make_target(), limits=limits)
        assert caught.value.reason == "LIMIT_EXCEEDED"
    open_sequence = struct.pack("<HH2sHI", 0x0040, 0xA730, b"SQ", 0, 0xFFFFFFFF)
    open_item = struct.pack("<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF)
    abyss = tmp_path / "abyss.dcm"
    abyss.write_bytes(report(tmp_path / "sr.dcm").read_bytes() + (open_sequence + open_item) * 5000)
    for function in (partial(read_structured_report, abyss), partial(read_key_objects, abyss)):
        with pytest.raises(SourceError) as caught:
            read(function, make_target())
        assert caught.value.reason == "HEADER_UNREADABLE"


@pytest.mark.fast
def test_graphics_in_pixels_and_on_the_display(tmp_path: Path) -> None:
    """The display shows columns 5 to 14 and rows 3 to 12, once as it is and once turned by 90 degrees."""
    graphic = item(
        GraphicType="POLYLINE", GraphicAnnotationUnits="PIXEL", GraphicData=[2.0, 2, 6, 2, 6, 6, 2, 2]
    )
    corner = item(GraphicType="POINT", GraphicAnnotationUnits="DISPLAY", GraphicData=[0.1, 0.2])
    text = item(
        UnformattedTextValue="Canary Smith nodule", AnchorPoint=[3.0, 4.0], AnchorPointAnnotationUnits="PIXEL"
    )
    odd = item(GraphicType="POINT", GraphicAnnotationUnits="MATRIX", GraphicData=[1.0, 1.0])
    for turn, first, last, expected in (
        (0, [5, 3], [14, 12], [5.0, 4.0]),
        (90, [5, 12], [14, 3], [6.0, 11.0]),
    ):
        path = make_object(
            tmp_path / f"pr{turn}.dcm",
            GSPS,
            ImageRotation=turn,
            ContentCreatorName="Canary^Operator",
            ReferencedSeriesSequence=[item(SeriesInstanceUID=SERIES, ReferencedImageSequence=[reference(1)])],
            DisplayedAreaSelectionSequence=[
                item(DisplayedAreaTopLeftHandCorner=first, DisplayedAreaBottomRightHandCorner=last)
            ],
            GraphicLayerSequence=[item(GraphicLayer="CANARY LAYER")],
            GraphicAnnotationSequence=[
                item(
                    GraphicLayer="CANARY LAYER",
                    GraphicObjectSequence=[graphic, corner, odd],
                    TextObjectSequence=[text],
                ),
                item(ReferencedImageSequence=[reference(40)], GraphicObjectSequence=[corner]),
            ],
        )
        result = read(partial(read_presentation_state, path), make_target())
        assert [roi["kind"] for roi in result.rois] == ["graphic", "point", "point"]
        assert {roi["slices"][0]["slice"] for roi in result.rois} == {1}
        assert result.rois[1]["slices"][0]["box_px"][:2] == pytest.approx(expected)
        assert result.masks(0)[1].sum() == 10, "half of four by four, with the centres on the diagonal"
        assert result.dangling == {"IMAGE_NOT_PACKED": 1, "UNSUPPORTED_SHAPE": 1}
        assert "anary" not in str(result.rois).lower()
        assert {roi["label"] for roi in result.rois} == {None}


@pytest.mark.fast
def test_key_images(tmp_path: Path) -> None:
    images = [item(ValueType="IMAGE", ReferencedSOPSequence=[reference(index)]) for index in (0, 3, 50)]
    path = make_object(
        tmp_path / "ko.dcm",
        KO,
        ConceptNameCodeSequence=[code("113000", "DCM", "Of Interest")],
        ContentSequence=[node("TEXT", code("113012", "DCM"), TextValue="Canary"), *images],
    )
    result = read(partial(read_key_objects, path), make_target())
    (roi,) = result.rois
    assert (roi["kind"], roi["code"]) == ("key_image", {"scheme": "DCM", "value": "113000"})
    assert [(one["slice"], one["box_px"]) for one in roi["slices"]] == [(0, None), (3, None)]
    assert result.dangling == {"IMAGE_NOT_PACKED": 1}


def test_real_reports_as_highdicom_reads_them(shared_data: Path) -> None:
    import highdicom

    folder = shared_data / "highdicom"
    image = pydicom.dcmread(folder / "ct_image.dcm", stop_before_pixels=True)
    target = make_target(
        rows=image.Rows,
        columns=image.Columns,
        affine_lps=None,
        pixel_spacing_mm=[float(one) for one in image.PixelSpacing],
        instances=[(str(image.SOPInstanceUID), 1)],
        series_uid=str(image.SeriesInstanceUID),
    )
    path = folder / "sr_document_with_multiple_groups.dcm"
    content = highdicom.sr.srread(path).content
    result = read(partial(read_structured_report, path), target)
    planar = content.get_planar_roi_measurement_groups()
    drawn_rois = [roi for roi in result.rois if roi["polygons"]]
    regions = [
        group.roi for group in planar if group.roi is not None and group.roi.value_type.value == "SCOORD"
    ]
    assert regions
    for region in regions:
        points = np.asarray(region.value, float)
        boxes = [roi["slices"][0]["box_px"] for roi in drawn_rois]
        low, high = np.clip(points.min(axis=0), 0, 128), np.clip(points.max(axis=0), 0, 128)
        if region.graphic_type.value != "CIRCLE":
            assert [*low, *high] in boxes
    tracked = {f"tracking{len(group.tracking_uid)}" for group in planar}
    assert tracked <= {roi["tracking_key"] for roi in result.rois}
