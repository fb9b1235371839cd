"""Reader of FHIR resources (DSTU2 to R5): their place in a file, people, study links and report text.

Resources are read without validation: exports of real systems seldom pass one. The text of a
DiagnosticReport is its presented form (PDF or RTF where none is text) and conclusion; the generated
narrative (``text.div``) repeats header data, is not what the doctor wrote, and is not read.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any, Final, TypeAlias

from shardflow.format.reasons import Reason
from shardflow.packing.sources.attachments import PatientNumber
from shardflow.packing.sources.documents.facts import (
    NOT_REPORT,
    DocumentFacts,
    DocumentReport,
    NoReport,
    People,
    first_moment,
    patient_numbers,
    uid_of,
    unique,
)
from shardflow.packing.sources.reports import ReportDocument, encoded_document

Resource: TypeAlias = Mapping[str, Any]

_INDEXED: Final = frozenset({"Binary", "Encounter", "ImagingStudy", "Patient", "Procedure", "ServiceRequest"})
"""Resources that others refer to; only these of every file stay in memory."""
_ACCESSION: Final = "ACSN"
_SOCIAL: Final = frozenset({"DL", "PPN", "SB", "SS"})
_RECORD_NUMBER: Final = "MR"
_STUDY_LINKS: Final = ("imagingStudy", "study", "basedOn", "partOf", "derivedFrom", "focus", "about")
_TIMES: Final = (
    "started",
    "effectiveDateTime",
    "effectiveInstant",
    "effectivePeriod",
    "performedDateTime",
    "performedPeriod",
    "occurrenceDateTime",
    "occurrencePeriod",
    "period",
    "authoredOn",
    "onsetDateTime",
    "recordedDate",
    "recorded",
    "dateAsserted",
    "issued",
    "date",
    "created",
)
"""Elements that state the time of an event, the most reliable first."""
_SUBJECTS: Final = ("subject", "patient")
_MAX_NESTING: Final = 4
"""Bundles inside bundles."""
_MAX_REFERENCES: Final = 256


def as_list(value: Any) -> Sequence[Any]:
    """Return the elements of a value that may be one, several or none."""
    return value if isinstance(value, list) else [] if value is None else [value]


def as_text(value: Any) -> str:
    """Return a value that is a text, stripped; ``""`` for others."""
    return value.strip() if isinstance(value, str) else ""


def objects(value: Any) -> Iterator[Resource]:
    """Return the objects of a value that may be one, several or none."""
    return (one for one in as_list(value) if isinstance(one, dict))


def codings(concept: Any) -> Iterator[Resource]:
    """Return the codings of a CodeableConcept, or of a list of them."""
    for one in objects(concept):
        yield from objects(one.get("coding"))


def iter_resources(value: Any, depth: int = 0) -> Iterator[tuple[str, Resource]]:
    """Return the resources of a parsed file, a bundle's or itself, each with its full URL or ``""``."""
    for one in objects(value):
        if one.get("resourceType") != "Bundle":
            yield "", one
        elif depth < _MAX_NESTING:
            for entry in objects(one.get("entry")):
                for url, resource in iter_resources(entry.get("resource"), depth + 1):
                    yield url or as_text(entry.get("fullUrl")), resource


class FhirIndex:
    """Resources that others refer to, by what they are called."""

    def __init__(self) -> None:
        self._by_name: dict[str, Resource] = {}
        self._patients: dict[int, People] = {}
        # Patients whose name is another's too, as numbers of two servers are: by `id`.
        self._namesakes: set[int] = set()

    def add(self, url: str, resource: Resource) -> None:
        """Take a resource in, if others refer to its kind."""
        kind = as_text(resource.get("resourceType"))
        if kind not in _INDEXED:
            return
        identity = as_text(resource.get("id"))
        for name in (
            url,
            f"{kind}/{identity}" if identity else "",
            f"urn:uuid:{identity}" if identity else "",
        ):
            if name:
                known = self._by_name.setdefault(name, resource)
                if known is not resource and set(patient_ids(known)).isdisjoint(patient_ids(resource)):
                    self._namesakes.add(id(known))

    def resolve(self, reference: Any, holder: Resource) -> Resource | None:
        """Return the resource that a reference names: contained in its holder, or known."""
        text = as_text(reference.get("reference")) if isinstance(reference, dict) else as_text(reference)
        if text.startswith("#"):
            contained = objects(holder.get("contained"))
            return next((one for one in contained if as_text(one.get("id")) == text[1:]), None)
        if (found := self._by_name.get(text)) is not None:
            return found
        return self._by_name.get("/".join(text.split("/_history/")[0].split("/")[-2:]))

    def facts(self, resource: Resource) -> DocumentFacts:
        """Return the linking facts of a resource, with those of its patient and of the studies it names."""
        facts = DocumentFacts()
        facts.people.merge(resource_people(resource).values())
        self._link(resource, facts)
        patient = self.patient(resource)
        for name in _SUBJECTS:
            for reference in objects(resource.get(name)):
                facts.patient_ids += _identifiers(reference.get("identifier"))
                facts.people.patient_name(as_text(reference.get("display")))
        if patient is not None:
            facts.patient_ids += patient_ids(patient)
            known = self._patients.setdefault(id(patient), resource_people(patient))
            facts.people.merge(known.values())
        facts.patient_ids = unique(facts.patient_ids)
        facts.patient_numbers = list(self._numbers(resource, patient))
        facts.study_uids, facts.accessions = unique(facts.study_uids), unique(facts.accessions)
        facts.time = first_moment(_start(value) for name in _TIMES for value in as_list(resource.get(name)))
        return facts

    def patient(self, resource: Resource) -> Resource | None:
        """Return the patient of a resource, where it is known."""
        if resource.get("resourceType") == "Patient":
            return resource
        for name in _SUBJECTS:
            for reference in objects(resource.get(name)):
                found = self.resolve(reference, resource)
                if found is not None and found.get("resourceType") == "Patient":
                    return found
        return None

    def _numbers(self, resource: Resource, patient: Resource | None) -> Iterator[PatientNumber]:
        """Yield the numbers of the patient that a resource is about; none if it is of several, or a thing."""
        if patient is not None and id(patient) in self._namesakes:
            return
        about = [one for name in _SUBJECTS for one in objects(resource.get(name))]
        for one in about:
            holder = as_text(one.get("reference")).split("/_history/")[0].rpartition("/")[0]
            kind = (as_text(one.get("type")) or holder).rpartition("/")[2]
            if len(about) > 1 or kind not in {"", "Patient"}:
                return
            yield from _patient_numbers(one.get("identifier"))
        if patient is not None:
            yield from _patient_numbers(patient.get("identifier"))

    def _link(self, resource: Resource, facts: DocumentFacts) -> None:
        if resource.get("resourceType") == "ImagingStudy":
            _study(resource, facts)
        facts.accessions += _accessions(resource)
        references = [
            *(reference for name in _STUDY_LINKS for reference in objects(resource.get(name))),
            *(
                reference
                for context in objects(resource.get("context"))
                for reference in objects(context.get("related"))
            ),
        ]
        for reference in references[:_MAX_REFERENCES]:
            for identifier in objects(reference.get("identifier")):
                _by_identifier(identifier, facts)
            target = self.resolve(reference, resource)
            if target is None:
                continue
            if target.get("resourceType") == "ImagingStudy":
                _study(target, facts)
            facts.accessions += _accessions(target)


def patient_ids(patient: Resource) -> list[str]:
    """Return the identifiers of a patient: record numbers first, those of other lives last."""
    return _identifiers(patient.get("identifier"))


def resource_people(resource: Resource) -> People:  # noqa: C901 - one case for each form of a name
    """Return every name, number, address and telephone of a resource, wherever it stands."""
    people = People()
    is_patient = resource.get("resourceType") == "Patient"
    is_place = resource.get("resourceType") in {"HealthcareService", "Location", "Organization"}
    stack: list[tuple[str, Any]] = [("", resource)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, list):
            stack += [(key, one) for one in value]
        elif isinstance(value, dict):
            if key in {"identifier", "accession"}:
                people.identifier(as_text(value.get("value")))
            if "family" in value or "given" in value:
                parts = [as_text(one) for name in ("given", "family") for one in as_list(value.get(name))]
                add = people.patient_name if is_patient and key == "name" else people.name
                add(" ".join(filter(None, parts)))
                add(as_text(value.get("text")))
            if key in {"address", "valueAddress"}:
                parts = [
                    as_text(one)
                    for name in ("line", "city", "district", "postalCode", "text")
                    for one in as_list(value.get(name))
                ]
                for part in (*parts, " ".join(filter(None, parts))):
                    people.place(part)
            if key in {"telecom", "valueContactPoint"}:
                people.phone(as_text(value.get("value")))
            if is_patient and "name" in as_text(value.get("url")).lower():
                people.name(as_text(value.get("valueString")))
            if key in _PERSONS and "reference" in value:
                people.name(as_text(value.get("display")))
            stack += value.items()
        elif key == "name" and isinstance(value, str):
            (people.place if is_place else people.name)(value)
        elif key == "birthDate" and isinstance(value, str):
            people.birth_date(value)
        elif key == "id" and isinstance(value, str) and is_patient:
            people.identifier(value)
    return people


_PERSONS: Final = frozenset(
    {"actor", "asserter", "attester", "author", "individual", "informationSource", "interpreter", "member"}
    | {"patient", "performer", "practitioner", "recorder", "requester", "resultsInterpreter", "subject"}
)
"""Elements whose reference may show the name of a person."""


def _study(resource: Resource, facts: DocumentFacts) -> None:
    """The identifiers of an ImagingStudy, of all versions."""
    uids = [
        *(as_text(one.get("value")) for one in objects(resource.get("identifier"))),
        as_text(resource.get("uid")),
    ]
    facts.study_uids += [uid for uid in map(uid_of, uids) if uid]
    for series in objects(resource.get("series")):
        if uid := uid_of(as_text(series.get("uid"))):
            facts.series_uids.append(uid)
        for instance in objects(series.get("instance")):
            uid = uid_of(as_text(instance.get("uid")))
            if uid and len(facts.sop_uids) < _MAX_REFERENCES:
                facts.sop_uids.append(uid)


def _by_identifier(identifier: Resource, facts: DocumentFacts) -> None:
    value = as_text(identifier.get("value"))
    if as_text(identifier.get("system")) == "urn:dicom:uid":
        facts.study_uids.append(uid_of(value))
    elif _kind_of(identifier) == _ACCESSION:
        facts.accessions.append(value)


def _accessions(resource: Resource) -> list[str]:
    identifiers = objects(resource.get("identifier"))
    found = [as_text(one.get("value")) for one in identifiers if _kind_of(one) == _ACCESSION]
    # STU3 has an element of its own.
    return [*found, *(as_text(one.get("value")) for one in objects(resource.get("accession")))]


def _identifiers(value: Any) -> list[str]:
    ranked = [
        (2 if _kind_of(one) in _SOCIAL else int(_kind_of(one) != _RECORD_NUMBER), as_text(one.get("value")))
        for one in objects(value)
    ]
    return [text for _, text in sorted(ranked, key=lambda one: one[0])]


def _patient_numbers(value: Any) -> list[PatientNumber]:
    """Return the identifiers of a list that are numbers of the patient, by their types or systems."""
    return patient_numbers(
        (as_text(one.get("value")), as_text(one.get("system")), _kind_of(one))
        for one in objects(value)
        if _kind_of(one) or not one.get("type")  # a type in words alone may be any
    )


def _kind_of(identifier: Resource) -> str:
    return next((as_text(one.get("code")) for one in codings(identifier.get("type"))), "")


def _start(value: Any) -> str:
    return as_text(value.get("start")) if isinstance(value, dict) else as_text(value)


_STATUS: Final = {
    "amended": "corrected",
    "appended": "corrected",
    "corrected": "corrected",
    "final": "final",
    "partial": "preliminary",
    "preliminary": "preliminary",
    "registered": "preliminary",
    "unknown": "preliminary",
}
_WITHDRAWN: Final = frozenset({"cancelled", "entered-in-error"})
_MAX_TEXT: Final = 1 << 24
_BLOCKS: Final = frozenset({"br", "div", "h1", "h2", "h3", "h4", "li", "p", "pre", "table", "tr"})
_HIDDEN: Final = frozenset({"head", "script", "style"})


def read_fhir_report(resource: Resource, index: FhirIndex) -> DocumentReport | NoReport:
    """Read a resource; those of other kinds and those without text give no report."""
    if resource.get("resourceType") != "DiagnosticReport":
        return NOT_REPORT
    facts = index.facts(resource)
    status = as_text(resource.get("status")).lower()
    if status in _WITHDRAWN:
        return NoReport(reason=Reason.REPORT_WITHDRAWN, facts=facts)
    texts = [attachment_text(form, resource, index) for form in objects(resource.get("presentedForm"))]
    # Several forms of one report are the same text in several media.
    text = next((one for one in texts if one), "")
    found = (attachment_document(form, resource, index) for form in objects(resource.get("presentedForm")))
    document = None if text else next((one for one in found if one is not None), None)
    conclusion = as_text(resource.get("conclusion"))
    if conclusion and " ".join(conclusion.split()) not in " ".join(text.split()):
        text = f"{text.rstrip()}\n\nIMPRESSION:\n{conclusion}\n".lstrip("\n")
    if not text.strip() and document is None:
        return NoReport(reason=Reason.NOT_REPORT, facts=facts)
    return DocumentReport(text=text, status=_STATUS.get(status, "final"), facts=facts, document=document)


def attachment_text(attachment: Resource, holder: Resource, index: FhirIndex) -> str:
    """Return the text of an Attachment: plain or HTML, in it or in a Binary of the same export.

    Other media give none; see `attachment_document`.
    """
    data, media = _content(attachment, holder, index)
    kind, _, parameters = media.lower().partition(";")
    if kind.strip() not in {"text/html", "text/plain"}:
        return ""
    if not isinstance(data, str) or len(data) > 2 * _MAX_TEXT:
        return ""
    try:
        raw = base64.b64decode("".join(data.split()), validate=True)
    except ValueError:
        return ""
    text = _decode(raw, parameters)
    return _html_text(text) if kind.strip() == "text/html" else text.replace("\r\n", "\n")


def attachment_document(attachment: Resource, holder: Resource, index: FhirIndex) -> ReportDocument | None:
    """Return the PDF or RTF of an Attachment; None if it is of another kind."""
    data, media = _content(attachment, holder, index)
    return encoded_document(media, data) if isinstance(data, str) and data else None


def _content(attachment: Resource, holder: Resource, index: FhirIndex) -> tuple[Any, str]:
    """Return the data and the media type of an Attachment, or of the Binary that it names."""
    data, media = attachment.get("data"), as_text(attachment.get("contentType"))
    if data is None and (url := as_text(attachment.get("url"))):
        binary = index.resolve(url, holder)
        if binary is not None and binary.get("resourceType") == "Binary":
            data = binary.get("data", binary.get("content"))
            media = media or as_text(binary.get("contentType"))
    return data, media


def _decode(raw: bytes, parameters: str) -> str:
    charset = parameters.partition("charset=")[2].strip(" \"'").split(";")[0]
    for name in (charset, "utf-8-sig"):
        if name in {"iso-8859-1", "latin-1", "us-ascii", "utf-16", "utf-8", "utf-8-sig", "windows-1252"}:
            try:
                return raw.decode(name)
            except UnicodeDecodeError:
                continue
    return raw.decode("latin-1")


class _Text(HTMLParser):
    """Collects what a reader sees."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._num_hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - of the base class
        self._num_hidden += tag in _HIDDEN
        if tag in _BLOCKS:
            self.parts.append("\0")

    def handle_endtag(self, tag: str) -> None:
        self._num_hidden = max(self._num_hidden - (tag in _HIDDEN), 0)
        if tag in _BLOCKS:
            self.parts.append("\0")

    def handle_data(self, data: str) -> None:
        if not self._num_hidden:
            self.parts.append(" ".join(f".{data}.".replace("\0", " ").split())[1:-1])


def _html_text(text: str) -> str:
    parser = _Text()
    parser.feed(text)
    parser.close()
    return "\n".join(_lines("".join(parser.parts))) + "\n"


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.split("\0") if line.strip())
