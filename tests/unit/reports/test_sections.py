"""Reports are cut at their headers, and the sections cover the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.reports import ReportReader, Section, split_sections

pytestmark = pytest.mark.fast

REPORT = """                                 FINAL REPORT
EXAMINATION: CT CHEST WITH CONTRAST

INDICATION:  Cough, rule out pneumonia.

COMPARSION: CT from January.

TECHNIQUE: Axial images.

FINDINGS:
LUNGS: A nodule.
Heart and pericardium: Normal.
IMPRESION:
1. Nodule. RECOMMENDATION: CT in 3 months.

ADDENDUM 1: Discussed.
"""

headers = st.sampled_from(
    [
        "FINDINGS:",
        "Impression",
        "LIVER:",
        "ADDENDUM:",
        "XYZ QWE:",
        "exam:",
        "\n\n",
        "\n",
        " - ",
        "1.",
        "No.",
        ": ",
        "\x85",
    ]
)
texts = st.one_of(st.text(max_size=200), st.lists(st.one_of(headers, st.text(max_size=8))).map("".join))


def kinds(text: str) -> list[str]:
    return [section.kind for section in split_sections(text)]


def body(text: str, section: Section) -> str:
    return text[slice(*section.body)].strip()


def test_a_report_falls_into_its_sections() -> None:
    sections = split_sections(REPORT)
    assert [section.kind for section in sections] == [
        "examination",
        "examination",
        "indication",
        "comparison",
        "technique",
        "findings",
        "findings",
        "findings",
        "impression",
        "recommendation",
        "addendum",
    ]
    assert [section.part for section in sections if section.part] == ["lung", "heart"]
    assert body(REPORT, sections[6]) == "A nodule."
    assert body(REPORT, sections[8]) == "1. Nodule."


@given(texts)
@settings(max_examples=150, deadline=None)
def test_sections_cover_any_text_in_order(text: str) -> None:
    sections = split_sections(text)
    assert "".join(text[slice(*section.span)] for section in sections) == text
    for section in sections:
        assert section.span[0] == section.header[0] <= section.header[1] <= section.span[1]


def test_a_second_examination_begins_behind_findings() -> None:
    text = "CT HEAD:\nFINDINGS: Normal.\nIMPRESSION: Normal.\nCT NECK:\nFINDINGS: A cyst.\n"
    assert [(section.kind, section.exam) for section in split_sections(text)] == [
        ("examination", 0),
        ("findings", 0),
        ("impression", 0),
        ("examination", 1),
        ("findings", 1),
    ]


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("Clinical history:", "indication"),
        ("REASON FOR EXAM:", "indication"),
        ("FINDINGS AND IMPRESSION:", "findings_impression"),
        ("FIDNINGS:", "findings"),
        ("IMPRESSSION:", "impression"),
        ("CONCLUSION -", "impression"),
        ("Prior studies:", "comparison"),
        ("**ADDENDUM**:", "addendum"),
        ("Befund:", "findings"),
        ("WHATEVER THIS IS:", "other"),
    ],
)
def test_names_of_sections(header: str, kind: str) -> None:
    assert kinds(f"{header} Words of it.\n") == [kind]


def test_a_name_alone_on_its_line_is_a_header() -> None:
    assert kinds("FINDINGS\nA cyst.\n\nImpression\nCyst.\n") == ["findings", "impression"]


def test_a_sentence_is_no_header() -> None:
    text = "FINDINGS: There is one thing: a cyst.\nthe following was seen: a cyst\n"
    assert kinds(text) == ["findings"]


def test_a_finding_in_capitals_is_answered_by_its_line() -> None:
    text = "FINDINGS:\nPNEUMOTHORAX: None.\nPE: Negative.\nLINES AND TUBES: Chest tube.\nPROSE: x\n"
    assert kinds(text) == ["findings", "findings", "other"]
    found = ReportReader().read(text).entities
    assert [(one.concept, one.assertion) for one in found] == [
        ("pneumothorax", "absent"),
        ("pulmonary embolism", "absent"),
        ("chest tube", "present"),
    ]


def test_without_findings_the_last_paragraph_is_them() -> None:
    text = "EXAM: Chest\nHISTORY: Cough\n\nThe lungs are clear.\n"
    sections = split_sections(text)
    assert [section.kind for section in sections] == ["examination", "indication", "findings"]
    assert body(text, sections[-1]) == "The lungs are clear."
    assert kinds("The lungs are clear.") == ["findings"]
    assert kinds("") == []
