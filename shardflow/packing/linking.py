"""Join reports with studies, by study instance UID; the texts wait in one private file.

A join is either certain or it is not made: several different texts for one study are quarantined, and the
study with them, because no rule says which one describes the images.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import StorageError
from shardflow.packing.inventory import NO_STUDY, PACKED, UNDECIDED, StudyTable, reason_code, reason_name
from shardflow.packing.workplace import storage_error
from shardflow.sources.reasons import Outcome, Reason, outcome_of
from shardflow.sources.reports import BrokenReport

if TYPE_CHECKING:
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.sources.reports import ReportRecord

__all__ = ["ReportTable", "link_reports", "read_report"]


class ReportTable:
    """The input reports, in the order of their source.

    Attributes:
        surrogate: ``(n,)`` S26, what the ledger calls the report.
        reason: ``(n,)`` uint8, as in `shardflow.packing.inventory.FileTable`.
        study: ``(n,)`` int32, or `NO_STUDY`.
        offset: ``(n,)`` int64: where the text lies in the private file.
        num_bytes: ``(n,)`` int32 of UTF-8.
        digest: ``(n,)`` uint64 of the text.
        place: ``(n,)`` int64: line or position in the source.
        report_of: The report of each study that has one, by study number.
        unusable: Studies whose report cannot be used: several different ones, or one that cannot be read.
    """

    def __init__(self) -> None:
        self.surrogate: NDArray[np.bytes_] = np.zeros(0, "S26")
        self.reason: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.study: NDArray[np.int32] = np.zeros(0, np.int32)
        self.offset: NDArray[np.int64] = np.zeros(0, np.int64)
        self.num_bytes: NDArray[np.int32] = np.zeros(0, np.int32)
        self.digest: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.place: NDArray[np.int64] = np.zeros(0, np.int64)
        self.report_of: dict[int, int] = {}
        self.unusable: set[int] = set()

    def __len__(self) -> int:
        return len(self.reason)

    def decide(self, study_reason: NDArray[np.uint8]) -> None:
        """Let the undecided reports share the fate of their study, where that is decided.

        Args:
            study_reason: ``(num_studies,)`` uint8: `UNDECIDED`, `PACKED` or a code.
        """
        for number in np.flatnonzero(self.reason == UNDECIDED).tolist():
            code = int(study_reason[self.study[number]])
            if code in {UNDECIDED, PACKED}:
                self.reason[number] = code
            elif outcome_of(str(reason_name(code))) is Outcome.QUARANTINED:
                self.reason[number] = reason_code(Reason.STUDY_QUARANTINED)
            else:
                # No image of the study can be packed: as if none had been there.
                self.reason[number] = reason_code(Reason.REPORT_WITHOUT_STUDY)


def link_reports(
    records: Iterable[ReportRecord | BrokenReport], studies: StudyTable, key: SecretKey, spool: Path
) -> ReportTable:
    """Write the texts into the private folder and join them with the studies.

    Args:
        records: The reports of the source, taken one at a time.
        studies: The studies of the header pass.
        key: Makes the surrogates.
        spool: Private file that the texts are written to.

    Raises:
        StorageError: The texts cannot be written.
    """
    table = ReportTable()
    columns: list[tuple[str, int, int, int, int, int, int]] = []
    offset = 0
    try:
        descriptor = os.open(spool, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for record in records:
                encoded = _encode(record)
                study = studies.find(key.surrogate("study", record.study_instance_uid))
                reason = _reason(record, study, is_text=encoded is not None)
                text = encoded or b""
                digest = int.from_bytes(hashlib.sha256(bytes([reason]) + text).digest()[:8], "little")
                surrogate = key.surrogate("input-report", str(record.place))
                if study != NO_STUDY and reason not in {UNDECIDED, reason_code(Reason.EMPTY_REPORT)}:
                    table.unusable.add(study)
                columns.append((surrogate, reason, study, offset, len(text), digest, record.place))
                file.write(text)
                offset += len(text)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error("writing report texts to the private folder", error) from None
    if columns:
        surrogate_, reason_, study_, offset_, num_bytes_, digest_, place_ = zip(*columns, strict=True)
        table.surrogate = np.array([value.encode("ascii") for value in surrogate_], "S26")
        table.reason = np.array(reason_, np.uint8)
        table.study = np.array(study_, np.int32)
        table.offset = np.array(offset_, np.int64)
        table.num_bytes = np.array(num_bytes_, np.int32)
        table.digest = np.array(digest_, np.uint64)
        table.place = np.array(place_, np.int64)
    _join(table)
    return table


def read_report(spool: Path, offset: int, num_bytes: int) -> bytes:
    """Read one text back.

    Raises:
        StorageError: It cannot be read whole.
    """
    try:
        with spool.open("rb") as file:
            text = os.pread(file.fileno(), num_bytes, offset)
    except OSError as error:
        raise storage_error("reading a report text of the private folder", error) from None
    if len(text) != num_bytes:
        raise StorageError("a report text must be whole, got a cut one (private folder); run the job again.")
    return text


def _encode(record: ReportRecord | BrokenReport) -> bytes | None:
    """Encode a text; None where there is none, or where it holds what UTF-8 cannot say (lone surrogates)."""
    if isinstance(record, BrokenReport):
        return None
    try:
        return record.text.encode("utf-8")
    except UnicodeEncodeError:
        return None


def _reason(record: ReportRecord | BrokenReport, study: int, *, is_text: bool) -> int:
    if isinstance(record, BrokenReport):
        return reason_code(record.reason)
    if not is_text:
        return reason_code(Reason.REPORT_UNREADABLE)
    if not record.text.strip():
        return reason_code(Reason.EMPTY_REPORT)
    return UNDECIDED if study != NO_STUDY else reason_code(Reason.REPORT_WITHOUT_STUDY)


def _join(table: ReportTable) -> None:
    """Find the one report of each study; copies and contradictions get their reasons."""
    candidates = np.flatnonzero(table.reason == UNDECIDED)
    order = candidates[np.argsort(table.study[candidates], kind="stable")]
    for group in np.split(order, np.flatnonzero(np.diff(table.study[order])) + 1):
        if not len(group):
            continue
        study = int(table.study[group[0]])
        if len(np.unique(table.digest[group])) > 1:
            table.unusable.add(study)
            table.reason[group] = reason_code(Reason.AMBIGUOUS_REPORT)
        else:
            table.report_of[study] = int(group[0])
            table.reason[group[1:]] = reason_code(Reason.DUPLICATE_REPORT)
