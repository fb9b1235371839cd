"""Language of a report, or languages of a mixed one, by script and by frequent words; no model is loaded.

A report is cut at the ends of lines, sentences and headers. Each piece is of the language most of whose words
(``languages.csv``) it holds, after the rank of Cavnar and Trenkle's short words ("N-Gram-Based Text
Categorization", 1994); a word of several languages counts for each in part. A piece that says nothing is of
the language of its report. Without any vote a short text counts as English, as a bare "Cardiomegaly." is;
a longer one only if the tables of English know its words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from shardflow.format.keys import LANGUAGE_WITHOUT_RULES
from shardflow.reports.language import ENGLISH, LANGUAGES, TABLES, shared_rows, table_rows

UNKNOWN: Final = "unknown"

_PIECE: Final = re.compile(r"(?:[^\n.;:!?\u3002\uff1b\uff1a\uff01\uff1f]|[.:](?=\w))+")
_WORD: Final = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")
_SCRIPTS: Final = {
    "CJK": "chinese",
    "HIRAGANA": "japanese",
    "KATAKANA": "japanese",
    "HANGUL": "korean",
    "CYRILLIC": "russian",
}
"""Languages by the first word of a letter's name in Unicode; other scripts have their own name."""
_LATIN: Final = frozenset(("LATIN", "FULLWIDTH", "MODIFIER", "FEMININE", "MASCULINE", "MICRO"))
_OWN: Final = 1 + 2**-10
"""Vote of a word that is not English: among equal votes it wins."""
_LEAST_VOTES: Final = 0.2
"""Votes by word for a piece to have a language of its own."""
_LEAST_SHARE: Final = 0.1
"""Letters in a language that has rules, in parts of all; with fewer it is not named."""
_OF_NAMES: Final = frozenset(("de", "des", "el", "la"))
"""Words of names such as "de Quervain", which make them no English words."""
_SHORT: Final = 8
"""Words; a shorter text without a vote counts as English."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A part of a report that no rule reads."""

    span: tuple[int, int]
    """Characters, closed-open."""
    language: str
    reason: str = LANGUAGE_WITHOUT_RULES


@dataclass(frozen=True, kw_only=True, slots=True)
class Detected:
    """Languages of a report."""

    languages: tuple[str, ...]
    """Names such as ``"english"``, by the letters in each, the most first; never empty."""
    pieces: tuple[tuple[int, int, str], ...]
    """Start, stop and language of what holds words, in order; characters, closed-open."""

    @property
    def unread(self) -> tuple[Unread, ...]:
        """Parts in languages without rules; neighbors of one language are one part."""
        parts: list[Unread] = []
        is_open = False
        for start, stop, language in self.pieces:
            if language in LANGUAGES:
                is_open = False
                continue
            if is_open and parts[-1].language == language:
                start = parts.pop().span[0]
            parts.append(Unread(span=(start, stop), language=language))
            is_open = True
        return tuple(parts)

    def blank(self, text: str, language: str) -> str:
        """Return the text with spaces in place of all pieces but those of a language; places stay."""
        if all(one == language for _, _, one in self.pieces):
            return text
        parts: list[str] = []
        at = 0
        for start, stop, one in self.pieces:
            if one != language:
                parts += [text[at:start], " " * (stop - start)]
                at = stop
        return "".join([*parts, text[at:]])


def detect_languages(text: str) -> Detected:
    """Detect the languages of a report.

    Args:
        text: Any text.
    """
    if text.isascii():
        all_words = _WORD.findall(text.lower())
        if _foreign().isdisjoint(all_words) and not _words().keys().isdisjoint(all_words):
            return Detected(languages=(ENGLISH,), pieces=((0, len(text), ENGLISH),))
    pieces = [(one.start(), one.end(), _WORD.findall(one.group().lower())) for one in _PIECE.finditer(text)]
    pieces = [(start, stop, words) for start, stop, words in pieces if words]
    votes = [_votes(words) for _, _, words in pieces]
    total: Counter[str] = Counter()
    for one in votes:
        total.update(one)
    words = [word for _, _, some in pieces for word in some]
    main = _best(total) or (ENGLISH if _may_be_english(words) else UNKNOWN)
    found = tuple(
        (start, stop, _of_piece(vote, len(some), main))
        for (start, stop, some), vote in zip(pieces, votes, strict=True)
    )
    lengths: Counter[str] = Counter()
    for start, stop, language in found:
        lengths[language] += stop - start
    least = _LEAST_SHARE * sum(lengths.values())
    counted = sorted(lengths.items(), key=lambda one: (-one[1], one[0]))
    languages = tuple(name for name, count in counted if count >= least or name not in LANGUAGES)
    return Detected(languages=languages or (main,), pieces=found)


def _of_piece(votes: Mapping[str, float], num_words: int, main: str) -> str:
    """Return the language of a piece; a few foreign words, such as a name's, leave it that of its report."""
    best = _best(votes)
    return best if votes.get(best, 0.0) >= _LEAST_VOTES * num_words else main


def _votes(words: list[str]) -> dict[str, float]:
    known = _words()
    votes: dict[str, float] = {}
    for word in words:
        found = known.get(word) or (None if word.isascii() else _by_script(word))
        if found:
            for language in found:
                votes[language] = votes.get(language, 0.0) + (1 if ENGLISH in found else _OWN) / len(found)
    return votes


def _best(votes: Mapping[str, float]) -> str:
    """Return the language of most votes, English among equal ones; without a vote ``""``."""
    return max(votes, key=lambda name: (votes[name], name == ENGLISH, name), default="")


@cache
def _words() -> dict[str, tuple[str, ...]]:
    languages: dict[str, list[str]] = {}
    for row in shared_rows("languages.csv"):
        for word in row["words"].split("|"):
            names = languages.setdefault(word, [])
            if row["language"] not in names:
                names.append(row["language"])
    for word in _english() & languages.keys():
        if ENGLISH not in languages[word]:
            languages[word].append(ENGLISH)
    return {word: tuple(names) for word, names in languages.items()}


@cache
def _foreign() -> frozenset[str]:
    return frozenset(word for word, names in _words().items() if ENGLISH not in names)


def _by_script(word: str) -> tuple[str, ...]:
    """Return the language of a word by its letters, each of which counts; nothing for Latin ones."""
    if len(word) == 1 and word < "\u0400":
        return ()  # a Greek letter alone stands in reports of any language
    names = [unicodedata.name(letter, "LATIN").partition(" ")[0] for letter in word]
    scripts = [_SCRIPTS.get(name, name.lower()) for name in names if name not in _LATIN]
    if "japanese" in scripts:
        return ("japanese",)
    return (scripts[0],) if scripts else ()


def _may_be_english(words: list[str]) -> bool:
    """Return whether a text without a vote is short and without accents, or English tables know it."""
    known = sum(word in _english() for word in words)
    return 3 * known >= len(words) if len(words) >= _SHORT else all(word.isascii() for word in words)


@cache
def _english() -> frozenset[str]:
    rows = [row for table in TABLES for row in table_rows(table)]
    return (
        frozenset(word for row in rows for cell in row.values() for word in _WORD.findall(cell or ""))
        - _OF_NAMES
    )
