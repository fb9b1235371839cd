"""Reader of HL7 version 2 messages: syntax, people and study links, and the texts of ORU^R01 reports.

The parser is lenient, as real messages require: any line end, lines broken inside a field, segments put on
one line, several messages in a file. A report is the text of the OBX segments below one OBR, or a PDF or
RTF there (data type ED) where none of them is narrative.

Source: HL7 v2.5.1, chapters 2 (syntax), 3, 4 and 7.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardflow.format.reasons import Reason
from shardflow.packing.sources.attachments import PatientNumber
from shardflow.packing.sources.documents.facts import (
    NOT_REPORT,
    DocumentFacts,
    DocumentReport,
    NoReport,
    People,
    first_moment,
    heading_of,
    is_other_system,
    join_sections,
    patient_numbers,
    uid_of,
    unique,
)
from shardflow.packing.sources.reports import ReportDocument, encoded_document

_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_SEGMENT: Final = re.compile(r"[A-Z][A-Z0-9]{2}(?=[^\w\s]|$)")
_INLINE: Final = re.compile(
    r"(?:(?<=[ \t])|(?<=\|))"
    r"(?=MSH\|[^\w\s|]{3}|(?:PID|PV1|OBR|NTE|NK1)\|\d{0,4}\|+[^|\s]|ORC\|[A-Z]{2}\||ZDS\|\d+\.\d)"
    r"|(?<=[ \t|])(?=OBX\|\d)"
)
"""Start of a segment on the line of another: its name and what its first fields hold.

A field that is only called like a segment does not begin one.
"""
_NOT_DATA: Final = frozenset({"BHS", "BTS", "FHS", "FTS"})
_ESCAPE: Final = re.compile(r"\\([EFHNRST]|X[0-9A-Fa-f]*|[CMZ][0-9A-Za-z]*|\.[a-z]{2} ?[+-]?\d*)\\")
"""Anything else, such as the path of a file, stays as it is."""
_MAX_BLANK_LINES: Final = 20
_DEFAULT_SEPARATORS: Final = "|^~\\&"


@dataclass(frozen=True, kw_only=True, slots=True)
class Separators:
    """MSH-1 and MSH-2."""

    field: str = "|"
    component: str = "^"
    repetition: str = "~"
    escape: str = "\\"
    subcomponent: str = "&"


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment; fields are numbered as the standard numbers them, from 1."""

    name: str
    fields: tuple[str, ...] = field(repr=False)
    separators: Separators = field(repr=False)

    def raw(self, number: int) -> str:
        """Return a field with its separators and escapes; ``""`` where absent."""
        return self.fields[number - 1] if 0 < number <= len(self.fields) else ""

    def repetitions(self, number: int) -> list[str]:
        """Return the repetitions of a field, raw."""
        text = self.raw(number)
        return text.split(self.separators.repetition) if text else []

    def components(self, number: int) -> Iterator[list[str]]:
        """Yield the components of each repetition of a field, without escapes."""
        for one in self.repetitions(number):
            yield [self.plain(part) for part in one.split(self.separators.component)]

    def get(self, number: int, component: int = 1) -> str:
        """Return a component of a field's first repetition, unescaped, with single spaces."""
        first = next(self.components(number), [])
        return " ".join(first[component - 1].split()) if component <= len(first) else ""

    def plain(self, text: str) -> str:
        """Resolve the escapes of a text."""
        return unescape(text, self.separators)


@dataclass(frozen=True, slots=True)
class Message:
    """The segments between one MSH and the next; of a file without one, all."""

    segments: tuple[Segment, ...] = field(repr=False)

    def of(self, *names: str) -> Iterator[Segment]:
        """Yield the segments with one of some names, in order."""
        return (segment for segment in self.segments if segment.name in names)


def decode_message(data: bytes) -> str:
    """Decode by what the bytes are: UTF-8 where they are that, else Latin-1, the sets of most senders."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def read_messages(text: str) -> Iterator[Message]:
    """Cut a text into messages.

    Frames of the minimal lower layer protocol around messages are taken off.
    """
    separators, segments = _separators(_DEFAULT_SEPARATORS), list[Segment]()
    for line in _lines(text):
        name = line[:3]
        if name == "MSH":
            if segments:
                yield Message(tuple(segments))
                segments = []
            separators = _separators(line[3:8])
        if name in _NOT_DATA:
            continue
        parts = line.split(separators.field)
        # The separator itself is MSH-1.
        fields = (separators.field, *parts[1:]) if name == "MSH" else tuple(parts[1:])
        segments.append(Segment(name, tuple(part.strip() for part in fields), separators))
    if segments:
        yield Message(tuple(segments))


def unescape(text: str, separators: Separators = Separators()) -> str:
    r"""Resolve the escapes of a text; formatting becomes line ends, what is unknown disappears.

    Example:
        >>> unescape(r"A \T\ B\.br\C\H\!\N\\X41\ ")
        'A & B\nC!A '
    """
    if separators.escape not in text:
        return text
    marked = text if separators.escape == "\\" else text.replace(separators.escape, "\\")

    def resolve(match: re.Match[str]) -> str:
        code = match[1]
        meanings = {
            "F": separators.field,
            "S": separators.component,
            "T": separators.subcomponent,
            "R": separators.repetition,
            "E": separators.escape,
        }
        if code in meanings:
            return meanings[code]
        if code[0] == "X":
            return _hexadecimal(code[1:])
        if code[0] == ".":
            return _formatting(code[1:])
        return ""

    return _ESCAPE.sub(resolve, marked)


def _hexadecimal(digits: str) -> str:
    if len(digits) % 2:
        return ""
    text = decode_message(bytes.fromhex(digits))
    return "".join(
        sign for sign in text.replace("\r\n", "\n").replace("\r", "\n") if sign >= " " or sign == "\n"
    )


def _formatting(command: str) -> str:
    """HL7 v2.5.1, 2.7.6: line breaks, spaces, indents."""
    match = re.fullmatch(r"(br|sp|ce|in|ti|sk|fi|nf)\s*([+-]?\d{1,4})?", command)
    if match is None:
        return ""
    count = min(max(int(match[2] or 1), 1), _MAX_BLANK_LINES)
    if match[1] in {"br", "ce", "sp"}:
        return "\n" * (count if match[1] == "sp" else 1)
    return " " * count if match[1] == "sk" else ""


def _separators(text: str) -> Separators:
    given = text.ljust(5)
    if given[0].isalnum() or given[0].isspace():
        given = _DEFAULT_SEPARATORS
    # A field that ends early leaves the rest as usual; a doubled escape is a slip of whoever wrote it down.
    signs = given[1:].split(given[0])[0].replace("\\\\", "\\")
    signs = "".join(
        sign if not (sign.isspace() or sign.isalnum()) else default
        for sign, default in zip(signs.ljust(4), _DEFAULT_SEPARATORS[1:], strict=False)
    )
    return Separators(
        field=given[0], component=signs[0], repetition=signs[1], escape=signs[2], subcomponent=signs[3]
    )


def _lines(text: str) -> Iterator[str]:
    """Segments as lines: broken ones joined (their line ends stay), joined ones cut."""
    waiting = ""
    for line in _LINE_END.split(text.replace("\x0b", "").replace("\x1c", "")):
        if _SEGMENT.match(line.lstrip()):
            if waiting:
                yield from _cut(waiting)
            waiting = line.lstrip()
        elif waiting and line.strip():
            waiting += "\n" + line.strip()
    if waiting:
        yield from _cut(waiting)


def _cut(line: str) -> Iterator[str]:
    """Cut a line at segments that begin inside it."""
    yield from (part.strip(" \t") for part in _INLINE.split(line) if part.strip(" \t"))


_NAMES: Final[Mapping[str, tuple[int, ...]]] = {
    "GT1": (3,),
    "IN1": (16,),
    "MRG": (7,),
    "NK1": (2, 26, 30),
    "PID": (5, 6, 9),
}
"""Fields whose first components are family and given name."""
_NUMBERED_NAMES: Final[Mapping[str, tuple[int, ...]]] = {
    "DG1": (16,),
    "EVN": (5,),
    "OBR": (10, 16, 28),
    "OBX": (16, 25),
    "ORC": (10, 11, 12, 19),
    "PD1": (4,),
    "PR1": (8, 11, 12),
    "PV1": (7, 8, 9, 17, 52),
    "ROL": (4,),
    "TXA": (5, 9, 10, 11, 22),
}
"""Fields that begin with a number of the person."""
_SIGNERS: Final = range(32, 36)
"""OBR-32 to 35: a person in the subcomponents of the first component."""
_IDS: Final[Mapping[str, tuple[int, ...]]] = {
    "GT1": (2, 12, 19),
    "IN1": (2, 8, 36, 49),
    "MRG": (1, 2, 3, 4, 5, 6),
    "MSH": (10,),
    "NK1": (12, 33, 37),
    "OBR": (2, 3, 18, 19, 20, 21),
    "ORC": (2, 3, 4),
    "PID": (2, 3, 4, 18, 19, 20, 21),
    "PV1": (5, 19, 50),
    "TXA": (12, 14, 15),
}
_PLACES: Final[Mapping[str, tuple[int, ...]]] = {
    "GT1": (5, 16, 17),
    "IN1": (4, 5, 11, 19),
    "MSH": (4, 6),
    "NK1": (4, 13, 32),
    "OBX": (23, 24),
    "ORC": (13, 21, 22, 24),
    "PD1": (3,),
    "PID": (11, 12, 23),
    "PV1": (3, 6, 11, 37, 39, 42),
}
_PHONES: Final[Mapping[str, tuple[int, ...]]] = {
    "GT1": (6, 7, 18),
    "IN1": (7,),
    "NK1": (5, 6, 31),
    "OBR": (17,),
    "ORC": (14, 23),
    "PID": (13, 14),
}
_STUDY_CODES: Final = frozenset({"110180", "113014"})
"""DCM codes of an OBX that holds a Study Instance UID."""
_SOCIAL: Final = "SS"
_RECORD_NUMBER: Final = "MR"
_MIN_PLACE: Final = 4
_MERGES: Final = frozenset({"A18", "A30", "A34", "A36", "A40", "A46", "A47"})
"""Events that merge numbers of one person, the former in MRG; where a visit is moved, it is another's."""


def message_people(message: Message) -> People:  # noqa: C901 - one table after the other
    """Return everybody and every number that a message names."""
    people = People()
    for segment in message.segments:
        name = segment.name
        for number in _NAMES.get(name, ()):
            for parts in segment.components(number):
                full = " ".join(" ".join(parts[:4]).replace("&", " ").split())
                (people.patient_name if name == "PID" else people.name)(full)
        for number in _NUMBERED_NAMES.get(name, ()):
            for parts in segment.components(number):
                people.identifier(parts[0])
                people.name(" ".join(parts[1:4]).replace("&", " "))
        if name == "OBR":
            for number in _SIGNERS:
                for one in segment.repetitions(number):
                    signer = [segment.plain(part) for part in one.split("^")[0].split("&")]
                    people.identifier(signer[0])
                    people.name(" ".join(signer[1:4]))
        for part in _parts(segment, _IDS):
            people.identifier(part)
        for part in _parts(segment, _PLACES):
            if len(part) >= _MIN_PLACE:
                people.place(part)
        for part in _parts(segment, _PHONES):
            people.phone(part)
        if name == "PID":
            people.birth_date(segment.get(7))
    return people


def group_facts(message: Message, group: Iterable[Segment], people: People | None = None) -> DocumentFacts:
    """Return the linking facts of one order of a message.

    Args:
        message: The message.
        group: The segments of the order: its OBR and what follows up to the next.
        people: `message_people`, where it is known already.
    """
    facts = DocumentFacts(people=people or message_people(message))
    numbers: list[tuple[int, str]] = []
    for segment in message.of("PID"):
        for parts in segment.components(3):
            kind = parts[4].strip().upper() if len(parts) > 4 else ""
            numbers.append((2 if kind == _SOCIAL else int(kind != _RECORD_NUMBER), parts[0].strip()))
        numbers += [(1, segment.get(number)) for number in (2, 4)]
    facts.patient_ids = unique(number for _, number in sorted(numbers, key=lambda one: one[0]))
    facts.patient_numbers = _patient_numbers(message)
    order = list(group)
    obr = next((segment for segment in order if segment.name == "OBR"), None)
    ipc = list(message.of("IPC"))
    accessions = [segment.get(1) for segment in ipc]
    uids = [segment.get(3) for segment in ipc] + [segment.get(1) for segment in message.of("ZDS")]
    uids += [one.get(5) for one in order if one.name == "OBX" and one.get(3) in _STUDY_CODES]
    moments = [segment.get(7) for segment in message.of("MSH")]
    if obr is not None:
        accessions += [obr.get(18), obr.get(20), obr.get(3)]
        moments = [obr.get(7), obr.get(22), *moments]
    accessions += [segment.get(3) for segment in order if segment.name == "ORC"]
    facts.accessions = unique(accessions)
    facts.study_uids = unique(map(uid_of, uids))
    facts.time = first_moment(moments)
    return facts


def _patient_numbers(message: Message) -> list[PatientNumber]:
    """Return the numbers that a message lists for its patient; none if it is about several.

    Source: HL7 v2.5.1, 3.4.2.2 to 3.4.2.4 (PID), 3.4.9 (MRG).
    """
    patients = list(message.of("PID"))
    if len(patients) != 1:
        return []
    header = next(message.of("MSH"), None)
    is_merge = header is not None and header.get(9, 2).upper() in _MERGES
    former = [one for segment in message.of("MRG") for one in _identifiers(segment, 1, 4)] if is_merge else []
    return [*patient_numbers(_identifiers(patients[0], 3, 2, 4)), *patient_numbers(former)]


def _identifiers(segment: Segment, *numbers: int) -> Iterator[tuple[str, str, str]]:
    """Yield value, issuer and type of the identifiers (data type CX) of some fields."""
    for number in numbers:
        for parts in segment.components(number):
            value, _, _, authority, kind = (part.strip() for part in (*parts, "", "", "", "", "")[:5])
            issuers = authority.split(segment.separators.subcomponent)
            if not any(map(is_other_system, issuers)):
                yield value, next(filter(None, issuers), ""), kind.upper()


def _parts(segment: Segment, table: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for number in table.get(segment.name, ()):
        for components in segment.components(number):
            for component in components:
                yield from (part.strip() for part in component.split("&") if part.strip())


_TEXTS: Final = frozenset({"", "FT", "ST", "TX"})
_CODES: Final = frozenset({"CE", "CF", "CNE", "CWE"})
_NARRATIVE: Final = frozenset({"FT", "TX"})

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
    document = None if has_narrative else document_of(group)
    status = status_of(obr.get(25)) if obr is not None else ""
    if not status:
        status = next((letter for letter in ("C", "P", "F") if letter in own), "F")
    if status == _WITHDRAWN:
        return NoReport(reason=Reason.REPORT_WITHDRAWN, facts=facts)
    if document is None and (not has_narrative or not text):
        has_texts = any(segment.get(2) in _NARRATIVE for segment in results)
        return NoReport(reason=Reason.EMPTY_REPORT if has_texts else Reason.NOT_REPORT, facts=facts)
    named = {heading for heading, _ in sections}
    is_addendum = named == {"ADDENDUM"}
    return DocumentReport(
        text=text,
        status="addendum" if is_addendum else _STATUS.get(status, "final"),
        facts=facts,
        document=document,
    )


def document_of(group: Iterable[Segment]) -> ReportDocument | None:
    """Return the first PDF or RTF among the results of an order, as an encapsulated document."""
    for segment in group:
        if segment.name != "OBX" or segment.get(2).upper() != "ED" or status_of(segment.get(11)) in _GONE:
            continue
        parts = _encoded_parts(segment)
        found = encoded_document(f"{parts[1]}/{parts[2]}", parts[4]) if parts else None
        if found is not None:
            return found
    return None


def section_of(segment: Segment) -> tuple[str, str] | None:
    """Return the heading and text of one result; None if it has no text."""
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
    """Plain text in base 64 (data type ED); documents of other kinds give none; see `document_of`."""
    parts = _encoded_parts(segment)
    if {part.strip().lower() for part in parts[1:3]} & {"text", "plain", "txt", "text/plain"}:
        try:
            return decode_message(base64.b64decode(parts[4], validate=True)).replace("\r\n", "\n").strip()
        except ValueError:
            return ""
    return ""


def _encoded_parts(segment: Segment) -> list[str]:
    """Components of an encapsulated document in base 64; empty for another encoding."""
    parts = next(iter(segment.repetitions(5)), "").split(segment.separators.component)
    return parts if len(parts) >= 5 and parts[3].strip().lower() == "base64" else []
