"""What a chart shows: series of numbers along steps and along time. Drawn by `run_page.svg`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from shardflow.monitoring.run_page.scales import BY_STEP, BY_TIME

__all__ = ["Band", "Chart", "Mark", "Places", "Series", "chart_json", "has_values", "places_json", "rounded"]

Kind = Literal["line", "dashed", "stack", "points"]
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class Places:
    """Where the values of series stand."""

    steps: Sequence[float]
    """Global step of each."""
    times: Sequence[float]
    """Seconds since the run began, of each."""
    begins: tuple[Sequence[float], Sequence[float]] | None = None
    """Steps and times at which the stretches begin that values are means of; None for values at points."""
    restarts: Sequence[int] = ()
    """Values before which the run stood still: along time nothing is drawn there."""

    def breaks(self, by: str) -> Sequence[int]:
        """Return the values before which a line ends."""
        return self.restarts if by == BY_TIME else ()

    def along(self, by: str) -> Sequence[float]:
        """Return the places along steps or time."""
        return self.steps if by == BY_STEP else self.times

    def stretches(self, by: str) -> list[tuple[float, float]]:
        """Return where each value holds; that of a point holds since the one before."""
        ends = self.along(by)
        if self.begins is None:
            return list(zip([*ends[:1], *ends[:-1]], ends, strict=True))
        # Clocks are read one after the other: what overlaps a little follows.
        begins = self.begins[by == BY_TIME]
        befores = [0.0, *ends[:-1]] if ends else []
        return [
            (min(max(begin, before), end), end)
            for begin, before, end in zip(begins, befores, ends, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line, one layer of a stack, or points."""

    label: str
    colour: str
    """A class of the style sheet."""
    places: str
    """Name of its `Places`."""
    values: Sequence[float | None]
    least: Sequence[float | None] | None = None
    """With ``most``: the envelope around the values."""
    most: Sequence[float | None] | None = None
    kind: Kind = "line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something that happened, in a lane below the plot."""

    lane: str
    step: float
    time_s: float
    text: str
    colour: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A stretch that is shaded over the whole height."""

    steps: tuple[float, float]
    times: tuple[float, float]
    text: str
    colour: str

    def along(self, by: str) -> tuple[float, float]:
        """Return where it begins and ends along steps or time."""
        return self.steps if by == BY_STEP else self.times


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart."""

    key: str
    title: str
    unit: str
    """See `scales.show`."""
    series: Sequence[Series]
    note: str = ""
    """HTML."""
    height: int = 170
    top: float | None = None
    """Of the axis; else as far as the values go."""
    is_from_zero: bool = True
    is_clipped: bool = False
    """Rare values far above the others leave the plot, and are counted below it."""
    marks: Sequence[Mark] = ()
    bands: Sequence[Band] = ()


def has_values(series: Series) -> bool:
    """Whether there is anything to draw."""
    return any(value is not None for value in series.values)


def chart_json(chart: Chart) -> dict[str, Any]:
    """Return what the page's read-out needs of a chart."""
    return {
        "unit": chart.unit,
        "series": [
            {
                "label": one.label,
                "colour": one.colour,
                "places": one.places,
                "values": rounded(one.values),
                **({"least": rounded(one.least)} if one.least is not None else {}),
                **({"most": rounded(one.most)} if one.most is not None else {}),
            }
            for one in chart.series
        ],
    }


def places_json(places: Mapping[str, Places]) -> dict[str, Any]:
    """Return all places for the page's read-out."""
    return {name: {BY_STEP: rounded(one.steps), BY_TIME: rounded(one.times)} for name, one in places.items()}


def rounded(values: Iterable[float | None]) -> list[float | int | None]:
    """Return numbers with six digits before or behind the point, whole ones as integers."""
    found: list[float | int | None] = []
    for value in values:
        if value is None:
            found.append(None)
            continue
        # A step or a byte keeps all its digits.
        short = (
            value
            if value == int(value)
            else float(f"{value:.{_DIGITS}g}")
            if abs(value) < 1e6
            else round(value)
        )
        found.append(int(short) if short == int(short) else short)
    return found
