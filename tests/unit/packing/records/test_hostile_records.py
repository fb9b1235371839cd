"""Clinical records: no canary leaves, whatever stands where; items, reasons, codes, units, mappings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError, SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.attachments.codes import clean_unit, is_code
from shardflow.packing.attachments.records.kinds import record_kinds
from shardflow.packing.attachments.records.mapping import FieldMapping, RecordMapping, RecordsConfig
from tests.record_case import (
    CANARIES,
    LAB,
    attach,
    context,
    facts,
    fhir_canaries,
    files_with_canaries,
    hidden_forms,
    output,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", ["fhir", "lines", "cda", "hl7v2", "mapped"])
@pytest.mark.parametrize("free_text", ["scrub", "drop"])
def test_no_canary_leaves(tmp_path: Path, name: str, free_text: Any) -> None:
    path = files_with_canaries(tmp_path)[name]
    items, attached = attach(path, settings=RecordsConfig(free_text=free_text, mappings=(LAB,)))
    said = output(attached).lower()
    assert [form for form in hidden_forms() if form.lower() in said] == []
    assert all(CANARIES["mrn"] == item.patient_id for item in items)
    assert CANARIES["mrn"] not in repr(items)
    # What they stand around does.
    assert ("no effusion" in said) == (free_text == "scrub")
    assert not attached.fields or free_text == "scrub"
    assert '"code": "718-7"' in said or '"code": "8302-2"' in said or '"number": 13.5' in said


def test_a_day_far_from_the_study_is_not_told(tmp_path: Path) -> None:
    path = files_with_canaries(tmp_path)["fhir"]
    _, attached = attach(path)
    told = [fact.get("when") for fact in facts(attached, "observation")]
    assert told == [{"day_offset": 0, "seconds": 8 * 3600}, None, {"day_offset": -1}]  # a date has no hour
    # A window that holds it, and the day is there.
    _, attached = attach(path, settings=RecordsConfig(max_days=40_000))
    assert (
        min(one["day_offset"] for one in [fact["when"] for fact in facts(attached, "observation")]) < -30_000
    )


@pytest.mark.parametrize(
    ("display", "family", "is_kept"),
    [
        ("White blood cell count", "Okafor", True),
        # A common word that is a name here, and a name that nothing in the document tells.
        ("White blood cell count", "White", False),
        ("Hemoglobin, Snorkelbaum method", "Okafor", False),
        ("Hemoglobin of 3 May 2014", "Okafor", False),
        ("x" * 201, "Okafor", False),
    ],
)
def test_displays_are_made_of_known_words(
    tmp_path: Path, display: str, family: str, *, is_kept: bool
) -> None:
    coding = {"system": "http://loinc.org", "code": "718-7", "display": display}
    resource = {
        "resourceType": "Observation",
        "code": {"coding": [coding]},
        "contained": [{"resourceType": "Patient", "id": "p", "name": [{"family": family}]}],
        "valueQuantity": {"value": 6.5, "unit": "10*3/uL"},
    }
    path = tmp_path / "o.json"
    path.write_text(json.dumps(resource))
    _, attached = attach(path)
    ((code,),) = [fact["codes"] for fact in facts(attached, "observation")]
    assert code.get("display") == (display if is_kept else None)
    assert attached.parts["records"].get("left_out", []) == (
        [] if is_kept or len(display) > 200 else [{"count": 1, "reason": "UNCONTROLLED_DISPLAY"}]
    )


# --- items, numbers and reasons


@pytest.mark.parametrize(
    "value",
    [
        {"valueString": "19171113"},
        {"valueString": "5558675309"},
        {"valueInteger": 19171113},
        {"valueDecimal": 5558675309.0},
        {"valueQuantity": {"value": 19171113, "unit": "1"}},
    ],
)
def test_a_long_number_without_a_unit_is_no_measurement(tmp_path: Path, value: dict[str, Any]) -> None:
    """A day of birth, a telephone: nothing in the document says that they are somebody's."""
    observation = {
        "resourceType": "Observation",
        "status": "final",
        "code": {"coding": [{"system": "http://loinc.org", "code": "8480-6"}]},
        **value,
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"resourceType": "Bundle", "entry": [{"resource": observation}]}))
    _, attached = attach(path)
    said = output(attached)
    assert "8480-6" in said
    assert "19171113" not in said
    assert "555867" not in said


@pytest.mark.parametrize(
    ("system", "name"),
    [
        ("DCM", "MILLER"),
        ("INTERPRETATION", "ANNA"),
        ("ALLERGY-STATUS", "smith"),
        ("ICD-10-PCS", "SANDERS"),
        ("DIAGNOSTIC-SERVICE", "LEE"),
    ],
)
def test_a_name_is_no_code(system: str, name: str) -> None:
    assert not is_code(system, name)


def test_lines_are_read_where_they_begin(tmp_path: Path) -> None:
    path = files_with_canaries(tmp_path)["lines"]
    (kind,) = [one for one in record_kinds(RecordsConfig()) if one.name == "fhir"]
    items = kind.describe(path)
    whole = kind.convert(path, [item.item for item in items], context())
    alone = kind.convert(path, [items[0].item], context())
    assert facts(alone, "observation") == facts(whole, "observation")[:1]


def test_documents_go_on_counting(tmp_path: Path) -> None:
    path = files_with_canaries(tmp_path)["hl7v2"]
    _, attached = attach(path, counts={("records", "documents"): 7})
    assert list(attached.fields) == ["document.007.txt"]
    assert attached.parts["records"]["documents"] == [{"document": 7, "kind": "report"}]
    assert [fact["document"] for fact in facts(attached, "report")] == [7]


def test_a_bulk_export_is_linked_over_its_files(tmp_path: Path) -> None:
    patient, observation, *_ = fhir_canaries()
    (tmp_path / "Patient.ndjson").write_text(f"{json.dumps(patient)}\n{json.dumps(patient)}\n")
    path = tmp_path / "Observation.000.ndjson"
    path.write_text(json.dumps({**observation, "status": "final"}) + "\n")
    (item,), attached = attach(path)
    assert item.patient_id == CANARIES["mrn"]
    assert facts(attached, "patient")[0]["sex"] == "F"
    before = item.content
    patient["identifier"] = [{"value": "other"}]
    (tmp_path / "Patient.ndjson").write_text(json.dumps(patient) + "\n")
    (item,), _ = attach(path)
    assert item.patient_id == "other"
    assert item.content != before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            b'<!DOCTYPE ClinicalDocument [<!ENTITY a "b">]><ClinicalDocument>&a;</ClinicalDocument>',
            Reason.ATTACHMENT_UNREADABLE,
        ),
        (b"<ClinicalDocument>" + b"<a>" * 100, Reason.LIMIT_EXCEEDED),
        (b"<ClinicalDocument><a>", Reason.ATTACHMENT_UNREADABLE),
        (b'<other xmlns="urn:hl7-org:v3"/>', Reason.NOT_ATTACHMENT),
        (b'{"resourceType": "Bundle", "entry": [', Reason.ATTACHMENT_UNREADABLE),
        (b'{"resourceType": "Bundle", "a": ' + b"[" * 100 + b"]" * 100 + b"}", Reason.LIMIT_EXCEEDED),
        (b'{"resourceType": "Claim"}', Reason.NOT_ATTACHMENT),
        (b'{"resourceType": "Patient"}\n{"resourceType": "Patient"', Reason.ATTACHMENT_UNREADABLE),
        (b"BHS|^~\\&|\r", Reason.ATTACHMENT_UNREADABLE),
    ],
)
def test_what_cannot_be_read_has_a_reason(tmp_path: Path, content: bytes, reason: Reason) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(SourceError) as raised:
        attach(path)
    assert raised.value.reason == reason


def test_huge_base_64_is_left_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    form = {"contentType": "text/plain", "data": "QUFB" * (9 << 20)}
    resource = {
        "resourceType": "DiagnosticReport",
        "code": fhir_canaries()[1]["code"],
        "presentedForm": [form],
    }
    path.write_text(json.dumps(resource))
    _, attached = attach(path)
    assert attached.fields == {}


# --- codes, units, mappings


@given(st.integers(100_000, 10**17 - 1), st.sampled_from(["SNOMED", "LOINC"]))
def test_one_digit_in_ten_passes_for_a_code(number: int, system: str) -> None:
    if system == "SNOMED":
        codes = [f"{number}{digit}" for digit in range(10)]
    else:
        codes = [f"{number % 10**5}-{digit}" for digit in range(10)]
    assert sum(is_code(system, code) for code in codes) == 1


@pytest.mark.parametrize(
    "unit", ["mg/dL", "10*3/uL", "mm[Hg]", "kg/m2", "%", "mEq/L", "U/L", "ng/mL", "s", "Cel", "/min"]
)
def test_units(unit: str) -> None:
    assert clean_unit(unit) == unit


@pytest.mark.parametrize("unit", ["Okafor", "mg/Okafor", "12345678", "a b", "mg per day by Ada", "x" * 40])
def test_what_is_no_unit(unit: str) -> None:
    assert clean_unit(unit) is None


def test_mapped_xml(tmp_path: Path) -> None:
    mapping = RecordMapping(
        name="xray",
        format="xml",
        root="export",
        records="visit/exam",
        study_uid="@uid",
        accession="order/@number",
        patient_id="/patient/@id",
        fields={
            "dose": FieldMapping(path="dose", unit="mGy"),
            "contrast": FieldMapping(path="contrast/@given", type="flag"),
            "on": FieldMapping(path="@on", type="date"),
        },
    )
    path = tmp_path / "x.xml"
    path.write_text(
        '<export><patient id="77"/><visit><exam uid="1.2.3" on="20141002"><order number="A1"/>'
        '<dose>1.5</dose><contrast given="true"/><who>Quaxbury</who></exam>'
        '<exam uid="1.2.4"><dose>high</dose></exam></visit></export>'
    )
    items, attached = attach(path, settings=RecordsConfig(mappings=(mapping,)))
    assert [(one.study_uids, one.accession, one.patient_id) for one in items] == [
        (("1.2.3",), "A1", "77"),
        (("1.2.4",), "", "77"),
    ]
    assert attached.parts["records"]["facts"] == [
        {
            "kind": "record",
            "source": "mapped-xray",
            "dose": {"number": 1.5, "unit": "mGy"},
            "contrast": True,
            "on": {"day_offset": 1},
        }
    ]


def test_settings_come_back_from_text_and_toml(tmp_path: Path) -> None:
    settings = RecordsConfig(free_text="drop", max_days=7, mappings=(LAB,))
    assert RecordsConfig.from_text(settings.to_text()) == settings
    assert RecordsConfig.from_text("") == RecordsConfig()
    path = tmp_path / "records.toml"
    path.write_text(dump_config(settings), encoding="utf-8")
    assert load_config(RecordsConfig, path) == settings


def test_mappings_say_what_is_wrong_with_them() -> None:
    with pytest.raises(ConfigError, match="system"):
        FieldMapping(path="a", type="code", system="http://our.lab")
    with pytest.raises(ConfigError, match="fields"):
        RecordMapping(name="a", format="json", root="a")
    with pytest.raises(ConfigError, match="rename"):
        RecordsConfig(mappings=(LAB, LAB))
    with pytest.raises(ConfigError, match="kind"):
        RecordMapping(name="a", format="json", root="a", fields={"kind": FieldMapping(path="a")})
