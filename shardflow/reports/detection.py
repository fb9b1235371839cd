"""Language of a report, or languages of a mixed one, by script and by frequent words; no model is loaded.

A report is cut at the ends of lines, sentences and headers. Each piece is of the language most of whose words
(``languages.csv``, and what has a role or is a cue or header in a language with rules) it holds, after the
rank of Cavnar and Trenkle's short words ("N-Gram-Based Text Categorization", 1994); a word of several
languages counts for each in part. A piece that says nothing, but for names of findings, is of the language of
its report if the tables of that language know its words, or if most of the report speaks that language beyond
doubt: "Pneumothorax nincs." under an English header is left unread, "Bibasilar crackles." in an English
report is not. A report without any vote is English if all its words are in the tables, as a bare
"Cardiomegaly." is.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from shardflow.format.keys import LANGUAGE_WITHOUT_RULES
from shardflow.reports.language import ENGLISH, LANGUAGES, TABLES, load_language, shared_rows, table_rows
from shardflow.reports.lexicon import load_lexicon
from shardflow.reports.tokens import fold_words

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
"""Votes by word for a piece to have a language of its own; letters alone ("s/p", "w/o") are no words."""
_LEAST_SHARE: Final = 0.1
"""Letters in a language that has rules, in parts of all; with fewer it is not named."""
_OF_NAMES: Final = frozenset(("de", "des", "el", "la"))
"""Words of names such as "de Quervain", which make them no English words."""
_NO_SPEECH: Final = frozenset(
    ("abbreviation", "abbreviation_of_number", "level_link", "title", "unbroken", "weighting")
)
"""Roles whose words are written alike in many languages."""
_SHORT: Final = 2
"""Letters; a shorter word is of any language."""
_LONG: Final = 8
"""Words; a shorter text in ASCII that says nothing at all counts as English."""
_FEW: Final = 3
_FEW_SHARE: Final = 0.25
"""Words of English, and their share of all, for a report without accents to be English as a whole."""


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
        are_english = [*map(_are_english().get, all_words)]
        is_enough = are_english.count(True) >= max(_FEW, _FEW_SHARE * len(all_words))
        if is_enough and False not in are_english:
            return Detected(languages=(ENGLISH,), pieces=((0, len(text), ENGLISH),))
    pieces = [(one.start(), one.end(), _WORD.findall(one.group().lower())) for one in _PIECE.finditer(text)]
    pieces = [(start, stop, words) for start, stop, words in pieces if words]
    votes = [_votes(words) for _, _, words in pieces]
    total: Counter[str] = Counter()
    for one in votes:
        total.update(one)
    if not total.keys() - {ENGLISH}:
        for one, (_, _, words) in zip(votes, pieces, strict=True):
            num_units = sum(word in _units() for word in words)
            if num_units:
                one[ENGLISH] = one.get(ENGLISH, 0.0) + num_units
                total[ENGLISH] += num_units
    main = _best(total)
    if not main:
        words = [word for _, _, some in pieces for word in some]
        is_short = len(words) < _LONG and all(map(str.isascii, words)) and not _has_finding(words, ENGLISH)
        main = _knowing(words) or (ENGLISH if is_short else UNKNOWN)
    own = [_of_piece(vote, some, main) for (_, _, some), vote in zip(pieces, votes, strict=True)]
    doubtful = _doubtful(text, pieces, own, main)
    found = tuple(
        (start, stop, own[number] or ((_knowing(words) or UNKNOWN) if number in doubtful else main))
        for number, (start, stop, words) in enumerate(pieces)
    )
    lengths: Counter[str] = Counter()
    for start, stop, language in found:
        lengths[language] += stop - start
    least = _LEAST_SHARE * sum(lengths.values())
    counted = sorted(lengths.items(), key=lambda one: (-one[1], one[0]))
    languages = tuple(name for name, count in counted if count >= least or name not in LANGUAGES)
    return Detected(languages=languages or (main,), pieces=found)


def _of_piece(votes: Mapping[str, float], words: Sequence[str], main: str) -> str:
    """Return the language of a piece; nothing for a few foreign words, such as a name's, or letters alone."""
    best = _best(votes)
    if best and votes[best] <= votes.get(main, 0.0):
        best = main
    if not best or all(len(word) <= _SHORT and word.isascii() for word in words):
        return ""
    if votes[best] < _LEAST_VOTES * sum(len(word) > 1 or not word.isascii() for word in words):
        return ""
    if best in LANGUAGES and not _is_spoken(words, best) and not _are_known(words, best):
        # Names of findings are much alike in many languages.
        return ""
    return best


def _is_spoken(words: Sequence[str], language: str) -> bool:
    """Return whether a piece holds a word of a language that is no name."""
    known, names = _words(), _names(language)
    return any(
        (language in known[word] if word in known else not word.isascii() and _by_script(word) == (language,))
        and word not in names
        for word in words
    )


@cache
def _names(language: str) -> frozenset[str]:
    return frozenset(phrase for phrase in load_lexicon(language=language).phrases if " " not in phrase)


@cache
def _are_english() -> dict[str, bool]:
    """Return frequent words: whether each is one of English that is no name."""
    names = _names(ENGLISH)
    return {
        word: ENGLISH in languages
        for word, languages in _words().items()
        if ENGLISH not in languages or word not in names
    }


def _doubtful(
    text: str, pieces: Sequence[tuple[int, int, list[str]]], own: Sequence[str], main: str
) -> frozenset[int]:
    """Return the numbers of pieces that may be of another language than the report, which says little."""
    silent = {
        number: len(words)
        for number, (_, _, words) in enumerate(pieces)
        if not own[number] and _has_finding(words, main) and not _are_known(words, main)
    }
    spoken = sum(
        len(words)
        for (_, stop, words), language in zip(pieces, own, strict=True)
        if language == main and text[stop : stop + 1] not in (":", "\uff1a")
    )
    return frozenset(silent) if sum(silent.values()) > spoken else frozenset()


def _has_finding(words: Sequence[str], language: str) -> bool:
    """Return whether words of a finding's name stand in a piece."""
    return language in LANGUAGES and not _of_findings(language).isdisjoint(
        fold_words(" ".join(words), language)
    )


@cache
def _of_findings(language: str) -> frozenset[str]:
    phrases = load_lexicon(language=language).phrases.items()
    return frozenset(
        phrase.split()[-1] for phrase, concept in phrases if concept.kind not in ("anatomy", "normal")
    )


def _knowing(words: Sequence[str]) -> str:
    """Return the first language with rules that knows all words; nothing for none."""
    return next((language for language in LANGUAGES if _are_known(words, language)), "")


def _are_known(words: Sequence[str], language: str) -> bool:
    """Return whether a language with rules knows all words of a piece; letters alone do not count."""
    if language not in LANGUAGES:
        return False
    if language == ENGLISH and not all(map(str.isascii, words)):
        return False
    known = _known(language)
    return all(word in known or len(word) == 1 for word in fold_words(" ".join(words), language))


@cache
def _known(language: str) -> frozenset[str]:
    """Return the words of a language's tables, and the inflected ones that they generate."""
    lexicon = load_lexicon(language=language)
    rows = [row for table in TABLES for row in table_rows(table, language)]
    cells = (cell for row in rows for cell in row.values() if cell)
    return frozenset(
        word
        for some in (lexicon.phrases, (" ".join(fold_words(cell, language)) for cell in cells))
        for phrase in some
        for word in phrase.split()
    )


def _votes(words: list[str]) -> dict[str, float]:
    known = _words()
    votes: dict[str, float] = {}
    for word in words:
        if word in _units():
            continue
        found = known.get(word) or (None if word.isascii() else _by_script(word))
        if found:
            for language in found:
                votes[language] = votes.get(language, 0.0) + (1 if ENGLISH in found else _OWN) / len(found)
    return votes


@cache
def _units() -> frozenset[str]:
    """Return units of sizes: written alike everywhere, they are English only where nothing else speaks."""
    return frozenset(load_language(ENGLISH).pieces["unit"].split("|"))


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
    for language in LANGUAGES:
        for word in _functional(language) - _OF_NAMES:
            names = languages.setdefault(word, [])
            if language not in names:
                names.append(language)
    for word in _english() & languages.keys():
        if ENGLISH not in languages[word]:
            languages[word].append(ENGLISH)
    return {word: tuple(names) for word, names in languages.items()}


def _by_script(word: str) -> tuple[str, ...]:
    """Return the language of a word by its letters, each of which counts; nothing for Latin ones."""
    if len(word) == 1 and word < "\u0400":
        return ()  # a Greek letter alone stands in reports of any language
    names = [unicodedata.name(letter, "LATIN").partition(" ")[0] for letter in word if letter.isalpha()]
    scripts = [_SCRIPTS.get(name, name.lower()) for name in names if name not in _LATIN]
    if "japanese" in scripts:
        return ("japanese",)
    return (scripts[0],) if scripts else ()


def _functional(language: str) -> set[str]:
    """Return the words of a language's cues, roles and headers, as they are written and folded."""
    of = load_language(language)
    tables = ("cues.csv", "headers.csv", "words.csv")
    rows = (row for table in tables for row in table_rows(table, language))
    cells = (cell for row in rows if row.get("role") not in _NO_SPEECH for cell in [*row.values()][1:])
    written = {word for cell in cells for word in _WORD.findall(cell or "") if len(word) > _SHORT}
    return written | {of.fold(word) for word in written}


@cache
def _english() -> frozenset[str]:
    rows = [row for table in TABLES if table != "patterns.csv" for row in table_rows(table)]
    return (
        frozenset(word for row in rows for cell in row.values() for word in _WORD.findall(cell or ""))
        - _OF_NAMES
    )
