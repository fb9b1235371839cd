"""Verdicts: what limits a run, in words, with evidence in numbers and advice that names settings.

`judge` evaluates the newest intervals of a run; rules and thresholds are data in ``rules``.
`VerdictReporter` does so during a run, and writes and logs what changed. docs/verdicts.md is the user's page.
"""

from __future__ import annotations

from shardflow.monitoring.verdict.intervals import IntervalSummary, Settings, pool
from shardflow.monitoring.verdict.judging import (
    COMPUTE,
    RULES,
    Rule,
    VerdictReporter,
    judge,
    judge_all,
    judge_each,
)

__all__ = [
    "COMPUTE",
    "RULES",
    "IntervalSummary",
    "Rule",
    "Settings",
    "VerdictReporter",
    "judge",
    "judge_all",
    "judge_each",
    "pool",
]
