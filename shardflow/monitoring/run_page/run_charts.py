"""The charts of one run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from shardflow.monitoring.run_page.chart import Band, Chart, Mark, Places, Series
from shardflow.monitoring.run_page.reading import RunNumbers
from shardflow.monitoring.run_page.scales import duration, show
from shardflow.monitoring.run_page.stretch_charts import (
    available_chart,
    loader_chart,
    loop_chart,
    memory_chart,
    queue_chart,
    spread_chart,
    tier_bytes_chart,
    tier_shares_chart,
)

__all__ = ["run_charts", "run_places"]


def run_places(run: RunNumbers, prefix: str = "") -> dict[str, Places]:
    """Return where the values of a run's series stand."""
    steps = run.steps
    last = [value or 0.0 for value in steps.get("last", ())]
    times = [value or 0.0 for value in steps.get("time_s", ())]
    rows = run.stretches
    return {
        # A step is drawn at its end, as an interval is, and as time is.
        f"{prefix}steps": Places([value + 1 for value in last], times, restarts=_after_stops(run, times)),
        f"{prefix}stretches": Places(
            [row.last + 1.0 for row in rows],
            [row.ended_s for row in rows],
            ([row.first for row in rows], [row.began_s for row in rows]),
            _after_stops(run, [row.ended_s for row in rows]),
        ),
        f"{prefix}evaluations": Places(
            [float(one.step) for one in run.evaluations], [one.time_s for one in run.evaluations]
        ),
    }


def _after_stops(run: RunNumbers, times: Sequence[float]) -> list[int]:
    """Return the first value after each stop of the run."""
    return sorted({bisect_right(times, restart.died_s) for restart in run.restarts})


def run_charts(run: RunNumbers) -> dict[str, list[Chart]]:
    """Return all charts by the section that they stand in; those without values are left out on the page."""
    return {
        "timeline": [_step_time(run), _throughput(run)],
        "learning": [_loss(run), _learning_rate(run), _gradient_norm(run)],
        "stages": [loop_chart(run.stretches), loader_chart(run.stretches), queue_chart(run.stretches)],
        "tiers": [tier_bytes_chart(run.stretches), tier_shares_chart(run.stretches)],
        "ranks": [spread_chart(run.stretches)],
        "memory": [memory_chart(run.stretches), available_chart(run.stretches)],
    }


def _envelope(run: RunNumbers, name: str, label: str, colour: str, *, middle: str = "median") -> Series:
    # One step a row has no envelope.
    is_single = run.steps_per_row == 1
    return Series(
        label=label if is_single else f"{label}, {middle}",
        colour=colour,
        places="steps",
        values=run.steps[f"{name}_{middle}"],
        least=None if is_single else run.steps[f"{name}_least"],
        most=None if is_single else run.steps[f"{name}_most"],
    )


def _step_time(run: RunNumbers) -> Chart:
    waits = run.steps["data_wait_s_mean"]
    rest = [
        None if step is None else max(0.0, step - (wait or 0.0))
        for step, wait in zip(run.steps["step_s_mean"], waits, strict=True)
    ]
    series = [
        Series(label="waiting for data", colour="wait", places="steps", values=waits, kind="stack"),
        Series(label="all else in the step", colour="rest", places="steps", values=rest, kind="stack"),
    ]
    if run.steps_per_row > 1:
        series.append(_envelope(run, "step_s", "step", "step"))
    return Chart(
        key="step_time",
        title="Time of a step, on the slowest rank",
        unit="s",
        series=series,
        height=230,
        is_clipped=True,
        marks=_marks(run),
        bands=_bands(run),
    )


def _marks(run: RunNumbers) -> list[Mark]:
    marks = []
    for saved in run.checkpoints:
        count = f"{saved.number} checkpoints" if saved.number > 1 else "checkpoint"
        text = f"{count} at step {saved.step}: training stood still for {duration(saved.stall_s)}"
        marks.append(
            Mark(lane="checkpoints", step=saved.step, time_s=saved.time_s, text=text, colour="saved")
        )
    for check in run.evaluations:
        text = f"evaluation at step {check.step}: {duration(check.seconds)}, loss {show(check.loss, '')}"
        marks.append(
            Mark(lane="evaluations", step=check.step, time_s=check.time_s, text=text, colour="evaluated")
        )
    for restart in run.restarts:
        text = f"start again at step {restart.step} after {restart.reached} steps"
        at_s = restart.began_s if restart.began_s is not None else restart.died_s
        marks.append(Mark(lane="restarts", step=restart.step, time_s=at_s, text=text, colour="lost"))
    for time_s, move in run.moves:
        if move.kind in ("try", "revert", "keep"):
            text = f"tuner, step {move.global_step}: {move.kind} {move.setting} {move.old} \u2192 {move.new}"
            colour = "reverted" if move.kind == "revert" else "tuned"
            marks.append(
                Mark(lane="tuner", step=move.global_step + 1, time_s=time_s, text=text, colour=colour)
            )
    return marks


def _bands(run: RunNumbers) -> list[Band]:
    bands = []
    for restart in run.restarts:
        began_s = restart.began_s if restart.began_s is not None else run.wall_s
        here = (float(restart.step), float(restart.step))
        text = f"no steps for {duration(began_s - restart.died_s)}: stopped after {restart.reached} steps"
        bands.append(Band(steps=here, times=(restart.died_s, began_s), text=text, colour="stopped"))
        if restart.num_lost_steps and restart.lost_from_s is not None:
            bands.append(
                Band(
                    steps=(float(restart.step), float(restart.reached)),
                    times=(restart.lost_from_s, restart.died_s),
                    text=f"{restart.num_lost_steps} steps done again, from {restart.step}",
                    colour="lost",
                )
            )
    return bands


def _throughput(run: RunNumbers) -> Chart:
    values = run.steps["samples_per_s"]
    series = [Series(label="samples/s in steps", colour="rate", places="steps", values=values)]
    return Chart(key="throughput", title="Throughput in steps", unit="samples/s", series=series, height=120)


def _loss(run: RunNumbers) -> Chart:
    checks = Series(
        label="evaluation",
        colour="checked",
        places="evaluations",
        values=[one.loss for one in run.evaluations],
        kind="points",
    )
    return Chart(
        key="loss",
        title="Loss",
        unit="nats",
        series=[_envelope(run, "loss", "training", "loss"), checks],
        height=200,
        is_from_zero=False,
    )


def _learning_rate(run: RunNumbers) -> Chart:
    values = run.steps["learning_rate"]
    series = [Series(label="learning rate", colour="rate", places="steps", values=values)]
    return Chart(key="learning_rate", title="Learning rate", unit="", series=series, height=100)


def _gradient_norm(run: RunNumbers) -> Chart:
    series = [_envelope(run, "gradient_norm", "gradient norm", "loss")]
    return Chart(
        key="gradient_norm",
        title="Gradient norm before clipping",
        unit="",
        series=series,
        height=100,
        is_clipped=True,
    )
