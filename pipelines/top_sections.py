"""A section of a live view: lines under a title, and which of them stay where there is little room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from pipelines.top_draw import DIM, Glyphs, bar, percent

__all__ = ["Row", "Section", "share_line"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line."""

    text: Text
    weight: float = 0.0
    """Those of most weight stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Lines under a title."""

    title: str
    rows: Sequence[Row]
    least: int = 1
    """Fewer lines of it say nothing."""

    def kept(self, most: int) -> list[Text]:
        """Return at most so many lines in their order: those of most weight."""
        heaviest = sorted(range(len(self.rows)), key=lambda at: (-self.rows[at].weight, at))[: max(0, most)]
        return [self.rows[at].text for at in sorted(heaviest)]


def share_line(
    name: str, value: str, share: float, style: str, width: int, glyphs: Glyphs, *, name_width: int = 12
) -> Text:
    """A name, what it is, its share, and a bar of it in what is left of the width."""
    head = Text.assemble((f"{name:<{name_width}}", DIM), f"{value:>9} {percent(share):>7} ")
    return Text.assemble(head, bar(share, max(3, width - head.cell_len), style or DIM, glyphs))
