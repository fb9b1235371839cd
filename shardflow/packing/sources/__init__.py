"""Sources: where samples come from, and why an input could not become part of one.

`dicom` reads images, `reports` reads texts; `reasons` is the closed list of outcomes both speak.
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
