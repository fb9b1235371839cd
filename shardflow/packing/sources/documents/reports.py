"""Reader of a file or folder of clinical documents: each file is read by the format of its content.

The records are those of the table reader (`shardflow.packing.sources.reports`), with accession numbers and
patients in addition, because such documents seldom name the study itself.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from shardflow.errors import ConfigError, SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.sources.documents.bounded import (
    HEAD_BYTES,
    DocumentForm,
    DocumentLimits,
    iter_json_lines,
    parse_json,
    parse_xml,
    read_bounded,
    recognise_document,
)
from shardflow.packing.sources.documents.cda import read_cda_report
from shardflow.packing.sources.documents.facts import NOT_REPORT, DocumentReport, NoReport, uid_of
from shardflow.packing.sources.documents.fhir import FhirIndex, iter_resources, read_fhir_report
from shardflow.packing.sources.documents.hl7 import read_hl7_reports
from shardflow.packing.sources.documents.sr import read_sr_report
from shardflow.packing.sources.reports import (
    READERS,
    REPORT_FILES,
    BrokenReport,
    ReportRecord,
    ReportRole,
    read_report_file,
)

_LIMITS: Final = DocumentLimits()
_ROLES: Final = {str(role): role for role in get_args(ReportRole)}


def iter_document_reports(path: Path, *, copies: bool = False) -> Iterator[ReportRecord | BrokenReport]:
    """Read the reports of a file or folder, in the order of the names of files.

    A file named ``<StudyInstanceUID>.txt``, ``.pdf`` or ``.rtf`` is a report as well. One file may hold many
    reports (a bundle, NDJSON, messages one after another); a resource or message that is none is no input of
    its own, a file without any is NOT_REPORT.

    Args:
        path: The file or folder.
        copies: Whether a report of several studies is copied to each; else it is ambiguous.

    Raises:
        ConfigError: There is no such file or folder, or the package that reads PDF or RTF is missing.
    """
    if not path.exists():
        raise ConfigError(
            "the reports must be a file or a folder, got neither; check the path in the configuration."
        )
    files = [path]
    if path.is_dir():
        files = sorted((one for one in path.rglob("*") if one.is_file()), key=os.fsencode)
    reader = _Reader()
    reader.index_resources(files)
    place = 0
    for file in files:
        for found in reader.read(file):
            for record in _records(found, copies=copies):
                place += 1
                yield dataclasses.replace(record, place=place)


class _Reader:
    """Reads files of any form; knows the FHIR resources that others refer to, in whatever file they are."""

    def __init__(self) -> None:
        self._index = FhirIndex()

    def index_resources(self, files: list[Path]) -> None:
        """Learn the names of patients, orders and studies."""
        for path in files:
            form = _form(path)
            if form not in {"fhir", "fhir-lines"}:
                continue
            try:
                for value in self._values(path, form):
                    if not isinstance(value, SourceError):
                        for url, resource in iter_resources(value):
                            self._index.add(url, resource)
            except SourceError:
                continue  # it is named when it is read

    def read(self, path: Path) -> Iterator[DocumentReport | NoReport | ReportRecord | BrokenReport]:
        """Read one file: its reports and what is wrong with it, or one reason why it has none."""
        num_found = 0
        try:
            for found in self._read(path):
                if found is not NOT_REPORT and not (
                    isinstance(found, NoReport) and found.reason is Reason.NOT_REPORT
                ):
                    num_found += 1
                    yield found
        except SourceError as error:
            num_found += 1
            yield NoReport(reason=_reason(error))
        if not num_found:
            yield NOT_REPORT

    def _read(self, path: Path) -> Iterator[DocumentReport | NoReport | ReportRecord | BrokenReport]:
        form = _form(path)
        if form == "dicom":
            yield read_sr_report(path, _LIMITS)
        elif form == "cda":
            yield read_cda_report(parse_xml(read_bounded(path, _LIMITS), _LIMITS))
        elif form == "hl7v2":
            yield from read_hl7_reports(read_bounded(path, _LIMITS))
        elif form in {"fhir", "fhir-lines"}:
            for value in self._values(path, form):
                if isinstance(value, SourceError):
                    yield NoReport(reason=_reason(value))
                    continue
                for _, resource in iter_resources(value):
                    yield read_fhir_report(resource, self._index)
        elif form is None and path.suffix.lower() in REPORT_FILES and uid_of(path.stem):
            yield read_report_file(path, 1, path.stem)

    def _values(self, path: Path, form: DocumentForm | None) -> Iterator[object]:
        if form == "fhir":
            yield parse_json(read_bounded(path, _LIMITS), _LIMITS)
        else:
            for _, value in iter_json_lines(path, _LIMITS):
                yield value


def _form(path: Path) -> DocumentForm | None:
    if path.suffix.lower() in READERS:
        return None  # an RTF begins as JSON does
    try:
        with path.open("rb") as file:
            return recognise_document(file.read(HEAD_BYTES))
    except OSError:
        return None


def _reason(error: SourceError) -> Reason:
    reason = Reason(error.reason)
    # What headers of images are called; here it is a report that cannot be read.
    return Reason.REPORT_UNREADABLE if reason in {Reason.HEADER_UNREADABLE, Reason.NOT_DICOM} else reason


def _records(
    found: DocumentReport | NoReport | ReportRecord | BrokenReport, *, copies: bool
) -> Iterator[ReportRecord | BrokenReport]:
    """Turn what was found into records: one for each study that it names."""
    if isinstance(found, (ReportRecord, BrokenReport)):
        yield found
        return
    facts = found.facts
    studies = facts.study_uids if facts is not None else []
    for study in studies or [""]:
        if isinstance(found, NoReport):
            yield BrokenReport(place=0, reason=found.reason, detail=found.detail, study_instance_uid=study)
        elif not (study or (found.facts.accessions and found.facts.patient_ids)):
            yield BrokenReport(place=0, reason=Reason.MISSING_IDENTIFIER, detail="no study and no order")
        elif len(studies) > 1 and not copies:
            yield BrokenReport(place=0, reason=Reason.AMBIGUOUS_LINK, detail="", study_instance_uid=study)
        else:
            if found.document is not None:
                found.document.check_reader()
            yield ReportRecord(
                study_instance_uid=study,
                text=found.text.replace("\r\n", "\n").replace("\r", "\n"),
                place=0,
                role=_ROLES[found.status],
                document=found.document,
                accessions=tuple(found.facts.accessions),
                patient_ids=tuple(found.facts.patient_ids),
                patient_numbers=tuple(found.facts.patient_numbers),
                people=found.facts.people.values(),
            )
