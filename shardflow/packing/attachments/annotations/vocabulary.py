"""Vocabulary of region labels: names of the lexicon and controlled codes, never typed text.

A label such as ``"Left lung nodule 2 (Dr. Smith)"`` is free text and is not published. If its words are those
of the lexicon, the lexicon's own name is published instead; otherwise nothing is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from shardflow.packing.attachments.codes import Code
from shardflow.reports.language import Side
from shardflow.reports.lexicon import Lexicon, load_lexicon, word_set
from shardflow.reports.tokens import fold_words

_MAX_LABEL: Final = 128
"""Characters of a label that are looked at."""
_ASIDE = re.compile(r"\([^()]*\)|(?<![^\W\d_])[A-Za-z]\d+")
"""Text in brackets, and levels such as L1, whose letter is no side."""
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+")
_TREATMENT = re.compile(r"(?i:\b(gtv|ctv|ptv|itv)(?:[a-z]{1,2})?(?![a-z]))")
_SIDES: Final[dict[str, Side]] = {
    "l": "L", "left": "L", "lt": "L", "sin": "L", "r": "R", "right": "R", "rt": "R", "dex": "R",
    "b": "B", "bilat": "B", "bilateral": "B", "both": "B",
}  # fmt: skip
_FILLERS: Final = word_set(
    "a annotation contour entire label mask of region roi seg segment segmentation structure the"
)
_TREATMENT_WORDS: Final = frozenset({"body", "couch", "external"})
"""Labels of radiotherapy structure sets that are not anatomy."""

_UNITS: Final = word_set(
    "mm cm m mm2 cm2 mm3 cm3 ml l 1 % deg [hnsf'U] {SUVbw}g/ml {counts} ms s mm2/s um2/s 10-6.mm2/s Bq/ml"
    " kBq/ml HU g Gy cGy {ratio} {pixels} {voxels} /mm /cm"
)
"""Codes of UCUM that measurements of images come in."""
_SIDE_CODES: Final[dict[tuple[str, str], Literal["B", "L", "R"]]] = {
    ("SCT", "7771000"): "L", ("SCT", "24028007"): "R", ("SCT", "51440002"): "B",
    ("SRT", "G-A101"): "L", ("SRT", "G-A100"): "R", ("SRT", "G-A102"): "B",
    ("SNM3", "G-A101"): "L", ("SNM3", "G-A100"): "R", ("SNM3", "G-A102"): "B",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Term:
    """A label as the lexicon reads it."""

    name: str
    """The lexicon's own name; empty if the label is only a side."""
    is_anatomy: bool
    side: Side


class Vocabulary:
    """Labels that may be published, read by the shipped lexicon."""

    def __init__(self) -> None:
        self._lexicon = _shipped()

    def term(self, label: str) -> Term | None:
        """Look a label up.

        Args:
            label: A segment label, the name of a region, the meaning of a code: any text.

        Returns:
            None unless all of its words are in the lexicon.

        Example:
            >>> Vocabulary().term("Lung_Left 2")
            Term(name='lung', is_anatomy=True, side='L')
            >>> Vocabulary().term("lung of Mr Miller") is None
            True
        """
        if len(label) > _MAX_LABEL:
            return None
        label = _ASIDE.sub(" ", label)
        treatment = _TREATMENT.match(label.replace("_", " ").strip())
        words = [word.lower() for word in _PARTS.findall(label)]
        sides = {_SIDES[word] for word in words if word in _SIDES}
        side: Side = "" if not sides else sides.pop() if len(sides) == 1 else "B"
        if treatment is not None and len(words) <= 2:
            return Term(treatment[1].lower(), is_anatomy=False, side=side)
        named = [word for word in words if word not in _SIDES and word not in _FILLERS]
        if not named:
            return Term("", is_anatomy=False, side=side) if side else None
        if len(named) == 1 and named[0] in _TREATMENT_WORDS:
            return Term(named[0], is_anatomy=False, side=side)
        folded = fold_words(" ".join(named))
        for phrase in (folded, fold_words(" ".join(words))):
            concept = self._lexicon.phrases.get(" ".join(phrase))
            if concept is not None:
                return Term(concept.name, is_anatomy=concept.kind == "anatomy", side=side or concept.side)
        return None


def allow_unit(value: str) -> str | None:
    """Return a unit if it is on the list, else None."""
    return value if value in _UNITS else None


def side_of_code(code: Code | None) -> Literal["B", "L", "R"] | None:
    """Return the side that a code of laterality means, or None."""
    return None if code is None else _SIDE_CODES.get((code.scheme, code.value))


@cache
def _shipped() -> Lexicon:
    return load_lexicon()
