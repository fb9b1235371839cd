"""Places in a text that must not leave it, by what stands there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from enum import StrEnum

__all__ = ["Category", "Span", "merge"]


class Category(StrEnum):
    """What stands at a place; the placeholder is the category in brackets."""

    AGE = "AGE"
    """Above 89 years."""
    DATE = "DATE"
    EMAIL = "EMAIL"
    ID = "ID"
    NAME = "NAME"
    PHONE = "PHONE"
    PLACE = "PLACE"
    """Address, institution, department, station."""
    TIME = "TIME"
    URL = "URL"
    WORD = "WORD"
    """No known word: masked in the strict mode alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Characters ``[start, end)`` of a text."""

    start: int
    end: int
    category: Category
    day: date | None = None
    """What a date says, where it says one day."""


def merge(spans: Iterable[Span], text: str) -> list[Span]:
    """Return spans in order that overlap nowhere and cover what the given ones cover.

    Names (and unknown words) with nothing but a space or a comma between them become one. Of
    overlapping spans the longest gives its category; a day survives only in a span that stands alone.
    """
    merged: list[Span] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
        last = merged[-1] if merged else None
        is_list = (
            last is not None
            and span.category == last.category
            and span.category in {Category.NAME, Category.WORD}
            and text[last.end : span.start] in {" ", ", "}
        )
        if last is None or (span.start >= last.end and not is_list):
            merged.append(span)
            continue
        longest = max(last, span, key=lambda one: one.end - one.start)
        day = last.day if (span.start, span.end, span.day) == (last.start, last.end, last.day) else None
        if day is None and span.category is Category.DATE and last.category is Category.DATE:
            # A date inside a longer form of the same date: the longer one knows more.
            day = longest.day if longest.end >= max(last.end, span.end) else None
        merged[-1] = Span(start=last.start, end=max(last.end, span.end), category=longest.category, day=day)
    return merged
