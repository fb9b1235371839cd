"""Raw element values to typed ones. A value that does not parse becomes None: no message ever quotes it."""

from __future__ import annotations

import struct
import sys
from functools import lru_cache

from shardflow.sources.dicom.quiet import third_party_silence
from shardflow.sources.dicom.walk import Elements

__all__ = [
    "code",
    "codes",
    "decimals",
    "doubles",
    "integer",
    "integers",
    "short",
    "text",
]

_SPECIFIC_CHARACTER_SET = 0x00080005
_MAX_DIGITS = 12
_MAX_INTEGER = 1 << 31
_MAX_NUMBER = 1e12
"""Larger decimals mean nothing here, and products of them would overflow."""


def code(elements: Elements, tag: int) -> str:
    """A short ASCII value such as a UID or a code string, interned; ``""`` where absent."""
    raw = elements.values.get(tag)
    return sys.intern(raw.decode("latin-1").strip("\0 \t\r\n")) if raw else ""


def codes(elements: Elements, tag: int) -> tuple[str, ...]:
    """All values of a code string, upper-cased; () where absent."""
    return (
        tuple(part.strip().upper() for part in code(elements, tag).split("\\"))
        if tag in elements.values
        else ()
    )


def text(elements: Elements, tag: int) -> str:
    """A text value in the character set that the file names; bytes that do not fit are replaced."""
    raw = elements.values.get(tag, b"")
    if not raw.isascii():
        # Few files need it, and pydicom is a third of a second to import.
        from pydicom.charset import convert_encodings, decode_bytes

        names = code(elements, _SPECIFIC_CHARACTER_SET).split("\\")
        with third_party_silence():
            try:
                return str(decode_bytes(raw, convert_encodings(names), set())).strip("\0 \t\r\n")
            except (LookupError, UnicodeError, ValueError):
                return raw.decode("latin-1").strip("\0 \t\r\n")
    return raw.decode("ascii").strip("\0 \t\r\n")


def decimals(elements: Elements, tag: int, count: int | None = None) -> tuple[float, ...] | None:
    """Values of a decimal string; None where absent, implausible, or not as many as asked for."""
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
    """Values of VR FD; None where absent, implausible, or not as many as asked for."""
    raw = elements.values.get(tag)
    if raw is None or len(raw) != 8 * count:
        return None
    numbers: tuple[float, ...] = struct.unpack(f"{'<' if elements.is_little_endian else '>'}{count}d", raw)
    return numbers if _are_plausible(numbers) else None


def _are_plausible(numbers: tuple[float, ...]) -> bool:
    return all(-_MAX_NUMBER <= number <= _MAX_NUMBER for number in numbers)


def integer(elements: Elements, tag: int) -> int | None:
    """First value of an integer string; None where absent or no integer."""
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
    """Values of VR US or SS; () where absent or of odd length."""
    raw = elements.values.get(tag, b"")
    if len(raw) % 2:
        return ()
    order, kind = "<" if elements.is_little_endian else ">", "h" if is_signed else "H"
    return struct.unpack(f"{order}{len(raw) // 2}{kind}", raw)


def short(elements: Elements, tag: int) -> int | None:
    """First value of VR US; None where absent."""
    values = integers(elements, tag)
    return values[0] if values else None
