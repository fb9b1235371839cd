"""Readers of DICOM attributes by keyword: technical attributes once per stack, and values that name people.

They decide nothing: `shardflow.packing.deid.allowlist` chooses which technical values may be published.
Values that name people are collected from the whole header, sequences included; they are never published,
only removed from report texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardflow.errors import ConfigError, SourceError
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.dictionary import SEQUENCES, Attribute, find_attribute
from shardflow.packing.sources.dicom.elements import Elements, HeaderLimits, read_elements

AttributeValue = tuple[str, ...] | tuple[int, ...] | tuple[float, ...]
"""All values of one attribute."""

_CHARACTER_SET = 0x00080005
_DEFAULT_LIMITS = HeaderLimits()


def read_attributes(
    path: Path, keywords: Sequence[str], *, limits: HeaderLimits = _DEFAULT_LIMITS
) -> dict[str, AttributeValue]:
    """Read named attributes of one file.

    Args:
        path: The file.
        keywords: DICOM keywords of attributes that are not sequences.
        limits: Bounds on what is read.

    Returns:
        Keyword to all its values; an attribute that is absent, empty or unreadable is left out. Values are
        those of the file and may identify a patient.

    Raises:
        ConfigError: A keyword is unknown or names a sequence.
        SourceError: As `read_elements`.
    """
    wanted = {keyword: _attribute(keyword) for keyword in keywords}
    tags = {attribute.tag for attribute in wanted.values()}
    elements = read_elements(path, {_CHARACTER_SET, *tags}, limits)
    found = {keyword: _READERS[one.representation](elements, one.tag) for keyword, one in wanted.items()}
    return {keyword: value for keyword, value in found.items() if value}


def _attribute(keyword: str) -> Attribute:
    attribute = find_attribute(keyword)
    if attribute is None or attribute.representation not in _READERS:
        raise ConfigError(f"attribute keywords must name DICOM values, got {keyword!r}; see PS3.6.")
    return attribute


def _texts(elements: Elements, tag: int) -> tuple[str, ...]:
    text = values.text(elements, tag)
    return tuple(part.strip() for part in text.split("\\")) if text else ()


def _decimals(elements: Elements, tag: int) -> tuple[float, ...]:
    return values.decimals(elements, tag) or ()


def _doubles(elements: Elements, tag: int) -> tuple[float, ...]:
    return values.doubles(elements, tag, max(1, len(elements.values.get(tag, b"")) // 8)) or ()


def _integer(elements: Elements, tag: int) -> tuple[int, ...]:
    number = values.integer(elements, tag)
    return () if number is None else (number,)


_READERS: dict[str, Callable[[Elements, int], AttributeValue]] = {
    **dict.fromkeys(("AE", "AS", "CS", "DA", "DT", "LO", "LT", "PN", "SH", "ST", "TM", "UI", "UT"), _texts),
    "DS": _decimals,
    "FD": _doubles,
    "IS": _integer,
    "US": values.integers,
}


_CODE_MEANING: Final = 0x00080104
_MAX_ITEMS: Final = 4096
"""Sequence items of one file that are searched."""

_NAMED_BY_CODES: Final[Mapping[int, str]] = {
    0x00401101: "PersonName",
    0x00080082: "InstitutionName",
}
"""Sequences whose code meaning is a plain name, with the keyword of that name (PS3.3, table 10-1)."""


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
        SourceError: As `read_attributes`.
    """
    tags = {_attribute(keyword).tag: keyword for keyword in keywords}
    elements = read_elements(path, {_CHARACTER_SET, *tags, *SEQUENCES}, limits)
    found: dict[str, set[str]] = {}
    for keyword, text in _Visit(tags).values(elements, 0):
        found.setdefault(keyword, set()).update(part.strip() for part in text.split("\\"))
    return {keyword: tuple(sorted(texts - {""})) for keyword, texts in sorted(found.items())}


class _Visit:
    """One walk through the items of a file."""

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
            # A sequence that cannot be walked does not hide the others.
            with suppress(SourceError):
                items = elements.items(tag)
            for item in items[: max(_MAX_ITEMS - self._num_items, 0)]:
                self._num_items += 1
                if _CHARACTER_SET in elements.values:
                    item.values.setdefault(_CHARACTER_SET, elements.values[_CHARACTER_SET])
                yield from self.values(item, tag)
