"""Facts of FHIR resources, by a list of kinds and elements; what is not listed is ignored.

Names, identifiers, contacts, narratives, extensions, references and notes about people are on no list. A bulk
export has one file per type (``Patient.ndjson``, ``Observation.001.ndjson``); the files of patients, studies
and orders beside a file link its resources with a study.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shardflow.errors import SourceError
from shardflow.format.reasons import reading_source
from shardflow.packing.sources.documents.bounded import (
    HEAD_BYTES,
    DocumentForm,
    iter_json_lines,
    parse_json,
    read_bounded,
    read_json_line,
    recognise_document,
)
from shardflow.packing.sources.documents.facts import DocumentFacts
from shardflow.packing.sources.documents.fhir import (
    FhirIndex,
    Resource,
    as_list,
    as_text,
    attachment_document,
    attachment_text,
    codings,
    iter_resources,
    objects,
)

if TYPE_CHECKING:
    from shardflow.packing.attachments.records.record_filter import Fact, RecordFilter

_LINKING: Final = ("ImagingStudy", "Patient", "ServiceRequest")
_SEPARATORS: Final = str.maketrans("_-", "..")

_Stamp: TypeAlias = "tuple[str, int, int]"
"""Path, size and time of a file: what it holds stays the same while they do."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a file; those of lines are read again by where they begin."""

    path: Path
    form: DocumentForm
    index: FhirIndex = field(repr=False)
    has_others: bool
    """Whether the index knows files beside this one."""

    def resources(self) -> Iterator[tuple[int, Resource]]:
        """Yield all resources with their numbers.

        Raises:
            SourceError: The file, or one of its lines, cannot be read.
        """
        if self.form == "fhir":
            for number, (_, resource) in enumerate(iter_resources(parse_json(read_bounded(self.path)))):
                yield number, resource
            return
        for place, value in iter_json_lines(self.path):
            if isinstance(value, SourceError):
                # Most often the transfer was interrupted, so nothing of it is trusted.
                raise value
            for _, resource in iter_resources(value):
                yield place, resource

    def at(self, numbers: Iterable[int]) -> Iterator[Resource]:
        """Yield some resources by their numbers."""
        if self.form == "fhir":
            wanted = set(numbers)
            yield from (resource for number, resource in self.resources() if number in wanted)
            return
        for place in numbers:
            for _, resource in iter_resources(read_json_line(self.path, place)):
                yield resource

    def digest(self, facts: DocumentFacts) -> str:
        """Return a digest of the facts that other files gave to a resource; ``""`` without such files."""
        if not self.has_others:
            return ""
        said = [facts.study_uids, facts.accessions, facts.patient_ids, facts.people.values()]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode("ascii")).hexdigest()


def read_resources(path: Path) -> Resources:
    """Open a file of FHIR, and index what its resources refer to.

    Raises:
        SourceError: It cannot be read.
    """
    with reading_source(), path.open("rb") as file:
        form = recognise_document(file.read(HEAD_BYTES))
    is_lines = form == "fhir-lines" or (form == "fhir" and path.suffix.lower() == ".ndjson")
    others = _linking_files(path) if is_lines else []
    index = _index(tuple(_stamp(one) for one in [path, *others]), is_lines)
    return Resources(path, "fhir-lines" if is_lines else "fhir", index, bool(others))


def _linking_files(path: Path) -> list[Path]:
    """Return the files of the same export that others refer to, by their names."""
    found = []
    for other in path.parent.iterdir():
        parts = other.name.translate(_SEPARATORS).split(".")
        if other.suffix.lower() == ".ndjson" and other != path and set(parts) & set(_LINKING):
            found.append(other)
    return sorted(found)


def _stamp(path: Path) -> _Stamp:
    with reading_source():
        status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


# One export is read by many tasks of a process; two entries, so that neighbors do not evict each other.
@lru_cache(maxsize=2)
def _index(files: tuple[_Stamp, ...], is_lines: bool) -> FhirIndex:
    index = FhirIndex()
    for name, _, _ in files:
        path = Path(name)
        lines = (value for _, value in iter_json_lines(path))
        for value in lines if is_lines else [parse_json(read_bounded(path))]:
            if not isinstance(value, SourceError):
                for url, resource in iter_resources(value):
                    index.add(url, resource)
    return index


_SOURCE: Final = "fhir"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """The elements that are read of one type of resource."""

    name: str
    codes: Sequence[str] = ("code",)
    concepts: Mapping[str, str] = field(default_factory=dict)
    """Name in the fact, to the element with codes."""
    start: Sequence[str] = ()
    end: Sequence[str] = ()
    texts: Sequence[str] = ()
    counts: Mapping[str, str] = field(default_factory=dict)


_MEDICATION: Final = _Kind(
    name="medication",
    codes=("medicationCodeableConcept", "medication"),
    concepts={"category": "category", "reason": "reasonCode"},
    start=("effectiveDateTime", "effectivePeriod", "occurenceDateTime", "occurencePeriod", "authoredOn"),
    end=("effectivePeriod", "occurencePeriod"),
)
FHIR_KINDS: Final[Mapping[str, _Kind]] = {
    "AllergyIntolerance": _Kind(
        name="allergy",
        concepts={"clinical_status": "clinicalStatus", "verification": "verificationStatus"},
        start=("onsetDateTime", "onsetPeriod", "recordedDate", "assertedDate"),
    ),
    "Condition": _Kind(
        name="condition",
        concepts={
            "body_site": "bodySite",
            "category": "category",
            "clinical_status": "clinicalStatus",
            "severity": "severity",
            "verification": "verificationStatus",
        },
        start=("onsetDateTime", "onsetPeriod", "recordedDate", "assertedDate"),
        end=("abatementDateTime", "abatementPeriod"),
    ),
    "DiagnosticReport": _Kind(
        name="report",
        concepts={"category": "category", "conclusion": "conclusionCode"},
        start=("effectiveDateTime", "effectivePeriod", "issued"),
        texts=("conclusion",),
    ),
    "DocumentReference": _Kind(
        name="document",
        codes=("type",),
        concepts={"category": "category"},
        start=("date", "created", "indexed"),
    ),
    "Encounter": _Kind(
        name="encounter",
        codes=("type",),
        concepts={"class": "class", "reason": "reasonCode"},
        start=("period", "actualPeriod"),
        end=("period", "actualPeriod"),
    ),
    "ImagingStudy": _Kind(
        name="imaging_study",
        codes=("procedureCode",),
        concepts={"reason": "reasonCode"},
        start=("started",),
        counts={"num_instances": "numberOfInstances", "num_series": "numberOfSeries"},
    ),
    "Immunization": _Kind(
        name="immunization",
        codes=("vaccineCode",),
        concepts={"body_site": "site"},
        start=("occurrenceDateTime", "date"),
    ),
    "MedicationAdministration": _MEDICATION,
    "MedicationRequest": _MEDICATION,
    "MedicationStatement": _MEDICATION,
    "Observation": _Kind(
        name="observation",
        concepts={
            "body_site": "bodySite",
            "category": "category",
            "interpretation": "interpretation",
            "method": "method",
        },
        start=("effectiveDateTime", "effectivePeriod", "effectiveInstant", "issued"),
        end=("effectivePeriod",),
    ),
    "Procedure": _Kind(
        name="procedure",
        concepts={
            "body_site": "bodySite",
            "category": "category",
            "outcome": "outcome",
            "reason": "reasonCode",
        },
        start=("performedDateTime", "performedPeriod", "occurrenceDateTime", "occurrencePeriod"),
        end=("performedPeriod", "occurrencePeriod"),
    ),
    "ServiceRequest": _Kind(
        name="order",
        concepts={"body_site": "bodySite", "category": "category", "reason": "reasonCode"},
        start=("occurrenceDateTime", "occurrencePeriod", "authoredOn"),
    ),
}
"""Types of resources that give facts; a Patient gives its sex."""
_MAX_PARTS: Final = 64
_PERIOD_UNITS: Final = frozenset({"s", "min", "h", "d", "wk", "mo", "a"})


def write_resource(resource: Resource, index: FhirIndex, record_filter: RecordFilter) -> None:
    """Add the fact of a resource; one whose type is not on the list is counted."""
    name = as_text(resource.get("resourceType"))
    if name == "Patient":
        record_filter.add(_SOURCE, "patient", {"sex": record_filter.sex(as_text(resource.get("gender")))})
        return
    kind = FHIR_KINDS.get(name)
    if kind is None:
        record_filter.left_out["KIND_NOT_ON_LIST"] += 1
        return
    if as_text(resource.get("status")) == "entered-in-error":
        record_filter.left_out["ENTERED_IN_ERROR"] += 1
        return
    fact: Fact = {
        "codes": record_filter.codes(_coded(resource, kind.codes, index)),
        "status": record_filter.status(as_text(resource.get("status"))),
        "when": _moment(resource, kind.start, "start", record_filter),
        "end": _moment(resource, kind.end, "end", record_filter) if kind.end else None,
    }
    for said, element in kind.concepts.items():
        fact[said] = record_filter.codes(_coded(resource, (element,), index))
    for said, element in kind.counts.items():
        fact[said] = (record_filter.quantity(resource.get(element), "1") or {}).get("number")
    match kind.name:
        case "observation":
            fact |= _value(resource, record_filter, kind.name)
            fact["components"] = [
                part
                for one in list(objects(resource.get("component")))[:_MAX_PARTS]
                if (part := _component(one, record_filter))
            ]
            fact["reference_range"] = _reference_range(resource, record_filter)
        case "medication":
            fact["dosage"] = _dosage(resource, record_filter)
        case "imaging_study":
            fact["modality"] = record_filter.codes(_modalities(resource))
        case _:
            pass
    text = "\n\n".join(_texts(resource, kind, index, record_filter))
    if text:
        fact |= {"document": record_filter.document(text, kind.name), "line": None}
    record_filter.add(_SOURCE, kind.name, fact)


def _coded(
    resource: Resource, elements: Sequence[str], index: FhirIndex | None = None
) -> Iterator[tuple[str, str, str]]:
    for element in elements:
        value = resource.get(element)
        for one in objects(value):
            concept = one.get("concept", one)
            # An element may be a concept, a bare coding, or (R5) either a concept or a reference.
            found = list(codings(concept)) or [concept]
            for coding in found:
                if isinstance(coding, dict):
                    yield (
                        as_text(coding.get("system")),
                        as_text(coding.get("code")),
                        as_text(coding.get("display")),
                    )
    if index is not None and elements == _MEDICATION.codes:
        references = [resource.get("medicationReference")]
        references += [one.get("reference") for one in objects(resource.get("medication"))]
        for reference in references:
            medication = index.resolve(reference, resource) if reference else None
            if medication is not None:
                yield from _coded(medication, ("code",), index)


def _moment(
    resource: Resource, elements: Sequence[str], side: str, record_filter: RecordFilter
) -> dict[str, Any] | None:
    for element in elements:
        value = resource.get(element)
        text = as_text(value.get(side)) if isinstance(value, dict) else as_text(value)
        if text and (side == "start" or isinstance(value, dict) or element.startswith("abatement")):
            return record_filter.when(text)
    return None


def _value(resource: Resource, record_filter: RecordFilter, kind: str) -> Fact:
    """Return the value of an observation or of a part of one."""
    if isinstance(quantity := resource.get("valueQuantity"), dict):
        return {"value": _quantity(quantity, record_filter)}
    if isinstance(concept := resource.get("valueCodeableConcept"), dict):
        if not concept.get("coding"):
            return record_filter.note(as_text(concept.get("text")), kind)
        codes = record_filter.codes(_coded(resource, ("valueCodeableConcept",)))
        return {"value": {"codes": codes} if codes else None}
    for name in ("valueInteger", "valueDecimal"):
        if isinstance(number := resource.get(name), int | float):
            return {"value": record_filter.quantity(number, "1")}
    if isinstance(flag := resource.get("valueBoolean"), bool):
        return {"value": {"flag": flag}}
    if isinstance(interval := resource.get("valueRange"), dict):
        return {"value": _interval(interval, record_filter)}
    if isinstance(ratio := resource.get("valueRatio"), dict):
        parts = [_quantity(ratio.get(name), record_filter) for name in ("numerator", "denominator")]
        return {"value": {"numerator": parts[0], "denominator": parts[1]}} if all(parts) else {}
    if text := as_text(resource.get("valueDateTime")):
        when = record_filter.when(text)
        return {"value": {"when": when} if when else None}
    if text := as_text(resource.get("valueString")):
        # A number may be written as a text.
        quantity = record_filter.quantity(text, "1")
        return {"value": quantity} if quantity is not None else record_filter.note(text, kind)
    return {}


def _component(part: Resource, record_filter: RecordFilter) -> Fact:
    kept = _without_empty(
        {
            "codes": record_filter.codes(_coded(part, ("code",))),
            "interpretation": record_filter.codes(_coded(part, ("interpretation",))),
            **_value(part, record_filter, "observation"),
        }
    )
    return kept if "codes" in kept else {}


def _quantity(value: Any, record_filter: RecordFilter) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    code, unit = as_text(value.get("code")), as_text(value.get("unit"))
    return record_filter.quantity(value.get("value"), code or unit, as_text(value.get("comparator")))


def _interval(value: Resource, record_filter: RecordFilter) -> dict[str, Any] | None:
    ends = {name: _quantity(value.get(name), record_filter) for name in ("low", "high")}
    return {name: end for name, end in ends.items() if end} or None


def _reference_range(resource: Resource, record_filter: RecordFilter) -> list[dict[str, Any]]:
    ranges = [_interval(one, record_filter) for one in objects(resource.get("referenceRange"))]
    return [one for one in ranges[:_MAX_PARTS] if one]


def _dosage(resource: Resource, record_filter: RecordFilter) -> list[dict[str, Any]]:
    """Return doses, routes and frequencies; instructions in words are dropped."""
    found = []
    for one in [*objects(resource.get("dosageInstruction")), *objects(resource.get("dosage"))][:_MAX_PARTS]:
        dose = [
            _quantity(part.get("doseQuantity"), record_filter) for part in objects(one.get("doseAndRate"))
        ]
        dose.append(_quantity(one.get("doseQuantity") or one.get("dose"), record_filter))
        said: Fact = {
            "dose": next((each for each in dose if each), None),
            "route": record_filter.codes(_coded(one, ("route",))),
        }
        for timing in objects(one.get("timing")):
            for repeat in objects(timing.get("repeat")):
                said["frequency"] = record_filter.number(repeat.get("frequency"))
                unit = as_text(repeat.get("periodUnit"))
                period = record_filter.number(repeat.get("period"))
                if unit in _PERIOD_UNITS and period is not None:
                    said["period"] = {"number": period, "unit": unit}
        if isinstance(one.get("asNeededBoolean"), bool):
            said["as_needed"] = one["asNeededBoolean"]
        found.append(_without_empty(said))
    return [dose for dose in found if dose]


def _modalities(resource: Resource) -> Iterator[tuple[str, str, str]]:
    for holder in (resource, *objects(resource.get("series"))):
        yield from _coded(holder, ("modality",))


def _texts(resource: Resource, kind: _Kind, index: FhirIndex, record_filter: RecordFilter) -> Iterator[str]:
    for element in kind.texts:
        if text := as_text(resource.get(element)):
            yield text
    forms = [*as_list(resource.get("presentedForm"))] if kind.name == "report" else []
    if kind.name == "document":
        forms = [one.get("attachment") for one in objects(resource.get("content"))]
    texts = [attachment_text(form, resource, index).strip() for form in objects(forms)]
    if not any(texts):  # else a PDF is the same text in another medium
        documents = (attachment_document(form, resource, index) for form in objects(forms))
        texts = [record_filter.text_of(document).strip() for document in documents]
    yield from filter(None, texts)
    for note in objects(resource.get("note")):
        if text := as_text(note.get("text")):
            yield text


def _without_empty(fact: Fact) -> Fact:
    return {name: value for name, value in fact.items() if value not in (None, [], {})}
