"""Every input of a job in a few columns, so that memory grows by tens of bytes a file and not by objects.

About 85 bytes an input file and 400 a study; attributes wait on disk (`shardflow.packing.header_rows`), texts
too (`shardflow.packing.linking`). Owns who belongs to which study and the reason of each input, and the sum
that must come out: inputs = packed + skipped + quarantined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ShardflowError
from shardflow.sources.reasons import Outcome, Reason, outcome_of

__all__ = [
    "NO_STUDY",
    "PACKED",
    "UNDECIDED",
    "FileTable",
    "StudyTable",
    "count_outcomes",
    "count_reasons",
    "reason_code",
    "reason_name",
]

NO_STUDY: Final = -1

UNDECIDED: Final = 255
PACKED: Final = 0
_REASONS: Final = tuple(Reason)
_CODES: Final = {reason.value: code for code, reason in enumerate(_REASONS, start=1)}


def reason_code(reason: str | None) -> int:
    """Return the number that stands for a reason in a column; `PACKED` for None."""
    return PACKED if reason is None else _CODES[reason]


def reason_name(code: int) -> str | None:
    """Return the reason behind a number; None for `PACKED`."""
    return None if code == PACKED else _REASONS[code - 1].value


class StudyTable:
    """The studies that the header pass met, by surrogate.

    Attributes:
        keys: Sample key of each study.
        patients: Surrogate of its patient.
        buckets: Bucket of its patient.
        is_conflicting: Whether its files name several patients.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.keys: list[str] = []
        self.patients: list[str] = []
        self.buckets: list[int] = []
        self.is_conflicting: list[bool] = []

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: str, patient: str, bucket: int) -> int:
        """Return the number of a study, new or known; a file without a patient (``""``) names none."""
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
            self.patients.append(patient)
            self.buckets.append(bucket)
            self.is_conflicting.append(False)
        elif not self.patients[number]:
            self.patients[number], self.buckets[number] = patient, bucket
        elif patient and self.patients[number] != patient:
            self.is_conflicting[number] = True
        return number

    def find(self, key: str) -> int:
        """Return the number of a study; `NO_STUDY` where no image of it was found."""
        return self._numbers.get(key, NO_STUDY)


class FileTable:
    """The input files, by their position in the sorted list of what was discovered.

    Attributes:
        studies: What ``study`` points into.
        surrogate: ``(n,)`` S26, what the ledger calls the file.
        reason: ``(n,)`` uint8: `UNDECIDED`, `PACKED` or a code of `reason_code`.
        study: ``(n,)`` int32, or `NO_STUDY`.
        decoded_bytes: ``(n,)`` int64, declared by the header.
        num_slices: ``(n,)`` int32, frames declared by the header.
        instance: ``(n,)`` uint64 of the SOP Instance UID, equal for copies; 0 where it is missing.
        digest: ``(n,)`` uint64 of the header's content.
        modified_ns: ``(n,)`` int64; only ever compared between runs of one job.
        row_offset: ``(n,)`` int64: where the header row lies in its batch's file.
        row_num_bytes: ``(n,)`` int32.
    """

    def __init__(self, num_files: int) -> None:
        self.studies = StudyTable()
        self.surrogate: NDArray[np.bytes_] = np.zeros(num_files, "S26")
        self.reason: NDArray[np.uint8] = np.full(num_files, UNDECIDED, np.uint8)
        self.study: NDArray[np.int32] = np.full(num_files, NO_STUDY, np.int32)
        self.decoded_bytes: NDArray[np.int64] = np.zeros(num_files, np.int64)
        self.num_slices: NDArray[np.int32] = np.zeros(num_files, np.int32)
        self.instance: NDArray[np.uint64] = np.zeros(num_files, np.uint64)
        self.digest: NDArray[np.uint64] = np.zeros(num_files, np.uint64)
        self.modified_ns: NDArray[np.int64] = np.zeros(num_files, np.int64)
        self.row_offset: NDArray[np.int64] = np.zeros(num_files, np.int64)
        self.row_num_bytes: NDArray[np.int32] = np.zeros(num_files, np.int32)
        self._order: NDArray[np.int64] | None = None
        self._starts: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.reason)

    def add(self, first_file: int, rows: Sequence[Sequence[Any]]) -> None:
        """Take the rows of a batch, as `shardflow.packing.scan.Scanner` returns them."""
        for file, row in enumerate(rows, start=first_file):
            self.surrogate[file], reason, study, patient, bucket = row[:5]
            self.reason[file] = UNDECIDED if reason is None else reason_code(reason)
            if study:
                self.study[file] = self.studies.add(study, patient, bucket)
            self.decoded_bytes[file], self.num_slices[file] = row[5:7]
            self.instance[file], self.digest[file] = row[7:9]
            self.modified_ns[file], self.row_offset[file], self.row_num_bytes[file] = row[9:]

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
        for position, exception in exceptions.items():
            if not 0 <= position < len(files):
                raise ShardflowError(
                    "a study must name its own files, got another one; this is an internal error."
                )
            codes[position] = reason_code(exception)
        undecided = self.reason[files] == UNDECIDED
        self.reason[files[undecided]] = codes[undecided]


def count_reasons(*columns: NDArray[np.uint8]) -> dict[str, int]:
    """Count the inputs by reason, for those that have one."""
    reasons: dict[str, int] = {}
    for column in columns:
        for code, count in zip(
            *(part.tolist() for part in np.unique(column, return_counts=True)), strict=True
        ):
            reason = None if code == UNDECIDED else reason_name(code)
            if reason is not None:
                reasons[reason] = reasons.get(reason, 0) + count
    return dict(sorted(reasons.items()))


def count_outcomes(*columns: NDArray[np.uint8]) -> dict[str, int]:
    """Count the inputs by outcome: ``{"packed", "skipped", "quarantined"}``.

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
