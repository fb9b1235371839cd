"""The page that packing writes into a dataset: named by the manifest, the same bytes always, and true."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from shardflow.format import Dataset, verify
from shardflow.viewing import Bounds, gather, render_page
from tests.dicom_factory import make_study, truncate
from tests.pack_case import PackCase, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    """Nine good studies, one cut one, and a text file."""
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    made = [
        make_study(case.dicom / f"s{number}", patient=f"p{number}", num_slices=3, modality=modality)
        for number, modality in enumerate(["CT", "MR", "CT", "CT", "CR", "CT", "CT", "MR", "CT"])
    ]
    truncate(make_study(case.dicom / "cut", patient="cut").files[0])
    (case.dicom / "notes.txt").write_text("no image")
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(text + "[policy]\nmax_quarantined_share = 1.0\n", encoding="utf-8")
    case.write_reports([(made[0].study_instance_uid, "Nothing acute in Zqxreport.")])
    return case


def _page(case: PackCase) -> str:
    return (case.output / "report.html").read_text(encoding="utf-8")


def test_the_page_is_a_file_of_the_dataset(case: PackCase) -> None:
    case.pack()
    dataset = case.open()
    page = dataset.manifest.page
    assert page is not None
    assert page.path == "report.html"
    assert page in dataset.manifest.files()
    assert page.num_bytes == (case.output / "report.html").stat().st_size
    # Its identity is the digest of what names it, so it cannot hold it.
    assert dataset.dataset_id not in _page(case)

    path = case.output / "report.html"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    assert [damage.path for damage in verify(str(case.output)).damages] == ["report.html"]
    path.unlink()
    assert [damage.problem for damage in verify(str(case.output)).damages] == ["missing"]


def test_the_page_is_the_same_for_any_number_of_processes_and_after_a_kill(case: PackCase) -> None:
    case.pack()
    once = tree_digests(case.output)
    case.pack(
        f"output={case.folder / 'again'}", f"private_dir={_other_private(case)}", "execution.num_processes=3"
    )
    assert tree_digests(case.folder / "again") == once


@pytest.mark.parametrize("point", ["phase:page", "phase:manifest"])
def test_a_job_killed_around_the_page_ends_with_the_same_bytes(case: PackCase, point: str) -> None:
    case.pack(f"output={case.folder / 'whole'}", f"private_dir={_other_private(case)}")
    assert case.drive(point).returncode == -signal.SIGKILL
    assert (case.output / "report.html").exists() is (point == "phase:manifest")
    case.pack()
    assert tree_digests(case.output) == tree_digests(case.folder / "whole")


def test_a_dataset_without_a_page(case: PackCase) -> None:
    case.pack("page.enabled=false")
    assert case.open().manifest.page is None
    assert not (case.output / "report.html").exists()


def test_a_page_of_another_plan_goes_with_it(case: PackCase) -> None:
    """A job is killed after it wrote the page, and run again with settings that want none."""
    assert case.drive("phase:manifest").returncode == -signal.SIGKILL
    case.pack("page.enabled=false")
    assert not verify(str(case.output)).notes
    assert not (case.output / "report.html").exists()


def test_what_the_page_says(case: PackCase) -> None:
    case.pack("page.num_thumbnails=4")
    page = _page(case)
    assert page.count("data:image/jpeg") == 4
    assert "PIXEL_DATA_TRUNCATED" in page
    assert "Export the files again; the transfer was cut." in page
    assert "NOT_DICOM" in page
    assert "Zqxreport" not in page
    assert str(case.folder) not in page
    # What was not looked at is said so.
    assert re.search(r"generalized</td><td>Text of 1 report<", page)
    assert re.search(r"class=alarm>stored as is</b></td><td>Pixels", page)
    assert str(case.key.key_id) in page


def test_no_report_no_statement_about_reports(case: PackCase) -> None:
    case.write_reports([])
    case.pack()
    assert "Text of" not in _page(case)


def test_bounds_count_studies_that_stand_for_the_others(case: PackCase) -> None:
    case.pack()
    dataset = Dataset.open(case.output)
    whole = gather(dataset, num_thumbnails=0)
    assert (whole.num_described, whole.num_ct_slices_counted) == (9, 18)
    facts = gather(dataset, num_thumbnails=0, bounds=Bounds(num_studies=4, num_ct_slices=12))
    assert facts.num_described == 4
    # Six studies of CT share twelve slices.
    assert (facts.num_ct_studies_counted, facts.num_ct_slices_counted) == (6, 12)
    facts = gather(dataset, num_thumbnails=0, bounds=Bounds(num_studies=4, num_ct_slices=2))
    assert (facts.num_ct_studies_counted, facts.num_ct_slices_counted) == (2, 2)
    assert "4 of 9 studies" in render_page(dataset, facts, kept_keywords=(), max_age_years=90)
    assert facts.reasons == whole.reasons
    assert sum(facts.reasons.values()) == sum(
        row["reason"] is not None
        for row in map(json.loads, (case.output / "ledger.jsonl").read_text().splitlines()[:-1])
    )


def _other_private(case: PackCase) -> Path:
    """A second private folder with the same key."""
    folder = case.folder / "private2"
    folder.mkdir(mode=0o700)
    key = folder / "secret.key"
    key.touch(mode=0o600)
    key.write_bytes((case.private / "secret.key").read_bytes())
    return folder
