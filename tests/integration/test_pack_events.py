"""Times of records through whole jobs: seconds from the acquisition, in order, as coarse as wanted."""

from __future__ import annotations

import dataclasses
import json
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import edfio
import numpy as np
import pytest
from pydicom.dataset import FileDataset

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.sampling import BatchSpec
from tests.dicom_factory import MadeStudy, make_study
from tests.pack_case import PackCase

pytestmark = pytest.mark.usefixtures("packs_inline")

ACQUIRED = datetime(2014, 10, 1, 9, 30, 15)  # noqa: DTZ001 - the clock of the hospital
STUDY = "20141001", "080000"
VITALS = sf.Events(codes={"heart_rate": {"codes": ["LOINC:8867-4"], "unit": "/min"}}, window=("-48h", "0h"))


def _of_patient(dataset: FileDataset, number: int) -> None:
    dataset.PatientID = "P-17"
    dataset.StudyDate, dataset.StudyTime = STUDY
    dataset.AcquisitionDate = ACQUIRED.strftime("%Y%m%d")
    dataset.AcquisitionTime = (ACQUIRED + timedelta(seconds=7 * number)).strftime("%H%M%S.25")


def _vital(time: str, rate: float, name: str = "a") -> bytes:
    return "\r".join(
        [
            f"MSH|^~\\&|RIS|{name}|||20141001||ORU^R01|{name}|P|2.5",
            "PID|1||P-17^^^H^MR||Doe^Jo",
            "OBR|1|P1||85353-1^Vitals^LN|||" + time,
            f"OBX|1|NM|8867-4^Heart rate^LN||{rate}|/min|||||F|||{time}",
        ]
    ).encode()


def _prepared(folder: Path, more: str = "", change: Any = _of_patient) -> tuple[PackCase, MadeStudy]:
    """A study, and fifteen vitals at steps of two hours, the first 26 hours before the image, a file each."""
    folder.mkdir(exist_ok=True)
    case = PackCase(folder)
    case.prepare()
    with case.config_path.open("a", encoding="utf-8") as file:
        file.write("[attachments]\nwindow_hours = 48\n" + more)
    study = make_study(case.dicom / "a", num_slices=2, change=change)
    for number in range(15):
        time = ACQUIRED + timedelta(hours=2 * number - 26)
        text = _vital(time.strftime("%Y%m%d%H%M%S"), 60 + number, f"file{number}")
        (case.dicom / f"vital-{number * 7 % 15:02d}.hl7").write_bytes(text)
    return case, study


def _events(case: PackCase, study: MadeStudy, field: sf.Events = VITALS) -> tuple[list[int], list[float]]:
    dataset = sf.open(case.output)
    found = dataset.sample(case.sample_key(study.study_instance_uid), {"e": field})
    is_event = np.asarray(found["e_mask"]) == 1
    return found["e_time_s"][is_event].tolist(), found["e"][is_event].tolist()


def _records(case: PackCase, study: MadeStudy) -> dict[str, Any]:
    dataset = case.open()
    row = dataset.samples.find(case.sample_key(study.study_instance_uid))
    records: dict[str, Any] = json.loads(dataset.read_fields(row, ["records.json"])["records.json"])
    return records


def test_vitals_of_many_files_come_in_time_order_and_none_after_the_image(tmp_path: Path) -> None:
    case, study = _prepared(tmp_path / "a")
    case.pack()
    times, values = _events(case, study)
    assert times == [3600 * (2 * number - 26) for number in range(14)]
    assert values == [60 + number for number in range(14)]
    later = dataclasses.replace(VITALS, window=("-3h", "3h"))
    assert _events(case, study, later) == ([-7200, 0, 7200], [72, 73, 74])
    records = _records(case, study)
    assert records["time_origin"] == "acquisition"
    whens = [fact["when"] for fact in records["facts"] if fact["kind"] == "observation"]
    assert {"day_offset": -1, "seconds": -26 * 3600} in whens


def test_codes_of_a_laboratory_are_events_where_they_are_listed(tmp_path: Path) -> None:
    names = 'names = ["99LAB", "http://lab.example/codes"]'
    local = f'[records.local_codes.lab]\n{names}\ncodes = ["GLU", "NA-SERUM"]\n'
    case, study = _prepared(tmp_path / "a", local)
    for number, code in enumerate(("GLU", "CANARY17")):
        time = (ACQUIRED - timedelta(hours=number + 1)).strftime("%Y%m%d%H%M%S")
        text = _vital(time, 5 + number, f"local{number}").replace(
            b"8867-4^Heart rate^LN", f"{code}^x^99LAB".encode()
        )
        (case.dicom / f"local-{number}.hl7").write_bytes(text.replace(b"|/min|", b"|mmol/L|"))
    observation = {
        "resourceType": "Observation",
        "id": "o1",
        "status": "final",
        "subject": {"reference": "Patient/p"},
        "code": {"coding": [{"system": "http://lab.example/codes", "code": "NA-SERUM"}]},
        "effectiveDateTime": (ACQUIRED - timedelta(hours=3)).isoformat(),
        "valueQuantity": {"value": 140, "unit": "mmol/L", "code": "mmol/L"},
    }
    patient = {"resourceType": "Patient", "id": "p", "identifier": [{"value": "P-17"}]}
    entries = [{"resource": one} for one in (patient, observation)]
    bundle = {"resourceType": "Bundle", "type": "collection", "entry": entries}
    (case.dicom / "bundle.json").write_text(json.dumps(bundle), encoding="utf-8")
    case.pack()
    vocabulary = {
        "glucose": {"codes": ["LOCAL-LAB:GLU"], "unit": "mg/dL", "factors": {"mmol/L": 18.016}},
        "sodium": {"codes": ["local-lab:NA-SERUM"], "unit": "mmol/L"},
    }
    times, values = _events(case, study, sf.Events(codes=vocabulary, window=("-48h", "0h")))
    assert times == [-3 * 3600, -3600]
    assert values == pytest.approx([140, 5 * 18.016])
    records = _records(case, study)
    assert "CANARY17" not in json.dumps(records)
    assert {"count": 1, "reason": "MALFORMED_CODE"} in records["left_out"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ('names = ["LN"]\ncodes = ["A"]', "'LN', which is a known one"),
        ('names = []\ncodes = ["A"]', "got none"),
        ('names = ["99LAB"]\ncodes = ["1234567"]', "no number of six digits"),
        ('names = ["99LAB"]\ncodes = []', "list 1 to 32 characters"),
    ],
)
def test_local_codes_that_cannot_be_published_are_refused(
    tmp_path: Path, settings: str, sentence: str
) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    with case.config_path.open("a", encoding="utf-8") as file:
        file.write(f"[records.local_codes.lab]\n{settings}\n")
    with pytest.raises(ConfigError, match=sentence):
        case.config()


@pytest.mark.parametrize("dates", ["days", "shift"])
def test_intervals_do_not_depend_on_how_dates_are_hidden(tmp_path: Path, dates: str) -> None:
    case, study = _prepared(tmp_path / "a", f'[deid]\ndates = "{dates}"\n')
    case.pack()
    assert _events(case, study)[0] == [3600 * (2 * number - 26) for number in range(14)]
    assert b"2014" not in json.dumps(_records(case, study)).encode() or dates == "shift"


@pytest.mark.parametrize(
    ("times", "step", "first"), [("minute", 60, -26 * 3600), ("hour", 3600, -26 * 3600), ("day", 86_400, 0)]
)
def test_coarse_times_never_make_an_event_earlier(tmp_path: Path, times: str, step: int, first: int) -> None:
    case, study = _prepared(tmp_path / "a", f'[deid]\ntimes = "{times}"\n')
    shortly = ACQUIRED + timedelta(seconds=20)
    (case.dicom / "later.hl7").write_bytes(_vital(shortly.strftime("%Y%m%d%H%M%S"), 199))
    before = ACQUIRED - timedelta(seconds=20)
    (case.dicom / "before.hl7").write_bytes(_vital(before.strftime("%Y%m%d%H%M%S"), 20))
    case.pack()
    found, values = _events(case, study)
    assert found[0] == first
    assert all(time % step == 0 and time <= 0 for time in found)
    assert 199 not in values
    assert (20 in values) == (times != "day")
    assert all(("seconds" in fact["when"]) == (times != "day") for fact in _records(case, study)["facts"][1:])


def test_the_time_of_the_study_counts_where_no_acquisition_is_stated(tmp_path: Path) -> None:
    def without(dataset: FileDataset, number: int) -> None:
        _of_patient(dataset, number)
        dataset.AcquisitionDate = "18991231" if number else ""  # a clock that was never set

    case, study = _prepared(tmp_path / "a", change=without)
    case.pack()
    assert _records(case, study)["time_origin"] == "study"
    late = ACQUIRED - datetime(2014, 10, 1, 8)  # noqa: DTZ001
    assert _events(case, study)[0][0] == -26 * 3600 + late.total_seconds()


def test_times_of_another_zone_are_converted_and_else_counted(tmp_path: Path) -> None:
    case, study = _prepared(tmp_path / "a", '[records]\ntime_zone = "Europe/Berlin"\n')
    (case.dicom / "utc.hl7").write_bytes(_vital("20141001053015+0000", 33))  # 07:30:15 in Berlin
    case.pack()
    times, values = _events(case, study)
    assert times[values.index(33)] == -7200
    again, study = _prepared(tmp_path / "b")
    (again.dicom / "utc.hl7").write_bytes(_vital("20141001053015+0000", 33))
    again.pack()
    times, values = _events(again, study)
    assert times[values.index(33)] == -4 * 3600  # as written
    left_out = {one["reason"]: one["count"] for one in _records(again, study)["left_out"]}
    assert left_out["UTC_OFFSET_IGNORED"] == 2  # of the result and of its order


def test_a_dataset_without_times_is_refused_with_the_command(tmp_path: Path) -> None:
    case, _ = _prepared(tmp_path / "a", '[deid]\ndates = "remove"\n')
    case.pack()
    spec = BatchSpec.simple(global_batch_size=1, micro_batch_size=1)

    def open_one(dataset: Dataset) -> None:
        sf.Loader(
            dataset, split=next(iter(dataset.splits)), seed=1, batch=spec, fields={"vitals": VITALS}
        ).close()

    with pytest.raises(
        ConfigError, match=r"'vitals' needs the times .* deid.dates = 'remove'.*shardflow pack"
    ):
        open_one(sf.open(case.output))
    dataset = sf.open(case.output)
    extra = {name: value for name, value in dataset.manifest.extra.items() if name != "record_times"}
    old = Dataset(dataset.store, dataclasses.replace(dataset.manifest, extra=extra))
    with pytest.raises(
        ConfigError, match=r"packed without them; pack it again .*: shardflow pack --config FILE"
    ):
        open_one(old)


def test_a_version_that_extends_one_without_times_has_none(tmp_path: Path) -> None:
    case, _ = _prepared(tmp_path / "a", '[deid]\ntimes = "hour"\n')
    case.pack()
    assert case.open().manifest.extra["record_times"] == "hour"
    make_study(case.dicom / "b", study="another", num_slices=1)
    case.pack(mode="append")
    assert case.open().manifest.extra["record_times"] == "hour"


def _on(day: date, patient_age: str = "097Y") -> Any:
    def change(dataset: FileDataset, number: int) -> None:
        _of_patient(dataset, number)
        dataset.StudyDate = dataset.AcquisitionDate = day.strftime("%Y%m%d")
        dataset.PatientAge = patient_age

    return change


def test_all_dates_of_a_person_move_by_one_shift_in_every_kind_and_in_later_versions(tmp_path: Path) -> None:
    """Studies, reports, records and recordings; ages above 89 are one class in all of them."""
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    with case.config_path.open("a", encoding="utf-8") as file:
        file.write('[attachments]\nwindow_hours = 48\n[deid]\ndates = "shift"\ntimes = "second"\n')
    days = [ACQUIRED.date() + timedelta(days=10 * number) for number in range(3)]
    studies = [
        make_study(case.dicom / f"s{n}", study=f"S{n}", num_slices=1, change=_on(days[n])) for n in range(2)
    ]
    texts = {
        study.study_instance_uid: f"A 97-year-old, 97F. Compared with {days[0] - timedelta(days=11)}."
        for study in studies
    }
    case.write_reports(texts)
    vital = ACQUIRED - timedelta(hours=30, seconds=1)
    (case.dicom / "vital.hl7").write_bytes(_vital(vital.strftime("%Y%m%d%H%M%S"), 60))
    signal = edfio.EdfSignal(np.arange(256.0), sampling_frequency=128, label="ECG I", physical_dimension="uV")
    start = ACQUIRED - timedelta(hours=2)
    edfio.Edf(
        [signal],
        patient=edfio.Patient(code="P-17", birthdate=date(1917, 3, 4), name="Jo_Doe"),
        recording=edfio.Recording(startdate=start.date()),
        starttime=start.time(),
        annotations=[edfio.EdfAnnotation(0, None, "begin")],  # makes it EDF+, whose patient field has a code
    ).write(case.dicom / "ecg.edf")
    case.pack()
    shift = _shift(case, studies[0], days[0])
    assert 1 <= shift.days <= 365
    studies.append(make_study(case.dicom / "s2", study="S2", num_slices=1, change=_on(days[2])))
    case.write_reports({**texts, studies[2].study_instance_uid: texts[studies[0].study_instance_uid]})
    case.pack(mode="append")
    for study, day in zip(studies, days, strict=True):
        assert _shift(case, study, day) == shift
        fields = _fields(case, study)
        assert json.loads(fields["study.json"])["patient"]["age_years"] == 90
        compared = (days[0] - timedelta(days=11) - shift).isoformat()
        said = f"A [AGE]-year-old, [AGE]F. Compared with [DATE {compared}].".encode()
        assert fields["report.txt"].strip() == said
    fields = _fields(case, studies[0])
    whens = [fact["when"] for fact in json.loads(fields["records.json"])["facts"] if "when" in fact]
    moved = (vital.date() - shift).isoformat()
    assert {"date": moved, "day_offset": -1, "seconds": -(30 * 3600 + 1)} in whens
    (recording,) = json.loads(fields["waveforms.json"])["recordings"]
    assert "1917" not in json.dumps(recording)
    assert recording["start"] == {"date": (start.date() - shift).isoformat(), "day_offset": 0}
    assert recording["seconds_from_study"] == -7200


def _fields(case: PackCase, study: MadeStudy) -> dict[str, bytes]:
    dataset = case.open()
    return dataset.read_fields(dataset.samples.find(case.sample_key(study.study_instance_uid)))


def _shift(case: PackCase, study: MadeStudy, day: date) -> timedelta:
    dates = json.loads(_fields(case, study)["study.json"])["dates"]
    return day - date.fromisoformat(dates["study_date"])
