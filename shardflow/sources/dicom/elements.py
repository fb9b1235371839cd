"""Read the data elements of a DICOM file up to its pixel data.

A walk keeps only the values that are asked for and skips everything else by its length, which is what makes
the header pass several times faster than a full parse; it also learns where the pixel data lies, so native
pixels are never parsed for again. Values stay raw bytes: no third-party parser sees them, so none can quote
one.

The walk is bounded: in bytes before the pixel data, in what a deflated file inflates to, and in depth.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from shardflow.sources.dicom.dictionary import DEFLATED, EXPLICIT_BIG, EXPLICIT_LITTLE, IMPLICIT_LITTLE
from shardflow.sources.dicom.gzipped import open_file
from shardflow.sources.dicom.walk import VRS, FileElements, MalformedError, NeedMoreError, Walk
from shardflow.sources.reasons import Reason, source_error

__all__ = ["read_elements", "read_inflated"]

_FIRST_READ = 1 << 15
_TRANSFER_SYNTAX, _MEDIA_SOP_CLASS = 0x00020010, 0x00020002


def read_elements(
    path: Path, wanted: frozenset[int], *, max_header_bytes: int, max_inflated_bytes: int
) -> FileElements:
    """Read the asked-for elements that come before the pixel data.

    A file that is damaged after its meta information comes back with a `FileElements.problem`, so that its
    identifiers are known where they precede the damage.

    Raises:
        SourceError: FILE_UNREADABLE, NOT_DICOM, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    try:
        with open_file(path, max_inflated_bytes) as descriptor:
            num_bytes = os.fstat(descriptor).st_size
            size = min(_FIRST_READ, num_bytes)
            while True:
                data = os.pread(descriptor, size, 0)
                try:
                    return _parse(data, num_bytes, wanted, max_inflated_bytes)
                except NeedMoreError:
                    size = _next_size(len(data), size, num_bytes, max_header_bytes)
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, type(error).__name__) from None
    except MalformedError as error:
        raise source_error(Reason.HEADER_UNREADABLE, str(error)) from None


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
        return _inflate(data[_read_meta(data, len(data), FileElements()) :], max_inflated_bytes)
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, type(error).__name__) from None
    except (MalformedError, NeedMoreError):
        raise source_error(Reason.HEADER_UNREADABLE, "the file meta information is damaged") from None


def _next_size(num_read: int, size: int, num_bytes: int, max_header_bytes: int) -> int:
    if num_read < size or size >= num_bytes:
        raise MalformedError("the file ends inside an element")
    if size >= max_header_bytes:
        raise source_error(Reason.LIMIT_EXCEEDED, f"more than {max_header_bytes} bytes before the pixel data")
    return min(size * 4, num_bytes, max_header_bytes)


def _inflate(data: bytes, max_bytes: int) -> bytes:
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
        data, start = _inflate(data[start:], max_inflated_bytes), 0
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
