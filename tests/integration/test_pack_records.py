"""Clinical records and report documents through whole jobs: linked, packed, counted, and nothing leaves."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from pydicom.dataset import FileDataset

from shardflow.packing import PackSummary
from tests.dicom_factory import MadeStudy, make_study
from tests.pack_case import IN_PROCESSES, PackCase, read_ledger, tree_digests
from tests.pack_faults import HANDLERS
from tests.privacy.canaries import output_bytes
from tests.record_case import CANARIES, files_with_canaries, hidden_forms, make_pdf

pytestmark = pytest.mark.usefixtures("packs_inline")

LOOSE = "policy.max_quarantined_share=1.0"
MAPPING = """
[attachments]
window_hours = 48
[records]
max_days = 30
[[records.mappings]]
name = "lab"
format = "json"
root = "lab"
records = "lab/rows"
patient_id = "/lab/who/number"
time = "/lab/on"
identifying = ["/lab/who/name", "/lab/who/first", "/lab/who/town"]
[records.mappings.fields]
hb = {path = "hb", unit_path = "unit"}
why = {path = "why", type = "text"}
"""


def _of_patient(dataset: FileDataset, _: int) -> None:
    dataset.PatientID = CANARIES["mrn"]
    dataset.StudyDate, dataset.StudyTime, dataset.AccessionNumber = "20141001", "080000", "ACC-9-2014"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackCase, MadeStudy, PackSummary]:
    """One study, and documents of all kinds that name its patient and day alone."""
    case = PackCase(tmp_path_factory.mktemp("records"))
    case.prepare()
    with case.config_path.open("a", encoding="utf-8") as file:
        file.write(MAPPING)
    study = make_study(case.dicom / "a", num_slices=2, change=_of_patient)
    (case.dicom / "documents").mkdir()
    files_with_canaries(case.dicom / "documents")
    (case.dicom / "documents" / "broken.xml").write_bytes(b"<!DOCTYPE ClinicalDocument><ClinicalDocument/>")
    return case, study, case.pack(LOOSE)


def _fields(case: PackCase, study: MadeStudy) -> dict[str, bytes]:
    dataset = case.open()
    return dataset.read_fields(dataset.samples.find(case.sample_key(study.study_instance_uid)))


def test_records_are_packed_with_the_study_of_their_patient_and_day(
    made: tuple[PackCase, MadeStudy, PackSummary],
) -> None:
    case, study, summary = made
    assert summary.status == "packed"
    assert summary.reasons["ATTACHMENT_UNREADABLE"] == 1
    fields = _fields(case, study)
    records = json.loads(fields["records.json"])
    assert records["format_version"] == 1
    assert {fact["source"] for fact in records["facts"]} == {"cda", "fhir", "hl7v2", "mapped-lab"}
    (height,) = [
        fact for fact in records["facts"] if fact["source"] == "cda" and fact.get("value", {}).get("number")
    ]
    assert (height["codes"][0]["code"], height["value"]) == ("8302-2", {"number": 170, "unit": "cm"})
    hb = [
        fact["value"]["number"] for fact in records["facts"] if fact["source"] == "hl7v2" and "value" in fact
    ]
    assert hb == [13.2]
    assert {"day_offset": 0} in [fact.get("when") for fact in records["facts"]]
    documents = [name for name in fields if name.startswith("document.")]
    assert documents == [f"document.{one['document']:03d}.txt" for one in records["documents"]]
    assert documents == [f"document.{number:03d}.txt" for number in range(len(documents))]
    assert sum(b"no effusion" in fields[name] for name in documents) >= 4


def test_every_document_has_an_outcome(made: tuple[PackCase, MadeStudy, PackSummary]) -> None:
    case, study, _ = made
    key = case.sample_key(study.study_instance_uid)
    rows = [row for row in read_ledger(case.output) if row["kind"] == "attachment"]
    # C-CDA, HL7v2 and the mapped file as wholes; of the bundle and the lines, what is not years away.
    assert sum(row["outcome"] == "packed" and row["sample_key"] == key for row in rows) == 5
    assert {row["outcome"] for row in rows} <= {"packed", "quarantined", "skipped"}


def test_no_canary_is_in_any_byte(made: tuple[PackCase, MadeStudy, PackSummary]) -> None:
    case, *_ = made
    forms = [form.encode() for form in hidden_forms()]
    for name, data in output_bytes(case.output):
        lowered = data.lower()
        assert not [form for form in forms if form.lower() in lowered], name


def _message(text: str, status: str, more: str = "") -> bytes:
    c = CANARIES
    return "\r".join(
        [
            f"MSH|^~\\&|RIS|{c['clinic']}|||20141001||ORU^R01|1|P|2.5",
            f"PID|1||{c['mrn']}^^^H^MR||{c['family']}^{c['given']}",
            f"OBR|1|P1|ACC-9-2014||||20141001|||1^{c['doctor']}|||||||||||||||{status}",
            f"OBX|1|TX|X&{more or 'GDT'}||{text}||||||{status}",
        ]
    ).encode()


def test_reports_of_an_order(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    study = make_study(case.dicom / "a", num_slices=1, change=_of_patient)
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "1.hl7").write_bytes(_message("Preliminary.", "P"))
    (reports / "2.hl7").write_bytes(_message("Final.", "F"))
    (reports / "3.hl7").write_bytes(
        _message(f"Corrected: no effusion. Called {CANARIES['doctor']} of {CANARIES['clinic']}.", "C")
    )
    (reports / "4.hl7").write_bytes(_message("Addendum: none.", "F", more="ADT"))
    uid = f"\rOBX|2|UI|113014^DICOM Study^DCM||{study.study_instance_uid}||||||F".encode()
    (reports / "5.hl7").write_bytes(_message("Wrong patient.", "X") + uid)
    (reports / "6.hl7").write_bytes(_message("Other.", "F").replace(CANARIES["mrn"].encode(), b"somebody"))
    settings: list[Any] = [
        f"inputs.reports={reports}",
        "inputs.reports_format=documents",
        "inputs.layout.reports_of_one_study=append",
        LOOSE,
    ]
    summary = case.pack(*settings)
    text = _fields(case, study)["report.txt"].decode()
    assert text.startswith("FINDINGS:\nCorrected: no effusion.")
    assert "ADDENDUM:\nAddendum: none." in text
    assert "Final." not in text
    # The header of no image names the doctor: the message does.
    assert CANARIES["doctor"] not in text
    assert "Hohenflux" not in text
    assert summary.reasons == {
        "REPORT_WITHDRAWN": 1,
        "REPORT_WITHOUT_STUDY": 1,
        "SUPERSEDED_REPORT": 2,
    }


def _documents(case: PackCase) -> tuple[list[MadeStudy], list[str]]:
    """Write reports as PDF and RTF in files, a FHIR resource and an HL7 message; the studies, in order."""
    studies = []
    for number in range(5):

        def change(dataset: FileDataset, _: int, number: int = number) -> None:
            dataset.PatientID, dataset.AccessionNumber = f"P{number}", f"ACC-{number}"

        studies.append(make_study(case.dicom / f"d{number}", study=f"d{number}", num_slices=1, change=change))
    reports = case.folder / "documents"
    reports.mkdir()
    uids = [study.study_instance_uid for study in studies]
    (reports / f"{uids[0]}.pdf").write_bytes(make_pdf("FINDINGS:", "No effusion 0."))
    (reports / f"{uids[1]}.rtf").write_bytes(rb"{\rtf1 No effusion 1.}")
    (reports / f"{uids[2]}.pdf").write_bytes(make_pdf("No effusion 2."))
    data = base64.b64encode(make_pdf("No effusion 3.")).decode()
    form = [{"contentType": "application/pdf", "data": data}]
    link = [{"identifier": {"system": "urn:dicom:uid", "value": f"urn:oid:{uids[3]}"}}]
    resource = {
        "resourceType": "DiagnosticReport", "status": "final", "study": link, "presentedForm": form,
        "conclusion": "A nodule.",
    }  # fmt: skip
    (reports / "a.json").write_text(json.dumps(resource), encoding="utf-8")
    data = base64.b64encode(make_pdf("No effusion 4.")).decode()
    message = ["MSH|^~\\&|RIS|X|||20141001||ORU^R01|1|P|2.5", "PID|1||P4^^^H^MR", "OBR|1|P1|ACC-4"]
    message.append(f"OBX|1|ED|PDF||RIS^AP^PDF^Base64^{data}||||||F")
    (reports / "b.hl7").write_text("\r".join(message), encoding="ascii")
    return studies, [f"inputs.reports={reports}", "inputs.reports_format=documents", LOOSE]


def _texts(case: PackCase, studies: list[MadeStudy]) -> list[str]:
    return [_fields(case, study)["report.txt"].decode() for study in studies]


def test_reports_in_pdf_and_rtf_are_read_by_packing_processes(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    studies, settings = _documents(case)
    case.pack(*settings, "execution.num_processes=2")
    texts = _texts(case, studies)
    assert [f"No effusion {number}." in text for number, text in enumerate(texts)] == [True] * 5
    assert "IMPRESSION:\nA nodule." in texts[3]


@pytest.mark.parametrize("fault", ["kill", "raise", "segfault_once"])
def test_a_document_that_ends_its_process_costs_that_report_alone(tmp_path: Path, fault: str) -> None:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    studies, settings = _documents(case)
    case.write_faults(document={f"{studies[2].study_instance_uid}.pdf": fault})
    summary = case.pack(*settings, handlers=HANDLERS)
    kept = [study for number, study in enumerate(studies) if number != 2 or fault == "segfault_once"]
    assert all("No effusion" in text for text in _texts(case, kept))
    expected = {"kill": "WORKER_KILLED", "raise": "WORKER_FAILED"}.get(fault)
    assert summary.reasons.get(expected or "", 0) == (expected is not None)
    # It is known from then on: the same job, without the fault, has the same outcome.
    before = tree_digests(case.output)
    case.write_faults()
    assert case.pack(*settings).status == "already_packed"
    assert tree_digests(case.output) == before


def test_a_job_that_links_reports_again_reads_no_document_twice(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    studies, settings = _documents(case)
    case.pack(*settings)

    def of_known_patient(dataset: FileDataset, _: int) -> None:
        dataset.PatientID = "P0"

    # Of another study of its patient, which is no input this time, append reads headers too.
    new = make_study(tmp_path / "new", study="new", num_slices=1, change=of_known_patient)
    names = [f"{study.study_instance_uid}.pdf" for study in (studies[0], studies[2], new)]
    reports = tmp_path / "documents"
    (reports / names[2]).write_bytes(make_pdf("No effusion 5."))
    case.write_faults(document=dict.fromkeys(names, "count"))
    settings.append(f'inputs.dicom=["{tmp_path}/new"]')
    case.pack(*settings, mode="append", handlers=HANDLERS)
    assert "No effusion 5." in _texts(case, [new])[0]
    assert (tmp_path / "counted").read_text(encoding="ascii") == "x" * len(names)
    assert not list(case.private.glob("reports*"))


@pytest.mark.slow
def test_a_pdf_that_exhausts_its_process_costs_that_report_alone(tmp_path: Path) -> None:
    """A file of 1 MB that draws nothing, again and again: many minutes of work."""
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    studies, settings = _documents(case)
    path = tmp_path / "documents" / f"{studies[2].study_instance_uid}.pdf"
    path.write_bytes(make_pdf(*["No effusion."] * 400, operators=b"()Tj " * 300_000))
    summary = case.pack(*settings, "execution.task_timeout_s=15", handlers=IN_PROCESSES)
    assert all("No effusion" in text for text in _texts(case, [*studies[:2], *studies[3:]]))
    causes = [summary.reasons.get(f"WORKER_{how}", 0) for how in ("KILLED", "OUT_OF_MEMORY", "TIMEOUT")]
    assert sum(causes) == 1


def test_an_order_of_two_studies(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    studies = [
        make_study(case.dicom / name, study=name, num_slices=1, change=_of_patient) for name in ("A", "B")
    ]
    report = tmp_path / "report.hl7"
    report.write_bytes(_message("No effusion.", "F"))
    settings = [f"inputs.reports={report}", "inputs.reports_format=documents", LOOSE]
    summary = case.pack(*settings)
    assert summary.reasons["AMBIGUOUS_LINK"] == 2
    again = PackCase(tmp_path / "copies")
    again.folder.mkdir()
    again.prepare(has_reports=True)
    for name in ("A", "B"):
        make_study(again.dicom / name, study=name, num_slices=1, change=_of_patient)
    again.pack(*settings, "inputs.layout.report_of_several_studies=copy")
    for study in studies:
        assert _fields(again, study)["report.txt"] == b"FINDINGS:\nNo effusion.\n"
