"""Why a line of a corpus was not packed: one closed list of codes.

The place of a reason in the list is the byte that stands for it in the table of outcomes, so reasons are
added at the end, never renamed, never moved (change class SHARD FORMAT).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from shardflow.shards.outcomes import Outcome

__all__ = ["PACKED", "REASONS", "REASON_TABLE", "LineError", "LineReason", "ReasonInfo", "number_of"]


class LineReason(StrEnum):
    """Why a line was skipped or quarantined; `REASONS` says what each one means."""

    EMPTY_LINE = "EMPTY_LINE"
    EMPTY_TEXT = "EMPTY_TEXT"
    NOT_A_CORPUS_FILE = "NOT_A_CORPUS_FILE"
    DUPLICATE_TEXT = "DUPLICATE_TEXT"
    LINE_TOO_LONG = "LINE_TOO_LONG"
    TEXT_TOO_LONG = "TEXT_TOO_LONG"
    INVALID_UTF8 = "INVALID_UTF8"
    INVALID_JSON = "INVALID_JSON"
    MISSING_FIELD = "MISSING_FIELD"
    WRONG_TYPE = "WRONG_TYPE"
    UNKNOWN_ROLE = "UNKNOWN_ROLE"
    DUPLICATE_KEY = "DUPLICATE_KEY"
    FILE_DAMAGED = "FILE_DAMAGED"
    WORKER_FAILED = "WORKER_FAILED"
    WORKER_KILLED = "WORKER_KILLED"
    WORKER_OUT_OF_MEMORY = "WORKER_OUT_OF_MEMORY"
    WORKER_TIMEOUT = "WORKER_TIMEOUT"


class ReasonInfo(NamedTuple):
    """What a reason means, and what to do."""

    outcome: Outcome
    meaning: str
    remedy: str


REASONS: Final[dict[LineReason, ReasonInfo]] = {
    LineReason.EMPTY_LINE: ReasonInfo("skipped", "a line of white space", "nothing"),
    LineReason.EMPTY_TEXT: ReasonInfo("skipped", "its texts are empty or white space", "nothing"),
    LineReason.NOT_A_CORPUS_FILE: ReasonInfo(
        "skipped", "a file with another ending, or no regular file; one for each", "nothing, or rename it"
    ),
    LineReason.DUPLICATE_TEXT: ReasonInfo(
        "skipped", "an earlier line has the same texts (policy.duplicates)", "nothing"
    ),
    LineReason.LINE_TOO_LONG: ReasonInfo(
        "quarantined", "more bytes than limits.max_line_bytes", "raise the limit, or cut the text"
    ),
    LineReason.TEXT_TOO_LONG: ReasonInfo(
        "quarantined", "more bytes of text than limits.max_text_bytes", "raise the limit, or cut the text"
    ),
    LineReason.INVALID_UTF8: ReasonInfo(
        "quarantined", "bytes that are no UTF-8, or half a surrogate pair", "write the file as UTF-8"
    ),
    LineReason.INVALID_JSON: ReasonInfo(
        "quarantined",
        "no JSON object: cut, NaN, a key given twice, nested too deeply",
        "write the line anew with a JSON library",
    ),
    LineReason.MISSING_FIELD: ReasonInfo(
        "quarantined", "a field of [fields] is not there, or null", "correct [fields], or the line"
    ),
    LineReason.WRONG_TYPE: ReasonInfo(
        "quarantined", "a field is no text (or no list of turns)", "correct [fields], or the line"
    ),
    LineReason.UNKNOWN_ROLE: ReasonInfo(
        "quarantined", "a turn's role is none of fields.roles", "add it to fields.roles"
    ),
    LineReason.DUPLICATE_KEY: ReasonInfo(
        "quarantined", "an earlier line has the same fields.key", "make keys unique, or leave fields.key out"
    ),
    LineReason.FILE_DAMAGED: ReasonInfo(
        "quarantined",
        "the rest of a compressed or Parquet file that cannot be read; one for the file",
        "fetch the file again, into a new output",
    ),
    LineReason.WORKER_FAILED: ReasonInfo(
        "quarantined", "a process failed twice on this part; one for each file of it", "report it"
    ),
    LineReason.WORKER_KILLED: ReasonInfo(
        "quarantined", "a process died twice on this part; one for each file of it", "look at the machine"
    ),
    LineReason.WORKER_OUT_OF_MEMORY: ReasonInfo(
        "quarantined",
        "a part took more memory than execution.memory_bytes, twice; one for each file of it",
        "raise execution.memory_bytes, or write smaller row groups",
    ),
    LineReason.WORKER_TIMEOUT: ReasonInfo(
        "quarantined", "a part took longer than its time, twice; one for each file of it", "raise the time"
    ),
}

PACKED: Final = 0
"""The number of a packed line."""

REASON_TABLE: Final[tuple[tuple[str, Outcome], ...]] = (
    ("PACKED", "packed"),
    *((str(reason), REASONS[reason].outcome) for reason in LineReason),
)
"""Name and outcome by number."""

_NUMBERS: Final = {reason: number for number, reason in enumerate(LineReason, start=1)}


def number_of(reason: LineReason) -> int:
    """Return the byte that stands for a reason."""
    return _NUMBERS[reason]


class LineError(Exception):
    """A line cannot be packed; stays inside the package, and holds nothing of the line."""

    def __init__(self, reason: LineReason) -> None:
        super().__init__(str(reason))
        self.reason = reason
