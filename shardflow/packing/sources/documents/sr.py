"""Reader of DICOM structured reports: the texts of the content tree under their section headings.

Measurement reports without any text are not reports; their measurements are read as annotations.

Source: DICOM PS3.3, C.17.3 (content items) and C.18 (value types).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shardflow.errors import SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.attributes import read_everywhere
from shardflow.packing.sources.dicom.elements import Elements, HeaderLimits, read_elements
from shardflow.packing.sources.documents.bounded import DocumentLimits
from shardflow.packing.sources.documents.facts import (
    NOT_REPORT,
    DocumentFacts,
    DocumentReport,
    NoReport,
    heading_of,
    join_sections,
    parse_moment,
    unique,
)

SR_CLASSES: Final = frozenset(
    f"1.2.840.10008.5.1.4.1.1.88.{number}" for number in (11, 22, 33, 34, 35, 67)
) | {"1.2.840.10008.5.1.4.1.1.88.1", "1.2.840.10008.5.1.4.1.1.88.2"}
"""Text, Basic Text, Enhanced, Comprehensive, Comprehensive 3D, Extensible, X-Ray Radiation Dose."""

_CHARACTER_SET, _CLASS, _INSTANCE, _STUDY, _SERIES = (
    0x00080005,
    0x00080016,
    0x00080018,
    0x0020000D,
    0x0020000E,
)
_ACCESSION, _PATIENT, _CONTENT_DATE, _CONTENT_TIME, _STUDY_DATE, _STUDY_TIME = (
    0x00080050,
    0x00100020,
    0x00080023,
    0x00080033,
    0x00080020,
    0x00080030,
)
_CONTENT, _NAME, _CODE, _RELATIONSHIP, _VALUE_TYPE = (
    0x0040A730,
    0x0040A043,
    0x0040A168,
    0x0040A010,
    0x0040A040,
)
_TEXT, _MEASURED, _NUMERIC, _UNITS = 0x0040A160, 0x0040A300, 0x0040A30A, 0x004008EA
_CODE_VALUE, _MEANING = 0x00080100, 0x00080104
_COMPLETION, _PRELIMINARY, _PREDECESSORS, _EVIDENCE, _OTHER_EVIDENCE = (
    0x0040A491,
    0x0040A496,
    0x0040A360,
    0x0040A375,
    0x0040A385,
)
_REQUESTS: Final = 0x0040A370
_WANTED: Final = frozenset(
    {_CHARACTER_SET, _CLASS, _INSTANCE, _STUDY, _SERIES, _ACCESSION, _PATIENT, _CONTENT_DATE, _CONTENT_TIME}
    | {_STUDY_DATE, _STUDY_TIME, _CONTENT, _NAME, _COMPLETION, _PRELIMINARY, _PREDECESSORS, _EVIDENCE}
    | {_OTHER_EVIDENCE, _REQUESTS}
)
_PEOPLE: Final = tuple(
    """
    AccessionNumber InstitutionAddress InstitutionName InstitutionalDepartmentName
    NameOfPhysiciansReadingStudy OperatorsName OtherPatientIDs OtherPatientNames PatientAddress
    PatientBirthDate PatientID PatientName PatientTelephoneNumbers PerformingPhysicianName PersonName
    PhysiciansOfRecord ReferringPhysicianName RequestingPhysician StationName VerifyingObserverName
    """.split()  # noqa: SIM905
)
"""Attributes whose values are looked for in the text."""
_OBSERVER_NAMES: Final = frozenset({"121008", "128774"})
"""Concepts that some write as text although they are names of persons (PS3.16, TID 1003)."""
_MAX_ITEMS: Final = 100_000


def read_sr_report(path: Path, limits: DocumentLimits) -> DocumentReport | NoReport:
    """Read the report of a structured report.

    Args:
        path: The DICOM file.
        limits: Bounds on what is read.

    Raises:
        SourceError: As from the header pass.
    """
    header_limits = HeaderLimits(max_header_bytes=limits.max_bytes, max_inflated_bytes=limits.max_bytes)
    elements = read_elements(path, _WANTED, header_limits)
    if elements.problem is not None:
        raise SourceError(Reason.REPORT_UNREADABLE, "The structured report ends early.")
    if values.code(elements, _CLASS) not in SR_CLASSES:
        return NOT_REPORT
    facts = _facts(elements)
    facts.people.merge(read_everywhere(path, _PEOPLE))
    reader = _Tree(elements.values.get(_CHARACTER_SET))
    sections = list(reader.sections(elements, ""))
    for name in reader.names:
        facts.people.name(name)
    if not reader.has_text:
        return NoReport(reason=Reason.NOT_REPORT, facts=facts)
    text = join_sections(sections)
    if not text:
        return NoReport(reason=Reason.EMPTY_REPORT, facts=facts)
    return DocumentReport(text=text, status=_status(elements), facts=facts)


def _facts(elements: Elements) -> DocumentFacts:
    own = values.code(elements, _STUDY)
    seen = [values.code(item, _STUDY) for item in elements.items(_EVIDENCE)]
    accessions = [values.text(elements, _ACCESSION)]
    accessions += [values.text(item, _ACCESSION) for item in elements.items(_REQUESTS)]
    day = values.code(elements, _STUDY_DATE) or values.code(elements, _CONTENT_DATE)
    time = values.code(elements, _STUDY_TIME if elements.values.get(_STUDY_DATE) else _CONTENT_TIME)
    patient = values.text(elements, _PATIENT)
    return DocumentFacts(
        study_uids=[own] if own else unique(seen),
        accessions=unique(accessions),
        patient_ids=[patient] if patient else [],
        time=parse_moment(f"{day}{time}") or parse_moment(day),
    )


def _status(elements: Elements) -> str:
    if elements.items(_PREDECESSORS):
        return "corrected"
    is_preliminary = values.code(elements, _PRELIMINARY) == "PRELIMINARY"
    return "preliminary" if is_preliminary or values.code(elements, _COMPLETION) == "PARTIAL" else "final"


class _Tree:
    """One way through the content tree."""

    def __init__(self, character_set: bytes | None) -> None:
        self._character_set = character_set
        self._num_items = 0
        self.has_text = False
        self.names: list[str] = []
        """Of people, where they are written as text."""

    def sections(self, parent: Elements, heading: str) -> Iterator[tuple[str, str]]:
        """Headings and texts of the items that a container contains, in order."""
        for item in parent.items(_CONTENT):
            self._num_items += 1
            if self._num_items > _MAX_ITEMS:
                raise SourceError(Reason.LIMIT_EXCEEDED, "The structured report has too many items.")
            if self._character_set is not None:
                item.values.setdefault(_CHARACTER_SET, self._character_set)
            kind = values.code(item, _VALUE_TYPE)
            code, name = self._concept(item, _NAME)
            if values.code(item, _RELATIONSHIP) != "CONTAINS":
                if kind == "TEXT" and (code in _OBSERVER_NAMES or "name" in name.lower()):
                    self.names.append(values.text(item, _TEXT))
                continue
            own = heading_of(code, "" if kind != "CONTAINER" else name)
            if kind == "CONTAINER":
                yield from self.sections(item, own or heading)
            elif kind == "TEXT":
                text = _clean(values.text(item, _TEXT))
                self.has_text |= bool(text)
                yield (own or heading), text
            elif kind in {"CODE", "NUM"}:
                said = self._concept(item, _CODE)[1] if kind == "CODE" else self._number(item)
                if said:
                    yield (own or heading), f"{name}: {said}" if name else said

    def _concept(self, item: Elements, tag: int) -> tuple[str, str]:
        for code in item.items(tag):
            if self._character_set is not None:
                code.values.setdefault(_CHARACTER_SET, self._character_set)
            return values.code(code, _CODE_VALUE), values.text(code, _MEANING)
        return "", ""

    def _number(self, item: Elements) -> str:
        for measured in item.items(_MEASURED):
            number = values.text(measured, _NUMERIC).split("\\")[0].strip()
            unit = next((values.code(one, _CODE_VALUE) for one in measured.items(_UNITS)), "")
            return f"{number} {'' if unit in {'1', 'no units'} else unit}".strip()
        return ""


def _clean(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\n\r", "\n").replace("\r", "\n").strip()
