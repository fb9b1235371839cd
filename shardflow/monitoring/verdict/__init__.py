"""What a run is bound by, in words, with evidence in numbers and advice that names settings.

`judge` looks at the newest intervals of a run; rules and thresholds are data in ``rules``. `VerdictReporter`
judges beside a run that goes on, writes what it finds and says it when it changes. docs/verdicts.md is for
people.
"""

from __future__ import annotations

from shardflow.monitoring.verdict.intervals import IntervalSummary, Settings, pool
from shardflow.monitoring.verdict.judging import VerdictReporter, judge, judge_all, judge_each
from shardflow.monitoring.verdict.rules import COMPUTE, RULES, Rule

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
