"""Walk the data elements of a DICOM dataset; owns tags, lengths and nesting, knows no meaning.

Source: DICOM PS3.5, section 7 (data elements, sequences of items).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from shardflow.sources.reasons import Reason, source_error

__all__ = ["MAX_DEPTH", "VRS", "Elements", "FileElements", "MalformedError", "NeedMoreError", "Walk"]

MAX_DEPTH = 32
"""Deepest nesting of sequences that is followed; real files stay below ten."""

_PIXEL_TAGS = frozenset({0x7FE00008, 0x7FE00009, 0x7FE00010})
_UNDEFINED = 0xFFFFFFFF
_ITEM, _ITEM_END, _SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
_LONG_VRS = frozenset(
    {b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"}
)
VRS = _LONG_VRS | frozenset(
    {b"AE", b"AS", b"AT", b"CS", b"DA", b"DS", b"DT", b"FD", b"FL", b"IS", b"LO"}
    | {b"LT", b"PN", b"SH", b"SL", b"SS", b"ST", b"TM", b"UI", b"UL", b"US"}
)
"""All value representations."""


class NeedMoreError(Exception):
    """The walk ran past what was read so far."""


class MalformedError(Exception):
    """The bytes are not a chain of data elements; the message holds tags only."""


@dataclass(slots=True)
class Elements:
    """Raw values of one dataset or sequence item."""

    is_little_endian: bool = True
    is_implicit: bool = False
    depth: int = 0
    values: dict[int, bytes] = field(default_factory=dict, repr=False)
    """Tag to raw value; sequences of defined length are here too, until `items` asks for them."""
    sequences: dict[int, list[Elements]] = field(default_factory=dict, repr=False)
    """Tag to the items of a sequence of undefined length."""

    def items(self, tag: int) -> list[Elements]:
        """Items of a sequence; none where it is absent.

        Raises:
            SourceError: HEADER_UNREADABLE or LIMIT_EXCEEDED where the value is no sequence.
        """
        if tag in self.sequences or tag not in self.values:
            return self.sequences.get(tag, [])
        data = self.values[tag]
        walk = Walk(data, len(data), is_little_endian=self.is_little_endian)
        try:
            self.sequences[tag], _ = walk.items(0, len(data), self.is_implicit, self.depth + 1, keep=True)
        except (MalformedError, NeedMoreError):
            raise source_error(
                Reason.HEADER_UNREADABLE, f"({tag >> 16:04X},{tag & 0xFFFF:04X}) is not a sequence"
            ) from None
        return self.sequences[tag]


@dataclass(slots=True)
class FileElements(Elements):
    """Raw values of one file, and where its pixels lie."""

    transfer_syntax_uid: str = ""
    """From the file meta information; where that is missing, what the bytes look like."""
    media_sop_class_uid: str = ""
    num_bytes: int = 0
    """Size of the file; of the inflated stream for the deflated syntax."""
    pixel_tag: int | None = None
    pixel_vr: str = ""
    pixel_offset: int = 0
    pixel_num_bytes: int | None = None
    """None: encapsulated."""
    flags: tuple[str, ...] = ()
    problem: str | None = None
    """Why the walk ended early; what was read before that place is there."""


class Walk:
    """One walk over one buffer that holds at least the beginning of ``num_bytes`` bytes."""

    def __init__(self, data: bytes, num_bytes: int, *, is_little_endian: bool) -> None:
        self._data = data
        self._num_bytes = num_bytes
        self._little = is_little_endian
        order = "<" if is_little_endian else ">"
        self._explicit = struct.Struct(order + "HH2sH").unpack_from
        self._implicit = struct.Struct(order + "HHI").unpack_from
        self._length = struct.Struct(order + "I").unpack_from

    def element(self, position: int, is_implicit: bool) -> tuple[int, bytes, int, int | None]:
        """Tag, VR, where the value begins and where it ends (None: undefined length)."""
        try:
            if is_implicit:
                group, number, length = self._implicit(self._data, position)
                vr, value = b"", position + 8
            else:
                group, number, vr, length = self._explicit(self._data, position)
                value = position + 8
                if vr in _LONG_VRS:
                    (length,) = self._length(self._data, value)
                    value += 4
                elif vr not in VRS:
                    if group != 0xFFFE:
                        raise MalformedError(f"unknown VR in element ({group:04X},{number:04X})")
                    (length,) = self._length(self._data, position + 4)
        except struct.error:
            raise NeedMoreError from None
        return group << 16 | number, vr, value, None if length == _UNDEFINED else value + length

    def dataset(self, position: int, wanted: frozenset[int], found: FileElements) -> None:
        """Walk the dataset until its pixel data or its end."""
        is_implicit, data = found.is_implicit, self._data
        while position + 8 <= self._num_bytes:
            try:
                tag, vr, value, end = self.element(position, is_implicit)
            except MalformedError:
                if self._only_zeros_from(position):
                    return
                raise
            if tag in _PIXEL_TAGS:
                found.pixel_tag, found.pixel_vr = tag, vr.decode("ascii", "replace")
                found.pixel_offset = value
                found.pixel_num_bytes = None if end is None else end - value
                return
            if end is None:
                items, end = self.items(value, None, is_implicit or vr == b"UN", 1, keep=tag in wanted)
                if tag in wanted:
                    found.sequences[tag] = items
            elif end > self._num_bytes:
                if self._only_zeros_from(position):
                    return
                raise MalformedError(
                    f"({tag >> 16:04X},{tag & 0xFFFF:04X}) reaches beyond the end of the file"
                )
            elif tag in wanted:
                if end > len(data):
                    raise NeedMoreError
                found.values[tag] = data[value:end]
            position = end

    def items(
        self, position: int, stop: int | None, is_implicit: bool, depth: int, *, keep: bool
    ) -> tuple[list[Elements], int]:
        """Walk the items of a sequence; return them (none unless kept) and where the sequence ends."""
        if depth > MAX_DEPTH:
            raise source_error(Reason.LIMIT_EXCEEDED, f"sequences nested deeper than {MAX_DEPTH}")
        items: list[Elements] = []
        while stop is None or position + 8 <= stop:
            tag, _, value, end = self.element(position, is_implicit=True)
            if tag == _SEQUENCE_END:
                return items, value
            if tag != _ITEM:
                raise MalformedError("a sequence holds something else than items")
            item = Elements(self._little, is_implicit, depth)
            position = self._item(item, value, end, keep=keep)
            if keep:
                items.append(item)
        return items, stop

    def _item(self, item: Elements, position: int, stop: int | None, *, keep: bool) -> int:
        """Walk the elements of one item; return where it ends."""
        if stop is not None and (stop > self._num_bytes or not keep):
            if stop > self._num_bytes:
                raise MalformedError("an item reaches beyond the end of the file")
            return stop
        while stop is None or position + 8 <= stop:
            tag, vr, value, end = self.element(position, item.is_implicit)
            if tag == _ITEM_END:
                return value
            if end is None:
                is_implicit = item.is_implicit or vr == b"UN"
                item.sequences[tag], end = self.items(value, None, is_implicit, item.depth + 1, keep=keep)
            elif end > (self._num_bytes if stop is None else stop):
                raise MalformedError(f"({tag >> 16:04X},{tag & 0xFFFF:04X}) reaches beyond its item")
            elif keep:
                if end > len(self._data):
                    raise NeedMoreError
                item.values[tag] = self._data[value:end]
            position = end
        return stop

    def _only_zeros_from(self, position: int) -> bool:
        """Whether all that is left is padding; asked only near the end of a file."""
        if any(self._data[position:]):
            return False
        if self._num_bytes > len(self._data):
            raise NeedMoreError
        return True
