"""Rules over headers: which images are held back, blanked or taken for a head."""

from __future__ import annotations

import pytest

from shardflow.errors import ConfigError
from shardflow.packing.deid.pixel_rules import PixelRules, load_rules

pytestmark = pytest.mark.fast

_CT = {
    "SOPClassUID": ("1.2.840.10008.5.1.4.1.1.2",),
    "Modality": ("CT",),
    "ImageType": ("ORIGINAL", "PRIMARY", "AXIAL"),
    "PhotometricInterpretation": ("MONOCHROME2",),
}
RULES: PixelRules = load_rules()
_SITE = """
[[blackout]]
name = "corner"
when = { Modality = ["US"], Rows = ["600"] }
boxes = [[0, 0, 60, 800]]
clears = ["ultrasound", "ultrasound_class"]
"""


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ()),
        ({"BurnedInAnnotation": ("NO",)}, ()),
        ({"BurnedInAnnotation": ("YES",)}, ("declared",)),
        ({"ImageType": ("DERIVED", "SECONDARY", "SCREEN SAVE")}, ("screen_save",)),
        ({"ImageType": ("DERIVED", "PRIMARY", "AXIAL", "CT_SOM5 PROT", "DOSE_INFO")}, ("screen_save",)),
        ({"SeriesDescription": ("Dose Report",)}, ("report_page",)),
        ({"SeriesDescription": ("CHEST 1.0 B30F",)}, ()),
        ({"SOPClassUID": ("1.2.840.10008.5.1.4.1.1.7",)}, ("secondary_capture",)),
        ({"SOPClassUID": ("1.2.840.10008.5.1.4.1.1.7.4",)}, ("secondary_capture",)),
        ({"SOPClassUID": ("1.2.840.10008.5.1.4.1.1.77.1.1",)}, ()),
        ({"ConversionType": ("WSD",)}, ("converted",)),
        ({"Modality": ("US",)}, ("ultrasound",)),
        ({"Modality": ("RF",)}, ("fluoroscopy",)),
        ({"Modality": ("ES",)}, ("photography",)),
        ({"PhotometricInterpretation": ("RGB",)}, ("colour_slices",)),
        ({"ImageType": ("DERIVED", "SECONDARY", "VOLREN")}, ("rendering",)),
    ],
)
def test_what_is_held_back(changes: dict[str, tuple[str, ...]], names: tuple[str, ...]) -> None:
    verdict = load_rules().judge({**_CT, **changes}, accept=(), trusts_no=False)
    assert verdict.held_back == names


def test_a_declared_no_counts_only_where_it_is_trusted_and_never_against_a_proof() -> None:
    rules = load_rules()
    said_no = {**_CT, "Modality": ("US",), "BurnedInAnnotation": ("NO",)}
    assert rules.judge(said_no, accept=(), trusts_no=False).held_back == ("ultrasound",)
    assert rules.judge(said_no, accept=(), trusts_no=True).held_back == ()
    saved = {**said_no, "ImageType": ("SCREEN SAVE",)}
    assert rules.judge(saved, accept=(), trusts_no=True).held_back == ("screen_save",)


def test_an_accepted_rule_is_named() -> None:
    verdict = load_rules().judge({**_CT, "Modality": ("US",)}, accept=("ultrasound",), trusts_no=False)
    assert (verdict.held_back, verdict.accepted) == ((), ("ultrasound",))


def test_a_blackout_answers_the_rules_that_it_names_and_no_others() -> None:
    rules = load_rules(_SITE)
    image = {**_CT, "Modality": ("US",), "Rows": ("600",)}
    verdict = rules.judge(image, accept=(), trusts_no=False)
    assert verdict.held_back == ()
    assert verdict.blackout is not None
    assert verdict.blackout.boxes == ((0, 0, 60, 800),)
    assert rules.judge({**image, "Rows": ("480",)}, accept=(), trusts_no=False).held_back == ("ultrasound",)
    declared = {**image, "BurnedInAnnotation": ("YES",)}
    assert rules.judge(declared, accept=(), trusts_no=False).held_back == ("declared",)


def test_a_parametric_map_is_no_photograph() -> None:
    image = {**_CT, "Modality": ("OT",)}
    assert load_rules().judge(image, accept=(), trusts_no=False).held_back == ("photography",)
    image["SOPClassUID"] = ("1.2.840.10008.5.1.4.1.1.30",)
    assert load_rules().judge(image, accept=(), trusts_no=False).held_back == ()


@pytest.mark.parametrize(
    ("changes", "is_head"),
    [
        ({"BodyPartExamined": ("HEAD",)}, True),
        ({"BodyPartExamined": ("Brain",)}, True),
        ({"BodyPartExamined": ("CHEST",)}, False),
        ({"StudyDescription": ("CT HEAD W/O CONTRAST",)}, True),
        ({"StudyDescription": ("CT femoral head",), "Modality": ("DX",)}, False),
        ({"SeriesDescription": ("T1 MPRAGE",)}, True),
        ({"RecognizableVisualFeatures": ("YES",)}, True),
        ({"StudyDescription": ("MR HEAD",), "Modality": ("OT",)}, True),
        ({"StudyDescription": ("PET-CT Kopf-Oberschenkel",), "BodyPartExamined": ("HEAD",)}, True),
        ({"StudyDescription": ("TC craneo, cara anterior",), "BodyPartExamined": ("HEAD",)}, True),
        ({"StudyDescription": ("cabeza femoral",), "BodyPartExamined": ("HEAD",)}, True),
        ({"StudyDescription": ("TC CABEZA",), "SeriesDescription": ("CARA LATERAL IZQ",)}, True),
        ({"StudyDescription": ("CT face",), "SeriesDescription": ("articular face view",)}, True),
        ({"StudyDescription": ("CT hip",), "SeriesDescription": ("articular face view",)}, False),
    ],
)
def test_what_is_a_head(changes: dict[str, tuple[str, ...]], is_head: bool) -> None:
    assert bool(load_rules().judge({**_CT, **changes}, accept=(), trusts_no=False).face) is is_head


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[[burned_in]]\nname = 'x'", "the keys name, verdict"),
        ("[[burned_in]]\nname = 'x'\nverdict = 'perhaps'\nwhen = { Modality = ['US'] }", "dirty or suspect"),
        ("[[burned_in]]\nname = 'x'\nverdict = 'dirty'\nwhen = {}", "a condition"),
        (
            "[[burned_in]]\nname = 'x'\nverdict = 'dirty'\nwhen = { Modality = ['('] }",
            "expressions that compile",
        ),
        ("[[burned_in]]\nname = 'x'\nverdict = 'dirty'\nwhen = { Modality = 'US' }", "a list of expressions"),
        ("[[burned_in]]\nname = 'ultrasound'\nverdict = 'dirty'\nwhen = { Rows = ['1'] }", "used once"),
        (_SITE.replace("[[0, 0, 60, 800]]", "[[60, 0, 0, 800]]"), "boxes"),
        (_SITE.replace('"ultrasound_class"', '"nothing"'), "names of rules"),
        (_SITE.replace("blackout", "blackouts"), "must be tables"),
        ("[[", "not valid TOML"),
    ],
)
def test_a_table_that_says_something_else_is_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_rules(text)


def test_accepting_what_is_no_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"which is no rule for burned-in text"):
        load_rules().check_names(["ultrasounds"])


@pytest.mark.parametrize(
    "text",
    [
        "t1_mprage_sag",
        "MEMPRAGE",
        "CT_HEAD_WO",
        "3D_BRAVO",
        "CTHead",
        "MRT Schaedel",
        "MRT Sch\xe4del",
        "IRM cerebrale",
        "TC cr\xe1neo",
        "ax_T2_FLAIR_fs",
        "Ganzk\xf6rperMRT",
        "\u5934\u9885CT",
        "\u982d\u90e8",
        "\ub1cc MRI",
        "CCT nativ",
        "fMRI_rest",
        "Stroke protocol",
        "CT caput",
        "Mittelgesicht",
        "TK g\u0142owy",
        "MR hj\xe4rna",
        "hlava",
        "koponya CT",
        "\u03b5\u03b3\u03ba\u03b5\u03c6\u03ac\u03bb\u03bf\u03c5",
        "\u0627\u0644\u0631\u0623\u0633",
        "\u0926\u093f\u092e\u093e\u0917",
        "CT \u0e2b\u0e31\u0e27",
        "\u041c\u0420\u0422 \u0433\u043e\u043b\u043e\u0432\u043d\u043e\u0433\u043e",
        "PET-CT Kopf-Oberschenkel",
        "PET/CT Hals - Oberschenkel",
        "CT Hals/Oberschenkel Angio",
        "TC CABEZA, CARA LATERAL IZQ",
        "CT face, articular face view",
        "femoral head and brain",
        "cara anterior",
        "\u0631\u0627\u0633",
        "\u0631\u0623\u0633",
        "\u062f\u0645\u0627\u063a",
        "\u0627\u0644\u062f\u0645\u0627\u063a",
        "CT huvudet",
        "hodet",
        "hovedet",
        "\u0938\u093f\u0930",
        "CT mozku",
    ],
)
def test_a_head_is_known_by_words_in_several_languages(text: str) -> None:
    for keyword in ("SeriesDescription", "StudyDescription", "ProtocolName"):
        assert RULES.judge({"Modality": ("MR",), keyword: (text,)}, accept=(), trusts_no=False).face == (
            "head",
        )


@pytest.mark.parametrize(
    "text",
    [
        "CT hip femoral neck",
        "head of pancreas",
        "overhead",
        "LSPINE",
        "Thorax",
        "kneeface2x",
        "220FOV",
        "t\xeate f\xe9morale",
        "cabeza del f\xe9mur",
        "Hals des Femur",
        "Kopf des Oberschenkels",
        "Oberschenkelkopf",
        "H\xfcftkopf",
        "caput femoris",
        "\u0e2b\u0e31\u0e27\u0e43\u0e08",
        "cou-de-pied",
    ],
)
def test_words_inside_words_are_no_heads(text: str) -> None:
    assert not RULES.judge(
        {"Modality": ("CT",), "SeriesDescription": (text,)}, accept=(), trusts_no=False
    ).face


@pytest.mark.parametrize(
    "text",
    [
        "Dose_Report",
        "DoseReport",
        "DOSE REPORT",
        "PatientProtocol",
        "ScreenSave_1",
        "screen-shot2",
        "DOSE_SR",
        "Bilan dosim\xe9trique",
        "Relat\xf3rio de dose",
        "\u5242\u91cf\u62a5\u544a",
        "\xdcberweisung",
        "Einwilligungsbogen",
    ],
)
def test_pages_are_known_however_they_are_written(text: str) -> None:
    values = {"Modality": ("CT",), "SeriesDescription": (text,)}
    assert RULES.judge(values, accept=(), trusts_no=True).held_back == ("report_page",)
    assert RULES.judge(values, accept=["report_page"], trusts_no=True).held_back == ()


def test_a_dose_in_the_name_of_a_protocol_is_no_page() -> None:
    values = {"Modality": ("CT",), "SeriesDescription": ("Low Radiation Dose Chest",)}
    assert not RULES.judge(values, accept=(), trusts_no=False).held_back


def test_a_secondary_capture_is_suspect_by_its_description_as_by_its_class() -> None:
    values = {"Modality": ("CT",), "SeriesDescription": ("Secondary Capture",), "BurnedInAnnotation": ("NO",)}
    assert RULES.judge(values, accept=(), trusts_no=False).held_back == ("called_secondary_capture",)
    assert not RULES.judge(values, accept=(), trusts_no=True).held_back
    assert not RULES.judge(values, accept=(), trusts_no=False, blanks_text=True).held_back


def test_a_rule_is_accepted_for_a_device() -> None:
    rules = load_rules(
        '[[accept]]\nname = "ours"\nwhen = { ManufacturerModelName = ["US-1"] }\nrules = ["ultrasound"]\n'
    )
    device = {"Modality": ("US",), "ManufacturerModelName": ("US-1",)}
    verdict = rules.judge(device, accept=(), trusts_no=False)
    assert (verdict.held_back, verdict.accepted) == ((), ("ultrasound",))
    assert rules.judge({"Modality": ("US",)}, accept=(), trusts_no=False).held_back == ("ultrasound",)
    assert "ManufacturerModelName" in rules.keywords
