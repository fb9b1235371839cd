"""What a live view draws with: numbers for people, bars, curves, and lines of exactly one width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from shardflow.monitoring.live_curve import resampled

__all__ = [
    "ASCII",
    "DIM",
    "UNICODE",
    "Glyphs",
    "bar",
    "bytes_text",
    "curve",
    "duration",
    "fitted",
    "fitting",
    "level_style",
    "number",
    "percent",
    "seconds_text",
    "stacked",
]

DIM: Final = "#8b949e"
_DIGITS: Final = ((99.95, 0), (9.995, 1), (0.1, 2), (0.01, 3))
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Glyphs:
    """The characters that a terminal can show."""

    full: str
    half: str
    """Half of a bar's cell; empty for none."""
    rest: str
    """What is left of a bar."""
    block: str
    """A cell of a bar of several shares."""
    spark: str
    """From low to high."""
    dot: str
    arrow: str
    between: str
    more: str
    box: str
    """Corners from the upper left to the lower left, then the horizontal and the vertical line."""
    is_coloured: bool


UNICODE: Final = Glyphs(
    full="━",
    half="╸",
    rest="─",
    block="▇",
    spark="▁▂▃▄▅▆▇█",
    dot="●",
    arrow="→",
    between="·",
    more="…",
    box="╭╮╯╰─│",
    is_coloured=True,
)
ASCII: Final = Glyphs(
    full="=",
    half="",
    rest="-",
    block="#",
    spark="_.-=+*#@",
    dot="*",
    arrow="->",
    between="-",
    more="~",
    box="++++-|",
    is_coloured=True,
)


def number(value: float) -> str:
    """Render a rate or a count in at most six characters: ``0.0123``, ``4.22 k``, ``1.3 M``."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= 0.9995 * factor:
            return _digits(value / factor) + unit
    return _digits(value)


def _digits(value: float) -> str:
    """Three digits that count."""
    if not math.isfinite(value):
        return "?"
    if abs(value - round(value)) < 1e-9 * max(1.0, abs(value)):  # also 4.999999999
        return str(round(value))
    size = abs(value)
    if size < 0.001:
        return "<0.001" if value > 0 else f"{value:.0e}"
    digits = next((digits for least, digits in _DIGITS if size >= least), 4)
    return f"{value:.{digits}f}"


def percent(share: float) -> str:
    """Render a share: ``61.9 %``; whole from 99.95 on, so that it is never wider."""
    return f"{share * 100:.1f} %" if share < 0.9995 else f"{share * 100:.0f} %"


def bytes_text(num_bytes: float) -> str:
    """Render a size: ``61 MiB``, ``1.4 GiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 9.95 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Render a time of parts of a step: ``612 ms``, ``1.24 s``."""
    return f"{_digits(seconds * 1000)} ms" if seconds < 0.9995 else f"{_digits(seconds)} s"


def duration(seconds: float) -> str:
    """Render a longer time: ``0.4 s``, ``45 s``, ``3 min 20 s``, ``1 h 12 min``, ``3 d 4 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"


def level_style(share: float, *, fair: float, bad: float) -> str:
    """A colour for how bad a share is."""
    return "green" if share < fair else "yellow" if share < bad else "red"


def bar(share: float, width: int, style: str, glyphs: Glyphs) -> Text:
    """A bar of one share, 0 to 1, exactly so wide."""
    cells = min(1.0, max(0.0, share)) * width
    num_full = int(cells + (0.25 if glyphs.half else 0.5))
    has_half = bool(glyphs.half) and cells - num_full >= 0.25
    text = Text(glyphs.full * num_full + (glyphs.half if has_half else ""), style=style)
    left = width - num_full - has_half
    return text.append((glyphs.rest if glyphs.is_coloured else " ") * left, style=DIM)


def stacked(parts: Sequence[tuple[str, float, str]], width: int, glyphs: Glyphs) -> Text:
    """A bar of several shares: letter, share and colour of each; without colours the letters are drawn.

    A part that is at least half a cell has one; what is left of the width stays empty.
    """
    text, drawn, total = Text(), 0, 0.0
    for letter, share, style in parts:
        total += share
        end = min(width, max(round(total * width), drawn + (share >= 0.5 / width)))
        mark = glyphs.block if glyphs.is_coloured else letter
        text.append(mark * (end - drawn), style=style)
        drawn = max(drawn, end)
    return text.append(" " * (width - drawn))


def curve(values: Sequence[float], width: int, style: str, glyphs: Glyphs, *, from_zero: bool) -> Text:
    """A curve of one line, the newest value at its right end."""
    points = resampled(tuple(values), width)
    if not points:
        return Text()
    low, high = (0.0 if from_zero else min(points)), max(points)
    top = len(glyphs.spark) - 1
    span = high - low
    levels = [
        round((point - low) / span * top) if span > 0 else (top // 2 if high else 0) for point in points
    ]
    return Text("".join(glyphs.spark[max(0, level)] for level in levels), style=style)


def fitting(width: int, *texts: str) -> str:
    """The first text that fits into so many cells, the last one where none does."""
    return next((text for text in texts if cell_len(text) <= width), texts[-1])


def fitted(text: Text, width: int, glyphs: Glyphs) -> Text:
    """The text in exactly so many cells; what does not fit ends with a mark."""
    made = text.copy()
    if made.cell_len > width:
        made.truncate(max(0, width - len(glyphs.more)))
        made.rstrip()
        made.append(glyphs.more[: width - made.cell_len], style=DIM)
    made.pad_right(width - made.cell_len)
    return made
