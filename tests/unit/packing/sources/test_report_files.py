"""Reports in PDF and RTF: their text, or the outcome that says why there is none."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.errors import ConfigError, SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.sources import reports
from shardflow.packing.sources.documents.reports import iter_document_reports
from shardflow.packing.sources.reports import BrokenReport, ReportRecord, iter_reports, read_pdf, read_rtf
from tests.record_case import make_pdf

pypdf = pytest.importorskip("pypdf")
pytest.importorskip("striprtf")
pytestmark = pytest.mark.fast

RTF = (
    rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}{\*\generator Some Word 11;}"
    rb"\f0\b FINDINGS:\b0\par Kein Pleuraerguss. Gr\'f6\'dfe normal.\par \u8804? 5 mm}"
)


def locked(data: bytes, password: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(data))
    writer.encrypt(password, owner_password="owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def read_now(record: ReportRecord | BrokenReport) -> ReportRecord | BrokenReport:
    """Do what the job and its packing processes do."""
    if isinstance(record, BrokenReport) or record.document is None:
        return record
    try:
        return record.completed(record.document.read())
    except SourceError as error:
        return record.completed("", error.reason)


def reason(data: bytes) -> str:
    with pytest.raises(SourceError) as raised:
        read_pdf(data)
    return raised.value.reason


def test_the_text_of_all_pages_is_read() -> None:
    text = read_pdf(make_pdf("FINDINGS:\nNo effusion.", "IMPRESSION:\nA nodule."))
    assert text.split() == ["FINDINGS:", "No", "effusion.", "IMPRESSION:", "A", "nodule."]
    assert text.index("\n\n") < text.index("IMPRESSION")
    assert [line.strip() for line in text.split("\n") if line.strip()][1] == "No effusion."


def test_a_pdf_that_cannot_serve_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_pdf("No effusion.")
    assert reason(locked(report, "secret")) == Reason.REPORT_ENCRYPTED
    assert read_pdf(locked(report, "")) == "No effusion."  # locked against changes alone
    assert reason(make_pdf("", "")) == Reason.REPORT_WITHOUT_TEXT
    assert reason(b"%PDF-1.4 and nothing else") == Reason.REPORT_UNREADABLE
    assert reason(b"") == Reason.REPORT_UNREADABLE
    monkeypatch.setattr(reports, "MAX_PAGES", 1)
    assert reason(make_pdf("One.", "Two.")) == Reason.LIMIT_EXCEEDED


def test_characters_of_two_escapes_are_one() -> None:
    assert read_rtf(rb"{\rtf1\ansi Lungs clear \u55357?\u56842? today.}").split() == [
        "Lungs",
        "clear",
        "\U0001f60a",
        "today.",
    ]


def test_the_text_of_an_rtf_is_read_in_its_code_page() -> None:
    lines = [line.strip() for line in read_rtf(RTF).split("\n")]
    assert lines == ["FINDINGS:", "Kein Pleuraerguss. Gr\u00f6\u00dfe normal.", "\u2264 5 mm"]
    with pytest.raises(SourceError) as raised:
        read_rtf(b"FINDINGS: none")
    assert raised.value.reason == Reason.REPORT_UNREADABLE


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pypdf", "striprtf.striprtf"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for read, package in ((read_pdf, "pypdf"), (read_rtf, "striprtf")):
        with pytest.raises(ConfigError, match=rf"need {package}; install shardflow\[documents\]"):
            read(b"")


def test_files_of_a_folder_are_reports_of_the_study_that_they_are_named_by(tmp_path: Path) -> None:
    report = make_pdf("No effusion.")
    for name, data in {
        "1.2.1.pdf": report,
        "1.2.2.PDF": locked(report, "secret"),
        "1.2.3.pdf": make_pdf(""),
        "1.2.4.rtf": RTF,
        "1.2.5.txt": b"Clear.",
        "1.2.6.doc": b"x",
    }.items():
        (tmp_path / name).write_bytes(data)
    found = [read_now(one) for one in iter_reports(tmp_path, "folder")]
    texts = {one.study_instance_uid: one.text for one in found if isinstance(one, ReportRecord)}
    broken = {one.study_instance_uid: one.reason for one in found if isinstance(one, BrokenReport)}
    assert texts["1.2.1"] == "No effusion."
    assert "Kein Pleuraerguss" in texts["1.2.4"]
    assert texts["1.2.5"] == "Clear."
    assert broken == {
        "1.2.2": Reason.REPORT_ENCRYPTED, "1.2.3": Reason.REPORT_WITHOUT_TEXT, "": Reason.NOT_REPORT
    }  # fmt: skip
    records = map(read_now, iter_document_reports(tmp_path))
    again = {one.study_instance_uid for one in records if isinstance(one, ReportRecord)}
    assert again == texts.keys()


def test_what_a_message_says_beside_its_document_follows_once() -> None:
    record = ReportRecord(study_instance_uid="", text="IMPRESSION:\nA nodule.\n", place=1, accessions=("7",))
    for text, said in (
        ("No effusion.", "No effusion.\n\nIMPRESSION:\nA nodule.\n"),
        ("No effusion. A\n nodule.", "No effusion. A\n nodule."),
    ):
        done = record.completed(text)
        assert isinstance(done, ReportRecord)
        assert (done.text, done.accessions) == (said, ("7",))
    alone = record.completed("", Reason.REPORT_WITHOUT_TEXT)
    assert isinstance(alone, ReportRecord)
    assert alone.text == record.text
    nothing = replace(record, text="").completed("", Reason.REPORT_WITHOUT_TEXT)
    assert isinstance(nothing, BrokenReport)
    assert nothing.reason is Reason.REPORT_WITHOUT_TEXT
    empty = replace(record, text="").completed(" \n")
    assert isinstance(empty, BrokenReport)
    assert empty.reason is Reason.EMPTY_REPORT
