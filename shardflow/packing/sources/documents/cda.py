"""Reader of C-CDA and other HL7 Clinical Document Architecture documents: links, people and narrative text.

Sources: HL7 CDA R2, C-CDA R2.1, and DICOM PS3.20 for imaging reports.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Final

from shardflow.format.reasons import Reason
from shardflow.packing.sources.documents.bounded import XmlNode
from shardflow.packing.sources.documents.facts import (
    NOT_REPORT,
    DocumentFacts,
    DocumentReport,
    NoReport,
    People,
    first_moment,
    heading_of,
    is_report_section,
    join_sections,
    patient_numbers,
    uid_of,
    unique,
)
from shardflow.packing.sources.reports import ReportDocument, encoded_document

_REPORT_CODES: Final = frozenset({"18748-4"})
_REPORT_TEMPLATES: Final = frozenset({"1.2.840.10008.9.1", "2.16.840.1.113883.10.20.22.1.5"})
_CATALOG, _STUDY, _SERIES, _IMAGE = "121181", "113014", "113015", "DGIMG"
_SOCIAL: Final = "2.16.840.1.113883.4.1"
_THINGS: Final = frozenset(
    {"labeledDrug", "manufacturedMaterial", "playingDevice", "playingEntity", "qualifier", "scopingEntity"}
)
"""Elements whose name is that of a substance or a thing."""
_BREAKS: Final = frozenset(
    {"br", "item", "list", "paragraph", "table", "tbody", "tfoot", "thead", "title", "tr"}
)
_CELLS: Final = frozenset({"td", "th"})
_SKIPPED: Final = frozenset({"renderMultiMedia"})
_SPACE: Final = re.compile(r"[^\S\x00]+")
_MAX_REFERENCES: Final = 4096


def read_cda_report(root: XmlNode) -> DocumentReport | NoReport:
    """Read an imaging report; documents of other kinds have none."""
    if root.name != "ClinicalDocument":
        return NOT_REPORT
    sections = [(heading, text) for _, heading, text in cda_sections(root)]
    kinds = {node.get("code") for node in root.elements("code")}
    kinds |= {node.get("root") for node in root.elements("templateId")}
    is_report = bool(kinds & (_REPORT_CODES | _REPORT_TEMPLATES)) or any(
        is_report_section(heading) for heading, _ in sections
    )
    if not is_report:
        return NOT_REPORT
    facts = cda_facts(root)
    text, document = join_sections(sections), _document_body(root)
    if not text and document is None:
        return NoReport(reason=Reason.EMPTY_REPORT, facts=facts)
    return DocumentReport(text=text, status=_status(root), facts=facts, document=document)


def _document_body(root: XmlNode) -> ReportDocument | None:
    """Return the PDF or RTF that is the body of an unstructured document, in base 64."""
    body = root.find("component/nonXMLBody/text")
    if body is None or body.get("representation") != "B64":
        return None
    return encoded_document(body.get("mediaType"), body.text())


def cda_sections(root: XmlNode) -> Iterator[tuple[XmlNode, str, str]]:
    """Return each section of the body with its heading and text; those inside others come after them."""
    body = root.find("component/nonXMLBody/text")
    if body is not None:
        yield body, "", _plain_body(body)
        return
    for node in root.walk():
        if node.name != "section":
            continue
        title = " ".join("".join(part.text() for part in node.elements("title")).split())
        code = node.find("code") or XmlNode("code")
        coded = code.get("code")
        if coded == _CATALOG:
            continue
        name = title or code.get("displayName")
        text = "\n".join(narrative_text(part) for part in node.elements("text"))
        yield node, heading_of(coded, name), text


def narrative_text(node: XmlNode) -> str:
    """Return a narrative block as text: a line a paragraph, item or row; captions before what they name.

    Line ends of the source are only layout, as in HTML.
    """
    lines = _SPACE.sub(" ", "".join(_pieces(node))).replace("\x00", "\n").split("\n")
    return "\n".join(line.strip() for line in lines if line.strip(" |"))


def cda_facts(root: XmlNode) -> DocumentFacts:
    """Return the linking facts of a document."""
    facts = DocumentFacts(people=_people(root))
    numbers = [
        (node.get("root") == _SOCIAL, node.get("extension").strip(), node.get("root"))
        for node in root.find_all("recordTarget/patientRole/id")
    ]
    facts.patient_ids = unique(number for _, number, _ in sorted(numbers, key=lambda one: one[0]))
    if len(list(root.elements("recordTarget"))) == 1:
        facts.patient_numbers = patient_numbers((number, issuer, "") for _, number, issuer in numbers)
    study, series, images = list[str](), list[str](), list[str]()
    for node in root.walk():
        if node.name not in {"act", "observation"}:
            continue
        coded = (node.find("code") or XmlNode("code")).get("code")
        target = study if coded == _STUDY else series if coded == _SERIES else None
        if node.get("classCode") == _IMAGE:
            target = images
        if target is not None:
            target += [uid_of(one.get("root")) for one in node.elements("id")]
    if not any(study):
        events = root.find_all("documentationOf/serviceEvent/id")
        study = [uid_of(node.get("root")) for node in events if not node.get("extension")]
    facts.study_uids, facts.series_uids = unique(study), unique(series)
    facts.sop_uids = unique(images)[:_MAX_REFERENCES]
    order = list(root.find_all("inFulfillmentOf/order"))
    numbered = [node.get("extension") for one in order for node in one.elements("accessionNumber")]
    facts.accessions = unique(
        [*numbered, *(node.get("extension") for one in order for node in one.elements("id"))]
    )
    times = [
        *_times(root, "documentationOf/serviceEvent/effectiveTime"),
        *_times(root, "effectiveTime"),
    ]
    facts.time = first_moment(times)
    return facts


def _times(root: XmlNode, path: str) -> Iterator[str]:
    for node in root.find_all(path):
        yield node.get("value")
        yield from (part.get("value") for part in node.elements("low"))


def _status(root: XmlNode) -> str:
    kinds = {node.get("typeCode") for node in root.elements("relatedDocument")}
    return "corrected" if "RPLC" in kinds else "addendum" if "APND" in kinds else "final"


def _people(root: XmlNode) -> People:
    people = People()
    stack: list[tuple[XmlNode, XmlNode]] = [(root, child) for child in root.elements()]
    while stack:
        parent, node = stack.pop()
        stack += [(node, child) for child in node.elements()]
        match node.name:
            case "name" if parent.name == "patient":
                people.patient_name(_joined(node))
            case "name" if parent.name.endswith(("Organization", "lace", "acility")):
                people.place(_joined(node))
            case "name" if parent.name not in _THINGS:
                people.name(_joined(node))
            case "addr":
                people.place(_joined(node))
                for part in node.elements():
                    people.place(part.text())
            case "telecom":
                people.phone(node.get("value").partition(":")[2] or node.get("value"))
            case "birthTime":
                people.birth_date(node.get("value"))
            case "id" | "setId" | "accessionNumber":
                people.identifier(node.get("extension"))
            case _:
                pass
    return people


def _joined(node: XmlNode) -> str:
    return " ".join(
        " ".join(child if isinstance(child, str) else child.text() for child in node.children).split()
    )


def _pieces(node: XmlNode) -> Iterator[str]:
    for child in node.children:
        if isinstance(child, str):
            yield child.replace("\x00", " ")
        elif child.name == "caption":
            yield f"\x00{child.text().strip().rstrip(':')}: "
        elif child.name not in _SKIPPED:
            is_block = child.name in _BREAKS
            yield "\x00" if is_block else ""
            yield from _pieces(child)
            yield "\x00" if is_block else " | " if child.name in _CELLS else ""


def _plain_body(node: XmlNode) -> str:
    """A body without structure: plain text, in base 64 or not; see `_document_body` for other media."""
    if node.get("mediaType") not in {"", "text/plain"}:
        return ""
    if node.get("representation") != "B64":
        return node.text()
    try:
        return base64.b64decode("".join(node.text().split()), validate=True).decode("utf-8")
    except ValueError:
        return ""
