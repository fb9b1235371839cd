"""Which images does this sentence speak of? From findings of a report to the slices that show them.

Rules with weights, each answer with its confidence and its evidence. Plain JSON objects in and out:
``study.json``, ``report.json`` and ``annotations.json`` become ``alignment.json``
(docs/format.md, section 4).
"""

from __future__ import annotations

from shardflow.reports.alignment.aligning import align
from shardflow.reports.alignment.evidence import RULES_VERSION, AlignmentRules

__all__ = [
    "RULES_VERSION",
    "AlignmentRules",
    "align",
]
