"""The gold sets of ``benchmarks/reports/gold``, read part by part."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GOLD = Path(__file__).parent / "gold"

Part = Literal["development", "test"]

_MARK = re.compile(r"\{([^|}]*)\|([^}]*)\}")
_ASSERTIONS = {"A": "absent", "H": "historical", "P": "present", "U": "uncertain", "Y": "hypothetical"}


@dataclass(frozen=True, kw_only=True)
class GoldEntity:
    """A marked finding."""

    span: tuple[int, int]
    assertion: str
    anatomy: str
    laterality: str
    size_mm: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class GoldSentence:
    """A sentence and its findings."""

    text: str
    entities: tuple[GoldEntity, ...]


@dataclass(frozen=True, kw_only=True)
class GoldMentions:
    """A case of mentions, written like ``S3:45-47``."""

    text: str
    expected: tuple[str, ...]


def digest(name: str) -> str:
    return hashlib.sha256((GOLD / name).read_bytes()).hexdigest()


def sentences(part: Part) -> list[GoldSentence]:
    odd = part == "development"
    lines = _lines("sentences.txt")
    return [_parse(line) for line in lines if (hashlib.sha256(line.encode()).digest()[0] % 2 == 1) == odd]


def mentions(part: Part) -> list[GoldMentions]:
    """Read the cases of a part: the first set was looked at while rules were written, the second was not."""
    cases = []
    for line in _lines("mentions.txt" if part == "development" else "mentions_second.txt"):
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
        text += match[1]
        at = match.end()
        letter, *rest = match[2].split("|")
        facts = dict(fact.split("=", 1) for fact in rest)
        entities.append(
            GoldEntity(
                span=(start, len(text)),
                assertion=_ASSERTIONS[letter],
                anatomy=facts.get("a", ""),
                laterality=facts.get("l", ""),
                size_mm=tuple(float(size) for size in facts["s"].split("x")) if "s" in facts else (),
            )
        )
    return GoldSentence(text=text + line[at:], entities=tuple(entities))
