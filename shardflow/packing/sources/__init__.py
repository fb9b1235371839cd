"""Sources: readers of images, reports and attachments, and the reasons for which an input is not packed.

`dicom` and `images` read pixels, `reports` and `documents` read text, and `layouts` finds out which study an
input belongs to. The reasons themselves are part of the format (`shardflow.format.reasons`).
"""

from __future__ import annotations

from shardflow.format.reasons import REASONS, Outcome, Reason, ReasonInfo, outcome_of, source_error

__all__ = [
    "REASONS",
    "Outcome",
    "Reason",
    "ReasonInfo",
    "outcome_of",
    "source_error",
]
