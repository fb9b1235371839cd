"""Inline SVG charts over the steps of a run; colors are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final, Literal

from shardflow.monitoring.run_page.reading import Mark
from shardflow.monitoring.units import show

WIDTH: Final = 960
LEFT: Final = 86
PLOT_WIDTH: Final = WIDTH - LEFT - 24
TOP: Final = 8
_TICKS_HEIGHT: Final = 22
_MARKS_HEIGHT: Final = 16
_MARKS: Final = {"saved": "checkpoint", "evaluated": "evaluation", "lost": "restart", "tuned": "tuner"}
"""Kinds of marks, which are classes of the style sheet, and what they mean."""
_MOST_X_TICKS: Final = 10
_MOST_Y_TICKS: Final = 4
_BAR_HEIGHT: Final = 16
_TYPICAL: Final = 0.99
"""Share of the points that stay inside a clipped plot."""
_MARGIN: Final = 1.25
_SECOND_STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """One line, one layer of a stack, or points."""

    label: str
    color: str
    """A class of the style sheet."""
    steps: Sequence[float]
    """Steps done at each value; in a stack a value applies since the one before."""
    values: Values
    least: Values | None = None
    """With ``most``: the envelope around the values."""
    most: Values | None = None
    kind: Literal["line", "dashed", "stack", "points"] = "line"

    @property
    def has_values(self) -> bool:
        """Whether there is anything to draw."""
        return any(value is not None for value in self.values)

    def to_json(self) -> dict[str, Any]:
        """Return the values that the page's script shows."""
        columns = {"steps": self.steps, "values": self.values, "least": self.least, "most": self.most}
        found = {name: rounded(values) for name, values in columns.items() if values is not None}
        return {"label": self.label, "color": self.color, **found}


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart."""

    key: str
    title: str
    unit: str
    """See `units.show`."""
    series: Sequence[Series]
    height: int = 130
    top: float | None = None
    """Of the axis; by default the largest value."""
    is_from_zero: bool = True
    is_clipped: bool = False
    """Whether rare values far above the others are cut off at the top, and counted below the plot."""
    marks: Sequence[Mark] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the values that the page's script shows."""
        return {"unit": self.unit, "series": [one.to_json() for one in self.series]}


def rounded(values: Iterable[float | None]) -> list[float | int | None]:
    """Return numbers with six digits, whole ones as integers of all their digits."""
    found: list[float | int | None] = []
    for value in values:
        if value is None or value == int(value):
            found.append(None if value is None else int(value))
        else:
            found.append(float(f"{value:.6g}") if abs(value) < 1e6 else round(value))
    return found


def figure(chart: Chart, end: float) -> str:
    """Draw a chart with its title and legend; nothing for one without values.

    Args:
        chart: The chart.
        end: Where the axis of steps ends; it begins at 0.
    """
    series = [one for one in chart.series if one.has_values]
    if not series:
        return ""
    low, high = _range(chart, series)
    entries = [(f"{one.color} {one.kind}", one.label) for one in series] if len(series) > 1 else []
    entries += [(mark.kind, _MARKS[mark.kind]) for mark in chart.marks]
    above = [
        value for one in series for value in (one.most or one.values) if value is not None and value > high
    ]
    remark = ""
    if above:
        what = "point is" if len(above) == 1 else "points are"
        largest = escape(show(max(above), chart.unit))
        remark = f"<p class=note>{len(above)} {what} above the plot, up to {largest}.</p>"
    return (
        f'<figure data-chart="{chart.key}"><figcaption>{escape(chart.title)}</figcaption>{legend(entries)}'
        f"{_draw(chart, series, low, high, end)}{remark}</figure>"
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """List colors and their meanings, each pair once."""
    items = "".join(
        f'<li><i class="{color}"></i>{escape(label)}</li>' for color, label in dict.fromkeys(entries)
    )
    return f"<ul class=legend>{items}</ul>" if items else ""


def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]]) -> str:
    """Draw a stacked bar for each row: its label, and of each part the length (0 to 1), color and text."""
    drawn = []
    for place, (label, parts) in enumerate(rows):
        y, x = TOP + place * (_BAR_HEIGHT + 4), float(LEFT)
        drawn.append(_label(LEFT - 6, y + 12, "end", label))
        for share, color, text in parts:
            width = max(0.0, share) * PLOT_WIDTH
            drawn.append(
                f'<rect class="fill {color}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR_HEIGHT}">'
                f"<title>{escape(text)}</title></rect>"
            )
            x += width
    height = TOP + len(rows) * (_BAR_HEIGHT + 4)
    return (
        f'<svg class=bars viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(drawn)}</svg>"
    )


def ticks(low: float, high: float, most: int, unit: str) -> list[float]:
    """Return round numbers from low to high, at most ``most + 1``."""
    if not high > low:
        return [low]
    wanted = (high - low) / most
    if unit == "s" and 1 < wanted <= _SECOND_STEPS[-1]:
        step = float(next(one for one in _SECOND_STEPS if one >= wanted))
    else:
        base = 1024.0 ** max(0, int(math.log(wanted, 1024))) if unit.startswith("bytes") else 1.0
        power = 10.0 ** math.floor(math.log10(wanted / base)) * base
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * (1 - 1e-9))
        step = max(1.0, step) if unit in ("steps", "bytes") else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def _range(chart: Chart, series: Sequence[Series]) -> tuple[float, float]:
    """Return where the vertical axis begins and ends."""
    if chart.top is not None:
        return 0.0, chart.top
    lows = [value for one in series for value in (one.least or one.values) if value is not None]
    highs = [value for one in series for value in (one.most or one.values) if value is not None]
    stacks = [one.values for one in series if one.kind == "stack"]
    totals = [sum(value or 0.0 for value in row) for row in zip(*stacks, strict=True)] if stacks else []
    low, high = (0.0 if chart.is_from_zero else min(lows)), max([*highs, *totals])
    if chart.is_clipped:
        middles = sorted(totals or [value for one in series for value in one.values if value is not None])
        typical = middles[int(_TYPICAL * (len(middles) - 1))] * _MARGIN
        high = high if high <= 2 * typical else typical
    if not high > low:
        return (low, low + 1.0) if low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
    margin = (high - low) * 0.04
    return low - (0.0 if chart.is_from_zero else margin), high + margin


class _Scale:
    """Maps steps and values to the coordinates of a plot."""

    def __init__(self, low: float, high: float, height: float, end: float) -> None:
        self._low, self._span, self._height, self._end = low, high - low, height, end or 1.0

    def x(self, step: float) -> str:
        return f"{LEFT + PLOT_WIDTH * step / self._end:.1f}".removesuffix(".0")

    def y(self, value: float) -> str:
        # Values outside are drawn at the border.
        share = min(1.0, max(0.0, (value - self._low) / self._span))
        return f"{TOP + self._height * (1 - share):.1f}".removesuffix(".0")

    def at(self, steps: Sequence[float], values: Values) -> list[str]:
        return [f"{self.x(step)} {self.y(value or 0.0)}" for step, value in zip(steps, values, strict=True)]


def _draw(chart: Chart, series: Sequence[Series], low: float, high: float, end: float) -> str:
    scale, height = _Scale(low, high, chart.height, end), chart.height
    bottom = TOP + height + (_MARKS_HEIGHT if chart.marks else 0)
    parts = []
    for value in ticks(low, high, _MOST_Y_TICKS, chart.unit):
        y = scale.y(value)
        # The title names other units.
        unit = chart.unit if chart.unit in ("s", "share", "bytes", "bytes/s") else ""
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + PLOT_WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(_label(LEFT - 6, float(y) + 4, "end", show(value, unit)))
    parts += _layers([one for one in series if one.kind == "stack"], scale)
    for one in series:
        parts += _lines(one, scale)
    for mark in chart.marks:
        x = scale.x(mark.step)
        title = f"<title>{escape(mark.text)}</title>"
        parts.append(f'<path class="dot {mark.kind}" d="M{x} {TOP + height + 9}h0">{title}</path>')
    for step in ticks(0.0, end, _MOST_X_TICKS, "steps"):
        x = scale.x(step)
        parts.append(f'<line class="tick" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(_label(float(x), bottom + 16, "middle", f"{step:,.0f}"))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {bottom + _TICKS_HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title)}" data-end="{end:g}" data-bottom="{bottom}">{"".join(parts)}</svg>'
    )


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="label" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _layers(stack: Sequence[Series], scale: _Scale) -> Iterator[str]:
    """Draw a stack; each value holds since the step of the one before."""
    below: list[float] = []
    for one in stack:
        below = below or [0.0] * len(one.values)
        above = [low + (value or 0.0) for low, value in zip(below, one.values, strict=True)]
        corners = [step for pair in zip([0.0, *one.steps], one.steps, strict=False) for step in pair]
        top = scale.at(corners, [value for value in above for _ in range(2)])
        bottom = scale.at(corners, [value for value in below for _ in range(2)])
        yield f'<path class="area {one.color}" d="M{"L".join([*top, *reversed(bottom)])}Z"/>'
        below = above


def _lines(series: Series, scale: _Scale) -> Iterator[str]:
    """Draw a line with its envelope, or points."""
    if series.kind == "stack":
        return
    if series.kind == "points":
        pairs = zip(series.steps, series.values, strict=True)
        points = [f"M{scale.x(step)} {scale.y(value)}h0" for step, value in pairs if value is not None]
        yield f'<path class="dot {series.color}" d="{"".join(points)}"/>'
        return
    parts = []
    for begin, stop in _runs(series.values):
        steps = series.steps[begin:stop]
        if series.least is not None and series.most is not None:
            top = scale.at(steps, series.most[begin:stop])
            bottom = scale.at(steps, series.least[begin:stop])
            yield f'<path class="envelope {series.color}" d="M{"L".join([*top, *reversed(bottom)])}Z"/>'
        points = scale.at(steps, series.values[begin:stop])
        parts.append(f"M{'L'.join(points)}" + ("h0" if len(points) == 1 else ""))
    yield f'<path class="{series.kind} {series.color}" d="{"".join(parts)}"/>'


def _runs(values: Values) -> Iterator[tuple[int, int]]:
    """Yield where runs without gaps begin and end."""
    begin: int | None = None
    for place, value in enumerate([*values, None]):
        if value is not None and begin is None:
            begin = place
        elif value is None and begin is not None:
            yield begin, place
            begin = None
