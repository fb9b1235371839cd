"""Measurements of a run: reading, judging, tuning, exporting and displaying them.

Needs no torch: a run can be inspected on any machine. Training measures and calls this package, which knows
nothing of how a step is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
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
_SOURCES: Final = {
    "SINKS": ".outlets:SINKS",
    "MetricsServer": ".prometheus:MetricsServer",
    "RunCollector": ".prometheus:RunCollector",
    "RunHistory": ".history:RunHistory",
    "check_outlets": ".outlets:check_outlets",
    "open_outlets": ".outlets:open_outlets",
    "parse_address": ".prometheus:parse_address",
    "read_history": ".history:read_history",
    "read_metrics_text": ".prometheus:read_metrics_text",
    "read_settings": ".history:read_settings",
    "require_prometheus": ".prometheus:require_prometheus",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
