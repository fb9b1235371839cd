"""Charts as inline SVG, along steps or along time; colours are classes of the page's style sheet.

The plot is an SVG of its own inside the chart: its horizontal unit is a 10,000th of the run, and the page
zooms by changing its viewBox, so that nothing has to be drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Final

from shardflow.monitoring.run_page.chart import Chart, Mark, Places, Series, has_values
from shardflow.monitoring.run_page.scales import BY_STEP, show, ticks

__all__ = ["LEFT", "PLOT_WIDTH", "TOP", "WIDTH", "X_UNITS", "draw", "frame", "x_axis"]

WIDTH: Final = 960
LEFT: Final = 86
PLOT_WIDTH: Final = WIDTH - LEFT - 24
TOP: Final = 8
X_UNITS: Final = 10_000
_TICKS_HEIGHT: Final = 22
_LANE_HEIGHT: Final = 16
_LANES_GAP: Final = 6
_GAP: Final = 0.004
"""Part of the axis; what is shorter between two stretches is not seen, and is none."""
_MOST_X_TICKS: Final = 10
_MOST_Y_TICKS: Final = 4
_TALL: Final = 150
_TYPICAL: Final = 0.99
"""Share of the places that stay in a plot that is clipped."""
_MARGIN: Final = 1.25
_UNITS: Final = ("s", "bytes", "bytes/s")
"""Units that an axis repeats at each number; of others the title tells."""


def draw(chart: Chart, places: Mapping[str, Places], *, by: str, end: float) -> str:
    """Draw a chart.

    Args:
        chart: With at least one series that has values.
        places: By name, what its series stand at.
        by: ``step`` or ``time``.
        end: Where the axis ends; it begins at 0.
    """
    series = [one for one in chart.series if has_values(one)]
    low, high = _range(chart, series)
    lanes = list(dict.fromkeys(mark.lane for mark in chart.marks))
    height = chart.height
    above = TOP + height + (_LANES_GAP if lanes else 0)
    bottom = above + _LANE_HEIGHT * len(lanes)
    parts = [_y_axis(low, high, height, chart.unit)]
    inside = [_bands(chart, by, end, height)]
    scale = _Scale(end=end, low=low, high=high, height=height)
    inside += _series(series, places, by, scale)
    parts.append(frame("".join(inside), top=TOP, height=height))
    for row, lane in enumerate(lanes):
        marks = (mark for mark in chart.marks if mark.lane == lane)
        parts.append(_lane(lane, marks, by, end, above + _LANE_HEIGHT * row))
    parts.append(x_axis(by, end, bottom))
    return (
        f'<svg class="chart by-{by}" viewBox="0 0 {WIDTH} {bottom + _TICKS_HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(chart.title)} by {by}" data-end="{end:g}" data-bottom="{bottom}">'
        f"{''.join(parts)}</svg>"
    )


def frame(content: str, *, top: float, height: float, rows: float | None = None) -> str:
    """Wrap what is drawn in 10,000ths of the run; ``rows`` are its vertical units, pixels by default."""
    return (
        f'<svg class="plot" x="{LEFT}" y="{top}" width="{PLOT_WIDTH}" height="{height}" '
        f'viewBox="0 0 {X_UNITS} {rows or height}" preserveAspectRatio="none">{content}</svg>'
    )


def x_axis(by: str, end: float, bottom: float) -> str:
    """Draw round numbers below a plot that ends at ``bottom``."""
    unit = "steps" if by == BY_STEP else "s"
    parts = []
    for value in ticks(0.0, end, _MOST_X_TICKS, unit):
        x = LEFT + (value / end if end else 0.0) * PLOT_WIDTH
        text = f"{value:,.0f}" if by == BY_STEP else show(value, "s")
        parts.append(
            f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            f'<text class="label" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
        )
    return f'<g class="x">{"".join(parts)}</g>'


def outliers(chart: Chart) -> tuple[int, float]:
    """Return how many places of a clipped chart leave it, and the largest value."""
    if not chart.is_clipped:
        return 0, 0.0
    _, high = _range(chart, chart.series)
    above = [
        value
        for one in chart.series
        for value in (one.most or one.values)
        if value is not None and value > high
    ]
    return len(above), max(above, default=0.0)


class _Scale:
    def __init__(self, *, end: float, low: float, high: float, height: float) -> None:
        self._x = X_UNITS / end if end else 0.0
        self.end = end
        self._low, self._span, self._height = low, high - low, height

    def x(self, place: float) -> str:
        return f"{place * self._x:.1f}".removesuffix(".0")

    def y(self, value: float) -> str:
        # Far outside is outside: the plot cuts it off.
        share = min(3.0, max(-2.0, (value - self._low) / self._span))
        return f"{self._height * (1 - share):.1f}".removesuffix(".0")


def _range(chart: Chart, series: Sequence[Series]) -> tuple[float, float]:
    if chart.top is not None:
        return 0.0, chart.top
    lows = [value for one in series for value in (one.least or one.values) if value is not None]
    highs = [value for one in series for value in (one.most or one.values) if value is not None]
    stacks = [one.values for one in series if one.kind == "stack"]
    totals = [sum(value or 0.0 for value in row) for row in zip(*stacks, strict=True)] if stacks else []
    low = 0.0 if chart.is_from_zero else min(lows, default=0.0)
    high = max([*highs, *totals], default=0.0)
    if chart.is_clipped:
        middles = sorted(totals or [value for one in series for value in one.values if value is not None])
        typical = middles[int(_TYPICAL * (len(middles) - 1))] * _MARGIN if middles else 0.0
        high = high if high <= 2 * typical else typical
    if not high > low:
        return (low, low + 1.0) if low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
    margin = (high - low) * 0.04
    return low - (0.0 if chart.is_from_zero else margin), high + margin


def _y_axis(low: float, high: float, height: float, unit: str) -> str:
    parts = []
    for value in ticks(low, high, _MOST_Y_TICKS + (height >= _TALL), unit):
        y = TOP + height * (1 - (value - low) / (high - low))
        text = f"{100 * value:.3g} %" if unit == "share" else show(value, unit if unit in _UNITS else "")
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{LEFT + PLOT_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="label" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
        )
    return "".join(parts)


def _bands(chart: Chart, by: str, end: float, height: float) -> str:
    parts = []
    for band in chart.bands:
        begins, ends = (X_UNITS * place / end if end else 0.0 for place in band.along(by))
        parts.append(
            f'<rect class="band {band.colour}" x="{begins:.1f}" y="0" width="{max(ends - begins, 4.0):.1f}" '
            f'height="{height}"><title>{escape(band.text)}</title></rect>'
        )
    return "".join(parts)


def _lane(name: str, marks: Iterable[Mark], by: str, end: float, top: float) -> str:
    dots = []
    for mark in marks:
        x = X_UNITS * (mark.step if by == BY_STEP else mark.time_s) / end if end else 0.0
        dots.append(
            f'<path class="dot {mark.colour}" d="M{x:.1f} 8h0"><title>{escape(mark.text)}</title></path>'
        )
    return (
        f'<text class="label" x="{LEFT - 6}" y="{top + 12}" text-anchor="end">{escape(name)}</text>'
        + frame("".join(dots), top=top, height=_LANE_HEIGHT)
    )


def _series(series: Sequence[Series], places: Mapping[str, Places], by: str, scale: _Scale) -> Iterator[str]:
    below: list[float] = []
    for one in series:
        xs = [scale.x(place) for place in places[one.places].along(by)]
        if one.kind == "stack":
            # A mean holds over its whole stretch; where nothing was measured there is nothing.
            if places[one.places].begins is None:
                xs, values = _joined(xs, one.values, places[one.places].breaks(by))
            else:
                xs, values = _held(one.values, places[one.places].stretches(by), scale)
            below = below or [0.0] * len(xs)
            above = [low + (value or 0.0) for low, value in zip(below, values, strict=True)]
            yield _area(xs, above, below, f"area {one.colour}", scale)
            below = above
        elif one.kind == "points":
            dots = "".join(
                f"M{x} {scale.y(value)}h0"
                for x, value in zip(xs, one.values, strict=True)
                if value is not None
            )
            yield f'<path class="dot {one.colour}" d="{dots}"/>'
    for one in series:
        xs = [scale.x(place) for place in places[one.places].along(by)]
        if one.least is not None and one.most is not None:
            for begin, end in _runs(one.most, places[one.places].breaks(by)):
                yield _area(
                    xs[begin:end], one.most[begin:end], one.least[begin:end], f"envelope {one.colour}", scale
                )
    for one in series:
        if one.kind in ("line", "dashed"):
            xs = [scale.x(place) for place in places[one.places].along(by)]
            runs = _runs(one.values, places[one.places].breaks(by))
            yield _line(xs, one.values, runs, f"{one.kind} {one.colour}", scale)


def _held(
    values: Sequence[float | None], stretches: Sequence[tuple[float, float]], scale: _Scale
) -> tuple[list[str], list[float | None]]:
    """Return the corners of a line that goes along each stretch, and down where there is none."""
    xs: list[str] = []
    corners: list[float | None] = []
    before = None
    for value, (begin, end) in zip(values, stretches, strict=True):
        if before is not None and begin - before > _GAP * scale.end:
            xs += [scale.x(before), scale.x(begin)]
            corners += [0.0, 0.0]
        xs += [scale.x(begin), scale.x(end)]
        corners += [value, value]
        before = end
    return xs, corners


def _joined(
    xs: Sequence[str], values: Sequence[float | None], breaks: Sequence[int]
) -> tuple[list[str], list[float | None]]:
    """Return the corners of a line that goes from value to value, and down where the run stood still."""
    corners, heights = list(xs), list(values)
    for place in sorted(breaks, reverse=True):
        if 0 < place < len(xs):
            corners[place:place] = [xs[place - 1], xs[place]]
            heights[place:place] = [0.0, 0.0]
    return corners, heights


def _runs(values: Sequence[float | None], breaks: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
    """Yield where stretches without gaps begin and end."""
    ends = set(breaks)
    begin: int | None = None
    for place, value in enumerate([*values, None]):
        if begin is not None and value is not None and place in ends:
            yield begin, place
            begin = place
        elif value is not None and begin is None:
            begin = place
        elif value is None and begin is not None:
            yield begin, place
            begin = None


def _line(
    xs: Sequence[str],
    values: Sequence[float | None],
    runs: Iterable[tuple[int, int]],
    classes: str,
    scale: _Scale,
) -> str:
    parts = []
    for begin, end in runs:
        points = [f"{xs[place]} {scale.y(values[place] or 0.0)}" for place in range(begin, end)]
        parts.append(f"M{'L'.join(points)}" if len(points) > 1 else f"M{points[0]}h0")
    return f'<path class="{classes}" d="{"".join(parts)}"/>'


def _area(
    xs: Sequence[str],
    above: Sequence[float | None],
    below: Sequence[float | None],
    classes: str,
    scale: _Scale,
) -> str:
    forth = [f"{x} {scale.y(value or 0.0)}" for x, value in zip(xs, above, strict=True)]
    back = [f"{x} {scale.y(value or 0.0)}" for x, value in zip(xs, below, strict=True)][::-1]
    return f'<path class="{classes}" d="M{"L".join([*forth, *back])}Z"/>'
