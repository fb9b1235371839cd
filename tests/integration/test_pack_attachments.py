"""Attachments: found by content, linked by what they say, packed with their study, an outcome for each."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydicom.dataset import FileDataset

from shardflow.errors import ConfigError
from shardflow.packing import PackSummary
from shardflow.packing.registry import attachment_kinds
from shardflow.packing.versions.removal import Withdrawn, remove
from tests.attachment_kinds import HANDLERS, KINDS, write_toy
from tests.dicom_factory import MadeStudy, dicom_uid, make_study
from tests.pack_case import PackCase, read_ledger, tree_digests

LOOSE = "policy.max_quarantined_share=1.0"
CANARY = "XCANARYX"


def _dated(day: str, time: str = "100000", accession: str = "") -> Any:
    def change(dataset: FileDataset, _: int) -> None:
        dataset.StudyDate, dataset.StudyTime, dataset.AccessionNumber = day, time, accession

    return change


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackCase, dict[str, MadeStudy], PackSummary]:
    """Three patients, and an attachment for every way in which one may end."""
    case = PackCase(tmp_path_factory.mktemp("attached"))
    case.prepare(has_reports=True)
    studies = {
        "a": make_study(
            case.dicom / "a", patient="P1", num_slices=2, change=_dated("20200102", accession="ACC1")
        ),
        "b": make_study(
            case.dicom / "b", patient="P2", num_slices=2, change=_dated("20200102", accession="SAME")
        ),
        "c": make_study(
            case.dicom / "c", patient="P3", num_slices=1, change=_dated("20200301", accession="SAME")
        ),
        "d": make_study(
            case.dicom / "d", patient="P3", study="B", num_slices=1, change=_dated("20200301", "180000")
        ),
    }
    uid = {name: study.study_instance_uid for name, study in studies.items()}
    case.write_reports({uid["a"]: f"Patient {CANARY}.\nFINDINGS: A 5 mm nodule (series 1, image 2)."})
    toys = case.dicom / "toys"
    text = f"Seen by Dr. {CANARY.capitalize()} at 10:00."
    write_toy(toys / "study", {"study_uids": [uid["a"]], "text": text}, name="study")
    write_toy(toys / "series", {"series_uids": [dicom_uid("series", "P1", "A", 1)], "text": "series"})
    write_toy(toys / "instance", {"sop_uids": [dicom_uid("instance", "P1", "A", 1, 0)]}, name="sop")
    write_toy(toys / "accession", {"accession": " ACC1"}, name="accession")
    write_toy(toys / "other", {"accession": "ACC1", "patient_id": "P2"}, name="another patient")
    write_toy(toys / "shared", {"accession": "SAME"}, name="accession of two")
    write_toy(toys / "time", {"patient_id": "P2", "time": "2020-01-03T09:59:00"}, name="time")
    write_toy(toys / "late", {"patient_id": "P2", "time": "2020-01-03T10:01:00"}, name="late")
    write_toy(toys / "both", {"patient_id": "P3", "time": "2020-03-01T12:00:00"}, name="two studies")
    # What an attachment says of its study counts more than what it says of time.
    # A number that no image has is another system's number of the same patient.
    write_toy(
        toys / "stated", {"study_uids": [uid["a"]], "patient_id": "77", "time": "2020-01-02T10:00:00"}, s=1
    )
    # The study of one patient, and the name of another: nobody can say whose it is.
    write_toy(toys / "mixed", {"study_uids": [uid["a"]], "patient_id": "P2"}, name="mixed")
    write_toy(toys / "copy", {"study_uids": [uid["a"]], "text": text}, name="study")
    write_toy(toys / "broken", {"study_uids": [uid["b"]]}, **{"raise": "convert"}, phi=CANARY)
    write_toy(toys / "unread", {"study_uids": [uid["b"]]}, **{"raise": "describe"}, phi=CANARY)
    write_toy(toys / "large", {"study_uids": [uid["b"]]}, **{"raise": "source"})
    write_toy(
        toys / "bundle", {"study_uids": [uid["b"]]}, {"study_uids": [uid["c"]]}, {"study_uids": ["1.2.3"]}
    )
    write_toy(
        toys / "table",
        {"study_uids": [uid["b"]], "text": "1"},
        {"study_uids": [uid["b"]]},
        {"study_uids": [uid["c"]]},
        missing=[0],
    )
    (toys / "samples").write_bytes(b"TOX")
    (toys / "notes.txt").write_text("nothing", encoding="utf-8")
    return case, studies, case.pack(LOOSE, handlers=HANDLERS)


def _fields(case: PackCase, study: MadeStudy) -> dict[str, bytes]:
    dataset = case.open()
    return dataset.read_fields(dataset.samples.find(case.sample_key(study.study_instance_uid)))


def test_every_attachment_has_an_outcome(
    made: tuple[PackCase, dict[str, MadeStudy], PackSummary],
) -> None:
    case, studies, summary = made
    assert summary.status == "packed"
    assert summary.reasons == {
        "AMBIGUOUS_LINK": 1,
        "ATTACHMENT_IN_PARTS": 1,
        "ATTACHMENT_PART": 1,
        # another patient, an accession number of two, late, and what is left of the bundle
        "ATTACHMENT_UNREADABLE": 2,
        "ATTACHMENT_WITHOUT_STUDY": 4,
        "CONFLICTING_IDENTIFIER": 1,
        "DUPLICATE_INSTANCE": 1,
        "LIMIT_EXCEEDED": 1,
        "NOT_DICOM": 1,
    }
    assert summary.inputs["packed"] == 6 + 1 + 6 + 4
    rows = [row for row in read_ledger(case.output) if row["kind"] == "attachment"]
    packed = Counter(row["sample_key"] for row in rows if row["outcome"] == "packed")
    keys = {name: case.sample_key(study.study_instance_uid) for name, study in studies.items()}
    # Study, series, instance, accession and stated; time, a part of the bundle and one of the table.
    assert packed == {keys["a"]: 5, keys["b"]: 3, keys["c"]: 2}


def test_fields_are_merged_in_the_order_of_their_names(
    made: tuple[PackCase, dict[str, MadeStudy], PackSummary],
) -> None:
    case, studies, _ = made
    fields = _fields(case, studies["a"])
    assert list(fields) == sorted(fields)
    assert [name for name in fields if name.startswith("toy.")] == [f"toy.{n:03d}.txt" for n in range(5)]
    toys = json.loads(fields["toys.json"])
    assert [one["record"] for one in toys["records"]] == [0, 1, 2, 3, 4]
    assert toys["dangling"] == [{"reason": "MENTION", "count": 5}]
    assert toys["format_version"] == 1
    assert b"Seen by Dr. [NAME] at [TIME]." in fields.values()
    # Masks are fields of a series and no slices of it.
    assert [name for name in fields if name.startswith("s000.m")] == [
        f"s000.m{n:03d}.i0000.npy" for n in range(5)
    ]
    dataset = case.open()
    row = dataset.samples.find(case.sample_key(studies["a"].study_instance_uid))
    assert int(dataset.samples.column("num_slices")[row]) == 2
    stamped = [one for one in toys["records"] if one["when"]]
    assert [(one["when"], one["seconds"]) for one in stamped] == [({"day_offset": 0}, 0.0)]
    assert stamped[0]["series"] == [[0, 2, 16, 12]]


def test_a_report_says_what_it_says_of_the_text_that_is_stored(
    made: tuple[PackCase, dict[str, MadeStudy], PackSummary],
) -> None:
    case, studies, _ = made
    fields = _fields(case, studies["a"])
    text, report = fields["report.txt"].decode(), json.loads(fields["report.json"])
    assert CANARY not in text
    (entity,) = report["entities"]
    first, last = entity["span"]
    assert (text[first:last], entity["size_mm"], report["format_version"]) == ("nodule", [5.0], 1)
    aligned = json.loads(fields["alignment.json"])
    assert [(one["entity"], one["series"], one["evidence"][0]["rule"]) for one in aligned["entities"]] == [
        (0, 0, "E1")
    ]
    assert not {"report.json", "alignment.json"} & _fields(case, studies["b"]).keys()


def test_nothing_of_an_attachment_leaves_as_it_is(
    made: tuple[PackCase, dict[str, MadeStudy], PackSummary],
) -> None:
    case, *_ = made
    for path in case.output.rglob("*"):
        assert path.is_dir() or CANARY.lower().encode() not in path.read_bytes().lower(), path.name


@pytest.fixture
def case(made: tuple[PackCase, dict[str, MadeStudy], PackSummary], tmp_path: Path) -> PackCase:
    """The dataset, its inputs and its private folder in a folder of the test's own."""
    subprocess.run(["cp", "-a", f"{made[0].folder}/.", str(tmp_path)], check=True)
    return PackCase(tmp_path)


def _again(case: PackCase) -> None:
    shutil.rmtree(case.output)
    for path in case.private.glob("*"):
        if path.name != "secret.key":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _shards(case: PackCase) -> dict[str, str]:
    return {name: digest for name, digest in tree_digests(case.output).items() if name.startswith("shards/")}


def test_the_same_bytes_wherever_attachments_lie_and_however_many_processes_read_them(
    case: PackCase,
) -> None:
    before = _shards(case)
    _again(case)
    toys = case.dicom / "toys"
    for number, path in enumerate(sorted(toys.iterdir(), reverse=True)):
        path.rename(case.dicom / f"{number:03d}")
    case.pack(LOOSE, "execution.num_processes=2", handlers=HANDLERS)
    assert _shards(case) == before


def test_a_killed_job_goes_on_to_the_same_bytes(case: PackCase) -> None:
    before = tree_digests(case.output)
    _again(case)
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(f"{text}\n[policy]\nmax_quarantined_share = 1.0\n", encoding="utf-8")
    for point in ("advance:headers:1", "advance:studies:2"):
        assert case.drive(point, HANDLERS).returncode == -9
    case.pack(handlers=HANDLERS)
    assert tree_digests(case.output) == before


def test_a_new_study_finds_its_attachments_and_a_packed_one_stays(
    case: PackCase, made: tuple[PackCase, dict[str, MadeStudy], PackSummary]
) -> None:
    before = _shards(case)
    toys = case.dicom / "toys"
    change = _dated("20200104")
    new = make_study(case.dicom / "new", patient="P9", num_slices=1, change=change)
    # The bundle has waited for the first of these two, and another file for the second.
    write_toy(toys / "later", {"study_uids": [new.study_instance_uid]})
    waiting = make_study(case.dicom / "waiting", patient="P8", num_slices=1, change=_uid_of("1.2.3"))
    write_toy(toys / "afterwards", {"study_uids": [made[1]["a"].study_instance_uid]}, name="too late")
    summary = case.pack(LOOSE, mode="append", handlers=HANDLERS)
    assert (summary.status, summary.manifest_version) == ("packed", 2)
    assert _shards(case).items() >= before.items()
    dataset = case.open()
    for uid in (new.study_instance_uid, "1.2.3"):
        fields = dataset.read_fields(dataset.samples.find(case.sample_key(uid)))
        assert "toy.000.txt" in fields, uid
    assert waiting.files
    rows = {row["input"]: row for row in read_ledger(case.output, 2)}
    former = {row["input"]: row for row in read_ledger(case.output, 1)}
    changed = {name for name, row in former.items() if rows[name]["outcome"] != row["outcome"]}
    assert changed == set()
    reasons = Counter(row["reason"] for name, row in rows.items() if name not in former)
    # Two images, the new study's attachment and the bundle's part; one that came too late.
    assert reasons == {None: 4, "STUDY_ALREADY_PACKED": 1}
    assert case.pack(LOOSE, mode="append", handlers=HANDLERS).status == "nothing_new"
    assert case.pack(LOOSE, mode="retry", handlers=HANDLERS).status == "nothing_new"


def _uid_of(study_uid: str) -> Any:
    def change(dataset: FileDataset, index: int) -> None:
        _dated("20200105")(dataset, index)
        dataset.StudyInstanceUID = study_uid

    return change


def test_a_removed_study_takes_its_attachments_along(
    case: PackCase, made: tuple[PackCase, dict[str, MadeStudy], PackSummary]
) -> None:
    uid = made[1]["b"].study_instance_uid
    remove(case.output, case.private, Withdrawn(studies=[uid]))
    key = case.sample_key(uid)
    rows = [row for row in read_ledger(case.output, 2) if row["sample_key"] == key]
    assert {row["reason"] for row in rows} == {"CONSENT_WITHDRAWN"}
    assert sum(row["kind"] == "attachment" for row in rows) == 5
    assert case.pack(LOOSE, mode="append", handlers=HANDLERS).status == "nothing_new"


def test_a_folder_of_attachments_holds_no_images(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    study = make_study(case.dicom / "a", num_slices=1)
    make_study(tmp_path / "beside" / "b", study="B", num_slices=1)
    write_toy(tmp_path / "beside" / "toy", {"study_uids": [study.study_instance_uid]})
    beside = f"inputs.attachments={tmp_path / 'beside'}"
    summary = case.pack(beside, LOOSE, handlers=HANDLERS)
    assert (summary.inputs["packed"], summary.reasons) == (2, {"NOT_ATTACHMENT": 1})
    # Another study, and its attachment from the same folder.
    new = make_study(case.dicom / "c", study="C", num_slices=1)
    write_toy(tmp_path / "beside" / "later", {"study_uids": [new.study_instance_uid]})
    case.pack(beside, LOOSE, mode="append", handlers=HANDLERS)
    assert "toy.000.txt" in _fields(case, new)


def test_kinds_are_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shardflow.packing.handlers.attachment_kinds", lambda records: (*KINDS, *attachment_kinds(records))
    )
    case = PackCase(tmp_path)
    case.prepare()
    study = make_study(case.dicom / "a", num_slices=1)
    write_toy(case.dicom / "toy", {"study_uids": [study.study_instance_uid]})
    digests = {case.config("attachments.leave_out=toy").content_digest(), case.config().content_digest()}
    assert len(digests) == 2
    with pytest.raises(ConfigError, match=r"kinds of attachments \(cda, coco, .*, got 'toi'; correct it"):
        case.pack("attachments.leave_out=toi", handlers=HANDLERS)
    assert case.pack("attachments.leave_out=toy", handlers=HANDLERS).reasons == {"NOT_DICOM": 1}


def test_what_reports_cannot_be_read_with_is_said_before_anything_is_packed(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    make_study(case.dicom / "a", num_slices=1)
    (tmp_path / "odd.csv").write_text("colour\nred\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"reports\.extractors must name installed extractors, got 'x'"):
        case.pack("reports.extractors=x")
    with pytest.raises(ConfigError, match="columns"):
        case.pack(f"reports.findings={tmp_path / 'odd.csv'}")
    assert case.pack().inputs["packed"] == 1


def test_an_attachment_that_ends_its_process_is_named_and_nothing_else_is_lost(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    study = make_study(case.dicom / "a", num_slices=1)
    write_toy(case.dicom / "bad", {"study_uids": [study.study_instance_uid]}, crash="describe")
    write_toy(case.dicom / "good", {"study_uids": [study.study_instance_uid]})
    summary = case.pack(LOOSE, handlers=HANDLERS)
    assert (summary.inputs["packed"], summary.reasons) == (2, {"WORKER_KILLED": 1})


def test_a_number_that_json_does_not_know_costs_its_attachment_and_not_the_study(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    study = make_study(case.dicom / "a", num_slices=1)
    write_toy(case.dicom / "bad", {"study_uids": [study.study_instance_uid]}, **{"raise": "number"})
    write_toy(case.dicom / "good", {"study_uids": [study.study_instance_uid]})
    summary = case.pack(LOOSE, handlers=HANDLERS)
    assert (summary.inputs["packed"], summary.reasons) == (2, {"ATTACHMENT_UNREADABLE": 1})
    assert len(json.loads(_fields(case, study)["toys.json"])["records"]) == 1


def test_another_lexicon_makes_another_dataset(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    study = make_study(case.dicom / "a", num_slices=1)
    case.write_reports({study.study_instance_uid: "FINDINGS: A florp is seen."})
    first = case.pack("deid.report_text=scrub")
    assert json.loads(_fields(case, study)["report.json"])["entities"] == []
    _again(case)
    words = tmp_path / "own.csv"
    words.write_text("name,kind,parent,synonyms\nflorp,finding,,\n", encoding="utf-8")
    second = case.pack("deid.report_text=scrub", f"reports.findings={words}")
    (entity,) = json.loads(_fields(case, study)["report.json"])["entities"]
    assert entity["concept"] == "florp"
    assert first.dataset_id != second.dataset_id
    _again(case)
    case.pack("reports.extract=false")
    assert not {"report.json", "alignment.json"} & _fields(case, study).keys()


def test_a_layout_of_folders_places_attachments_too(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    for name in ("s1", "s2"):
        make_study(case.dicom / name, patient=name, num_slices=1)
        write_toy(case.dicom / name / "notes.toy", {"text": name})
        (case.dicom / name / "notes.txt").write_text("no toy", encoding="utf-8")
    text = case.config_path.read_text(encoding="utf-8")
    layout = '[inputs.layout]\nkind = "folder"\npattern = "(?P<study>[^/]+)/.*"\n'
    case.config_path.write_text(f"{text}{layout}", encoding="utf-8")
    summary = case.pack(handlers=HANDLERS)
    assert (summary.inputs["packed"], summary.reasons) == (4, {"NOT_IMAGE": 2})
    dataset = case.open()
    for name in ("s1", "s2"):
        fields = dataset.read_fields(dataset.samples.find(case.sample_key(name)))
        assert fields["toy.000.txt"] == name.encode()
