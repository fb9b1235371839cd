"""Keyed transforms of reports: drop and shuffle sections, mask words.

    loader = sf.Loader(..., fields={"report": sf.Text()}, transform=[drop_sections, mask_words])

The choices follow the sample's own generator, so they are the same on any number of GPUs and after a resume,
and change with every epoch.
"""

from __future__ import annotations

import re
from typing import Any

KEPT_SECTIONS = ("IMPRESSION",)
DROP_PROBABILITY = 0.3
MASK_PROBABILITY = 0.15
MASK = "[MASK]"

_SECTION = re.compile(r"^(?=[A-Z][A-Z ]+:)", re.MULTILINE)
_WORD = re.compile(r"\w+")


def drop_sections(sample: dict[str, Any]) -> dict[str, Any]:
    """Drop sections with a probability, and put the others into a random order; the impression stays."""
    rng = sample["__rng__"]
    sections = [one.strip() for one in _SECTION.split(sample["report"]) if one.strip()]
    kept = [
        one for one in sections if one.startswith(KEPT_SECTIONS) or rng.random() >= DROP_PROBABILITY
    ] or sections[-1:]
    sample["report"] = "\n\n".join(kept[place] for place in rng.permutation(len(kept)))
    return sample


def mask_words(sample: dict[str, Any]) -> dict[str, Any]:
    """Replace words with a mask; ``target`` is the text before."""
    rng = sample["__rng__"]
    sample["target"] = sample["report"]
    sample["report"] = _WORD.sub(
        lambda found: MASK if rng.random() < MASK_PROBABILITY else found[0], sample["report"]
    )
    return sample
