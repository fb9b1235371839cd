"""Where the time goes: counts of seconds, bytes and items per stage.

Owns the numbers only; who reports them (metrics files, a live view) reads snapshots. Nothing here knows what
a stage does.
"""

from __future__ import annotations

from shardflow.telemetry.counters import StageCounters, StageTimer, StageTotals

__all__ = ["StageCounters", "StageTimer", "StageTotals"]
