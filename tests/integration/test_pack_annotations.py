"""Annotation files among the inputs: an outcome each, regions in the sample, nothing that a person typed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blosc2
import highdicom
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - as everyone does
from numpy.typing import NDArray
from pydicom import dcmread
from pydicom.data import get_testdata_file
from pydicom.dataset import FileDataset

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format.codecs import decode_array
from shardflow.format.facts.making import attach_facts
from shardflow.packing import PackSummary
from tests.dicom_factory import dicom_uid, make_study
from tests.pack_case import PackCase, read_ledger
from tests.unit.packing.annotations.made_objects import code, item, make_object

pytestmark = pytest.mark.usefixtures("packs_inline")

LOOSE = "policy.max_quarantined_share=1.0"
CANARY = "XCANARYX"


def _samples(case: PackCase) -> dict[str, Mapping[str, bytes]]:
    dataset = case.open()
    rows = range(dataset.samples.num_samples)
    return {str(row): dataset.read_fields(row) for row in rows}


def _annotations(fields: Mapping[str, bytes]) -> dict[str, Any]:
    return dict(json.loads(fields["annotations.json"]))


def _mask(fields: Mapping[str, bytes], roi: Mapping[str, Any], index: int) -> NDArray[np.uint8]:
    """Decode the mask of a region in a slice; empty where there is none."""
    if roi["mask"].endswith(".volume"):
        pixels = blosc2.ndarray_from_cframe(fields[f"{roi['mask']}.b2nd"])[index]
        found = pixels if "fractional" in roi["flags"] else np.isin(pixels, roi["values"]).astype(np.uint8)
        return found if found.any() else np.zeros((0, 0), np.uint8)
    prefix = f"{roi['mask']}.i{index:04d}."
    stored = [payload for name, payload in fields.items() if name.startswith(prefix)]
    return decode_array("b2nd", stored[0]) if stored else np.zeros((0, 0), np.uint8)


def _delivered(case: PackCase) -> tuple[dict[str, list[int]], int]:
    """Return how many pixels of each slice a mask of all regions covers, by sample; the number of boxes."""
    dataset = case.open()
    attach_facts(dataset)
    fields: dict[str, sf.Field] = {
        "x": sf.Image(series="num_slices > 0", num_images="all"),
        "mask": sf.Mask(like="x"),
        "boxes": sf.Boxes(like="x", max_boxes=1000),
    }
    found: dict[str, list[int]] = {}
    num_boxes = 0
    for split, rows in dataset.splits.items():
        if not len(rows):
            continue
        spec = sf.BatchSpec.simple(global_batch_size=1, micro_batch_size=1, tail="mask")
        with sf.Loader(dataset, split=split, seed=1, batch=spec, fields=fields, world=sf.World()) as loader:
            for batch in loader:
                (key,), (masks,) = batch.info.sample_keys, batch["mask"]
                assert key is not None
                assert all(
                    mask.shape[1:] == one.shape[1:] for mask, one in zip(masks, batch["x"][0], strict=True)
                )
                found[key] = sorted(int(mask.sum()) for mask in masks)
                num_boxes += int(batch["boxes_mask"].sum())
            assert not loader.quarantined
    return found, num_boxes


def test_own_files_of_all_kinds_but_segmentations(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    study = make_study(case.dicom / "a", num_slices=4, size=(16, 12))
    uid = [str(dcmread(path, stop_before_pixels=True).SOPInstanceUID) for path in study.files]
    series = dicom_uid("series", "P1", "A", 1)
    folder = case.dicom / "b"
    folder.mkdir()
    reference = item(ReferencedSOPClassUID="1.2.840.10008.5.1.4.1.1.2", ReferencedSOPInstanceUID=uid[2])
    named: dict[str, Any] = {
        "PatientName": CANARY,
        "ContentCreatorName": CANARY,
        "SeriesInstanceUID": "1.2.3",
    }
    make_object(
        folder / "ko", "1.2.840.10008.5.1.4.1.1.88.59", ConceptNameCodeSequence=[code("113000", "DCM")],
        ContentSequence=[
            item(ValueType="TEXT", TextValue=CANARY),
            item(ValueType="IMAGE", ReferencedSOPSequence=[reference]),
        ],
        **named,
    )  # fmt: skip
    make_object(
        folder / "pr", "1.2.840.10008.5.1.4.1.1.11.1",
        ReferencedSeriesSequence=[item(SeriesInstanceUID=series, ReferencedImageSequence=[reference])],
        GraphicAnnotationSequence=[item(GraphicLayer=CANARY, GraphicObjectSequence=[item(
            GraphicType="CIRCLE", GraphicAnnotationUnits="PIXEL", GraphicData=[6.0, 8.0, 9.0, 8.0])],
            TextObjectSequence=[item(UnformattedTextValue=CANARY)])],
        **named,
    )  # fmt: skip
    for path in (folder / "ko", folder / "pr"):
        dataset = dcmread(path)
        dataset.StudyInstanceUID = study.study_instance_uid
        dataset.save_as(path)
    (folder / "lidc.xml").write_text(
        f"<LidcReadMessage><SeriesInstanceUid>{series}</SeriesInstanceUid><readingSession>"
        f"<servicingRadiologistID>{CANARY}</servicingRadiologistID><unblindedReadNodule><noduleID>{CANARY}</noduleID>"
        f"<roi><imageSOP_UID>{uid[1]}</imageSOP_UID><inclusion>TRUE</inclusion>"
        + "".join(
            f"<edgeMap><xCoord>{x}</xCoord><yCoord>{y}</yCoord></edgeMap>"
            for x, y in ((2, 2), (8, 2), (8, 9))
        )
        + "</roi></unblindedReadNodule></readingSession></LidcReadMessage>",
        encoding="utf-8",
    )
    (folder / "boxes.csv").write_text(
        f"image_id,label,x_min,y_min,x_max,y_max\n{uid[0]},{CANARY},1,1,5,5\n9.9.9,nodule,1,1,5,5\n",
        encoding="utf-8",
    )
    coco = {
        "images": [{"id": 1, "file_name": f"{uid[3]}.dcm"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}],
        "categories": [{"id": 1, "name": "nodule"}, {"id": 2, "name": CANARY}],
    }
    (folder / "coco.json").write_text(json.dumps(coco), encoding="utf-8")
    (folder / "bomb.xml").write_text('<!DOCTYPE x [<!ENTITY a "a">]><LidcReadMessage/>', encoding="utf-8")
    summary = case.pack(LOOSE)
    assert summary.status == "packed"
    assert summary.reasons == {"ATTACHMENT_WITHOUT_STUDY": 1, "HEADER_UNREADABLE": 1}
    (fields,) = _samples(case).values()
    annotations = _annotations(fields)
    assert sorted((roi["source"], roi["slices"][0]["slice"]) for roi in annotations["rois"]) == [
        ("coco", 3), ("csv", 0), ("gsps", 2), ("ko", 2), ("lidc-xml", 1),
    ]  # fmt: skip
    assert [roi["roi"] for roi in annotations["rois"]] == list(range(len(annotations["rois"])))
    masked = [roi for roi in annotations["rois"] if roi["mask"]]
    assert {roi["source"] for roi in masked} == {"gsps", "lidc-xml"}
    for roi in masked:
        place = roi["slices"][0]
        mask = _mask(fields, roi, place["slice"])
        assert mask.shape == (16, 12)
        assert mask.mean() == pytest.approx(place["fraction"], abs=1e-6)
    # Of the key image nothing, of the tables their boxes, elsewhere the masks.
    by_fraction = {roi["slices"][0]["slice"]: roi["slices"][0]["fraction"] for roi in masked}
    (sums,), num_boxes = (_delivered(case)[0].values(), _delivered(case)[1])
    assert sums == sorted([16, 12, *(round(16 * 12 * by_fraction[index]) for index in (1, 2))])
    assert num_boxes == 4
    for path in [*case.output.rglob("*")]:
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes()
    assert all(CANARY.encode() not in payload for payload in fields.values())
    for secret in (*uid, series, study.study_instance_uid):
        assert secret.encode() not in fields["annotations.json"]


@pytest.mark.parametrize("storage", ["slices", "bricks"])
def test_real_files_of_three_projects(tmp_path: Path, shared_data: Path, storage: str) -> None:
    """CT with segmentations, structure sets and reports, as dcmqi, rt-utils and highdicom published them."""
    case = PackCase(tmp_path)
    case.prepare()
    bundled = Path(get_testdata_file("CT_small.dcm") or "").parent
    small = sorted((bundled / "dicomdirtests" / "77654033" / "CT2").iterdir())
    highdicom_files = sorted((shared_data / "highdicom").glob("s*_*ct*.dcm"))
    highdicom_files += [
        *(shared_data / "highdicom").glob("sr_*.dcm"),
        shared_data / "highdicom" / "ct_image.dcm",
    ]
    dcmqi = shared_data / "dcmqi_ct_seg_sr" / "segmentations"
    real = [
        *small,
        *highdicom_files,
        *dcmqi.glob("*.dcm"),
        *(dcmqi / "ct-3slice").iterdir(),
        *(dcmqi / "24x38x3" / "image").iterdir(),
        *(shared_data / "rt_utils" / "mock_data").glob("*.dcm"),
    ]
    for number, path in enumerate(real):
        shutil.copy(path, case.dicom / f"{number:03d}")
    summary: PackSummary = case.pack(LOOSE, "deid.face_risk=flag", f"volumes.storage={storage}")
    assert summary.status == "packed"
    outcomes = {row["outcome"] for row in read_ledger(case.output) if row["kind"] == "attachment"}
    assert outcomes == {"packed"}, summary.reasons
    everything = [_annotations(fields) for fields in _samples(case).values() if "annotations.json" in fields]
    sources = {roi["source"] for one in everything for roi in one["rois"]}
    assert sources == {"dicom-seg", "rtstruct", "sr-tid1500"}
    labels = {roi["label"] for one in everything for roi in one["rois"]}
    assert {"liver", "bone", "pulmonary nodule"} <= labels
    assert sum(one["count"] for one in everything for one in one["dangling"]) >= 8
    for fields in _samples(case).values():
        if "annotations.json" not in fields:
            continue
        series = json.loads(fields["study.json"])["series"]
        for roi in _annotations(fields)["rois"]:
            shape = (series[roi["series"]]["rows"], series[roi["series"]]["columns"])
            indexes = [place["slice"] for place in roi["slices"]]
            masks = [_mask(fields, roi, index) if roi["mask"] else None for index in indexes]
            scale = 255 if "fractional" in roi["flags"] else 1
            for place, mask in zip(roi["slices"], masks, strict=True):
                if mask is not None and place["fraction"]:
                    assert mask.shape == shape
                    assert mask.sum() / scale / mask.size == pytest.approx(place["fraction"], abs=1e-5)
                    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
                    x0, y0, x1, y1 = place["box_px"]
                    assert x0 <= columns[0] + 0.5
                    assert y0 <= rows[0] + 0.5
                    assert columns[-1] + 0.5 <= x1
                    assert rows[-1] + 0.5 <= y1
    in_bricks = {
        roi["source"] for one in everything for roi in one["rois"] if "volume" in (roi["mask"] or "")
    }
    assert in_bricks == ({"dicom-seg"} if storage == "bricks" else set())
    if storage == "bricks":
        _check_against_highdicom(case, [path for path in highdicom_files if "seg" in path.name])
    delivered, num_boxes = _delivered(case)
    assert num_boxes > 20
    for fields in _samples(case).values():
        study = json.loads(fields["study.json"])
        united: dict[tuple[int, int], NDArray[np.bool_]] = {}
        for roi in _annotations(fields)["rois"] if "annotations.json" in fields else ():
            for place in roi["slices"] if roi["mask"] else ():
                covered = _mask(fields, roi, place["slice"]) >= (128 if "fractional" in roi["flags"] else 1)
                if covered.size:
                    before = united.get((roi["series"], place["slice"]), covered)
                    united[roi["series"], place["slice"]] = before | covered
        num_slices = sum(series["num_slices"] for series in study["series"])
        expected = [int(covered.sum()) for covered in united.values()] + [0] * (num_slices - len(united))
        assert delivered[study["sample_key"]] == sorted(expected)


@pytest.mark.parametrize("storage", ["slices", "bricks"])
def test_a_mask_beside_a_real_volume_is_that_of_its_project(
    tmp_path: Path, shared_data: Path, storage: str
) -> None:
    """The liver of dcmqi's CT, in the grid of the CT and in another one, equals their own file of it."""
    case = PackCase(tmp_path)
    case.prepare()
    dcmqi = shared_data / "dcmqi_ct_seg_sr" / "segmentations"
    for number, path in enumerate([*(dcmqi / "ct-3slice").iterdir(), dcmqi / "liver.dcm"]):
        shutil.copy(path, case.dicom / f"{number:03d}")
    case.pack("splits={train=1}", "deid.face_risk=flag", f"volumes.storage={storage}")
    spec = sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1)
    image = sitk.ReadImage(str(dcmqi / "liver_seg.nrrd"))
    truth = sitk.GetArrayFromImage(image)
    to_index = np.linalg.inv(np.diag([*image.GetSpacing(), 1.0]))
    to_index[:3, 3] = -np.array(image.GetOrigin()) / image.GetSpacing()
    ct = "modality == 'CT'"  # of three slices, which are no volume by default
    with pytest.raises(ConfigError, match=r"'volume'\" \(the default\)\..* Kinds of series: images\."):
        sf.Loader(
            case.open(), split="train", seed=1, batch=spec, fields={"own": sf.Volume(roi_size=(3, 9, 9))}
        )
    fields = {
        "own": sf.Volume(roi_size=(3, 512, 512), center="middle", series=ct),
        "own_liver": sf.Mask(like="own", labels=["liver"]),
        "mm": sf.Volume(
            roi_size=(300, 300, 3), spacing_mm=(1.3, 1.3, 1.0), orientation="RAS", center="middle", series=ct
        ),
        "mm_liver": sf.Mask(like="mm", labels=["liver"]),
    }
    with sf.Loader(case.open(), split="train", seed=1, batch=spec, fields=fields) as loader:
        (batch,) = loader
    for name in ("own", "mm"):
        mask = batch[f"{name}_liver"][0, 0]
        places = np.stack([*np.indices(mask.shape), np.ones(mask.shape)], axis=-1)
        columns, rows, slices, _ = np.moveaxis(places @ (to_index @ batch[f"{name}_affine"][0]).T, -1, 0)
        found = np.stack([slices, rows, columns])
        # Their file rounds the origin to a tenth of a micrometer; between two voxels either is the nearest.
        is_clear = (np.abs(found - np.floor(found) - 0.5) > 1e-3).all(axis=0)
        nearest = np.rint(found).astype(int)
        size = np.reshape(truth.shape, (3, 1, 1, 1))
        is_inside = ((nearest >= 0) & (nearest < size)).all(axis=0)
        wanted = truth[tuple(np.clip(nearest, 0, size - 1))] * is_inside
        assert (mask == wanted)[is_clear].all()
        assert is_clear.mean() > 0.99
    assert batch["own_liver"].sum() == truth.sum() == 107_098


def _check_against_highdicom(case: PackCase, paths: list[Path]) -> None:
    """Compare the segments of a volume with what highdicom reads, slice by slice."""
    found = []
    for fields in _samples(case).values():
        for roi in _annotations(fields)["rois"] if "annotations.json" in fields else ():
            if (roi["mask"] or "").endswith(".volume"):
                values = blosc2.ndarray_from_cframe(fields[f"{roi['mask']}.b2nd"])[...]
                is_fractional = "fractional" in roi["flags"]
                found.append(values if is_fractional else np.isin(values, roi["values"]).astype(np.uint8))
    num_equal = 0
    for path in paths:
        segments = highdicom.seg.segread(path)
        if segments.segmentation_type != highdicom.seg.SegmentationTypeValues.BINARY:
            continue
        uids = [str(uid) for _, _, uid in segments.get_source_image_uids()]
        pixels = segments.get_pixels_by_source_instance(uids, ignore_spatial_locations=True)
        for at in range(pixels.shape[-1]):
            planes = [plane for plane in pixels[..., at] if plane.any()]
            num_equal += any(
                [*map(bytes, planes)]
                in ([bytes(plane) for plane in order if plane.any()] for order in (one, one[::-1]))
                for one in found
            )
    assert num_equal >= 2


@pytest.mark.parametrize("slices_name_frames", [False, True])
def test_nodule_of_a_ct_stays_one_region_whatever_frames_of_reference_its_slices_name(
    tmp_path: Path, slices_name_frames: bool
) -> None:
    """A collection whose de-identification gave each file a Frame of Reference UID of its own."""
    case = PackCase(tmp_path)
    case.prepare()

    def change(dataset: FileDataset, index: int) -> None:
        dataset.FrameOfReferenceUID = dicom_uid("frame", index if slices_name_frames else 0)

    study = make_study(case.dicom / "a", num_slices=12, size=(16, 12), change=change)
    uid = [str(dcmread(path, stop_before_pixels=True).SOPInstanceUID) for path in study.files]
    points = "".join(
        f"<edgeMap><xCoord>{x}</xCoord><yCoord>{y}</yCoord></edgeMap>" for x, y in ((2, 2), (8, 2), (8, 9))
    )
    outlines = "".join(
        f"<roi><imageSOP_UID>{uid[index]}</imageSOP_UID><inclusion>TRUE</inclusion>{points}</roi>"
        for index in range(3, 8)
    )
    (case.dicom / "lidc.xml").write_text(
        f"<LidcReadMessage><SeriesInstanceUid>{dicom_uid('series', 'P1', 'A', 1)}</SeriesInstanceUid>"
        f"<readingSession><unblindedReadNodule><noduleID>1</noduleID>{outlines}</unblindedReadNodule>"
        "</readingSession></LidcReadMessage>",
        encoding="utf-8",
    )
    assert case.pack(LOOSE).status == "packed"
    (fields,) = _samples(case).values()
    (series,) = json.loads(fields["study.json"])["series"]
    assert (series["kind"], series["num_slices"], series["slice_spacing_mm"]) == ("volume", 12, 2.5)
    assert series["flags"] == (["frame_of_reference_varies"] if slices_name_frames else [])
    assert (series["frame_of_reference_key"] is None) == slices_name_frames
    stored = [payload for name, payload in sorted(fields.items()) if name.startswith("s000.i")]
    assert all(
        np.array_equal(decode_array("b2nd", payload), pixels)
        for payload, pixels in zip(stored, study.modality_units, strict=True)
    )
    (roi,) = _annotations(fields)["rois"]
    assert [place["slice"] for place in roi["slices"]] == [3, 4, 5, 6, 7]
