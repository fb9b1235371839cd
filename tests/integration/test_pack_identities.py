"""P6: a person is in one split only, under whatever identifiers, now and after an append."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import dcmread
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset as Attributes

from shardflow.errors import ConfigError
from shardflow.format.facts.columns import open_columns
from shardflow.packing.tables.folds import write_folds
from shardflow.packing.tables.keys import PrivateFolder
from shardflow.packing.versions.removal import Withdrawn, remove
from tests.dicom_factory import MadeStudy, dicom_uid, make_study
from tests.pack_case import PackCase, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")

THREE = ("splits={train=50, val=25, test=25}", "shards.target_bytes=1MiB")
_GIVEN = ("Ada", "Bela", "Carla", "Dora", "Elsa", "Fanny")
_FAMILY = ("Lovelace", "Bartok", "Bruni", "Maar", "Triolet", "Blankers")


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


def _add(case: PackCase, patient: str, **stated: Any) -> str:
    """Write a study of a patient; return its sample key."""

    def change(dataset: Attributes, index: int) -> None:
        dataset.PatientName = ""
        for keyword, value in stated.items():
            setattr(dataset, keyword, value)

    folder = case.dicom / dicom_uid("folder", patient)
    study = make_study(folder, patient=patient, num_slices=1, change=change)
    return case.key.surrogate("study", study.study_instance_uid)


def _person(number: int) -> dict[str, str]:
    return {
        "PatientName": f"{_FAMILY[number % 6]}{'abcdefghijklmnopqrst'[number // 6]}^{_GIVEN[number % 5]}",
        "PatientBirthDate": f"19{50 + number % 40}{1 + number % 12:02d}{2 + number % 27:02d}",
        "PatientSex": "FM"[number % 2],
    }


def _splits(case: PackCase) -> dict[str, str]:
    dataset = case.open()
    shards = dataset.manifest.shards
    keys, numbers = dataset.samples.column("sample_key"), dataset.samples.column("shard")
    return {key.decode(): shards[n].split for key, n in zip(keys.tolist(), numbers.tolist(), strict=True)}


def _listed(case: PackCase) -> list[dict[str, str]]:
    with (case.private / "identities.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _spellings(number: int) -> tuple[str, str]:
    """Two identifiers of one person."""
    plain = f"{7000 + number}"
    return (plain, (f"00{plain}", f"M{plain}", f"{plain[:2]}-{plain[2:]}", f"{plain}^SITE")[number % 4])


def test_two_identifiers_of_a_person_are_in_one_split(case: PackCase) -> None:
    pairs = []
    for number in range(120):
        own, other = _spellings(number)
        person = _person(number)
        pairs.append((_add(case, own, **person), _add(case, other, OtherPatientIDs=own, **person)))
    summary = case.pack(*THREE)
    splits = _splits(case)
    assert sum(splits[one] != splits[other] for one, other in pairs) == 0
    assert set(splits.values()) == {"train", "val", "test"}
    assert summary.identities == {"joined": 240}


def _torn(case: PackCase, prefix: str = "") -> tuple[str, str]:
    """Two spellings of an identifier that fall into different splits when nobody joins them."""
    for number in range(1, 99):
        pair = f"{prefix}{number}", f"{prefix}{number:04d}"
        if len({case.key.bucket("split", one, 10_000) < 5000 for one in pair}) == 2:
            return pair
    raise AssertionError


def test_uncertain_pairs_are_listed_counted_and_decided(case: PackCase) -> None:
    pair = _torn(case)
    keys = [_add(case, one) for one in pair]
    half = ("splits={train=50, val=50}",)
    with pytest.raises(ConfigError, match=r"identities\.csv") as stopped:
        case.pack(*half, 'deid.on_uncertain_identity="stop"')
    assert not set(pair) & set(str(stopped.value).split())
    assert not (case.output / "manifest-000001.json").exists()
    (listed,) = _listed(case)
    assert {listed["patient_id"], listed["other_patient_id"]} == set(pair)
    # Both are of sex F, as the factory writes it.
    assert (listed["link"], listed["evidence"], listed["decision"]) == ("uncertain", "patient_id sex", "")

    text = (case.private / "identities.csv").read_text(encoding="utf-8")
    assert text.count("\n,") == 1
    (case.folder / "map.csv").write_text(text.replace("\n,", "\nsame,"), encoding="utf-8")
    decided = f'deid.identity_map="{case.folder / "map.csv"}"'
    summary = case.pack(*half, decided, 'deid.on_uncertain_identity="stop"')
    assert summary.identities == {"joined": 2, "decided": 1}
    assert len({_splits(case)[key] for key in keys}) == 1
    everything = b"".join(path.read_bytes() for path in case.output.rglob("*") if path.is_file())
    assert b"identities" not in everything


def test_a_person_keeps_the_split_of_the_dataset(case: PackCase) -> None:
    own, other = _torn(case)
    person = _person(3)
    first = _add(case, own, **person)
    half = ("splits={train=50, val=50}",)
    case.pack(*half)
    before, split = tree_digests(case.output), _splits(case)[first]
    # The files of the packed study are gone: the private folder still knows the person.
    case.dicom.rename(case.folder / "old")
    case.dicom.mkdir()
    second = _add(case, other, **person)
    summary = case.pack(*half, mode="append")
    assert summary.identities == {"joined": 2}
    assert _splits(case) == {first: split, second: split}
    after = tree_digests(case.output)
    assert {name: after[name] for name in before} == before
    # A removed patient leaves no evidence behind.
    old = set(case.private.glob("people-*.jsonl"))
    assert remove(case.output, case.private, Withdrawn(patients=[own])).num_linked == 1
    (new,) = set(case.private.glob("people-*.jsonl")) - old
    lines = [json.loads(line) for line in new.read_text(encoding="utf-8").splitlines()]
    assert [line["patient"] for line in lines] == [case.key.surrogate("patient", other)]


def test_the_same_images_under_another_name_are_one_person(case: PackCase) -> None:
    own, other = _torn(case, "Q")

    def size(folder: str, patient: str, label: str) -> str:
        study = make_study(case.dicom / folder, patient=patient, study=label, num_slices=2, size=(64, 48))
        return case.key.surrogate("study", study.study_instance_uid)

    first = size("a", own, "A")
    second = size("b", own, "B")
    third = size("c", other, "C")
    for source, target in (("a", "b"), ("a", "c")):
        _copy_pixels(case.dicom / source, case.dicom / target)
    # Not even the identifiers agree, and the acquisition is in two studies of one patient, too.
    summary = case.pack("splits={train=50, val=50}")
    assert len({_splits(case)[key] for key in (first, second, third)}) == 1
    assert summary.identities == {"joined": 2, "copied_studies": 1}
    head, pair = (case.private / "copies.csv").read_text(encoding="ascii").split()
    assert head == "sample_key,other_sample_key"
    assert sorted(pair.split(",")) == sorted([first, second])
    assert [row["evidence"].split()[0] for row in _listed(case)] == ["pixels"]


def _copy_pixels(source: Path, target: Path) -> None:
    import pydicom

    for one, other in zip(sorted(source.iterdir()), sorted(target.iterdir()), strict=True):
        dataset = pydicom.dcmread(other)
        dataset.PixelData = pydicom.dcmread(one).PixelData
        dataset.save_as(other)


def _dated(case: PackCase, patient: str, day: str, folder: Path) -> MadeStudy:
    """Write a study of a patient and a day with a laboratory value and an electrocardiogram of its day."""

    def change(dataset: Attributes, index: int) -> None:
        dataset.PatientBirthDate, dataset.PatientName = "19580214", ""
        dataset.StudyDate, dataset.StudyTime = day, "120000"

    study = make_study(folder / day, patient=patient, study=day, num_slices=1, change=change)
    iso = f"{day[:4]}-{day[4:6]}-{day[6:]}"
    bundle = [
        {"resourceType": "Patient", "id": "p", "identifier": [{"value": patient}]},
        {
            "resourceType": "Observation",
            "status": "final",
            "subject": {"reference": "Patient/p"},
            "code": {"coding": [{"system": "http://loinc.org", "code": "718-7"}]},
            "effectiveDateTime": f"{iso}T11:30:00Z",
            "valueQuantity": {"value": 13.5, "unit": "g/dL", "code": "g/dL"},
        },
    ]
    entries = [{"resource": one} for one in bundle]
    document = {"resourceType": "Bundle", "type": "collection", "entry": entries}
    (folder / f"{day}.json").write_text(json.dumps(document), encoding="utf-8")
    ecg = dcmread(str(get_testdata_file("waveform_ecg.dcm")))
    ecg.PatientID, ecg.StudyInstanceUID = patient, study.study_instance_uid
    ecg.StudyDate = ecg.ContentDate = ecg.AcquisitionDate = day
    ecg.AcquisitionDateTime = f"{day}114500"
    ecg.save_as(folder / f"{day}.dcm")
    return study


def _hl7(numbers: Sequence[str], study: str) -> bytes:
    listed = "~".join(f"{number}^^^ISSUER{place}^MR" for place, number in enumerate(numbers))
    lines = [
        "MSH|^~\\&|RIS|X|||20260301||ORU^R01|1|P|2.5",
        f"PID|1||{listed}~NONE^^^X^MR~V1^^^X^VN",
        "OBR|1|P1|F1||||20260301",
        "OBX|1|TX|71020&GDT^Findings||No effusion.||||||F",
        f"OBX|2|UI|113014^DICOM Study^DCM||{study}||||||F",
    ]
    return "\r".join(lines).encode()


def _fhir(numbers: Sequence[str], study: str) -> bytes:
    listed = [{"system": f"urn:x:{place}", "value": number} for place, number in enumerate(numbers)]
    resources: list[dict[str, Any]] = [
        {"resourceType": "Patient", "id": "p", "identifier": listed},
        {
            "resourceType": "ImagingStudy",
            "subject": {"reference": "Patient/p"},
            "identifier": [{"system": "urn:dicom:uid", "value": f"urn:oid:{study}"}],
            "numberOfSeries": 1,
        },
    ]
    entries = [{"resource": one} for one in resources]
    return json.dumps({"resourceType": "Bundle", "type": "collection", "entry": entries}).encode()


@pytest.mark.parametrize("kind", ["hl7", "fhir", "report"])
def test_a_record_that_lists_two_identifiers_joins_them(case: PackCase, kind: str) -> None:
    """Of a patient of whom headers say no more, in the study under the second identifier; also an append."""
    pairs = [(f"A{number}-5", f"{number}77B") for number in range(1, 99)]
    pair = next(
        one for one in pairs if len({case.key.bucket("split", number, 10_000) < 5000 for number in one}) == 2
    )
    first, second = (_add(case, one, PatientBirthDate="", PatientSex="") for one in pair)
    uid = dcmread(next((case.dicom / dicom_uid("folder", pair[1])).iterdir())).StudyInstanceUID
    folder = case.folder / "records"
    folder.mkdir()
    (folder / "one").write_bytes((_fhir if kind == "fhir" else _hl7)(pair, uid))
    settings = ["splits={train=50, val=50}"]
    if kind == "report":
        settings += [f"inputs.reports={folder}", "inputs.reports_format=documents"]
    else:
        settings.append(f'inputs.attachments=["{folder}"]')
    summary = case.pack(*settings)
    assert summary.identities == {"joined": 2}
    assert len({_splits(case)[one] for one in (first, second)}) == 1
    dataset = case.open()
    found = dataset.read_fields(dataset.samples.find(second))
    assert ("report.txt" if kind == "report" else "records.json") in found
    keys = open_columns(dataset).stored("facts.patient_key").values
    assert len(set(keys.tolist())) == 1
    assert [row["evidence"] for row in _listed(case)] == ["record"]
    hidden = [one.encode() for one in (*pair, pair[0].replace("-", ""))]
    for path in case.output.rglob("*"):
        assert path.is_dir() or not [one for one in hidden if one in path.read_bytes()]


@pytest.mark.parametrize("dates", ["days", "shift"])
def test_a_person_has_one_key_and_one_shift_over_all_kinds_and_appends(case: PackCase, dates: str) -> None:
    """Three spellings, the last of them in an append whose inputs lack the files of the others."""
    settings = (f'deid.dates="{dates}"', "splits.val=0", "policy.max_quarantined_share=1.0")
    case.prepare(has_reports=True)
    days = {"41": "20190304", "0-041": "20190314", "041": "20190401"}
    made = {}
    for number, (patient, day) in enumerate(days.items()):
        folder = case.folder / f"input{number // 2}"
        made[patient] = _dated(case, patient, day, folder)
    case.write_reports({study.study_instance_uid: "No effusion since 03/14/2019." for study in made.values()})
    order = 'deid.date_order="mdy"'
    case.pack(*settings, order, f'inputs.dicom=["{case.folder / "input0"}"]')
    before = tree_digests(case.output)
    case.folder.joinpath("input0").rename(case.folder / "gone")
    summary = case.pack(*settings, order, f'inputs.dicom=["{case.folder / "input1"}"]', mode="append")
    assert summary.identities == {"joined": 3}
    after = tree_digests(case.output)
    assert {name: after[name] for name in before} == before

    dataset = case.open()
    first = min(case.key.surrogate("patient", patient) for patient in list(days)[:2])
    shifts: set[timedelta | int] = set()
    for patient, study in made.items():
        at = date.fromisoformat(days[patient])
        fields = dataset.read_fields(dataset.samples.find(case.sample_key(study.study_instance_uid)))
        facts = json.loads(fields["study.json"])
        assert facts["patient"]["patient_key"] == first
        records, waveforms = json.loads(fields["records.json"]), json.loads(fields["waveforms.json"])
        (value,) = (one["when"] for one in records["facts"] if "value" in one)
        whens = [value, *(one["start"] for one in waveforms["recordings"])]
        assert len(whens) >= 2
        assert {when["day_offset"] for when in whens} == {0}
        (found,) = re.findall(r"\[DATE(.*?)\]", fields["report.txt"].decode())
        if dates == "shift":
            said = [facts["dates"]["study_date"], *(when["date"] for when in whens)]
            shifts.update(at - date.fromisoformat(one) for one in said)
            shifts.add(date(2019, 3, 14) - date.fromisoformat(found.strip()))
        else:
            shifts.add(facts["dates"]["study_day"] - at.toordinal())
            assert int(found) == (date(2019, 3, 14) - at).days
    assert len(shifts) == 1


def test_patients_who_were_packed_apart_keep_their_keys_and_are_in_one_fold(case: PackCase) -> None:
    """What an earlier release, or a link found later, left under two keys: counted, said, and not changed."""
    first, second = _add(case, "81", PatientBirthDate="19600607"), _add(case, "x", PatientBirthDate="")
    others = [_add(case, f"other{number}", PatientName=f"{number}") for number in range(6)]
    case.pack("splits.val=0")
    before = tree_digests(case.output)
    keys = {patient: case.key.surrogate("patient", patient) for patient in ("81", "x", "081")}
    # A third identifier names both.
    third = _add(case, "081", PatientBirthDate="19600607", OtherPatientIDs="x")
    (case.folder / "map.csv").write_text(
        "decision,patient_id,other_patient_id\nsame,81,x\n", encoding="utf-8"
    )
    summary = case.pack("splits.val=0", f'deid.identity_map="{case.folder / "map.csv"}"', mode="append")
    assert summary.identities == {"joined": 3, "decided": 1, "under_two_keys": 1}
    after = tree_digests(case.output)
    assert {name: after[name] for name in before} == before
    dataset = case.open()
    columns = open_columns(dataset)
    row_of = {key: dataset.samples.find(key) for key in (first, second, third, *others)}
    found = columns.stored("facts.patient_key").values
    assert [found[row_of[key]].decode() for key in (first, second)] == [keys["81"], keys["x"]]
    assert found[row_of[third]].decode() in (keys["81"], keys["x"])
    private = PrivateFolder(path=case.private)
    rows = np.arange(dataset.studies.num_samples)
    pairs = private.same_persons(dataset)
    for seed in range(4):
        name = f"folds{seed}"
        options: Any = {"name": name, "k": 2, "stratify": "facts.modality", "seed": seed}
        write_folds(dataset, rows, **options, same_persons=pairs)
        folds = open_columns(case.open()).stored(f"{name}.fold").values
        assert len({int(folds[row_of[key]]) for key in (first, second, third)}) == 1
