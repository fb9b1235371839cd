"""Templated reports, in which the span of every finding, mention and distractor is known."""

from __future__ import annotations

from shardflow.synthetic.reports.compose import write_report
from shardflow.synthetic.reports.mentions import Report

__all__ = [
    "Report",
    "write_report",
]
