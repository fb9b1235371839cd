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

__all__ = ["HELD_BACK", "REASONS", "Outcome", "Reason", "ReasonInfo", "outcome_of", "source_error"]


class Outcome(StrEnum):
    """What became of one input."""

    PACKED = "packed"
    SKIPPED = "skipped"
    QUARANTINED = "quarantined"


class Reason(StrEnum):
    """Why an input was skipped or quarantined; `REASONS` says what each one means."""

    AMBIGUOUS_LINK = "AMBIGUOUS_LINK"
    AMBIGUOUS_REPORT = "AMBIGUOUS_REPORT"
    ANNOTATION_FILE = "ANNOTATION_FILE"
    ANNOTATION_WITHOUT_PLACE = "ANNOTATION_WITHOUT_PLACE"
    ATTACHMENT_IN_PARTS = "ATTACHMENT_IN_PARTS"
    ATTACHMENT_PART = "ATTACHMENT_PART"
    ATTACHMENT_UNREADABLE = "ATTACHMENT_UNREADABLE"
    ATTACHMENT_WITHOUT_STUDY = "ATTACHMENT_WITHOUT_STUDY"
    BURNED_IN_ANNOTATION = "BURNED_IN_ANNOTATION"
    CONFLICTING_IDENTIFIER = "CONFLICTING_IDENTIFIER"
    CONFLICTING_INSTANCE = "CONFLICTING_INSTANCE"
    CONSENT_WITHDRAWN = "CONSENT_WITHDRAWN"
    DAMAGED_IMAGE = "DAMAGED_IMAGE"
    DECODE_FAILED = "DECODE_FAILED"
    DICOM_DIRECTORY = "DICOM_DIRECTORY"
    DUPLICATE_INSTANCE = "DUPLICATE_INSTANCE"
    DUPLICATE_REPORT = "DUPLICATE_REPORT"
    EMPTY_REPORT = "EMPTY_REPORT"
    FACE_RISK = "FACE_RISK"
    FILE_UNREADABLE = "FILE_UNREADABLE"
    HEADER_UNREADABLE = "HEADER_UNREADABLE"
    INVALID_IMAGE_DESCRIPTION = "INVALID_IMAGE_DESCRIPTION"
    LAYOUT_FILE = "LAYOUT_FILE"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    MISSING_FILE = "MISSING_FILE"
    MISSING_IDENTIFIER = "MISSING_IDENTIFIER"
    NOT_ATTACHMENT = "NOT_ATTACHMENT"
    NOT_DICOM = "NOT_DICOM"
    NOT_IMAGE = "NOT_IMAGE"
    NOT_IN_LAYOUT = "NOT_IN_LAYOUT"
    NOT_REGULAR_FILE = "NOT_REGULAR_FILE"
    NOT_REPORT = "NOT_REPORT"
    NO_PIXEL_DATA = "NO_PIXEL_DATA"
    PIXEL_DATA_TRUNCATED = "PIXEL_DATA_TRUNCATED"
    REPORT_UNREADABLE = "REPORT_UNREADABLE"
    REPORT_WITHDRAWN = "REPORT_WITHDRAWN"
    REPORT_WITHOUT_STUDY = "REPORT_WITHOUT_STUDY"
    SPLIT_CHANGED = "SPLIT_CHANGED"
    STUDY_ALREADY_PACKED = "STUDY_ALREADY_PACKED"
    STUDY_INCOMPLETE = "STUDY_INCOMPLETE"
    STUDY_QUARANTINED = "STUDY_QUARANTINED"
    STUDY_WITHOUT_REPORT = "STUDY_WITHOUT_REPORT"
    SUPERSEDED_REPORT = "SUPERSEDED_REPORT"
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
    Reason.AMBIGUOUS_LINK: ReasonInfo(
        Outcome.QUARANTINED,
        "Rows or paths contradict each other about whose the input is, or it names several studies.",
    ),
    Reason.AMBIGUOUS_REPORT: ReasonInfo(
        Outcome.QUARANTINED,
        "Several different reports name the same study, and no rule chooses between them.",
    ),
    Reason.ANNOTATION_FILE: ReasonInfo(
        Outcome.SKIPPED, "The file holds annotations or labels, which are not packed."
    ),
    Reason.ATTACHMENT_IN_PARTS: ReasonInfo(
        Outcome.SKIPPED,
        "The file holds several records; those of each study are an input of their own.",
    ),
    Reason.ATTACHMENT_PART: ReasonInfo(
        Outcome.SKIPPED,
        "The file is read together with another one, whose outcome holds for both.",
    ),
    Reason.ATTACHMENT_UNREADABLE: ReasonInfo(
        Outcome.QUARANTINED,
        "The attachment is of a kind that is packed, and its content cannot be read.",
    ),
    Reason.ATTACHMENT_WITHOUT_STUDY: ReasonInfo(
        Outcome.SKIPPED, "No image of a study that the attachment belongs to was found."
    ),
    Reason.ANNOTATION_WITHOUT_PLACE: ReasonInfo(
        Outcome.SKIPPED,
        "Nothing that the annotation says lies in an image that is packed.",
    ),
    Reason.BURNED_IN_ANNOTATION: ReasonInfo(
        Outcome.QUARANTINED, "A rule says that text may be burned into the image; nobody looked."
    ),
    Reason.CONFLICTING_IDENTIFIER: ReasonInfo(
        Outcome.QUARANTINED,
        "One study carries several patient identifiers, so its split cannot be decided; or an attachment "
        "names a study and another patient.",
    ),
    Reason.CONFLICTING_INSTANCE: ReasonInfo(
        Outcome.QUARANTINED, "Two files carry the same SOP Instance UID and different images."
    ),
    Reason.CONSENT_WITHDRAWN: ReasonInfo(
        Outcome.SKIPPED, "The study was removed from the dataset, and is not taken into it again."
    ),
    Reason.DAMAGED_IMAGE: ReasonInfo(
        Outcome.QUARANTINED,
        "The layout names the file as an image, and its bytes are none.",
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
    Reason.FACE_RISK: ReasonInfo(
        Outcome.QUARANTINED, "The image belongs to a volume of the head, whose surface shows a face."
    ),
    Reason.FILE_UNREADABLE: ReasonInfo(
        Outcome.QUARANTINED, "The operating system refused to open or read the file."
    ),
    Reason.HEADER_UNREADABLE: ReasonInfo(
        Outcome.QUARANTINED, "The file is DICOM, but its elements cannot be parsed up to the pixel data."
    ),
    Reason.INVALID_IMAGE_DESCRIPTION: ReasonInfo(
        Outcome.QUARANTINED, "Rows, columns, bits or samples are missing, zero or contradict each other."
    ),
    Reason.LAYOUT_FILE: ReasonInfo(
        Outcome.SKIPPED,
        "The file is a table or a report of the layout, which is read for what it says of others.",
    ),
    Reason.LIMIT_EXCEEDED: ReasonInfo(
        Outcome.QUARANTINED,
        "The declared or inflated size is above a configured limit; nothing was allocated.",
    ),
    Reason.MISSING_FILE: ReasonInfo(
        Outcome.QUARANTINED,
        "A row of the layout's table names a file that is not there.",
    ),
    Reason.MISSING_IDENTIFIER: ReasonInfo(
        Outcome.QUARANTINED, "The patient, study, series or instance identifier is missing or empty."
    ),
    Reason.NOT_ATTACHMENT: ReasonInfo(
        Outcome.SKIPPED, "The file lies in a folder of attachments and is none of a kind that is packed."
    ),
    Reason.NOT_DICOM: ReasonInfo(Outcome.SKIPPED, "The file is not DICOM."),
    Reason.NOT_IMAGE: ReasonInfo(
        Outcome.SKIPPED,
        "The file is no image of a kind that the layout packs.",
    ),
    Reason.NOT_IN_LAYOUT: ReasonInfo(
        Outcome.QUARANTINED,
        "The layout does not say whose image the file is: no row, path or split is its own.",
    ),
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
    Reason.REPORT_WITHDRAWN: ReasonInfo(
        Outcome.SKIPPED, "The system that made the report marks it as cancelled or as an error."
    ),
    Reason.REPORT_WITHOUT_STUDY: ReasonInfo(
        Outcome.SKIPPED, "No image of the study that the report names was found."
    ),
    Reason.SPLIT_CHANGED: ReasonInfo(
        Outcome.QUARANTINED,
        "The layout puts the study's patient into another split than the one where the patient is packed.",
    ),
    Reason.STUDY_ALREADY_PACKED: ReasonInfo(
        Outcome.QUARANTINED,
        "The study is in the dataset without this input; only a new output can have them together.",
    ),
    Reason.STUDY_INCOMPLETE: ReasonInfo(
        Outcome.QUARANTINED,
        "The dataset knows a report of this study that is not among the job's inputs; name its table too.",
    ),
    Reason.STUDY_QUARANTINED: ReasonInfo(
        Outcome.QUARANTINED,
        "Another input of the same study could not be packed, so the study was not packed.",
    ),
    Reason.STUDY_WITHOUT_REPORT: ReasonInfo(
        Outcome.SKIPPED, "No report names the study, and the job asks for one."
    ),
    Reason.SUPERSEDED_REPORT: ReasonInfo(
        Outcome.SKIPPED,
        "A corrected or final report of the same study stands for it.",
    ),
    Reason.UNSUPPORTED_SOP_CLASS: ReasonInfo(
        Outcome.SKIPPED, "The object is not an image of a kind that is packed (or has no SOP Class UID)."
    ),
    Reason.UNSUPPORTED_TRANSFER_SYNTAX: ReasonInfo(
        Outcome.QUARANTINED, "The pixel data is encoded in a way that no installed decoder reads."
    ),
    Reason.WORKER_FAILED: ReasonInfo(Outcome.QUARANTINED, "The packing process met an unexpected error."),
    Reason.WORKER_KILLED: ReasonInfo(
        Outcome.QUARANTINED, "The packing process died on this study or attachment, twice."
    ),
    Reason.WORKER_OUT_OF_MEMORY: ReasonInfo(
        Outcome.QUARANTINED, "The study or attachment needs more memory than a process may take."
    ),
    Reason.WORKER_TIMEOUT: ReasonInfo(
        Outcome.QUARANTINED, "The study or attachment took longer than the limit, twice."
    ),
}
"""Reason to outcome class and sentence; docs/dicom.md shows the same table."""


HELD_BACK: frozenset[str] = frozenset({Reason.BURNED_IN_ANNOTATION, Reason.FACE_RISK})
"""Reasons by which a rule on privacy keeps an image back: quarantined, and no sign that anything is broken.
Such an image does not take its study along, and does not count against the limit on quarantined inputs."""


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
