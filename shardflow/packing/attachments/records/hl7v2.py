"""Facts of HL7v2 messages: orders, results, diagnoses, allergies and procedures; their texts as one document.

Of PID only the sex is used; NK1, GT1, IN1 and all fields that are not named here are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardflow.packing.sources.documents.facts import join_sections
from shardflow.packing.sources.documents.hl7 import document_of, section_of, status_of

if TYPE_CHECKING:
    from shardflow.packing.attachments.records.record_filter import Fact, RecordFilter
    from shardflow.packing.sources.documents.hl7 import Message, Segment

_SOURCE: Final = "hl7v2"
_STATUS: Final = {"C": "corrected", "F": "final", "P": "preliminary", "R": "preliminary", "X": "cancelled"}
_NUMERIC: Final = frozenset({"NM", "SN"})
_CODED: Final = frozenset({"CE", "CF", "CNE", "CWE"})
_TEXT: Final = frozenset({"FT", "ST", "TX", "ED"})
_UIDS: Final = frozenset({"110180", "113014"})
_GONE: Final = frozenset("DWX")
_RANGE: Final = re.compile(r"\s*([<>]=?)?\s*(-?\d+(?:\.\d+)?)(?:\s*(?:-|to)\s*(-?\d+(?:\.\d+)?))?\s*")
_CODE_PLACES: Final = (0, 3)
"""Components of a coded element at which a code begins: it, its text and its system; and an alternate one."""


def write_message(message: Message, record_filter: RecordFilter) -> None:
    """Add the facts of a message about its patient, outside of its orders."""
    for segment in message.of("PID"):
        record_filter.add(_SOURCE, "patient", {"sex": record_filter.sex(segment.get(8))})
    for name, kind, code, when in (
        ("DG1", "condition", 3, 5),
        ("AL1", "allergy", 3, 6),
        ("PR1", "procedure", 3, 5),
    ):
        for segment in message.of(name):
            fact = {
                "codes": record_filter.codes(_codes(segment, code)),
                "when": record_filter.when(segment.get(when)),
            }
            record_filter.add(_SOURCE, kind, fact)


def write_group(group: Sequence[Segment], record_filter: RecordFilter) -> None:
    """Add one order with its results."""
    order = next((segment for segment in group if segment.name == "OBR"), None)
    taken = order.get(7) if order is not None else ""
    sections: list[tuple[str, str]] = []
    for segment in group:
        if segment.name != "OBX" or segment.get(3) in _UIDS:
            continue
        status = status_of(segment.get(11))
        if status in _GONE:
            record_filter.left_out["WITHDRAWN_RESULT"] += 1
            continue
        kind = segment.get(2).upper()
        if kind in _TEXT:
            section = section_of(segment)
            sections += [] if section is None else [section]
            continue
        fact: Fact = {
            "codes": record_filter.codes(_codes(segment, 3)),
            "interpretation": record_filter.codes(_flags(segment)),
            "reference_range": _reference_range(segment, record_filter),
            "status": _STATUS.get(status),
            "value": _value(segment, kind, record_filter),
            "when": record_filter.when(segment.get(14) or taken),
        }
        if fact["codes"] and fact["value"]:
            record_filter.add(_SOURCE, "observation", fact)
        else:
            record_filter.left_out["EMPTY_RECORD"] += 1
    text = join_sections(sections)
    if not text:
        text = record_filter.text_of(document_of(group))
    document = record_filter.document(text, "report")
    if order is not None:
        record_filter.add(
            _SOURCE,
            "report",
            {
                "codes": record_filter.codes(_codes(order, 4)),
                "document": document,
                "status": _STATUS.get(status_of(order.get(25))),
                "when": record_filter.when(taken),
            },
        )


def _codes(segment: Segment, number: int) -> Iterator[tuple[str, str, str]]:
    for parts in segment.components(number):
        for place in _CODE_PLACES:
            code, text, system = (*parts[place : place + 3], "", "", "")[:3]
            if code:
                yield system, code, text


def _flags(segment: Segment) -> Iterator[tuple[str, str, str]]:
    """Yield the abnormal flags, which are codes of HL7's own table."""
    for parts in segment.components(8):
        yield "HL70078", parts[0].strip(), ""


def _value(segment: Segment, kind: str, record_filter: RecordFilter) -> dict[str, Any] | None:
    unit = segment.get(6)
    if kind == "SN":
        numbers = [segment.get(5, place) for place in (1, 2)]
        return record_filter.quantity(numbers[1], unit, numbers[0]) if numbers[1] else None
    if kind in _NUMERIC:
        return record_filter.quantity(segment.get(5), unit)
    if kind in _CODED:
        coded = record_filter.codes(_codes(segment, 5))
        return {"codes": coded} if coded else None
    return None


def _reference_range(segment: Segment, record_filter: RecordFilter) -> list[dict[str, Any]]:
    match = _RANGE.fullmatch(segment.get(7))
    if match is None:
        return []
    comparator, first, second = match.groups()
    unit = segment.get(6)
    low, high = record_filter.quantity(first, unit), record_filter.quantity(second or "", unit)
    if comparator is not None:
        side = "high" if comparator[0] == "<" else "low"
        return [{side: low}] if low else []
    return [{"low": low, "high": high}] if low and high else []
