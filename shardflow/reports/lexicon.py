"""The lexicon: names of findings and of anatomy with their synonyms and parents.

Two tables lie beside this module: ``findings.csv`` (name, kind, parent, synonyms, narrower) and
``anatomy.csv`` (name, parent, side, synonyms). Synonyms are joined by ``|``; so are narrower concepts, each
a name with its own synonyms behind ``=``, whose parent is the row. Plurals are made here. Tables of a
user's own come behind them and win where they say the same words.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, cast, get_args

from shardflow.errors import ConfigError
from shardflow.reports.tokens import fold_words

__all__ = ["Concept", "ConceptKind", "Lexicon", "Side", "load_lexicon", "shipped_rows"]

ConceptKind = Literal[
    "anatomy", "device", "disease", "event", "finding", "normal", "procedure", "sign", "state", "symptom"
]
"""``event``: what happened to a person (trauma). ``normal``: words that are no finding though they hold
the name of one. ``sign``: named only where the sentence names nothing more definite. ``state``: an adjective
that makes a finding of anatomy (*enlarged*)."""

Side = Literal["", "B", "L", "R"]

_FINDING_COLUMNS = ("name", "kind", "parent", "synonyms")
_ANATOMY_COLUMNS = ("name", "parent", "side", "synonyms")
_IRREGULAR = {"axis": "axes", "body": "bodies", "foot": "feet", "hilum": "hila", "tooth": "teeth"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Concept:
    """What several words name."""

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


def load_lexicon(findings: Sequence[Path] = (), anatomy: Sequence[Path] = ()) -> Lexicon:
    """Load the shipped lexicon with a user's own tables behind it.

    Args:
        findings: CSV files with the columns name, kind, parent, synonyms.
        anatomy: CSV files with the columns name, parent, side, synonyms.

    Raises:
        ConfigError: A table cannot be read, lacks a column, or holds an unknown kind or side.
    """
    if not findings and not anatomy:
        return _shipped()
    shipped = _shipped()
    concepts, phrases = dict(shipped.concepts), dict(shipped.phrases)
    for path in findings:
        _add(concepts, phrases, _finding_concepts(_own_rows(path, _FINDING_COLUMNS)))
    for path in anatomy:
        _add(concepts, phrases, _anatomy_concepts(_own_rows(path, _ANATOMY_COLUMNS)))
    return Lexicon(concepts, phrases)


def shipped_rows(name: str) -> list[dict[str, str]]:
    """Read a table that lies in this package."""
    with files("shardflow.reports").joinpath(name).open("r", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def _shipped() -> Lexicon:
    concepts: dict[str, Concept] = {}
    phrases: dict[str, Concept] = {}
    # Anatomy first: words in both tables (a vein that is a varix) are findings.
    _add(concepts, phrases, _anatomy_concepts(shipped_rows("anatomy.csv")))
    _add(concepts, phrases, _finding_concepts(shipped_rows("findings.csv")))
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
            f"a lexicon must have the columns {', '.join(columns)}, got none called {', '.join(missing)}; "
            "name them in the first line."
        )
    if any(not row["name"].strip() for row in rows):
        raise ConfigError(
            "every row of a lexicon must have a name, got an empty one; fill or remove the row."
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
