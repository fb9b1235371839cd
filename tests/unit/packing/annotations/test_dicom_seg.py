"""Segmentations against what highdicom makes and reads, on real files and on hostile ones."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray

from shardflow.errors import SourceError
from shardflow.packing.attachments.annotations.dicom_seg import describe_segmentation, read_segmentation
from shardflow.packing.attachments.annotations.targets import AnnotationLimits
from tests.unit.packing.annotations.made_objects import make_segmentation
from tests.unit.packing.annotations.scene import FRAME, SERIES, affine_of, make_target, read, sop_uid
from tests.unit.packing.annotations.test_sampling import turned


def two_masks(num_slices: int = 5, rows: int = 24, columns: int = 32) -> NDArray[np.uint8]:
    """Two segments that overlap; the first and the last slice are empty."""
    masks = np.zeros((num_slices, rows, columns, 2), np.uint8)
    masks[1:4, 3:12, 5:20, 0] = 1
    masks[2:4, 8:15, 10:30, 1] = 1
    return masks


@pytest.mark.fast
def test_overlapping_segments_in_order_of_the_stored_slices(tmp_path: Path) -> None:
    """The stored series runs the other way than the images were given to highdicom."""
    target = make_target(affine_lps=affine_of(turned(0.3, -0.2, 0.5)))
    path = make_segmentation(tmp_path / "seg.dcm", target, two_masks(), omit_empty_frames=True)
    result = read(partial(read_segmentation, path), target)
    assert [roi["label"] for roi in result.rois] == ["liver", "lesion"]
    assert result.rois[0]["code"] == {"scheme": "SCT", "value": "10200004"}
    assert result.rois[0]["slices"][0] == {
        "slice": 1,
        "box_px": [5.0, 3.0, 20.0, 12.0],
        "area_mm2": pytest.approx(9 * 15 * 0.8 * 0.7),
        "diameter_mm": pytest.approx(np.hypot(9 * 0.7, 15 * 0.8), abs=1e-3),
        "fraction": pytest.approx(135 / 768, abs=1e-6),
    }
    assert result.dangling == {}
    for segment in (0, 1):
        np.testing.assert_array_equal(result.masks(segment), two_masks()[..., segment])
    assert set(result.fields) == {f"s000.m000.i000{one}.b2nd" for one in (1, 2, 3)} | {
        f"s000.m001.i000{one}.b2nd" for one in (2, 3)
    }


@pytest.mark.fast
def test_segments_may_have_a_grid_each(tmp_path: Path) -> None:
    target = make_target()
    masks = np.zeros((5, 24, 32, 2), np.uint8)
    masks[1, 4:8, 5:9, 0] = masks[1, 10:14, 15:20, 1] = 1
    path = make_segmentation(tmp_path / "seg.dcm", target, masks)
    dataset = pydicom.dcmread(path)
    for frame in dataset.PerFrameFunctionalGroupsSequence:
        if frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber == 2:
            place = frame.PlanePositionSequence[0]
            shift = 3 * target.plane(0).per_column
            place.ImagePositionPatient = [
                f"{value:.6f}" for value in np.array(place.ImagePositionPatient, float) + shift
            ]
    dataset.save_as(path)
    result = read(partial(read_segmentation, path), target)
    masks[1, :, :, 1] = np.roll(masks[1, :, :, 1], 3, axis=1)
    for segment in (0, 1):
        np.testing.assert_array_equal(result.masks(segment), masks[..., segment])


def test_fractions_keep_their_parts(tmp_path: Path) -> None:
    target = make_target()
    fractions = two_masks()[..., :1] * np.linspace(0, 1, 32, dtype=np.float64)[None, None, :, None]
    path = make_segmentation(tmp_path / "seg.dcm", target, fractions, "FRACTIONAL", max_fractional_value=100)
    result = read(partial(read_segmentation, path), target)
    found = result.masks().astype(float) / 255
    assert np.abs(found - fractions[..., 0]).max() <= 0.5 / 100 + 0.5 / 255
    assert result.rois[0]["flags"] == ["fractional"]
    assert result.rois[0]["slices"][0]["area_mm2"] == pytest.approx(found[1].sum() * 0.56, abs=1e-3)


@pytest.mark.fast
def test_labels_of_a_map_become_regions(tmp_path: Path) -> None:
    target = make_target()
    labels = two_masks()[..., 0] + (two_masks()[..., 1] & ~two_masks()[..., 0].astype(bool)) * 2
    path = make_segmentation(tmp_path / "seg.dcm", target, labels.astype(np.uint8), "LABELMAP")
    result = read(partial(read_segmentation, path), target)
    for segment in (0, 1):
        np.testing.assert_array_equal(result.masks(segment), labels == segment + 1)


@pytest.mark.fast
def test_series_of_the_same_frame_of_reference_takes_it_by_place(tmp_path: Path) -> None:
    """The images that it was drawn on are not packed; another series of the study is, finer and shifted."""
    drawn = make_target()
    path = make_segmentation(tmp_path / "seg.dcm", drawn, two_masks()[..., :1])
    other = make_target(
        12,
        48,
        64,
        series_uid="1.2.9",
        affine_lps=affine_of(spacing=(0.4, 0.35, 1.25), origin=(-20.2, -30.175, 4.375)),
    )
    result = read(partial(read_segmentation, path), other)
    expected = np.repeat(np.repeat(two_masks()[..., 0], 2, axis=1), 2, axis=2)
    expected = np.repeat(expected, 2, axis=0)
    np.testing.assert_array_equal(result.masks()[:10], expected)
    assert not result.masks()[10:].any()


@pytest.mark.fast
def test_drawn_on_series_is_preferred_and_others_are_left_alone(tmp_path: Path) -> None:
    drawn, other = make_target(), make_target(number=1, series_uid="1.2.9")
    path = make_segmentation(tmp_path / "seg.dcm", drawn, two_masks())
    assert {roi["series"] for roi in read(partial(read_segmentation, path), other, drawn).rois} == {0}


@pytest.mark.fast
def test_references_that_lead_nowhere_are_counted_and_not_named(tmp_path: Path) -> None:
    path = make_segmentation(tmp_path / "seg.dcm", make_target(), two_masks())
    stranger = make_target(series_uid="1.2.9", frame_of_reference_uid="1.2.10")
    result = read(partial(read_segmentation, path), stranger)
    assert result.rois == []
    assert result.dangling == {"IMAGE_NOT_PACKED": 5}
    smaller = make_target(5, 12, 16, frame_of_reference_uid="1.2.10", affine_lps=None)
    assert read(partial(read_segmentation, path), smaller).dangling == {"GRID_MISMATCH": 5}


@pytest.mark.fast
def test_images_without_a_place_take_frames_by_reference(tmp_path: Path) -> None:
    path = make_segmentation(tmp_path / "seg.dcm", make_target(), two_masks())
    flat = make_target(affine_lps=None, frame_of_reference_uid="")
    np.testing.assert_array_equal(read(partial(read_segmentation, path), flat).masks(1), two_masks()[..., 1])


@pytest.mark.fast
def test_series_whose_slices_name_frames_of_their_own_takes_it_in_space(tmp_path: Path) -> None:
    """Without references to images, planes are all there is; the series is named, its space is its own."""
    path = make_segmentation(tmp_path / "seg.dcm", make_target(), two_masks())
    dataset = pydicom.dcmread(path)
    for frame in dataset.PerFrameFunctionalGroupsSequence:
        del frame.DerivationImageSequence
    dataset.save_as(path)
    varying = make_target(frame_of_reference_uid="")
    result = read(partial(read_segmentation, path), varying)
    np.testing.assert_array_equal(result.masks(1), two_masks()[..., 1])


@pytest.mark.fast
def test_nothing_that_a_person_typed_leaves(tmp_path: Path) -> None:
    labels = ("Canary of Mr Smith", "Lesion seen by Canary")
    path = make_segmentation(tmp_path / "seg.dcm", make_target(), two_masks(), labels=labels)
    result = read(partial(read_segmentation, path), make_target())
    said = str(result.rois) + str(result.dangling) + str(sorted(result.fields))
    assert [roi["label"] for roi in result.rois] == ["liver", "lesion"], "the codes still say what they are"
    for secret in ("anary", "Smith", "1.2.3.4", SERIES, FRAME, sop_uid(0)):
        assert secret not in said


@pytest.mark.fast
def test_description_names_study_series_and_instances(tmp_path: Path) -> None:
    path = make_segmentation(tmp_path / "seg.dcm", make_target(), two_masks())
    item = describe_segmentation(path, AnnotationLimits())
    assert item.series_uids == (SERIES,)
    assert item.time is None
    assert set(item.sop_uids) <= {sop_uid(index) for index in range(5)}


@pytest.mark.fast
@pytest.mark.parametrize("change", ["frames", "pixels", "garbage"])
def test_hostile_files_end_with_a_reason(tmp_path: Path, change: str) -> None:
    path = make_segmentation(tmp_path / "seg.dcm", make_target(), two_masks())
    dataset: Any = pydicom.dcmread(path)
    if change == "frames":
        dataset.NumberOfFrames = 2_000_000_000
    elif change == "pixels":
        dataset.Rows = dataset.Columns = 60_000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.save_as(path)
    if change == "garbage":
        path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(SourceError) as caught:
        read(partial(read_segmentation, path), make_target())
    assert caught.value.reason in {"LIMIT_EXCEEDED", "HEADER_UNREADABLE", "UNSUPPORTED_TRANSFER_SYNTAX"}
    assert "anary" not in str(caught.value)


def test_real_files_have_the_pixels_that_highdicom_finds(shared_data: Path) -> None:
    """Liver, five overlapping segments, fractions: one frame a source image, by their references."""
    highdicom = pytest.importorskip("highdicom")
    folder = shared_data / "dcmqi_ct_seg_sr" / "segmentations"
    bundled = Path(pydicom.data.get_testdata_file("CT_small.dcm")).parent
    small = [*(bundled / "dicomdirtests" / "77654033" / "CT2").iterdir()]
    cases = [
        (folder / "liver.dcm", [*(folder / "ct-3slice").iterdir()]),
        (folder / "partial_overlaps.dcm", [*(folder / "ct-3slice").iterdir()]),
        (shared_data / "highdicom" / "seg_image_ct_binary_overlap.dcm", small),
        (shared_data / "highdicom" / "seg_image_ct_true_fractional.dcm", small),
    ]
    for path, images in cases:
        headers = [pydicom.dcmread(one, stop_before_pixels=True) for one in images]
        headers.sort(key=lambda one: float(one.ImagePositionPatient[2]))
        target = target_of_headers(headers)
        result = read(partial(read_segmentation, path), target)
        segmentation = highdicom.seg.segread(path)
        is_fractional = segmentation.segmentation_type.value == "FRACTIONAL"
        expected = segmentation.get_pixels_by_source_instance(
            [one.SOPInstanceUID for one in headers],
            assert_missing_frames_are_empty=True,
            ignore_spatial_locations=True,
            rescale_fractional=is_fractional,
        )
        for at, roi in enumerate(result.rois):
            scale = 255 if is_fractional else 1
            segment = [number for number in range(expected.shape[3]) if expected[..., number].any()][at]
            assert np.abs(result.masks(roi["roi"]) - expected[..., segment] * scale).max() < 1
        assert len(result.rois) == sum(expected.any(axis=(0, 1, 2)))
        assert result.dangling == {}


def target_of_headers(headers: list[Any]) -> Any:
    """Describe a series by headers that are sorted along the z axis."""
    first, last = headers[0], headers[-1]
    turn = np.array(first.ImageOrientationPatient, float).reshape(2, 3)
    rows, columns = (float(one) for one in first.PixelSpacing)
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = turn[0] * columns, turn[1] * rows
    origin, end = (np.array(one.ImagePositionPatient, float) for one in (first, last))
    affine[:3, 2] = (end - origin) / (len(headers) - 1)
    affine[:3, 3] = origin
    return make_target(
        rows=first.Rows,
        columns=first.Columns,
        affine_lps=affine.tolist(),
        instances=[(str(one.SOPInstanceUID), 1) for one in headers],
        series_uid=str(first.SeriesInstanceUID),
        frame_of_reference_uid=str(first.FrameOfReferenceUID),
        pixel_spacing_mm=(rows, columns),
    )
