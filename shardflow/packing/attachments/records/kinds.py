"""Attachment kinds of clinical records: FHIR, C-CDA, HL7v2, and files that mappings describe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardflow.errors import SourceError
from shardflow.format.reasons import Reason, source_error
from shardflow.packing.attachments.records.cda import write_document
from shardflow.packing.attachments.records.fhir import FHIR_KINDS, read_resources, write_resource
from shardflow.packing.attachments.records.hl7v2 import write_group, write_message
from shardflow.packing.attachments.records.mapping import (
    RecordMapping,
    RecordsConfig,
    find_records,
    mapped_facts,
    write_mapped,
)
from shardflow.packing.attachments.records.record_filter import RecordFilter
from shardflow.packing.sources.attachments import Attached, AttachmentItem, AttachmentKind, StudyContext
from shardflow.packing.sources.documents.bounded import (
    iter_json_lines,
    parse_json,
    parse_xml,
    read_bounded,
    read_json_line,
    recognise_document,
)
from shardflow.packing.sources.documents.cda import cda_facts
from shardflow.packing.sources.documents.facts import DocumentFacts, People
from shardflow.packing.sources.documents.hl7 import (
    Message,
    Segment,
    decode_message,
    group_facts,
    groups_of,
    message_people,
    read_messages,
)

_PART: Final = "records"
_DOCUMENTS: Final = "documents"
_VERSION: Final = 1
_SHOWN_SOPS: Final = 16
_MAX_ITEMS: Final = 1 << 20

Write = Callable[[RecordFilter], None]


def record_kinds(settings: RecordsConfig) -> tuple[AttachmentKind, ...]:
    """Return the kinds; mapped ones first, since they are the most specific."""
    mapped = tuple(_Mapped(settings, mapping) for mapping in settings.mappings)
    return (*mapped, _Fhir(settings), _Cda(settings), _Hl7(settings))


@dataclass(frozen=True, slots=True)
class _Records:
    """Shared part of the kinds."""

    settings: RecordsConfig

    @property
    def version(self) -> int:
        return _VERSION

    @property
    def sop_classes(self) -> frozenset[str]:
        return frozenset()

    def _attach(self, study: StudyContext, people: People, write: Write) -> Attached:
        """Write records and return their fields and parts."""
        record_filter = RecordFilter(
            study,
            people,
            free_text=self.settings.free_text,
            max_days=self.settings.max_days,
            first_document=study.num(_PART, _DOCUMENTS),
        )
        write(record_filter)
        first = study.num(_PART, _DOCUMENTS)
        left_out = [
            {"count": count, "reason": reason}
            for reason, count in sorted(record_filter.left_out.items())
            if count
        ]
        parts: dict[str, Sequence[Any]] = {
            "facts": record_filter.facts,
            _DOCUMENTS: record_filter.document_rows,
            "left_out": left_out,
        }
        return Attached(
            fields={
                f"document.{number:03d}.txt": text
                for number, text in enumerate(record_filter.documents, start=first)
            },
            parts={_PART: {name: rows for name, rows in parts.items() if rows}},
        )


@dataclass(frozen=True, slots=True)
class _Fhir(_Records):
    """Bundles, single resources and NDJSON; a record is a resource."""

    @property
    def name(self) -> str:
        return "fhir"

    def recognise(self, path: Path, head: bytes) -> bool:  # noqa: ARG002 - by content
        return recognise_document(head) in {"fhir", "fhir-lines"}

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        with _as_attachment():
            resources = read_resources(path)
            items: list[AttachmentItem] = []
            num_patients = 0
            for place, resource in resources.resources():
                name = resource.get("resourceType")
                num_patients += name == "Patient"
                if name in FHIR_KINDS:
                    facts = resources.index.facts(resource)
                    items.append(_item(place, facts, resources.digest(facts)))
                    _check_number(items)
            if not items and not num_patients:
                raise source_error(Reason.NOT_ATTACHMENT)
            return items

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:
        with _as_attachment():
            resources = read_resources(path)
            chosen = list(resources.at(items))
            people = People()
            for resource in chosen:
                people.merge(resources.index.facts(resource).people.values())

            def write(record_filter: RecordFilter) -> None:
                patient = next(filter(None, map(resources.index.patient, chosen)), None)
                if patient is not None:
                    write_resource(patient, resources.index, record_filter)
                for resource in chosen:
                    write_resource(resource, resources.index, record_filter)

            return self._attach(study, people, write)


@dataclass(frozen=True, slots=True)
class _Cda(_Records):
    """Documents of the Clinical Document Architecture; each is one record."""

    @property
    def name(self) -> str:
        return "cda"

    def recognise(self, path: Path, head: bytes) -> bool:  # noqa: ARG002 - by content
        return recognise_document(head) == "cda"

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        with _as_attachment():
            root = parse_xml(read_bounded(path))
            if root.name != "ClinicalDocument":
                raise source_error(Reason.NOT_ATTACHMENT)
            return [_item(0, cda_facts(root))]

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:  # noqa: ARG002 - one
        with _as_attachment():
            root = parse_xml(read_bounded(path))
            return self._attach(
                study, cda_facts(root).people, lambda record_filter: write_document(root, record_filter)
            )


@dataclass(frozen=True, slots=True)
class _Hl7(_Records):
    """Messages of HL7v2; a record is an order with its results, or a message without any."""

    @property
    def name(self) -> str:
        return "hl7v2"

    def recognise(self, path: Path, head: bytes) -> bool:  # noqa: ARG002 - by content
        return recognise_document(head) == "hl7v2"

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        with _as_attachment():
            items = []
            for number, (message, group) in enumerate(self._records(path)):
                items.append(_item(number, group_facts(message, group)))
                _check_number(items)
            if not items:
                raise source_error(Reason.ATTACHMENT_UNREADABLE)
            return items

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:
        with _as_attachment():
            wanted = set(items)
            chosen = [one for number, one in enumerate(self._records(path)) if number in wanted]
            people = People()
            for message, _ in chosen:
                people.merge(message_people(message).values())

            def write(record_filter: RecordFilter) -> None:
                written: set[int] = set()
                for message, group in chosen:
                    if id(message) not in written:
                        written.add(id(message))
                        write_message(message, record_filter)
                    write_group(group, record_filter)

            return self._attach(study, people, write)

    def _records(self, path: Path) -> Iterator[tuple[Message, list[Segment]]]:
        for message in read_messages(decode_message(read_bounded(path))):
            for group in groups_of(message) or [[]]:
                yield message, group


@dataclass(frozen=True, slots=True)
class _Mapped(_Records):
    """Files that a mapping describes."""

    mapping: RecordMapping

    @property
    def name(self) -> str:
        return f"mapped-{self.mapping.name}"

    def recognise(self, path: Path, head: bytes) -> bool:  # noqa: ARG002 - by content
        form = recognise_document(head)
        root = self.mapping.root.encode()
        if self.mapping.format == "xml":
            return form in {"cda", "xml"} and (b"<" + root in head or b":" + root in head)
        # One object a line looks like one object where there is one line.
        forms = (
            {"json", "fhir"}
            if self.mapping.format == "json"
            else {"json", "json-lines", "fhir", "fhir-lines"}
        )
        return form in forms and b'"' + root + b'"' in head

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        with _as_attachment():
            items: list[AttachmentItem] = []
            for number, root, record in self._records(path):
                items.append(_item(number, mapped_facts(record, root, self.mapping)))
                _check_number(items)
            if not items:
                raise source_error(Reason.NOT_ATTACHMENT)
            return items

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:
        with _as_attachment():
            wanted = set(items)
            chosen = [
                (root, record) for number, root, record in self._chosen(path, items) if number in wanted
            ]
            people = People()
            for root, record in chosen:
                people.merge(mapped_facts(record, root, self.mapping).people.values())

            def write(record_filter: RecordFilter) -> None:
                for root, record in chosen:
                    write_mapped(record, root, self.mapping, record_filter)

            return self._attach(study, people, write)

    def _records(self, path: Path) -> Iterator[tuple[int, Any, Any]]:
        """Number, root and node of each record; of lines, where each begins."""
        if self.mapping.format == "json-lines":
            for place, value in iter_json_lines(path):
                if isinstance(value, SourceError):
                    raise value
                yield place, value, value
            return
        data = read_bounded(path)
        root = parse_xml(data) if self.mapping.format == "xml" else parse_json(data)
        if self.mapping.format == "xml" and root.name != self.mapping.root:
            raise source_error(Reason.NOT_ATTACHMENT)
        for number, record in enumerate(find_records(root, self.mapping)):
            yield number, root, record

    def _chosen(self, path: Path, items: Sequence[int]) -> Iterator[tuple[int, Any, Any]]:
        if self.mapping.format != "json-lines":
            yield from self._records(path)
            return
        for place in items:
            value = read_json_line(path, place)
            yield place, value, value


@contextmanager
def _as_attachment() -> Iterator[None]:
    """Replace the reason of an unreadable report by that of an unreadable attachment."""
    try:
        yield
    except SourceError as error:
        if error.reason == Reason.REPORT_UNREADABLE:
            raise source_error(Reason.ATTACHMENT_UNREADABLE) from None
        raise


def _item(number: int, facts: DocumentFacts, content: str = "") -> AttachmentItem:
    return AttachmentItem(
        item=number,
        study_uids=tuple(facts.study_uids),
        series_uids=tuple(facts.series_uids[:_SHOWN_SOPS]),
        sop_uids=tuple(facts.sop_uids[:_SHOWN_SOPS]),
        accession=next(iter(facts.accessions), ""),
        patient_id=next(iter(facts.patient_ids), ""),
        time=None if facts.time is None else facts.time.replace(tzinfo=None),
        content=content,
    )


def _check_number(items: Sequence[AttachmentItem]) -> None:
    if len(items) > _MAX_ITEMS:
        raise source_error(Reason.LIMIT_EXCEEDED, f"more than {_MAX_ITEMS} records")


KINDS: Final = record_kinds(RecordsConfig())
"""Kinds without mappings, with the default settings."""
