"""Report sources: three formats, one kind of record, and no content in what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.format.reasons import Reason
from shardflow.packing.sources import reports
from shardflow.packing.sources.reports import BrokenReport, ReportRecord, iter_reports

pytestmark = pytest.mark.fast


def _plain(found: list[ReportRecord | BrokenReport]) -> list[tuple[object, ...]]:
    return [
        (one.place, one.study_instance_uid, one.text)
        if isinstance(one, ReportRecord)
        else (one.place, one.reason, one.detail)
        for one in found
    ]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_reads_quoted_text_over_lines(tmp_path: Path, mark: bytes, end: str) -> None:
    table = tmp_path / "reports.csv"
    lines = [
        "study_instance_uid,extra,text",
        '1.2,x,"No, ""none"".',
        'Second line."',
        "",
        " 1.3 ,y,H\u00e4matom",
        "",
    ]
    table.write_bytes(mark + end.join(lines).encode("utf-8"))
    assert _plain(list(iter_reports(table, "csv"))) == [
        (2, "1.2", 'No, "none".\nSecond line.'),
        (5, "1.3", "H\u00e4matom"),
    ]


def test_csv_keeps_duplicates_and_names_bad_rows_by_line(tmp_path: Path) -> None:
    table = tmp_path / "reports.csv"
    table.write_bytes(b"Text,Study_Instance_UID\na,1.2\na,1.2\nlonely\n  ,1.4\nb,\nL\xe4nge,1.5\nlast,1.6\n")
    assert _plain(list(iter_reports(table, "csv"))) == [
        (2, "1.2", "a"),
        (3, "1.2", "a"),
        (4, Reason.REPORT_UNREADABLE, "1 columns instead of 2"),
        (5, Reason.EMPTY_REPORT, ""),
        (6, Reason.MISSING_IDENTIFIER, "study_instance_uid"),
        (7, Reason.REPORT_UNREADABLE, "the text is not UTF-8"),
        (8, "1.6", "last"),
    ]


def test_csv_takes_reports_longer_than_the_modules_default(tmp_path: Path) -> None:
    table = tmp_path / "reports.csv"
    table.write_text("study_instance_uid,text\n1.2," + "word " * 40_000 + "\n", encoding="utf-8")
    (record,) = list(iter_reports(table, "csv"))
    assert isinstance(record, ReportRecord)
    assert len(record.text) == 200_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"study_instance_uid,findings\n1,b\n",
            "one column 'text', got 0 among study_instance_uid, findings",
        ),
        (b"1.2.3,SECRET\n1,b\n", "got 0 among what does not look like names"),
        (b"text,text,study_instance_uid\n1,b,c\n", "one column 'text', got 2"),
        (b"", "one column 'study_instance_uid', got 0"),
        (b'study_instance_uid,text\n1,"SECRET\n2,b\n', "well-formed CSV"),
        ("study_instance_uid,text\n".encode("utf-16"), "UTF-8, got UTF-16"),
    ],
)
def test_a_damaged_table_is_refused_as_a_whole(tmp_path: Path, content: bytes, message: str) -> None:
    table = tmp_path / "reports.csv"
    table.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        list(iter_reports(table, "csv"))
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            {"study_id": "1.2", "findings": "SECRET"},
            "got no 'study_instance_uid' among study_id, findings in",
        ),
        ({"study_instance_uid": "1.2", "body": "SECRET"}, "got no 'text' among study_instance_uid, body"),
        ({"1.2.3": "SECRET"}, "among what does not look like names"),
    ],
)
def test_jsonl_without_its_keys_is_refused_by_its_first_line(
    tmp_path: Path, first: dict[str, str], said: str
) -> None:
    table = tmp_path / "reports.jsonl"
    table.write_text(json.dumps(first) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        list(iter_reports(table, "jsonl"))
    assert "SECRET" not in str(caught.value)
    assert "1.2" not in str(caught.value)


def test_jsonl_reads_objects_and_names_bad_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_REPORT_BYTES", 200)
    table = tmp_path / "reports.jsonl"
    good = json.dumps({"study_instance_uid": "1.2", "text": "Clear.\r\nNormal."})
    lines = [
        "\ufeff" + good,
        "",
        "{broken SECRET",
        '["1.2", "text"]',
        '{"study_instance_uid": 12, "text": "a"}',
        '{"study_instance_uid": "1.3", "text": "\\ud800"}',
        "[" * 190,
        json.dumps({"study_instance_uid": "1.4", "text": "x" * 500}),
        json.dumps({"study_instance_uid": "1.5", "text": "end"}),
    ]
    table.write_bytes("\r\n".join(lines).encode("utf-8"))
    found = list(iter_reports(table, "jsonl"))
    assert _plain(found) == [
        (1, "1.2", "Clear.\nNormal."),
        (3, Reason.REPORT_UNREADABLE, "no JSON: JSONDecodeError"),
        (4, Reason.REPORT_UNREADABLE, "no object with the strings study_instance_uid and text"),
        (5, Reason.REPORT_UNREADABLE, "no object with the strings study_instance_uid and text"),
        (6, Reason.REPORT_UNREADABLE, "the text is not UTF-8"),
        (7, Reason.REPORT_UNREADABLE, "no JSON: JSONDecodeError"),
        (8, Reason.LIMIT_EXCEEDED, "a line of more than 200 bytes"),
        (9, "1.5", "end"),
    ]


def test_folder_takes_text_files_by_their_name_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "1.3.txt").write_bytes(b"\xef\xbb\xbfSecond.\r\n")
    (tmp_path / "1.2.txt").write_bytes(b"First.")
    (tmp_path / "1.4.txt").write_bytes(b" \n")
    (tmp_path / "1.5.txt").write_bytes(b"L\xe4nge")
    (tmp_path / "README.md").write_bytes(b"read me")
    (tmp_path / "sub.txt").mkdir()
    assert _plain(list(iter_reports(tmp_path, "folder"))) == [
        (1, "1.2", "First."),
        (2, "1.3", "Second.\n"),
        (3, Reason.EMPTY_REPORT, ""),
        (4, Reason.REPORT_UNREADABLE, "the text is not UTF-8"),
        (5, Reason.NOT_REPORT, ""),
        (6, Reason.NOT_REPORT, ""),
    ]


def test_records_are_read_one_at_a_time(tmp_path: Path) -> None:
    table = tmp_path / "reports.csv"
    table.write_bytes(b'study_instance_uid,text\n1.2,first\n1.3,"never closed\n')
    records = iter_reports(table, "csv")
    assert next(records) == ReportRecord(study_instance_uid="1.2", text="first", place=2)
    with pytest.raises(ConfigError):
        next(records)


@pytest.mark.parametrize(
    ("name", "kind"), [("absent", "csv"), ("absent", "folder"), ("file", "folder"), ("", "jsonl")]
)
def test_a_missing_source_is_an_error_of_configuration(
    tmp_path: Path, name: str, kind: reports.ReportFormat
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="the reports must be a") as caught:
        list(iter_reports(tmp_path / name, kind))
    assert str(tmp_path) not in str(caught.value)


def test_an_unknown_format_is_an_error_of_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_bytes(b"")
    with pytest.raises(ConfigError, match="one of csv, folder, jsonl"):
        list(iter_reports(tmp_path / "a.xml", "xml"))  # type: ignore[arg-type]


def test_no_identifier_or_text_in_a_representation() -> None:
    record = ReportRecord(study_instance_uid="1.2.SENTINEL", text="SENTINEL", place=7)
    broken = BrokenReport(place=3, reason=Reason.EMPTY_REPORT, detail="", study_instance_uid="1.2.SENTINEL")
    assert "SENTINEL" not in f"{record!r} {record} {broken!r} {broken}"
