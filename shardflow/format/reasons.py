"""Outcomes, reason codes, remedies and flags of inputs.

A reason says why an input was not packed. The ledger records its code and people filter by it, so codes are
never renamed and never reused (change class SHARD FORMAT). Besides *packed* there are two outcomes: a
**skipped** input was never a candidate (a text file, a structured report, an exact copy); a **quarantined**
one should have been packed and could not be. Only quarantined inputs count against the limit of a job.

A remedy tells a person what to do about a reason; remedies are no part of the format and may improve. A flag
names an oddity of a packed stack and what was done about it, never a value of a file; flag codes are never
renamed either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from shardflow.errors import SourceError, os_reason

_LOOK_UP: Final = "Find the inputs in the private ledger by their surrogates, and look at one of them."
_AGAIN: Final = (
    "Give a process more {} (execution settings), remove its line from the private folder, pack anew."
)
PHASE_NAMES = (
    "stack_id",
    "acquisition_number",
    "echo_number",
    "echo_time",
    "temporal_position",
    "trigger_time",
    "diffusion_b_value",
    "diffusion_direction",
    "sequence_name",
    "image_type",
    "convolution_kernel",
    "contrast",
)
"""Attributes that distinguish slices at one position, in the order in which they are tried."""
FLAGS: dict[str, str] = {
    "derived": "At least one image says DERIVED: it was computed from others.",
    "detector_plane_spacing": "The pixel spacing is the one on the detector, not in the patient.",
    "encoding_contradicts_syntax": "The bytes have another encoding than the transfer syntax says; they won.",
    "excess_pixel_bytes": "The pixel data is longer than the image; the rest was left out.",
    "frame_of_reference_varies": "Slices or levels name frames of reference of their own; they stay as one.",
    "frame_offsets_unusable": "The offsets of a dose grid do not say where its frames are.",
    "functional_groups_mismatch": "The per-frame groups do not fit the frames; the shared ones stand.",
    "gantry_tilt": "The stack is sheared by more than 0.5 degrees; the affine keeps the shear.",
    "high_bit_corrected": "The high bit contradicted the bits stored; the lowest possible one was taken.",
    "incomplete_volume": "It lacks slices that other volumes of its series have, and is in no 4-D object.",
    "irregular_spacing": "Gaps differ from the median gap by more than 1 % and are no multiples of it.",
    "missing_slices": "Gaps are multiples of the median gap: slices of a regular grid are not there.",
    "mosaic": "Many slices are tiled into one image; it is kept as it is.",
    "mosaic_unfolded": "Slices that were tiled into one image were taken apart.",
    "no_position": "Position or orientation is missing; there is no affine.",
    "no_preamble": "The file has no DICOM preamble; its bytes looked like DICOM.",
    "no_transfer_syntax": "The file names no transfer syntax; the encoding was found from its bytes.",
    "no_real_world_value": "A parametric map does not say what its values are; they are as stored.",
    "ordered_by_identifier": "Neither positions nor numbers order the slices; their identifiers did.",
    "ordered_by_instance_number": "No positions: the slices are ordered by Instance Number.",
    "ordered_by_slice_location": "No positions: the slices are ordered by Slice Location.",
    "pyramid_varies": "Each level of a slide names a pyramid of its own; they stay together.",
    "several_slides": "The series holds several slides: containers, pyramids or shapes differ.",
    "single_slice": "One slice; the spacing is its stated thickness, if any.",
    "slide_images_left_out": "Images that are no levels (label, macro, thumbnail) were left out.",
    "slices_not_aligned": "A slice lies more than half a pixel beside the line from first to last.",
    **{
        f"split_by_{name}": f"Positions repeat in the series; the stacks differ in {name.replace('_', ' ')}."
        for name in PHASE_NAMES
    },
    "split_by_order": "Positions or levels repeat and nothing tells the repeats apart; numbers did.",
}
"""Code to one plain sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeCounts:
    """How the inputs ended; their sum is the number of inputs."""

    packed: int
    skipped: int
    quarantined: int


class Outcome(StrEnum):
    """What became of one input."""

    PACKED = "packed"
    SKIPPED = "skipped"
    QUARANTINED = "quarantined"


OUTCOMES: Final = tuple(outcome.value for outcome in Outcome)


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
    LABELS_OFF_GRID = "LABELS_OFF_GRID"
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
    NOT_RETRIEVED = "NOT_RETRIEVED"
    NO_PIXEL_DATA = "NO_PIXEL_DATA"
    PIXEL_DATA_TRUNCATED = "PIXEL_DATA_TRUNCATED"
    REPORT_ENCRYPTED = "REPORT_ENCRYPTED"
    REPORT_UNREADABLE = "REPORT_UNREADABLE"
    REPORT_WITHDRAWN = "REPORT_WITHDRAWN"
    REPORT_WITHOUT_STUDY = "REPORT_WITHOUT_STUDY"
    REPORT_WITHOUT_TEXT = "REPORT_WITHOUT_TEXT"
    ROUNDED_IDENTIFIER = "ROUNDED_IDENTIFIER"
    SLIDE_LABEL = "SLIDE_LABEL"
    SPLIT_CHANGED = "SPLIT_CHANGED"
    STUDY_ALREADY_PACKED = "STUDY_ALREADY_PACKED"
    STUDY_INCOMPLETE = "STUDY_INCOMPLETE"
    STUDY_QUARANTINED = "STUDY_QUARANTINED"
    STUDY_WITHOUT_REPORT = "STUDY_WITHOUT_REPORT"
    SUPERSEDED_REPORT = "SUPERSEDED_REPORT"
    UNKNOWN_LABEL = "UNKNOWN_LABEL"
    UNSUPPORTED_SLIDE = "UNSUPPORTED_SLIDE"
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
    Reason.LABELS_OFF_GRID: ReasonInfo(
        Outcome.QUARANTINED,
        "The volume of labels has another shape or place than every image of its study.",
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
    Reason.NOT_RETRIEVED: ReasonInfo(
        Outcome.QUARANTINED,
        "The archive lists the instance, or was asked for the study, and did not deliver it whole.",
    ),
    Reason.NO_PIXEL_DATA: ReasonInfo(Outcome.SKIPPED, "The object is DICOM and holds no pixel data."),
    Reason.PIXEL_DATA_TRUNCATED: ReasonInfo(
        Outcome.QUARANTINED, "The pixel data is shorter than rows, columns, bits and frames say."
    ),
    Reason.REPORT_ENCRYPTED: ReasonInfo(Outcome.QUARANTINED, "The PDF of the report needs a password."),
    Reason.REPORT_UNREADABLE: ReasonInfo(
        Outcome.QUARANTINED, "The report cannot be read as text, or its row does not fit the table."
    ),
    Reason.REPORT_WITHDRAWN: ReasonInfo(
        Outcome.SKIPPED, "The system that made the report marks it as canceled or as an error."
    ),
    Reason.REPORT_WITHOUT_STUDY: ReasonInfo(
        Outcome.SKIPPED, "No image of the study that the report names was found."
    ),
    Reason.REPORT_WITHOUT_TEXT: ReasonInfo(
        Outcome.QUARANTINED, "The pages of the report's PDF hold no text, as those of a scan."
    ),
    Reason.ROUNDED_IDENTIFIER: ReasonInfo(
        Outcome.QUARANTINED,
        "The number that joins the report to its images was stored as a floating-point number, and its last "
        "digits are lost.",
    ),
    Reason.SLIDE_LABEL: ReasonInfo(
        Outcome.SKIPPED,
        "The image of a slide is no level of it: it shows its label, or the whole slide with the label.",
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
    Reason.UNKNOWN_LABEL: ReasonInfo(
        Outcome.QUARANTINED,
        "The volume of labels holds a number that the layout's list of classes does not have.",
    ),
    Reason.UNSUPPORTED_SLIDE: ReasonInfo(
        Outcome.SKIPPED,
        "The slide is not brightfield in 8-bit RGB, with one optical path and focal plane, in tiles.",
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
"""Reasons by which a privacy rule withholds an image: quarantined, although nothing is broken. Such an image
does not quarantine its study, and does not count against the limit on quarantined inputs."""


def outcome_of(reason: Reason | str) -> Outcome:
    """Return the class of a reason: skipped or quarantined.

    Raises:
        ValueError: The code is not on the list.
    """
    return REASONS[Reason(reason)].outcome


def source_error(reason: Reason, detail: str = "") -> SourceError:
    """Return the error for a reason.

    Args:
        reason: Why the input cannot be packed.
        detail: More words: numbers, tags, class names of errors. Never a value that came out of the input.
    """
    sentence = REASONS[reason].sentence
    return SourceError(reason.value, f"{sentence} ({detail})" if detail else sentence)


@contextmanager
def reading_source() -> Iterator[None]:
    """Read an input file inside the block.

    Raises:
        SourceError: FILE_UNREADABLE, as the operating system says.
    """
    try:
        yield
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, os_reason(error)) from None


_REMEDIES: Final[dict[Reason, str]] = {
    Reason.AMBIGUOUS_LINK: "Correct the rows; or say by layout.report_of_several_studies what a report of "
    "several studies means.",
    Reason.AMBIGUOUS_REPORT: "Keep one report a study in the table, or join addenda to it beforehand.",
    Reason.ATTACHMENT_UNREADABLE: "Export the files again; if other tools read them, report it.",
    Reason.ATTACHMENT_WITHOUT_STUDY: "If studies are missing, add their folders; or widen "
    "attachments.window_hours.",
    Reason.ANNOTATION_WITHOUT_PLACE: "Add the images that it was drawn on; annotations.json of the "
    "sample counts what is missing.",
    Reason.BURNED_IN_ANNOTATION: "Look at some of them; then accept the rule (deid.accept), or blank the "
    "text (a [[blackout]] of deid.rules_file), and retry.",
    Reason.CONFLICTING_IDENTIFIER: "Ask the archive which patient it is, and export the study again.",
    Reason.CONFLICTING_INSTANCE: "Find out which of the two files is right, and remove the other one.",
    Reason.DAMAGED_IMAGE: "Fetch the files again; the transfer was cut, or a page with an error was saved.",
    Reason.DECODE_FAILED: "Export the files again, uncompressed if the archive can.",
    Reason.FACE_RISK: "Remove the faces with a tool for that and pack the result, or set deid.face_risk to "
    '"flag" if the data agreement allows it.',
    Reason.FILE_UNREADABLE: "Check permissions and the disk, then pack again.",
    Reason.HEADER_UNREADABLE: "Export the files again; most often the transfer was cut.",
    Reason.INVALID_IMAGE_DESCRIPTION: "Export the files again; nobody can tell what the pixels are.",
    Reason.LABELS_OFF_GRID: "Resample the labels to their image (nearest neighbor) and copy its affine.",
    Reason.LIMIT_EXCEEDED: "If such sizes are real here, raise the limit (limits settings).",
    Reason.MISSING_IDENTIFIER: "Export the files with their identifiers; they are replaced here, not there.",
    Reason.MISSING_FILE: 'Fetch the rest of the files, or set layout.missing_files to "ignore".',
    Reason.NOT_IN_LAYOUT: "Add rows (or the split) of these files, or leave the files out.",
    Reason.NOT_RETRIEVED: "Ask the archive for one of them by hand; once it delivers it, retry.",
    Reason.PIXEL_DATA_TRUNCATED: "Export the files again; the transfer was cut.",
    Reason.REPORT_ENCRYPTED: "Save the PDF without a password.",
    Reason.REPORT_WITHOUT_TEXT: "Recognize the text of the scan (OCR), and save it as text.",
    Reason.REPORT_UNREADABLE: "Save the table as UTF-8 with a line a report, and check the rows around it.",
    Reason.ROUNDED_IDENTIFIER: "Export the tables again, with identifiers as text.",
    Reason.SPLIT_CHANGED: "Put the patient's former split back into the layout's table and retry; to move a "
    "patient, pack into a new output.",
    Reason.STUDY_ALREADY_PACKED: "Pack all inputs of these studies into a new output, with the same key file "
    "(identity.key_file): keys and splits stay. No later version of this dataset takes them in.",
    Reason.STUDY_QUARANTINED: "Mend the inputs of the other reasons; or set policy.on_bad_instance to "
    '"drop_instance", which packs the rest of a study.',
    Reason.UNKNOWN_LABEL: "Add the number to the labels of dataset.json, or correct the file.",
    Reason.UNSUPPORTED_SLIDE: "Convert the slides to DICOM or to a tiled TIFF in RGB; fluorescence has no "
    "field. TIFF needs the extra `slides`.",
    Reason.UNSUPPORTED_TRANSFER_SYNTAX: "Export the files uncompressed or in JPEG 2000. Video (MPEG, HEVC) "
    "has to become frames: a multi-frame JPEG image, or pictures that are packed as such.",
    Reason.WORKER_FAILED: "Report it with the class name and place from the log of the job.",
    Reason.WORKER_KILLED: "Look at one of them by itself; a decoder or converter crashes on it.",
    Reason.WORKER_OUT_OF_MEMORY: _AGAIN.format("memory"),
    Reason.WORKER_TIMEOUT: _AGAIN.format("time"),
    Reason.EMPTY_REPORT: "Nothing, unless the export left texts out.",
    Reason.NOT_DICOM: "Nothing, unless images should be among them.",
    Reason.REPORT_WITHOUT_STUDY: "If studies are missing, add their folders.",
    Reason.STUDY_WITHOUT_REPORT: "Add the reports, or set policy.require_report to false.",
    Reason.UNSUPPORTED_SOP_CLASS: "Nothing: reports, presentations and the like are no images.",
}


def remedy_of(reason: Reason | str) -> str:
    """Return what to do about a reason, as a sentence; for codes of other writers a general one.

    Example:
        >>> remedy_of("DUPLICATE_INSTANCE")
        'Nothing; it was never a candidate.'
    """
    try:
        code = Reason(reason)
    except ValueError:
        return _LOOK_UP
    skipped = outcome_of(code) is Outcome.SKIPPED
    return _REMEDIES.get(code, "Nothing; it was never a candidate." if skipped else _LOOK_UP)
