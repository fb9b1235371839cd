"""Reports: texts keyed by study."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ReportFormat", "ReportRecord", "load_reports"]

ReportFormat = Literal["csv", "folder", "jsonl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRecord:
    """One report. Holds an identifier and text, so it never goes into a message, log or dataset as it is."""

    study_instance_uid: str
    text: str
    place: int
    """Line (csv, jsonl) or position in the sorted folder, from 1."""

    def __repr__(self) -> str:
        return f"ReportRecord(place={self.place}, {len(self.text)} characters)"


def load_reports(path: Path, format: ReportFormat = "csv") -> list[ReportRecord]:
    """Read all reports of one source, in its order; duplicates are kept for the caller to judge."""
    raise NotImplementedError
