"""What a reader finds where it looks for reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shardflow.sources.documents.facts import DocumentFacts
from shardflow.sources.reasons import Reason

__all__ = ["DocumentReport", "NoReport", "ReportStatus"]

ReportStatus: TypeAlias = str
"""``addendum``, ``corrected`` (stands for all before it), ``final`` or ``preliminary``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentReport:
    """The text of one report, and what links it with a study."""

    text: str = field(repr=False)
    status: ReportStatus = "final"
    facts: DocumentFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class NoReport:
    """A document or message that gives no report."""

    reason: Reason
    detail: str = ""
    """Never content."""
    facts: DocumentFacts | None = None


NOT_REPORT: Final = NoReport(reason=Reason.NOT_REPORT)
