"""Lexicon of findings and anatomy with their synonyms and parents, and the tokens that it is searched in.

Two tables of a language hold it: ``findings.csv`` (name, kind, parent, synonyms, narrower) and
``anatomy.csv`` (name, parent, side, synonyms). Synonyms are joined by ``|``; so are narrower concepts, each a
name with its own synonyms behind ``=``, whose parent is the row. Plurals are generated. User tables are
appended and win where they have the same words. Tokens keep their place in the text, which is never altered.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Literal, cast, get_args

from shardflow.errors import ConfigError
from shardflow.reports.language import ENGLISH, Side, shared_rows, table_rows


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
_NUMBERED = word_set("no nr")
"""Abbreviations only before a number."""
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
        # A question mark before a word asks for it: "?pneumonia", "Cough. ? pneumonia".
        return word != "?" or not (gap == "" or number == 0 or starts[number] > ends[number - 1])
    if word == "." and gap and (number == 0 or words[number - 1] not in _ABBREVIATIONS):
        return True
    if word == "." and gap and words[number - 1] in _NUMBERED and not words[number + 1].isdigit():
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


ConceptKind = Literal[
    "anatomy", "device", "disease", "event", "finding", "normal", "procedure", "sign", "state", "symptom"
]
"""``event``: what happened to a person (trauma). ``normal``: words that are no finding though they hold
the name of one. ``sign``: named only where the sentence names nothing more definite. ``state``: an adjective
that makes a finding of anatomy (*enlarged*)."""

_FINDING_COLUMNS = ("name", "kind", "parent", "synonyms")
_ANATOMY_COLUMNS = ("name", "parent", "side", "synonyms")
_IRREGULAR = {"axis": "axes", "body": "bodies", "foot": "feet", "hilum": "hila", "tooth": "teeth"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Concept:
    """A finding or part of anatomy with all its names."""

    name: str
    kind: ConceptKind
    parent: str = ""
    side: Side = ""
    """The side that the name implies (RUL: right)."""


@dataclass(frozen=True, slots=True)
class Lexicon:
    """All concepts, and which words name them."""

    concepts: Mapping[str, Concept]
    """By name; anatomy as ``anatomy:NAME``, because a finding may be called alike."""
    phrases: Mapping[str, Concept]
    """By words as `fold_words` gives them, joined by a blank."""
    language: str = ENGLISH

    def digest(self) -> str:
        """Return the SHA-256 of its names and what they stand for."""
        rows = sorted(f"{words}\t{one.kind}\t{one.name}" for words, one in self.phrases.items())
        parents = sorted(f"{name}\t{one.parent}\t{one.side}" for name, one in self.concepts.items())
        return hashlib.sha256("\n".join([self.language, *rows, *parents]).encode()).hexdigest()

    def ancestors(self, concept: Concept) -> list[str]:
        """Return the names of what a concept is a kind or part of, nearest first."""
        names: list[str] = []
        prefix = "anatomy:" if concept.kind == "anatomy" else ""
        while concept.parent and concept.parent not in names:
            names.append(concept.parent)
            found = self.concepts.get(prefix + concept.parent)
            if found is None:
                break
            concept = found
        return names

    def codes(self, name: str) -> Mapping[str, str]:
        """Return the codes of a finding, empty where there is none.

        Ids (`IDS`) are its own; classes (`CLASSES`) are those of its nearest ancestor that has one.
        """
        concept = self.concepts.get(name)
        own = dict(_codes().get(name, {}))
        for parent in self.ancestors(concept) if concept is not None else ():
            for scheme in CLASSES:
                if not own.get(scheme):
                    own[scheme] = _codes().get(parent, {}).get(scheme, "")
        return {scheme: own.get(scheme, "") for scheme in (*IDS, *CLASSES)}


IDS: Final = ("radlex", "snomed_ct")
CLASSES: Final = ("chexpert", "padchest")


@cache
def _codes() -> Mapping[str, Mapping[str, str]]:
    return {row["concept"]: row for row in shared_rows("codes.csv")}


LEXICONS: Final = "shardflow.report_lexicons"
"""Group of entry points; each names a callable that returns a `Lexicon`, in place of the shipped one."""


def named_lexicon(name: str) -> Lexicon:
    """Return the lexicon that an installed package offers.

    Raises:
        ConfigError: There is none of this name, or it cannot be loaded.
    """
    offered = {entry.name: entry for entry in entry_points(group=LEXICONS)}
    if name not in offered:
        known = ", ".join(sorted(offered)) or "none"
        raise ConfigError(
            f"reports.lexicon must name an installed lexicon, got {name!r}; there are: {known}. Leave it out "
            "for the shipped one."
        )
    try:
        found = offered[name].load()()
    except Exception as error:  # noqa: BLE001 -- a foreign package may raise anything
        raise ConfigError(
            f"the lexicon {name!r} must be a callable without arguments, got {type(error).__name__} on "
            "calling it; repair or uninstall its package."
        ) from None
    if not isinstance(found, Lexicon):
        raise ConfigError(f"the lexicon {name!r} must return a Lexicon, got {type(found).__name__}.")
    return found


def load_lexicon(findings: Sequence[Path] = (), anatomy: Sequence[Path] = (), name: str = "") -> Lexicon:
    """Load a lexicon with a user's own tables behind it.

    Args:
        name: Of the entry point that replaces the shipped one; empty: the shipped one.
        findings: CSV files with the columns name, kind, parent, synonyms.
        anatomy: CSV files with the columns name, parent, side, synonyms.

    Raises:
        ConfigError: A table cannot be read, lacks a column, or holds an unknown kind or side.
    """
    shipped = named_lexicon(name) if name else _shipped()
    if not findings and not anatomy:
        return shipped
    concepts, phrases = dict(shipped.concepts), dict(shipped.phrases)
    for path in findings:
        _add(concepts, phrases, _finding_concepts(_own_rows(path, _FINDING_COLUMNS)))
    for path in anatomy:
        _add(concepts, phrases, _anatomy_concepts(_own_rows(path, _ANATOMY_COLUMNS)))
    return Lexicon(concepts, phrases, shipped.language)


@cache
def _shipped() -> Lexicon:
    concepts: dict[str, Concept] = {}
    phrases: dict[str, Concept] = {}
    # Anatomy first: words in both tables (a vein that is a varix) are findings.
    _add(concepts, phrases, _anatomy_concepts(table_rows("anatomy.csv")))
    _add(concepts, phrases, _finding_concepts(table_rows("findings.csv")))
    return Lexicon(concepts, phrases)


def _add(
    concepts: dict[str, Concept], phrases: dict[str, Concept], rows: Iterable[tuple[Concept, list[str]]]
) -> None:
    for concept, synonyms in rows:
        concepts[f"anatomy:{concept.name}" if concept.kind == "anatomy" else concept.name] = concept
        for synonym in [concept.name, *synonyms] if concept.kind not in ("normal", "state") else synonyms:
            words = fold_words(synonym)
            for form in _forms(words):
                phrases[form] = concept


def _finding_concepts(rows: Iterable[Mapping[str, str]]) -> Iterator[tuple[Concept, list[str]]]:
    for number, row in enumerate(rows, start=2):
        kind = row["kind"].strip() or "finding"
        if kind not in get_args(ConceptKind):
            raise ConfigError(
                f"the kind of a finding must be one of {', '.join(get_args(ConceptKind))}, got another word "
                f"(lexicon, line {number}); correct the table."
            )
        concept = Concept(
            name=row["name"].strip(), kind=cast("ConceptKind", kind), parent=row["parent"].strip()
        )
        yield concept, _split(row["synonyms"])
        for entry in _split(row.get("narrower", "")):
            name, *synonyms = [one.strip() for one in entry.split("=")]
            yield Concept(name=name, kind=concept.kind, parent=concept.name), synonyms


def _anatomy_concepts(rows: Iterable[Mapping[str, str]]) -> Iterator[tuple[Concept, list[str]]]:
    for number, row in enumerate(rows, start=2):
        side = row["side"].strip()
        if side not in get_args(Side):
            raise ConfigError(
                f"the side of an anatomical name must be L, R, B or nothing, got another word (lexicon, line "
                f"{number}); correct the table."
            )
        name = row["name"].strip()
        concept = Concept(name=name, kind="anatomy", parent=row["parent"].strip(), side=cast("Side", side))
        yield concept, _split(row["synonyms"])


def _split(synonyms: str) -> list[str]:
    return [one.strip() for one in synonyms.split("|") if one.strip()]


def _own_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            names = () if missing else (*columns, "narrower")
            rows = [{name: row.get(name) or "" for name in names} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"a lexicon must be a readable CSV in UTF-8, got {type(error).__name__}; check the path."
        ) from None
    if missing:
        raise ConfigError(
            f"a lexicon must have the columns {', '.join(columns)}, but its first line lacks "
            f"{', '.join(missing)}; add them."
        )
    if any(not row["name"].strip() for row in rows):
        raise ConfigError(
            "every row of a lexicon must have a name, but one is empty; fill or remove that row."
        )
    return rows


def _forms(words: list[str]) -> Iterator[str]:
    """Give a name and its plural."""
    if not words:
        return
    yield " ".join(words)
    head, last = words[:-1], words[-1]
    if len(last) > 2:
        for plural in _plurals(last):
            yield " ".join([*head, plural])


def _plurals(word: str) -> Iterator[str]:
    if word in _IRREGULAR:
        yield _IRREGULAR[word]
    elif word.endswith("sis"):
        yield word[:-2] + "es"
    elif word.endswith(("ax", "ix")):
        yield word[:-1] + "ces"
        yield word[:-2] + "ices"
    elif word.endswith("us"):
        yield word[:-2] + "i"
        yield word + "es"
    elif word.endswith("um"):
        yield word[:-2] + "a"
        yield word + "s"
    elif word.endswith("y") and word[-2] not in "aeiou":
        yield word[:-1] + "ies"
    elif word.endswith(("s", "x", "z", "ch", "sh")):
        yield word + "es"
    else:
        yield word + "s"
        if word.endswith("oma"):
            yield word + "ta"
        elif word.endswith("a"):
            yield word + "e"
