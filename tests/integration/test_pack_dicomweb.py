"""A dataset packed from an archive equals one packed from the same files, whatever the archive does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pydicom
import pytest

from shardflow.errors import ConfigError
from shardflow.packing import ArrayTask
from shardflow.packing.sources.dicomweb.config import PASSWORD, TOKEN, USER
from tests.dicom_factory import make_study
from tests.dicomweb_server import Fault, WebArchive, serving
from tests.pack_case import PackCase, read_ledger, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")

NUM_STUDIES = 5
_FAST = ("inputs.archive.retry.first_wait_s=0.001", "inputs.archive.max_requests_per_s=0")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Files, laid out as they are fetched, and the digests of the dataset packed from their folder."""
    case = PackCase(tmp_path_factory.mktemp("files"))
    case.prepare()
    made = tmp_path_factory.mktemp("made")
    for number in range(NUM_STUDIES):
        kind = "CT" if number else "CR"
        make_study(
            made / str(number), patient=f"P{number}", num_slices=1 + number, modality=kind, seed=number
        )
    make_study(made / "more", patient="P4", series=2, num_slices=1, modality="SR")
    for path in made.rglob("*.dcm"):
        header = pydicom.dcmread(path, stop_before_pixels=True)
        folder = case.dicom / header.StudyInstanceUID / header.SeriesInstanceUID
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / f"{header.SOPInstanceUID}.dcm")
    case.pack()
    return case.dicom, tree_digests(case.output)


@pytest.fixture
def archive(source: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[WebArchive]:
    for name in (TOKEN, USER, PASSWORD):
        monkeypatch.delenv(name, raising=False)
    with serving(source[0]) as archive:
        yield archive


@pytest.fixture
def case(tmp_path: Path, archive: WebArchive) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(
        text.replace('dicom = ["dicom"]', f'dicomweb = "{archive.url}"'), encoding="utf-8"
    )
    return case


def test_bytes_equal_those_of_files(
    case: PackCase, archive: WebArchive, source: tuple[Path, dict[str, str]]
) -> None:
    archive.page_size = 2
    archive.faults += [Fault(kind="truncate", times=2), Fault(kind="status", value="503", times=2)]
    assert case.pack(*_FAST).status == "packed"
    assert tree_digests(case.output) == source[1]
    assert tree_digests(case.private / "archive" / "files") == tree_digests(source[0])
    archive.requests.clear()
    assert case.pack(*_FAST).status == "already_packed"
    assert not [path for path in archive.requests if "/series/" in path]


def test_a_killed_job_resumes_with_what_is_missing(
    case: PackCase, archive: WebArchive, source: tuple[Path, dict[str, str]]
) -> None:
    killed = case.drive("advance:archive:2")
    assert killed.returncode < 0
    there = tree_digests(case.private / "archive" / "files")
    assert 0 < len(there) < len(archive.stored)
    archive.requests.clear()
    run = case.command(*(part for setting in _FAST for part in ("--set", setting)))
    assert run.returncode == 0, run.stderr
    assert tree_digests(case.output) == source[1]
    asked = [path for path in archive.requests if "/series/" in path]
    assert len(asked) <= len(archive.stored) - len(there)
    for one in archive.stored:
        assert one.study not in killed.stdout + killed.stderr + run.stdout + run.stderr


def test_what_the_archive_does_not_deliver_is_quarantined_with_its_study_and_retried(
    case: PackCase, archive: WebArchive, tmp_path: Path
) -> None:
    lost = next(one for one in archive.stored if one.modality == "CT")
    num_images = sum(one.study == lost.study and one.modality == "CT" for one in archive.stored)
    names = tmp_path / "studies.txt"
    names.write_text("\n".join(sorted({one.study for one in archive.stored} | {"1.2.3"})), encoding="utf-8")
    fast = (*_FAST, f"inputs.archive.studies={names}", "policy.max_quarantined_share=0.6")
    archive.faults += [Fault(kind="status", value="404", path=uid) for uid in (lost.series, lost.instance)]
    summary = case.pack(*fast)
    assert summary.reasons["NOT_RETRIEVED"] == 2
    assert summary.reasons["STUDY_QUARANTINED"] >= num_images - 1
    assert summary.studies["packed"] == NUM_STUDIES - 1
    keys = {row["sample_key"] for row in read_ledger(case.output) if row["reason"] == "NOT_RETRIEVED"}
    assert keys == {case.sample_key(lost.study), None}
    archive.faults.clear()
    assert case.pack(*fast, mode="retry").studies["packed"] == NUM_STUDIES
    case.open()


def test_tasks_go_by_what_was_fetched(
    case: PackCase, archive: WebArchive, source: tuple[Path, dict[str, str]]
) -> None:
    with pytest.raises(ConfigError, match="--dry-run"):
        case.pack(*_FAST, array_task=ArrayTask(0, 2))
    assert case.pack(*_FAST, is_dry_run=True).status == "planned"
    archive.requests.clear()
    for index in range(2):
        case.pack(*_FAST, array_task=ArrayTask(index, 2))
    case.pack(*_FAST, is_merge=True)
    assert tree_digests(case.output) == source[1]
    assert not archive.requests


def test_folders_and_an_archive_are_packed_together_and_appended(case: PackCase, archive: WebArchive) -> None:
    make_study(case.dicom, patient="P0", study="B", num_slices=2)
    make_study(case.folder / "beside", patient="P4", series=2, num_slices=1, modality="SR")
    config = (*_FAST, f"inputs.dicom={case.dicom}", f"inputs.attachments={case.folder / 'beside'}")
    whole, archive.stored = archive.stored, [one for one in archive.stored if one.modality == "CT"]
    first = case.pack(*config)
    assert first.studies["packed"] == NUM_STUDIES
    archive.stored = whole
    archive.requests.clear()
    assert case.pack(*config, mode="append").studies["packed"] == NUM_STUDIES + 1
    case.open()


def test_an_archive_needs_studies_and_the_layout_of_headers(case: PackCase, archive: WebArchive) -> None:
    with pytest.raises(ConfigError, match="filters"):
        case.pack(*_FAST, "inputs.archive.modalities=PT")
    with pytest.raises(ConfigError, match=r"layout\.kind 'headers'"):
        case.config("inputs.layout.kind=mimic-cxr")
    with pytest.raises(ConfigError, match="overlap"):
        case.pack(*_FAST, f"inputs.archive.folder={case.output / 'files'}")
