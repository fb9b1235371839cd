"""The full set of technical attributes: read once per stack, not once per file.

Reads by keyword, decides nothing: which attributes are worth reading and which values may leave is the
business of `shardflow.deid.allowlist`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardflow.errors import ConfigError
from shardflow.sources.dicom import values
from shardflow.sources.dicom.elements import read_elements
from shardflow.sources.dicom.keywords import Attribute, find_attribute
from shardflow.sources.dicom.limits import HeaderLimits
from shardflow.sources.dicom.walk import Elements

__all__ = ["AttributeValue", "read_attributes"]

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
        Keyword to all its values; an attribute that is absent, empty or unreadable is left out. Values stand
        as in the file and may identify a patient.

    Raises:
        ConfigError: A keyword is unknown or names a sequence.
        SourceError: As `read_elements`.
    """
    wanted = {keyword: _attribute(keyword) for keyword in keywords}
    elements = read_elements(
        path,
        frozenset({_CHARACTER_SET, *(attribute.tag for attribute in wanted.values())}),
        max_header_bytes=limits.max_header_bytes,
        max_inflated_bytes=limits.max_inflated_bytes,
    )
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


def _shorts(elements: Elements, tag: int) -> tuple[int, ...]:
    return values.integers(elements, tag)


def _integer(elements: Elements, tag: int) -> tuple[int, ...]:
    number = values.integer(elements, tag)
    return () if number is None else (number,)


_READERS: dict[str, Callable[[Elements, int], AttributeValue]] = {
    **dict.fromkeys(("AE", "AS", "CS", "DA", "DT", "LO", "LT", "PN", "SH", "ST", "TM", "UI", "UT"), _texts),
    "DS": _decimals,
    "FD": _doubles,
    "IS": _integer,
    "US": _shorts,
}
