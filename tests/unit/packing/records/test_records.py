"""Clinical records: what of the real files leaves, read by hand from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.record_case import attach, facts, output

pytestmark = pytest.mark.fast


def test_real_summary_of_care(shared_data: Path) -> None:
    (item,), attached = attach(shared_data / "ccda/CCD/CCD 2/CCD.xml")
    assert (item.patient_id, str(item.time)) == ("98765432", "2014-10-01 00:00:00")
    assert facts(attached, "patient") == [{"kind": "patient", "sex": "F", "source": "cda"}]
    vital = {
        fact["codes"][0]["code"]: (fact["value"]["number"], fact["value"]["unit"])
        for fact in facts(attached, "observation")
        if "number" in fact.get("value", {})
    }
    assert vital == {
        "2710-2": (98, "%"),
        "3141-9": (108.863, "kg"),
        "39156-5": (37.58, "kg/m2"),
        "8302-2": (170.2, "cm"),
        "8310-5": (37.2, "Cel"),
        "8462-4": (80, "mm[Hg]"),
        "8480-6": (120, "mm[Hg]"),
        "8867-4": (80, "/min"),
        "9279-1": (18, "/min"),
    }
    (procedure,) = facts(attached, "procedure")
    assert [(code["system"], code["code"]) for code in procedure["codes"]] == [
        ("SNOMED", "6025007"),
        ("CPT", "44970"),
        ("ICD-10-PCS", "0DTJ4ZZ"),
        ("ICD-9-CM", "47.01"),
    ]
    assert (procedure["when"], procedure["status"]) == ({"day_offset": 1, "seconds": 124226}, "completed")
    (allergy,) = [fact for fact in facts(attached, "observation") if fact.get("negated")]
    assert allergy["value"]["codes"][0]["code"] == "419199007"
    said = output(attached)
    for hidden in (
        "Isabella",
        "Jones",
        "98765432",
        "Beaverton",
        "Residence",
        "555-1004",
        "Patty",
        "5555555555",
    ):
        assert hidden not in said
    assert "2014" not in said.replace("2014-09", "")


def test_real_bundle(shared_data: Path) -> None:
    path = next((shared_data / "synthea_r4").glob("Clemente*.json"))
    items, attached = attach(path, "2015-09-14")
    assert {item.patient_id for item in items} == {"1484a42d-0eaf-4654-9cbf-6b050a5cd73b"}
    # 48 observations, 4 immunizations, 4 reports, 3 encounters, a condition, a procedure.
    assert len(items) == 61
    assert {
        kind: len(facts(attached, kind)) for kind in ("observation", "immunization", "report", "patient")
    } == {
        "observation": 48,
        "immunization": 4,
        "report": 4,
        "patient": 1,
    }
    heights = [fact for fact in facts(attached, "observation") if fact["codes"][0]["code"] == "8302-2"]
    assert heights[0]["value"] == {"number": 168.80253764416227, "unit": "cm"}
    assert heights[0]["codes"] == [{"system": "LOINC", "code": "8302-2", "display": "Body Height"}]
    assert [fact["when"]["day_offset"] for fact in heights] == sorted(
        fact["when"]["day_offset"] for fact in heights
    )
    pressure = [fact for fact in facts(attached, "observation") if fact["codes"][0]["code"] == "55284-4"]
    assert {part["codes"][0]["code"] for part in pressure[0]["components"]} == {"8462-4", "8480-6"}
    said = output(attached)
    source = json.loads(path.read_text())
    patient = next(one["resource"] for one in source["entry"] if one["resource"]["resourceType"] == "Patient")
    hidden = [
        patient["id"],
        patient["birthDate"],
        patient["name"][0]["family"],
        *patient["address"][0]["line"],
    ]
    hidden += [one["value"] for one in (*patient["identifier"], *patient["telecom"])]
    hidden += [one["resource"]["id"] for one in source["entry"]]
    assert not [one for one in hidden if one in said]


def test_real_messages(shared_data: Path) -> None:
    (item,), attached = attach(shared_data / "hl7v2/oru/Example3.txt")
    assert item.study_uids == (
        "1.2.840.113532.7.7345.3453445346802.34534",
        "1.2.840.113532.7.7345.3453429928107.982106",
    )
    (mass,) = facts(attached, "observation")
    assert mass["codes"] == [{"system": "SNOMED", "code": "309088003", "display": "Renal Mass"}]
    assert mass["value"]["codes"][0]["code"] == "C65.2"
    assert "Mayo" not in output(attached)


def test_every_real_file_is_read(shared_data: Path) -> None:
    paths = [
        *(shared_data / "synthea_r4").glob("*.json"),
        *(shared_data / "ccda").rglob("*.xml"),
        *(shared_data / "hl7v2/oru").iterdir(),
        *(shared_data / "hl7v2/src").rglob("*.hl7"),
    ]
    assert len(paths) == 12
    for path in paths:
        items, attached = attach(path)
        assert items
        assert attached.parts["records"]["facts"] or attached.fields
