"""Sections about what a run holds and has done: memory, goodput, tuner, checkpoints, evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from pipelines.top_draw import (
    DIM,
    Glyphs,
    bar,
    bytes_text,
    curve,
    duration,
    fitting,
    level_style,
    number,
    percent,
    seconds_text,
    stacked,
)
from pipelines.top_sections import Row, Section
from shardflow.monitoring.live import LiveView
from shardflow.telemetry import Move

__all__ = ["event_section", "goodput_section", "memory_section", "tuner_section"]

_NAME_WIDTH: Final = 13
_PARTS: Final = (
    ("useful", "useful_s", "#57ab5a"),
    ("wait", "data_wait_s", "#e5534b"),
    ("checkpoints", "checkpoint_s", "#e275ad"),
    ("evaluation", "evaluation_s", "#a5815c"),
    ("restarts", "restart_s", "#d9a13b"),
    ("lost", "lost_s", "#986ee2"),
)


def memory_section(view: LiveView, width: int, glyphs: Glyphs) -> Section | None:
    """Memory and processors of a node, and what the ranks hold."""
    interval = view.interval
    if interval is None:
        return None
    rows = []
    if interval.memory_bytes:
        used = interval.memory_bytes - interval.available_bytes
        share = used / interval.memory_bytes
        value = f"{bytes_text(used)} of {bytes_text(interval.memory_bytes)}"
        style = level_style(share, fair=0.8, bad=0.92)
        rows.append(Row(text=_measure("node memory", value, share, style, width, glyphs), weight=9.0))
    if interval.ranks and interval.wall_s:
        # Of more than 64 ranks only the slow ones are told apart, so processors are those of a mean rank.
        each = sum(rank.cpu_s for rank in interval.ranks) / len(interval.ranks) / interval.wall_s
        used_cpus = each * interval.ranks_per_node
        share = used_cpus / max(1, interval.num_cpus)
        value = f"{number(used_cpus)} of {interval.num_cpus}"
        style = level_style(share, fair=0.9, bad=0.98)
        rows.append(Row(text=_measure("processors", value, share, style, width, glyphs), weight=8.0))
        most = max(interval.ranks, key=lambda rank: rank.pss_bytes)
        late = max(rank.runnable_s for rank in interval.ranks) / interval.wall_s
        gil = max(interval.ranks, key=lambda rank: rank.gil_wait_share)
        rows.append(_words("largest rank", f"{bytes_text(most.pss_bytes)} (rank {most.rank})", weight=6.0))
        waiting, python = f"{number(late)} threads for a processor", percent(gil.gil_wait_share)
        rows += _one_or_two(
            ("waiting", f"{waiting}, GIL {python}"),
            (("CPU waits", f"{number(late)} threads"), ("GIL waits", python)),
            width,
            weight=7.0,
        )
        device = max(rank.device_bytes for rank in interval.ranks)
        pinned = max(rank.pinned_bytes for rank in interval.ranks)
        if device:
            rows += _one_or_two(
                ("device", f"{bytes_text(device)}, pinned {bytes_text(pinned)}"),
                (("device", bytes_text(device)), ("pinned", bytes_text(pinned))),
                width,
                weight=5.0,
            )
        ram = sum(rank.cache_ram_bytes for rank in interval.ranks)
        disk = max(rank.cache_disk_bytes for rank in interval.ranks)
        if ram or disk:
            rows += _one_or_two(
                ("cache", f"{bytes_text(ram)} in memory, {bytes_text(disk)} on disk"),
                (("cache", f"{bytes_text(ram)} in memory"), ("", f"{bytes_text(disk)} on disk")),
                width,
                weight=4.0,
            )
    return Section(title="memory and processors", rows=rows) if rows else None


def _measure(name: str, value: str, share: float, style: str, width: int, glyphs: Glyphs) -> Text:
    head = Text.assemble((f"{name:<{_NAME_WIDTH}}", DIM), f"{value:>18} ")
    return Text.assemble(head, bar(share, max(3, width - head.cell_len), style, glyphs))


def _words(name: str, text: str, *, weight: float, style: str = "") -> Row:
    return Row(text=Text.assemble((f"{name:<{_NAME_WIDTH}}", DIM), (text, style)), weight=weight)


def _one_or_two(
    whole: tuple[str, str], halves: Sequence[tuple[str, str]], width: int, *, weight: float
) -> list[Row]:
    """A line of words, or two where it does not fit into one."""
    if _NAME_WIDTH + len(whole[1]) <= width:
        return [_words(*whole, weight=weight)]
    return [_words(*half, weight=weight - 0.1 * at) for at, half in enumerate(halves)]


def goodput_section(view: LiveView, width: int, glyphs: Glyphs) -> Section | None:
    """Where the time of all starts went."""
    found = view.goodput
    if found is None or not found.wall_s:
        return None
    values = found.to_json()
    shares = [(name, values[key] / found.wall_s, style) for name, key, style in _PARTS]
    drawn = stacked([(name[0], share, style) for name, share, style in shares], width, glyphs)
    rows = [Row(text=drawn, weight=9.0)]
    line = Text()
    for name, share, style in shares:
        if share < 0.0005:
            continue
        said = Text.assemble((f"{glyphs.dot} ", style), f"{name} {percent(share)}  ")
        if line.cell_len + said.cell_len - 2 > width:
            rows.append(Row(text=line, weight=-len(rows)))
            line = Text()
        line.append_text(said)
    rows.append(Row(text=line, weight=-len(rows)))
    starts = f"{found.num_starts} starts" if found.num_starts > 1 else ""
    again = f"{found.num_lost_steps:,} steps again" if found.num_lost_steps else ""
    restarts = ", ".join(filter(None, (starts, again)))
    useful = f"{percent(found.useful_share)} useful of {duration(found.wall_s)}"
    title = fitting(width - 2, f"{useful}, {restarts}" if restarts else useful, useful)
    if restarts and title == useful:
        rows.append(Row(text=Text(restarts, style=DIM), weight=0.5))
    return Section(title=title, rows=rows)


def tuner_section(view: LiveView, width: int, glyphs: Glyphs) -> Section | None:
    """The tuner's last moves and the settings as they stand."""
    moves = [_move(move, width, glyphs) for move in view.moves[-4:]]
    rows = [Row(text=text, weight=100.0 + at) for at, text in enumerate(moves)]
    rows.reverse()
    settings = view.interval.settings if view.interval is not None else {}
    for at, (name, value) in enumerate(settings.items()):
        shown = bytes_text(float(value)) if name.endswith("_bytes") else str(value)
        rows.append(_words(f"{name:<27}", shown, weight=-at))
    return Section(title="settings" if not view.moves else "tuner and settings", rows=rows) if rows else None


def _move(move: Move, width: int, glyphs: Glyphs) -> Text:
    style = {"keep": "green", "revert": "yellow", "settle": "green"}.get(move.kind, "#539bf5")
    old, new = _amount(move.setting, move.old), _amount(move.setting, move.new)
    change = f"{move.setting} {old} {glyphs.arrow} {new}" if move.setting else move.text
    rate = ""
    if move.rate_before and move.rate_after:
        rate = f" ({move.rate_after / move.rate_before - 1:+.1%})"
    step = f"  step {move.global_step + 1:,}"
    name = move.setting.rpartition(".")[2]
    short = f"{name} {old} {glyphs.arrow} {new}" if move.setting else change
    shortest = f"{name} {glyphs.arrow} {new}" if move.setting else change
    ends = [(change, rate + step), (change, rate), (short, rate), (short, ""), (shortest, "")]
    room = width - 8
    said, end = next((one for one in ends if len(one[0]) + len(one[1]) <= room), ends[-1])
    return Text.assemble((f"{move.kind:<8}", style), said, (end, DIM))


def _amount(setting: str, value: str) -> str:
    """A value of a setting for people."""
    return bytes_text(int(value)) if setting.endswith("_bytes") and value.isdigit() else value


def event_section(view: LiveView, width: int, glyphs: Glyphs) -> Section | None:
    """The newest checkpoint and the newest evaluation."""
    rows = []
    if view.checkpoint is not None:
        line = view.checkpoint
        ago = duration(max(0.0, view.now_s - float(line["time_s"])))
        done, size = f"step {line['global_step']:,}", bytes_text(line["num_bytes"])
        stall = f"stall {seconds_text(line['stall_s'])}"
        first = fitting(width - _NAME_WIDTH, f"{done}, {ago} ago", f"{done}, {ago}", f"{ago} ago")
        rows += _one_or_two(
            ("checkpoint", f"{done}, {ago} ago, {stall}, {size}"),
            (("checkpoint", first), ("", f"{stall}, {size}")),
            width,
            weight=1.0,
        )
    if view.evaluation is not None:
        line = view.evaluation
        loss = line.get("loss")
        head = f"step {line['global_step']:,}, loss {'-' if loss is None else f'{loss:.4g}'}"
        room = width - _NAME_WIDTH - len(head) - 2
        drawn = curve(view.evaluations, room, "#986ee2", glyphs, from_zero=False) if room > 0 else Text()
        said = Text.assemble((f"{'evaluation':<{_NAME_WIDTH}}", DIM), head, "  " if drawn else "", drawn)
        rows.append(Row(text=said))
    return Section(title="checkpoint and evaluation", rows=rows) if rows else None
