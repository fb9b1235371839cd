"""Telemetry: seconds, bytes and items per stage, and the interval records made from them.

Holds the numbers only: exporters and live views read snapshots, and `shardflow.monitoring` judges the
records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
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
_SOURCES: Final = {
    "GAUGES": ".measures:GAUGES",
    "STAGES": ".measures:STAGES",
    "Advice": ".intervals:Advice",
    "CountersWindow": ".measures:CountersWindow",
    "GaugeNumbers": ".intervals:GaugeNumbers",
    "GaugeTotals": ".measures:GaugeTotals",
    "Interval": ".intervals:Interval",
    "IntervalListener": ".measures:IntervalListener",
    "IntervalRecorder": ".measures:IntervalRecorder",
    "Move": ".intervals:Move",
    "MoveKind": ".intervals:MoveKind",
    "RankMeasures": ".measures:RankMeasures",
    "RankNumbers": ".intervals:RankNumbers",
    "Stage": ".measures:Stage",
    "StageCounters": ".measures:StageCounters",
    "StageGroup": ".measures:StageGroup",
    "StageNumbers": ".intervals:StageNumbers",
    "StageTimer": ".measures:StageTimer",
    "StageTotals": ".measures:StageTotals",
    "TunableLimit": ".intervals:TunableLimit",
    "Tunables": ".intervals:Tunables",
    "Verdict": ".intervals:Verdict",
    "interval_of": ".measures:interval_of",
    "metric_name": ".measures:metric_name",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
