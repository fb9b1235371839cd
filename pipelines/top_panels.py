"""Sections about the speed of a run: its curves, the parts of a step, loader, queues, tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from rich.text import Text

from pipelines.top_draw import (
    DIM,
    Glyphs,
    bar,
    bytes_text,
    curve,
    duration,
    level_style,
    number,
    percent,
    seconds_text,
    stacked,
)
from pipelines.top_sections import Row, Section, share_line
from shardflow.monitoring.live import LiveView, StepPoint
from shardflow.monitoring.live_curve import resampled
from shardflow.telemetry import STAGES, Interval

__all__ = ["STEP_COLOURS", "loader_section", "queue_section", "speed_section", "step_section", "tier_section"]

STEP_COLOURS: Final = {
    "data_wait": "#e5534b",
    "forward": "#57ab5a",
    "backward": "#2b9a8f",
    "exchange": "#d9a13b",
    "optimizer": "#539bf5",
    "agree": "#986ee2",
    "checkpoint": "#e275ad",
    "evaluate": "#a5815c",
}
_STEP_LETTERS: Final = dict(zip(STEP_COLOURS, "wfbxoace", strict=True))
_ALWAYS: Final = ("data_wait", "forward", "backward", "exchange", "optimizer")
_MAKE_COLOURS: Final = {
    "read": "#539bf5",
    "check": "#986ee2",
    "decode": "#57ab5a",
    "transform": "#2b9a8f",
    "user_transform": "#d9a13b",
    "tokens": "#e275ad",
    "collate": "#a5815c",
}
_FAIR_WAIT: Final = 0.05
_BAD_WAIT: Final = 0.2


def speed_section(view: LiveView, width: int, glyphs: Glyphs) -> Section | None:
    """Rates with their curves, wait for data, loss."""
    if view.step is None:
        return None
    room, step = max(4, width - 20), view.step
    waits = [point.data_wait_s / point.step_s if point.step_s else 0.0 for point in view.recent]
    wait_style = level_style(view.wait_share, fair=_FAIR_WAIT, bad=_BAD_WAIT)
    loss, norm = step.get("loss"), step.get("gradient_norm")
    steps = _rates(view.recent, lambda _: 1.0, room)
    tokens = _rates(view.recent, lambda point: point.num_tokens, room)
    # Drawn against a whole, so that a little wait looks like little.
    waiting = curve([*resampled(tuple(waits), room), 1.0], room + 1, wait_style, glyphs, from_zero=True)
    rows = [
        ("steps/s", number(view.steps_per_s), curve(steps, room, "#539bf5", glyphs, from_zero=True)),
        ("data wait", percent(view.wait_share), waiting[:-1]),
        (
            "loss",
            "-" if loss is None else f"{loss:.4g}",
            curve(view.losses, room, "#986ee2", glyphs, from_zero=False),
        ),
        ("tokens/s", number(view.tokens_per_s), curve(tokens, room, "#2b9a8f", glyphs, from_zero=True)),
        (
            "samples/s",
            number(view.samples_per_s),
            _while_they_fit(
                room,
                # What is wrong comes first, where not all has room.
                (f"skipped {step['num_skipped']}" if step.get("num_skipped") else "", "yellow"),
                (f"lr {step.get('learning_rate') or 0.0:.1e}", DIM),
                (f"norm {'-' if norm is None else number(norm)}", DIM),
            ),
        ),
    ]
    lines = [Text.assemble((f"{name:<10}", DIM), f"{value:>8}  ", drawn) for name, value, drawn in rows]
    span = f", last {duration(view.recent[-1].time_s - view.recent[0].time_s)}" if view.recent[1:] else ""
    return Section(
        title=f"speed{span}",
        rows=[Row(text=line, weight=-at) for at, line in enumerate(lines)],
        least=3,
    )


def _while_they_fit(width: int, *parts: tuple[str, str]) -> Text:
    """Texts with their styles beside each other, without those at the end that have no room."""
    line = Text()
    for text, style in parts:
        gap = "  " if line and text else ""
        if line.cell_len + len(gap) + len(text) > width:
            break
        line.append(gap).append(text, style=style)
    return line


def _rates(
    recent: Sequence[StepPoint], amount: Callable[[StepPoint], float], width: int
) -> tuple[float, ...]:
    """What was done a second, in at most so many stretches of equal numbers of steps."""
    amounts = resampled(tuple(amount(point) for point in recent[1:]), width)
    spans = resampled(tuple(max(1e-9, new.time_s - old.time_s) for old, new in pairwise(recent)), width)
    return tuple(done / span for done, span in zip(amounts, spans, strict=True))


def step_section(view: LiveView, width: int, glyphs: Glyphs) -> Section | None:
    """Where the time of a step went, as a mean over ranks."""
    interval = view.interval
    if interval is None or not interval.num_steps:
        return None
    per_step = _per_rank(interval) * interval.num_steps
    took = {name: interval.stage(name).seconds / per_step for name in STEP_COLOURS}
    # Checkpoints and evaluations lie between steps.
    total_s = max(sum(took.values()), (interval.wall_s or interval.step_s) / interval.num_steps) or 1.0
    parts = [(_STEP_LETTERS[name], one / total_s, STEP_COLOURS[name]) for name, one in took.items()]
    rows = [Row(text=stacked(parts, width, glyphs), weight=2.0)]
    shown = {name: one for name, one in took.items() if one or name in _ALWAYS}
    for name, one in shown.items():
        label = name.replace("_", " ") if glyphs.is_coloured else f"{_STEP_LETTERS[name]} {name}"
        line = share_line(label, seconds_text(one), one / total_s, STEP_COLOURS[name], width, glyphs)
        rows.append(Row(text=line, weight=one / total_s))
    rest_s = max(0.0, total_s - sum(took.values()))
    rest = share_line("between", seconds_text(rest_s), rest_s / total_s, DIM, width, glyphs)
    rows.append(Row(text=rest, weight=-1.0))
    warm_up = ", the first" if interval.is_warm_up else ""
    return Section(title=f"a step: {seconds_text(total_s)}{warm_up}", rows=rows, least=4)


def _per_rank(interval: Interval) -> int:
    return max(1, interval.world_size)


def loader_section(view: LiveView, width: int, glyphs: Glyphs) -> Section | None:
    """What the threads of a rank's loader did, as a mean over ranks: how many were at it at once."""
    interval = view.interval
    if interval is None or not interval.wall_s:
        return None
    span = interval.wall_s * _per_rank(interval)
    busy = {
        name: interval.stage(name).seconds / span
        for name in STAGES
        if name in _MAKE_COLOURS or (name in {"index", "plan"} and interval.stage(name).seconds)
    }
    busy = {name: at_once for name, at_once in busy.items() if at_once or name in {"read", "decode"}}
    # Threads that wait for a while are counted when they go on, those of a loader that is done never.
    num_busy = sum(busy.values())
    idle = max(interval.stage("idle").seconds / span, _setting(interval, "loader.num_threads") - num_busy)
    total = (num_busy + idle) or 1.0
    name_width = max(12, *map(len, busy))
    rows = []
    for name, at_once in busy.items():
        colour, shown = _MAKE_COLOURS.get(name, ""), name.replace("_", " ")
        line = share_line(
            shown, number(at_once), at_once / total, colour, width, glyphs, name_width=name_width
        )
        rows.append(Row(text=line, weight=at_once))
    line = share_line("idle", number(idle), idle / total, DIM, width, glyphs, name_width=name_width)
    rows.append(Row(text=line, weight=1e9))
    return Section(
        title=f"loader: {number(num_busy)} of {number(num_busy + idle)} threads busy", rows=rows, least=3
    )


def _setting(interval: Interval, name: str) -> float:
    """A setting that is a number; 0 where the run has none."""
    value = interval.settings.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def queue_section(view: LiveView, width: int, glyphs: Glyphs) -> Section | None:
    """What is ready when the loop asks, and how often nothing was."""
    interval = view.interval
    if interval is None:
        return None
    rows = []
    ready = interval.gauges.get("ready_batches")
    if ready is not None:
        style = "red" if ready.mean < 0.5 else "green"
        text = _gauge(
            "ready batches", number(ready.mean), ready.mean / max(1.0, ready.most), style, width, glyphs
        )
        rows.append(Row(text=text, weight=5.0))
    starved = interval.stage("starved")
    if ready is not None:
        often = starved.num_items / max(1, interval.num_steps) / _per_rank(interval)
        share = min(1.0, starved.seconds / _per_rank(interval) / (interval.wall_s or 1.0))
        style = level_style(share, fair=_FAIR_WAIT, bad=_BAD_WAIT)
        text = _gauge("starved", f"{number(often)}/step", share, style, width, glyphs)
        rows.append(Row(text=text, weight=4.0))
    buffered = interval.gauges.get("buffered_bytes")
    bound = _setting(interval, "loader.prefetch_bytes")
    if buffered is not None:
        share = buffered.mean / (bound or max(1.0, buffered.most))
        text = _gauge("buffered", bytes_text(buffered.mean), share, "#539bf5", width, glyphs)
        rows.append(Row(text=text, weight=3.0))
    threads = interval.gauges.get("threads_busy")
    if threads is not None:
        share = threads.mean / max(1.0, threads.most)
        rows.append(
            Row(
                text=_gauge("threads busy", number(threads.mean), share, "#57ab5a", width, glyphs), weight=2.0
            )
        )
    fetching = interval.gauges.get("fetching_bytes")
    if fetching is not None:
        share = fetching.mean / max(1.0, fetching.most)
        rows.append(
            Row(
                text=_gauge("on the way", bytes_text(fetching.mean), share, "#986ee2", width, glyphs),
                weight=1.0,
            )
        )
    per_step = _per_rank(interval) * max(1, interval.num_steps)
    said = [
        f"{name} {seconds_text(interval.stage(name).seconds / per_step)}"
        for name in ("tokenize", "pin", "copy")
        if interval.stage(name).seconds
    ]
    if said:
        rows.append(Row(text=Text.assemble((f"{'to the model':<13}", DIM), ", ".join(said))))
    return Section(title="queues, a rank", rows=rows) if rows else None


def _gauge(name: str, value: str, share: float, style: str, width: int, glyphs: Glyphs) -> Text:
    head = Text.assemble((f"{name:<13}", DIM), f"{value:>11} ")
    return Text.assemble(head, bar(share, max(3, width - head.cell_len), style, glyphs))


def tier_section(view: LiveView, width: int, glyphs: Glyphs) -> Section | None:
    """Where the bytes came from, over all ranks."""
    interval = view.interval
    if interval is None or not interval.wall_s:
        return None
    origin = "disk" if interval.tier == "local" else interval.tier
    found = [
        (name, interval.stage(stage).num_bytes, style)
        for stage, name, style in (
            ("cache_ram", "from memory", "#57ab5a"),
            ("cache_disk", "from disk", "#d9a13b"),
            ("cache_origin", f"from {origin}", "#e5534b"),
        )
        if stage in interval.stages
    ]
    if not found:
        found = [(f"from {origin}", interval.stage("read").num_bytes, "#539bf5")]
    total = sum(num_bytes for _, num_bytes, _ in found) or 1
    rows = [
        Row(
            text=share_line(
                name, f"{bytes_text(num_bytes / interval.wall_s)}/s", num_bytes / total, style, width, glyphs
            ),
            weight=num_bytes,
        )
        for name, num_bytes, style in found
    ]
    speed = bytes_text(interval.stage("read").num_bytes / interval.wall_s)
    return Section(title=f"tiers: {speed}/s read", rows=rows)
