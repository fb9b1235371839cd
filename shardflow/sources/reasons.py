"""Why an input was not packed: one closed list of codes.

A code is what the ledger records and what a person filters by, so codes are never renamed and never reused
(change class SHARD FORMAT). Two outcome classes exist beside *packed*: a **skipped** input was never a
candidate (a text file, a structured report, an exact copy), a **quarantined** one should have been packed and
could not be. Only quarantined inputs count against the job's limit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from shardflow.errors import SourceError

__all__ = ["REASONS", "Outcome", "Reason", "ReasonInfo", "outcome_of", "source_error"]


class Outcome(StrEnum):
    """What became of one input."""

    PACKED = "packed"
    SKIPPED = "skipped"
    QUARANTINED = "quarantined"


class Reason(StrEnum):
    """Why an input was skipped or quarantined; `REASONS` says what each one means."""

    AMBIGUOUS_REPORT = "AMBIGUOUS_REPORT"
    CONFLICTING_IDENTIFIER = "CONFLICTING_IDENTIFIER"
    CONFLICTING_INSTANCE = "CONFLICTING_INSTANCE"
    DECODE_FAILED = "DECODE_FAILED"
    DICOM_DIRECTORY = "DICOM_DIRECTORY"
    DUPLICATE_INSTANCE = "DUPLICATE_INSTANCE"
    DUPLICATE_REPORT = "DUPLICATE_REPORT"
    EMPTY_REPORT = "EMPTY_REPORT"
    FILE_UNREADABLE = "FILE_UNREADABLE"
    HEADER_UNREADABLE = "HEADER_UNREADABLE"
    INVALID_IMAGE_DESCRIPTION = "INVALID_IMAGE_DESCRIPTION"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    MISSING_IDENTIFIER = "MISSING_IDENTIFIER"
    NOT_DICOM = "NOT_DICOM"
    NOT_REGULAR_FILE = "NOT_REGULAR_FILE"
    NOT_REPORT = "NOT_REPORT"
    NO_PIXEL_DATA = "NO_PIXEL_DATA"
    PIXEL_DATA_TRUNCATED = "PIXEL_DATA_TRUNCATED"
    REPORT_UNREADABLE = "REPORT_UNREADABLE"
    REPORT_WITHOUT_STUDY = "REPORT_WITHOUT_STUDY"
    STUDY_QUARANTINED = "STUDY_QUARANTINED"
    STUDY_WITHOUT_REPORT = "STUDY_WITHOUT_REPORT"
    UNSUPPORTED_SOP_CLASS = "UNSUPPORTED_SOP_CLASS"
    UNSUPPORTED_TRANSFER_SYNTAX = "UNSUPPORTED_TRANSFER_SYNTAX"
    WORKER_FAILED = "WORKER_FAILED"
    WORKER_KILLED = "WORKER_KILLED"
    WORKER_OUT_OF_MEMORY = "WORKER_OUT_OF_MEMORY"
    WORKER_TIMEOUT = "WORKER_TIMEOUT"


class ReasonInfo(NamedTuple):
    """What one reason means."""

    outcome: Outcome
    """Skipped or quarantined; never packed."""
    sentence: str
    """One plain sentence for a person."""


REASONS: dict[Reason, ReasonInfo] = {
    Reason.AMBIGUOUS_REPORT: ReasonInfo(
        Outcome.QUARANTINED,
        "Several different reports name the same study, and no rule chooses between them.",
    ),
    Reason.CONFLICTING_IDENTIFIER: ReasonInfo(
        Outcome.QUARANTINED, "One study carries several patient identifiers, so its split cannot be decided."
    ),
    Reason.CONFLICTING_INSTANCE: ReasonInfo(
        Outcome.QUARANTINED, "Two files carry the same SOP Instance UID and different images."
    ),
    Reason.DECODE_FAILED: ReasonInfo(
        Outcome.QUARANTINED, "No decoder of the chain for this transfer syntax could decode the pixel data."
    ),
    Reason.DICOM_DIRECTORY: ReasonInfo(
        Outcome.SKIPPED, "The file is a DICOMDIR; the files it lists are found by walking the folders."
    ),
    Reason.DUPLICATE_INSTANCE: ReasonInfo(
        Outcome.SKIPPED, "The file is a copy of an instance that is packed from another file."
    ),
    Reason.DUPLICATE_REPORT: ReasonInfo(
        Outcome.SKIPPED, "The report repeats, word for word, another report of the same study."
    ),
    Reason.EMPTY_REPORT: ReasonInfo(Outcome.SKIPPED, "The report holds no text."),
    Reason.FILE_UNREADABLE: ReasonInfo(
        Outcome.QUARANTINED, "The operating system refused to open or read the file."
    ),
    Reason.HEADER_UNREADABLE: ReasonInfo(
        Outcome.QUARANTINED, "The file is DICOM, but its elements cannot be parsed up to the pixel data."
    ),
    Reason.INVALID_IMAGE_DESCRIPTION: ReasonInfo(
        Outcome.QUARANTINED, "Rows, columns, bits or samples are missing, zero or contradict each other."
    ),
    Reason.LIMIT_EXCEEDED: ReasonInfo(
        Outcome.QUARANTINED,
        "The declared or inflated size is above a configured limit; nothing was allocated.",
    ),
    Reason.MISSING_IDENTIFIER: ReasonInfo(
        Outcome.QUARANTINED, "The patient, study, series or instance identifier is missing or empty."
    ),
    Reason.NOT_DICOM: ReasonInfo(Outcome.SKIPPED, "The file is not DICOM."),
    Reason.NOT_REGULAR_FILE: ReasonInfo(
        Outcome.SKIPPED,
        "The entry is a link to a folder, a socket, a pipe or a device, which is never followed or read.",
    ),
    Reason.NOT_REPORT: ReasonInfo(
        Outcome.SKIPPED, "The entry of the report folder is not a text file named <StudyInstanceUID>.txt."
    ),
    Reason.NO_PIXEL_DATA: ReasonInfo(Outcome.SKIPPED, "The object is DICOM and holds no pixel data."),
    Reason.PIXEL_DATA_TRUNCATED: ReasonInfo(
        Outcome.QUARANTINED, "The pixel data is shorter than rows, columns, bits and frames say."
    ),
    Reason.REPORT_UNREADABLE: ReasonInfo(
        Outcome.QUARANTINED, "The report cannot be read as text, or its row does not fit the table."
    ),
    Reason.REPORT_WITHOUT_STUDY: ReasonInfo(
        Outcome.SKIPPED, "No image of the study that the report names was found."
    ),
    Reason.STUDY_QUARANTINED: ReasonInfo(
        Outcome.QUARANTINED,
        "Another input of the same study could not be packed, so the study was not packed.",
    ),
    Reason.STUDY_WITHOUT_REPORT: ReasonInfo(
        Outcome.SKIPPED, "No report names the study, and the job asks for one."
    ),
    Reason.UNSUPPORTED_SOP_CLASS: ReasonInfo(
        Outcome.SKIPPED, "The object is not an image of a kind that is packed (or has no SOP Class UID)."
    ),
    Reason.UNSUPPORTED_TRANSFER_SYNTAX: ReasonInfo(
        Outcome.QUARANTINED, "The pixel data is encoded in a way that no installed decoder reads."
    ),
    Reason.WORKER_FAILED: ReasonInfo(Outcome.QUARANTINED, "The packing process met an unexpected error."),
    Reason.WORKER_KILLED: ReasonInfo(Outcome.QUARANTINED, "The packing process died on this study, twice."),
    Reason.WORKER_OUT_OF_MEMORY: ReasonInfo(
        Outcome.QUARANTINED, "The study needs more memory than a process may take."
    ),
    Reason.WORKER_TIMEOUT: ReasonInfo(Outcome.QUARANTINED, "The study took longer than the limit, twice."),
}
"""Reason to outcome class and sentence; docs/dicom.md shows the same table."""


def outcome_of(reason: Reason | str) -> Outcome:
    """Class of a reason: skipped or quarantined.

    Raises:
        ValueError: The code is not on the list.
    """
    return REASONS[Reason(reason)].outcome


def source_error(reason: Reason, detail: str = "") -> SourceError:
    """Make the error for a reason.

    Args:
        reason: Why the input cannot be packed.
        detail: More words: numbers, tags, class names of errors. Never a value that came out of the input.
    """
    sentence = REASONS[reason].sentence
    return SourceError(reason.value, f"{sentence} ({detail})" if detail else sentence)
