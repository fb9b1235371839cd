"""Measurements of a run: reading, judging, tuning, exporting and displaying them.

Needs no torch: a run can be inspected on any machine. Training measures and calls this package, which knows
nothing of how a step is taken.
"""

from __future__ import annotations

from shardflow.monitoring.history import RunHistory, read_history, read_settings
from shardflow.monitoring.outlets import SINKS, check_outlets, open_outlets
from shardflow.monitoring.prometheus import (
    MetricsServer,
    RunCollector,
    parse_address,
    read_metrics_text,
    require_prometheus,
)

__all__ = [
    "SINKS",
    "MetricsServer",
    "RunCollector",
    "RunHistory",
    "check_outlets",
    "open_outlets",
    "parse_address",
    "read_history",
    "read_metrics_text",
    "read_settings",
    "require_prometheus",
]
