"""Telemetry: seconds, bytes and items per stage, and the interval records made from them.

Holds the numbers only: exporters and live views read snapshots, and `shardflow.monitoring` judges the
records.
"""

from __future__ import annotations

from shardflow.telemetry.intervals import (
    Advice,
    GaugeNumbers,
    Interval,
    Move,
    MoveKind,
    RankNumbers,
    StageNumbers,
    TunableLimit,
    Tunables,
    Verdict,
)
from shardflow.telemetry.measures import (
    GAUGES,
    STAGES,
    CountersWindow,
    GaugeTotals,
    IntervalListener,
    IntervalRecorder,
    RankMeasures,
    Stage,
    StageCounters,
    StageGroup,
    StageTimer,
    StageTotals,
    interval_of,
    metric_name,
)

__all__ = [
    "GAUGES",
    "STAGES",
    "Advice",
    "CountersWindow",
    "GaugeNumbers",
    "GaugeTotals",
    "Interval",
    "IntervalListener",
    "IntervalRecorder",
    "Move",
    "MoveKind",
    "RankMeasures",
    "RankNumbers",
    "Stage",
    "StageCounters",
    "StageGroup",
    "StageNumbers",
    "StageTimer",
    "StageTotals",
    "TunableLimit",
    "Tunables",
    "Verdict",
    "interval_of",
    "metric_name",
]
