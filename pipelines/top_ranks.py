"""The table of ranks of a live view: all of them, or of many those that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final

from rich.text import Text

from pipelines.top_draw import (
    DIM,
    Glyphs,
    bytes_text,
    fitted,
    fitting,
    number,
    percent,
    seconds_text,
    stacked,
)
from pipelines.top_panels import STEP_COLOURS
from pipelines.top_sections import Row, Section
from shardflow.monitoring.live import LiveView
from shardflow.telemetry import Interval, RankNumbers

__all__ = ["rank_section"]

_HOST_WIDTH: Final = 16
_TWO_TABLES: Final = 150
_GAP: Final = 3
_FEW: Final = 4
_BEHIND: Final = 0.1
_FAR_BEHIND: Final = 0.3
_HEAT: Final = ((0.05, ""), (0.15, "#d9a13b"), (0.35, "#e0823d"))
_HOTTEST: Final = "#e5534b"


def rank_section(view: LiveView, width: int, glyphs: Glyphs, *, most_rows: int) -> Section | None:
    """A line a rank with what it did in a step; of more than fit those with least slack.

    Args:
        view: What is known.
        width: Of the lines.
        glyphs: What they are drawn with.
        most_rows: Lines that there is room for, without the title.
    """
    interval = view.interval
    if interval is None or not interval.ranks or not interval.num_steps:
        return None
    # Data and compute are a rank's own; the exchange is its wait for others.
    slowest_first = sorted(interval.ranks, key=_own_s, reverse=True)
    num_tables = 2 if width >= _TWO_TABLES and len(slowest_first) > _FEW else 1
    each = (width - _GAP * (num_tables - 1)) // num_tables
    room = max(1, most_rows - 2) * num_tables
    shown = slowest_first[:room]
    is_all = len(shown) == interval.world_size
    if is_all:
        shown = sorted(shown, key=lambda rank: rank.rank)
    others = _Others(
        own_s=median(map(_own_s, interval.ranks)),
        compute_s=median(rank.compute_s for rank in interval.ranks),
        data_wait_s=median(rank.data_wait_s for rank in interval.ranks),
        exchange_s=median(rank.exchange_s for rank in interval.ranks),
        longest_s=max(
            rank.data_wait_s + rank.compute_s + rank.exchange_s + rank.optimizer_s for rank in shown
        ),
    )
    lines = [_head(each, glyphs), *(_line(rank, interval, others, each, glyphs) for rank in shown)]
    if num_tables > 1:
        half = -(-len(shown) // 2)
        left, right = lines[: half + 1], [lines[0], *lines[half + 1 :]]
        right += [Text(" " * each)] * (len(left) - len(right))
        lines = [Text(" " * _GAP).join(pair) for pair in zip(left, right, strict=True)]
    rows = [Row(text=line, weight=-at) for at, line in enumerate(lines)]
    rows.append(Row(text=_over_all(interval, width, glyphs), weight=-1.5))
    count = f"{interval.world_size:,}"
    num_nodes = max(1, -(-interval.world_size // max(1, interval.ranks_per_node)))
    nodes = f"{num_nodes:,} node{'' if num_nodes == 1 else 's'}"
    title = f"ranks: {count} on {nodes}" if is_all else f"ranks: {len(shown)} slowest of {count} on {nodes}"
    return Section(title=title, rows=rows, least=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Others:
    """What a rank is compared with: medians, and the longest bar."""

    own_s: float
    compute_s: float
    data_wait_s: float
    exchange_s: float
    longest_s: float


def _own_s(rank: RankNumbers) -> float:
    return rank.compute_s + rank.data_wait_s


def _columns(width: int) -> tuple[bool, bool]:
    """Whether there is room for processors and memory, and for the interpreter's share."""
    return width >= 90, width >= 110


def _head(width: int, glyphs: Glyphs) -> Text:
    has_memory, has_gil = _columns(width)
    text = f"{'rank':>5} {'host':<{_HOST_WIDTH}} {'compute':>8} {'data wait':>9} {'exchange':>8}"
    text += f" {'cpus':>5} {'memory':>8}" if has_memory else ""
    text += f" {'GIL':>7}" if has_gil else ""
    return fitted(Text(f"{text}  behind", style=DIM), width, glyphs)


def _line(rank: RankNumbers, interval: Interval, others: _Others, width: int, glyphs: Glyphs) -> Text:
    has_memory, has_gil = _columns(width)
    text = Text.assemble(f"{rank.rank:>5} ", fitted(Text(rank.host or "-"), _HOST_WIDTH, glyphs))
    for took_s, typical_s, cells in (
        (rank.compute_s, others.compute_s, 8),
        (rank.data_wait_s, others.data_wait_s, 9),
        (rank.exchange_s, others.exchange_s, 8),
    ):
        heat = _heat(took_s, typical_s, others.longest_s)
        text.append(f" {seconds_text(took_s / interval.num_steps):>{cells}}", style=heat)
    if has_memory:
        text.append(f" {number(rank.cpu_s / interval.wall_s) if interval.wall_s else '-':>5}")
        text.append(f" {bytes_text(rank.pss_bytes):>8}")
    if has_gil:
        text.append(
            f" {percent(rank.gil_wait_share):>7}", style="yellow" if rank.gil_wait_share > 0.1 else ""
        )
    behind = _own_s(rank) / others.own_s - 1 if others.own_s else 0.0
    style = "red" if behind > _FAR_BEHIND else "yellow" if behind > _BEHIND else DIM
    text.append(f"  {behind:>+6.0%} ", style=style)
    room, longest = width - text.cell_len, others.longest_s
    if room >= 6:
        parts = (
            (
                ("f", rank.compute_s / longest, STEP_COLOURS["forward"]),
                ("w", rank.data_wait_s / longest, STEP_COLOURS["data_wait"]),
                ("x", rank.exchange_s / longest, STEP_COLOURS["exchange"]),
                ("o", rank.optimizer_s / longest, STEP_COLOURS["optimizer"]),
            )
            if longest
            else ()
        )
        text.append_text(stacked(parts, room, glyphs))
    return fitted(text, width, glyphs)


def _heat(seconds: float, typical: float, longest: float) -> str:
    """A colour for how much more than others a rank spent, against a whole step."""
    excess = (seconds - typical) / longest if longest else 0.0
    return next((style for limit, style in _HEAT if excess < limit), _HOTTEST)


def _over_all(interval: Interval, width: int, glyphs: Glyphs) -> Text:
    """Over all ranks, also those without a line: quantiles, or of very many the mean and who has most."""
    said: list[str] = []
    found: list[tuple[str, list[str]]] = []
    texts: tuple[str, ...]
    per_rank = max(1, interval.world_size) * interval.num_steps
    if _FEW < len(interval.ranks) == interval.world_size:
        for name, values in (
            ("compute", [rank.compute_s for rank in interval.ranks]),
            ("data wait", [rank.data_wait_s for rank in interval.ranks]),
            ("exchange", [rank.exchange_s for rank in interval.ranks]),
        ):
            tenths = quantiles((value / interval.num_steps for value in values), n=10, method="inclusive")
            found.append((name, [seconds_text(tenths[at]) for at in (0, 4, 8)]))
        texts = (
            " p10, median, p90: " + "; ".join(f"{name} {' '.join(three)}" for name, three in found),
            " p10, median, p90: " + "; ".join(f"{name} {_unit_once(three)}" for name, three in found),
            " median, p90: " + "; ".join(f"{name} {_unit_once(three[1:])}" for name, three in found),
            " median: " + "; ".join(f"{name} {three[1]}" for name, three in found),
        )
    else:
        for name, stages in _OVER_ALL:
            mean = sum(interval.stage(stage).seconds for stage in stages) / per_rank
            most = interval.stage(stages[-1])
            said.append(f"{name} {seconds_text(mean)}")
            if interval.world_size > 1 and most.most_seconds > 1.2 * most.seconds / interval.world_size > 0:
                said[-1] += f", most rank {most.most_rank}"
        head = f" mean of {interval.world_size:,}: "
        texts = (head + "; ".join(said), head + "; ".join(said[:-1]))
    return fitted(Text(fitting(width, *texts), style=DIM), width, glyphs)


def _unit_once(times: Sequence[str]) -> str:
    """Times with their unit behind the last one, where all have the same."""
    units = {text.rpartition(" ")[2] for text in times}
    return " ".join(times) if len(units) > 1 else " ".join([text.split()[0] for text in times] + [*units])


_OVER_ALL: Final[Sequence[tuple[str, Sequence[str]]]] = (
    ("compute", ("forward", "backward")),
    ("data wait", ("data_wait",)),
    ("exchange", ("exchange",)),
    ("optimizer", ("optimizer",)),
)
