"""Whom an HL7v2 message names, and which study it speaks of (HL7 v2.5.1, chapters 3, 4 and 7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from shardflow.sources.documents.facts import DocumentFacts, People, parse_moment, uid_of
from shardflow.sources.documents.hl7 import Message, Segment

__all__ = ["group_facts", "message_people"]

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
    facts.patient_ids = _unique(number for _, number in sorted(numbers, key=lambda one: one[0]))
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
    facts.accessions = _unique(accessions)
    facts.study_uids = _unique(map(uid_of, uids))
    facts.time = next((moment for moment in map(parse_moment, moments) if moment is not None), None)
    return facts


def _parts(segment: Segment, table: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for number in table.get(segment.name, ()):
        for components in segment.components(number):
            for component in components:
                yield from (part.strip() for part in component.split("&") if part.strip())


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
