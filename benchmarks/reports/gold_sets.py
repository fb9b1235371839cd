"""The gold sets of ``benchmarks/reports/gold``, read part by part."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

GOLD = Path(__file__).parent / "gold"

Part = Literal["development", "test"]

_MARK = re.compile(r"\{([^|}]*)\|([^}]*)\}")
_ASSERTIONS = {"A": "absent", "H": "historical", "P": "present", "U": "uncertain", "Y": "hypothetical"}
STYLES: Mapping[Part, tuple[str, ...]] = {
    "development": ("east", "outpatient", "template", "telegraph", "ct", "hard", "county", "followup"),
    "test": ("night", "veterans", "children", "joints", "recheck"),
}
"""Files of ``gold/styles`` in each part; no template is in two of them."""
LANGUAGE_STYLES: Mapping[str, Mapping[Part, tuple[str, ...]]] = {
    "german": {"development": ("klinik", "praxis"), "test": ("uni", "notfall")},
    "spanish": {"development": ("hospital", "clinica"), "test": ("universitario", "urgencias")},
    "french": {"development": ("hopital", "cabinet"), "test": ("chu", "urgences")},
    "chinese": {"development": ("sanjia", "erjia"), "test": ("daxue", "jizhen")},
}
"""Files of ``gold/LANGUAGE`` in each part."""
LANGUAGE_HEADERS = {
    "german": "BEFUND",
    "spanish": "HALLAZGOS",
    "french": "R\u00c9SULTATS",
    "chinese": "\u68c0\u67e5\u6240\u89c1",
}
"""Headers of the findings."""
_CHANGES = {"new", "worse", "better", "stable", "resolved", ""}
_HEDGES = {"likely", "possible", "doubtful"}
_MAX_OF_A_TEMPLATE = 8
"""Sentences that one template makes at most: one for each word of its first list."""


@dataclass(frozen=True, kw_only=True)
class GoldEntity:
    """A marked finding."""

    span: tuple[int, int]
    assertion: str
    anatomy: str
    laterality: str
    size_mm: tuple[float, ...]
    severity: str = ""
    change: str = ""
    hedge: str = ""
    """How strongly an uncertain finding is meant."""
    concept: str = ""
    """Name of the lexicon; empty where the gold does not say."""


@dataclass(frozen=True, kw_only=True)
class GoldSentence:
    """A sentence and its findings."""

    text: str
    entities: tuple[GoldEntity, ...]
    style: str = ""
    group: str = ""
    """Class of the taxonomy in README.md."""
    section: str = ""
    """Header that it stands under; empty for none."""


@dataclass(frozen=True, kw_only=True)
class GoldMentions:
    """A case of mentions, written like ``S3:45-47``."""

    text: str
    expected: tuple[str, ...]


def digest(name: str) -> str:
    return hashlib.sha256((GOLD / name).read_bytes()).hexdigest()


def sentences(part: Part) -> list[GoldSentence]:
    return [_parse(line) for line in _of_part(_lines("sentences.txt"), part)]


def styled_sentences(part: Part) -> list[GoldSentence]:
    """Return the sentences that the templates of a part's styles make, in a fixed order."""
    return [sentence for style in STYLES[part] for sentence in _style("styles", style)]


def language_sentences(language: str, part: Part) -> list[GoldSentence]:
    """Return the sentences of a part in another language."""
    return [sentence for style in LANGUAGE_STYLES[language][part] for sentence in _style(language, style)]


def _style(folder: str, style: str) -> Iterator[GoldSentence]:
    group = section = ""
    for line in (GOLD / folder / f"{style}.txt").read_text(encoding="utf-8").split("\n"):
        directive = re.fullmatch(r"# (class|section): (.+)", line)
        if directive and directive[1] == "class":
            group, section = directive[2], ""
        elif directive:
            section = directive[2]
        elif line.strip() and not line.startswith("#"):
            for made in _expand(line, _words(folder)):
                one = _parse(made)
                yield GoldSentence(
                    text=one.text[:1].upper() + one.text[1:],
                    entities=one.entities,
                    style=style,
                    group=group,
                    section=section,
                )


_SLOT = re.compile(r"\{(?P<list>@\w+)|<(?P<word>\w+?)(?P<number>\d?)(?P<code>!?)>")


_SIDES = {"D": "R", "G": "L", "I": "L", "\u5de6": "L", "\u53f3": "R", "\u53cc": "B"}
"""Letters of sides by the first letter of a word that is not the English one's."""


def _expand(template: str, words: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Fill a template: the first list runs through its words, the others are out of step with it."""
    slots = [match["list"] for match in _SLOT.finditer(template) if match["list"]]
    seed = hashlib.sha256(template.encode()).digest()[0]
    names = [f"<{match['word']}>" for match in _SLOT.finditer(template) if match["word"]]
    count = len(words[slots[0]]) if slots else max((len(words[name]) for name in names), default=1)
    is_upper = "=" not in str(words) and re.sub(r"\{[^}]*\}|<[^>]*>", "", template).isupper()
    for turn in range(min(count, _MAX_OF_A_TEMPLATE)):
        used: set[str] = set()
        place = 0

        def fill(match: re.Match[str], turn: int = turn, used: set[str] = used) -> str:
            nonlocal place
            if match["list"]:
                options = words[match["list"]]
                at = turn if place == 0 else turn * (place + 1) + seed + place
                place += 1
                at = next(
                    (
                        at + more
                        for more in range(len(options))
                        if options[(at + more) % len(options)] not in used
                    ),
                    at,
                )
                used.add(options[at % len(options)])
                return "{" + options[at % len(options)]
            options = words[f"<{match['word']}>"]
            # The same name is the same word all over a sentence, another number is another word.
            value = options[(turn + seed + int(match["number"] or 1) - 1) % len(options)]
            letter = value[0].upper()
            return _SIDES.get(letter, letter) if match["code"] else value

        made = _SLOT.sub(fill, template)
        yield _capitals(made) if is_upper else made


def _capitals(line: str) -> str:
    """Write a line in capitals, but for its marks."""
    return re.sub(r"\|[^}]*\}|[^|]+", lambda one: one[0] if one[0][0] == "|" else one[0].upper(), line)


@cache
def _words(folder: str) -> dict[str, tuple[str, ...]]:
    lines = (line.partition(":") for line in _lines(f"{folder}/words.txt"))
    return {name: tuple(word.strip() for word in words.split("|")) for name, _, words in lines}


def mentions(part: Part) -> list[GoldMentions]:
    """Read the cases of a part: the first set was looked at while rules were written, the second was not."""
    return _mentions(_lines("mentions.txt" if part == "development" else "mentions_second.txt"))


def language_mentions(language: str, part: Part) -> list[GoldMentions]:
    """Read the cases of a part in another language."""
    return _mentions([*_lines(f"{language}/mentions.txt")][part == "test" :: 2])


def _of_part(lines: Iterator[str], part: Part) -> list[str]:
    odd = part == "development"
    return [line for line in lines if (hashlib.sha256(line.encode()).digest()[0] % 2 == 1) == odd]


def _mentions(lines: Iterable[str]) -> list[GoldMentions]:
    cases = []
    for line in lines:
        text, _, expected = line.rpartition(" => ")
        cases.append(
            GoldMentions(text=text, expected=() if expected.strip() == "none" else tuple(expected.split()))
        )
    return cases


def _lines(name: str) -> Iterator[str]:
    for line in (GOLD / name).read_text(encoding="utf-8").split("\n"):
        if line.strip() and not line.startswith("#"):
            yield line


def _parse(line: str) -> GoldSentence:
    text, at, entities = "", 0, []
    for match in _MARK.finditer(line):
        text += line[at : match.start()]
        start = len(text)
        words, _, concept = match[1].partition("=")
        text += words
        at = match.end()
        letter, *rest = match[2].split("|")
        facts = dict(fact.split("=", 1) for fact in rest)
        if facts.get("c", "") not in _CHANGES or facts.get("q", "possible") not in _HEDGES:
            raise ValueError(line)
        entities.append(
            GoldEntity(
                span=(start, len(text)),
                assertion=_ASSERTIONS[letter],
                anatomy=facts.get("a", ""),
                laterality=facts.get("l", ""),
                size_mm=tuple(float(size) for size in facts["s"].split("x")) if "s" in facts else (),
                severity=facts.get("v", ""),
                change=facts.get("c", ""),
                hedge=facts.get("q", "possible") if letter == "U" else "",
                concept=concept,
            )
        )
    return GoldSentence(text=text + line[at:], entities=tuple(entities))
