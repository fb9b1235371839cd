"""Alignment of report findings with the slices that show them, by weighted rules.

Each answer has a confidence and its evidence. Inputs and output are plain JSON objects: ``study.json``,
``report.json`` and ``annotations.json`` become ``alignment.json`` (docs/format.md, section 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.reports.alignment.aligning import align
    from shardflow.reports.alignment.evidence import RULES_VERSION, AlignmentRules

__all__ = [
    "RULES_VERSION",
    "AlignmentRules",
    "align",
]
_SOURCES: Final = {
    "RULES_VERSION": ".evidence:RULES_VERSION",
    "AlignmentRules": ".evidence:AlignmentRules",
    "align": ".aligning:align",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
