"""Telemetry: seconds, bytes and items per stage, and the interval records made from them.

Holds the numbers only: exporters and live views read snapshots, and `shardflow.monitoring` judges the
records.
"""

from __future__ import annotations

from shardflow.telemetry.counters import (
    STAGES,
    CountersWindow,
    GaugeTotals,
    Stage,
    StageCounters,
    StageGroup,
    StageTimer,
    StageTotals,
    metric_name,
)
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
from shardflow.telemetry.measures import GAUGES, IntervalListener, IntervalRecorder, RankMeasures, interval_of

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
