"""Comparison of findings and marked regions (concept, anatomy, side, size), and rule E7: anatomical levels.

Names are compared through the lexicon of `shardflow.reports`: equal, or one a kind (or part) of the other.
The table ``levels.csv`` gives shares of the scanned height, from the head's side down: rough places for whole
examinations of a body part. The best linear rules of this kind miss by 6 mm and more, so the weight is
capped, and this evidence is never enough by itself.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from shardflow.reports.alignment.evidence import AlignmentRules, Evidence
from shardflow.reports.alignment.images import SeriesFacts
from shardflow.reports.lexicon import Concept, Lexicon, load_lexicon, word_set
from shardflow.reports.tokens import PhraseIndex, keep_longest, tokenize

_TOO_WIDE = frozenset(("abnormality", "disease"))
"""Concepts that nearly everything is a kind of; they match nothing."""
_GENERIC = frozenset(("lesion", "neoplasm", "mass", "focus"))
"""Names of regions that say no more than that something is there."""
_NO_FINDINGS = word_set("anatomy normal state")
_FOCAL = word_set(
    """
    abscess aneurysm calculus fracture hematoma hemorrhage infarct lesion lymphadenopathy metastasis neoplasm
    """
)
_DEFINITE = 3
"""Steps below the widest concept (abnormality > lesion > nodule > *solid nodule*)."""
_SIZES_DIFFER = 0.5
_CLOSE = 0.25
_SAME_MM = 1.0
"""A report rounds: 19 mm are 1.9 cm, and 2 cm elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A finding as the report describes it."""

    entity: int
    """Its place in ``report.json``."""
    concept: str
    anatomy: str
    side: str
    size_mm: tuple[float, ...]
    is_uncertain: bool

    @property
    def longest_mm(self) -> float | None:
        """The longest diameter that is stated."""
        return max(self.size_mm) if self.size_mm else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """The concepts that a label names."""

    findings: frozenset[str]
    anatomy: frozenset[str]

    @property
    def is_generic(self) -> bool:
        """Whether it names a region without saying of what."""
        return self.findings <= _GENERIC


def read_finding(number: int, entity: Mapping[str, Any]) -> Finding:
    """Read one entity of ``report.json``."""
    anatomy = entity.get("anatomy")
    return Finding(
        entity=number,
        concept=entity["concept"],
        anatomy=anatomy["name"] if anatomy else "",
        side=entity.get("laterality") or "",
        size_mm=tuple(entity.get("size_mm") or ()),
        # Where the reader says how probable it is, that counts beside the confidence of its place.
        is_uncertain=entity["assertion"] == "uncertain" and entity.get("probability") is None,
    )


@lru_cache(maxsize=4096)
def read_label(words: str) -> Label:
    """Read the label of a marked region: what of the lexicon it names."""
    tokens = tokenize(words.replace("_", " "))
    found = _index().find(tokens)
    # "thyroid nodule" is a finding, and still says where.
    places = keep_longest(one for one in found if one.value.kind == "anatomy")
    return Label(
        findings=frozenset(
            one.value.name for one in keep_longest(found) if one.value.kind not in _NO_FINDINGS
        ),
        anatomy=frozenset(one.value.name for one in places),
    )


def are_alike(one: str, other: str) -> bool:
    """Whether two findings have the same name, one is a kind of the other, or both of something definite.

    A *solid nodule* and a *pulmonary nodule* are nodules; cysts and nodules are lesions, which says nothing.
    """
    return one == other or one in _wider(other) or other in _wider(one) or _definite(one) == _definite(other)


def is_focal(finding: Finding) -> bool:
    """Whether a finding is in one place: something with a size, or a lesion of some kind."""
    return bool(finding.size_mm) or bool(_FOCAL & {finding.concept, *_wider(finding.concept)})


def is_same_place(one: str, other: str) -> bool | None:
    """Whether two anatomical names are equal or one is part of the other; None where one is unsaid."""
    if not one or not other:
        return None
    return one == other or one in _around(other) or other in _around(one)


def are_same_side(one: str, other: str) -> bool | None:
    """Whether two sides fit each other; None where one is unsaid."""
    if not one or not other:
        return None
    return one == other or "B" in (one, other)


def are_similar_sizes(one: float | None, other: float | None) -> bool | None:
    """Whether two diameters differ by at most half of the larger one; None where one is unknown."""
    if not one or not other:
        return None
    return abs(one - other) <= _SIZES_DIFFER * max(one, other)


def are_close_sizes(one: float | None, other: float | None) -> bool:
    """Whether two diameters are known and differ by at most a quarter of the larger one."""
    return bool(one and other and abs(one - other) <= _CLOSE * max(one, other))


def is_same_finding(one: Finding, other: Finding) -> bool:
    """Whether two mentions of findings may be of the same thing: nothing speaks against it."""
    if one.longest_mm and other.longest_mm and abs(one.longest_mm - other.longest_mm) > _SAME_MM:
        return False
    return (
        are_alike(one.concept, other.concept)
        and is_same_place(one.anatomy, other.anatomy) is not False
        and are_same_side(one.side, other.side) is not False
    )


def count_distinct(findings: Sequence[Finding]) -> int:
    """Count what must be different things; findings are taken in the text's order."""
    kept: list[Finding] = []
    for finding in sorted(findings, key=lambda one: one.entity):
        if not any(is_same_finding(finding, one) for one in kept):
            kept.append(finding)
    return len(kept)


@cache
def _index() -> PhraseIndex[Concept]:
    return PhraseIndex(load_lexicon().phrases)


@cache
def _wider(name: str) -> frozenset[str]:
    return _ancestors(load_lexicon(), name) - _TOO_WIDE


@cache
def _definite(name: str) -> str:
    """Return what a finding is a kind of, where that is definite enough; else its own name."""
    lexicon = load_lexicon()
    concept = lexicon.concepts.get(name)
    if concept is None or len(lexicon.ancestors(concept)) < _DEFINITE:
        return name
    return concept.parent


@cache
def _around(name: str) -> frozenset[str]:
    return _ancestors(load_lexicon(), f"anatomy:{name}")


def _ancestors(lexicon: Lexicon, key: str) -> frozenset[str]:
    concept = lexicon.concepts.get(key)
    return frozenset(lexicon.ancestors(concept)) if concept is not None else frozenset()


def level_evidence(finding: Finding, series: Sequence[SeriesFacts], rules: AlignmentRules) -> list[Evidence]:
    """Guess the slices of the first axial stack of a body part that the table knows."""
    for one in series:
        if one.is_localizer or one.plane != "axial" or len(one.heights_mm) < 2:
            continue
        bounds = _bounds(one.body_part, finding.anatomy)
        if bounds is None:
            return []
        top, bottom = max(one.heights_mm), min(one.heights_mm)
        middle, reach = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2
        weights = {}
        for place, height in enumerate(one.heights_mm):
            share = (top - height) / (top - bottom)
            if bounds[0] <= share <= bounds[1]:
                weights[place] = max(1.0 - (abs(share - middle) / reach) ** 2, 0.01)
        if not weights:
            return []
        return [
            Evidence(
                rule="E7",
                family="level",
                series=one.index,
                weights=weights,
                confidence=rules.level_prior,
                is_region=True,
                facts={"level": [*bounds]},
            )
        ]
    return []


def _bounds(body_part: str, anatomy: str) -> tuple[float, float] | None:
    """Look up anatomy, or what it is part of; the narrowest stretch of those that fit."""
    if not anatomy:
        return None
    fitting = [bounds for name, bounds in _table().get(body_part, {}).items() if is_same_place(anatomy, name)]
    return min(fitting, key=lambda one: (one[1] - one[0], one), default=None)


@cache
def _table() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    table: dict[str, dict[str, tuple[float, float]]] = {}
    with files("shardflow.reports.alignment").joinpath("levels.csv").open("r", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            table.setdefault(row["body_part"], {})[row["anatomy"]] = (float(row["from"]), float(row["to"]))
    return table
