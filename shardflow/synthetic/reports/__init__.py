"""Templated reports: text in which every finding, mention and distractor is known by its span."""

from __future__ import annotations

from shardflow.synthetic.reports.compose import write_report
from shardflow.synthetic.reports.mentions import Report

__all__ = [
    "Report",
    "write_report",
]
