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


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        (
            "TECHNIQUE: Axial CT.\nPULMONARY EMBOLISM: Acute embolus in the right main pulmonary artery.",
            ["technique", "other"],
            ["pulmonary embolism present"],
        ),
        (
            "TECHNIQUE: Axial CT.\nPULMONARY EMBOLISM: None.",
            ["technique", "findings"],
            ["pulmonary embolism absent"],
        ),
        (
            "COMPARISON: CT 2019.\nPNEUMOTHORAX: Small right pneumothorax.",
            ["comparison", "other"],
            ["pneumothorax present"],
        ),
        (
            "COMPARISON: CT 2019.\nPNEUMOTHORAX: Small right.",
            ["comparison", "findings"],
            ["pneumothorax present"],
        ),
        (
            "RECOMMENDATION: Follow up.\nLUNG NODULE: 4 mm",
            ["recommendation", "findings"],
            ["pulmonary nodule present"],
        ),
        (
            "IMPRESSION:\nPNEUMONIA: Likely.\nCOPD: Stable, on the right.",
            ["impression"],
            ["pneumonia uncertain", "chronic obstructive pulmonary disease present"],
        ),
        (
            "FINDINGS:\nEDEMA: None.\nPULMONARY EMBOLISM: There is no filling defect.\nNODULE: New.",
            ["findings", "other", "findings"],
            ["edema absent", "filling defect absent", "nodule present"],
        ),
        ("HEMORRHAGE: There is no evidence of intracranial blood.", ["other"], ["blood absent"]),
        ("AORTIC ANEURYSM: The aorta is normal in caliber.", ["other"], []),
        ("AORTIC ANEURYSM: Aorta 3.2 cm.", ["other"], []),
        ("HYDRONEPHROSIS: Kidneys are normal.", ["other"], []),
        ("HYDRONEPHROSIS: None on the right, mild on the left.", ["other"], []),
        ("FRACTURES: Intact ribs.", ["other"], []),
        ("CT PULMONARY EMBOLISM: Negative.", ["examination"], []),
        ("CORONARY CALCIFICATION: 0", ["findings"], ["coronary calcification absent"]),
        ("PNEUMOTHORAX: N/A", ["other"], []),
        ("PNEUMOTHORAX: Not applicable.", ["other"], []),
        ("PNEUMOTHORAX: Normal", ["findings"], ["pneumothorax absent"]),
        ("PNEUMOTHORAX:\nNone.", ["other"], []),
        ("PNEUMOTHORAX: None seen on this study.", ["findings"], ["pneumothorax absent"]),
        ("HYDRONEPHROSIS: Absent right kidney.", ["other"], []),
        ("HISTORY OF STROKE: None.", ["other"], []),
        ("PNEUMOTHORAX: Yes.", ["findings"], ["pneumothorax present"]),
        ("LUNG NODULE: 4 mm in the right upper lobe, new.", ["findings"], ["pulmonary nodule present"]),
    ],
)
def test_a_short_answer_makes_a_finding_of_a_name_in_capitals(
    text: str, expected: list[str], found: list[str]
) -> None:
    assert kinds(text) == expected
    assert [f"{one.concept} {one.assertion}" for one in ReportReader().read(text).entities] == found


def test_an_answered_finding_is_of_no_organ_before_it() -> None:
    text = "LUNGS: Clear.\nSCOLIOSIS: Mild."
    sections = split_sections(text)
    assert [(one.kind, one.part) for one in sections] == [("findings", "lung"), ("findings", "")]
    assert text[slice(*sections[1].body)] == "SCOLIOSIS: Mild."
    (found,) = ReportReader().read(text).entities
    assert (found.anatomy, found.severity) == (None, "mild")


def test_without_findings_the_last_paragraph_is_them() -> None:
    text = "EXAM: Chest\nHISTORY: Cough\n\nThe lungs are clear.\n"
    sections = split_sections(text)
    assert [section.kind for section in sections] == ["examination", "indication", "findings"]
    assert body(text, sections[-1]) == "The lungs are clear."
    assert kinds("The lungs are clear.") == ["findings"]
    assert kinds("") == []
