"""Model beside the rules: a local token-classification folder of transformers finds what no pattern does.

Imported only where ``deid.model`` names a folder; it needs shardflow[deid-model]. The model only adds spans:
what the rules replace stays replaced. One window is read at a time, on one CPU thread, so that the same text
gives the same spans in every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shardflow.packing.deid.text_patterns import Category, Span
from shardflow.reports.token_classifier import TokenClassifier

_CATEGORIES: Final = (
    (r"age", Category.AGE),
    (r"date|time", Category.DATE),
    (r"e-?mail", Category.EMAIL),
    (r"phone|tel|fax|contact", Category.PHONE),
    (r"url|web|ip", Category.URL),
    (r"loc|city|street|zip|address|hospital|org|place|state|country|gpe|facility|vendor", Category.PLACE),
    (r"per|name|patient|doctor|staff|hcw|phys|user", Category.NAME),
    (r"id|num|record|account|device|license|licence|plate|ssn|bio", Category.ID),
)
SETTING: Final = "deid.model"


class TextModel:
    """Token classifier of a local folder, as `TokenClassifier` reads it.

    Args:
        folder: Its folder.

    Raises:
        ConfigError: transformers is missing, the folder holds no such model, or labels have no names.
    """

    def __init__(self, folder: Path) -> None:
        self._classifier = TokenClassifier(folder, setting=SETTING, extra="deid-model")

    def find(self, text: str) -> Iterator[Span]:
        """Find what the model labels; words are covered whole."""
        for start, end, label in self._classifier.find([text], is_joined=False)[0]:
            yield Span(start=start, end=end, category=_category(label))


def _category(label: str) -> Category:
    """Return the category of a label such as ``PATIENT``."""
    name = label.lower()
    return next((category for pattern, category in _CATEGORIES if re.search(pattern, name)), Category.WORD)
