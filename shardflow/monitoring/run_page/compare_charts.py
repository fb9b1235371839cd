"""The charts of two runs, overlaid: A in one colour, B in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardflow.monitoring.run_page.chart import Chart, Series
from shardflow.monitoring.run_page.columns import Stretch
from shardflow.monitoring.run_page.reading import RunNumbers
from shardflow.monitoring.run_page.stretch_charts import gauge_series, over, spread, tier_share

__all__ = ["LETTERS", "comparison_charts"]

LETTERS: Final = ("a", "b")
"""Classes of the style sheet, and what the runs are called, in capitals."""


def comparison_charts(runs: Sequence[RunNumbers]) -> dict[str, list[Chart]]:
    """Return all charts by the section that they stand in."""
    return {
        "timeline": [
            _chart("step_time", "Time of a step", "s", _steps(runs, "step_s"), height=200, is_clipped=True),
            _chart(
                "data_wait", "Waiting for data in a step", "s", _steps(runs, "data_wait_s"), is_clipped=True
            ),
            _chart("throughput", "Samples a second, in steps", "", _column(runs, "samples_per_s")),
        ],
        "learning": [
            _chart(
                "loss",
                "Loss",
                "nats",
                _steps(runs, "loss") + _evaluations(runs),
                height=200,
                is_from_zero=False,
            ),
            _chart("learning_rate", "Learning rate", "", _column(runs, "learning_rate"), height=90),
            _chart(
                "gradient_norm",
                "Gradient norm before clipping",
                "",
                _steps(runs, "gradient_norm"),
                height=100,
                is_clipped=True,
            ),
        ],
        "loading": [
            _chart(
                "queue", "Micro-batches ready when the loop takes one", "", _each(runs, _ready), height=110
            ),
            _chart("origin", "Bytes from the store, all ranks", "bytes/s", _over(runs, _origin), height=110),
            _chart(
                "hits", "Bytes from caches, share of all", "share", _over(runs, _hits), height=100, top=1.0
            ),
        ],
        "ranks": [
            _chart(key, title, "share", _each(runs, partial(_ranks, field=field)), height=110)
            for key, title, field in (
                (
                    "computing",
                    "Computing, share of the steps' time: least, median and most of the ranks",
                    "compute_s",
                ),
                ("exchange", "Waiting for gradients of others", "exchange_s"),
            )
        ],
        "memory": [_chart("memory", "Processes of a rank (PSS), most of a rank", "bytes", _over(runs, _pss))],
    }


def _chart(key: str, title: str, unit: str, series: Sequence[Series], **more: Any) -> Chart:
    return Chart(key=key, title=title, unit=unit, series=series, **{"height": 130, **more})


def _steps(runs: Sequence[RunNumbers], name: str) -> list[Series]:
    series = []
    for run, letter in zip(runs, LETTERS, strict=True):
        has_envelope = run.steps_per_row > 1
        series.append(
            Series(
                label=f"{letter.upper()} {run.name}" + (", median" if has_envelope else ""),
                colour=letter,
                places=f"{letter}.steps",
                values=run.steps[f"{name}_median"],
                least=run.steps[f"{name}_least"] if has_envelope else None,
                most=run.steps[f"{name}_most"] if has_envelope else None,
            )
        )
    return series


def _column(runs: Sequence[RunNumbers], name: str) -> list[Series]:
    return [
        Series(
            label=f"{letter.upper()} {run.name}",
            colour=letter,
            places=f"{letter}.steps",
            values=run.steps[name],
        )
        for run, letter in zip(runs, LETTERS, strict=True)
    ]


def _evaluations(runs: Sequence[RunNumbers]) -> list[Series]:
    return [
        Series(
            label=f"{letter.upper()} evaluation",
            colour=letter,
            places=f"{letter}.evaluations",
            values=[one.loss for one in run.evaluations],
            kind="points",
        )
        for run, letter in zip(runs, LETTERS, strict=True)
    ]


def _each(runs: Sequence[RunNumbers], make: Callable[[Sequence[Stretch]], Series]) -> list[Series]:
    return [
        replace(
            make(run.stretches),
            label=f"{letter.upper()} {run.name}",
            colour=letter,
            places=f"{letter}.stretches",
        )
        for run, letter in zip(runs, LETTERS, strict=True)
    ]


def _over(runs: Sequence[RunNumbers], value: Callable[[Stretch], float | None]) -> list[Series]:
    return _each(runs, lambda rows: over(rows, "", "", value))


def _ready(rows: Sequence[Stretch]) -> Series:
    return gauge_series(rows, "ready_batches", "", "")


def _origin(row: Stretch) -> float | None:
    # Without a cache all bytes come from where the dataset lies.
    name = "cache_origin" if "cache_origin" in row.stage_bytes else "read"
    return row.stage_bytes.get(name, 0) / row.wall_s if row.wall_s else None


def _hits(row: Stretch) -> float | None:
    origin = tier_share(row, "cache_origin")
    return None if origin is None else 1.0 - origin


def _ranks(rows: Sequence[Stretch], field: str) -> Series:
    found = spread(rows, field)
    return replace(
        over(rows, "", "", lambda _: None), values=found["median"], least=found["least"], most=found["most"]
    )


def _pss(row: Stretch) -> float | None:
    return max((float(one.pss_bytes) for one in row.ranks.values()), default=None)
