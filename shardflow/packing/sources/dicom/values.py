"""Conversion of raw element values, and isolation of third-party parsers.

A value that does not parse becomes None, and no message quotes it. Warnings, logs and errors of pydicom quote
values of the file, so they are suppressed. pydicom reads truncated files without complaint; `is_whole` tells.
Headers of JPEG streams are read here as well, where neither pydicom nor imagecodecs is imported.
"""

from __future__ import annotations

import contextlib
import logging
import re
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardflow.packing.sources.dicom.elements import Elements

if TYPE_CHECKING:
    from pydicom import Dataset

Fact = TypeVar("Fact")

_NOTHING = logging.CRITICAL + 1
# What follows the end of a JPEG may be zeros, and of anything else so many bytes.
_MAX_JPEG_TAIL = 1 << 12


@contextlib.contextmanager
def third_party_silence() -> Iterator[None]:
    """Drop every warning and every log record of pydicom inside the block.

    What matters in them is found by our own checks and comes back as a flag or a reason; their text (pydicom
    writes ``Invalid value for VR UI: '<the value>'``) may hold identifiers. Exceptions pass: the caller keeps
    their class and drops their text. Warning filters belong to the process, so use one thread a process here.
    """
    logger = logging.getLogger("pydicom")
    level = logger.level
    logger.setLevel(_NOTHING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


_UNDEFINED = 0xFFFFFFFF
_TAG_BYTES = 8
"""Of the shortest element: fewer bytes at the end of a file are what is left of one."""


def is_whole(dataset: Dataset, num_bytes: int | None = None) -> bool:
    """Tell whether the elements of a dataset have all bytes that they declare.

    Sequences of undefined length need no look: without their delimiter pydicom raises. A file that was cut
    right between two elements cannot be told from a shorter one.

    Args:
        dataset: As `pydicom.dcmread` returned it, before its elements are touched.
        num_bytes: Size of the file; None where the dataset was deflated or not read to its end.
    """
    from pydicom.dataelem import RawDataElement

    end = 0
    for tag in dataset.keys():  # noqa: SIM118 - iterating over a dataset converts its elements
        element = dataset.get_item(tag)
        if not isinstance(element, RawDataElement) or element.length == _UNDEFINED:
            continue
        if element.value is not None and len(element.value) < element.length:
            return False
        end = max(end, element.value_tell + element.length)
    last = max(dataset.keys(), default=None)
    is_last_raw = last is not None and isinstance(dataset.get_item(last), RawDataElement)
    return num_bytes is None or not is_last_raw or not 0 < num_bytes - end < _TAG_BYTES


CHARACTER_SET = 0x00080005
"""(0008,0005) *Specific Character Set*, which `text` needs."""
_MAX_DIGITS = 12
_MAX_INTEGER = 1 << 31
_MAX_NUMBER = 1e12
"""Larger decimals mean nothing here, and products of them would overflow."""
_MAX_SHARED_BYTES = 1 << 12
"""Longer values, which no device writes, are read each time: kept ones would fill the memory."""


def shared(*tags: int) -> Callable[[Callable[[Elements], Fact]], Callable[[Elements], Fact]]:
    """Make a reader of facts run once for all files with equal values of some tags.

    Most facts are equal all over a series, and to compare values takes far less than to read them. The reader
    is given these tags alone, and no sequence; what it returns is shared, so it must be immutable.

    Args:
        tags: All that the facts depend on.
    """

    def decorate(read: Callable[[Elements], Fact]) -> Callable[[Elements], Fact]:
        @lru_cache(maxsize=1024)
        def read_once(is_little_endian: bool, stated: tuple[bytes | None, ...]) -> Fact:
            known = {tag: value for tag, value in zip(tags, stated, strict=True) if value is not None}
            return read(Elements(is_little_endian=is_little_endian, values=known))

        @wraps(read)
        def read_shared(elements: Elements) -> Fact:
            stated = tuple(map(elements.values.get, tags))
            num_bytes = sum(map(len, filter(None, stated)))
            call = read_once if num_bytes <= _MAX_SHARED_BYTES else read_once.__wrapped__
            return call(elements.is_little_endian, stated)

        return read_shared

    return decorate


def code(elements: Elements, tag: int) -> str:
    """Return a short ASCII value such as a UID or a code string, interned; ``""`` where absent."""
    raw = elements.values.get(tag)
    return sys.intern(raw.decode("latin-1").strip("\0 \t\r\n")) if raw else ""


def codes(elements: Elements, tag: int) -> tuple[str, ...]:
    """Return all values of a code string, upper-cased; () where absent."""
    return (
        tuple(part.strip().upper() for part in code(elements, tag).split("\\"))
        if tag in elements.values
        else ()
    )


def text(elements: Elements, tag: int, *, has_escapes: bool = False) -> str:
    """Return a text in the character set that the file names; bytes that do not fit are replaced.

    Escapes of ISO 2022 in bytes of ASCII are followed with `has_escapes` alone: identifiers keep their bytes,
    from which surrogates follow.
    """
    raw = elements.values.get(tag, b"")
    if not raw.isascii() or (has_escapes and b"\x1b" in raw):
        # Few files need it, and pydicom is a third of a second to import.
        from pydicom.charset import convert_encodings, decode_bytes

        names = code(elements, CHARACTER_SET).split("\\")
        with third_party_silence():
            try:
                return str(decode_bytes(raw, convert_encodings(names), set())).strip("\0 \t\r\n")
            except (LookupError, UnicodeError, ValueError):
                return raw.decode("latin-1").strip("\0 \t\r\n")
    return raw.decode("ascii").strip("\0 \t\r\n")


def decimals(elements: Elements, tag: int, count: int | None = None) -> tuple[float, ...] | None:
    """Return the values of a decimal string; None if absent, implausible, or not ``count`` values."""
    raw = elements.values.get(tag)
    numbers = _parse_decimals(raw) if raw else None
    return None if numbers is None or (count is not None and len(numbers) != count) else numbers


@lru_cache(maxsize=4096)
def _parse_decimals(raw: bytes) -> tuple[float, ...] | None:
    """One tuple for all equal values: orientation and spacing are the same all over a series."""
    try:
        numbers = tuple(float(part) for part in raw.rstrip(b"\0 ").split(b"\\"))
    except ValueError:
        return None
    return numbers if _are_plausible(numbers) else None


def doubles(elements: Elements, tag: int, count: int = 1) -> tuple[float, ...] | None:
    """Return the values of VR FD; None if absent, implausible, or not ``count`` values."""
    raw = elements.values.get(tag)
    if raw is None or len(raw) != 8 * count:
        return None
    numbers: tuple[float, ...] = struct.unpack(f"{'<' if elements.is_little_endian else '>'}{count}d", raw)
    return numbers if _are_plausible(numbers) else None


def _are_plausible(numbers: tuple[float, ...]) -> bool:
    return all(-_MAX_NUMBER <= number <= _MAX_NUMBER for number in numbers)


def integer(elements: Elements, tag: int) -> int | None:
    """Return the first value of an integer string; None where absent or no integer."""
    raw = elements.values.get(tag)
    if not raw:
        return None
    first = raw.split(b"\\", 1)[0].strip(b"\0 ")
    try:
        number = int(first) if len(first) <= _MAX_DIGITS else None
    except ValueError:
        return None
    return number if number is not None and abs(number) < _MAX_INTEGER else None


def integers(elements: Elements, tag: int, *, is_signed: bool = False) -> tuple[int, ...]:
    """Return the values of VR US or SS; () where absent or of odd length."""
    raw = elements.values.get(tag, b"")
    if len(raw) % 2:
        return ()
    order, kind = "<" if elements.is_little_endian else ">", "h" if is_signed else "H"
    return struct.unpack(f"{order}{len(raw) // 2}{kind}", raw)


def single(elements: Elements, tag: int, form: str) -> Any:
    """Return the value of a binary element, by its form in `struct`; None unless it has exactly one."""
    raw = elements.values.get(tag, b"")
    order = "<" if elements.is_little_endian else ">"
    return struct.unpack(order + form, raw)[0] if len(raw) == struct.calcsize(order + form) else None


_MOMENT = re.compile(r"(\d{4})(\d\d)(\d\d)(\d\d)(?:(\d\d)(?:(\d\d)(\.\d{1,6})?)?)?(?:[+-]\d{4})?", re.ASCII)


def seconds(moment: str) -> float | None:
    """Return seconds on the clock of a device, from an arbitrary origin; None unless a time of day is stated.

    Args:
        moment: VR DT, or VR DA followed by VR TM. A zone is not looked at.

    Example:
        >>> seconds("20240102030405.25") - seconds("20240102"  "030400")
        5.25
    """
    match = _MOMENT.fullmatch(moment)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    try:
        days = date(year, month, day).toordinal()
    except ValueError:
        return None
    if hour > 23 or minute > 59 or second > 60:
        return None
    return days * 86_400 + hour * 3600 + minute * 60 + second + float(match[7] or 0)


def short(elements: Elements, tag: int) -> int | None:
    """Return the first value of VR US; None where absent."""
    values = integers(elements, tag)
    return values[0] if values else None


def holds_end_of_jpeg(data: bytes) -> bool:
    """Tell whether a JPEG has its end marker, behind its first scan; zeros may follow, and a short tail."""
    data = data.rstrip(b"\0")
    return data.rfind(b"\xff\xd9", max(_scan_of(data), len(data) - _MAX_JPEG_TAIL)) >= 0


def _scan_of(data: bytes) -> int:
    """Return where the first scan starts: segments in front may hold anything, such as a small JPEG."""
    position = 2
    while position + 4 <= len(data):
        if data[position] != 0xFF:
            return 2  # no segment: libjpeg looks for one, and so may others
        if data[position + 1] == 0xFF:  # fill byte
            position += 1
            continue
        is_scan = data[position + 1] == 0xDA
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if is_scan:
            return position
    return len(data)


_START_OF_FRAME: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC} | {0xF7}
_APP0, _APP14 = 0xE0, 0xEE


@dataclass(frozen=True, kw_only=True, slots=True)
class CodestreamHeader:
    """Shape of one encoded frame."""

    rows: int
    columns: int
    num_components: int
    precision: int
    """Bits of a sample."""
    adobe_transform: int | None = None
    """JPEG only: color transform of the Adobe marker; 0 none (RGB), 1 YCbCr; None without the marker."""
    is_jfif: bool = False
    """JPEG only: a JFIF marker says YCbCr."""
    component_ids: bytes = b""
    """JPEG only."""


def read_jpeg_header(data: bytes) -> CodestreamHeader | None:
    """Read the frame header of a JPEG or JPEG-LS stream; None where there is none."""
    if data[:2] != b"\xff\xd8":
        return None
    position, adobe, is_jfif = 2, None, False
    try:
        while True:
            if data[position] != 0xFF:
                return None
            marker = data[position + 1]
            if marker == 0xFF:  # fill byte
                position += 1
                continue
            (length,) = struct.unpack_from(">H", data, position + 2)
            if length < 2:
                return None
            if marker in _START_OF_FRAME:
                precision, rows, columns, count = struct.unpack_from(">BHHB", data, position + 4)
                return CodestreamHeader(
                    rows=rows,
                    columns=columns,
                    num_components=count,
                    precision=precision,
                    adobe_transform=adobe,
                    is_jfif=is_jfif,
                    component_ids=data[position + 10 : position + 10 + 3 * count : 3],
                )
            segment = data[position + 4 : position + 2 + length]
            if marker == _APP14 and segment[:5] == b"Adobe" and len(segment) >= 12:
                adobe = segment[11]
            is_jfif = is_jfif or (marker == _APP0 and segment[:4] == b"JFIF")
            position += 2 + length
    except (IndexError, struct.error):
        return None
