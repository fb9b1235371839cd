"""The charts of what intervals measured: stages, tiers, ranks, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Final

from shardflow.monitoring.run_page.chart import Chart, Kind, Series
from shardflow.monitoring.run_page.columns import Stretch, mean_of
from shardflow.telemetry import STAGES

__all__ = [
    "LOOP_STAGES",
    "TIERS",
    "available_chart",
    "gauge_series",
    "loader_chart",
    "loader_stages",
    "loop_chart",
    "memory_chart",
    "over",
    "queue_chart",
    "spread",
    "spread_chart",
    "tier_bytes_chart",
    "tier_share",
    "tier_shares_chart",
]

LOOP_STAGES: Final = (
    *("data_wait", "forward", "backward", "exchange", "optimizer", "agree", "checkpoint", "evaluate"),
)
"""In the order of the stack."""
TIERS: Final = (("cache_ram", "memory"), ("cache_disk", "node's disk"), ("cache_origin", "store"))


def over(
    rows: Sequence[Stretch],
    label: str,
    colour: str,
    value: Callable[[Stretch], float | None],
    kind: Kind = "line",
) -> Series:
    """Return a number of each stretch as a series."""
    return Series(
        label=label, colour=colour, places="stretches", values=[value(row) for row in rows], kind=kind
    )


def loop_chart(rows: Sequence[Stretch]) -> Chart:
    """What the ranks' loops do."""
    series = [
        over(rows, name.replace("_", " "), name, partial(Stretch.share, stage=name), kind="stack")
        for name in LOOP_STAGES
        if any(row.stage_s.get(name) for row in rows)
    ]
    rest = over(
        rows, "all else", "rest", lambda row: max(0.0, 1.0 - sum(map(row.share, LOOP_STAGES))), kind="stack"
    )
    return Chart(
        key="loop",
        title="The training loop, shares of all ranks' time",
        unit="share",
        series=[*series, rest] if rows else [],
        height=200,
        top=1.0,
    )


def loader_stages(rows: Sequence[Stretch]) -> list[str]:
    """Return the stages at which threads of the loader work, without those that are parts of others."""
    return [
        name
        for name, stage in STAGES.items()
        if stage.group in ("fetch", "make")
        and not stage.is_part_of
        and any(row.stage_s.get(name) for row in rows)
    ]


def _busy(row: Stretch, name: str) -> float | None:
    return row.stage_s.get(name, 0.0) / row.rank_wall_s if row.rank_wall_s else None


def loader_chart(rows: Sequence[Stretch]) -> Chart:
    """What the threads of the loader do."""
    series = [
        over(rows, name.replace("_", " "), name, partial(_busy, name=name), kind="stack")
        for name in loader_stages(rows)
    ]
    return Chart(
        key="loader",
        title="The loader, threads of a rank at work",
        unit="threads",
        series=series,
        height=170,
    )


def gauge_series(rows: Sequence[Stretch], name: str, label: str, colour: str) -> Series:
    """Return a gauge with its envelope."""
    found = [row.gauges.get(name) for row in rows]
    return Series(
        label=label,
        colour=colour,
        places="stretches",
        values=[
            one[0] / row.num_steps if one and row.num_steps else None
            for row, one in zip(rows, found, strict=True)
        ],
        least=[one[1] if one else None for one in found],
        most=[one[2] if one else None for one in found],
    )


def queue_chart(rows: Sequence[Stretch]) -> Chart:
    """How far the loader is ahead."""
    series = [gauge_series(rows, "ready_batches", "micro-batches ready", "rate")]
    return Chart(
        key="queue", title="Micro-batches ready when the loop takes one", unit="", series=series, height=100
    )


def _tiers(rows: Sequence[Stretch]) -> list[tuple[str, str]]:
    used = [(name, label) for name, label in TIERS if any(row.stage_bytes.get(name) for row in rows)]
    # Without a cache there is one tier, which has all bytes.
    return used or [("read", "dataset")] * any(row.stage_bytes.get("read") for row in rows)


def _bytes_per_s(row: Stretch, name: str) -> float | None:
    return row.stage_bytes.get(name, 0) / row.wall_s if row.wall_s else None


def tier_bytes_chart(rows: Sequence[Stretch]) -> Chart:
    """Where bytes come from."""
    series = [
        over(
            rows,
            f"from {label}",
            name,
            partial(_bytes_per_s, name=name),
            kind="stack",
        )
        for name, label in _tiers(rows)
    ]
    return Chart(key="tier_bytes", title="Bytes read, all ranks", unit="bytes/s", series=series, height=150)


def tier_share(row: Stretch, name: str) -> float | None:
    """Return the part of the bytes of all tiers that one gave, 0 to 1; None where none gave any."""
    total = sum(row.stage_bytes.get(one, 0) for one, _ in TIERS)
    return row.stage_bytes.get(name, 0) / total if total else None


def tier_shares_chart(rows: Sequence[Stretch]) -> Chart:
    """Which part of the bytes each tier gives."""
    series = [
        over(rows, f"from {label}", name, partial(tier_share, name=name))
        for name, label in _tiers(rows)
        if name != "read"
    ]
    return Chart(
        key="tier_shares",
        title="Tiers, shares of the bytes",
        unit="share",
        series=series,
        height=120,
        top=1.0,
    )


def spread(rows: Sequence[Stretch], field: str) -> Mapping[str, list[float | None]]:
    """Return least, median and most over ranks of a part of the steps' time."""
    found: dict[str, list[float | None]] = {"least": [], "median": [], "most": []}
    for row in rows:
        shares = sorted(getattr(one, field) / one.step_s for one in row.ranks.values() if one.step_s)
        found["least"].append(shares[0] if shares else None)
        found["median"].append(median(shares) if shares else None)
        found["most"].append(shares[-1] if shares else None)
    return found


def spread_chart(rows: Sequence[Stretch]) -> Chart:
    """How far ranks are apart."""
    series = []
    parts = (
        ("computing", "compute_s", "forward"),
        ("waiting for data", "data_wait_s", "wait"),
        ("waiting for others", "exchange_s", "exchange"),
    )
    for label, field, colour in parts:
        found = spread(rows, field)
        series.append(
            Series(
                label=label,
                colour=colour,
                places="stretches",
                values=found["median"],
                least=found["least"],
                most=found["most"],
            )
        )
    return Chart(
        key="spread",
        title="Least, median and most over ranks, shares of the steps' time",
        unit="share",
        series=series,
        height=150,
    )


def memory_chart(rows: Sequence[Stretch]) -> Chart:
    """What ranks hold."""

    def mean(field: str) -> Callable[[Stretch], float | None]:
        return lambda row: mean_of([getattr(one, field) for one in row.ranks.values()])

    def most(field: str) -> Callable[[Stretch], float | None]:
        return lambda row: max((getattr(one, field) for one in row.ranks.values()), default=None)

    series = [
        over(rows, "processes (PSS), mean of ranks", "forward", mean("pss_bytes")),
        over(rows, "processes, most of a rank", "forward", most("pss_bytes"), kind="dashed"),
    ]
    for label, field, colour in (
        ("pinned, mean", "pinned_bytes", "wait"),
        ("device, most of a rank", "device_bytes", "exchange"),
        ("cache in memory, mean", "cache_ram_bytes", "optimizer"),
        ("cache on disk, mean", "cache_disk_bytes", "checkpoint"),
    ):
        if any(getattr(one, field) for row in rows for one in row.ranks.values()):
            series.append(over(rows, label, colour, most(field) if field == "device_bytes" else mean(field)))
    return Chart(key="memory", title="Memory of a rank", unit="bytes", series=series, height=170)


def available_chart(rows: Sequence[Stretch]) -> Chart:
    """What nodes have left."""
    series = [over(rows, "available, least of the nodes", "rate", lambda row: row.available_bytes or None)]
    return Chart(
        key="available", title="Memory that a node has left", unit="bytes", series=series, height=100
    )
