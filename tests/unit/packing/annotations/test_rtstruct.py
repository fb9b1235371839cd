"""Structure sets: contours on oblique slices, holes, points, references that dangle; real files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardflow.errors import SourceError
from shardflow.format.contents.regions import fill_outlines
from shardflow.packing.attachments.annotations.dicom_drawings import (
    describe_structure_set,
    read_structure_set,
)
from shardflow.packing.attachments.annotations.targets import AnnotationLimits, Target
from tests.unit.packing.annotations.made_objects import contour, make_structure_set
from tests.unit.packing.annotations.scene import SERIES, affine_of, make_target, read
from tests.unit.packing.annotations.test_dicom_seg import target_of_headers
from tests.unit.packing.annotations.test_outlines import crossings
from tests.unit.packing.annotations.test_sampling import turned


def in_space(target: Target, index: int, points: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """Pixel coordinates of a slice in mm, by the affine of study.json."""
    affine = np.array(target.affine_lps)
    x, y = np.array(points, float).T
    whole = np.stack([x - 0.5, y - 0.5, np.full(len(x), index), np.ones(len(x))])
    return np.asarray((affine @ whole)[:3].T, np.float64)


@given(
    st.floats(-3.1, 3.1),
    st.floats(-3.1, 3.1),
    st.lists(st.tuples(st.floats(-4, 20), st.floats(-4, 20)), min_size=3, max_size=8),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_outline_comes_back_to_its_pixels(
    tmp_path_factory: pytest.TempPathFactory,
    a: float,
    b: float,
    points: list[tuple[float, float]],
    named: bool,
) -> None:
    target = make_target(4, 11, 13, affine_lps=affine_of(turned(a, b, 0.2)))
    points = [(round(x, 1) + 0.03, round(y, 1) + 0.03) for x, y in points]
    path = tmp_path_factory.mktemp("rt") / "rt.dcm"
    make_structure_set(path, {"Liver": [contour(in_space(target, 2, points), image=2 if named else None)]})
    result = read(partial(read_structure_set, path), target)
    expected = crossings([np.array(points)])
    if result.rois:
        assert (result.masks()[2] == expected).all()
        assert not result.masks()[[0, 1, 3]].any()
    else:
        assert not expected.any()
        assert result.dangling == {"OUTSIDE": 1}


@pytest.mark.fast
def test_rings_cut_each_other_and_slices_stay_apart(tmp_path: Path) -> None:
    target = make_target()
    outer, inner = [(2, 2), (12, 2), (12, 12), (2, 12)], [(4, 4), (8, 4), (8, 8), (4, 8)]
    contours = [contour(in_space(target, 1, outer)), contour(in_space(target, 1, inner))]
    contours.append(contour(in_space(target, 3, inner)))
    result = read(
        partial(read_structure_set, make_structure_set(tmp_path / "rt.dcm", {"GTVp1": contours})), target
    )
    expected = np.zeros((5, 24, 32), np.uint8)
    expected[1, 2:12, 2:12] = 1
    expected[1, 4:8, 4:8] = 0
    expected[3, 4:8, 4:8] = 1
    np.testing.assert_array_equal(result.masks(), expected)
    (roi,) = result.rois
    assert roi["label"] == "gtv"
    assert [len(one) for one in roi["polygons"]] == [2, 1]
    assert roi["polygons"][1] == [[4.0, 4.0, 8.0, 4.0, 8.0, 8.0, 4.0, 8.0]]
    assert roi["slices"][0]["box_px"] == [2.0, 2.0, 12.0, 12.0]


@pytest.mark.fast
def test_a_thick_slice_takes_the_nearest_of_the_planes_that_fall_into_it(tmp_path: Path) -> None:
    """Drawn every millimetre on a series that is not stored: filled together, the planes would cancel out."""
    target = make_target(3, affine_lps=affine_of(spacing=(1.0, 1.0, 4.0)), series_uid="1.2.9")
    contours = []
    for step in range(-1, 10):
        size = 6 + step  # the body grows, so that each plane can be told
        points = in_space(target, 0, [(2, 2), (2 + size, 2), (2 + size, 2 + size), (2, 2 + size)])
        contours.append(contour(points + np.array([0.0, 0.0, step])))
    result = read(
        partial(read_structure_set, make_structure_set(tmp_path / "rt.dcm", {"Liver": contours})), target
    )
    assert [int(mask.sum()) for mask in result.masks()] == [6**2, 10**2, 14**2]
    assert [len(one) for one in result.rois[0]["polygons"]] == [1, 1, 1]


@pytest.mark.fast
def test_half_a_file_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """pydicom reads what is there of a file that was cut: some regions, or some points of one."""
    target = make_target()
    square = [(2, 2), (12, 2), (12, 12), (2, 12)]
    rois = {
        name: [contour(in_space(target, index, square)) for index in range(3)] for name in ("Liver", "Heart")
    }
    path = make_structure_set(tmp_path / "rt.dcm", rois)
    data = path.read_bytes()
    begin = data.index(b"\x06\x30\x39\x00")  # ROI Contour Sequence
    end = data.index(b"\x06\x30\x80\x00")
    for size in range(begin + 1, end, 7):
        path.write_bytes(data[:size])
        with pytest.raises(SourceError):
            read(partial(read_structure_set, path), target)


@pytest.mark.fast
def test_slices_by_place_where_no_image_is_named(tmp_path: Path) -> None:
    target = make_target()
    square = [(2, 2), (12, 2), (12, 12), (2, 12)]
    near, far = in_space(target, 2, square), in_space(target, 2, square)
    near[:, 2] += 1.2  # less than half of 2.5 mm
    far[:, 2] += 100
    tilted = in_space(target, 2, square)
    tilted[:, 2] += np.linspace(0, 6, 4)
    rois = {"Liver": [contour(near)], "Heart": [contour(far)], "Spleen": [contour(tilted)]}
    result = read(partial(read_structure_set, make_structure_set(tmp_path / "rt.dcm", rois)), target)
    assert [(roi["label"], roi["slices"][0]["slice"]) for roi in result.rois] == [("liver", 2)]
    assert result.dangling == {"NOT_PLANAR": 1, "OUTSIDE": 1}


@pytest.mark.fast
def test_points_lines_and_what_is_broken(tmp_path: Path) -> None:
    target = make_target()
    point, line = in_space(target, 4, [(7.25, 3.5)]), in_space(target, 0, [(1, 1), (5, 4)])
    broken = contour(in_space(target, 0, [(1, 1), (5, 4)]))
    torn = contour(in_space(target, 0, [(1, 1), (5, 4), (2, 9)]))
    torn.ContourData = list(torn.ContourData)[:-1]
    other = contour(point, "SOMETHING")
    rois = {"Aorta": [contour(point, "POINT")], "x y z": [contour(line, "OPEN_PLANAR"), broken, torn, other]}
    result = read(partial(read_structure_set, make_structure_set(tmp_path / "rt.dcm", rois)), target)
    assert [(roi["kind"], roi["mask"]) for roi in result.rois] == [("point", None), ("contour", None)]
    assert result.rois[0]["slices"][0]["box_px"] == [7.25, 3.5, 7.25, 3.5]
    assert result.rois[1]["label"] is None
    assert result.dangling == {"DEGENERATE": 2, "UNSUPPORTED_SHAPE": 1}


@pytest.mark.fast
def test_limits_are_counts(tmp_path: Path) -> None:
    target = make_target()
    path = make_structure_set(
        tmp_path / "rt.dcm", {"Liver": [contour(in_space(target, 1, [(2, 2), (12, 2), (12, 12)]))] * 40}
    )
    for limits in (AnnotationLimits(max_points=100), AnnotationLimits(max_file_bytes=100)):
        with pytest.raises(SourceError) as caught:
            read(partial(read_structure_set, path), target, limits=limits)
        assert caught.value.reason == "LIMIT_EXCEEDED"


@pytest.mark.fast
def test_description(tmp_path: Path) -> None:
    path = make_structure_set(tmp_path / "rt.dcm", {})
    item = describe_structure_set(path, AnnotationLimits())
    assert (item.series_uids, len(item.sop_uids), len(item.study_uids)) == ((SERIES,), 1, 1)


def test_real_structure_sets(shared_data: Path) -> None:
    """Filled as by their own coordinates and spacing, which the CT of these files has along the axes."""
    folder = shared_data / "rt_utils" / "mock_data"
    headers = [pydicom.dcmread(path, stop_before_pixels=True) for path in folder.glob("ct_*.dcm")]
    headers.sort(key=lambda one: float(one.ImagePositionPatient[2]))
    target = target_of_headers(headers)
    path = folder / "rt.dcm"
    result = read(partial(read_structure_set, path), target)
    dataset = pydicom.dcmread(path)
    origin, spacing = (
        np.array(headers[0].ImagePositionPatient, float),
        np.array(headers[0].PixelSpacing, float),
    )
    expected = np.zeros((target.num_slices, *target.shape), np.uint8)
    for index, header in enumerate(headers):
        outlines = []
        for drawn in dataset.ROIContourSequence[0].ContourSequence:
            points = np.array(drawn.ContourData, float).reshape(-1, 3)
            if abs(points[0, 2] - float(header.ImagePositionPatient[2])) < 0.01:
                outlines.append((points[:, :2] - origin[:2]) / spacing[::-1] + 0.5)
        expected[index] = fill_outlines(outlines, target.rows, target.columns)
    assert expected.any()
    np.testing.assert_array_equal(result.masks(), expected)
    for name, num_dangling in (("invalid_reference_rt.dcm", 4), ("non_existent_reference_rt.dcm", 4)):
        result = read(partial(read_structure_set, folder / name), target)
        assert result.dangling == {"IMAGE_NOT_PACKED": num_dangling}
        assert len(result.rois) == 4
