"""Values that packing makes usable: uptake of a PET, volumes of a 4-D series, in columns and in batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK
from pydicom.dataset import Dataset, FileDataset

import shardflow as sf
from shardflow.cli.main import main
from tests.dicom_factory import make_study
from tests.pack_case import PackCase
from tests.unit.packing.sources.dicom.factory import make_dataset, write

pytestmark = pytest.mark.usefixtures("packs_inline")

WEIGHT_KG, DOSE_BQ, HALF_LIFE_S = 80.0, 2.5e8, 6586.2


def _write_pet(folder: Path, patient: str) -> None:
    tracer = Dataset()
    tracer.RadionuclideTotalDose = str(int(DOSE_BQ))
    tracer.RadionuclideHalfLife = str(HALF_LIFE_S)
    tracer.RadiopharmaceuticalStartTime = "090000"
    rng = np.random.default_rng(1)
    for number in range(4):
        dataset = make_dataset(
            modality="PT",
            pixels=rng.integers(0, 30_000, (6, 5)).astype(np.uint16),
            number=number + 1,
            position=(0.0, 0.0, 3.0 * number),
            PatientID=patient,
            PatientWeight=str(WEIGHT_KG),
            Units="BQML",
            DecayCorrection="START",
            RadiopharmaceuticalInformationSequence=[tracer],
            StudyDate="20240102",
            SeriesDate="20240102",
            SeriesTime="100000",
            SeriesDescription="WB Doe uncorrected",
            CorrectedImage=["DECY", "SCAT"],
            AcquisitionDate="20240102",
            AcquisitionTime=f"1000{10 + number}",
            ContentDate="20240102",
            ContentTime="100100",
            RescaleSlope=str(1.5 + number),  # the scale of a PET differs from slice to slice
            RescaleIntercept="0",
        )
        write(folder / f"{number}.dcm", dataset)


def _case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


def _series(case: PackCase) -> list[dict[str, Any]]:
    dataset = case.open()
    study = json.loads(dataset.read_fields(0, ["study.json"])["study.json"])
    return list(study["series"])


def _to_suv(sample: dict[str, Any]) -> dict[str, Any]:
    factor = next(series["suvbw_factor"] for series in sample["__facts__"] if "suvbw_factor" in series)
    return {"suv": sample["pet"].astype("float32") * factor}


def test_uptake_of_a_pet_is_a_factor_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = _case(tmp_path)
    _write_pet(case.dicom, "P1")
    assert case.pack().status == "packed"
    (series,) = _series(case)
    decayed = DOSE_BQ * 2 ** (-3600 / HALF_LIFE_S)
    assert series["unit"] == "BQML"
    assert series["pet"]["injection_to_scan_s"] == 3600
    assert series["pet"]["suvbw_factor"] == pytest.approx(WEIGHT_KG * 1000 / decayed, rel=1e-9)
    assert series["timing"] == {"acquired_after_s": 0, "content_after_s": 50}
    assert "20240102" not in json.dumps(series)
    assert "Doe" not in json.dumps(series)
    assert series["technical"]["description_class"] == "not_attenuation_corrected"

    assert main(["columns", str(case.output), "series.suvbw_factor", "--json"]) == 0
    (value,) = json.loads(capsys.readouterr().out)["counts"]
    assert float(value) == series["pet"]["suvbw_factor"]

    dataset = case.open()
    (split,) = [name for name, rows in dataset.splits.items() if len(rows)]
    spec = sf.BatchSpec.simple(global_batch_size=1, micro_batch_size=1, tail="mask")
    fields: dict[str, sf.Field] = {
        "pet": sf.Slices(
            series="role == 'not_attenuation_corrected' and decay_correction == 'START'",
            num_slices=4,
            size=(6, 5),
        )
    }
    loader = sf.Loader(
        dataset,
        split=split,
        seed=1,
        batch=spec,
        fields=fields,
        where="any(series.injected_dose_bq > 1e8 and series.description_class == 'not_attenuation_corrected')"
        " and any(series.b_value_s_mm2 is missing)",
        transform=_to_suv,
        outputs={"suv": ("float32", (4, 1, 6, 5))},
        world="single",
    )
    becquerels = [
        SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(case.dicom / f"{at}.dcm"))[0] for at in range(4)
    ]
    with loader:
        (batch,) = list(loader)
    expected = np.array(becquerels) * WEIGHT_KG * 1000 / decayed
    np.testing.assert_allclose(np.asarray(batch["suv"][0])[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("setting", "interval"), [("times=hour", 3600.0), ("times=day", None), ("dates=remove", None)]
)
def test_intervals_obey_the_settings(tmp_path: Path, setting: str, interval: float | None) -> None:
    case = _case(tmp_path)
    _write_pet(case.dicom, "P1")
    assert case.pack(f"deid.{setting}").status == "packed"
    (series,) = _series(case)
    assert series["pet"].get("injection_to_scan_s") == interval
    assert ("timing" in series) == (interval is not None)
    assert series["pet"]["suvbw_factor"] > 0  # a constant of the scan, not an interval


def test_echoes_of_one_series_are_one_object(tmp_path: Path) -> None:
    """The scan of another series comes first, so that the object's number is not 0 by chance."""
    case = _case(tmp_path)

    def change(dataset: FileDataset, index: int) -> None:
        dataset.EchoTime = str((9.8, 19.6, 29.4)[index // 4])
        dataset.ImagePositionPatient = [0.0, 0.0, 2.5 * (index % 4)]

    make_study(case.dicom / "a", modality="MR", num_slices=12, change=change)
    make_study(case.dicom / "b", modality="MR", series=2, num_slices=6)
    assert case.pack().status == "packed"
    dataset, facts = case.open(), _series(case)
    points = [one["axis"] for one in facts if "axis" in one]
    (group,) = {point["group"] for point in points}
    assert group == min(number for number, one in enumerate(facts) if "axis" in one)
    assert [(point["name"], point["index"], point["num"], point["value"]) for point in points] == [
        ("echo", 0, 3, 9.8),
        ("echo", 1, 3, 19.6),
        ("echo", 2, 3, 29.4),
    ]
    (split,) = [name for name, rows in dataset.splits.items() if len(rows)]
    spec = sf.BatchSpec.simple(global_batch_size=1, micro_batch_size=1, tail="mask")
    fields: dict[str, sf.Field] = {"late": sf.Slices(series="axis == 'echo' and axis_index == 2")}
    with sf.Loader(dataset, split=split, seed=1, batch=spec, fields=fields, world="single") as loader:
        (batch,) = list(loader)
    assert np.asarray(batch["late"][0]).shape == (4, 1, 16, 12)
