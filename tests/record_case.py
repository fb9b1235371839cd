# ruff: noqa: E501, ISC004 - documents as their systems write them
"""Clinical records as packing meets them, and documents with one person's data in every place they have."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shardflow.packing.attachments.records.kinds import record_kinds
from shardflow.packing.attachments.records.mapping import FieldMapping, RecordMapping, RecordsConfig
from shardflow.packing.deid.known_values import KnownValues
from shardflow.packing.deid.report_text import scrub
from shardflow.packing.sources.attachments import Attached, AttachmentItem, StudyContext

__all__ = [
    "CANARIES",
    "LAB",
    "attach",
    "context",
    "facts",
    "fhir_canaries",
    "files_with_canaries",
    "hidden_forms",
    "make_pdf",
    "output",
]


def context(day: str = "2014-10-01", counts: Mapping[tuple[str, str], int] | None = None) -> StudyContext:
    start = datetime.fromisoformat(day)

    def cleaned(text: str, people: Mapping[str, Sequence[str]]) -> str:
        return scrub(text, KnownValues([people]), mode="scrub").text

    return StudyContext(
        sample_key="k",
        study_uid="1.2.3",
        patient_id="H-4711-22",
        series=(),
        surrogate=lambda kind, value: "surrogate",
        scrub=cleaned,
        when=lambda moment: {"day_offset": (moment - start).days},
        seconds_from_study=lambda moment: (moment - start).total_seconds(),
        counts=counts or {},
    )


def attach(
    path: Path, day: str = "2014-10-01", settings: RecordsConfig | None = None, **more: Any
) -> tuple[Sequence[AttachmentItem], Attached]:
    """Do what packing does."""
    kinds = record_kinds(settings or RecordsConfig())
    kind = next(one for one in kinds if one.recognise(path, path.read_bytes()[:4096]))
    items = kind.describe(path)
    return items, kind.convert(path, [item.item for item in items], context(day, **more))


def facts(attached: Attached, kind: str) -> list[Any]:
    return [fact for fact in attached.parts["records"].get("facts", ()) if fact["kind"] == kind]


def output(attached: Attached) -> str:
    """Every byte that would be written."""
    return json.dumps(attached.parts) + "".join(text.decode() for text in attached.fields.values())


CANARIES = {
    "family": "Quaxbury",
    "given": "Zephyrine",
    "other": "Wimbletonia",
    "mrn": "MRN-80817161",
    "ssn": "919-55-7311",
    "street": "4711 Zorblatt Crescent",
    "city": "Grumpelstadt",
    "phone": "555-867-5309",
    "mail": "zq@grumpel.example",
    "doctor": "Vandersnoot",
    "clinic": "Klinik Hohenflux",
    "birth": "1931-02-17",
    "note": "Brother of Xylander",
    "uuid": "f3a1c9d2-5b6e-4f7a-8899-aabbccddeeff",
}


def hidden_forms() -> list[str]:
    forms = [*CANARIES.values(), "19310217", "5558675309", "919557311", "Zorblatt", "Hohenflux", "80817161"]
    return [form for form in forms if form != CANARIES["note"]] + ["Xylander"]


def fhir_canaries() -> list[dict[str, Any]]:
    c = CANARIES
    concept = {
        "text": c["note"],
        "coding": [{"system": "http://loinc.org", "code": "718-7", "display": f"Hb of {c['family']}"}],
    }
    everywhere = {
        "text": {"status": "generated", "div": f"<div>{c['given']} {c['family']}</div>"},
        "identifier": [{"system": "urn:x", "value": c["mrn"]}],
        "subject": {"reference": "Patient/p", "display": f"{c['given']} {c['family']}"},
        "performer": [{"display": c["doctor"]}],
        "extension": [{"url": f"http://{c['mail']}", "valueString": c["note"]}],
        "meta": {"tag": [{"system": "http://loinc.org", "code": c["mrn"]}]},
        "contained": [{"resourceType": "Practitioner", "id": "d", "name": [{"family": c["doctor"]}]}],
    }
    return [
        {
            "resourceType": "Patient",
            "id": "p",
            "identifier": [{"value": c["mrn"]}, {"type": {"coding": [{"code": "SS"}]}, "value": c["ssn"]}],
            "name": [{"family": c["family"], "given": [c["given"]], "text": c["other"]}],
            "telecom": [{"value": c["phone"]}, {"value": c["mail"]}],
            "address": [{"line": [c["street"]], "city": c["city"]}],
            "birthDate": c["birth"],
            "gender": "female",
            "contact": [{"name": {"family": c["other"]}}],
        },
        {
            "resourceType": "Observation",
            "id": c["uuid"],
            "status": c["family"],
            "code": concept,
            "category": [{"coding": [{"system": f"http://{c['clinic']}", "code": c["given"]}]}],
            "effectiveDateTime": "2014-10-01T08:00:00Z",
            "valueQuantity": {"value": 13.5, "unit": c["family"], "code": c["family"]},
            "interpretation": [{"coding": [{"system": "http://snomed.info/sct", "code": "80817161"}]}],
            **everywhere,
        },
        {
            "resourceType": "Observation",
            "status": "final",
            "code": concept,
            "effectiveDateTime": c["birth"],
            "valueQuantity": {"value": 80817161, "unit": "1"},
            **everywhere,
        },
        {
            "resourceType": "Observation",
            "status": "final",
            "code": concept,
            "effectiveDateTime": "2014-09-30",
            "valueString": f"Seen by {c['doctor']} for {c['family']}, {c['phone']}",
            "bodySite": concept,
            **everywhere,
        },
        {
            "resourceType": "DiagnosticReport",
            "status": "final",
            "code": concept,
            "effectiveDateTime": "2014-09-30",
            "conclusion": f"{c['given']} {c['family']}, born {c['birth']}, {c['mrn']}, {c['street']} in {c['city']}: no effusion.",
            **everywhere,
        },
        {"resourceType": "Basic", "id": c["uuid"], "code": concept, **everywhere},
    ]


def cda_canaries() -> bytes:
    c = CANARIES
    person = f"<name><given>{c['given']}</given><family>{c['family']}</family></name>"
    doctor = (
        f'<assignedAuthor><id extension="{c["mrn"]}" root="1.2"/><addr><streetAddressLine>{c["street"]}</streetAddressLine>'
        f'<city>{c["city"]}</city></addr><telecom value="tel:{c["phone"]}"/><assignedPerson><name>{c["doctor"]}</name>'
        f"</assignedPerson><representedOrganization><name>{c['clinic']}</name></representedOrganization></assignedAuthor>"
    )
    return f"""<ClinicalDocument xmlns="urn:hl7-org:v3" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">
      <!-- {c["note"]} --><?x {c["note"]}?>
      <id root="1.2.9" extension="{c["uuid"]}"/><code code="34133-9" codeSystem="2.16.840.1.113883.6.1" displayName="{c["family"]}"/>
      <title>{c["note"]}</title><effectiveTime value="20141001"/>
      <recordTarget><patientRole><id extension="{c["mrn"]}" root="1.2"/><id extension="{c["ssn"]}" root="2.16.840.1.113883.4.1"/>
        <telecom value="mailto:{c["mail"]}"/><patient>{person}<birthTime value="19310217"/>
        <guardian><guardianPerson><name>{c["other"]}</name></guardianPerson></guardian></patient></patientRole></recordTarget>
      <author><time value="20141001"/>{doctor}</author>
      <component><structuredBody><component><section>
        <code code="8716-3" codeSystem="2.16.840.1.113883.6.1" displayName="{c["other"]}"/><title>Signs of {c["family"]}</title>
        <text><paragraph styleCode="{c["note"]}">{c["given"]} {c["family"]} of {c["clinic"]}, {c["mrn"]}, {c["phone"]}, seen by
          {c["doctor"]}, {c["birth"]}: no effusion.</paragraph></text>
        <entry><observation classCode="OBS" moodCode="EVN"><id root="1.2" extension="{c["mrn"]}"/>
          <code code="8302-2" codeSystem="2.16.840.1.113883.6.1" displayName="Height of {c["family"]}">
            <originalText>{c["note"]}</originalText></code><text>{c["note"]}</text><statusCode code="{c["other"]}"/>
          <effectiveTime value="19310217"/><value xsi:type="PQ" value="170" unit="cm"/>
          <author><time value="20141001"/>{doctor}</author>
          <participant><participantRole><playingEntity><name>{c["other"]}</name></playingEntity></participantRole></participant>
        </observation></entry>
        <entry><observation classCode="OBS" moodCode="EVN"><code code="8302-2" codeSystem="2.16.840.1.113883.6.1"/>
          <value xsi:type="ST">{c["given"]} {c["family"]} ({c["doctor"]})</value></observation></entry>
      </section></component></structuredBody></component></ClinicalDocument>""".encode()


def hl7_canaries() -> bytes:
    c = CANARIES
    street = c["street"]
    return "\r".join(
        [
            f"MSH|^~\\&|RIS|{c['clinic']}|||20141001||ORU^R01|{c['uuid']}|P|2.5",
            f"PID|1||{c['mrn']}^^^H^MR~{c['ssn']}^^^^SS||{c['family']}^{c['given']}||19310217|F|{c['other']}||"
            f"{street}^^{c['city']}||{c['phone']}~{c['mail']}|||||{c['mrn']}",
            f"NK1|1|{c['other']}^{c['given']}|BRO|{street}|{c['phone']}",
            f"NTE|1||{c['note']}",
            f"PV1|1|I|{c['clinic']}^1||||1^{c['doctor']}^{c['given']}",
            f"OBR|1|P1|{c['mrn']}|718-7^Hb of {c['family']}^LN|||20141001|||1^{c['doctor']}||{c['note']}|||||||||||||||F|||||||"
            f"1&{c['doctor']}&{c['given']}",
            f"OBX|1|NM|718-7^Hb {c['family']}^LN||13.2|g/dL|{c['other']}|{c['family']}||||||20141001||{c['clinic']}|9^{c['doctor']}",
            f"OBX|2|NM|{c['mrn']}^{c['family']}^LN||80817161|1|||||F",
            f"OBX|3|TX|X&GDT||{c['given']} {c['family']} ({c['mrn']}) of {c['city']}, {street}, {c['phone']}, seen by "
            f"{c['doctor']} at {c['clinic']}: no effusion.||||||F",
            f"ZZZ|{c['note']}",
        ]
    ).encode()


def mapped_canaries() -> bytes:
    c = CANARIES
    return json.dumps(
        {
            "lab": {
                "who": {"name": c["family"], "first": c["given"], "number": c["mrn"], "town": c["city"]},
                "on": "2014-10-01",
                "rows": [
                    {
                        "hb": 13.5,
                        "unit": "g/dL",
                        "arm": "left",
                        "why": f"{c['family']} of {c['city']}: no effusion",
                        "note": c["note"],
                    },
                    {"hb": c["mrn"], "unit": c["family"], "arm": c["given"], "why": ""},
                    {"hb": 12, "unit": "g/dL", "arm": c["doctor"], "loinc": c["mrn"]},
                ],
            }
        }
    ).encode()


LAB = RecordMapping(
    name="lab",
    format="json",
    root="lab",
    records="lab/rows",
    patient_id="/lab/who/number",
    time="/lab/on",
    identifying=("/lab/who/name", "/lab/who/first", "/lab/who/town"),
    fields={
        "hb": FieldMapping(path="hb", unit_path="unit"),
        "arm": FieldMapping(path="arm", type="choice", choices=("left", "right")),
        "test": FieldMapping(path="loinc", type="code", system="http://loinc.org"),
        "why": FieldMapping(path="why", type="text"),
    },
)


def files_with_canaries(folder: Path) -> dict[str, Path]:
    bundle = {
        "resourceType": "Bundle",
        "id": CANARIES["uuid"],
        "entry": [{"resource": one} for one in fhir_canaries()],
    }
    contents = {
        "fhir": json.dumps(bundle).encode(),
        "lines": b"".join(json.dumps(one).encode() + b"\n" for one in fhir_canaries()),
        "cda": cda_canaries(),
        "hl7v2": hl7_canaries(),
        "mapped": mapped_canaries(),
    }
    paths = {name: folder / f"{CANARIES['family']}-{name}.dat" for name in contents}
    for name, content in contents.items():
        paths[name].write_bytes(content)
    return paths


def make_pdf(*pages: str, operators: bytes = b"") -> bytes:
    """Write a PDF by hand: an object a page, its lines one below the other, and what is to be drawn beside."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    kids = []
    for page in pages:
        shown = " ".join(f"({line}) Tj 0 -14 Td" for line in page.split("\n") if page)
        content = f"BT /F1 11 Tf 72 720 Td {shown} ".encode("latin-1") + operators + b"ET"
        content = zlib.compress(content, 9)
        kids.append(len(objects) + 1)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
            + f" /Contents {len(objects) + 2} 0 R >>".encode()
        )
        objects.append(
            f"<< /Filter /FlateDecode /Length {len(content)} >>\nstream\n".encode() + content + b"\nendstream"
        )
    objects[1] = (
        f"<< /Type /Pages /Kids [{' '.join(f'{one} 0 R' for one in kids)}] /Count {len(kids)} >>".encode()
    )
    data, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, start=1):
        places.append(len(data))
        data += f"{number} 0 obj\n".encode() + one + b"\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    return (
        data
        + (
            f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
            f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
        ).encode()
    )
