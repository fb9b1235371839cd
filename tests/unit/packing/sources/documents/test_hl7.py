"""HL7v2: escapes, wrapped and joined segments, orders and their texts; real messages were read by hand."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shardflow.format.reasons import Reason
from shardflow.packing.sources.documents.facts import DocumentReport, NoReport
from shardflow.packing.sources.documents.hl7 import (
    Separators,
    decode_message,
    group_facts,
    read_hl7_reports,
    read_messages,
    unescape,
)
from tests.record_case import make_pdf

pytestmark = pytest.mark.fast

LETTERS = st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f\x85\xa0")
PLAIN = st.text(alphabet=LETTERS)
ROWS = st.lists(st.lists(PLAIN, min_size=1, max_size=6), min_size=1, max_size=6)
BEGINS = re.compile(r"[ \t|](?:(?:PID|PV1|OBR|NTE|NK1)\|\d{0,4}\||MSH\||ORC\||ZDS\||OBX\|)")
NAMES = {"|": "F", "^": "S", "&": "T", "~": "R", "\\": "E"}


def escape(text: str) -> str:
    return "".join(f"\\{NAMES[sign]}\\" if sign in NAMES else sign for sign in text)


@given(PLAIN)
def test_escaped_texts_come_back(text: str) -> None:
    assert unescape(escape(text)) == text


@given(ROWS, st.sampled_from(["\r", "\n", "\r\n"]))
@example([["NTE", ""]], "\r")
@example([["PID", "17"], ["see OBR", "NTE"]], "\n")
@example([["MSH", "ORU"], ["ORC", ""], ["ZDS", "3"]], "\r\n")
def test_segments_come_back_with_any_line_end(rows: list[list[str]], end: str) -> None:
    lines = ["MSH|^~\\&|A", *("|".join(["ZZZ", *map(escape, row)]) for row in rows)]
    assume(not any(BEGINS.search(line) for line in lines[1:]))  # as segments that were put on one line
    (message,) = read_messages(end.join(lines) + end)
    found = [[segment.plain(one) for one in segment.fields] for segment in message.of("ZZZ")]
    assert found == [[one.strip() for one in row] for row in rows]


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(data: bytes) -> None:
    for found in read_hl7_reports(b"MSH|^~\\&|\r" + data):
        assert isinstance(found, (DocumentReport, NoReport))


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"one\.br\two", "one\ntwo"),
        (r"one\.sp3\two", "one\n\n\ntwo"),
        ("one\\.sk2\\two\\.in+4\\", "one  two"),
        (r"\H\bold\N\ \Zx\end", "bold end"),
        (r"\X48C3A4\ \X0D0A\.", "H\u00e4 \n."),
        (r"\XABC\ odd", " odd"),
        (r"C:\dir and 5\6", r"C:\dir and 5\6"),
    ],
)
def test_escapes(escaped: str, text: str) -> None:
    assert unescape(escaped) == text


def test_other_separators_are_taken_from_the_header() -> None:
    (message,) = read_messages("MSH#*@!%#A\rPID###17*x*y@18*%\r")
    pid = next(message.of("PID"))
    assert [parts[0] for parts in pid.components(3)] == ["17", "18"]
    separators = Separators(field="#", component="*", repetition="@", escape="!", subcomponent="%")
    assert unescape("a!T!b!F!", separators) == "a%b#"


def message(*segments: str) -> bytes:
    head = r"MSH|^~\&|RIS|HOSP|||20240301120000||ORU^R01|1|P|2.5.1"
    return "\r".join([head, "PID|1||4711^^^H^MR~999-12-3456^^^^SS||Okafor^Ada", *segments]).encode()


def one(*segments: str) -> DocumentReport | NoReport:
    (found,) = read_hl7_reports(message(*segments))
    return found


def reason(*segments: str) -> Reason:
    found = one(*segments)
    assert isinstance(found, NoReport)
    return found.reason


def test_report_of_an_order() -> None:
    found = one(
        "OBR|1|P1|F1|71020^CHEST^C4|||20240229081500|||||||||||ACC9|||||||F",
        "OBX|1|TX|71020&GDT^Findings||Lungs are clear.~Heart \\T\\ vessels normal.||||||F",
        "OBX|2|FT|71020&IMP^Impression||Normal.\\.br\\No change.||||||F",
        "OBX|3|ST|113014^DICOM Study^DCM||1.2.840.1.5||||||F",
    )
    assert isinstance(found, DocumentReport)
    assert found.text == (
        "FINDINGS:\nLungs are clear.\nHeart & vessels normal.\n\nIMPRESSION:\nNormal.\nNo change.\n"
    )
    assert found.status == "final"
    assert found.facts.study_uids == ["1.2.840.1.5"]
    assert found.facts.accessions == ["ACC9", "F1"]
    assert found.facts.patient_ids == ["4711", "999-12-3456"]
    assert str(found.facts.time) == "2024-02-29 08:15:00"


def _numbers(event: str, *segments: str) -> list[tuple[str, str]]:
    head = f"MSH|^~\\&|ADT|HOSP|||20240301||{event}|1|P|2.5.1"
    (found,) = read_messages("\r".join([head, *segments]))
    return [(one.number, one.issuer) for one in group_facts(found, []).patient_numbers]


def test_the_numbers_of_a_patient_are_listed_with_their_issuers() -> None:
    numbers = "4711^^^H&1.2&ISO^MR~B-2^^^&1.3&ISO^PI~999-12-3456^^^^SS~V9^^^H^VN~A9^^^H^AN~D1^^^^DL"
    pid, merged = f"PID|1|X5|{numbers}||Okafor^Ada", "MRG|0815^^^H^MR~V8^^^H^VN"
    listed = [("4711", "H"), ("B-2", "1.3")]
    assert _numbers("ADT^A08", pid, merged) == listed
    assert _numbers("ADT^A40^ADT_A39", pid, merged) == [*listed, ("0815", "H")]
    # Two patients in one message are two people: they are swapped, or linked as mother and child.
    assert _numbers("ADT^A24", pid, "PID|2||0815^^^H^MR") == []
    # A number of no issuer and no type may be an account beside others that have a type.
    assert _numbers("ADT^A08", "PID|1|X5|4711^^^H~B2||Okafor^Ada") == [("4711", "H"), ("B2", ""), ("X5", "")]
    social = "PID|1||4711^^^H^MR~9^^^SSA&2.16.840.1.113883.4.1&ISO"
    assert _numbers("ADT^A08", social) == [("4711", "H")]
    # A visit that is moved leaves somebody else's number.
    assert _numbers("ADT^A45", pid, merged) == listed


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("F", "final"),
        ("P", "preliminary"),
        ("C", "corrected"),
        ("Final", "final"),
        ("A", "preliminary"),
        ("", "final"),
    ],
)
def test_status_of_a_report(status: str, expected: str) -> None:
    found = one(f"OBR|1|P1|F1||||||||||||||||||||||{status}", "OBX|1|TX|1||Clear.")
    assert isinstance(found, DocumentReport)
    assert found.status == expected


def test_what_is_cancelled_wrong_or_no_text_gives_no_report() -> None:
    assert reason("OBR|1||F1||||||||||||||||||||||X", "OBX|1|TX|1||Clear.") is Reason.REPORT_WITHDRAWN
    assert reason("OBR|1||F1", "OBX|1|TX|1||Clear.||||||W") is Reason.EMPTY_REPORT
    assert reason("OBR|1||F1", "OBX|1|NM|718-7^Hb^LN||13.2|g/dL") is Reason.NOT_REPORT
    assert reason("OBR|1||F1", "OBX|1|ED|X||H^image^png^Base64^iVBORw0=||||||F") is Reason.NOT_REPORT
    assert reason("OBR|1||F1", "OBX|1|ED|PDF||H^application^pdf^Hex^2550||||||F") is Reason.NOT_REPORT
    assert reason("OBR|1||F1", "OBX|1|ED|PDF||H^application^pdf^Base64^JVBERi0=||||||W") is Reason.NOT_REPORT


def test_a_pdf_is_the_report_of_an_order_without_narrative() -> None:
    data = base64.b64encode(make_pdf("No effusion.")).decode()
    pdf = f"OBX|2|ED|PDF||RIS^AP^PDF^Base64^{data}||||||F"
    found = one("OBR|1||F1|||||||||||||||||||||C", "OBX|1|NM|1^Dose||3|mSv", pdf)
    assert isinstance(found, DocumentReport)
    assert found.document is not None
    assert (found.text, found.document.read()) == ("Dose: 3 mSv\n", "No effusion.")
    both = one("OBR|1||F1", "OBX|1|TX|1||Clear.", pdf)
    assert isinstance(both, DocumentReport)
    assert (both.text, both.document) == ("Clear.\n", None)


def test_text_in_base_64_is_read() -> None:
    found = one("OBR|1||F1", "OBX|1|ED|18782-3^Report^LN||H^text^plain^Base64^Tm8gZWZmdXNpb24u||||||F")
    assert isinstance(found, DocumentReport)
    assert found.text == "FINDINGS:\nNo effusion.\n"


def test_addenda_and_several_orders() -> None:
    found = list(
        read_hl7_reports(
            message(
                "ORC|RE|P1|F1",
                "OBR|1|P1|F1|||||||||||||||||||||||F",
                "OBX|1|TX|X&GDT||First.||||||F",
                "ORC|RE|P2|F2",
                "OBR|2|P2|F2",
                "OBX|1|TX|55107-7^Addendum^LN||Second.||||||F",
            )
        )
    )
    assert [(one.status, one.text) for one in found if isinstance(one, DocumentReport)] == [
        ("final", "FINDINGS:\nFirst.\n"),
        ("addendum", "ADDENDUM:\nSecond.\n"),
    ]


RESULTED = """FINDINGS:
X-ray suspected Clavicle fx. The quality of the film was good.

IMPRESSION:
Abnormal, Fracture Present
Left lateral; surgery required
"""
EXAMPLE = """IMPRESSION:
Iinfiltrate right lower lobe
Heart size normal

FINDINGS:
circular density (2 x 2 cm) is seen in the posterior
segment of... the LLL.
A second, less well\u2011defined infiltrated circulation density is seen in the R mid lung field and \
appears to cross the minor fissure.

RECOMMENDATION:
Follow up CXR 1 month
"""
EMERGENCY = "[PII] Emergency Department\nED Encounter Arrival Date: [ADDRESS] [PERSONALNAME]:\n"
# What stands in the real files, read by hand.
REAL = {
    "oru/Example2.txt": (["78912"], [], EXAMPLE),
    "oru/OrderResulted.txt": (["2223"], ["417601"], RESULTED),
    "src/test/resources/ORU-multiline-short.hl7": (["FON_0d70c6c8"], ["0d70c6c8"], EMERGENCY),
}


@pytest.mark.parametrize("name", sorted(REAL))
def test_real_reports(shared_data: Path, name: str) -> None:
    (found,) = read_hl7_reports((shared_data / "hl7v2" / name).read_bytes())
    assert isinstance(found, DocumentReport)
    assert (found.facts.accessions, found.facts.patient_ids, found.text) == REAL[name]


def test_real_messages_that_are_none(shared_data: Path) -> None:
    for name in (
        "oru/OrderPlaced.txt",
        "src/test/resources/sample_unix.hl7",
        "src/test/resources/sample_win.hl7",
    ):
        found = list(read_hl7_reports((shared_data / "hl7v2" / name).read_bytes()))
        assert [one.reason for one in found if isinstance(one, NoReport)] == [Reason.NOT_REPORT]


def test_real_studies_and_people(shared_data: Path) -> None:
    (found,) = read_hl7_reports((shared_data / "hl7v2/oru/Example3.txt").read_bytes())
    assert found.facts is not None
    assert found.facts.study_uids == [
        "1.2.840.113532.7.7345.3453445346802.34534",
        "1.2.840.113532.7.7345.3453429928107.982106",
    ]
    (found,) = read_hl7_reports((shared_data / "hl7v2/oru/OrderResulted.txt").read_bytes())
    assert found.facts is not None
    people = found.facts.people.values()
    assert people["PatientName"] == ("TEST PATIENT B",)
    assert {"OLSON LUCAS", "KEESLER CHRISTIAN J"} <= set(people["PersonName"])
    assert people["PatientBirthDate"] == ("20031026",)
    assert "123 MAIN ST" in people["InstitutionName"]


def test_bytes_that_are_no_utf8_are_latin_1() -> None:
    assert decode_message("H\u00e4matom".encode("latin-1")) == "H\u00e4matom"
    assert decode_message("H\u00e4matom".encode()) == "H\u00e4matom"
