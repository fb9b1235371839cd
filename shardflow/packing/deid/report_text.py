"""Scrubber of report texts: replaces identifying text by its category, such as ``[NAME]``.

Three layers search the original text: values of this study's headers (`known_values`), forms such as phone
numbers and dates (`text_patterns`), and in the strict mode every word that is on no list (`lexicon`). An
identifier of a form that no pattern describes is missed; docs/deidentification.md lists the limits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Final, Literal, TypeAlias

from shardflow.packing.deid.known_values import KnownValues
from shardflow.packing.deid.lexicon import fold, lexicon
from shardflow.packing.deid.text_patterns import (
    Category,
    DateOrder,
    Span,
    find_dates,
    find_numbers,
    find_patterns,
    find_times,
    merge,
)

ReportTextMode: TypeAlias = Literal["scrub", "strict", "keep"]
"""``scrub``: known values and patterns. ``strict``: unknown words too. ``keep``: the text is
not changed."""

_WORD: Final = re.compile(r"[^\W\d_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}][^\W\d_]+)*")
_YEAR: Final = re.compile(r"(?<![\w.,/-])(?:19|20)\d\d(?![\w/-]|[.,]\d|\s?(?:mm|cm|ml|hu|mg))", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScrubbedText:
    """A text that may be published."""

    text: str
    counts: dict[str, int]
    """Number of replacements by category in lower case; sorted."""


def scrub(
    text: str,
    known: KnownValues,
    *,
    mode: ReportTextMode,
    order: DateOrder = "unknown",
    date_placeholder: Callable[[date], str | None] = lambda _: None,
) -> ScrubbedText:
    """Replace text that identifies a person.

    Args:
        text: Of a report.
        known: Values of the study's headers.
        mode: How much is replaced.
        order: How the source writes 03/04/2019.
        date_placeholder: Returns what replaces a single day inside the brackets, such as its distance from
            the study; None removes the day.

    Example:
        >>> scrub("Seen by Dr. Okafor on 2019-03-14.", KnownValues(()), mode="scrub").text
        'Seen by Dr. [NAME] on [DATE].'
    """
    if mode == "keep":
        return ScrubbedText(text=text, counts={})
    births: set[tuple[int, int]] = set()
    spans: list[Span] = []
    for span in known.find(text):
        spans.append(span)
        if span.category is Category.DATE:
            births.add((span.start, span.end))
    spans += find_patterns(text)
    times = [*find_dates(text, order), *find_times(text)]
    covered = {position for span in times for position in range(span.start, span.end)}
    spans += times
    spans += [span for span in find_numbers(text) if not covered.issuperset(range(span.start, span.end))]
    if mode == "strict":
        spans += _unknown_words(text)
    parts: list[str] = []
    counts: Counter[str] = Counter()
    position = 0
    for span in merge(spans, text):
        is_birth = any(start < span.end and span.start < end for start, end in births)
        placeholder = None if span.day is None or is_birth else date_placeholder(span.day)
        parts += [text[position : span.start], f"[{placeholder or span.category}]"]
        counts[span.category.lower()] += 1
        position = span.end
    parts.append(text[position:])
    return ScrubbedText(text="".join(parts), counts=dict(sorted(counts.items())))


def _unknown_words(text: str) -> Iterator[Span]:
    """Yield words that are on no list, and years."""
    known = lexicon()
    for match in _WORD.finditer(text):
        word = fold(match[0])
        if len(word) == 1 or known.may_pass(word) or (match[0].islower() and known.is_medical(word)):
            continue
        yield Span(start=match.start(), end=match.end(), category=Category.WORD)
    for match in _YEAR.finditer(text):
        yield Span(start=match.start(), end=match.end(), category=Category.DATE)
