"""Linking: a report belongs to one study for certain, or it is named why not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import StorageError
from shardflow.format.reasons import Reason
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.inventory import PACKED, UNDECIDED, StudyTable, reason_code, reason_name
from shardflow.packing.linking import ReportPlace, ReportTable, link_reports, read_report
from shardflow.packing.sources.reports import BrokenReport, ReportRecord

pytestmark = pytest.mark.fast

KEY = SecretKey(b"k" * 32)


def _link(tmp_path: Path, *records: ReportRecord | BrokenReport) -> ReportTable:
    studies = StudyTable()
    for uid in ("1.1", "1.2", "1.3"):
        studies.add(KEY.surrogate("study", uid), "p", 0)
    return link_reports(iter(records), studies, KEY, tmp_path / "reports.bin")


def _report(uid: str, text: str, place: int = 1) -> ReportRecord:
    return ReportRecord(study_instance_uid=uid, text=text, place=place)


def _reasons(table: ReportTable) -> list[str | None]:
    return ["-" if code == UNDECIDED else reason_name(code) for code in table.reason.tolist()]


def test_texts_wait_in_the_private_file(tmp_path: Path) -> None:
    table = _link(tmp_path, _report("1.2", "eins \u2603"), _report("1.1", "zwei", place=2))
    assert table.study.tolist() == [1, 0]
    assert table.report_of == {0: 1, 1: 0}
    texts = [
        read_report(tmp_path / "reports.bin", table.place_of(report)).decode() for report in range(len(table))
    ]
    assert texts == ["eins \u2603", "zwei"]
    assert (tmp_path / "reports.bin").stat().st_mode & 0o777 == 0o600
    assert len(set(table.surrogate.tolist())) == 2


def test_nothing_is_chosen_between_different_texts(tmp_path: Path) -> None:
    table = _link(tmp_path, _report("1.1", "a"), _report("1.2", "b"), _report("1.1", "c"))
    assert _reasons(table) == ["AMBIGUOUS_REPORT", "-", "AMBIGUOUS_REPORT"]
    assert table.unusable == {0}
    assert table.report_of == {1: 1}


def test_copies_strangers_and_empty_texts(tmp_path: Path) -> None:
    table = _link(
        tmp_path, _report("1.1", "a"), _report("1.1", "a"), _report("9.9", "b"), _report("1.2", " \n")
    )
    assert _reasons(table) == ["-", "DUPLICATE_REPORT", "REPORT_WITHOUT_STUDY", "EMPTY_REPORT"]
    assert table.report_of == {0: 0}
    assert table.unusable == set()


def test_a_sentence_says_that_most_reports_belong_to_no_study(tmp_path: Path) -> None:
    own, strangers = _report("1.1", "a"), [_report("9.8", "b"), _report("9.9", "c")]
    nameless = BrokenReport(place=4, reason=Reason.MISSING_IDENTIFIER, detail="")
    assert _link(tmp_path, own, strangers[0], _report("1.2", " ")).notes() == ()
    (note,) = _link(tmp_path, own, *strangers).notes()
    assert note.startswith("Only 1 of 3 reports belong to a study")
    (note,) = _link(tmp_path, own, strangers[0], nameless).notes()
    assert note.startswith("Only 1 of 3 reports belong to a study")
    assert ReportTable().notes() == ()


def test_a_sentence_counts_the_reports_whose_numbers_were_rounded(tmp_path: Path) -> None:
    rounded = BrokenReport(place=7, reason=Reason.ROUNDED_IDENTIFIER, detail="")
    table = _link(tmp_path, _report("1.1", "a"), rounded)
    (note,) = table.notes()
    assert note.startswith("1 of the reports cannot be joined: accession numbers")
    assert _reasons(table) == ["-", "ROUNDED_IDENTIFIER"]


def test_a_report_that_cannot_be_read_makes_its_study_unusable(tmp_path: Path) -> None:
    broken = BrokenReport(place=3, reason=Reason.REPORT_UNREADABLE, detail="", study_instance_uid="1.3")
    stray = BrokenReport(place=4, reason=Reason.MISSING_IDENTIFIER, detail="")
    unwritable = _report("1.2", "lone \ud800 surrogate", place=5)
    table = _link(tmp_path, broken, stray, unwritable)
    assert _reasons(table) == ["REPORT_UNREADABLE", "MISSING_IDENTIFIER", "REPORT_UNREADABLE"]
    assert table.unusable == {1, 2}


def test_reports_share_the_fate_of_their_study(tmp_path: Path) -> None:
    table = _link(tmp_path, _report("1.1", "a"), _report("1.2", "b"), _report("1.3", "c"))
    fates = [PACKED, reason_code(Reason.DECODE_FAILED), reason_code(Reason.NO_PIXEL_DATA)]
    table.decide(np.array(fates, np.uint8))
    assert _reasons(table) == [None, "STUDY_QUARANTINED", "REPORT_WITHOUT_STUDY"]


def test_no_reports_at_all(tmp_path: Path) -> None:
    assert len(_link(tmp_path)) == 0


def test_a_cut_file_of_texts_is_noticed(tmp_path: Path) -> None:
    _link(tmp_path, _report("1.1", "long enough"))
    with pytest.raises(StorageError, match="truncated"):
        read_report(tmp_path / "reports.bin", ReportPlace(offset=4, num_bytes=100, people_num_bytes=0))
    (tmp_path / "reports.bin").unlink()
    with pytest.raises(StorageError, match="reading a report text"):
        read_report(tmp_path / "reports.bin", ReportPlace(offset=0, num_bytes=1, people_num_bytes=0))
