"""Recall of a scrubber, and of a text detector for pixels, on planted corpora, and unneeded removals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from shardflow.synthetic.identifiers.burned_in import Pixels, PlantedImage, PlantedLine
from shardflow.synthetic.identifiers.corpus import CATEGORIES, LANGUAGES, PlantedText

Finder: TypeAlias = Callable[[str], Iterable[tuple[int, int]]]
"""Returns the intervals of characters ``[start, end)`` of a text that a scrubber replaces."""

Boxes: TypeAlias = Iterable[tuple[int, int, int, int]]
"""First row, first column, row and column behind the last."""
_HIDDEN: Final = 0.9
"""Share of a line's ink that must be blanked."""
_TOKEN: Final = re.compile(r"[^\W\d_]+|\d+")
_WORD: Final = re.compile(r"[\u3400-\u9fff]|(?:(?![\u3400-\u9fff])[^\W\d_]){2,}")
"""A word of at least two letters, or one Chinese character."""
_SAYS_NOTHING: Final = frozenset(
    """
    and at de del der die du general hospital krankenhaus la las le los of the und von y zu
    établissement calle clinic clinica clínica hôpital klinikum paseo rue st saint
    """.split()  # noqa: SIM905
)
"""Words within an identifier that identify no person without the others."""


@dataclass(kw_only=True, slots=True)
class Measured:
    """Counts of one run over the corpus."""

    planted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Identifiers by language and category."""
    missed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of these, the ones with an identifying token left."""
    words: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """Words outside identifiers by language, and whether they are of a clinical sentence."""
    lost: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """Of these, the ones replaced in whole or in part."""

    @property
    def recall(self) -> float:
        """Share of all identifiers that were found; 1.0 if there are none."""
        return _share(self.missed.total(), self.planted.total())

    def lost_share(self, *, is_clinical: bool) -> float:
        """Return the share of words that were lost: of clinical sentences, or of the lines around them."""
        lost, words = (
            sum(count for (_, clinical), count in each.items() if clinical == is_clinical)
            for each in (self.lost, self.words)
        )
        return lost / max(1, words)

    def table(self) -> dict[str, Any]:
        """Return the results as JSON.

        Totals; by language recall, and ``[lost, all]`` words; by category and language ``[found, all]``.
        """
        return {
            "identifiers": self.planted.total(),
            "missed": self.missed.total(),
            "recall": round(self.recall, 5),
            "clinical_words_lost_share": round(self.lost_share(is_clinical=True), 6),
            "other_words_lost_share": round(self.lost_share(is_clinical=False), 6),
            "by_language": {
                language: {
                    "recall": round(self._recall(lambda one, name=language: one[0] == name), 5),  # type: ignore[misc]
                    "clinical_words": [self.lost[language, True], self.words[language, True]],
                    "other_words": [self.lost[language, False], self.words[language, False]],
                }
                for language in LANGUAGES
            },
            "by_category": {
                category: {
                    language: [
                        self.planted[language, category] - self.missed[language, category],
                        self.planted[language, category],
                    ]
                    for language in LANGUAGES
                }
                for category in CATEGORIES
            },
        }

    def _recall(self, of: Callable[[tuple[str, str]], bool]) -> float:
        return _share(*(sum(n for key, n in each.items() if of(key)) for each in (self.missed, self.planted)))


def measure(
    texts: Iterable[PlantedText],
    find: Finder,
    *,
    on_fault: Callable[[PlantedText, str, str], None] = lambda _text, _kind, _token: None,
) -> Measured:
    """Run a scrubber over planted texts and count.

    An identifier is missed if any of its tokens (a run of letters, or of digits) is left, however short;
    only words such as *hospital*, *street* or *von* may stay, and single letters in a name. A word outside
    identifiers is lost if any of its characters is replaced.

    Args:
        texts: From `plant`.
        find: The scrubber.
        on_fault: Called with the text, ``"missed"`` or ``"lost"``, and the token, for each fault.
    """
    result = Measured()
    for text in texts:
        covered = bytearray(len(text.text))
        for start, end in find(text.text):
            covered[start:end] = b"\1" * (end - start)
        inside = bytearray(len(text.text))
        for one in text.identifiers:
            inside[one.start : one.end] = b"\1" * (one.end - one.start)
            key = text.language, one.category
            result.planted[key] += 1
            left = [
                match[0]
                for match in _TOKEN.finditer(text.text, one.start, one.end)
                if not all(covered[match.start() : match.end()]) and not _is_harmless(match[0], one.category)
            ]
            if left:
                result.missed[key] += 1
                on_fault(text, "missed", " ".join(left))
        for match in _WORD.finditer(text.text):
            if any(inside[match.start() : match.end()]):
                continue
            result.words[text.language, text.is_clinical] += 1
            if any(covered[match.start() : match.end()]):
                result.lost[text.language, text.is_clinical] += 1
                on_fault(text, "lost", match[0])
    return result


def _is_harmless(token: str, category: str) -> bool:
    is_initial = category == "name" and len(token) == 1 and token.isascii()
    return is_initial or (category in {"name", "place"} and token.lower() in _SAYS_NOTHING)


def _share(missed: int, planted: int) -> float:
    return 1.0 - missed / planted if planted else 1.0


@dataclass(kw_only=True, slots=True)
class MeasuredPixels:
    """Counts of one run over images with planted text."""

    planted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Lines by what they are grouped by, and group: ``("", "")`` holds all, ``("turn", "90")`` some."""
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of these, the ones whose ink is blanked but for a tenth."""
    num_markers: int = 0
    num_markers_kept: int = 0
    wrong_shares: list[float] = field(default_factory=list)
    """Share of each image that is blanked when nothing is planted in it."""

    @property
    def recall(self) -> float:
        """Share of lines that were found; 1.0 if there are none."""
        return self.found["", ""] / max(1, self.planted["", ""]) if self.planted else 1.0

    def table(self) -> dict[str, Any]:
        """Return the results as JSON; groups as ``[found, all]``."""
        groups: dict[str, dict[str, list[int]]] = {}
        for (by, name), count in sorted(self.planted.items()):
            if by:
                groups.setdefault(by, {})[name] = [self.found[by, name], count]
        wrong = np.array(self.wrong_shares or [0.0])
        return {
            "lines": self.planted["", ""],
            "missed": self.planted["", ""] - self.found["", ""],
            "recall": round(self.recall, 5),
            "images": len(self.wrong_shares),
            "wrong_area_share": {
                "mean": round(float(wrong.mean()), 6),
                "worst": round(float(wrong.max()), 6),
            },
            "images_blanked_by_mistake": int((wrong > 0).sum()),
            "markers_kept": [self.num_markers_kept, self.num_markers],
            "by": groups,
        }


def measure_pixels(
    images: Iterable[PlantedImage],
    find: Callable[[Pixels], Boxes],
    *,
    on_fault: Callable[[PlantedImage, PlantedLine | None], None] = lambda _image, _line: None,
) -> MeasuredPixels:
    """Run a finder of text over images with and without planted text, and count.

    Args:
        images: From `plant_text`.
        find: Returns the boxes that are blanked in an image.
        on_fault: Called with the image and the line that was missed; with None if something is blanked in the
            image without text.
    """
    result = MeasuredPixels()
    for image in images:
        hidden = _hidden(image.pixels, find(image.pixels))
        for line in image.lines:
            share = float((hidden & line.ink).sum() / max(1, line.ink.sum()))
            if line.is_marker:
                result.num_markers += 1
                result.num_markers_kept += share < 1 - _HIDDEN
                continue
            keys = [("", ""), ("modality", image.modality), ("font", line.font), ("turn", str(line.turn)),
                    ("contrast", line.contrast), ("capitals", f"{line.height_px:03d} px")]  # fmt: skip
            result.planted.update(keys)
            if share >= _HIDDEN:
                result.found.update(keys)
            else:
                on_fault(image, line)
        wrong = float(_hidden(image.clean, find(image.clean)).mean())
        result.wrong_shares.append(wrong)
        if wrong:
            on_fault(image, None)
    return result


def _hidden(pixels: Pixels, boxes: Boxes) -> Any:
    hidden = np.zeros(pixels.shape[:2], bool)
    for top, left, bottom, right in boxes:
        hidden[top:bottom, left:right] = True
    return hidden
