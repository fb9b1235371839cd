"""Where the time goes: counts of seconds, bytes and items per stage, and the records made of them.

Owns the numbers only; who reports them (metrics files, a live view) reads snapshots, and who judges them
(`shardflow.monitoring`) reads records. Nothing here knows how a stage does its work.
"""

from __future__ import annotations

from shardflow.telemetry.counters import (
    CountersWindow,
    GaugeTotals,
    StageCounters,
    StageTimer,
    StageTotals,
)
from shardflow.telemetry.findings import Advice, Move, MoveKind, Verdict
from shardflow.telemetry.intervals import GaugeNumbers, Interval, RankNumbers, StageNumbers
from shardflow.telemetry.knobs import KnobLimit, Knobs
from shardflow.telemetry.measures import GAUGES, RankMeasures, interval_of
from shardflow.telemetry.recorder import IntervalListener, IntervalRecorder
from shardflow.telemetry.stages import STAGES, Stage, StageGroup, metric_name

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
    "KnobLimit",
    "Knobs",
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
    "Verdict",
    "interval_of",
    "metric_name",
]
