"""Text cut into words and sentences; every token knows its place in the text, which is never altered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Tokens", "fold_words", "tokenize", "word_set"]


def word_set(words: str) -> frozenset[str]:
    """Make a set of the words of a string."""
    return frozenset(words.split())


_TOKEN = re.compile(r"\d+(?:\.\d+)?|[^\W\d_][^\W_]*(?:['\u2019][^\W_]+)*|\S")
_HYPHENS = frozenset("-\u2010\u2011\u2012\u2013")

# One spelling for both sides of the ocean.
_SPELLINGS = {
    "haem": "hem", "oedema": "edema", "oesoph": "esoph", "tumour": "tumor", "ischaem": "ischem",
    "anaem": "anem", "leukaem": "leukem", "calibre": "caliber", "centre": "center", "fibre": "fiber",
    "disk": "disc", "gynaec": "gynec", "caecum": "cecum", "caecal": "cecal", "oestro": "estro",
    "faec": "fec", "colour": "color", "\u2019": "'",
}  # fmt: skip
_SPELLING = re.compile("|".join(_SPELLINGS))

_ABBREVIATIONS = word_set(
    "approx ca cf dr e.g eg fig i.e ie im img incl mr mrs ms no nr prof resp se ser st vs"
)
_LONGEST_SENTENCE = 150
"""Tokens; a longer one is cut, so that the time stays in proportion to the text."""
_SHORT_LINE = 55
"""A shorter line whose successor begins with a capital is no wrapped line; characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The words of a text. Hyphens inside a compound are no tokens; other signs are."""

    text: str
    words: list[str]
    """Lower case, one spelling."""
    starts: list[int]
    ends: list[int]
    sentences: list[tuple[int, int]]
    """Ranges of token numbers, closed-open, in order; empty ones left out."""

    def __len__(self) -> int:
        return len(self.words)


def fold_words(text: str) -> list[str]:
    """Return a phrase's words as `tokenize` would."""
    return _fold([match.group() for match in _words(text)])


def tokenize(text: str) -> Tokens:
    """Cut a text. Any Unicode is a text."""
    matches = list(_words(text))
    words = _fold([match.group() for match in matches])
    starts = [match.start() for match in matches]
    ends = [match.end() for match in matches]
    return Tokens(
        text=text,
        words=words,
        starts=starts,
        ends=ends,
        sentences=list(_sentences(text, words, starts, ends)),
    )


def _words(text: str) -> Iterator[re.Match[str]]:
    for match in _TOKEN.finditer(text):
        if match.group() in _HYPHENS:
            before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
            if before.isalnum() and after.isalnum() and not (before.isdigit() and after.isdigit()):
                continue
        yield match


def _fold(words: list[str]) -> list[str]:
    # No word holds white space, so the words are folded in one go. Lower case may be two characters long
    # (a dotted capital I); tokens keep their places because offsets are those of the text, not of this.
    return (
        _SPELLING.sub(lambda match: _SPELLINGS[match.group()], "\n".join(words).lower()).split("\n")
        if words
        else []
    )


def _sentences(text: str, words: list[str], starts: list[int], ends: list[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for number in range(len(words)):
        if number - begin >= _LONGEST_SENTENCE or _is_end(text, words, starts, ends, number):
            yield begin, number + 1
            begin = number + 1
    if begin < len(words):
        yield begin, len(words)


def _is_end(text: str, words: list[str], starts: list[int], ends: list[int], number: int) -> bool:
    word = words[number]
    if number + 1 == len(words):
        return True
    gap = text[ends[number] : starts[number + 1]]
    if word in ("?", "!", ";"):
        # A question mark before a word asks for it: "?pneumonia".
        return word != "?" or gap != ""
    if word == "." and gap and (number == 0 or words[number - 1] not in _ABBREVIATIONS):
        return True
    return "\n" in gap and _is_line_end(text, words[number], starts[number + 1], ends[number], gap)


def _is_line_end(text: str, word: str, next_start: int, end: int, gap: str) -> bool:
    if gap.count("\n") > 1 or text[next_start] in "-*\u2022>#" or word == ":":
        return True
    if re.match(r"\d{1,2}[.)]\s", text[next_start : next_start + 5]):
        return True
    line_start = text.rfind("\n", 0, end) + 1
    return (
        end - line_start < _SHORT_LINE
        and text[next_start].isupper()
        and word not in (",", "and", "or", "of", "the")
    )
