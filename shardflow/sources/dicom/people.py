"""What a header says about people, wherever it stands in it: also in the items of sequences.

Nothing of this leaves: the values are looked for in report texts, to be taken out of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardflow.errors import ConfigError, SourceError
from shardflow.sources.dicom import values
from shardflow.sources.dicom.elements import read_elements
from shardflow.sources.dicom.keywords import find_attribute
from shardflow.sources.dicom.limits import HeaderLimits
from shardflow.sources.dicom.sequence_tags import SEQUENCES
from shardflow.sources.dicom.walk import Elements

__all__ = ["read_everywhere"]

_CHARACTER_SET: Final = 0x00080005
_CODE_MEANING: Final = 0x00080104
_DEFAULT_LIMITS: Final = HeaderLimits()
_MAX_ITEMS: Final = 4096
"""Items of sequences of one file that are looked into."""

_NAMED_BY_CODES: Final[Mapping[int, str]] = {
    0x00401101: "PersonName",
    0x00080082: "InstitutionName",
}
"""Sequences whose code meaning is a name in plain words, and what it is a name of (PS3.3, table 10-1)."""


def read_everywhere(
    path: Path, keywords: Sequence[str], *, limits: HeaderLimits = _DEFAULT_LIMITS
) -> dict[str, tuple[str, ...]]:
    """Read text attributes of one file, at its top level and in every item of a known sequence.

    Args:
        path: The file.
        keywords: DICOM keywords of attributes whose values are texts.
        limits: Bounds on what is read.

    Returns:
        Keyword to all different values, sorted; they identify people.

    Raises:
        ConfigError: A keyword is unknown.
        SourceError: As `shardflow.sources.dicom.read_attributes`.
    """
    tags = {_tag(keyword): keyword for keyword in keywords}
    elements = read_elements(
        path,
        frozenset({_CHARACTER_SET, *tags, *SEQUENCES}),
        max_header_bytes=limits.max_header_bytes,
        max_inflated_bytes=limits.max_inflated_bytes,
    )
    found: dict[str, set[str]] = {}
    for keyword, text in _Visit(tags).values(elements, 0):
        found.setdefault(keyword, set()).update(part.strip() for part in text.split("\\"))
    return {keyword: tuple(sorted(texts - {""})) for keyword, texts in sorted(found.items())}


def _tag(keyword: str) -> int:
    attribute = find_attribute(keyword)
    if attribute is None:
        raise ConfigError(f"attribute keywords must name DICOM values, got {keyword!r}; see PS3.6.")
    return attribute.tag


class _Visit:
    """One way through the items of a file."""

    def __init__(self, tags: Mapping[int, str]) -> None:
        self._tags = tags
        self._num_items = 0

    def values(self, elements: Elements, inside: int) -> Iterator[tuple[str, str]]:
        for tag in elements.values.keys() & self._tags.keys():
            yield self._tags[tag], values.text(elements, tag)
        if (named := _NAMED_BY_CODES.get(inside)) is not None and _CODE_MEANING in elements.values:
            yield named, values.text(elements, _CODE_MEANING)
        for tag in (elements.values.keys() | elements.sequences.keys()) & SEQUENCES:
            items: list[Elements] = []
            # One sequence that cannot be walked hides none of the others.
            with suppress(SourceError):
                items = elements.items(tag)
            for item in items[: max(_MAX_ITEMS - self._num_items, 0)]:
                self._num_items += 1
                if _CHARACTER_SET in elements.values:
                    item.values.setdefault(_CHARACTER_SET, elements.values[_CHARACTER_SET])
                yield from self.values(item, tag)
