"""Tokens of a text: its words and signs with their places, folded to one spelling, its sentences and phrases.

Where a language puts no blanks between words, each of its characters is a token, but for the words that have
a role in ``words.csv``. The text is never altered. Phrases are found as whole words in one pass
(Aho-Corasick), and the longest ones are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, count
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import ahocorasick

from shardflow.reports.language import ENGLISH, Language, load_language

T = TypeVar("T")

_HYPHENS = frozenset("-\u2010\u2011\u2012\u2013")
_ANSWERED = [[sign] for sign in ":=-\u2013\u2014"]
_ENDING = frozenset(".?!;")
_LONGEST_SENTENCE = 150
"""Tokens; a longer one is cut, so that the time stays in proportion to the text."""
_SHORT_LINE = 55
"""A shorter line whose successor begins with a capital is no wrapped line; characters."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The words of a text. Hyphens inside a compound are no tokens; other signs are."""

    text: str
    words: list[str]
    """Lower case, one spelling."""
    starts: list[int]
    ends: list[int]
    sentences: list[tuple[int, int]]
    """Ranges of token numbers, closed-open, in order; empty ones left out."""
    offset: int = 0
    """Where the text begins in its report; places are those of the text."""

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def phrase_text(self) -> tuple[str, dict[int, int]]:
        """Words with a blank around each, and the token that begins at each place of it; the end too."""
        lengths = [1, *(len(word) + 1 for word in self.words)]
        return f" {' '.join(self.words)} ", dict(zip(accumulate(lengths), count()))


class Match(NamedTuple, Generic[T]):
    """A phrase at tokens ``first`` to ``last``, closed-open."""

    first: int
    last: int
    value: T


class PhraseIndex(Generic[T]):
    """Many phrases, sought at once.

    Args:
        phrases: What each phrase (folded words, joined by a blank) stands for.
    """

    def __init__(self, phrases: Mapping[str, T]) -> None:
        # The blanks around a phrase are its word boundaries; neighbors share one.
        self._automaton: Any = ahocorasick.Automaton()
        for phrase, value in phrases.items():
            self._automaton.add_word(f" {phrase} ", (len(phrase), value))
        self._automaton.make_automaton()

    def find(self, tokens: Tokens) -> list[Match[T]]:
        """Return all matches, overlapping ones too, by their ends."""
        haystack, places = tokens.phrase_text
        # As Match(...) would make it, without the call: there are many.
        new = tuple.__new__
        return [
            new(Match, (places[end - length], places[end + 1], value))
            for end, (length, value) in self._automaton.iter(haystack)
        ]


def keep_longest(matches: Iterable[Match[T]]) -> list[Match[T]]:
    """Keep the longest of overlapping matches, the first of equals; in the text's order."""
    found = list(matches)
    end = 0
    for match in found:
        if match[0] < end:
            break
        end = match[1]
    else:
        # In order, and none overlaps another.
        return found
    found.sort(key=by_first)
    taken: set[int] = set()
    kept: list[Match[T]] = []
    for match in sorted(found, key=_length, reverse=True):
        span = range(match.first, match.last)
        if taken.isdisjoint(span):
            taken.update(span)
            kept.append(match)
    return sorted(kept, key=by_first)


by_first = attrgetter("first")


def _length(match: Match[Any]) -> int:
    return match.last - match.first


def fold_words(text: str, language: str = ENGLISH) -> list[str]:
    """Return a phrase's words as `tokenize` would."""
    if text.isascii() and text.replace(" ", "").isalpha():  # as most names of findings, which are many
        return _fold(text.split(), language)
    of = load_language(language)
    return _fold([match.group() for match in _words(of.normalize(text), language)], language)


def tokenize(text: str, language: str = ENGLISH, offset: int = 0) -> Tokens:
    """Cut a text. Any Unicode is a text.

    Args:
        text: A report, or a part of one.
        language: Its language.
        offset: Where it begins in the report.
    """
    of = load_language(language)
    text = of.normalize(text)
    matches = _words(text, language)
    words = _fold([match.group() for match in matches], language)
    starts = [match.start() for match in matches]
    ends = [match.end() for match in matches]
    return Tokens(
        text=text,
        words=words,
        starts=starts,
        ends=ends,
        sentences=list(_sentences(text, words, starts, ends, of)),
        offset=offset,
    )


@cache
def _token(language: str) -> re.Pattern[str]:
    of = load_language(language)
    number = r"\d+(?:" + of.pieces.get("decimal", r"\.") + r"\d+)?"
    word = r"[^\W\d_][^\W_]*(?:['\u2019][^\W_]+)*"
    if not of.is_spaced:
        spoken = sorted((one for one in of.spoken if len(one) > 1 and not one.isascii()), key=len)
        return re.compile("|".join([number, *reversed(spoken), word, r"\S"]), re.ASCII)
    if not of.elided:
        return re.compile(f"{word}|{number}|\\S")
    elided = "|".join(sorted(of.elided, key=len, reverse=True))
    # Accents may be letters of their own.
    letter = r"[^\W_][\u0300-\u036f]*"
    return re.compile(
        rf"{number}|(?:{elided})['\u2019](?={letter}|$)|(?!\d){letter}(?:{letter})*(?:['\u2019](?:{letter})+)*|\S",
        re.IGNORECASE,
    )


def _words(text: str, language: str) -> list[re.Match[str]]:
    found = [*_token(language).finditer(text)]
    if _HYPHENS.isdisjoint(text):
        return found
    return [match for match in found if match.group() not in _HYPHENS or not _joins(text, match)]


def _joins(text: str, hyphen: re.Match[str]) -> bool:
    """Whether a hyphen stands inside a compound."""
    before, after = text[hyphen.start() - 1 : hyphen.start()], text[hyphen.end() : hyphen.end() + 1]
    return before.isalnum() and after.isalnum() and not (before.isdigit() and after.isdigit())


def _fold(words: list[str], language: str) -> list[str]:
    # No word holds white space, so the words are folded in one go. Lower case may be two characters long
    # (a dotted capital I); tokens keep their places because offsets are those of the text, not of this.
    return load_language(language).fold("\n".join(words).lower()).split("\n") if words else []


def _sentences(
    text: str, words: list[str], starts: list[int], ends: list[int], of: Language
) -> Iterator[tuple[int, int]]:
    begin = 0
    for number, word in enumerate(words[:-1]):
        # Most words end nothing, and are followed by a blank.
        may_end = word in _ENDING or "\n" in text[ends[number] : starts[number + 1]]
        if number - begin >= _LONGEST_SENTENCE or (
            may_end and _is_end(text, words, starts, ends, number, of)
        ):
            yield begin, number + 1
            begin = number + 1
    if begin < len(words):
        yield begin, len(words)


def _is_end(
    text: str, words: list[str], starts: list[int], ends: list[int], number: int, of: Language
) -> bool:
    word = words[number]
    gap = text[ends[number] : starts[number + 1]]
    if word in ("?", "!", ";"):
        # A question mark before a word asks for it: "?pneumonia", "Cough. ? pneumonia".
        return (
            word != "?"
            or not of.is_spaced
            or not (gap == "" or number == 0 or starts[number] > ends[number - 1])
        )
    if word == "." and (gap or not of.is_spaced):
        before = words[number - 1] if number else ""
        if words[number + 1] in of.after_ordinal and before.isdigit():
            return False
        if before not in of.abbreviation:
            return True
        if (
            before in of.denying
            and words[number - 2 : number - 1] in _ANSWERED
            and words[number + 2 : number + 3] == ["."]
        ):
            # "Effusion - no. 2. Edema.": the number is one of a list.
            return True
        if before in of.abbreviation_of_number and not words[number + 1].isdigit():
            if before not in of.sides or not of.has_capital_nouns:
                return True
            if _ends_with_side(text, words, starts, number, of):
                return True
    return "\n" in gap and _is_line_end(text, word, starts[number + 1], ends[number], gap, of)


def _ends_with_side(text: str, words: list[str], starts: list[int], number: int, of: Language) -> bool:
    """Whether the full stop of *li.* ends a sentence, where nouns have capitals.

    It does before a word that begins sentences, and behind a noun ("Pleuraerguss li. Herz ..."); "im li.
    Oberlappen" and "Erguss li. basal" go on.
    """
    if not text[starts[number + 1]].isupper():
        return False
    noun = number - 2
    is_behind_noun = noun >= 0 and text[starts[noun]].isupper() and words[noun] not in of.spoken
    return is_behind_noun or words[number + 1] in of.spoken


def _is_line_end(text: str, word: str, next_start: int, end: int, gap: str, of: Language) -> bool:
    if gap.count("\n") > 1 or text[next_start] in "-*\u2022>#" or word == ":":
        return True
    if re.match(r"\d{1,2}[.)]\s", text[next_start : next_start + 5]):
        return True
    line_start = text.rfind("\n", 0, end) + 1
    is_new = text[next_start].isupper() or not of.is_spaced
    return end - line_start < _SHORT_LINE and is_new and word not in of.goes_on
