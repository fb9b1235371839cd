"""Reports of clinical systems: SR, C-CDA, FHIR, HL7v2; texts, status and links, and a folder of them all."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from pydicom.data import get_testdata_file

from shardflow.errors import ConfigError, SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.sources.documents.bounded import DocumentLimits, parse_xml, read_bounded
from shardflow.packing.sources.documents.cda import cda_facts, narrative_text, read_cda_report
from shardflow.packing.sources.documents.facts import DocumentReport, NoReport
from shardflow.packing.sources.documents.fhir import FhirIndex, iter_resources, read_fhir_report
from shardflow.packing.sources.documents.reports import iter_document_reports
from shardflow.packing.sources.documents.sr import read_sr_report
from shardflow.packing.sources.reports import BrokenReport, ReportRecord
from tests.record_case import make_pdf

pytestmark = pytest.mark.fast

LIMITS = DocumentLimits()


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def bundle(*resources: dict[str, Any]) -> dict[str, Any]:
    return {
        "resourceType": "Bundle",
        "entry": [{"fullUrl": f"urn:uuid:{one.get('id')}", "resource": one} for one in resources],
    }


PATIENT: dict[str, Any] = {
    "resourceType": "Patient",
    "id": "p",
    "identifier": [
        {"type": {"coding": [{"code": "SS"}]}, "value": "999-12-3456"},
        {"type": {"coding": [{"code": "MR"}]}, "value": "4711"},
    ],
    "name": [{"family": "Okafor", "given": ["Ada"]}],
}
STUDY = {
    "resourceType": "ImagingStudy",
    "id": "s",
    "identifier": [{"system": "urn:dicom:uid", "value": "urn:oid:1.2.840.7"}],
    "series": [{"uid": "1.2.840.7.1", "instance": [{"uid": "1.2.840.7.1.1"}]}],
}
ORDER = {
    "resourceType": "ServiceRequest",
    "id": "o",
    "identifier": [{"type": {"coding": [{"code": "ACSN"}]}, "value": "ACC9"}],
}


def report(**more: Any) -> dict[str, Any]:
    return {
        "resourceType": "DiagnosticReport",
        "id": "r",
        "status": "final",
        "subject": {"reference": "Patient/p"},
        "presentedForm": [{"contentType": "text/plain", "data": encoded("FINDINGS: Clear lungs.\r\n")}],
        **more,
    }


def read(resource: dict[str, Any], *others: dict[str, Any]) -> DocumentReport | NoReport:
    index = FhirIndex()
    for url, one in iter_resources(bundle(resource, *others)):
        index.add(url, one)
    return read_fhir_report(resource, index)


@pytest.mark.parametrize(
    "link",
    [
        {"imagingStudy": [{"reference": "ImagingStudy/s"}]},
        {"imagingStudy": [{"reference": "urn:uuid:s"}]},
        {"imagingStudy": [{"reference": "https://fhir.example/r4/ImagingStudy/s/_history/2"}]},
        {"study": [{"reference": "ImagingStudy/s"}]},
        {"study": [{"identifier": {"system": "urn:dicom:uid", "value": "urn:oid:1.2.840.7"}}]},
        {"imagingStudy": [{"reference": "#c"}], "contained": [{**STUDY, "id": "c"}]},
        {
            "imagingStudy": [{"reference": "#c"}],
            "contained": [{"resourceType": "ImagingStudy", "id": "c", "uid": "urn:oid:1.2.840.7"}],
        },
    ],
)
def test_fhir_names_the_study_in_all_versions(link: dict[str, Any]) -> None:
    found = read(report(**link), PATIENT, STUDY)
    assert isinstance(found, DocumentReport)
    assert found.text == "FINDINGS: Clear lungs.\n"
    assert found.facts.study_uids == ["1.2.840.7"]
    assert found.facts.patient_ids == ["4711", "999-12-3456"]
    assert found.facts.people.values()["PatientName"] == ("Ada Okafor",)


def test_fhir_lists_the_numbers_of_a_patient() -> None:
    listed: list[dict[str, Any]] = [
        *PATIENT["identifier"],
        {"system": "urn:oid:1.2.3", "value": " B-2 "},
        {"type": {"text": "Account"}, "value": "A9"},
        {"type": {"coding": [{"code": "VN"}]}, "value": "V9"},
        {"system": "http://hl7.org/fhir/sid/us-ssn", "value": "999-12-3457"},
        {"system": "urn:oid:2.16.840.1.113883.4.3.25", "value": "S99"},
    ]
    subject = {"reference": "Patient/p", "identifier": {"value": "C3"}}
    found = read(report(subject=subject), {**PATIENT, "identifier": listed})
    assert isinstance(found, DocumentReport)
    numbers = [(one.number, one.issuer) for one in found.facts.patient_numbers]
    assert numbers == [("C3", ""), ("4711", ""), ("B-2", "urn:oid:1.2.3")]
    # Several people, or a thing, have no list; an older version of a patient is the patient.
    for other, expected in (
        ([subject, {"reference": "Patient/q", "identifier": {"value": "D4"}}], []),
        ({"reference": "Device/d", "identifier": {"value": "D4"}}, []),
        ({**subject, "reference": "Patient/p/_history/2"}, ["C3", "4711", "B-2"]),
    ):
        found = read(report(subject=other), {**PATIENT, "identifier": [*listed, {"value": "ACCOUNT1"}]})
        assert isinstance(found, DocumentReport)
        assert [one.number for one in found.facts.patient_numbers] == expected
    # Exports of two servers may call two patients by one name; versions of one have numbers in common.
    for second, expected in (("Z9", []), ("4711", ["C3", "4711"])):
        other_patient = {**PATIENT, "identifier": [{"value": second}, {"value": "Y8"}]}
        found = read(report(subject=subject), PATIENT, other_patient)
        assert isinstance(found, DocumentReport)
        assert [one.number for one in found.facts.patient_numbers] == expected


def test_cda_lists_the_numbers_of_a_patient() -> None:
    ids = "".join(
        f'<id extension="{number}" root="{root}"/>'
        for number, root in (
            ("999-12-3456", "2.16.840.1.113883.4.1"),
            ("S99", "2.16.840.1.113883.4.3.25"),
            ("M99", "2.16.840.1.113883.4.572"),
            ("4711", "1.2"),
            ("B-2", "1.3"),
        )
    )
    target = f"<recordTarget><patientRole>{ids}</patientRole></recordTarget>"
    for targets, expected in ((target, ["4711", "B-2"]), (2 * target, [])):
        facts = cda_facts(parse_xml(f"<ClinicalDocument>{targets}</ClinicalDocument>".encode()))
        assert [one.number for one in facts.patient_numbers] == expected


def test_fhir_names_the_order() -> None:
    found = read(report(basedOn=[{"reference": "ServiceRequest/o"}]), PATIENT, ORDER)
    assert isinstance(found, DocumentReport)
    assert (found.facts.study_uids, found.facts.accessions) == ([], ["ACC9"])


@pytest.mark.parametrize(
    ("status", "expected"),
    [("final", "final"), ("preliminary", "preliminary"), ("amended", "corrected"), ("appended", "corrected")],
)
def test_fhir_status(status: str, expected: str) -> None:
    found = read(report(status=status))
    assert isinstance(found, DocumentReport)
    assert found.status == expected


def test_fhir_withdrawn_and_without_text() -> None:
    for status in ("cancelled", "entered-in-error"):
        found = read(report(status=status))
        assert isinstance(found, NoReport)
        assert found.reason is Reason.REPORT_WITHDRAWN
    for form in (
        [],
        [{"contentType": "image/png", "data": "iVBORw0="}],
        [{"contentType": "application/pdf", "url": "https://elsewhere.example/r.pdf"}],
        [{"contentType": "text/plain", "data": "%%%"}],
        [{"contentType": "text/plain", "url": "https://elsewhere.example/r.txt"}],
        "text",
    ):
        found = read(report(presentedForm=form))
        assert isinstance(found, NoReport)
        assert found.reason is Reason.NOT_REPORT


def test_fhir_pdf_and_rtf_are_documents_where_no_form_is_text() -> None:
    pdf = {"contentType": "application/pdf", "data": base64.b64encode(make_pdf("No effusion.")).decode()}
    plain = report()["presentedForm"][0]
    found = read(report(presentedForm=[pdf, plain]))
    assert isinstance(found, DocumentReport)
    assert (found.text, found.document) == ("FINDINGS: Clear lungs.\n", None)
    rtf = base64.b64encode(rb"{\rtf1 Clear.}").decode()
    binary = {"resourceType": "Binary", "id": "b", "contentType": "application/pdf", "data": pdf["data"]}
    for form, text in (
        (pdf, "No effusion."),
        ({"contentType": "", "data": pdf["data"]}, "No effusion."),
        ({"url": "Binary/b"}, "No effusion."),
        ({"contentType": "text/rtf", "data": rtf}, "Clear."),
    ):
        found = read(report(presentedForm=[form]), binary)
        assert isinstance(found, DocumentReport)
        assert found.document is not None
        assert (found.text, found.document.read()) == ("", text)
    broken = read(report(presentedForm=[{"contentType": "application/pdf", "data": "%%%"}]))
    assert isinstance(broken, DocumentReport)
    assert broken.document is not None
    with pytest.raises(SourceError) as raised:
        broken.document.read()
    assert raised.value.reason == Reason.REPORT_UNREADABLE


def test_fhir_conclusion_is_added_where_the_form_lacks_it() -> None:
    found = read(report(conclusion="No pneumonia."))
    assert isinstance(found, DocumentReport)
    assert found.text == "FINDINGS: Clear lungs.\n\nIMPRESSION:\nNo pneumonia.\n"
    found = read(report(conclusion="Clear   lungs."))
    assert isinstance(found, DocumentReport)
    assert found.text == "FINDINGS: Clear lungs.\n"
    found = read(report(conclusion="No pneumonia.", presentedForm=[]))
    assert isinstance(found, DocumentReport)
    assert found.text == "IMPRESSION:\nNo pneumonia.\n"


def test_fhir_html_and_binaries() -> None:
    page = (
        "<html><head><title>Okafor</title><style>p{}</style></head>"
        "<body><p>FINDINGS:</p><p>5&nbsp;mm\n nodule &lt;</p></body></html>"
    )
    found = read(report(presentedForm=[{"contentType": "text/html; charset=utf-8", "data": encoded(page)}]))
    assert isinstance(found, DocumentReport)
    assert found.text == "FINDINGS:\n5 mm nodule <\n"
    binary = {"resourceType": "Binary", "id": "b", "contentType": "text/plain", "data": encoded("Clear.\n")}
    found = read(report(presentedForm=[{"url": "Binary/b"}]), binary)
    assert isinstance(found, DocumentReport)
    assert found.text == "Clear.\n"


def test_the_generated_narrative_is_not_read() -> None:
    found = read(report(presentedForm=[], text={"status": "generated", "div": "<div>Ada Okafor</div>"}))
    assert isinstance(found, NoReport)


def test_real_imaging_report_of_c_cda(shared_data: Path) -> None:
    path = shared_data / "ccda/Diagnostic Imaging Report/Diagnostic_Imaging_Report.xml"
    found = read_cda_report(parse_xml(read_bounded(path)))
    assert isinstance(found, DocumentReport)
    assert found.facts.study_uids == ["1.2.840.113619.2.62.994044785528.114289542805"]
    assert found.facts.series_uids == ["1.2.840.113619.2.62.994044785528.20060823223142485051"]
    assert len(found.facts.sop_uids) == 2
    assert found.facts.accessions[0] == "10523475"
    assert found.facts.patient_ids == ["12345"]
    assert [line for line in found.text.split("\n") if line.isupper()] == [
        "INDICATION:",
        "HISTORY:",
        "FINDINGS:",
        "IMPRESSION:",
    ]
    assert found.text.startswith("INDICATION:\nSuspected lung tumor\n\nHISTORY:\nHistory: Sore throat.\n\n")
    assert "superiorly (diameter about 45mm)" in found.text
    names = found.facts.people.values()["PersonName"]
    assert {"Henry Seven", "Ralph Relative", "Christine Cure MD", "Dr. Fay Family"} <= set(names)


def test_a_summary_of_care_is_no_report(shared_data: Path) -> None:
    found = read_cda_report(parse_xml(read_bounded(shared_data / "ccda/CCD/CCD 2/CCD.xml")))
    assert isinstance(found, NoReport)
    assert found.reason is Reason.NOT_REPORT


def test_narrative_of_tables_lists_and_breaks() -> None:
    node = parse_xml(
        b"<text>One\n  two<br/>three<list><item>a</item><item><caption>B:</caption>b</item></list>"
        b"<table><tr><th>H</th><td>1</td></tr><tr><td/><td/></tr></table></text>"
    )
    assert narrative_text(node) == "One two\nthree\na\nB: b\nH | 1 |"


def cda(body: str, header: str = "") -> bytes:
    return (
        '<ClinicalDocument xmlns="urn:hl7-org:v3"><code code="18748-4"/>'
        f"{header}<component>{body}</component></ClinicalDocument>"
    ).encode()


def test_cda_plain_body_and_replacement() -> None:
    text = f'<text mediaType="text/plain" representation="B64">{encoded("Clear.")}</text>'
    body = f"<nonXMLBody>{text}</nonXMLBody>"
    found = read_cda_report(parse_xml(cda(body, '<relatedDocument typeCode="RPLC"/>')))
    assert isinstance(found, DocumentReport)
    assert (found.text, found.status) == ("Clear.\n", "corrected")


def test_a_pdf_or_rtf_is_the_body_of_an_unstructured_cda() -> None:
    pdf = base64.b64encode(make_pdf("No effusion.")).decode()
    rtf = base64.b64encode(rb"{\rtf1 Clear.}").decode()
    for media, data, text in (
        ("application/pdf", pdf, "No effusion."),
        (
            "application/octet-stream",
            "\n".join(pdf[at : at + 60] for at in range(0, len(pdf), 60)),
            "No effusion.",
        ),
        ("application/rtf", rtf, "Clear."),
    ):
        body = f'<nonXMLBody><text mediaType="{media}" representation="B64">{data}</text></nonXMLBody>'
        found = read_cda_report(parse_xml(cda(body)))
        assert isinstance(found, DocumentReport)
        assert found.document is not None
        assert (found.text, found.document.read()) == ("", text)
    for attributes, inner in (
        ('mediaType="image/tiff" representation="B64"', "SUkqAA=="),
        ('mediaType="application/pdf"', '<reference value="report.pdf"/>'),
    ):
        found = read_cda_report(parse_xml(cda(f"<nonXMLBody><text {attributes}>{inner}</text></nonXMLBody>")))
        assert isinstance(found, NoReport)
        assert found.reason is Reason.EMPTY_REPORT


def test_real_structured_reports(shared_data: Path) -> None:
    found = read_sr_report(Path(get_testdata_file("reportsi.dcm")), LIMITS)
    assert isinstance(found, DocumentReport)
    assert (found.text, found.status) == ("SECTION HEADING:\nEnter text\n", "preliminary")
    found = read_sr_report(Path(get_testdata_file("test-SR.dcm")), LIMITS)
    assert isinstance(found, DocumentReport)
    assert found.text == (
        "A mass of\nDiameter: 3 cm\nwas detected.\nA mass of\nDiameter: 3 cm\nwas detected.\n"
        "Sample Text\nA\nB\nC\n"
    )
    assert found.status == "corrected"
    for name in (
        "dcmqi_ct_seg_sr/sr-example/sr.dcm",
        "highdicom/sr_document.dcm",
        "highdicom/sr_document_with_multiple_groups.dcm",
    ):
        none = read_sr_report(shared_data / name, LIMITS)
        assert isinstance(none, NoReport)
        assert none.reason is Reason.NOT_REPORT


def test_a_folder_of_everything(tmp_path: Path, shared_data: Path) -> None:
    export = tmp_path / "export"
    export.mkdir()
    lines = [
        report(id="r1", basedOn=[{"reference": "ServiceRequest/o"}]),
        report(id="r2", status="cancelled"),
    ]
    (export / "DiagnosticReport.ndjson").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (export / "Patient.ndjson").write_text(json.dumps(PATIENT) + "\n" + json.dumps(PATIENT) + "\n")
    (export / "ServiceRequest.ndjson").write_text(json.dumps(ORDER) + "\n" + json.dumps(ORDER) + "\n")
    (tmp_path / "1.2.3.txt").write_text("FINDINGS: None.")
    (tmp_path / "a.json").write_text(
        json.dumps(bundle(PATIENT, STUDY, report(imagingStudy=[{"reference": "ImagingStudy/s"}])))
    )
    (tmp_path / "b.xml").write_bytes(b"<!DOCTYPE ClinicalDocument><ClinicalDocument/>")
    (tmp_path / "c.dcm").write_bytes(Path(get_testdata_file("reportsi.dcm")).read_bytes()[:2000])
    (tmp_path / "notes.pdf").write_bytes(b"%PDF-1.4")
    found = list(iter_document_reports(tmp_path))
    assert [one.place for one in found] == list(range(1, len(found) + 1))
    assert [
        one.reason if isinstance(one, BrokenReport) else (one.study_instance_uid, one.accessions)
        for one in found
    ] == [
        ("1.2.3", ()),
        ("1.2.840.7", ()),
        Reason.REPORT_UNREADABLE,
        Reason.REPORT_UNREADABLE,
        ("", ("ACC9",)),
        Reason.REPORT_WITHDRAWN,
        Reason.NOT_REPORT,
        Reason.NOT_REPORT,
        Reason.NOT_REPORT,
    ]
    record = found[4]
    assert isinstance(record, ReportRecord)
    assert record.patient_ids[0] == "4711"
    assert "Ada Okafor" in record.people["PatientName"]


def test_a_report_of_several_studies(tmp_path: Path) -> None:
    other = {"resourceType": "ImagingStudy", "id": "t", "uid": "urn:oid:1.2.840.8"}
    links = [{"reference": "ImagingStudy/s"}, {"reference": "ImagingStudy/t"}]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(bundle(STUDY, other, report(imagingStudy=links))))
    found = list(iter_document_reports(path))
    assert [one.reason for one in found if isinstance(one, BrokenReport)] == [Reason.AMBIGUOUS_LINK] * 2
    copies = list(iter_document_reports(path, copies=True))
    assert [one.study_instance_uid for one in copies] == ["1.2.840.7", "1.2.840.8"]


def test_a_report_that_names_nobody(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(report(subject={})))
    (found,) = iter_document_reports(tmp_path)
    assert isinstance(found, BrokenReport)
    assert found.reason is Reason.MISSING_IDENTIFIER
    with pytest.raises(ConfigError):
        list(iter_document_reports(tmp_path / "absent"))
