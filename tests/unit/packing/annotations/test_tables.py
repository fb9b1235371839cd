"""XML of LIDC, JSON of COCO, tables of boxes, volumes of labels."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.errors import SourceError
from shardflow.packing.attachments.annotations.box_files import (
    describe_boxes,
    describe_coco,
    describe_lidc,
    is_box_table,
    is_coco,
    is_lidc,
    read_boxes,
    read_coco,
    read_lidc,
    unpack_runs,
)
from shardflow.packing.attachments.annotations.nifti_mask import (
    describe_label_volume,
    is_label_volume,
    read_label_volume,
)
from shardflow.packing.attachments.annotations.targets import AnnotationLimits
from tests.unit.packing.annotations.scene import SERIES, make_target, read, sop_uid

pytestmark = pytest.mark.fast

LIMITS = AnnotationLimits()


def edge_map(points: list[tuple[int, int]], index: int, inclusion: str = "TRUE") -> str:
    edges = "".join(f"<edgeMap><xCoord>{x}</xCoord><yCoord>{y}</yCoord></edgeMap>" for x, y in points)
    return (
        f"<roi><imageSOP_UID>{sop_uid(index)}</imageSOP_UID><inclusion>{inclusion}</inclusion>{edges}</roi>"
    )


def lidc(path: Path, *sessions: str, doctype: str = "") -> Path:
    path.write_text(
        f'<?xml version="1.0"?>{doctype}<LidcReadMessage xmlns="http://www.nih.gov"><ResponseHeader>'
        f"<SeriesInstanceUid>{SERIES}</SeriesInstanceUid></ResponseHeader>"
        + "".join(
            f"<readingSession><servicingRadiologistID>canary</servicingRadiologistID>{one}</readingSession>"
            for one in sessions
        )
        + "</LidcReadMessage>",
        encoding="utf-8",
    )
    return path


def test_readers_of_lidc_stay_apart_and_exclusions_are_holes(tmp_path: Path) -> None:
    square, hole = [(4, 4), (14, 4), (14, 14), (4, 14)], [(7, 7), (10, 7), (10, 10), (7, 10)]
    cut = edge_map(square, 1) + edge_map(hole, 1, "FALSE")
    rated = "<malignancy>5</malignancy><texture>canary</texture><subtlety>77</subtlety>"
    first = f"<unblindedReadNodule><noduleID>Canary 1</noduleID><characteristics>{rated}</characteristics>"
    first += f"{cut}</unblindedReadNodule>"
    second = f"<unblindedReadNodule><noduleID>2</noduleID>{edge_map([(9, 8)], 3)}</unblindedReadNodule>"
    second += (
        f"<nonNodule><nonNoduleID>3</nonNoduleID><imageSOP_UID>{sop_uid(2)}</imageSOP_UID>"
        "<locus><xCoord>5</xCoord><yCoord>6</yCoord></locus></nonNodule>"
    )
    second += f"<unblindedReadNodule><noduleID>4</noduleID>{edge_map(square, 40)}</unblindedReadNodule>"
    path = lidc(tmp_path / "a.xml", first, second)
    assert is_lidc(path, path.read_bytes()[:4096])
    assert describe_lidc(path, LIMITS).series_uids == (SERIES,)
    result = read(partial(read_lidc, path), make_target())
    assert [(roi["reader"], roi["kind"], roi["label"], roi["flags"]) for roi in result.rois] == [
        (0, "contour", "nodule", []), (1, "contour", "nodule", []), (1, "point", None, ["non_nodule"]),
    ]  # fmt: skip
    expected = np.zeros((24, 32), np.uint8)
    expected[5:14, 5:14] = 1  # what a reader marks is the border outside
    expected[8:10, 8:10] = 0
    np.testing.assert_array_equal(result.masks()[1], expected)
    assert result.rois[1]["slices"][0]["box_px"] == [9.5, 8.5, 9.5, 8.5]
    assert result.rois[1]["mask"] is None
    assert result.dangling == {"IMAGE_NOT_PACKED": 1}
    malignancy = {"code": {"scheme": "LIDC", "value": "malignancy"}, "unit": "1", "value": 5}
    assert [roi.get("measurements") for roi in result.rois] == [[malignancy], None, None]
    assert "anary" not in str(result.rois)


@pytest.mark.parametrize("attack", ["laughs", "external", "depth", "size", "torn"])
def test_hostile_xml(tmp_path: Path, attack: str) -> None:
    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 12))
    path = lidc(tmp_path / "a.xml", "<a>" * 5000 + "</a>" * 5000 if attack == "depth" else "")
    if attack == "laughs":
        lidc(path, "&l11;", doctype=f'<!DOCTYPE x [<!ENTITY l0 "lol">{laughs}]>')
    elif attack == "external":
        lidc(path, "&x;", doctype='<!DOCTYPE x [<!ENTITY x SYSTEM "file:///etc/passwd">]>')
    elif attack == "torn":
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(SourceError) as caught:
        read(
            partial(read_lidc, path),
            make_target(),
            limits=AnnotationLimits(max_file_bytes=10) if attack == "size" else LIMITS,
        )
    assert caught.value.reason in {"HEADER_UNREADABLE", "LIMIT_EXCEEDED"}


def coco(path: Path, annotations: list[dict[str, Any]], **other: Any) -> Path:
    images = [{"id": 7, "file_name": f"x/{sop_uid(1)}.dcm"}, {"id": 8, "file_name": "other.png"}]
    categories = [{"id": 1, "name": "nodule"}, {"id": 2, "name": "Canary of Mr Smith"}]
    path.write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories, **other})
    )
    return path


def test_an_exclusion_that_sticks_out_adds_nothing(tmp_path: Path) -> None:
    square, beside = [(4, 4), (14, 4), (14, 14), (4, 14)], [(10, 10), (18, 10), (18, 18), (10, 18)]
    drawn = edge_map(square, 1) + edge_map(beside, 1, "FALSE")
    path = lidc(tmp_path / "a.xml", f"<unblindedReadNodule>{drawn}</unblindedReadNodule>")
    expected = np.zeros((24, 32), np.uint8)
    expected[5:14, 5:14] = 1
    expected[11:14, 11:14] = 0
    np.testing.assert_array_equal(read(partial(read_lidc, path), make_target()).masks()[1], expected)


def test_parts_of_one_region_of_coco_may_overlap(tmp_path: Path) -> None:
    parts = [[2, 2, 12, 2, 12, 12, 2, 12], [8, 8, 18, 8, 18, 18, 8, 18]]
    path = coco(tmp_path / "c.json", [{"image_id": 7, "category_id": 1, "segmentation": parts}])
    expected = np.zeros((24, 32), np.uint8)
    expected[2:12, 2:12] = expected[8:18, 8:18] = 1
    result = read(partial(read_coco, path, [0]), make_target())
    np.testing.assert_array_equal(result.masks()[1], expected)
    assert result.rois[0]["polygons"] == [[list(map(float, part)) for part in parts]]


def test_coco(tmp_path: Path) -> None:
    mask = np.zeros((24, 32), np.uint8)
    mask[3:9, 5:11] = 1
    flat = mask.T.ravel()
    changes = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff([0, *changes, flat.size]).tolist()
    path = coco(
        tmp_path / "c.json",
        [
            {"image_id": 7, "category_id": 1, "bbox": [30.5, 20, 10, 10]},
            {"image_id": 7, "category_id": 2, "segmentation": [[2, 2, 9, 2, 9, 9, 2, 9], [1, 2, 3]]},
            {
                "image_id": 7,
                "category_id": 1,
                "segmentation": {"size": [24, 32], "counts": runs},
                "iscrowd": 1,
            },
            {"image_id": 7, "category_id": 1, "segmentation": {"size": [2, 2], "counts": [4]}},
            {"image_id": 7, "category_id": 1, "bbox": [1, 1, 0, 5]},
            {"image_id": 8, "category_id": 1, "bbox": [1, 1, 5, 5]},
        ],
    )
    assert is_coco(path, path.read_bytes()[:4096])
    assert [sop_uid(1) in one.sop_uids for one in describe_coco(path, LIMITS)] == [True, False]
    result = read(partial(read_coco, path, [0]), make_target())
    assert [(roi["kind"], roi["label"], roi["flags"]) for roi in result.rois] == [
        ("box", "nodule", ["clipped"]), ("contour", None, []), ("segmentation", "nodule", ["crowd"]),
    ]  # fmt: skip
    assert result.rois[0]["slices"][0]["box_px"] == [30.5, 20.0, 32.0, 24.0]
    np.testing.assert_array_equal(result.masks(2)[1], mask)
    assert result.dangling == {"DEGENERATE": 2, "GRID_MISMATCH": 1}
    assert "anary" not in str(result.rois)


def pack_runs(runs: list[int]) -> str:
    """Write run lengths as the format says: differences from the third on, five bits a character."""
    text = ""
    for at, run in enumerate(runs):
        value = run - runs[at - 2] if at > 2 else run
        is_more = True
        while is_more:
            bits, value = value & 31, value >> 5
            is_more = value != (-1 if bits & 16 else 0)
            text += chr(48 + bits + (32 if is_more else 0))
    return text


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_packed_run_lengths(runs: list[int]) -> None:
    total = max(1, sum(runs))
    expected = np.repeat(np.arange(len(runs)) & 1, runs) if sum(runs) else None
    mask = unpack_runs(pack_runs(runs), [total, 1], (total, 1))
    if expected is None:
        assert mask is None
    else:
        assert mask is not None
        np.testing.assert_array_equal(mask[:, 0], expected)


def test_run_lengths_that_are_none() -> None:
    assert unpack_runs("not runs!", [4, 5], (4, 5)) is None
    assert unpack_runs([1, 2], [4, 5], (4, 5)) is None
    assert unpack_runs([-1, 21], [4, 5], (4, 5)) is None
    assert unpack_runs([10**30], [4, 5], (4, 5)) is None


@pytest.mark.parametrize("text", ['{"images": 3, "annotations": []}', '{"images": [', "[" * 100_000, "[1]"])
def test_broken_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(SourceError, match="parsed"):
        describe_coco(path, LIMITS)


def test_tables_of_boxes(tmp_path: Path) -> None:
    path = tmp_path / "boxes.csv"
    path.write_text(
        "image_id,class_name,x_min,y_min,x_max,y_max,rad_id\n"
        f"{sop_uid(0)},Nodule,1,2,11,12.5,canary\n"
        f"{sop_uid(0)},No finding,,,,,canary\n"
        f"{sop_uid(3)}.dicom,Canary,5,5,4,9,canary\n"
        f"{sop_uid(3)}.dicom,Pleural effusion,nan,5,9,9,canary\n"
        f"{sop_uid(3)}.dicom,Pleural effusion,2,5,9,9,canary\n"
    )
    assert is_box_table(path, path.read_bytes())
    assert not is_box_table(path, b"study,series\n1,2\n")
    items = describe_boxes(path, LIMITS)
    assert [sop_uid(3) in one.sop_uids for one in items] == [False, True]
    result = read(partial(read_boxes, path, [0, 1]), make_target())
    assert [(roi["label"], roi["slices"][0]["slice"]) for roi in result.rois] == [
        ("nodule", 0), ("pleural effusion", 3),
    ]  # fmt: skip
    assert result.rois[0]["slices"][0]["box_px"] == [1.0, 2.0, 11.0, 12.5]
    assert result.dangling == {"DEGENERATE": 2}
    path.write_text(f"patientId,x,y,width,height,Target\n{sop_uid(0)},264,152,213,379,1\n")
    result = read(partial(read_boxes, path, [0]), make_target(1, 1024, 1024))
    assert result.rois[0]["slices"][0]["box_px"] == [264.0, 152.0, 477.0, 531.0]
    with pytest.raises(SourceError, match="rows"):
        read(partial(read_boxes, path, [0]), make_target(), limits=AnnotationLimits(max_items=0))


@pytest.mark.parametrize("flips", [(1, 1, 1), (-1, -1, 1), (1, -1, -1)])
def test_volumes_of_labels_in_any_orientation(tmp_path: Path, flips: tuple[int, int, int]) -> None:
    """Voxels i, j, k run any way; the affine (RAS) says which. The stored series is in LPS."""
    target = make_target()
    labels = np.zeros((5, 24, 32), np.int16)
    labels[1:4, 3:9, 5:20] = 300
    labels[2:, 12:20, 8:12] = 2
    voxels, affine = labels.transpose(2, 1, 0), np.diag([-1.0, -1.0, 1.0, 1.0]) @ np.array(target.affine_lps)
    for axis, flip in enumerate(flips):
        if flip < 0:
            voxels = np.flip(voxels, axis)
            affine[:3, 3] += affine[:3, axis] * (voxels.shape[axis] - 1)
            affine[:3, axis] *= -1
    path = tmp_path / "case1_seg.nii.gz"
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)  # type: ignore[no-untyped-call]
    assert is_label_volume(path, path.read_bytes()[:4096])
    assert "case1" in describe_label_volume(path, LIMITS).study_uids
    result = read(partial(read_label_volume, path), target)
    found = {roi["value"]: result.masks(at) for at, roi in enumerate(result.rois)}
    assert set(found) == {2, 300}
    for value, mask in found.items():
        np.testing.assert_array_equal(mask, labels == value)
    with pytest.raises(SourceError):
        read(partial(read_label_volume, path), target, limits=AnnotationLimits(max_voxels=100))


def test_volume_of_fractions_and_image(tmp_path: Path) -> None:
    target = make_target()
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ np.array(target.affine_lps)
    fractions = np.linspace(0, 1, 32 * 24 * 5, dtype=np.float32).reshape(32, 24, 5)
    path = tmp_path / "lesion-mask.nii"
    nibabel.save(nibabel.Nifti1Image(fractions, affine), path)  # type: ignore[no-untyped-call]
    result = read(partial(read_label_volume, path), target)
    assert result.rois[0]["flags"] == ["fractional"]
    np.testing.assert_array_equal(
        result.masks(), np.round(fractions.transpose(2, 1, 0) * 255).astype(np.uint8)
    )
    nibabel.save(nibabel.Nifti1Image(fractions * 900 - 500, affine), path)  # type: ignore[no-untyped-call]
    with pytest.raises(SourceError, match="neither labels nor fractions"):
        read(partial(read_label_volume, path), target)
    assert not is_label_volume(tmp_path / "image.nii", path.read_bytes()[:4096])
