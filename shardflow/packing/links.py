"""Link attachments with studies, without knowing a single identifier.

The packing processes turn what attachments and images say of themselves into digests; here they are compared.
Evidence is used in one order (study, series, instances, accession number, place, patient and time), and the
first kind of it that names studies of the inputs decides; several studies are no link, and neither is the
study of one patient with the name of another (docs/attachments.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import numpy as np

from shardflow.deid.dates import parse_date
from shardflow.packing.inventory import ATTACHMENT_KIND, NO_STUDY, Attachment, ItemLinks, StudyFacts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.header_rows import AttachmentRow, HeaderRow
    from shardflow.packing.inventory import FileTable

__all__ = ["AMBIGUOUS", "CONFLICTING", "digest64", "image_facts", "link_facts", "resolve"]

AMBIGUOUS: Final = -2
"""Stands for a record that several studies have an equal claim to."""
CONFLICTING: Final = -3
"""Stands for a record that names a study and a patient of the inputs who is not the study's."""
_DAY_S: Final = 86_400


def digest64(text: str) -> int:
    """Return 64 bits that stand for an identifier in the memory of a job; 0 for none."""
    encoded = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "little") if text else 0


def image_facts(row: HeaderRow) -> StudyFacts:
    """Return what an image says of its study."""
    header = row.header
    if header is None:
        return StudyFacts(0, None, None)
    others = () if row.placement is None else row.placement.other_ids
    accession = digest64((header.accession_number or next(iter(others), "")).strip())
    day = parse_date(header.study_date)
    if day is None:
        return StudyFacts(accession, None, None)
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
    seconds = seconds_of_day(header.study_time)
    first = int(midnight.timestamp())
    return StudyFacts(accession, first + (seconds or 0), first + (_DAY_S if seconds is None else seconds))


def seconds_of_day(value: str) -> int | None:
    """Read a DICOM time, which may end after its hours or minutes; None where it is none.

    Example:
        >>> seconds_of_day("093015.25"), seconds_of_day("09:30"), seconds_of_day("25")
        (34215, 34200, None)
    """
    digits = value.split(".", maxsplit=1)[0].replace(":", "").strip()
    if len(digits) not in {2, 4, 6} or not (digits.isascii() and digits.isdigit()):
        return None
    hours, minutes, seconds = (int(digits[at : at + 2] or "0") for at in (0, 2, 4))
    inside = hours < 24 and minutes < 60 and seconds < 61
    return int(timedelta(hours=hours, minutes=minutes, seconds=seconds).total_seconds()) if inside else None


def link_facts(row: AttachmentRow, key: SecretKey) -> Attachment:
    """Return what the records of an attachment are linked by; identifiers end here."""
    items = []
    for item in row.items:
        time = item.time
        seconds = None if time is None else int(time.replace(tzinfo=UTC).timestamp())
        items.append(
            ItemLinks(
                item=item.item,
                studies=tuple(key.surrogate("study", uid.strip()) for uid in item.study_uids if uid.strip()),
                series=tuple(digest64(uid.strip()) for uid in item.series_uids if uid.strip()),
                instances=tuple(digest64(uid.strip()) for uid in item.sop_uids if uid.strip()),
                accession=digest64(item.accession.strip()),
                beside=key.surrogate("study", row.study_beside) if row.study_beside else "",
                patient=key.surrogate("patient", item.patient_id.strip()) if item.patient_id.strip() else "",
                time_s=seconds,
            )
        )
    return Attachment(kind=row.kind, version=row.version, links=tuple(items))


def resolve(files: FileTable, links: Iterable[Sequence[ItemLinks]], window_s: int) -> list[dict[int, int]]:
    """Find the study of every record.

    Args:
        files: The inventory after the header pass.
        links: Records of each attachment.
        window_s: Largest distance in time between a record and the study of its patient.

    Returns:
        For each attachment, item to study, `NO_STUDY`, `AMBIGUOUS` or `CONFLICTING`.
    """
    attachments = [list(items) for items in links]
    every = [item for items in attachments for item in items]
    search = _Search(files, every, window_s)
    return [{item.item: search.study_of(item) for item in items} for items in attachments]


class _Search:
    def __init__(self, files: FileTable, items: Sequence[ItemLinks], window_s: int) -> None:
        self._studies = files.studies
        self._window_s = window_s
        is_image = (files.kind != ATTACHMENT_KIND) & (files.study != NO_STUDY)
        wanted = {digest for item in items for digest in item.series}
        self._by_series = _studies_by(files.series, files.study, is_image, wanted)
        wanted = {digest for item in items for digest in item.instances}
        self._by_instance = _studies_by(files.instance, files.study, is_image, wanted)
        self._by_accession: dict[int, set[int]] = {}
        self._by_patient: dict[str, list[int]] = {}
        accessions = {item.accession for item in items if item.accession}
        patients = {item.patient for item in items if item.patient and item.time_s is not None}
        named = {item.patient for item in items if item.patient}
        self._patients = named.intersection(map(self._studies.patient_of, range(len(self._studies))))
        for study, (patient, facts) in enumerate(
            zip(self._studies.patients, self._studies.facts, strict=True)
        ):
            if facts.accession in accessions:
                self._by_accession.setdefault(facts.accession, set()).add(study)
            if patient in patients:
                self._by_patient.setdefault(patient, []).append(study)

    def study_of(self, item: ItemLinks) -> int:
        """Return the study of a record by the strongest evidence that names any."""
        known = {self._studies.find(key) for key in item.studies} - {NO_STUDY}
        for found in (
            known,
            set().union(*(self._by_series.get(one, ()) for one in item.series)),
            set().union(*(self._by_instance.get(one, ()) for one in item.instances)),
            self._with_accession(item),
            {self._studies.find(item.beside)} - {NO_STUDY},
            self._near(item),
        ):
            if found:
                return AMBIGUOUS if len(found) > 1 else self._of_one_patient(found.pop(), item)
        return NO_STUDY

    def _of_one_patient(self, study: int, item: ItemLinks) -> int:
        """Refuse a study where the record names somebody else of the inputs.

        A name that no image has tells nothing: systems number patients in their own ways.
        """
        patient = self._studies.patient_of(study)
        is_other = patient and item.patient in self._patients and item.patient != patient
        return CONFLICTING if is_other else study

    def _with_accession(self, item: ItemLinks) -> set[int]:
        """One study with the record's accession number, unless it is another patient's."""
        found = self._by_accession.get(item.accession, set()) if item.accession else set()
        if len(found) != 1:
            return set()
        (study,) = found
        patient = self._studies.patient_of(study)
        return set() if item.patient and patient and item.patient != patient else {study}

    def _near(self, item: ItemLinks) -> set[int]:
        """Studies of the record's patient within the window."""
        if item.time_s is None or not item.patient:
            return set()
        near: set[int] = set()
        for study in self._by_patient.get(item.patient, ()):
            facts = self._studies.facts[study]
            if facts.first_s is None or facts.last_s is None:
                continue
            distance = max(facts.first_s - item.time_s, item.time_s - facts.last_s, 0)
            if distance <= self._window_s:
                near.add(study)
        return near


def _studies_by(
    column: NDArray[np.uint64], study: NDArray[np.int32], chosen: NDArray[np.bool_], wanted: set[int]
) -> Mapping[int, set[int]]:
    """Return the studies that hold each wanted digest."""
    found: dict[int, set[int]] = {}
    if not wanted:
        return found
    rows = np.flatnonzero(chosen & np.isin(column, np.array(sorted(wanted), np.uint64)))
    for digest, number in zip(column[rows].tolist(), study[rows].tolist(), strict=True):
        found.setdefault(digest, set()).add(number)
    return found
