"""Reports in HL7v2 messages ORU^R01: the texts of the OBX segments below each OBR."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Final

from shardflow.sources.documents.facts import DocumentFacts
from shardflow.sources.documents.found import NOT_REPORT, DocumentReport, NoReport
from shardflow.sources.documents.headings import heading_of, join_sections
from shardflow.sources.documents.hl7 import Message, Segment, decode_message, read_messages
from shardflow.sources.documents.hl7_facts import group_facts, message_people
from shardflow.sources.reasons import Reason

__all__ = ["groups_of", "read_hl7_reports", "section_of", "status_of"]

_TEXTS: Final = frozenset({"", "FT", "ST", "TX"})
_CODES: Final = frozenset({"CE", "CF", "CNE", "CWE"})
_NARRATIVE: Final = frozenset({"FT", "TX"})
_STUDY_CODES: Final = frozenset({"110180", "113014"})
_GONE: Final = frozenset("DXWN")
"""OBX-11: deleted, no result, wrong patient, not asked."""
_STATUS: Final = {"C": "corrected", "F": "final", "A": "preliminary", "P": "preliminary", "R": "preliminary"}
"""HL7 tables 0123 and 0085."""
_WITHDRAWN: Final = "X"
_WORDS: Final = {
    "final": "F",
    "preliminary": "P",
    "prelim": "P",
    "corrected": "C",
    "cancelled": "X",
    "canceled": "X",
}
_ORDER: Final = frozenset({"NTE", "OBR", "OBX", "ORC", "ZDS"})


def read_hl7_reports(data: bytes) -> Iterator[DocumentReport | NoReport]:
    """Read the reports of a file of messages: one for each order that has text."""
    found = False
    for message in read_messages(decode_message(data)):
        found = True
        header = next(message.of("MSH"), None)
        if header is not None and not header.get(9).upper().startswith("ORU"):
            yield NOT_REPORT
            continue
        people = message_people(message)
        for group in groups_of(message):
            yield _read_group(group, group_facts(message, group, people))
    if not found:
        yield NoReport(reason=Reason.REPORT_UNREADABLE, detail="no segments")


def groups_of(message: Message) -> list[list[Segment]]:
    """Cut a message into its orders: each OBR with the ORC before it and what follows."""
    groups: list[list[Segment]] = [[]]
    for segment in message.segments:
        if segment.name not in _ORDER:
            continue
        has_obr = any(one.name == "OBR" for one in groups[-1])
        if (segment.name == "ORC" and groups[-1]) or (segment.name == "OBR" and has_obr):
            groups.append([])
        groups[-1].append(segment)
    return [group for group in groups if group]


def status_of(text: str) -> str:
    """Return the letter of a result status, which some systems write as a word."""
    word = text.strip()
    return _WORDS.get(word.lower(), word.upper() if len(word) == 1 else "")


def _read_group(group: Sequence[Segment], facts: DocumentFacts) -> DocumentReport | NoReport:
    obr = next((segment for segment in group if segment.name == "OBR"), None)
    results = [segment for segment in group if segment.name == "OBX"]
    own = [status_of(segment.get(11)) for segment in results]
    sections: list[tuple[str, str]] = []
    has_narrative = False
    for segment, status in zip(results, own, strict=True):
        if status in _GONE or segment.get(3) in _STUDY_CODES:
            continue
        section = section_of(segment)
        if section is not None:
            sections.append(section)
            has_narrative |= segment.get(2) in _NARRATIVE or bool(section[0])
    text = join_sections(sections)
    status = status_of(obr.get(25)) if obr is not None else ""
    if not status:
        status = next((letter for letter in ("C", "P", "F") if letter in own), "F")
    if status == _WITHDRAWN:
        return NoReport(reason=Reason.REPORT_WITHDRAWN, facts=facts)
    if not has_narrative or not text:
        has_texts = any(segment.get(2) in _NARRATIVE for segment in results)
        return NoReport(reason=Reason.EMPTY_REPORT if has_texts else Reason.NOT_REPORT, facts=facts)
    named = {heading for heading, _ in sections}
    is_addendum = named == {"ADDENDUM"}
    return DocumentReport(
        text=text, status="addendum" if is_addendum else _STATUS.get(status, "final"), facts=facts
    )


def section_of(segment: Segment) -> tuple[str, str] | None:
    """Heading and text of one result; None where it has none that is text."""
    kind = segment.get(2).upper()
    value = _value(segment, kind)
    if not value:
        return None
    identifier = next(iter(segment.repetitions(3)), "").split("^")
    code, _, suffix = identifier[0].partition("&")
    name = segment.plain(identifier[1]).strip() if len(identifier) > 1 else ""
    heading = heading_of(suffix) or heading_of(code)
    if not heading:
        by_name = heading_of("", name)
        heading = by_name if by_name in _KNOWN else ""
    if heading or kind in _NARRATIVE or not name:
        return heading, value
    unit = segment.get(6)
    return "", f"{name}: {value}{' ' + unit if unit else ''}"


_KNOWN: Final = frozenset(
    {"ADDENDUM", "COMPARISON", "FINDINGS", "IMPRESSION", "INDICATION", "RECOMMENDATION", "TECHNIQUE"}
)


def _value(segment: Segment, kind: str) -> str:
    if kind == "ED":
        return _encapsulated(segment)
    if kind in _CODES:
        said = [
            next((parts[at].strip() for at in (1, 4, 0) if at < len(parts) and parts[at].strip()), "")
            for parts in segment.components(5)
        ]
    elif kind in _TEXTS or kind == "NM":
        # A repetition is the next line of a text.
        said = [segment.plain(one) for one in segment.repetitions(5)]
    else:
        return ""
    lines = [line.strip() for text in said for line in text.split("\n")]
    return "\n".join(lines).strip("\n").strip()


def _encapsulated(segment: Segment) -> str:
    """Plain text in base 64 (data type ED); documents of other kinds give none."""
    parts = next(iter(segment.repetitions(5)), "").split(segment.separators.component)
    if len(parts) < 5 or parts[3].strip().lower() != "base64":
        return ""
    if {parts[1].strip().lower(), parts[2].strip().lower()} & {"text", "plain", "txt", "text/plain"}:
        try:
            return decode_message(base64.b64decode(parts[4], validate=True)).replace("\r\n", "\n").strip()
        except (binascii.Error, ValueError):
            return ""
    return ""
