"""Readers of DICOM attributes by keyword: technical attributes once per stack, and values that name people.

They decide nothing: `shardflow.packing.deid.allowlist` chooses which technical values may be published.
Values that name people are collected from the whole header, sequences included; they are never published,
only removed from report texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_SHARED, _PER_FRAME = 0x52009229, 0x52009230
_VIEW_CODES, _CODE_VALUE = 0x00540220, 0x00080100
_INCREMENTS: Final = {"PositionerPrimaryAngle": 0x00181520, "PositionerSecondaryAngle": 0x00181521}
"""Tag of the increments of an angle over the frames of a run (PS3.3, C.8.7.5.1.3)."""
_GROUPED: Final[Mapping[str, tuple[int, int, str]]] = {
    "CTDIvol": (0x00189321, 0x00189345, "FD"),
    "ConvolutionKernel": (0x00189314, 0x00181210, "SH"),
    "EchoTime": (0x00189114, 0x00189082, "FD"),
    "Exposure": (0x00189321, 0x00189332, "FD"),
    "ExposureTime": (0x00189321, 0x00189328, "FD"),
    "FlipAngle": (0x00189112, 0x00181314, "DS"),
    "ImageLaterality": (0x00209071, 0x00209072, "CS"),
    "InversionTime": (0x00189115, 0x00189079, "FD"),
    "KVP": (0x00189325, 0x00180060, "DS"),
    "PixelSpacing": (0x00289110, 0x00280030, "DS"),
    "PositionerPrimaryAngle": (0x00189405, 0x00181510, "DS"),
    "PositionerSecondaryAngle": (0x00189405, 0x00181511, "DS"),
    "RepetitionTime": (0x00189112, 0x00180080, "DS"),
    "SliceThickness": (0x00289110, 0x00180050, "DS"),
    "XRayTubeCurrent": (0x00189321, 0x00189330, "FD"),
}
"""Keyword of a classic attribute to the functional group, tag and representation of its enhanced form (PS3.3,
C.8.13.5, C.8.15.3 and C.8.19.6)."""
_VIEW_WORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("399162004", "R-10242"), "CC"),
    **dict.fromkeys(("399368009", "R-10226"), "MLO"),
    **dict.fromkeys(("399260004", "R-10224"), "ML"),
    **dict.fromkeys(("399352003", "R-10228"), "LM"),
    **dict.fromkeys(("399099002", "R-10230"), "LMO"),
    **dict.fromkeys(("399196006", "R-10244"), "FB"),
    **dict.fromkeys(("399188001", "R-102D0"), "SIO"),
    "399192008": "XCCL",
    "399101009": "XCCM",
    "441555000": "ISO",
}
"""Codes of the usual views of mammography (PS3.16, CID 4014), in SNOMED CT and as older files write them."""


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


def read_frame_attributes(
    path: Path, keywords: Sequence[str], frames: Sequence[int], *, limits: HeaderLimits = _DEFAULT_LIMITS
) -> list[dict[str, AttributeValue]]:
    """Read named attributes of frames, as `read_attributes`.

    In an enhanced object an attribute stands in a functional group of the frame, or in the shared ones: the
    most specific statement wins. The views of a mammogram that are stated by code alone become words. Angles
    of a run during which the positioner moves are those of the frame.

    Args:
        path: The file.
        keywords: As of `read_attributes`.
        frames: From 0.
        limits: Bounds on what is read.

    Raises:
        ConfigError, SourceError: As `read_attributes`.
    """
    wanted = {keyword: _attribute(keyword) for keyword in keywords}
    tags = {attribute.tag for attribute in wanted.values()}
    increments = {keyword: tag for keyword, tag in _INCREMENTS.items() if keyword in wanted}
    more = {_CHARACTER_SET, _SHARED, _PER_FRAME, _VIEW_CODES, *increments.values()}
    elements = read_elements(path, more | tags, limits)
    root = {keyword: _READERS[one.representation](elements, one.tag) for keyword, one in wanted.items()}
    if not root.get("ViewPosition", True):
        codes = {values.code(item, _CODE_VALUE) for item in elements.items(_VIEW_CODES)[:1]}
        root["ViewPosition"] = tuple(_VIEW_WORDS[code] for code in codes & _VIEW_WORDS.keys())
    shared, per_frame = elements.items(_SHARED)[:1], elements.items(_PER_FRAME)
    moving = {keyword: steps for keyword, tag in increments.items() if (steps := _decimals(elements, tag))}
    found = []
    for frame in frames:
        levels = [*per_frame[frame : frame + 1], *shared]
        grouped = _grouped(levels, wanted.keys() & _GROUPED.keys()) if levels else {}
        moved = {keyword: _moved(root[keyword], steps, frame) for keyword, steps in moving.items()}
        found.append({keyword: value for keyword, value in {**root, **moved, **grouped}.items() if value})
    return found


def _moved(first: AttributeValue, steps: Sequence[float], frame: int) -> AttributeValue:
    """Return the angle at a frame: one step is that of each frame, several are offsets from the first angle.

    A frame without an offset has no known angle.
    """
    if len(steps) > 1 and frame >= len(steps):
        return ()
    offset = steps[frame] if len(steps) > 1 else steps[0] * frame
    return tuple(round(float(angle) + offset, 6) for angle in first)


def _grouped(levels: Sequence[Elements], keywords: Iterable[str]) -> dict[str, AttributeValue]:
    """Read attributes from the functional groups of a frame, the most specific level first."""
    found: dict[str, AttributeValue] = {}
    for keyword in keywords:
        group, tag, representation = _GROUPED[keyword]
        read = _READERS[representation]
        items = (item for level in levels for item in level.items(group)[:1])
        value = next((value for item in items if (value := read(item, tag))), None)
        if value is not None:
            found[keyword] = value
    return found


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
