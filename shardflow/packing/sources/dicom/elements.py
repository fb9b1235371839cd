"""Bounded parser of DICOM data elements: walks a file up to its pixel data, plain, deflated or in gzip.

A walk keeps only the requested values and skips everything else by its length, which makes the header pass
several times faster than a full parse; it also finds the pixel data, so native pixels are never searched for
again. Values stay raw bytes: no third-party parser sees them, so none can quote one. Limits are counts and
sizes, never times, so the same file has the same outcome on every machine. Files named ``*.dcm.gz`` are
inflated once into memory, and everything that reads DICOM reads that descriptor.

Source: DICOM PS3.5, section 7 (data elements, sequences of items).
"""

from __future__ import annotations

import gzip
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardflow.errors import SourceError, os_reason
from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom.dictionary import (
    DEFLATED,
    EXPLICIT_BIG,
    EXPLICIT_LITTLE,
    IMPLICIT_LITTLE,
)

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderLimits:
    """Limits on one file; above them the outcome is LIMIT_EXCEEDED."""

    max_frame_pixels: int = 1 << 28
    """Rows times columns of one frame."""
    max_frames: int = 1 << 16
    """Frames of one instance."""
    max_pixel_bytes: int = 1 << 34
    """Decoded bytes of all frames of one instance."""
    max_header_bytes: int = 1 << 26
    """Bytes of one file before its pixel data."""
    max_inflated_bytes: int = 1 << 29
    """Bytes that a file in the deflated transfer syntax inflates to."""


def check_limits(*declared: tuple[str, int, int]) -> None:
    """Refuse a file that declares more than is allowed, or a negative number.

    Args:
        declared: What is counted, how much of it the file declares, and the limit.

    Raises:
        SourceError: LIMIT_EXCEEDED.
    """
    for what, found, limit in declared:
        if not 0 <= found <= limit:
            raise source_error(Reason.LIMIT_EXCEEDED, f"{found} {what} declared, at most {limit} allowed")


MAX_DEPTH = 32
"""Deepest nesting of sequences that is followed; real files stay below ten."""

_PIXEL_TAGS = frozenset({0x7FE00008, 0x7FE00009, 0x7FE00010})
_PIXEL_GROUP = 0x7FE0
_UNDEFINED = 0xFFFFFFFF
_ITEM, _ITEM_END, _SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
_ORDERS = {
    is_little: tuple(struct.Struct(order + form).unpack_from for form in ("HH2sH", "HHI", "I"))
    for is_little, order in ((True, "<"), (False, ">"))
}
"""Readers of an explicit head, of an implicit one, and of a long length, by the order of bytes."""
_LONG_VRS = frozenset(
    {b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"}
)
_SHORT_VRS = frozenset(
    {b"AE", b"AS", b"AT", b"CS", b"DA", b"DS", b"DT", b"FD", b"FL", b"IS", b"LO"}
    | {b"LT", b"PN", b"SH", b"SL", b"SS", b"ST", b"TM", b"UI", b"UL", b"US"}
)
VRS = _LONG_VRS | _SHORT_VRS
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
    """Raw values of one file, and the place of its pixels."""

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
    """Reason for which the walk ended early; what was read before that place is kept."""


class Walk:
    """One walk over one buffer that holds at least the beginning of ``num_bytes`` bytes."""

    def __init__(self, data: bytes, num_bytes: int, *, is_little_endian: bool) -> None:
        self._data = data
        self._num_bytes = num_bytes
        self._little = is_little_endian
        self._explicit, self._implicit, self._length = _ORDERS[is_little_endian]

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
            if not is_implicit:
                position = self._short_elements(position, wanted, found.values)
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

    def _short_elements(self, position: int, wanted: frozenset[int], values: dict[int, bytes]) -> int:
        """Walk elements that are short and explicit, as nearly all are; return where another one begins."""
        data, read = self._data, self._explicit
        stop = min(len(data), self._num_bytes) - 8
        while position <= stop:
            group, number, vr, length = read(data, position)
            value = position + 8
            end = value + length
            if vr not in _SHORT_VRS or group == _PIXEL_GROUP or end > stop:
                break
            tag = group << 16 | number
            if tag in wanted:
                values[tag] = data[value:end]
            position = end
        return position

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


_CHUNK_BYTES: Final = 1 << 20


class open_file:  # noqa: N801 - a block, as `contextlib.suppress` is
    """Descriptor of a file for ``os.pread``, closed at the end of the block.

    Every file is opened here at least twice, and a generator for its block would take as long as opening it.

    Args:
        path: The file; inflated first where its name ends in ``.dcm.gz``.
        max_inflated_bytes: Bound on what it inflates to.

    Raises:
        SourceError: LIMIT_EXCEEDED; HEADER_UNREADABLE where the compressed stream is damaged;
            FILE_UNREADABLE, also for reads inside the block.
    """

    __slots__ = ("_descriptor", "_max_inflated_bytes", "_path")

    def __init__(self, path: Path, max_inflated_bytes: int) -> None:
        self._path, self._max_inflated_bytes = path, max_inflated_bytes

    def __enter__(self) -> int:
        try:
            if str(self._path).lower().endswith(".dcm.gz"):
                self._descriptor = _inflate(self._path, self._max_inflated_bytes)
            else:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(error) from None
        return self._descriptor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError):
            raise _unreadable(error) from None


def _unreadable(error: OSError) -> SourceError:
    return source_error(Reason.FILE_UNREADABLE, os_reason(error))


def _inflate(path: Path, max_bytes: int) -> int:
    descriptor = _nameless_file()
    try:
        with gzip.open(path, "rb") as stream:
            num_bytes = 0
            while chunk := stream.read(_CHUNK_BYTES):
                num_bytes += len(chunk)
                _check_size(num_bytes, max_bytes)
                _write(descriptor, chunk)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        os.close(descriptor)
        raise source_error(Reason.HEADER_UNREADABLE, "the gzip stream is damaged") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise source_error(Reason.LIMIT_EXCEEDED, f"the file inflates to more than {max_bytes} bytes")


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("inflated", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


_FIRST_READ = 1 << 15
_TRANSFER_SYNTAX, _MEDIA_SOP_CLASS = 0x00020010, 0x00020002


def read_elements(path: Path, wanted: Iterable[int], limits: HeaderLimits) -> FileElements:
    """Read the requested elements that come before the pixel data.

    A file that is damaged after its meta information comes back with a `FileElements.problem`, so that its
    identifiers are known where they precede the damage.

    Raises:
        SourceError: FILE_UNREADABLE, NOT_DICOM, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    tags = frozenset(wanted)
    try:
        with open_file(path, limits.max_inflated_bytes) as descriptor:
            num_bytes = os.fstat(descriptor).st_size
            size = min(_FIRST_READ, num_bytes)
            while True:
                data = os.pread(descriptor, size, 0)
                try:
                    return _parse(data, num_bytes, tags, limits.max_inflated_bytes)
                except NeedMoreError:
                    size = _next_size(len(data), size, num_bytes, limits.max_header_bytes)
    except MalformedError as error:
        raise source_error(Reason.HEADER_UNREADABLE, str(error)) from None


def read_at(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Read a range of an open file; fewer bytes only where the file ends."""
    data = os.pread(descriptor, num_bytes, offset)
    # A signal, a network file system, or Linux's 2 GiB bound on one read may cut it.
    while len(data) < num_bytes and (more := os.pread(descriptor, num_bytes - len(data), offset + len(data))):
        data += more
    return data


def read_inflated(path: Path, max_inflated_bytes: int) -> bytes:
    """Read the dataset of a file in the deflated transfer syntax, inflated.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    try:
        with (
            open_file(path, max_inflated_bytes) as descriptor,
            os.fdopen(os.dup(descriptor), "rb") as file,
        ):
            file.seek(0)
            data = file.read()
        return _inflate_elements(data[_read_meta(data, len(data), FileElements()) :], max_inflated_bytes)
    except (MalformedError, NeedMoreError):
        raise source_error(Reason.HEADER_UNREADABLE, "the file meta information is damaged") from None


def _next_size(num_read: int, size: int, num_bytes: int, max_header_bytes: int) -> int:
    if num_read < size or size >= num_bytes:
        raise MalformedError("the file ends inside an element")
    if size >= max_header_bytes:
        raise source_error(Reason.LIMIT_EXCEEDED, f"more than {max_header_bytes} bytes before the pixel data")
    return min(size * 4, num_bytes, max_header_bytes)


def _inflate_elements(data: bytes, max_bytes: int) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        inflated = inflater.decompress(data, max_bytes)
    except zlib.error:
        raise MalformedError("the deflated stream is damaged") from None
    if inflater.unconsumed_tail and not inflater.eof:
        raise source_error(Reason.LIMIT_EXCEEDED, f"the file inflates to more than {max_bytes} bytes")
    return inflated


def _parse(data: bytes, num_bytes: int, wanted: frozenset[int], max_inflated_bytes: int) -> FileElements:
    found = FileElements(num_bytes=num_bytes)
    start = _read_meta(data, num_bytes, found)
    if found.transfer_syntax_uid == DEFLATED:
        if len(data) < num_bytes:
            raise NeedMoreError
        data, start = _inflate_elements(data[start:], max_inflated_bytes), 0
        found.num_bytes = len(data)
    _guess_encoding(data[start : start + 8], found)
    walk = Walk(data, found.num_bytes, is_little_endian=found.is_little_endian)
    try:
        walk.dataset(start, wanted, found)
    except MalformedError as error:
        found.problem = str(error)
    except NeedMoreError:
        if len(data) < found.num_bytes:
            raise
        found.problem = "the file ends inside an element"
    return found


def _read_meta(data: bytes, num_bytes: int, found: FileElements) -> int:
    """Read the file meta information; return where the dataset begins."""
    if data[128:132] == b"DICM":
        position = 132
    elif _looks_like_dicom(data[:8], num_bytes):
        position = 0
        found.flags = ("no_preamble",)
    else:
        raise source_error(Reason.NOT_DICOM)
    walk = Walk(data, num_bytes, is_little_endian=True)
    while data[position : position + 2] == b"\x02\x00":
        is_implicit = data[position + 4 : position + 6] not in VRS
        tag, _, value, end = walk.element(position, is_implicit)
        if end is None:
            raise MalformedError("undefined length in the file meta information")
        if end > len(data):
            raise NeedMoreError
        if tag == _TRANSFER_SYNTAX:
            found.transfer_syntax_uid = data[value:end].rstrip(b"\0 ").decode("ascii", "replace")
        elif tag == _MEDIA_SOP_CLASS:
            found.media_sop_class_uid = data[value:end].rstrip(b"\0 ").decode("ascii", "replace")
        position = end
    return position


def _looks_like_dicom(head: bytes, num_bytes: int) -> bool:
    """Whether a file without preamble begins with a plausible element of group 0002 or 0008."""
    if len(head) < 8:
        return False
    if head[:2] in (b"\x02\x00", b"\x08\x00") and head[3] == 0:
        order = "<I"
    elif head[:2] == b"\x00\x08" and head[2] == 0:
        order = ">I"
    else:
        return False
    (length,) = struct.unpack_from(order, head, 4)
    return head[4:6] in VRS or bool(length < min(num_bytes, 1 << 16))


def _guess_encoding(head: bytes, found: FileElements) -> None:
    """Implicit or explicit, little or big: what the syntax says, corrected by the first element."""
    syntax = found.transfer_syntax_uid
    found.is_little_endian = syntax != EXPLICIT_BIG
    found.is_implicit = syntax == IMPLICIT_LITTLE
    if len(head) == 8:
        found.is_implicit = head[4:6] not in VRS
        if not syntax:
            found.is_little_endian = head[1] <= head[0]
    if not syntax:
        found.flags = (*found.flags, "no_transfer_syntax")
        explicit = EXPLICIT_LITTLE if found.is_little_endian else EXPLICIT_BIG
        found.transfer_syntax_uid = IMPLICIT_LITTLE if found.is_implicit else explicit
    elif found.is_implicit != (syntax == IMPLICIT_LITTLE):
        found.flags = (*found.flags, "encoding_contradicts_syntax")
