"""``shardflow top``: a live view of a training run in the terminal."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Final, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardflow.cli.common import add_run
from shardflow.errors import ConfigError
from shardflow.logs import counted
from shardflow.monitoring.history import damage_note, refuse_dataset
from shardflow.monitoring.live import LiveRun, LiveView, RunState
from shardflow.monitoring.units import duration, show
from shardflow.telemetry import STAGES, Interval, RankNumbers
from shardflow.telemetry.intervals import setting_text

DESCRIPTION = """\
Shows a training run while it is running: rate of steps and wait for data, parts of a step, what the loader's
threads do, queues, tiers, ranks, memory, the verdict with its advice, the tuner, goodput. Reads metrics.jsonl
in the run folder and nothing else, so it works from any machine that sees the folder, before the first step,
and on a run that has ended. Memory does not grow with the length of a run. Press q to leave.

Without a terminal, or with --once, prints one picture.
"""
EXAMPLES = """\
examples:
  shardflow top run
  shardflow top run --once
"""
_LOG_WIDTH: Final = 100
_TWO_COLUMNS: Final = 78
_GAP: Final = 2
_NUM_RANKS: Final = 16
"""Ranks that are listed where the height is not limited."""
_LEAST_RANK_LINES: Final = 6
_REFRESH_S: Final = 0.5
_SIGNALED: Final = 128

_DIM: Final = "#8b949e"
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_SIGNS: Final = f"{_SPARKS}━─●→·…\u2013µ"
_ASCII: Final = str.maketrans(_SIGNS, "_.-=+*#@=-*>-~-u")
_STATES: Final[dict[RunState, str]] = {
    "waiting": _DIM,
    "starting": "#539bf5",
    "running": "green",
    "silent": "red",
    "finished": "green",
    "stopped": "yellow",
}
_COLORS: Final = (
    *("#e5534b", "#57ab5a", "#2b9a8f", "#d9a13b", "#539bf5", "#986ee2", "#e275ad", "#a5815c", _DIM),
    "#c69026",
)
# In the order of the colors.
_STEP: Final = (
    *("data_wait", "forward", "backward", "exchange", "optimizer", "agree", "checkpoint", "evaluate"),
)
_LOADER: Final = (
    *("user_transform", "decode", "transform", "collate", "read", "check", "tokens", "index", "plan"),
    "service",
)
_GOODPUT: Final = ("data_wait", "useful", "lost", "restart", "evaluation", "checkpoint")
_ALWAYS: Final = ("data_wait", "forward", "backward", "exchange", "optimizer", "read", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow top``."""
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="print one picture and exit")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    folder: Path = arguments.folder
    refuse_dataset(folder)
    console = Console(highlight=False)
    if not (arguments.once or not console.is_terminal or console.is_dumb_terminal):
        _follow(console, LiveRun(folder))
        return 0
    if not folder.is_dir():
        raise ConfigError("RUN must be the folder of a training run, got no folder; correct it.")
    width = console.width if console.is_terminal or os.environ.get("COLUMNS") else _LOG_WIDTH
    for line in _encodable(frame(LiveRun(folder).follow(time.time()), width=width), console):
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
    return 0


def _follow(console: Console, run: LiveRun) -> None:
    """Draw the run twice a second until q is pressed."""
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(Text("reading metrics.jsonl", style=_DIM), refresh=True)  # seconds, after days of steps
        while True:
            view = run.follow(time.time())
            lines = frame(view, width=console.width, height=console.height, footer="q leave")
            live.update(Text("\n").join(_encodable(lines, console)), refresh=True)
            if pressed(_REFRESH_S):
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read keys without echo; yields a function that waits for q up to a timeout and returns whether it came.

    The terminal is restored afterwards, also when SIGTERM ends the process.
    """

    def exit_by(number: int, _: FrameType | None) -> None:
        raise SystemExit(_SIGNALED + number)

    former = signal.signal(signal.SIGTERM, exit_by)
    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else None
    mode = termios.tcgetattr(descriptor) if descriptor is not None else []

    def pressed(timeout_s: float) -> bool:
        if descriptor is None:
            time.sleep(timeout_s)
            return False
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return False
        keys = os.read(descriptor, 256)
        return not keys or b"q" in keys.lower()  # nothing to read: the terminal is gone

    try:
        if descriptor is not None:
            tty.setcbreak(descriptor, termios.TCSANOW)
        yield pressed
    finally:
        if descriptor is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
        signal.signal(signal.SIGTERM, former)


def _encodable(lines: Sequence[Text], console: Console) -> Sequence[Text]:
    """Replace bars, curves and dots with ASCII if the terminal cannot show them."""
    try:
        _SIGNS.encode(console.encoding)
    except (LookupError, UnicodeEncodeError):
        for line in lines:
            line.plain = line.plain.translate(_ASCII)
    return lines


class Row(NamedTuple):
    """A line of a section."""

    name: str
    value: str
    drawn: float | Sequence[float] | None = None
    """A share drawn as a bar, or values drawn as a curve."""
    style: str = ""


class Section(NamedTuple):
    """Rows under a title, the most important first."""

    title: str
    rows: list[Row]


def frame(view: LiveView, *, width: int, height: int | None = None, footer: str = "") -> list[Text]:
    """Draw a run.

    Args:
        view: The state of the run.
        width: Cells of each line.
        height: Exact number of lines; None for as many as needed.
        footer: The last line, such as the keys; empty for none.
    """
    lines = _header(view, width)
    room = None if height is None else height - len(lines) - bool(footer)
    if view.step is not None:
        lines += _body(view, width, room)
    if height is not None:
        lines = lines[: height - bool(footer)]
        lines += [Text()] * (height - bool(footer) - len(lines))
    if footer:
        lines.append(Text(footer, style=_DIM))
    return [_fitted(line, width) for line in lines]


def _fitted(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(max(0, width), overflow="ellipsis", pad=True)
    return line


def _header(view: LiveView, width: int) -> list[Text]:
    state = {
        "waiting": "waiting for the first line",
        "starting": f"starting for {duration(view.age_s)}",
        "running": f"running, last line {duration(view.age_s)} ago",
        "silent": f"nothing new for {duration(view.age_s)}: hung or killed",
    }.get(view.state, f"{view.state} {_clock(view.ended_s, view.now_s)}")
    head = Text.assemble((f"{view.name}  ", "bold #539bf5"), (f"● {state}", _STATES[view.state]))
    if view.num_starts > 1:
        head.append(f"  start {view.num_starts}", style="yellow")
    if view.interval is not None:
        head.append(f"  epoch {view.epoch} · {view.interval.world_size:,} ranks", style=_DIM)
    lines = [head]
    if not view.num_starts:
        return [*lines, Text("The run has not written metrics.jsonl yet.", style=_DIM)]
    done = f"step {view.num_done:,}"
    if view.num_steps:
        share = view.num_done / view.num_steps
        done += f" of {view.num_steps:,}  {show(share, 'share')}  "
        if view.left_s is not None:
            done += f"{duration(view.left_s)} left, {_clock(view.now_s + view.left_s, view.now_s)}  "
        lines.append(Text(done).append_text(_bar(share, width - len(done), "#57ab5a")))
    else:
        lines.append(Text(done))
    if view.num_damaged:
        lines.append(Text(damage_note(view.num_damaged), style="yellow"))
    if view.step is None:
        text = "No step is done yet: data, compilation and connections come first."
        return [*lines, Text(text, style=_DIM)]
    if view.interval is None:
        text = "Steps only: no interval is over yet, or [monitor] interval_s is 0."
        lines.append(Text(text, style=_DIM))
    return lines + _verdict(view, width)


def _clock(time_s: float, now_s: float) -> str:
    """Render a local time of day, with the date if it is another day."""
    then, now = (datetime.fromtimestamp(one).astimezone() for one in (time_s, now_s))
    return f"at {then:%H:%M:%S}" if then.date() == now.date() else f"on {then:%Y-%m-%d at %H:%M:%S}"


def _verdict(view: LiveView, width: int) -> list[Text]:
    """Draw the leading verdict with its first advice, and the titles of the others."""
    if not view.verdicts:
        return []
    first, *others = view.verdicts
    style = "green" if first.code == "compute-bound" else "bold yellow"
    since = f" (since step {view.verdict_since + 1:,})"
    texts = [(f"● {_clipped(first.text, 2 * width - len(since) - 16)}{since}", style)]
    if first.advice:
        gain = f" (estimate: {first.advice[0].gain:+.0%})" if first.advice[0].gain else ""
        texts.append((f"  → {first.advice[0].text}{gain}", ""))
    texts += [(f"  also: {other.text}", _DIM) for other in others]
    return [
        Text(line, style=style)
        for text, style in texts[:3]
        for line in textwrap.wrap(
            text, max(20, width), max_lines=2, placeholder=" …", subsequent_indent="    "
        )
    ]


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: max(0, most - 2)]} …"


def _body(view: LiveView, width: int, height: int | None) -> list[Text]:
    """Draw the sections in one or two columns, and the table of ranks below them."""
    made = [[one for make in makers if (one := make(view)).rows] for makers in _COLUMNS]
    columns = made if width >= _TWO_COLUMNS else [made[0] + made[1]]
    num_ranks = len(view.interval.ranks) if view.interval is not None else 0
    wanted = min(num_ranks, _NUM_RANKS) + 3 if num_ranks else 0
    if height is not None:
        for sections in columns:
            _shrink(sections, height - min(_LEAST_RANK_LINES, wanted))
    inner = (width - _GAP * (len(columns) - 1)) // len(columns)
    drawn = [[line for one in sections for line in _section(one, inner)] for sections in columns]
    lines = [
        Text(" " * _GAP).join([_fitted(part or Text(), inner) for part in row]) for row in zip_longest(*drawn)
    ]
    left = wanted if height is None else height - len(lines)
    return lines + (_ranks(view.interval, width, left) if view.interval is not None and num_ranks else [])


def _shrink(sections: list[Section], height: int) -> None:
    """Drop the last rows of the longest sections, then whole sections, until they fit."""
    while sections and sum(len(one.rows) + 1 for one in sections) > height:
        longest = max(sections, key=lambda one: len(one.rows))
        if len(longest.rows) > 1:
            longest.rows.pop()
        else:
            sections.pop()


def _section(section: Section, width: int) -> list[Text]:
    rule = "─" * max(0, width - len(section.title) - 1)
    lines = [Text.assemble((section.title, "bold"), " ", (rule, _DIM))]
    name_width = max(len(row.name) for row in section.rows) + 1
    value_width = max([0, *(len(row.value) for row in section.rows if row.drawn is not None)])
    for row in section.rows:
        line = Text.assemble((f"{row.name:<{name_width}}", _DIM))
        if row.drawn is None:
            line.append(row.value, style=row.style)
        else:
            line.append(f"{row.value:>{value_width}} ")
            draw = _bar if isinstance(row.drawn, float | int) else _curve
            line.append_text(draw(row.drawn, max(3, width - line.cell_len), row.style))  # type: ignore[arg-type]
        lines.append(line)
    return lines


def _bar(share: float, width: int, style: str) -> Text:
    full = round(min(1.0, max(0.0, share)) * max(0, width))
    return Text("━" * full, style=style).append("─" * (width - full), style=_DIM)


def _curve(values: Sequence[float], width: int, style: str) -> Text:
    """Draw a curve of one line, from zero to its largest value."""
    points = resampled(values, width)
    top = max(points, default=0.0) or 1.0
    return Text("".join(_SPARKS[round(one / top * (len(_SPARKS) - 1))] for one in points), style=style)


def resampled(values: Sequence[float], width: int) -> Sequence[float]:
    """Return at most ``width`` means of neighboring values."""
    if len(values) <= width:
        return values
    edges = [number * len(values) // width for number in range(width + 1)]
    return [sum(values[first:last]) / (last - first) for first, last in pairwise(edges)]


def _level(share: float, fair: float, bad: float) -> str:
    return "green" if share < fair else "yellow" if share < bad else "red"


def _share_row(name: str, value: str, share: float, place: int = -1) -> Row:
    """Make a row of a value, its share and a bar, in the color of its place."""
    return Row(name.replace("_", " "), f"{value:>9} {show(share, 'share'):>7}", share, _COLORS[place])


def _speed(view: LiveView) -> Section:
    step = view.step or {}
    points = view.recent
    spans = [max(1e-9, new["time_s"] - old["time_s"]) for old, new in pairwise(points)]

    def rates(key: str) -> list[float]:
        return [point[key] / span for point, span in zip(points[1:], spans, strict=True)]

    waits = [point["data_wait_s"] / point["step_s"] if point["step_s"] else 0.0 for point in points]
    losses = [loss - min(view.losses) for loss in view.losses]
    rows = [
        Row("steps/s", show(view.steps_per_s), [1.0 / span for span in spans], "#539bf5"),
        Row("data wait", show(view.wait_share, "share"), waits, _level(view.wait_share, 0.05, 0.2)),
        Row("loss", show(step.get("loss")), losses, "#986ee2"),
        Row("tokens/s", show(view.tokens_per_s), rates("num_tokens"), "#2b9a8f"),
        Row("samples/s", show(view.samples_per_s), rates("num_samples"), "#2b9a8f"),
    ]
    skipped = f"skipped {step['num_skipped']}  " if step.get("num_skipped") else ""
    rate, norm = show(step.get("learning_rate")), show(step.get("gradient_norm"))
    rows.append(Row("optimizer", f"{skipped}lr {rate}  norm {norm}", style="yellow" if skipped else ""))
    span_s = points[-1]["time_s"] - points[0]["time_s"] if points else 0.0
    return Section(f"speed, last {duration(span_s)}" if span_s else "speed", rows)


def _step(view: LiveView) -> Section:
    """Draw the parts of a step's time, as means over ranks."""
    interval = view.interval
    if interval is None or not interval.num_steps:
        return Section("", [])
    took = {name: interval.stage(name).seconds / (interval.num_steps * interval.world_size) for name in _STEP}
    # Checkpoints and evaluations happen between steps.
    total_s = max(sum(took.values()), (interval.wall_s or interval.step_s) / interval.num_steps) or 1.0
    took["between"] = max(0.0, total_s - sum(took.values()))
    rows = [
        _share_row(name, show(seconds, "s"), seconds / total_s, place)
        for place, (name, seconds) in enumerate(took.items())
        if seconds or name in _ALWAYS
    ]
    warm_up = ", the first" if interval.is_warm_up else ""
    return Section(f"a step: {show(total_s, 's')}{warm_up}", rows)


def _loader(view: LiveView) -> Section:
    """Draw the number of loader threads busy with each stage, as means over ranks."""
    interval = view.interval
    if interval is None or not interval.wall_s:
        return Section("", [])
    span = interval.wall_s * interval.world_size
    busy = {name: interval.stage(name).seconds / span for name in STAGES if name in _LOADER}
    num_busy = sum(busy.values())
    # Waiting threads are counted when they resume; those of a loader that is done never are.
    idle = max(interval.stage("idle").seconds / span, _setting(interval, "loader.num_threads") - num_busy)
    total = num_busy + idle or 1.0
    rows = [_share_row("idle", show(idle), idle / total)]
    rows += [
        _share_row(name, show(number), number / total, _LOADER.index(name))
        for name, number in busy.items()
        if number or name in _ALWAYS
    ]
    return Section(f"loader: {show(num_busy)} of {show(num_busy + idle)} threads busy", rows)


def _setting(interval: Interval, name: str) -> float:
    """Return a numeric setting; 0 if the run has none."""
    value = interval.settings.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _queues(view: LiveView) -> Section:
    """Draw the batches that were ready for the training loop, and how often none was."""
    interval = view.interval
    rows: list[Row] = []
    if interval is None:
        return Section("", rows)
    rank_steps = interval.world_size * max(1, interval.num_steps)
    if (ready := interval.gauges.get("ready_batches")) is not None:
        style = "red" if ready.mean < 0.5 else "green"
        rows.append(Row("ready batches", show(ready.mean), ready.mean / max(1.0, ready.most), style))
        starved = interval.stage("starved")
        share = min(1.0, starved.seconds / interval.world_size / (interval.wall_s or 1.0))
        often = f"{show(starved.num_items / rank_steps)}/step"
        rows.append(Row("starved", often, share, _level(share, 0.05, 0.2)))
    for gauge, name, unit, bound, style in (
        ("buffered_bytes", "buffered", "bytes", _setting(interval, "loader.prefetch_bytes"), "#539bf5"),
        ("threads_busy", "threads busy", "", 0.0, "#57ab5a"),
        ("fetching_bytes", "in flight", "bytes", 0.0, "#986ee2"),
    ):
        if (found := interval.gauges.get(gauge)) is not None:
            share = found.mean / (bound or max(1.0, found.most))
            rows.append(Row(name, show(found.mean, unit), share, style))
    rows += [
        Row(name, f"{show(seconds / rank_steps, 's')} a step")
        for name in ("tokenize", "pin", "copy")
        if (seconds := interval.stage(name).seconds)
    ]
    return Section("queues of a rank", rows)


def _tiers(view: LiveView) -> Section:
    """Draw the sources of the bytes, over all ranks."""
    interval = view.interval
    if interval is None or not interval.wall_s:
        return Section("", [])
    origin = "disk" if interval.tier == "local" else interval.tier
    tiers = (("cache_ram", "from memory"), ("cache_disk", "from disk"), ("cache_origin", f"from {origin}"))
    found = [one for one in tiers if one[0] in interval.stages] or [("read", f"from {origin}")]
    sizes = [interval.stage(stage).num_bytes for stage, _ in found]
    rows = [
        _share_row(name, show(size / interval.wall_s, "bytes/s"), size / (sum(sizes) or 1), 3 - place)
        for place, ((_, name), size) in enumerate(zip(found, sizes, strict=True))
    ]
    return Section(f"tiers: {show(interval.stage('read').num_bytes / interval.wall_s, 'bytes/s')} read", rows)


def _memory(view: LiveView) -> Section:
    interval = view.interval
    rows: list[Row] = []
    if interval is None:
        return Section("", rows)
    if interval.memory_bytes:
        used = interval.memory_bytes - interval.available_bytes
        share = used / interval.memory_bytes
        text = f"{show(used, 'bytes')} of {show(interval.memory_bytes, 'bytes')}"
        rows.append(Row("node memory", text, share, _level(share, 0.8, 0.92)))
    if interval.ranks and interval.wall_s:
        # Of many ranks only the slowest are listed: the node's load is estimated from their mean.
        mean = sum(rank.cpu_s for rank in interval.ranks) / len(interval.ranks) / interval.wall_s
        cpus = mean * interval.ranks_per_node
        share = cpus / interval.num_cpus
        rows.append(Row("CPUs", f"{show(cpus)} of {interval.num_cpus}", share, _level(share, 0.9, 0.98)))
        late = max(rank.runnable_s for rank in interval.ranks) / interval.wall_s
        gil = max(rank.gil_wait_share for rank in interval.ranks)
        rows.append(Row("waiting", f"{show(late)} threads for a CPU, GIL {show(gil, 'share')}"))
        largest = max(interval.ranks, key=lambda rank: rank.pss_bytes)
        rows.append(Row("largest rank", f"{show(largest.pss_bytes, 'bytes')} (rank {largest.rank})"))
        if device := max(rank.device_bytes for rank in interval.ranks):
            pinned = max(rank.pinned_bytes for rank in interval.ranks)
            rows.append(Row("device", f"{show(device, 'bytes')}, pinned {show(pinned, 'bytes')}"))
        ram = sum(rank.cache_ram_bytes for rank in interval.ranks)
        disk = max(rank.cache_disk_bytes for rank in interval.ranks)
        if ram or disk:
            rows.append(Row("cache", f"{show(ram, 'bytes')} RAM, {show(disk, 'bytes')} disk"))
    return Section("memory and CPUs", rows)


def _goodput(view: LiveView) -> Section:
    """Draw the parts of the time of all starts."""
    found = view.goodput
    if found is None or not found.wall_s:
        return Section("", [])
    values = found.to_json()
    rows = [
        _share_row(name, duration(values[f"{name}_s"]), values[f"{name}_s"] / found.wall_s, place)
        for place, name in enumerate(_GOODPUT)
        if values[f"{name}_s"] >= 0.0005 * found.wall_s
    ]
    again = f", {found.num_lost_steps:,} steps again" if found.num_lost_steps else ""
    starts = f", {found.num_starts} starts{again}" if found.num_starts > 1 else ""
    useful = show(found.useful_share, "share")
    return Section(f"{useful} useful of {duration(found.wall_s)}{starts}", rows)


def _tuner(view: LiveView) -> Section:
    rows = []
    for move in reversed(view.moves[-4:]):
        old, new = setting_text(move.setting, move.old), setting_text(move.setting, move.new)
        change = f"{move.setting.rpartition('.')[2]} {old} → {new}" if move.setting else move.text
        gain = (
            f" ({move.rate_after / move.rate_before - 1:+.1%})"
            if move.rate_before and move.rate_after
            else ""
        )
        style = {"keep": "green", "revert": "yellow", "settle": "green"}.get(move.kind, "#539bf5")
        rows.append(Row(move.kind, f"{change}{gain}, step {move.global_step + 1:,}", style=style))
    return Section("tuner", rows)


def _settings(view: LiveView) -> Section:
    settings = view.interval.settings if view.interval is not None else {}
    rows = [Row(name, setting_text(name, str(value))) for name, value in settings.items()]
    return Section("settings", rows)


def _events(view: LiveView) -> Section:
    """Draw the newest checkpoint and the newest evaluation."""
    rows = []
    if (line := view.checkpoint) is not None:
        ago = duration(max(0.0, view.now_s - float(line["time_s"])))
        stall = show(line["stall_s"], "s")
        rows.append(Row("checkpoint", f"step {line['global_step']:,}, {ago} ago, stall {stall}"))
    if (line := view.evaluation) is not None:
        rows.append(Row("evaluation", f"step {line['global_step']:,}, loss {show(line.get('loss'))}"))
    return Section("checkpoint and evaluation", rows)


_COLUMNS: Final[Sequence[Sequence[Callable[[LiveView], Section]]]] = (
    (_speed, _step, _goodput, _tuner, _settings),
    (_loader, _queues, _tiers, _memory, _events),
)


def _ranks(interval: Interval, width: int, height: int) -> list[Text]:
    """Draw a line for each rank, or for the slowest ones if they do not all fit."""
    if not interval.num_steps or height < 4:
        return []
    # Data and compute are a rank's own; in the exchange it waits for others.
    shown = sorted(interval.ranks, key=_own_s, reverse=True)[: height - 3]
    is_all = len(shown) == interval.world_size
    shown = sorted(shown, key=lambda rank: rank.rank) if is_all else shown
    nodes = -(-interval.world_size // interval.ranks_per_node)
    where = f"{interval.world_size:,} on {counted(nodes, 'node')}"
    title = f"ranks: {where}" if is_all else f"ranks: {len(shown)} slowest of {where}"
    head = f"{'rank':>5} {'host':<16} {'compute':>8} {'data wait':>9} {'exchange':>8} {'behind':>7}"
    head += f" {'CPUs':>6} {'memory':>8} {'GIL':>7}"
    typical = {field: median(getattr(rank, field) for rank in interval.ranks) for field in _RANK_FIELDS}
    typical_s = median(map(_own_s, interval.ranks))
    longest_s = max(map(_own_s, shown)) or 1.0
    lines = [_section(Section(title, [Row("", "")]), width)[0], Text(head, style=_DIM)]
    for rank in shown:
        line = Text(f"{rank.rank:>5} {rank.host[:16]:<16}")
        for field, cells in _RANK_FIELDS.items():
            seconds = getattr(rank, field)
            # A color for how much longer than others it took, relative to a whole step.
            style = _level((seconds - typical[field]) / longest_s, 0.05, 0.35).replace("green", "")
            line.append(f" {show(seconds / interval.num_steps, 's'):>{cells}}", style=style)
        behind = _own_s(rank) / typical_s - 1 if typical_s else 0.0
        line.append(f" {behind:>+7.0%}", style=_level(behind, 0.1, 0.3).replace("green", _DIM))
        cpus = show(rank.cpu_s / interval.wall_s if interval.wall_s else None)
        line.append(f" {cpus:>6} {show(rank.pss_bytes, 'bytes'):>8} {show(rank.gil_wait_share, 'share'):>7}")
        lines.append(line)
    return [*lines, Text(_over_all(interval), style=_DIM)]


_RANK_FIELDS: Final = {"compute_s": 8, "data_wait_s": 9, "exchange_s": 8}


def _own_s(rank: RankNumbers) -> float:
    return rank.compute_s + rank.data_wait_s


def _over_all(interval: Interval) -> str:
    """Return means over all ranks, also those without a line, and the rank with most."""
    said = []
    for stage in ("forward", "backward", "data_wait", "exchange"):
        found = interval.stage(stage)
        mean = found.seconds / interval.world_size
        text = f"{stage.replace('_', ' ')} {show(mean / interval.num_steps, 's')}"
        said.append(
            text + (f" (most: rank {found.most_rank})" if found.most_seconds > 1.2 * mean > 0 else "")
        )
    return f"mean of {interval.world_size:,}: {', '.join(said)}"
