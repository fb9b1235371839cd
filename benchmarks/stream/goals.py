"""The goals of streaming beside what a run reached."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.stream.contestants import PEERS

__all__ = ["OURS", "goals"]

# Who of ours is compared with the peers.
OURS = {"ct": "shardflow", "cxr": "shardflow", "gray": "shardflow", "text": "shardflow_tokens"}
# Two processes that do the same differ by this much in their first batch.
_NOISE_S = 0.01


def goals(
    medians: dict[str, dict[str, dict[str, float]]], sample_counts: dict[str, float]
) -> list[dict[str, Any]]:
    """Return each goal beside what was reached; NaN where a contestant that it needs is missing."""

    def rate(workload: str, name: str) -> float:
        return found(workload, name, "samples_per_s")

    def found(workload: str, name: str, key: str) -> float:
        return medians.get(workload, {}).get(name, {}).get(key, math.nan)

    def peers(workload: str, key: str) -> list[float]:
        there = medians.get(workload, {})
        return [there[name][key] for name in PEERS if name in there] or [math.nan]

    rows: list[tuple[str, float, float, bool]] = []
    for workload, share in (("ct", 0.92), ("cxr", 0.9)):
        reached = rate(workload, "shardflow") / rate(workload, "limit")
        rows.append((f"{workload}: share of the decode limit", share, reached, True))
    rows.append(("text: samples/s of token ids", 600_000, rate("text", "shardflow_tokens"), True))
    ours = rate("ct", "shardflow")
    rows.append(("ct: times webdataset of 16-bit PNG", 9, ours / rate("ct", "webdataset_png"), True))
    rows.append(("ct: times a DataLoader over loose DICOM", 5, ours / rate("ct", "dicom"), True))
    for workload, times in (("ct", 2), ("cxr", 1.6), ("gray", 1.5), ("text", 4)):
        best = max(peers(workload, "samples_per_s"))
        rows.append((f"{workload}: times the best peer", times, rate(workload, OURS[workload]) / best, True))
    typed = rate("text", "shardflow_tokens") / rate("text", "litdata_typed")
    rows.append(("text: times LitData's typed columns", 4, typed, True))
    for workload, name in OURS.items():
        for key, what in (("peak_pss_mb", "peak memory, MB"), ("first_batch_s", "first batch, s")):
            rows.append(
                (
                    f"{workload}: {what}, below every peer",
                    min(peers(workload, key)),
                    found(workload, name, key),
                    False,
                )
            )
        if workload == "gray":  # resumes as radiographs do
            continue
        fresh = found(workload, name, "first_batch_s")
        resumed = found(workload, f"{name}_resumed", "first_batch_s")
        goal = max(1.1 * fresh, fresh + _NOISE_S)
        rows.append((f"{workload}: first batch at half an epoch, s", goal, resumed, False))
    rows.append(("plan of a step: 10^8 by 10^4 samples", 1.1, sample_counts["ratio"], False))
    return [
        {
            "what": what,
            "goal": round(goal, 3),
            "reached": round(reached, 3),
            "met": bool(reached >= goal if is_at_least else reached <= goal),
        }
        for what, goal, reached, is_at_least in rows
    ]
