"""What to make of a run's measurements: reading them back, judging, tuning, showing.

Needs no torch: a run is looked at on any machine. Training measures and calls what is here; nothing here
knows how a step is taken.
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
