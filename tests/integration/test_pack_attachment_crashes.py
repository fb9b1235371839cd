"""An attachment that ends its packing process costs itself, and not its study."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardflow.packing import ArrayTask
from shardflow.packing.studies.assembly import AttachmentMark
from tests.attachment_kinds import HANDLERS, write_toy
from tests.dicom_factory import MadeStudy, make_study
from tests.pack_case import PackCase, read_ledger, tree_digests

LOOSE = "policy.max_quarantined_share=1.0"


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


@pytest.fixture
def studies(case: PackCase) -> list[MadeStudy]:
    """Two patients; the first has a good attachment."""
    made = [make_study(case.dicom / f"p{n}", patient=f"P{n}", num_slices=2, seed=n) for n in range(2)]
    write_toy(case.dicom / "good", {"study_uids": [made[0].study_instance_uid]}, name="good")
    return made


def _write_bad(case: PackCase, name: str, *studies: MadeStudy, **rest: Any) -> Path:
    """Write an attachment whose conversion ends its process; return where its tries are counted."""
    tally = case.folder / f"{name}.tally"
    records = [{"study_uids": [study.study_instance_uid]} for study in studies]
    rest = {"crash": "convert", "tally": str(tally), "name": name} | rest
    write_toy(case.dicom / name, *records, **rest)
    return tally


def _toys(case: PackCase, study: MadeStudy) -> list[Any]:
    dataset = case.open()
    fields = dataset.read_fields(dataset.samples.find(case.sample_key(study.study_instance_uid)))
    found: list[Any] = json.loads(fields["toys.json"])["records"]
    return found


def _records(case: PackCase) -> list[dict[str, Any]]:
    lines = (case.private / "resource_outcomes.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("how", "reason"), [("kill", "WORKER_KILLED"), ("memory", "WORKER_OUT_OF_MEMORY")])
def test_it_is_quarantined_and_its_study_is_packed(
    case: PackCase, studies: list[MadeStudy], how: str, reason: str
) -> None:
    tally = _write_bad(case, "bad", studies[0], how=how)
    summary = case.pack(LOOSE, handlers=HANDLERS)
    assert summary.status == "packed"
    assert (summary.inputs["packed"], summary.reasons) == (2 + 2 + 1, {reason: 1})
    assert summary.studies == {"packed": 2, "skipped": 0, "quarantined": 0}
    assert len(_toys(case, studies[0])) == 1
    (row,) = [row for row in read_ledger(case.output) if row["outcome"] == "quarantined"]
    assert (row["kind"], row["reason"]) == ("attachment", reason)
    assert row["sample_key"] == case.sample_key(studies[0].study_instance_uid)
    assert tally.stat().st_size == 2  # once in company, once alone

    # What was recorded is an input of every later run, which does not try it.
    assert [record["input"] for record in _records(case)] == [f"{row['input']}/convert"]
    first = tree_digests(case.output)
    shutil.rmtree(case.output)
    assert case.pack(LOOSE, handlers=HANDLERS).reasons == {reason: 1}
    assert tree_digests(case.output) == first
    assert tally.stat().st_size == 2
    # The study is packed, and stays as it is.
    assert case.pack(LOOSE, mode="append", handlers=HANDLERS).status == "nothing_new"
    assert case.pack(LOOSE, mode="retry", handlers=HANDLERS).status == "nothing_new"


def test_several_of_a_study_and_one_of_two_studies(case: PackCase, studies: list[MadeStudy]) -> None:
    _write_bad(case, "bad", studies[0])
    _write_bad(case, "worse", studies[0], how="memory")
    _write_bad(case, "bundle", *studies)
    summary = case.pack(LOOSE, handlers=HANDLERS)
    assert summary.studies == {"packed": 2, "skipped": 0, "quarantined": 0}
    assert summary.reasons == {"ATTACHMENT_IN_PARTS": 1, "WORKER_KILLED": 3, "WORKER_OUT_OF_MEMORY": 1}
    assert len(_toys(case, studies[0])) == 1
    assert Counter(record["reason"] for record in _records(case)) == {
        "WORKER_KILLED": 3,
        "WORKER_OUT_OF_MEMORY": 1,
    }


def test_a_death_that_does_not_come_again_leaves_no_trace(case: PackCase, studies: list[MadeStudy]) -> None:
    tally = _write_bad(case, "bad", studies[0], times=1)
    first = case.pack(LOOSE, handlers=HANDLERS)
    assert (tally.stat().st_size, first.reasons) == (1, {})
    assert len(_toys(case, studies[0])) == 2
    assert not (case.private / "resource_outcomes.jsonl").exists()
    shutil.rmtree(case.output)
    assert case.pack(LOOSE, handlers=HANDLERS).dataset_id == first.dataset_id


def test_tasks_and_restarts_come_to_the_same_bytes(case: PackCase, studies: list[MadeStudy]) -> None:
    _write_bad(case, "bad", studies[0])
    case.pack(LOOSE, handlers=HANDLERS)
    expected = tree_digests(case.output)
    shutil.rmtree(case.output)
    (case.private / "resource_outcomes.jsonl").unlink()
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(f"{text}\n[policy]\nmax_quarantined_share = 1.0\n", encoding="utf-8")
    assert case.drive("advance:studies:2", HANDLERS).returncode == -9
    case.pack(handlers=HANDLERS)
    assert tree_digests(case.output) == expected

    shutil.rmtree(case.output)
    (case.private / "resource_outcomes.jsonl").unlink()
    for index in range(2):
        case.pack(array_task=ArrayTask(index=index, count=2), handlers=HANDLERS)
    assert case.pack(is_merge=True, handlers=HANDLERS).status == "packed"
    assert tree_digests(case.output) == expected


def test_each_has_two_deaths(case: PackCase, studies: list[MadeStudy]) -> None:
    """Whichever of the two is converted first, the one that dies once is packed."""
    once = _write_bad(case, "once", studies[0], times=1)
    always = _write_bad(case, "always", studies[0])
    summary = case.pack(LOOSE, handlers=HANDLERS)
    assert summary.reasons == {"WORKER_KILLED": 1}
    assert (once.stat().st_size, always.stat().st_size) == (1, 2)
    assert len(_toys(case, studies[0])) == 2


def test_a_death_behind_the_attachments_is_the_studys(case: PackCase, studies: list[MadeStudy]) -> None:
    _write_bad(case, "later", studies[0], crash="slices")
    summary = case.pack(LOOSE, handlers=HANDLERS)
    assert summary.studies == {"packed": 1, "skipped": 0, "quarantined": 1}
    (record,) = _records(case)
    assert record["input"] == case.sample_key(studies[0].study_instance_uid)


def test_retry_tries_the_attachments_of_a_quarantined_study_again(
    case: PackCase, studies: list[MadeStudy]
) -> None:
    tally = _write_bad(case, "bad", studies[0], times=2)
    _write_bad(case, "later", studies[0], crash="slices", times=2)
    lost = case.pack(LOOSE, handlers=HANDLERS)
    assert lost.studies == {"packed": 1, "skipped": 0, "quarantined": 1}
    # Of the attachment, and of the study's two images.
    assert (tally.stat().st_size, lost.reasons["WORKER_KILLED"]) == (2, 1 + 2)
    assert len(_records(case)) == 2
    healed = case.pack(LOOSE, mode="retry", handlers=HANDLERS)
    assert (healed.studies["packed"], healed.reasons) == (2, {})
    assert len(_toys(case, studies[0])) == 3


def test_too_many_of_them_stop_the_job(case: PackCase, studies: list[MadeStudy]) -> None:
    _write_bad(case, "bad", studies[0])
    none = "policy.max_quarantined_share=0"
    # A task publishes nothing: nobody would count after it.
    assert (
        case.pack(none, array_task=ArrayTask(index=0, count=1), handlers=HANDLERS).status
        == "quarantine_limit"
    )
    # The next run knows it from its start.
    summary = case.pack(none, handlers=HANDLERS)
    assert (summary.status, summary.reasons["WORKER_KILLED"]) == ("quarantine_limit", 1)
    assert case.pack(LOOSE, handlers=HANDLERS).reasons == {"WORKER_KILLED": 1}


def test_retry_heals_a_study_that_an_earlier_version_lost(
    case: PackCase, studies: list[MadeStudy], monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = _write_bad(case, "bad", studies[0])
    with monkeypatch.context() as patch:
        patch.setattr(AttachmentMark, "read", lambda self: None)
        lost = case.pack(LOOSE, handlers=HANDLERS)
    assert lost.studies == {"packed": 1, "skipped": 0, "quarantined": 1}
    healed = case.pack(LOOSE, mode="retry", handlers=HANDLERS)
    assert healed.studies == {"packed": 2, "skipped": 0, "quarantined": 0}
    assert healed.reasons == {"WORKER_KILLED": 1}
    assert len(_toys(case, studies[0])) == 1
    assert tally.stat().st_size == 4


def test_a_field_that_is_no_bytes_costs_its_attachment(case: PackCase, studies: list[MadeStudy]) -> None:
    write_toy(case.dicom / "bad", {"study_uids": [studies[0].study_instance_uid]}, **{"raise": "text"})
    summary = case.pack(LOOSE, handlers=HANDLERS)
    assert summary.studies["packed"] == 2
    assert summary.reasons == {"ATTACHMENT_UNREADABLE": 1}
