"""Records that all document readers return: the people and study of a document, its report, its sections.

People and links identify patients and are never published. Coded sections get headings as
`shardflow.reports` spells them; the codes are those of imaging reports: LOINC document sections, and DCM
section headings (DICOM PS3.16, CID 7001) with the concepts below them (CID 7002).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import Final, TypeAlias

from shardflow.format.reasons import Reason
from shardflow.packing.sources.attachments import PatientNumber
from shardflow.packing.sources.reports import ReportDocument

_UID: Final = re.compile(r"(?:0|[1-9]\d*)(?:\.(?:0|[1-9]\d*))+")
_MAX_UID: Final = 64
_MOMENT: Final = re.compile(
    r"(\d{4})-?(\d\d)-?(\d\d)(?:[T ]?(\d\d):?(\d\d)(?::?(\d\d)(?:\.\d+)?)?\s?(Z|[+-]\d\d:?\d\d)?)?"
)
_MIN_LETTERS: Final = 2


class People:
    """People named by a document, by DICOM keyword; used to find them in texts."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[str, dict[str, None]] = {}

    def name(self, text: str) -> None:
        """Add the name of a person."""
        self._add("PersonName", text)

    def patient_name(self, text: str) -> None:
        """Add a name of the patient."""
        self._add("PatientName", text)

    def identifier(self, text: str) -> None:
        """Add a number or code of a person, visit, order or document."""
        self._add("OtherPatientIDs", text)

    def place(self, text: str) -> None:
        """Add an address, a part of one, or an institution."""
        self._add("InstitutionName", text)

    def phone(self, text: str) -> None:
        """Add a telephone number; what is none, such as an address of e-mail, is an identifier."""
        self._add("PersonTelephoneNumbers", text)
        if any(map(str.isalpha, text)):
            self._add("OtherPatientIDs", text)

    def birth_date(self, text: str) -> None:
        """Add a date of birth."""
        self._add("PatientBirthDate", text[:10].replace("-", "")[:8])

    def merge(self, other: Mapping[str, Iterable[str]]) -> None:
        """Take over the values of another one."""
        for keyword, values in other.items():
            for value in values:
                self._add(keyword, value)

    def values(self) -> dict[str, tuple[str, ...]]:
        """Return all values, sorted."""
        return {keyword: tuple(sorted(values)) for keyword, values in sorted(self._values.items())}

    def words(self) -> Iterator[str]:
        """Return every value as it was written."""
        for values in self._values.values():
            yield from values

    def __repr__(self) -> str:
        return f"People({sum(map(len, self._values.values()))})"

    def _add(self, keyword: str, text: str) -> None:
        cleaned = " ".join(text.split())
        values = self._values.setdefault(keyword, {})
        # Not bounded by number: a name that is left out here stays in a text; documents are bounded in size.
        if len(cleaned) >= _MIN_LETTERS:
            values[cleaned] = None


@dataclass(kw_only=True, slots=True)
class DocumentFacts:
    """Linking facts of one document, or of one record in it."""

    study_uids: list[str] = field(default_factory=list, repr=False)
    series_uids: list[str] = field(default_factory=list, repr=False)
    sop_uids: list[str] = field(default_factory=list, repr=False)
    accessions: list[str] = field(default_factory=list, repr=False)
    patient_ids: list[str] = field(default_factory=list, repr=False)
    """Surest first: medical record numbers before others."""
    patient_numbers: list[PatientNumber] = field(default_factory=list, repr=False)
    """Those of them that are the patient's own, and not of a visit, an account or another role."""
    time: datetime | None = field(default=None, repr=False)
    """Time of the event, for time windows; in UTC, or as written if it has no zone."""
    people: People = field(default_factory=People, repr=False)


def parse_moment(text: str) -> datetime | None:
    """Read a date or time of FHIR, HL7 or CDA; None where the day is not complete or is none.

    Example:
        >>> str(parse_moment("20140520193605-0500")), parse_moment("2014-05")
        ('2014-05-20 19:36:05-05:00', None)
    """
    match = _MOMENT.match(text.strip())
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    try:
        return datetime(year, month, day, hour, minute, min(second, 59), tzinfo=_zone(match[7]))
    except ValueError:
        return None


def has_time_of_day(text: str) -> bool:
    """Return whether a text that `parse_moment` reads states a time of day, and not a date alone."""
    match = _MOMENT.match(text.strip())
    return match is not None and match[4] is not None


def first_moment(texts: Iterable[str]) -> datetime | None:
    """Return the first of several texts that `parse_moment` can read; None if there is none."""
    return next((moment for moment in map(parse_moment, texts) if moment is not None), None)


def unique(texts: Iterable[str]) -> list[str]:
    """Return the texts that are not empty, each once, in their order."""
    return list(dict.fromkeys(text for text in texts if text))


def patient_numbers(found: Iterable[tuple[str, str, str]]) -> list[PatientNumber]:
    """Return those of a patient's identifiers that number the patient, and nothing and nobody else.

    Numbers of accounts (``AN``) and visits (``VN``) are of other things; those of other roles
    (``SS``, ``DL``) are often a relative's. One without a type counts, unless nobody issued it either and
    others have a type: then it may be anything.

    Source: HL7 table 0203.

    Args:
        found: Value, issuer or system, and type (``""``: not stated) of each.

    Example:
        >>> kept = patient_numbers([("A1", "", "MR"), ("B2", "X", ""), ("C3", "", ""), ("V4", "X", "VN")])
        >>> [one.number for one in kept]
        ['A1', 'B2']
    """
    kept = [
        one
        for one in found
        if one[0]
        and (one[2] in _PATIENT_NUMBERS or _NATIONAL.fullmatch(one[2]))
        and not is_other_system(one[1])
    ]
    has_types = any(kind for _, _, kind in kept)
    return [PatientNumber(value, issuer) for value, issuer, kind in kept if kind or issuer or not has_types]


_PATIENT_NUMBERS: Final = frozenset({"", "MR", "NI", "PI", "PN", "PT"})
"""Medical record number; national, internal, person and external number of a patient."""
_NATIONAL: Final = re.compile(r"NN[A-Z]{3}")
_OTHER: Final = re.compile(
    r"/(?:us-ssn|passport|us-medicare|us-npi|us-mbi)\b"
    r"|(?:^|[:/])2\.16\.840\.1\.113883\.4\.(?:1|6|572|927|3(?:\.\d+)*|330(?:\.\d+)*)$"
)
"""Systems of social security, driver's license, passport and insurance numbers, which often have no type."""


def is_other_system(issuer: str) -> bool:
    """Return whether a system issues numbers of another role than a patient's: insured, driver, citizen."""
    return _OTHER.search(issuer) is not None


def uid_of(text: str) -> str:
    """Return the DICOM UID that a text is, bare or as ``urn:oid:``; ``""`` where it is none.

    Example:
        >>> uid_of("urn:oid:1.2.840.1"), uid_of("A-17")
        ('1.2.840.1', '')
    """
    bare = text.strip().removeprefix("urn:oid:")
    return bare if len(bare) <= _MAX_UID and _UID.fullmatch(bare) else ""


def _zone(text: str | None) -> timezone | None:
    if text is None:
        return None
    if text == "Z":
        return UTC
    sign = -1 if text[0] == "-" else 1
    return timezone(sign * timedelta(hours=int(text[1:3]), minutes=int(text[-2:])))


ReportStatus: TypeAlias = str
"""``addendum``, ``corrected`` (stands for all before it), ``final`` or ``preliminary``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentReport:
    """The text of one report, and what links it with a study."""

    text: str = field(repr=False)
    status: ReportStatus = "final"
    facts: DocumentFacts
    document: ReportDocument | None = None
    """A PDF or RTF in the message, whose text comes before ``text``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoReport:
    """A document or message that gives no report."""

    reason: Reason
    detail: str = ""
    """Never content."""
    facts: DocumentFacts | None = None


NOT_REPORT: Final = NoReport(reason=Reason.NOT_REPORT)


_BY_CODE: Final[dict[str, str]] = {
    # LOINC
    "10164-2": "HISTORY",
    "11329-0": "HISTORY",
    "18782-3": "FINDINGS",
    "18783-1": "RECOMMENDATION",
    "18785-6": "INDICATION",
    "18834-2": "COMPARISON",
    "19005-8": "IMPRESSION",
    "29299-5": "INDICATION",
    "29545-1": "FINDINGS",
    "55107-7": "ADDENDUM",
    "55110-1": "IMPRESSION",
    "55111-9": "TECHNIQUE",
    "55112-7": "IMPRESSION",
    "55114-3": "COMPARISON",
    "55115-0": "EXAMINATION",
    "59768-2": "INDICATION",
    "59776-5": "FINDINGS",
    # Seen for the one above.
    "859776-5": "FINDINGS",
    # DCM
    "121060": "HISTORY",
    "121062": "INDICATION",
    "121064": "TECHNIQUE",
    "121065": "TECHNIQUE",
    "121066": "COMPARISON",
    "121068": "COMPARISON",
    "121069": "FINDINGS",
    "121070": "FINDINGS",
    "121071": "FINDINGS",
    "121072": "IMPRESSION",
    "121073": "IMPRESSION",
    "121074": "RECOMMENDATION",
    "121075": "RECOMMENDATION",
    "121076": "IMPRESSION",
    "121077": "IMPRESSION",
    "121078": "ADDENDUM",
    "121109": "INDICATION",
    "121110": "HISTORY",
    "121111": "IMPRESSION",
    # Suffixes of HL7 v2.3, 7.1.4
    "ADT": "ADDENDUM",
    "GDT": "FINDINGS",
    "IMP": "IMPRESSION",
    "REC": "RECOMMENDATION",
}
_BY_WORD: Final = (
    ("addend", "ADDENDUM"),
    ("comparison", "COMPARISON"),
    ("conclusion", "IMPRESSION"),
    ("impression", "IMPRESSION"),
    ("recommendation", "RECOMMENDATION"),
    ("finding", "FINDINGS"),
    ("indication", "INDICATION"),
    ("technique", "TECHNIQUE"),
)
_BODY: Final = frozenset({"ADDENDUM", "FINDINGS", "IMPRESSION"})
_MAX_LENGTH: Final = 60
_UNFIT: Final = re.compile(r"[^\w ,/&()-]+")


def heading_of(code: str, name: str = "") -> str:
    """Return the heading of a section; ``""`` for one whose code nobody knows and that has no name.

    Example:
        >>> heading_of("121070"), heading_of("X1", "Radiologist impression"), heading_of("X1", "Lungs")
        ('FINDINGS', 'IMPRESSION', 'LUNGS')
    """
    if (known := _BY_CODE.get(code.strip())) is not None:
        return known
    lowered = name.lower()
    for word, heading in _BY_WORD:
        if word in lowered:
            return heading
    return " ".join(_UNFIT.sub(" ", name).split())[:_MAX_LENGTH].strip().upper()


def is_report_section(heading: str) -> bool:
    """Tell whether a document with such a section is a report of findings."""
    return heading in _BODY


def join_sections(sections: list[tuple[str, str]]) -> str:
    r"""Join headings and texts; neighbors of one heading share it.

    Example:
        >>> join_sections([("FINDINGS", "A."), ("FINDINGS", "B."), ("", "C.")])
        'FINDINGS:\nA.\nB.\n\nC.\n'
    """
    parts: list[str] = []
    last = None
    for heading, text in sections:
        body = text.strip()
        if not body:
            continue
        if parts and heading == last:
            parts[-1] += f"\n{body}"
        else:
            parts.append(f"{heading}:\n{body}" if heading else body)
        last = heading
    return "\n\n".join(parts) + "\n" if parts else ""
