"""Every input of a job in a few columns, so that memory grows by tens of bytes a file and not by objects.

About 100 bytes an input file and 500 a study; attributes wait on disk (`shardflow.packing.header_rows`), and
so do texts (`shardflow.packing.linking`). Owns who belongs to which study and the reason of each input, and
the sum that must come out: inputs = packed + skipped + quarantined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, ShardflowError
from shardflow.format.reasons import HELD_BACK, Outcome, Reason, outcome_of

NO_STUDY: Final = -1

UNDECIDED: Final = 255
CARRIED: Final = 254
"""Of inputs and studies that a later version leaves as the version before has them."""
INPUT_KINDS: Final = ("dicom", "nifti", "raster", "report", "attachment")
"""What an input is, by its number in a column: how an image file is read, a report, or an attachment."""
REPORT_KIND: Final = INPUT_KINDS.index("report")
ATTACHMENT_KIND: Final = INPUT_KINDS.index("attachment")

PACKED: Final = 0
_REASONS: Final = tuple(Reason)
_CODES: Final = {reason.value: code for code, reason in enumerate(_REASONS, start=1)}


def reason_code(reason: str | None) -> int:
    """Return the number that stands for a reason in a column; `PACKED` for None."""
    return PACKED if reason is None else _CODES[reason]


def reason_name(code: int) -> str | None:
    """Return the reason behind a number; None for `PACKED`."""
    return None if code == PACKED else _REASONS[code - 1].value


def known_code(reason: str | None) -> int:
    """Return `reason_code` of a text that was read from a file.

    Raises:
        FormatError: It is no reason.
    """
    if reason is not None and reason not in _CODES:
        raise FormatError("a reason must be one of docs/dicom.md, got another text; is it a newer ledger?")
    return reason_code(reason)


_SCANNED_COLUMNS: Final = (
    "decoded_bytes",
    "digest",
    "instance",
    "modified_ns",
    "num_slices",
    "row_num_bytes",
    "row_offset",
    "series",
    "surrogate",
)
"""Columns of `FileTable` that are fields of `ScannedFile`."""
_COLUMNS: Final = (*_SCANNED_COLUMNS, "kind", "reason", "source", "study")


@dataclass(frozen=True, slots=True)
class StudyFacts:
    """What tells the attachments of a study, beside identifiers, that it is theirs."""

    accession: int = 0
    """Digest of the accession number; 0 where there is none."""
    first_s: int | None = None
    """Earliest moment at which the study may have begun, on its own clock."""
    last_s: int | None = None

    def and_(self, other: StudyFacts) -> StudyFacts:
        """Put together what two images of a study say, in any order."""
        accessions = [one for one in (self.accession, other.accession) if one]
        first = [one for one in (self.first_s, other.first_s) if one is not None]
        last = [one for one in (self.last_s, other.last_s) if one is not None]
        return StudyFacts(min(accessions, default=0), min(first, default=None), max(last, default=None))


NO_FACTS: Final = StudyFacts()


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemLinks:
    """What one record of an attachment is linked by: digests and surrogates, in the order of their weight."""

    item: int
    studies: tuple[str, ...]
    series: tuple[int, ...]
    instances: tuple[int, ...]
    accession: int
    beside: str
    """Study in whose place the file lies."""
    patient: str
    time_s: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """What the job knows of an attachment."""

    kind: str
    version: int
    """Of the kind."""
    links: tuple[ItemLinks, ...]
    items: tuple[int, ...] = ()
    """Records that belong to the study of this row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedFile:
    """What the header pass reports of one input file: numbers, digests and surrogates, no identifier."""

    surrogate: str
    reason: str | None
    """Why it cannot be packed."""
    study: str
    """Surrogate; empty where the file names no study."""
    patient: str
    """Likewise."""
    bucket: int
    decoded_bytes: int
    num_slices: int
    instance: int
    series: int
    digest: int
    modified_ns: int
    row_offset: int
    row_num_bytes: int
    facts: StudyFacts = NO_FACTS
    attachment: Attachment | None = None
    """Set for a file that is not an image and may be an attachment; without links it cannot be packed."""


class StudyTable:
    """The studies that the header pass met, by surrogate.

    Attributes:
        keys: Sample key of each study.
        patients: Surrogate of its patient.
        buckets: Bucket of its patient.
        is_conflicting: Whether its files name several patients.
        facts: What links attachments with it.

    Args:
        former: Surrogate of the patient of studies of the version before, by sample key; ``""`` where it was
            forgotten. Their files need not be met again.
    """

    def __init__(self, former: Mapping[str, str] | None = None) -> None:
        self._former = dict(former or {})
        self._numbers: dict[str, int] = {}
        self.keys: list[str] = []
        self.patients: list[str] = []
        self.buckets: list[int] = []
        self.is_conflicting: list[bool] = []
        self.facts: list[StudyFacts] = []
        self._bucket_of: dict[str, int] = {}
        self._torn_patients: set[str] = set()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_torn_patients(self) -> int:
        """Number of patients that came with several buckets: official splits put them into two."""
        return len(self._torn_patients)

    def patient_of(self, number: int) -> str:
        """Return the patient of a study as its files say, or those of the version before; ``""`` for none."""
        return self.patients[number] or self._former.get(self.keys[number], "")

    def add(self, key: str, patient: str, bucket: int, facts: StudyFacts = NO_FACTS) -> int:
        """Return the number of a study, new or known; a file without a patient (``""``) names none."""
        if patient and self._bucket_of.setdefault(patient, bucket) != bucket:
            self._torn_patients.add(patient)
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
            self.patients.append(patient)
            self.buckets.append(bucket)
            self.is_conflicting.append(False)
            self.facts.append(facts)
        elif not self.patients[number]:
            self.patients[number], self.buckets[number] = patient, bucket
        elif patient and self.patients[number] != patient:
            self.is_conflicting[number] = True
        if facts is not NO_FACTS and self.facts[number] != facts:
            self.facts[number] = self.facts[number].and_(facts)
        return number

    def find(self, key: str) -> int:
        """Return the number of a study; `NO_STUDY` where no image of it was found."""
        return self._numbers.get(key, NO_STUDY)


class FileTable:
    """The input files, by their position in the sorted list of what was discovered.

    Behind them come the parts of attachments that belong to several studies (`add_parts`).

    Attributes:
        studies: What ``study`` points into.
        surrogate: ``(n,)`` S26, what the ledger calls the file.
        kind: ``(n,)`` uint8 into `INPUT_KINDS`.
        reason: ``(n,)`` uint8: `UNDECIDED`, `PACKED` or a code of `reason_code`.
        study: ``(n,)`` int32, or `NO_STUDY`.
        decoded_bytes: ``(n,)`` int64, declared by the header.
        num_slices: ``(n,)`` int32, frames declared by the header.
        instance: ``(n,)`` uint64 of the SOP Instance UID, equal for copies; 0 where it is missing.
        series: ``(n,)`` uint64 of the Series Instance UID; 0 where it is missing.
        digest: ``(n,)`` uint64 of the header's content.
        modified_ns: ``(n,)`` int64; only ever compared between runs of one job.
        row_offset: ``(n,)`` int64: where the header row lies in its batch's file.
        row_num_bytes: ``(n,)`` int32.
        source: ``(n,)`` int64: the discovered file that a row is, or is a part of.
        attachments: What is known of the rows that are attachments.
    """

    def __init__(self, num_files: int, studies: StudyTable | None = None) -> None:
        self.studies = studies if studies is not None else StudyTable()
        self.surrogate: NDArray[np.bytes_] = np.zeros(num_files, "S26")
        self.kind: NDArray[np.uint8] = np.zeros(num_files, np.uint8)
        self.reason: NDArray[np.uint8] = np.full(num_files, UNDECIDED, np.uint8)
        self.study: NDArray[np.int32] = np.full(num_files, NO_STUDY, np.int32)
        self.decoded_bytes: NDArray[np.int64] = np.zeros(num_files, np.int64)
        self.num_slices: NDArray[np.int32] = np.zeros(num_files, np.int32)
        self.instance: NDArray[np.uint64] = np.zeros(num_files, np.uint64)
        self.series: NDArray[np.uint64] = np.zeros(num_files, np.uint64)
        self.digest: NDArray[np.uint64] = np.zeros(num_files, np.uint64)
        self.modified_ns: NDArray[np.int64] = np.zeros(num_files, np.int64)
        self.row_offset: NDArray[np.int64] = np.zeros(num_files, np.int64)
        self.row_num_bytes: NDArray[np.int32] = np.zeros(num_files, np.int32)
        self.source: NDArray[np.int64] = np.arange(num_files, dtype=np.int64)
        self.attachments: dict[int, Attachment] = {}
        self._order: NDArray[np.int64] | None = None
        self._starts: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.reason)

    def add(self, first_file: int, scanned: Sequence[ScannedFile]) -> None:
        """Take the files of a batch."""
        batch = slice(first_file, first_file + len(scanned))
        for name in _SCANNED_COLUMNS:
            getattr(self, name)[batch] = [getattr(file, name) for file in scanned]
        for number, file in enumerate(scanned, start=first_file):
            self.reason[number] = UNDECIDED if file.reason is None else reason_code(file.reason)
            if file.study:
                self.study[number] = self.studies.add(file.study, file.patient, file.bucket, file.facts)
            if file.attachment is not None:
                self.kind[number] = ATTACHMENT_KIND
                if file.attachment.links:
                    self.attachments[number] = file.attachment

    def add_parts(self, parts: Sequence[tuple[int, int, str, int, Attachment]]) -> None:
        """Put rows behind all others, each for what a file holds of one study.

        Args:
            parts: The file's row, the study, surrogate and digest of the part, its attachment.
        """
        if not parts:
            return
        of = np.array([part[0] for part in parts], np.int64)
        first = len(self)
        for name in _COLUMNS:
            column: NDArray[Any] = getattr(self, name)
            setattr(self, name, np.concatenate([column, column[of]]))
        for row, (_, study, surrogate, digest, attachment) in enumerate(parts, start=first):
            self.study[row] = study
            self.surrogate[row] = surrogate.encode("ascii")
            self.digest[row] = digest
            self.attachments[row] = attachment
        self._order = self._starts = None

    def images_of(self, study: int) -> NDArray[np.int64]:
        """Return the files of a study that are no attachments, ascending."""
        files = self.files_of(study)
        return files[self.kind[files] != ATTACHMENT_KIND] if self.attachments else files

    def files_of(self, study: int) -> NDArray[np.int64]:
        """Return the files of a study, ascending."""
        if self._order is None or self._starts is None:
            self._order = np.argsort(self.study, kind="stable")
            self._starts = np.searchsorted(self.study[self._order], np.arange(len(self.studies) + 1))
        return self._order[self._starts[study] : self._starts[study + 1]]

    def sum_by_study(self, column: NDArray[Any]) -> NDArray[np.int64]:
        """Add a column up over the files of each study."""
        totals = np.zeros(len(self.studies), np.int64)
        inside = self.study != NO_STUDY
        np.add.at(totals, self.study[inside], column[inside].astype(np.int64))
        return totals

    def decide(self, study: int, reason: str | None, exceptions: dict[int, str]) -> None:
        """Give every undecided file of a study its outcome.

        Args:
            study: Number of the study.
            reason: Of the study as a whole; None where it is packed.
            exceptions: Other reasons, by position in `files_of`.

        Raises:
            ShardflowError: A position is none; an internal error.
        """
        files = self.files_of(study)
        codes = np.full(len(files), reason_code(reason), np.uint8)
        codes[self.kind[files] == ATTACHMENT_KIND] = _code_of_attachment(reason)
        for position, exception in exceptions.items():
            if not 0 <= position < len(files):
                raise ShardflowError(
                    "a study must name its own files, got another one; this is an internal error."
                )
            codes[position] = reason_code(exception)
        undecided = self.reason[files] == UNDECIDED
        self.reason[files[undecided]] = codes[undecided]


def _code_of_attachment(reason: str | None) -> int:
    """Return what becomes of an attachment whose study ends so."""
    if reason is None or reason in HELD_BACK or reason == Reason.STUDY_WITHOUT_REPORT:
        return reason_code(reason)
    if outcome_of(reason) is Outcome.QUARANTINED:
        return reason_code(Reason.STUDY_QUARANTINED)
    # No image of the study can be packed: as if none had been there.
    return reason_code(Reason.ATTACHMENT_WITHOUT_STUDY)


def count_reasons(*columns: NDArray[np.uint8]) -> dict[str, int]:
    """Count the inputs by reason, for those that have one."""
    reasons: dict[str, int] = {}
    for column in columns:
        for code, count in zip(
            *(part.tolist() for part in np.unique(column, return_counts=True)), strict=True
        ):
            reason = None if code in {UNDECIDED, CARRIED} else reason_name(code)
            if reason is not None:
                reasons[reason] = reasons.get(reason, 0) + count
    return dict(sorted(reasons.items()))


def count_outcomes(*columns: NDArray[np.uint8]) -> dict[str, int]:
    """Count the inputs by outcome: ``{"packed", "skipped", "quarantined"}``; without those `CARRIED`.

    Raises:
        ShardflowError: An input was left without an outcome; an internal error.
    """
    undecided = sum(int((column == UNDECIDED).sum()) for column in columns)
    if undecided:
        raise ShardflowError(
            f"every input must have an outcome, got {undecided} without one; this is an internal error."
        )
    outcomes = {outcome.value: 0 for outcome in Outcome}
    outcomes[Outcome.PACKED] = sum(int((column == PACKED).sum()) for column in columns)
    for reason, count in count_reasons(*columns).items():
        outcomes[outcome_of(reason)] += count
    return outcomes


def count_failed(reasons: Mapping[str, int]) -> int:
    """Count the inputs that are quarantined because something is wrong with them, which a limit bounds."""
    return sum(
        count
        for reason, count in reasons.items()
        if outcome_of(reason) is Outcome.QUARANTINED and reason not in HELD_BACK
    )
