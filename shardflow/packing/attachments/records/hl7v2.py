"""Facts of HL7v2 messages: orders, results, diagnoses, allergies, procedures; their texts as one document.

Of PID there is the sex, of NK1, GT1, IN1 and all the others nothing: fields that are not named here are not
read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardflow.packing.sources.documents.facts import join_sections
from shardflow.packing.sources.documents.hl7 import section_of, status_of

if TYPE_CHECKING:
    from shardflow.packing.attachments.records.scribe import Fact, Scribe
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


def write_message(message: Message, scribe: Scribe) -> None:
    """Add what a message says of its patient, beside its orders."""
    for segment in message.of("PID"):
        scribe.add(_SOURCE, "patient", {"sex": scribe.sex(segment.get(8))})
    for name, kind, code, when in (
        ("DG1", "condition", 3, 5),
        ("AL1", "allergy", 3, 6),
        ("PR1", "procedure", 3, 5),
    ):
        for segment in message.of(name):
            fact = {"codes": scribe.codes(_codes(segment, code)), "when": scribe.when(segment.get(when))}
            scribe.add(_SOURCE, kind, fact)


def write_group(group: Sequence[Segment], scribe: Scribe) -> None:
    """Add one order with its results."""
    order = next((segment for segment in group if segment.name == "OBR"), None)
    taken = order.get(7) if order is not None else ""
    sections: list[tuple[str, str]] = []
    for segment in group:
        if segment.name != "OBX" or segment.get(3) in _UIDS:
            continue
        status = status_of(segment.get(11))
        if status in _GONE:
            scribe.left_out["WITHDRAWN_RESULT"] += 1
            continue
        kind = segment.get(2).upper()
        if kind in _TEXT:
            section = section_of(segment)
            sections += [] if section is None else [section]
            continue
        fact: Fact = {
            "codes": scribe.codes(_codes(segment, 3)),
            "interpretation": scribe.codes(_flags(segment)),
            "reference_range": _reference_range(segment, scribe),
            "status": _STATUS.get(status),
            "value": _value(segment, kind, scribe),
            "when": scribe.when(segment.get(14) or taken),
        }
        if fact["codes"] and fact["value"]:
            scribe.add(_SOURCE, "observation", fact)
        else:
            scribe.left_out["EMPTY_RECORD"] += 1
    document = scribe.document(join_sections(sections), "report")
    if order is not None:
        scribe.add(
            _SOURCE,
            "report",
            {
                "codes": scribe.codes(_codes(order, 4)),
                "document": document,
                "status": _STATUS.get(status_of(order.get(25))),
                "when": scribe.when(taken),
            },
        )


def _codes(segment: Segment, number: int) -> Iterator[tuple[str, str, str]]:
    for parts in segment.components(number):
        for place in _CODE_PLACES:
            code, text, system = (*parts[place : place + 3], "", "", "")[:3]
            if code:
                yield system, code, text


def _flags(segment: Segment) -> Iterator[tuple[str, str, str]]:
    """Abnormal flags; bare ones are of HL7's own table."""
    for parts in segment.components(8):
        yield "HL70078", parts[0].strip(), ""


def _value(segment: Segment, kind: str, scribe: Scribe) -> dict[str, Any] | None:
    unit = segment.get(6)
    if kind == "SN":
        numbers = [segment.get(5, place) for place in (1, 2)]
        return scribe.quantity(numbers[1], unit, numbers[0]) if numbers[1] else None
    if kind in _NUMERIC:
        return scribe.quantity(segment.get(5), unit)
    if kind in _CODED:
        coded = scribe.codes(_codes(segment, 5))
        return {"codes": coded} if coded else None
    return None


def _reference_range(segment: Segment, scribe: Scribe) -> list[dict[str, Any]]:
    match = _RANGE.fullmatch(segment.get(7))
    if match is None:
        return []
    comparator, first, second = match.groups()
    unit = segment.get(6)
    low, high = scribe.quantity(first, unit), scribe.quantity(second or "", unit)
    if comparator is not None:
        side = "high" if comparator[0] == "<" else "low"
        return [{side: low}] if low else []
    return [{"low": low, "high": high}] if low and high else []
