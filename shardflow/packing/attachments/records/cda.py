"""Facts of C-CDA documents: the entries of their sections by kind, and their narrative as one text.

Of the header (patient, authors, custodians, participants) only the sex of the patient is used; the same kinds
of elements inside entries are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from shardflow.packing.sources.documents.cda import cda_sections
from shardflow.packing.sources.documents.facts import join_sections

if TYPE_CHECKING:
    from shardflow.packing.attachments.records.record_filter import Fact, RecordFilter
    from shardflow.packing.sources.documents.bounded import XmlNode

_SOURCE: Final = "cda"
_KINDS: Final = {
    "act": "act",
    "encounter": "encounter",
    "observation": "observation",
    "organizer": "panel",
    "procedure": "procedure",
    "substanceAdministration": "medication",
    "supply": "supply",
}
_IMAGES: Final = frozenset({"DGIMG", "ROIBND"})
_PASSED: Final = frozenset(
    {"author", "id", "informant", "participant", "performer", "recordTarget", "specimen", "subject", "text"}
)
_MOODS: Final = frozenset({"", "EVN"})
"""Mood of events; plans and wishes have other moods."""
_NUMBERS: Final = frozenset({"INT", "REAL"})
_CODED: Final = frozenset({"CD", "CE", "CO", "CS"})
_TEXTS: Final = frozenset({"ED", "ST"})
_MAX_ENTRIES: Final = 20_000


def write_document(root: XmlNode, record_filter: RecordFilter) -> None:
    """Add the facts of a document, and its narrative."""
    role = root.find("recordTarget/patientRole/patient/administrativeGenderCode")
    record_filter.add(
        _SOURCE, "patient", {"sex": record_filter.sex("" if role is None else role.get("code"))}
    )
    sections = list(cda_sections(root))
    num_left = _MAX_ENTRIES
    for section, _, _ in sections:
        coded = record_filter.codes(_codes(section, "code"))
        for entry in section.elements("entry"):
            for node in _clinical(entry):
                num_left -= 1
                if num_left < 0:
                    record_filter.left_out["TOO_MANY_ENTRIES"] += 1
                else:
                    _write_entry(node, coded, record_filter)
    document = record_filter.document(
        join_sections([(heading, text) for _, heading, text in sections]), "document"
    )
    code = record_filter.codes(_codes(root, "code"))
    when = record_filter.when(next((node.get("value") for node in root.elements("effectiveTime")), ""))
    record_filter.add(_SOURCE, "document", {"codes": code, "when": when, "document": document})


def _clinical(node: XmlNode) -> Iterator[XmlNode]:
    """Yield the statements below an element, in order, except those about people, places and images."""
    for child in node.elements():
        if child.name in _PASSED or child.get("classCode") in _IMAGES:
            continue
        if child.name in _KINDS:
            yield child
        yield from _clinical(child)


def _write_entry(node: XmlNode, section: list[dict[str, str]], record_filter: RecordFilter) -> None:
    if node.get("nullFlavor"):
        return
    if node.get("moodCode") not in _MOODS:
        record_filter.left_out["NOT_AN_EVENT"] += 1
        return
    fact: Fact = {
        "body_site": record_filter.codes(_codes(node, "targetSiteCode")),
        "codes": record_filter.codes(_codes(node, "code")),
        "interpretation": record_filter.codes(_codes(node, "interpretationCode")),
        "method": record_filter.codes(_codes(node, "methodCode")),
        "section": section,
        "status": record_filter.status(next((one.get("code") for one in node.elements("statusCode")), "")),
    }
    if node.get("negationInd") == "true":
        fact["negated"] = True
    fact["when"], fact["end"] = _times(node, record_filter)
    if node.name in {"substanceAdministration", "supply"}:
        material = node.find("consumable/manufacturedProduct/manufacturedMaterial")
        material = material or node.find("product/manufacturedProduct/manufacturedMaterial")
        fact["codes"] = (
            record_filter.codes(_codes(material, "code")) if material is not None else fact["codes"]
        )
        fact["route"] = record_filter.codes(_codes(node, "routeCode"))
        fact["dose"] = next(
            filter(None, (_quantity(one, record_filter) for one in node.elements("doseQuantity"))), None
        )
    for value in node.elements("value"):
        fact |= _value(value, record_filter)
    if fact["codes"] or fact.get("value"):
        record_filter.add(_SOURCE, _KINDS[node.name], fact)


def _codes(node: XmlNode, name: str) -> Iterator[tuple[str, str, str]]:
    for one in node.elements(name):
        yield from _coding(one)


def _coding(node: XmlNode) -> Iterator[tuple[str, str, str]]:
    """Yield a coded value and its translations."""
    yield node.get("codeSystem"), node.get("code"), node.get("displayName")
    for other in node.elements("translation"):
        yield other.get("codeSystem"), other.get("code"), other.get("displayName")


def _times(node: XmlNode, record_filter: RecordFilter) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    start = end = ""
    for time in node.elements("effectiveTime"):
        start = start or time.get("value") or next((one.get("value") for one in time.elements("low")), "")
        end = end or next((one.get("value") for one in time.elements("high")), "")
    return record_filter.when(start), record_filter.when(end)


def _value(value: XmlNode, record_filter: RecordFilter) -> Fact:
    kind = value.get("type").rpartition(":")[2]
    if value.get("nullFlavor"):
        return {}
    if kind in _CODED:
        coded = record_filter.codes(_coding(value))
        return {"value": {"codes": coded}} if coded else {}
    if kind == "PQ":
        return {"value": _quantity(value, record_filter)}
    if kind in _NUMBERS:
        return {"value": record_filter.quantity(value.get("value"), "1")}
    if kind == "BL" and value.get("value") in {"false", "true"}:
        return {"value": {"flag": value.get("value") == "true"}}
    if kind == "IVL_PQ":
        ends = {one.name: _quantity(one, record_filter) for one in value.elements("low", "high")}
        return {"value": {name: end for name, end in ends.items() if end}}
    if kind in _TEXTS and (text := "".join(part for part in value.children if isinstance(part, str)).strip()):
        return record_filter.note(text, "observation")
    return {}


def _quantity(node: XmlNode, record_filter: RecordFilter) -> dict[str, Any] | None:
    return record_filter.quantity(node.get("value"), node.get("unit")) if node.get("value") else None
