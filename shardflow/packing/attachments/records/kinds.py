"""Attachment kinds of clinical records: FHIR, C-CDA, HL7v2, and files that mappings describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
_SHOWN_SOPS: Final = 16
_MAX_ITEMS: Final = 1 << 20

Write = Callable[[RecordFilter], None]


def record_kinds(settings: RecordsConfig) -> tuple[AttachmentKind, ...]:
    """Return the kinds, the most specific first: those of mappings."""
    mapped = tuple(_Mapped(settings, mapping) for mapping in settings.mappings)
    return (*mapped, _Fhir(settings), _Cda(settings), _Hl7(settings))


class _Records:
    """Shared part of the kinds: a file has numbered records, each with facts that link it to a study."""

    name: str
    version = 3
    sop_classes: frozenset[str] = frozenset()
    forms: frozenset[str]
    """Document forms that are read."""
    if_empty: Reason | None = None
    """Reason for a file without records."""

    def __init__(self, settings: RecordsConfig) -> None:
        self.settings = settings

    def recognise(self, path: Path, head: bytes) -> bool:  # noqa: ARG002 - by content
        return recognise_document(head) in self.forms

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        with _as_attachment():
            items: list[AttachmentItem] = []
            for number, facts, content in self._facts(path):
                if len(items) == _MAX_ITEMS:
                    raise source_error(Reason.LIMIT_EXCEEDED, f"more than {_MAX_ITEMS} records")
                items.append(_item(number, facts, content))
            if not items and self.if_empty is not None:
                raise source_error(self.if_empty)
            return items

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:
        first = study.num(_PART, _DOCUMENTS)
        with _as_attachment():
            people, write = self._load(path, items)
            record_filter = RecordFilter(
                study,
                people,
                free_text=self.settings.free_text,
                max_days=self.settings.max_days,
                time_zone=self.settings.time_zone,
                local_systems=self.settings.local_systems(),
                first_document=first,
            )
            write(record_filter)
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

    def _facts(self, path: Path) -> Iterator[tuple[int, DocumentFacts, str]]:
        """Yield number, linking facts and digest of each record."""
        raise NotImplementedError

    def _load(self, path: Path, items: Sequence[int]) -> tuple[People, Write]:
        """Return everybody whom some records name, and a function that writes the records."""
        raise NotImplementedError


class _Fhir(_Records):
    """Bundles, single resources and NDJSON; a record is a resource."""

    name = "fhir"
    forms = frozenset({"fhir", "fhir-lines"})

    def _facts(self, path: Path) -> Iterator[tuple[int, DocumentFacts, str]]:
        resources = read_resources(path)
        is_used = False
        for place, resource in resources.resources():
            name = resource.get("resourceType")
            is_used |= name == "Patient" or name in FHIR_KINDS
            if name in FHIR_KINDS:
                facts = resources.index.facts(resource)
                yield place, facts, resources.digest(facts)
        if not is_used:
            raise source_error(Reason.NOT_ATTACHMENT)

    def _load(self, path: Path, items: Sequence[int]) -> tuple[People, Write]:
        resources = read_resources(path)
        chosen = list(resources.at(items))
        people = _everybody(resources.index.facts(resource).people for resource in chosen)

        def write(record_filter: RecordFilter) -> None:
            patient = next(filter(None, map(resources.index.patient, chosen)), None)
            for resource in [*([] if patient is None else [patient]), *chosen]:
                write_resource(resource, resources.index, record_filter)

        return people, write


class _Cda(_Records):
    """Documents of the Clinical Document Architecture; each is one record."""

    name = "cda"
    forms = frozenset({"cda"})

    def _facts(self, path: Path) -> Iterator[tuple[int, DocumentFacts, str]]:
        root = parse_xml(read_bounded(path))
        if root.name != "ClinicalDocument":
            raise source_error(Reason.NOT_ATTACHMENT)
        yield 0, cda_facts(root), ""

    def _load(self, path: Path, items: Sequence[int]) -> tuple[People, Write]:  # noqa: ARG002 - one
        root = parse_xml(read_bounded(path))
        return cda_facts(root).people, partial(write_document, root)


class _Hl7(_Records):
    """Messages of HL7v2; a record is an order with its results, or a message without any."""

    name = "hl7v2"
    forms = frozenset({"hl7v2"})
    if_empty = Reason.ATTACHMENT_UNREADABLE

    def _facts(self, path: Path) -> Iterator[tuple[int, DocumentFacts, str]]:
        for number, (message, group) in enumerate(self._records(path)):
            yield number, group_facts(message, group), ""

    def _load(self, path: Path, items: Sequence[int]) -> tuple[People, Write]:
        chosen = [one for number, one in enumerate(self._records(path)) if number in set(items)]

        def write(record_filter: RecordFilter) -> None:
            written: set[int] = set()
            for message, group in chosen:
                if id(message) not in written:
                    written.add(id(message))
                    write_message(message, record_filter)
                write_group(group, record_filter)

        return _everybody(message_people(message) for message, _ in chosen), write

    def _records(self, path: Path) -> Iterator[tuple[Message, list[Segment]]]:
        for message in read_messages(decode_message(read_bounded(path))):
            for group in groups_of(message) or [[]]:
                yield message, group


class _Mapped(_Records):
    """Files that a mapping describes."""

    if_empty = Reason.NOT_ATTACHMENT

    def __init__(self, settings: RecordsConfig, mapping: RecordMapping) -> None:
        super().__init__(settings)
        self.name = f"mapped-{mapping.name}"
        self.mapping = mapping
        # One object a line looks like one object where there is one line.
        self.forms = {
            "json": frozenset({"json", "fhir"}),
            "json-lines": frozenset({"json", "json-lines", "fhir", "fhir-lines"}),
            "xml": frozenset({"cda", "xml"}),
        }[mapping.format]

    def recognise(self, path: Path, head: bytes) -> bool:
        root = self.mapping.root.encode()
        marks = (b"<" + root, b":" + root) if self.mapping.format == "xml" else (b'"' + root + b'"',)
        return super().recognise(path, head) and any(mark in head for mark in marks)

    def _facts(self, path: Path) -> Iterator[tuple[int, DocumentFacts, str]]:
        for number, root, record in self._records(path):
            yield number, mapped_facts(record, root, self.mapping), ""

    def _load(self, path: Path, items: Sequence[int]) -> tuple[People, Write]:
        if self.mapping.format == "json-lines":
            chosen = [(value, value) for value in (read_json_line(path, place) for place in items)]
        else:
            chosen = [(root, record) for number, root, record in self._records(path) if number in set(items)]

        def write(record_filter: RecordFilter) -> None:
            for root, record in chosen:
                write_mapped(record, root, self.mapping, record_filter)

        return _everybody(mapped_facts(record, root, self.mapping).people for root, record in chosen), write

    def _records(self, path: Path) -> Iterator[tuple[int, Any, Any]]:
        """Yield number, root and node of each record; of lines, the number is where each begins."""
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


def _everybody(people: Iterable[People]) -> People:
    everybody = People()
    for one in people:
        everybody.merge(one.values())
    return everybody


@contextmanager
def _as_attachment() -> Iterator[None]:
    """Replace the reason of an unreadable report by that of an unreadable attachment."""
    try:
        yield
    except SourceError as error:
        if error.reason == Reason.REPORT_UNREADABLE:
            raise source_error(Reason.ATTACHMENT_UNREADABLE) from None
        raise


def _item(number: int, facts: DocumentFacts, content: str) -> AttachmentItem:
    has_several = len({one.number for one in facts.patient_numbers}) > 1
    return AttachmentItem(
        item=number,
        study_uids=tuple(facts.study_uids),
        series_uids=tuple(facts.series_uids[:_SHOWN_SOPS]),
        sop_uids=tuple(facts.sop_uids[:_SHOWN_SOPS]),
        accession=next(iter(facts.accessions), ""),
        patient_id=next(iter(facts.patient_ids), ""),
        patient_numbers=tuple(facts.patient_numbers) if has_several else (),
        time=None if facts.time is None else facts.time.replace(tzinfo=None),
        content=content,
    )


KINDS: Final = record_kinds(RecordsConfig())
"""Kinds without mappings, with the default settings."""
