"""Words around a mention that narrow down what it means: planes, contrast, views, totals, defaults."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardflow.alignment.clauses import Span

__all__ = ["contrast_of", "default_series", "plane_of", "total_of", "view_of"]

_PLANES = re.compile(r"\b(axial|coronal|sagittal)\b", re.IGNORECASE)
_WITHOUT = re.compile(
    r"\b(?:non-?\s?contrast|non-?enhanced|unenhanced|pre-?\s?contrast|without\s(?:iv\s|intravenous\s)?contrast)\b",
    re.IGNORECASE,
)
_WITH = re.compile(
    r"\b(?:post-?\s?contrast|contrast-?\s?enhanced|arterial\sphase|(?:portal\s)?venous\sphase|delayed\sphase)\b",
    re.IGNORECASE,
)
_PICTURE = r"(?:views?|radiographs?|projections?|images?|films?|x-?rays?)"
_VIEWS = (
    ("lateral", re.compile(rf"\blateral\s{_PICTURE}\b|\blateral\schest\s{_PICTURE}\b", re.IGNORECASE)),
    (
        "frontal",
        re.compile(
            rf"\b(?:frontal|pa|ap|portable|posteroanterior|anteroposterior)\s(?:chest\s)?{_PICTURE}\b",
            re.IGNORECASE,
        ),
    ),
    ("mlo", re.compile(r"\bMLO\b|\bmediolateral\soblique\b", re.IGNORECASE)),
    ("cc", re.compile(r"\bCC\s(?:view|projection|image)\b|\bcraniocaudal\b", re.IGNORECASE)),
    ("oblique", re.compile(rf"\boblique\s{_PICTURE}\b", re.IGNORECASE)),
)
_TOTAL = re.compile(r"\s?(?:of|/)\s?(\d{1,5})\b(?!\s*(?:mm|cm|%))", re.IGNORECASE)
_IN_SPAN = re.compile(r"\d\s?(?:of|/)\s?(\d{1,5})\b", re.IGNORECASE)
_DEFAULT = re.compile(
    r"\bimage\snumbers?\s(?:\w+\s){0,3}?(?:refer|correspond|relate|belong)s?\sto\s(?:the\s)?(?:\w+\s)?series\s(\d{1,5})\b",
    re.IGNORECASE,
)


def plane_of(words: str) -> str:
    """Return the plane that is named; empty if none, or several."""
    return _only({match.group(1).lower() for match in _PLANES.finditer(words)})


def contrast_of(words: str) -> bool | None:
    """Whether images with contrast are meant; None if unsaid, or both are."""
    with_it, without_it = _WITH.search(words), _WITHOUT.search(words)
    return None if (with_it is None) == (without_it is None) else with_it is not None


def view_of(words: str) -> str:
    """Return the view of a projection that is named; empty if none, or several."""
    return _only({name for name, pattern in _VIEWS if pattern.search(words)})


def total_of(text: str, mention: Span) -> int | None:
    """Return the number of images that "image 5 of 10" names."""
    match = _IN_SPAN.search(text, *mention) or _TOTAL.match(text, mention[1])
    return int(match.group(1)) if match else None


def default_series(text: str) -> int | None:
    """Return the series that a report says its image numbers refer to; None if none, or several."""
    found = {int(match.group(1)) for match in _DEFAULT.finditer(text)}
    return found.pop() if len(found) == 1 else None


def _only(found: set[str] | Sequence[str]) -> str:
    return next(iter(found)) if len(found) == 1 else ""
