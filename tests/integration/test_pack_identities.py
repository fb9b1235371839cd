"""P6: a person is in one split only, under whatever identifiers, now and after an append."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from pydicom.dataset import Dataset as Attributes

from shardflow.errors import ConfigError
from shardflow.packing.versions.removal import Withdrawn, remove
from tests.dicom_factory import dicom_uid, make_study
from tests.pack_case import PackCase, tree_digests

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
    remove(case.output, case.private, Withdrawn(patients=[own]))
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
