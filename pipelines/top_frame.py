"""One picture of a run: sections laid out for a terminal of any size, as lines of exactly its width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from rich.text import Text

from pipelines.top_draw import DIM, Glyphs, fitted
from pipelines.top_facts import event_section, goodput_section, memory_section, tuner_section
from pipelines.top_header import header_lines
from pipelines.top_panels import loader_section, queue_section, speed_section, step_section, tier_section
from pipelines.top_ranks import rank_section
from pipelines.top_sections import Section
from shardflow.monitoring.live import LiveView

__all__ = ["LEAST_HEIGHT", "LEAST_WIDTH", "frame"]

LEAST_WIDTH: Final = 40
LEAST_HEIGHT: Final = 8

# By what is given up last where there is little room.
_IMPORTANCE: Final = {
    speed_section: 9,
    step_section: 8,
    loader_section: 7,
    queue_section: 6,
    tier_section: 5,
    tuner_section: 4,
    memory_section: 3,
    goodput_section: 2,
    event_section: 1,
}
_COLUMNS: Final = {
    1: (tuple(_IMPORTANCE),),
    2: (
        (speed_section, step_section, goodput_section, tuner_section),
        (loader_section, queue_section, tier_section, memory_section, event_section),
    ),
    3: (
        (speed_section, goodput_section, event_section, tuner_section),
        (step_section, loader_section),
        (queue_section, tier_section, memory_section),
    ),
}
_TWO_COLUMNS: Final = 78
_THREE_COLUMNS: Final = 150
_GAP: Final = 2
_LOW: Final = 30
_LEAST_RANKS: Final = 6
_MANY_RANKS: Final = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """A section with the lines that it got."""

    title: str
    lines: list[Text]


def frame(view: LiveView, *, width: int, height: int | None, glyphs: Glyphs, footer: str = "") -> list[Text]:
    """Draw a run.

    Args:
        view: What is known of it.
        width: Cells of each line, at least 40.
        height: Lines, exactly so many; None for as many as it takes.
        glyphs: What is drawn with.
        footer: The last line, such as the keys; empty for none.
    """
    lines = header_lines(view, width, glyphs, most_verdict=3 if height is not None and height < _LOW else 4)
    end = [fitted(Text(footer, style=DIM), width, glyphs)] if footer else []
    room = None if height is None else height - len(lines) - len(end)
    if view.step is not None:
        lines += _body(view, width, room, glyphs)
    if height is not None:
        blank = Text(" " * width)
        lines += [blank] * (height - len(end) - len(lines))
    return (lines + end)[: height or None]


def _body(view: LiveView, width: int, height: int | None, glyphs: Glyphs) -> list[Text]:
    num_columns = 3 if width >= _THREE_COLUMNS else 2 if width >= _TWO_COLUMNS else 1
    num_ranks = view.interval.world_size if view.interval is not None else 0
    if height is None:
        columns = _columns(view, width, None, num_columns, glyphs, is_boxed=num_columns > 1)
        wanted = min(num_ranks, _MANY_RANKS) + 4
        return columns + _ranks(view, width, wanted, glyphs, is_boxed=num_columns > 1)
    for is_boxed in (True, False):
        lines = _try(view, width, height, num_columns, glyphs, is_boxed=is_boxed)
        if lines is not None:
            return lines
    # Not all of it fits: ranks have some lines of their own, the columns the rest.
    least = min(_LEAST_RANKS, num_ranks + 3) if num_ranks > 1 and height >= 18 else 0
    columns = _columns(view, width, height - least, num_columns, glyphs, is_boxed=False)
    ranks = _ranks(view, width, least, glyphs, is_boxed=False) if least else []
    return columns + ranks


def _try(
    view: LiveView, width: int, height: int, num_columns: int, glyphs: Glyphs, *, is_boxed: bool
) -> list[Text] | None:
    """All of the columns and a fair part of the ranks, if these fit."""
    columns = _columns(view, width, None, num_columns, glyphs, is_boxed=is_boxed)
    num_ranks = view.interval.world_size if view.interval is not None else 0
    left = height - len(columns)
    if left < (min(_LEAST_RANKS + 2, num_ranks + 4) if num_ranks else 0):
        return None
    return columns + (_ranks(view, width, left, glyphs, is_boxed=is_boxed) if num_ranks else [])


def _ranks(view: LiveView, width: int, height: int, glyphs: Glyphs, *, is_boxed: bool) -> list[Text]:
    inner = width - 4 * is_boxed
    section = rank_section(view, inner, glyphs, most_rows=height - 1 - is_boxed)
    if section is None:
        return []
    lines = section.kept(height - 1 - is_boxed)
    return _framed(_Placed(title=section.title, lines=lines), width, glyphs, is_boxed=is_boxed)


def _columns(
    view: LiveView, width: int, height: int | None, num_columns: int, glyphs: Glyphs, *, is_boxed: bool
) -> list[Text]:
    """The columns beside each other, each as high as the highest."""
    inner = (width - _GAP * (num_columns - 1)) // num_columns
    made: list[list[_Placed]] = []
    for makers in _COLUMNS[num_columns]:
        found = [(maker(view, inner - 4 * is_boxed, glyphs), _IMPORTANCE[maker]) for maker in makers]
        sections = [(section, importance) for section, importance in found if section is not None]
        made.append(_placed(sections, height, overhead=1 + is_boxed))
    overhead = 1 + is_boxed
    most = max((sum(len(one.lines) + overhead for one in column) for column in made), default=0)
    if height is not None:
        most = min(most, height)
    drawn: list[list[Text]] = []
    for number, column in enumerate(made):
        # The last column takes the cells that do not divide.
        own = inner if number < num_columns - 1 else width - (inner + _GAP) * (num_columns - 1)
        lines: list[Text] = []
        for at, one in enumerate(column):
            if at == len(column) - 1:
                spare = most - len(lines) - overhead - len(one.lines)
                one = _Placed(title=one.title, lines=one.lines + [Text()] * max(0, spare))
            lines += _framed(one, own, glyphs, is_boxed=is_boxed)
        drawn.append(lines or [Text(" " * own)] * most)
    gap = " " * _GAP
    rows = zip_longest(*drawn)
    return [
        Text.assemble(*_joined([part if part is not None else Text() for part in row], gap)) for row in rows
    ]


def _joined(parts: Sequence[Text], gap: str) -> list[Text | str]:
    joined: list[Text | str] = []
    for part in parts:
        joined += [gap, part] if joined else [part]
    return joined


def _placed(sections: list[tuple[Section, int]], height: int | None, *, overhead: int) -> list[_Placed]:
    """Give lines to sections: the least first, by importance; then more in the same order."""
    if height is None:
        return [_Placed(title=one.title, lines=one.kept(len(one.rows))) for one, _ in sections]
    given = [0] * len(sections)
    order = sorted(range(len(sections)), key=lambda at: -sections[at][1])
    left = height
    for at in order:
        least = min(sections[at][0].least, len(sections[at][0].rows))
        if left >= least + overhead:
            given[at] = least
            left -= least + overhead
    for at in order:
        if given[at]:
            more = min(left, len(sections[at][0].rows) - given[at])
            given[at] += more
            left -= more
    return [
        _Placed(title=one.title, lines=one.kept(number))
        for (one, _), number in zip(sections, given, strict=True)
        if number
    ]


def _framed(placed: _Placed, width: int, glyphs: Glyphs, *, is_boxed: bool) -> list[Text]:
    upper_left, upper_right, lower_right, lower_left, across, down = tuple(glyphs.box)
    if not is_boxed:
        head = Text.assemble((placed.title, "bold"), " ")
        head = fitted(head, min(width, head.cell_len), glyphs)
        head.append(across * (width - head.cell_len), style=DIM)
        return [head, *(fitted(line, width, glyphs) for line in placed.lines)]
    title = fitted(Text(placed.title, style="bold"), min(width - 6, Text(placed.title).cell_len), glyphs)
    head = Text.assemble((f"{upper_left}{across} ", DIM), title, " ")
    head.append(across * (width - head.cell_len - 1) + upper_right, style=DIM)
    lines = [
        Text.assemble((f"{down} ", DIM), fitted(line, width - 4, glyphs), (f" {down}", DIM))
        for line in placed.lines
    ]
    return [head, *lines, Text(lower_left + across * (width - 2) + lower_right, style=DIM)]
