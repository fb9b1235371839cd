"""Objects beside CT and MR, packed and read back: dose grids, cines, angiograms, nuclear medicine, video."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import highdicom
import numpy as np
import pydicom
import pydicom.data
import pytest
import SimpleITK
from pydicom.sr.coding import Code

import shardflow as sf
from shardflow.format.keys import thumbnail_field
from shardflow.format.reasons import remedy_of
from tests.pack_case import PackCase, read_ledger
from tests.unit.packing.sources.dicom.factory import (
    make_dataset,
    make_parametric_map,
    make_tomosynthesis,
    value_mapping,
    write,
)

pytestmark = pytest.mark.usefixtures("packs_inline")

_BUNDLED = Path(pydicom.data.__file__).parent / "test_files"
_ALL = ("splits.train=1", "splits.val=0", "policy.max_quarantined_share=1", "variants.thumbnail_px=32")
_SUSPECTS = ("ultrasound", "ultrasound_class", "secondary_capture", "fluoroscopy", "converted", "photography")


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(f"{text}[deid]\naccept = {json.dumps(_SUSPECTS)}\n", encoding="utf-8")
    return case


def _add(case: PackCase, name: str, source: str | pydicom.Dataset, **attributes: Any) -> pydicom.Dataset:
    """Put a real file, or a made one, into the only study; return it as it was written."""
    dataset = pydicom.dcmread(_BUNDLED / source) if isinstance(source, str) else source
    for keyword, value in {"PatientID": "P1", "StudyInstanceUID": "1.2.3", **attributes}.items():
        setattr(dataset, keyword, value)
    if isinstance(source, str):
        dataset.save_as(case.dicom / name)
    else:
        write(case.dicom / name, dataset)
    return dataset


def _study(case: PackCase) -> dict[str, Any]:
    dataset = case.open()
    assert len(dataset) == 1
    study: dict[str, Any] = json.loads(dataset.read_fields(0)["study.json"])
    return study


def test_a_dose_is_read_in_gray_beside_its_images(case: PackCase) -> None:
    dose = _add(case, "dose.dcm", "rtdose.dcm", DoseUnits="GY")
    for number in range(4):
        image = make_dataset(number=number + 1, position=(0.0, 0.0, 2.5 * number))
        _add(case, f"{number}.dcm", image, SeriesInstanceUID="1.2.3.4")
    case.pack(*_ALL)
    ct, grid = _study(case)["series"]
    assert (ct["modality"], grid["modality"]) == ("CT", "RTDOSE")
    assert (grid["unit"], grid["dose"]) == ("GY", {"summation": "beam", "type": "physical"})
    loader = sf.Loader(
        sf.open(str(case.output)),
        split="train",
        seed=1,
        batch=sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1),
        fields={"dose": sf.Volume(series="role == 'dose' and unit == 'GY'", roi_size=(15, 10, 10))},
        world="single",
    )
    (batch,) = loader
    expected = dose.pixel_array * float(dose.DoseGridScaling)
    np.testing.assert_allclose(np.asarray(batch["dose"])[0, 0], expected, rtol=1e-6)


def test_a_parametric_map_is_packed_by_default_in_its_unit(case: PackCase) -> None:
    values = np.random.default_rng(0).random((6, 5, 4)).astype(np.float32) * 3000
    make_parametric_map(case.dicom, values, value_mapping(Code("um2/s", "UCUM", "um2/s"), 2.0, 1.0))
    case.pack(*_ALL, "deid.accept=[]")
    (series,) = _study(case)["series"]
    assert (series["kind"], series["unit"], series["dtype"]) == ("volume", "um2/s", "float32")
    assert series["parametric_map"] == {"quantity": "DCM:113041"}
    loader = sf.Loader(
        sf.open(str(case.output)),
        split="train",
        seed=1,
        batch=sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1),
        fields={"adc": sf.Slices(series="role == 'adc'", size=(5, 4), num_slices=6)},
        world="single",
    )
    (batch,) = loader
    np.testing.assert_allclose(np.asarray(batch["adc"])[0].squeeze(), values * 2 + 1, rtol=1e-6)


def test_each_kind_of_object_has_the_values_of_simpleitk_a_role_and_a_preview(case: PackCase) -> None:
    """Ultrasound and nuclear medicine from real files, the others in the attributes that scanners write."""
    rng = np.random.default_rng(0)
    _add(case, "us.dcm", "examples_ybr_color.dcm")
    _add(case, "nm.dcm", "JPGExtended.dcm", SOPClassUID="1.2.840.10008.5.1.4.1.1.20")
    planes = np.sort(rng.integers(0, 1024, (5, 24, 20)).astype(np.uint16), axis=1)
    _add(case, "dbt.dcm", make_tomosynthesis(planes), SeriesInstanceUID="1.2.3.99")
    files = {"US frames": ["us.dcm"], "NM images": ["nm.dcm"], "MG volume": ["dbt.dcm"]}
    gray = np.sort(rng.integers(0, 4096, (24, 20)).astype(np.uint16), axis=0)
    classes = {
        "MG": "1.2.840.10008.5.1.4.1.1.1.2",
        "PT": "1.2.840.10008.5.1.4.1.1.128",
        "XA": "1.2.840.10008.5.1.4.1.1.12.1",
    }
    number = 10
    for modality, count in (("MG", 1), ("PT", 4), ("XA", 2)):
        for index in range(count):
            number += 1
            attributes: dict[str, Any] = {"Modality": modality, "SOPClassUID": classes[modality]}
            attributes |= {"RescaleSlope": 1, "RescaleIntercept": 0}
            if modality == "MG":
                attributes |= {"ImageLaterality": "L", "ViewPosition": "MLO"}
                attributes |= {"PhotometricInterpretation": "MONOCHROME1"}
            if modality == "XA":
                attributes |= {"PositionerPrimaryAngle": 30.0 * index, "PositionerSecondaryAngle": -5.0}
            if modality == "PT":
                attributes |= {"Units": "BQML", "RescaleSlope": 1.5 + index}
            place = (0.0, 0.0, 3.0 * index) if modality == "PT" else None
            image = make_dataset(pixels=gray + np.uint16(index), number=number, position=place, **attributes)
            if place is None:
                del image.ImageOrientationPatient
            _add(case, f"{number}.dcm", image, SeriesInstanceUID=f"1.2.3.{ord(modality[0])}")
            kind = "volume" if modality == "PT" else "images"
            files.setdefault(f"{modality} {kind}", []).append(f"{number}.dcm")
    case.pack(*_ALL)
    series = {
        f"{one['modality']} {one['kind']}": (number, one) for number, one in enumerate(_study(case)["series"])
    }
    rows = {name: (one["unit"], one["dtype"], one["num_slices"]) for name, (_, one) in series.items()}
    assert rows == {
        "MG images": ("raw", "uint16", 1),
        "MG volume": ("raw", "int32", 5),
        "NM images": ("raw", "int16", 1),
        "PT volume": ("BQML", "float32", 4),
        "US frames": ("rgb", "uint8", 30),
        "XA images": ("raw", "uint16", 2),
    }
    images = series["XA images"][1]["images"]
    assert [one["positioner_primary_angle"] for one in images] == [0.0, 30.0]
    members = case.open().read_fields(0)
    for name, (number, _) in series.items():
        preview = cv2.imdecode(
            np.frombuffer(members[thumbnail_field(number)], np.uint8), cv2.IMREAD_UNCHANGED
        )
        assert preview is not None, name
        assert preview.std() > 1, name
        assert 8 <= max(preview.shape[:2]) <= 32, name

    expected = {
        name: np.concatenate([_by_simpleitk(case.dicom / file) for file in files[name]]) for name in series
    }
    # Slices ascend along the normal of their planes, to the right; highdicom has them as stored.
    volume = highdicom.imread(case.dicom / "dbt.dcm").get_volume()
    ours = np.array(series["MG volume"][1]["affine_lps"])
    np.testing.assert_allclose(ours[:3, :3], volume.affine[:3, [2, 1, 0]] * [1, 1, -1], atol=1e-6)
    np.testing.assert_allclose(ours[:3, 3], volume.affine[:3] @ [len(planes) - 1, 0, 0, 1], atol=1e-6)
    expected["MG volume"] = expected["MG volume"][::-1]
    fields = {
        name.replace(" ", "_").lower(): sf.Slices(
            series=f"modality == '{name[:2]}' and kind == '{name[3:]}'",
            num_slices=len(values),
            size=(values.shape[1], values.shape[2]),
            dtype="float32",
        )
        for name, values in expected.items()
    }
    batch_spec = sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1)
    dataset = sf.open(str(case.output))
    (batch,) = sf.Loader(dataset, split="train", seed=1, batch=batch_spec, fields=fields, world="single")
    for name, values in expected.items():
        found = np.asarray(batch[name.replace(" ", "_").lower()])[0]
        theirs = values.transpose(0, 3, 1, 2) if values.ndim == 4 else values[:, None]
        np.testing.assert_allclose(found, theirs, rtol=1e-6, err_msg=name)


def test_each_frame_of_a_run_has_its_angle_and_each_mammogram_its_view(case: PackCase) -> None:
    run = make_dataset(pixels=np.zeros((3, 24, 20), np.uint8), modality="US", position=None, orientation=None)
    moving = {"PositionerPrimaryAngle": 30.0, "PositionerPrimaryAngleIncrement": [0.0, 2.5, 5.0]}
    angiogram = {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.12.1", "Modality": "XA"}
    _add(case, "run.dcm", run, SeriesInstanceUID="1.2.3.1", **angiogram, **moving)
    for number, view in enumerate(("399162004", "399368009"), start=2):
        code = pydicom.Dataset()
        code.CodeValue, code.CodingSchemeDesignator, code.CodeMeaning = view, "SCT", "view"
        image = make_dataset(number=number, modality="DX", position=None, orientation=None, Modality="MG")
        image.ViewCodeSequence, image.ImageLaterality = [code], "R"
        _add(case, f"{number}.dcm", image, SeriesInstanceUID="1.2.3.2")
    case.pack(*_ALL)
    frames, views = sorted(_study(case)["series"], key=lambda one: str(one["kind"]))
    assert [one["positioner_primary_angle"] for one in frames["images"]] == [30.0, 32.5, 35.0]
    assert [one["view_position"] for one in views["images"]] == ["CC", "MLO"]


def _by_simpleitk(path: Path) -> Any:
    """Return the values of all frames, ``(frames, rows, columns)`` or with colors."""
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    return SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path)))


def test_video_is_refused_with_what_to_do(case: PackCase) -> None:
    video = make_dataset(modality="US", position=None, orientation=None)
    video.file_meta = None
    _add(case, "other.dcm", make_dataset(number=2), SeriesInstanceUID="1.2.3.4")
    for keyword, value in {"PatientID": "P1", "StudyInstanceUID": "1.2.3"}.items():
        setattr(video, keyword, value)
    write(case.dicom / "video.dcm", video, syntax="1.2.840.10008.1.2.4.102", frames=[b"\0" * 64])
    case.pack(*_ALL)
    (row,) = [row for row in read_ledger(case.output) if row["outcome"] == "quarantined"]
    assert row["reason"] == "UNSUPPORTED_TRANSFER_SYNTAX"
    assert "frames" in remedy_of(row["reason"])
    assert [one["modality"] for one in _study(case)["series"]] == ["CT"]
