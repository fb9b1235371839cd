"""Which finding a mention of an image belongs to: the nearest one in its clause.

A mention in parentheses belongs to what stands in them, else to what stands to the left; a mention that
*shows* something to what follows. A clause without a finding looks at its sentence, a sentence without one
at the sole finding of the sentence before.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from shardflow.reports.tokens import tokenize

__all__ = ["ELIGIBLE", "Clauses", "Span"]

Span = tuple[int, int]

ELIGIBLE = frozenset(("present", "uncertain"))
"""Assertions of findings that images can show."""

_SEPARATOR = re.compile(
    r";|,\s(?=no\b)|(?:,\s|\s)(?:but|however|whereas|while|although|though|except)\b|,?\sand\s(?=(?:on\s)?(?:image|im|series|se)\b)",
    re.IGNORECASE,
)
_SHOWS = re.compile(
    r"(?:\s(?:of|in|on)\s(?:the\s)?(?:series|ser?)\s?\d+)?[\s)\]]*(?:also\s)?(?:shows?|showing|demonstrates?|demonstrating|reveals?|depicts?|contains?|"
    r",?\s*there (?:is|are))\b",
    re.IGNORECASE,
)
# How a sentence begins that speaks of what the one before named.
_GOES_ON = re.compile(
    r"[\s(\[*-]*(?:this|these|it|they|the\s(?:lesion|finding|abnormality|former|latter)|(?:best\s)?seen|see|"
    r"key\simage|images?|img?|series|ser?|slices?|s?\d)\b",
    re.IGNORECASE,
)


class Clauses:
    """The sentences and clauses of a report, and the findings in them.

    Args:
        text: The report.
        report: ``report.json`` of it.
    """

    def __init__(self, text: str, report: Mapping[str, Any]) -> None:
        self.text = text
        self._entities: Sequence[Mapping[str, Any]] = report["entities"]
        self._sections: Sequence[Mapping[str, Any]] = report["sections"]
        tokens = tokenize(text)
        self._sentences = [(tokens.starts[first], tokens.ends[last - 1]) for first, last in tokens.sentences]
        self._starts = [start for start, _ in self._sentences]

    def bind(self, mention: Span) -> int | None:
        """Return the number of the finding that a mention belongs to, or None."""
        place = bisect_right(self._starts, mention[0]) - 1
        if place < 0:
            return None
        sentence = self._sentences[place]
        inside = self._findings(sentence)
        if not inside:
            return self._sole_before(place)
        near = self._findings(self._parentheses(sentence, mention))
        if near:
            return self._nearest(near, mention)
        clause = self.clause(mention)
        near = self._findings(clause) or inside
        right = [number for number in near if self._span(number)[0] >= mention[1]]
        if right and _SHOWS.match(self.text, mention[1], clause[1]):
            return right[0]
        return self._nearest(near, mention)

    def clause(self, span: Span) -> Span:
        """Return the clause that a place of the text begins in."""
        place = bisect_right(self._starts, span[0]) - 1
        if place < 0:
            return span
        first, last = self._sentences[place]
        for match in _SEPARATOR.finditer(self.text, first, last):
            if match.end() <= span[0]:
                first = match.end()
            elif match.start() >= span[1]:
                last = match.start()
                break
        return first, last

    def section_of(self, span: Span) -> str:
        """Return the kind of the section that a place lies in; empty outside of all."""
        for one in self._sections:
            if one["span"][0] <= span[0] < one["span"][1]:
                return str(one["kind"])
        return ""

    def words(self, span: Span) -> str:
        """Return a stretch of the text."""
        return self.text[span[0] : span[1]]

    def _span(self, number: int) -> Span:
        first, last = self._entities[number]["span"]
        return first, last

    def _findings(self, span: Span) -> list[int]:
        """Numbers of the findings that begin in a span, in the text's order."""
        found = [
            number for number in range(len(self._entities)) if span[0] <= self._span(number)[0] < span[1]
        ]
        return sorted(found, key=self._span)

    def _nearest(self, numbers: Sequence[int], mention: Span) -> int:
        """Take the nearest to the left, else to the right; what images can show comes first."""
        left = [number for number in numbers if self._span(number)[1] <= mention[0]]
        # "a nodule without calcification (3:45)" speaks of the nodule.
        for side in (left[::-1], [number for number in numbers if number not in left]):
            shown = [number for number in side if self._entities[number]["assertion"] in ELIGIBLE]
            if side:
                return (shown or side)[0]
        return numbers[0]

    def _sole_before(self, place: int) -> int | None:
        if place == 0 or not _GOES_ON.match(self.text, *self._sentences[place]):
            return None
        before, here = self._sentences[place - 1], self._sentences[place]
        if self._section_start(before) != self._section_start(here):
            return None
        found = self._findings(before)
        return found[0] if len(found) == 1 else None

    def _section_start(self, span: Span) -> int:
        return max((one["span"][0] for one in self._sections if one["span"][0] <= span[0]), default=-1)

    def _parentheses(self, sentence: Span, mention: Span) -> Span:
        """Return what the parentheses around a mention hold; an empty span where there are none."""
        opening = self.text.rfind("(", sentence[0], mention[0] + 1)
        if opening < 0 or ")" in self.text[opening : mention[0]]:
            return mention[0], mention[0]
        closing = self.text.find(")", opening, sentence[1])
        return opening, closing if closing >= 0 else sentence[1]
