"""Ranks over time: a map of who computed, waited for data, and waited for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from shardflow.monitoring.run_page.columns import Stretch
from shardflow.monitoring.run_page.scales import BY_STEP
from shardflow.monitoring.run_page.svg import LEFT, TOP, WIDTH, X_UNITS, frame, x_axis

__all__ = ["HEAT_LEVELS", "HeatMap", "draw_heat", "heat_json", "heat_maps", "shown_ranks"]

HEAT_LEVELS: Final = 10
"""Colours of a map; the style sheet has one class of each."""
_MOST_ROWS: Final = 32
_TICKS_HEIGHT: Final = 22
_PARTS: Final = (
    ("compute", "Computing", "compute_s"),
    ("wait", "Waiting for data", "data_wait_s"),
    ("exchange", "Waiting for gradients of others", "exchange_s"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """Shares of the steps' time, rank by stretch; None where a rank was not among those that were written."""

    key: str
    title: str
    ranks: Sequence[int]
    names: Sequence[str]
    stretches: Sequence[Stretch]
    shares: Sequence[Sequence[float | None]]
    """By rank, by stretch; 0 to 1."""
    most: float
    """The largest share, at least one percent: the strongest colour."""


def shown_ranks(stretches: Sequence[Stretch]) -> list[int]:
    """Return the ranks that get a row: all of up to 32, else those that computed and waited for data most."""
    shares: dict[int, list[float]] = {}
    for row in stretches:
        for rank, sums in row.ranks.items():
            if sums.step_s:
                shares.setdefault(rank, []).append((sums.compute_s + sums.data_wait_s) / sums.step_s)
    if len(shares) <= _MOST_ROWS:
        return sorted(shares)
    # One that is listed in every stretch stands before one that was slow once.
    worst = sorted(shares, key=lambda rank: (-sum(shares[rank]), rank))
    return worst[:_MOST_ROWS]


def heat_maps(stretches: Sequence[Stretch]) -> list[HeatMap]:
    """Make the maps of a run; none without numbers of ranks."""
    ranks = shown_ranks(stretches)
    hosts = {rank: sums.host for row in stretches for rank, sums in row.ranks.items()}
    names = [f"rank {rank}" + (f" \u00b7 {hosts[rank]}" if hosts.get(rank) else "") for rank in ranks]
    return [_heat_map(key, title, field, ranks, names, stretches) for key, title, field in _PARTS if ranks]


def _heat_map(
    key: str, title: str, field: str, ranks: Sequence[int], names: Sequence[str], stretches: Sequence[Stretch]
) -> HeatMap:
    shares = [[_share(row, rank, field) for row in stretches] for rank in ranks]
    most = max([0.01, *(share for row in shares for share in row if share is not None)])
    return HeatMap(
        key=key, title=title, ranks=ranks, names=names, stretches=stretches, shares=shares, most=most
    )


def _share(row: Stretch, rank: int, field: str) -> float | None:
    sums = row.ranks.get(rank)
    if sums is None or not sums.step_s:
        return None
    return float(min(1.0, getattr(sums, field) / sums.step_s))


def draw_heat(heat: HeatMap, *, by: str, end: float) -> str:
    """Draw a map along steps or time; its darkest colour is the largest share."""
    rows = len(heat.ranks)
    height = min(240, max(44, 16 * rows)) if rows > 4 else 22 * rows
    cells = _cells(heat, by, end)
    labels = "".join(
        f'<text class="label" x="{LEFT - 6}" y="{TOP + height * (row + 0.5) / rows + 4:.1f}" '
        f'text-anchor="end">{escape(f"rank {rank}")}</text>'
        for row, rank in enumerate(heat.ranks)
        if row % max(1, -(-rows * 14 // height)) == 0
    )
    return (
        f'<svg class="chart heat by-{by}" viewBox="0 0 {WIDTH} {TOP + height + _TICKS_HEIGHT}" role="img" '
        f'tabindex="0" aria-label="{escape(heat.title)} of each rank by {by}" data-end="{end:g}" '
        f'data-bottom="{TOP + height}">{labels}{frame(cells, top=TOP, height=height, rows=rows)}'
        f"{x_axis(by, end, TOP + height)}</svg>"
    )


def _cells(heat: HeatMap, by: str, end: float) -> str:
    """Draw the cells of each colour as one path; equal neighbours in a row become one rectangle."""
    extents = [
        (row.first, row.last + 1) if by == BY_STEP else (row.began_s, row.ended_s) for row in heat.stretches
    ]
    scaled = [(X_UNITS * begin / end, X_UNITS * stop / end) for begin, stop in extents]
    paths: dict[int, list[str]] = {}
    for place, shares in enumerate(heat.shares):
        levels = [
            None if share is None else min(HEAT_LEVELS - 1, int(share / heat.most * HEAT_LEVELS))
            for share in shares
        ]
        for level, begin, stop in _runs(levels, scaled):
            paths.setdefault(level, []).append(f"M{begin:.0f} {place}H{stop:.0f}v1H{begin:.0f}z")
    return "".join(
        f'<path class="heat-{level}" d="{"".join(parts)}"/>' for level, parts in sorted(paths.items())
    )


def _runs(
    levels: Sequence[int | None], extents: Sequence[tuple[float, float]]
) -> Iterator[tuple[int, float, float]]:
    now: tuple[int, float, float] | None = None
    for level, (begin, stop) in zip(levels, extents, strict=True):
        if now is not None and level == now[0] and begin <= now[2] + 1:
            now = (now[0], now[1], stop)
            continue
        if now is not None:
            yield now
        now = None if level is None else (level, begin, stop)
    if now is not None:
        yield now


def heat_json(heat: HeatMap) -> dict[str, Any]:
    """Return what the page's read-out needs of a map."""
    return {
        "title": heat.title,
        "names": list(heat.names),
        "shares": [[None if share is None else round(share, 4) for share in row] for row in heat.shares],
    }
