"""Inventory: every input of a job in a few NumPy columns, about 100 bytes a file and 500 a study.

Attributes stay on disk (`shardflow.packing.header_rows`), and so do texts (`shardflow.packing.linking`). The
inventory knows which study an input belongs to and the reason of each input, and checks the sum that must
come out: inputs = packed + skipped + quarantined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, ShardflowError
from shardflow.format.reasons import HELD_BACK, Outcome, Reason, outcome_of
from shardflow.packing.deid.identity import Listed, PatientEvidence, PublishedPerson

NO_STUDY: Final = -1

UNDECIDED: Final = 255
CARRIED: Final = 254
"""Reason of inputs and studies that a later version takes over unchanged."""
INPUT_KINDS: Final = ("dicom", "nifti", "raster", "report", "attachment", "slide")
"""Kinds of inputs by their number in a column: forms of image files, reports, attachments."""
REPORT_KIND: Final = INPUT_KINDS.index("report")
ATTACHMENT_KIND: Final = INPUT_KINDS.index("attachment")

PACKED: Final = 0
_REASONS: Final = tuple(Reason)
_CODES: Final = {reason.value: code for code, reason in enumerate(_REASONS, start=1)}


def reason_code(reason: str | None) -> int:
    """Return the column code of a reason; `PACKED` for None."""
    return PACKED if reason is None else _CODES[reason]


def reason_name(code: int) -> str | None:
    """Return the reason of a column code; None for `PACKED`."""
    return None if code == PACKED else _REASONS[code - 1].value


def known_code(reason: str | None) -> int:
    """Return the column code of a reason that was read from a file.

    Raises:
        FormatError: It is not a reason.
    """
    if reason is not None and reason not in _CODES:
        raise FormatError("a reason must be one of docs/dicom.md, got another text; is it a newer ledger?")
    return reason_code(reason)


_SCANNED_COLUMNS: Final = {
    "decoded_bytes": "i8",
    "digest": "u8",
    "instance": "u8",
    "modified_ns": "i8",
    "num_slices": "i4",
    "pixels": "u8",
    "row_num_bytes": "i4",
    "row_offset": "i8",
    "series": "u8",
    "surrogate": "S26",
}
"""Columns of `FileTable` that are fields of `ScannedFile`, with their types."""
_COLUMNS: Final = {**_SCANNED_COLUMNS, "kind": "u1", "reason": "u1", "source": "i8", "study": "i4"}


def set_columns(table: object, types: Mapping[str, str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Set the columns of a table from its rows.

    Args:
        table: Object that gets an array for each column.
        types: Type of each column, in the order of a row's values.
        rows: The rows.
    """
    columns = zip(*rows, strict=True) if rows else [()] * len(types)
    for (name, dtype), values in zip(types.items(), columns, strict=True):
        setattr(table, name, np.array(values, dtype))


@dataclass(frozen=True, slots=True)
class StudyFacts:
    """Facts of a study that link attachments with it, beside identifiers."""

    accession: int = 0
    """Digest of the accession number; 0 if there is none."""
    first_s: int | None = None
    """Earliest time at which the study may have started, on its own clock."""
    last_s: int | None = None

    def merged(self, other: StudyFacts) -> StudyFacts:
        """Merge the facts of two images of a study; the order does not matter."""
        accessions = [one for one in (self.accession, other.accession) if one]
        first = [one for one in (self.first_s, other.first_s) if one is not None]
        last = [one for one in (self.last_s, other.last_s) if one is not None]
        return StudyFacts(min(accessions, default=0), min(first, default=None), max(last, default=None))


NO_FACTS: Final = StudyFacts()


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemLinks:
    """Evidence that links one record of an attachment: digests and surrogates, by descending weight."""

    item: int
    studies: tuple[str, ...]
    series: tuple[int, ...]
    instances: tuple[int, ...]
    accession: int
    beside: str
    """Study of the layout that the file is located with."""
    patient: str
    others: tuple[str, ...]
    """The patient under the further numbers that the record lists."""
    time_s: int | None

    @property
    def patients(self) -> tuple[str, ...]:
        """The patient under all numbers; empty if the record names none."""
        return (self.patient, *self.others) if self.patient else self.others


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """An attachment in the inventory."""

    kind: str
    version: int
    """Version of the kind."""
    links: tuple[ItemLinks, ...]
    items: tuple[int, ...] = ()
    """Records that belong to the study of the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedFile:
    """Result of the header pass for one input file: numbers, digests and surrogates, no identifier."""

    surrogate: str
    reason: str | None
    """Reason why it cannot be packed."""
    study: str
    """Surrogate; empty if the file names no study."""
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
    """Set for files that are not images and may be attachments; without links it cannot be packed."""
    pixels: int = 0
    """64 bits of its stored pixels; 0 for none."""
    evidence: tuple[int, ...] = ()
    """Evidence of its patient's identity (`shardflow.packing.deid.identity`)."""
    listed: tuple[Listed, ...] = ()
    """Lists of one patient's numbers in its records."""


class StudyTable:
    """The studies that the header pass found, by surrogate.

    Attributes:
        keys: Sample key of each study.
        patients: Surrogate of its patient.
        buckets: Bucket of its patient.
        is_conflicting: Whether its files name several patients.
        facts: Facts that link attachments with it.
        evidence: What headers state about the patients.
        people: Patients that appear under another identifier of the person, by surrogate.

    Args:
        former: Surrogate of the patient of each study of the previous version, by sample key; ``""`` if it
            was removed. Files of these studies need not be found again.
    """

    def __init__(self, former: Mapping[str, str] | None = None) -> None:
        self._former = dict(former or {})
        self._numbers: dict[str, int] = {}
        self.keys: list[str] = []
        self.patients: list[str] = []
        self.buckets: list[int] = []
        self.is_conflicting: list[bool] = []
        self.facts: list[StudyFacts] = []
        self.evidence = PatientEvidence()
        self.people: Mapping[str, PublishedPerson] = {}
        self._bucket_of: dict[str, int] = {}
        self._torn_patients: set[str] = set()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_torn_patients(self) -> int:
        """Number of patients with several buckets: official splits put them into two."""
        return len(self._torn_patients)

    def patient_of(self, number: int) -> str:
        """Return the patient of a study by its files, or by the previous version; empty for none."""
        return self.patients[number] or self._former.get(self.keys[number], "")

    def person_of(self, number: int) -> PublishedPerson | None:
        """Return how the patient of a study appears; None under the own identifier."""
        return self.people.get(self.patients[number])

    def add(self, key: str, patient: str, bucket: int, facts: StudyFacts = NO_FACTS) -> int:
        """Return the number of a study, adding a new one; ``patient`` is empty if a file names none."""
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
            self.facts[number] = self.facts[number].merged(facts)
        return number

    def find(self, key: str) -> int:
        """Return the number of a study; `NO_STUDY` if none of its images was found."""
        return self._numbers.get(key, NO_STUDY)


class FileTable:
    """The input files, by their position in the sorted list of discovered files.

    Behind them come the parts of attachments that belong to several studies (`add_parts`).

    Attributes:
        studies: Studies that ``study`` refers to.
        surrogate: ``(n,)`` S26, name of the file in the ledger.
        kind: ``(n,)`` uint8 into `INPUT_KINDS`.
        reason: ``(n,)`` uint8: `UNDECIDED`, `PACKED` or a code of `reason_code`.
        study: ``(n,)`` int32, or `NO_STUDY`.
        decoded_bytes: ``(n,)`` int64, declared by the header.
        num_slices: ``(n,)`` int32, frames declared by the header.
        instance: ``(n,)`` uint64 of the SOP Instance UID, equal for copies; 0 if it is missing.
        series: ``(n,)`` uint64 of the Series Instance UID; 0 if it is missing.
        digest: ``(n,)`` uint64 of the header's content.
        modified_ns: ``(n,)`` int64; only compared between runs of one job.
        pixels: ``(n,)`` uint64 of the stored pixels, equal for copies under other identifiers; 0 for none.
        row_offset: ``(n,)`` int64: offset of the header row in the file of its batch.
        row_num_bytes: ``(n,)`` int32.
        source: ``(n,)`` int64: the discovered file that a row is, or is a part of.
        attachments: Rows that are attachments.
    """

    surrogate: NDArray[np.bytes_]
    kind: NDArray[np.uint8]
    reason: NDArray[np.uint8]
    study: NDArray[np.int32]
    decoded_bytes: NDArray[np.int64]
    num_slices: NDArray[np.int32]
    instance: NDArray[np.uint64]
    series: NDArray[np.uint64]
    digest: NDArray[np.uint64]
    modified_ns: NDArray[np.int64]
    pixels: NDArray[np.uint64]
    row_offset: NDArray[np.int64]
    row_num_bytes: NDArray[np.int32]
    source: NDArray[np.int64]

    def __init__(self, num_files: int, studies: StudyTable | None = None) -> None:
        self.studies = studies if studies is not None else StudyTable()
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(num_files, dtype))
        self.reason.fill(UNDECIDED)
        self.study.fill(NO_STUDY)
        self.source = np.arange(num_files, dtype=np.int64)
        self.attachments: dict[int, Attachment] = {}
        self._order: NDArray[np.int64] | None = None
        self._starts: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.reason)

    def add(self, first_file: int, scanned: Sequence[ScannedFile]) -> None:
        """Set the rows of a batch of files."""
        batch = slice(first_file, first_file + len(scanned))
        for name in _SCANNED_COLUMNS:
            getattr(self, name)[batch] = [getattr(file, name) for file in scanned]
        for number, file in enumerate(scanned, start=first_file):
            self.reason[number] = UNDECIDED if file.reason is None else reason_code(file.reason)
            if file.study:
                self.study[number] = self.studies.add(file.study, file.patient, file.bucket, file.facts)
                if file.patient:
                    self.studies.evidence.add(file.patient, file.evidence)
            self.studies.evidence.add_lists(file.listed)
            if file.attachment is not None:
                self.kind[number] = ATTACHMENT_KIND
                if file.attachment.links:
                    self.attachments[number] = file.attachment

    def add_parts(self, parts: Sequence[tuple[int, int, str, int, Attachment]]) -> None:
        """Append rows, each for the part of a file that belongs to one study.

        Args:
            parts: Row of the file, study, surrogate and digest of the part, its attachment.
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
        """Return the files of a study that are not attachments, ascending."""
        files = self.files_of(study)
        return files[self.kind[files] != ATTACHMENT_KIND] if self.attachments else files

    def files_of(self, study: int) -> NDArray[np.int64]:
        """Return the files of a study, ascending."""
        if self._order is None or self._starts is None:
            self._order = np.argsort(self.study, kind="stable")
            self._starts = np.searchsorted(self.study[self._order], np.arange(len(self.studies) + 1))
        return self._order[self._starts[study] : self._starts[study + 1]]

    def sum_by_study(self, column: NDArray[Any]) -> NDArray[np.int64]:
        """Sum a column over the files of each study."""
        totals = np.zeros(len(self.studies), np.int64)
        inside = self.study != NO_STUDY
        np.add.at(totals, self.study[inside], column[inside].astype(np.int64))
        return totals

    def decide(self, study: int, reason: str | None, exceptions: dict[int, str]) -> None:
        """Set the reason of every undecided file of a study.

        Args:
            study: Number of the study.
            reason: Reason of the study; None if it is packed.
            exceptions: Differing reasons, by position in `files_of`.

        Raises:
            ShardflowError: A position does not exist; an internal error.
        """
        files = self.files_of(study)
        codes = np.full(len(files), reason_code(reason), np.uint8)
        codes[self.kind[files] == ATTACHMENT_KIND] = _code_of_attachment(reason)
        for position, exception in exceptions.items():
            if not 0 <= position < len(files):
                raise ShardflowError("a study names a file that is not its own; this is an internal error.")
            codes[position] = reason_code(exception)
        undecided = self.reason[files] == UNDECIDED
        self.reason[files[undecided]] = codes[undecided]


def _code_of_attachment(reason: str | None) -> int:
    """Return the code of an attachment whose study has this reason."""
    if reason is None or reason in HELD_BACK or reason == Reason.STUDY_WITHOUT_REPORT:
        return reason_code(reason)
    if outcome_of(reason) is Outcome.QUARANTINED:
        return reason_code(Reason.STUDY_QUARANTINED)
    # No image of the study can be packed, as if there were none.
    return reason_code(Reason.ATTACHMENT_WITHOUT_STUDY)


def of_inputs(by_study: NDArray[np.bool_], study: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return the mask of the inputs of chosen studies, ``(n,)``.

    Args:
        by_study: ``(num_studies,)`` mask.
        study: ``(n,)`` study of each input, or `NO_STUDY`.
    """
    # NO_STUDY is -1 and selects the appended False.
    return np.append(by_study, np.False_)[study]


def of_studies(study: NDArray[np.int32], num_studies: int) -> NDArray[np.bool_]:
    """Return the mask of the studies that any of the given inputs belongs to, ``(num_studies,)``.

    Args:
        study: Study of each input, or `NO_STUDY`.
        num_studies: Number of studies.
    """
    chosen = np.zeros(num_studies, np.bool_)
    chosen[study[study != NO_STUDY]] = True
    return chosen


def count_reasons(*columns: NDArray[np.uint8]) -> dict[str, int]:
    """Count inputs by reason, without those that have none."""
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
    """Count inputs by outcome: ``{"packed", "skipped", "quarantined"}``, without those `CARRIED`.

    Raises:
        ShardflowError: An input has no outcome; an internal error.
    """
    undecided = sum(int((column == UNDECIDED).sum()) for column in columns)
    if undecided:
        raise ShardflowError(f"{undecided} inputs have no outcome; this is an internal error.")
    outcomes = {outcome.value: 0 for outcome in Outcome}
    outcomes[Outcome.PACKED] = sum(int((column == PACKED).sum()) for column in columns)
    for reason, count in count_reasons(*columns).items():
        outcomes[outcome_of(reason)] += count
    return outcomes


def count_failed(reasons: Mapping[str, int]) -> int:
    """Count inputs that are quarantined because of a defect; these are bounded by a limit."""
    return sum(
        count
        for reason, count in reasons.items()
        if outcome_of(reason) is Outcome.QUARANTINED and reason not in HELD_BACK
    )
