"""What a person can do about an input that was not packed.

Kept apart from `shardflow.sources.reasons`: codes are a promise of the format, advice may get better.
"""

from __future__ import annotations

from typing import Final

from shardflow.sources.reasons import Outcome, Reason, outcome_of

__all__ = ["remedy_of"]

_LOOK_UP: Final = "Find the inputs in the private ledger by their surrogates, and look at one of them."
_AGAIN: Final = (
    "Give a process more {} (execution settings), remove its line from the private folder, pack anew."
)

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
    Reason.LIMIT_EXCEEDED: "If such sizes are real here, raise the limit (limits settings).",
    Reason.MISSING_IDENTIFIER: "Export the files with their identifiers; they are replaced here, not there.",
    Reason.MISSING_FILE: 'Fetch the rest of the files, or set layout.missing_files to "ignore".',
    Reason.NOT_IN_LAYOUT: "Add rows (or the split) of these files, or leave the files out.",
    Reason.PIXEL_DATA_TRUNCATED: "Export the files again; the transfer was cut.",
    Reason.REPORT_UNREADABLE: "Save the table as UTF-8 with a line a report, and check the rows around it.",
    Reason.SPLIT_CHANGED: "Put the patient's former split back into the layout's table and retry; to move a "
    "patient, pack into a new output.",
    Reason.STUDY_ALREADY_PACKED: "Pack all inputs of these studies into a new output, with the same key file "
    "(identity.key_file): keys and splits stay. No later version of this dataset takes them in.",
    Reason.STUDY_QUARANTINED: "Mend the inputs of the other reasons; or set policy.on_bad_instance to "
    '"drop_instance", which packs the rest of a study.',
    Reason.UNSUPPORTED_TRANSFER_SYNTAX: "Export the files in another transfer syntax.",
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
