"""Linking of reports and attachments with studies, after the header pass and before anything is planned.

A report is joined by study instance UID, or by its order: an accession number together with a patient,
since other hospitals use the same accession numbers. A join is certain or it is not made: several different
texts for one study are quarantined, and the study with them, because no rule tells which one describes the
images. Texts wait in one private file.

An attachment of one record is an input like an image. One of several records (a bundle, a table) belongs to
as many studies as they do: its part for each study is an input of its own, and the file's own row reports
records that belong to none. So a study that is added later finds its part, and no other part changes its
name.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import StorageError, naming_os_errors
from shardflow.format.reasons import HELD_BACK, Outcome, Reason, outcome_of
from shardflow.packing.deid.identity import listed_together
from shardflow.packing.header_rows import AMBIGUOUS, CONFLICTING, digest64, digest_bytes, resolve
from shardflow.packing.inventory import (
    NO_STUDY,
    PACKED,
    UNDECIDED,
    Attachment,
    FileTable,
    StudyTable,
    reason_code,
    reason_name,
    set_columns,
)
from shardflow.packing.sources.reports import BrokenReport, ReportRecord

if TYPE_CHECKING:
    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.sources.placement import DiscoveredFile
    from shardflow.packing.sources.reports import ReportRole


class StudyFinder:
    """Finder of the studies of a report.

    Args:
        studies: The studies of the header pass.
        key: Makes the surrogates.
        copies: Whether a report of several studies is copied to each; else it is ambiguous.
    """

    def __init__(self, studies: StudyTable, key: SecretKey, *, copies: bool) -> None:
        self._studies = studies
        self._key = key
        self._copies = copies

    def find(
        self, record: ReportRecord | BrokenReport
    ) -> Iterator[tuple[ReportRecord | BrokenReport, str, int]]:
        """Yield a report with the surrogate and number of its study, once for each study that it names."""
        named = self._key.surrogate("study", record.study_instance_uid)
        study = self._studies.find(named)
        if study != NO_STUDY or isinstance(record, BrokenReport) or not record.accessions:
            yield record, named, study
            return
        found = self._with_order(record)
        if not found:
            yield record, named, NO_STUDY
        for number in found:
            is_ambiguous = len(found) > 1 and not self._copies
            one = (
                BrokenReport(place=record.place, reason=Reason.AMBIGUOUS_LINK, detail="")
                if is_ambiguous
                else replace(record, accessions=())
            )
            yield one, self._studies.keys[number], number

    def _with_order(self, record: ReportRecord) -> list[int]:
        """Return the studies of the first accession number that matches any of the patient's."""
        patients = [self._key.surrogate("patient", patient.strip()) for patient in record.patient_ids]
        for accession in record.accessions:
            digest = digest64(accession.strip())
            found = {study for patient in patients for study in self._by_order.get((patient, digest), ())}
            if found:
                return sorted(found)
        return []

    @cached_property
    def _by_order(self) -> dict[tuple[str, int], list[int]]:
        """Numbers of studies by patient and digest of the accession number."""
        orders: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for number, (patient, facts) in enumerate(
            zip(self._studies.patients, self._studies.facts, strict=True)
        ):
            if patient and facts.accession:
                orders[patient, facts.accession].append(number)
        return dict(orders)


SeveralReports: TypeAlias = Literal["append", "quarantine"]

_MAIN_ROLES: Final[tuple[ReportRole, ...]] = ("corrected", "final", "preliminary")
"""Roles of reports, one of which becomes the study's report; earlier ones take precedence."""
_HARMLESS: Final = frozenset(
    {UNDECIDED, reason_code(Reason.EMPTY_REPORT), reason_code(Reason.REPORT_WITHDRAWN)}
)
"""Reasons of reports that do not make the other reports of their study unusable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportPlace:
    """Location of a report in the private file: its text, followed by the people it names."""

    offset: int
    num_bytes: int
    people_num_bytes: int


_REPORT_COLUMNS: Final = {
    "surrogate": "S26",
    "reason": "u1",
    "study": "i4",
    "offset": "i8",
    "num_bytes": "i4",
    "digest": "u8",
    "identity": "u8",
    "place": "i8",
    "people_num_bytes": "i4",
    "people_digest": "u8",
}


class ReportTable:
    """The input reports, in the order of their source.

    Args:
        rows: Values of the columns below, in this order.

    Attributes:
        surrogate: ``(n,)`` S26, name of the report in the ledger.
        reason: ``(n,)`` uint8, as in `shardflow.packing.inventory.FileTable`.
        study: ``(n,)`` int32, or `NO_STUDY`.
        offset: ``(n,)`` int64: of the text in the private file.
        num_bytes: ``(n,)`` int32 of UTF-8.
        digest: ``(n,)`` uint64 of the text.
        identity: ``(n,)`` uint64 of study and text, by which later versions recognize the report.
        place: ``(n,)`` int64: line or position in the source.
        people_num_bytes: ``(n,)`` int32: of the people that its document names, as JSON behind the text.
        people_digest: ``(n,)`` uint64 of that; 0 if there is none.
        report_of: The report of each study that has one, by study number.
        unusable: Studies whose report cannot be used: several different ones, or an unreadable one.
    """

    surrogate: NDArray[np.bytes_]
    reason: NDArray[np.uint8]
    study: NDArray[np.int32]
    offset: NDArray[np.int64]
    num_bytes: NDArray[np.int32]
    digest: NDArray[np.uint64]
    identity: NDArray[np.uint64]
    place: NDArray[np.int64]
    people_num_bytes: NDArray[np.int32]
    people_digest: NDArray[np.uint64]

    def __init__(self, rows: Sequence[tuple[Any, ...]] = ()) -> None:
        set_columns(self, _REPORT_COLUMNS, rows)
        self.report_of: dict[int, int] = {}
        self.unusable: set[int] = set()

    def __len__(self) -> int:
        return len(self.reason)

    def place_of(self, report: int) -> ReportPlace:
        """Return the location of a report in the private file."""
        return ReportPlace(
            offset=int(self.offset[report]),
            num_bytes=int(self.num_bytes[report]),
            people_num_bytes=int(self.people_num_bytes[report]),
        )

    def digests_of(self, report: int | None) -> tuple[int | None, list[int]]:
        """Return the digest of a report, and that of the people it names if there are any."""
        if report is None:
            return None, []
        people = int(self.people_digest[report])
        return int(self.digest[report]), [people] if people else []

    def notes(self) -> tuple[str, ...]:
        """Return sentences where numbers were rounded, and where fewer than half of the reports link."""
        num_rounded = int(np.count_nonzero(self.reason == reason_code(Reason.ROUNDED_IDENTIFIER)))
        sentence = (
            f"{num_rounded:,} of the reports cannot be joined: accession numbers there, or of the images, "
            "were stored as floating-point numbers, and the last digits are lost (ROUNDED_IDENTIFIER in the "
            "private ledger); export the tables with identifiers as text."
        )
        rounded = (sentence,) if num_rounded else ()
        num_linked = int(np.count_nonzero(self.study != NO_STUDY))
        strangers = [reason_code(Reason.REPORT_WITHOUT_STUDY), reason_code(Reason.MISSING_IDENTIFIER)]
        num_unlinked = int(np.count_nonzero((self.study == NO_STUDY) & np.isin(self.reason, strangers)))
        if num_linked >= num_unlinked:
            return rounded
        note = (
            f"Only {num_linked:,} of {num_linked + num_unlinked:,} reports belong to a study of the images; "
            "check that they name the study, or patient and accession number, as headers or layout.table do."
        )
        return (*rounded, note)

    def decide(self, study_reason: NDArray[np.uint8]) -> None:
        """Give undecided reports the outcome of their study, if that is decided.

        Args:
            study_reason: ``(num_studies,)`` uint8: `UNDECIDED`, `PACKED` or a code.
        """
        for number in np.flatnonzero(self.reason == UNDECIDED).tolist():
            code = int(study_reason[self.study[number]])
            if code in {UNDECIDED, PACKED} or reason_name(code) in HELD_BACK:
                self.reason[number] = code
            elif outcome_of(str(reason_name(code))) is Outcome.QUARANTINED:
                self.reason[number] = reason_code(Reason.STUDY_QUARANTINED)
            else:
                # No image of the study can be packed, as if there were none.
                self.reason[number] = reason_code(Reason.REPORT_WITHOUT_STUDY)


def link_reports(
    records: Iterable[ReportRecord | BrokenReport],
    studies: StudyTable,
    key: SecretKey,
    spool: Path,
    *,
    several: SeveralReports = "quarantine",
    copies: bool = False,
) -> ReportTable:
    """Write the texts into the private folder and join reports with studies.

    Args:
        records: The reports of the source, taken one at a time.
        studies: The studies of the header pass.
        key: Makes the surrogates.
        spool: Private file that the texts are written to.
        several: Treatment of several different texts for one study: all are quarantined, or the final one is
            used with its addenda appended.
        copies: Whether a report whose order has several studies is copied to each; else it is ambiguous.

    Raises:
        StorageError: The texts cannot be written.
    """
    rows: list[tuple[Any, ...]] = []
    roles: list[ReportRole] = []
    unusable: set[int] = set()
    finder = StudyFinder(studies, key, copies=copies)
    offset = 0
    with naming_os_errors("writing report texts to the private folder"):
        descriptor = os.open(spool, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            linked = ((number, *found) for one in records for number, found in enumerate(finder.find(one)))
            for number, record, study_key, study in linked:
                if isinstance(record, ReportRecord) and record.patient_numbers:
                    named = tuple((one.number, one.issuer) for one in record.patient_numbers)
                    studies.evidence.add_lists([listed_together(key, named)])
                encoded = _encode(record)
                text, people = encoded or b"", _encode_people(record)
                reason = _reason(record, study, is_text=encoded is not None)
                if study != NO_STUDY and reason not in _HARMLESS:
                    unusable.add(study)
                place = f"{record.place}/{number}" if number else str(record.place)
                roles.append("final" if isinstance(record, BrokenReport) else record.role)
                rows.append(
                    (
                        key.surrogate("input-report", place).encode("ascii"),
                        reason,
                        study,
                        offset,
                        len(text),
                        digest_bytes(bytes([reason]) + text),
                        _identity(study_key, record, text),
                        record.place,
                        len(people),
                        digest_bytes(people) if people else 0,
                    )
                )
                file.write(text + people)
                offset += len(text) + len(people)
    table = ReportTable(rows)
    table.unusable = unusable
    _join(table, _Appending(table, roles, spool) if several == "append" else None)
    return table


def read_report(spool: Path, place: ReportPlace) -> bytes:
    """Read one text back.

    Raises:
        StorageError: It cannot be read whole.
    """
    return _read(spool, place.offset, place.num_bytes)


def read_people(spool: Path, place: ReportPlace) -> dict[str, list[str]]:
    """Read back the people that the document of a report names, by DICOM keyword.

    Raises:
        StorageError: It cannot be read whole.
    """
    if not place.people_num_bytes:
        return {}
    people: dict[str, list[str]] = json.loads(
        _read(spool, place.offset + place.num_bytes, place.people_num_bytes)
    )
    return people


def _read(spool: Path, offset: int, num_bytes: int) -> bytes:
    with naming_os_errors("reading a report text of the private folder"), spool.open("rb") as file:
        text = os.pread(file.fileno(), num_bytes, offset)
    if len(text) != num_bytes:
        raise StorageError("a report text in the private folder is truncated; run the job again.")
    return text


def _encode(record: ReportRecord | BrokenReport) -> bytes | None:
    """Encode a text; None if there is none, or if it contains lone surrogates."""
    if isinstance(record, BrokenReport):
        return None
    try:
        return record.text.encode("utf-8")
    except UnicodeEncodeError:
        return None


def _encode_people(record: ReportRecord | BrokenReport) -> bytes:
    if isinstance(record, BrokenReport) or not record.people:
        return b""
    return json.dumps(record.people, sort_keys=True).encode("ascii")


def _identity(study_key: str, record: ReportRecord | BrokenReport, text: bytes) -> int:
    problem = record.reason if isinstance(record, BrokenReport) else ""
    return digest_bytes(f"{study_key}/{problem}/".encode("ascii") + text)


def _reason(record: ReportRecord | BrokenReport, study: int, *, is_text: bool) -> int:
    if isinstance(record, BrokenReport):
        return reason_code(record.reason)
    if not is_text:
        return reason_code(Reason.REPORT_UNREADABLE)
    if not record.text.strip():
        return reason_code(Reason.EMPTY_REPORT)
    return UNDECIDED if study != NO_STUDY else reason_code(Reason.REPORT_WITHOUT_STUDY)


class _Appending:
    """Combines the final report of a study and its addenda into one text, behind all other texts.

    The row of the final report then refers to the whole text; addenda get the outcome of their study.
    """

    def __init__(self, table: ReportTable, roles: Sequence[ReportRole], spool: Path) -> None:
        self._table = table
        self._roles = roles
        self._spool = spool

    def choose(self, group: NDArray[np.int64]) -> int | None:
        """Choose the report of a study; None if no rule does.

        Args:
            group: The study's reports, in the order of their source.

        Raises:
            StorageError: The texts cannot be read or written.
        """
        by_role = {role: self._without_copies(group, role) for role in (*_MAIN_ROLES, "addendum")}
        first = next((role for role in _MAIN_ROLES if by_role[role]), None)
        if first is None or len(by_role[first]) != 1:
            return None
        bodies = by_role[first]
        for role in _MAIN_ROLES[_MAIN_ROLES.index(first) + 1 :]:
            self._table.reason[by_role[role]] = reason_code(Reason.SUPERSEDED_REPORT)
        if by_role["addendum"]:
            self._write(bodies[0], [bodies[0], *by_role["addendum"]])
        return bodies[0]

    def _without_copies(self, group: NDArray[np.int64], role: ReportRole) -> list[int]:
        seen: set[int] = set()
        kept = []
        for report in group.tolist():
            if self._roles[report] != role:
                continue
            digest = int(self._table.digest[report])
            if digest in seen:
                self._table.reason[report] = reason_code(Reason.DUPLICATE_REPORT)
            else:
                kept.append(report)
            seen.add(digest)
        return kept

    def _write(self, final: int, parts: Sequence[int]) -> None:
        table = self._table
        texts = [read_report(self._spool, table.place_of(one)) for one in parts]
        text = b"\n\n".join(part.strip(b"\n") for part in texts) + b"\n"
        people = self._people(parts)
        with naming_os_errors("writing report texts to the private folder"), self._spool.open("ab") as file:
            table.offset[final] = file.tell()
            file.write(text + people)
        table.num_bytes[final] = len(text)
        table.people_num_bytes[final] = len(people)
        table.people_digest[final] = digest_bytes(people) if people else 0
        table.digest[final] = digest_bytes(bytes([UNDECIDED]) + text)

    def _people(self, parts: Sequence[int]) -> bytes:
        """Merge the people that the documents of several reports name."""
        table = self._table
        merged: dict[str, set[str]] = {}
        for one in parts:
            for keyword, values in read_people(self._spool, table.place_of(one)).items():
                merged.setdefault(keyword, set()).update(values)
        people = {keyword: sorted(values) for keyword, values in merged.items()}
        return json.dumps(people, sort_keys=True).encode("ascii") if people else b""


def _join(table: ReportTable, appending: _Appending | None) -> None:
    """Choose the report of each study; copies and contradictions get their reasons."""
    candidates = np.flatnonzero(table.reason == UNDECIDED)
    order = candidates[np.argsort(table.study[candidates], kind="stable")]
    for group in np.split(order, np.flatnonzero(np.diff(table.study[order])) + 1):
        if not len(group):
            continue
        study = int(table.study[group[0]])
        is_several = len(np.unique(table.digest[group])) > 1
        chosen = appending.choose(group) if is_several and appending is not None else None
        if chosen is not None:
            table.report_of[study] = chosen
        elif is_several:
            table.unusable.add(study)
            table.reason[group] = reason_code(Reason.AMBIGUOUS_REPORT)
        else:
            table.report_of[study] = int(group[0])
            table.reason[group[1:]] = reason_code(Reason.DUPLICATE_REPORT)


def link_attachments(
    files: FileTable, discovered: Sequence[DiscoveredFile], key: SecretKey, window_s: int
) -> None:
    """Set the study of all attachments, or the reason why there is none.

    Args:
        files: The inventory; parts are appended to its rows.
        discovered: The files.
        key: Makes the surrogates of parts.
        window_s: Maximum distance in time between a record and the study of its patient.
    """
    rows = sorted(files.attachments)
    found = resolve(files, [files.attachments[row].links for row in rows], window_s)
    parts: list[tuple[int, int, str, int, Attachment]] = []
    for row, studies in zip(rows, found, strict=True):
        size = discovered[row].num_bytes
        if len(studies) == 1:
            ((item, study),) = studies.items()
            files.reason[row] = _reason_attaching(study)
            if study >= 0:
                files.study[row], files.decoded_bytes[row] = study, size
                files.attachments[row] = replace(files.attachments[row], items=(item,))
            continue
        parts += _parts(files, key, row, studies)
        files.reason[row] = _reason_of_rest(studies)
    files.add_parts(parts)
    for row in range(len(files) - len(parts), len(files)):
        attachment, whole = files.attachments[row], int(files.source[row])
        share = len(attachment.items) / len(attachment.links)
        files.decoded_bytes[row] = int(discovered[whole].num_bytes * share)
        files.reason[row] = UNDECIDED
    _leave_out_copies(files)


def _parts(
    files: FileTable, key: SecretKey, row: int, studies: dict[int, int]
) -> list[tuple[int, int, str, int, Attachment]]:
    """Make the part of each study that records of a file belong to."""
    items_of: dict[int, list[int]] = {}
    for item, study in sorted(studies.items()):
        if study >= 0:
            items_of.setdefault(study, []).append(item)
    name, digest = files.surrogate[row].decode("ascii"), int(files.digest[row])
    made = []
    for study, items in items_of.items():
        sample_key = files.studies.keys[study]
        text = f"{digest:016x}/{sample_key}".encode("ascii")
        made.append(
            (
                row,
                study,
                key.surrogate("input-part", f"{name}/{sample_key}"),
                digest_bytes(text),
                replace(files.attachments[row], items=tuple(items)),
            )
        )
    return made


def _reason_attaching(study: int) -> int:
    if study == AMBIGUOUS:
        return reason_code(Reason.AMBIGUOUS_LINK)
    if study == CONFLICTING:
        return reason_code(Reason.CONFLICTING_IDENTIFIER)
    return reason_code(Reason.ATTACHMENT_WITHOUT_STUDY) if study == NO_STUDY else UNDECIDED


def _reason_of_rest(studies: dict[int, int]) -> int:
    """Return the reason of a file whose records are in parts, or belong to no study."""
    for code in (CONFLICTING, AMBIGUOUS, NO_STUDY):
        if code in studies.values():
            return _reason_attaching(code)
    return reason_code(Reason.ATTACHMENT_IN_PARTS)


def _leave_out_copies(files: FileTable) -> None:
    """Keep one of several equal files of a study: the first by surrogate."""
    seen: set[tuple[int, str, int]] = set()
    for row in sorted(files.attachments, key=lambda row: bytes(files.surrogate[row])):
        if files.reason[row] != UNDECIDED:
            continue
        what = (int(files.study[row]), files.attachments[row].kind, int(files.digest[row]))
        if what in seen:
            files.reason[row] = reason_code(Reason.DUPLICATE_INSTANCE)
        seen.add(what)
