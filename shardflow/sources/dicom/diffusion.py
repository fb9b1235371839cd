"""Diffusion weighting of a classic image: b-value and direction, also where only private elements have them.

The values tell images at one position apart and go no further: into no dataset, no message. A private element
counts where its block has the creator that the maker documents, so another maker's element is never read.

Source: DICOM PS3.3, C.8.13.5.9 (standard attributes); the makers' conformance statements: SIEMENS MR HEADER,
GEMS_PARM_01 and GEMS_ACQU_01, Philips Imaging DD 001 and Philips MR Imaging DD 001.
"""

from __future__ import annotations

import math
import struct
from typing import Final

from shardflow.sources.dicom import values
from shardflow.sources.dicom.walk import Elements

__all__ = ["DIFFUSION_TAGS", "read_diffusion"]

_B_VALUE: Final = 0x00189087
_DIRECTION: Final = 0x00189089

_SIEMENS: Final = (0x00190010, b"SIEMENS MR HEADER")
_SIEMENS_B_VALUE: Final = 0x0019100C
_SIEMENS_DIRECTION: Final = 0x0019100E
_GE_NUMBERS: Final = (0x00430010, b"GEMS_PARM_01")
_GE_B_VALUE: Final = 0x00431039
_GE_ACQUISITION: Final = (0x00190010, b"GEMS_ACQU_01")
_GE_DIRECTION: Final = (0x001910BB, 0x001910BC, 0x001910BD)
_PHILIPS: Final = (0x20010010, b"PHILIPS IMAGING DD 001")
_PHILIPS_B_VALUE: Final = 0x20011003
_PHILIPS_MR: Final = (0x20050010, b"PHILIPS MR IMAGING DD 001")
_PHILIPS_DIRECTION: Final = (0x200510B0, 0x200510B1, 0x200510B2)

DIFFUSION_TAGS: Final = frozenset(
    {_B_VALUE, _DIRECTION, _SIEMENS_B_VALUE, _SIEMENS_DIRECTION, _GE_B_VALUE, _PHILIPS_B_VALUE}
    | {tag for tag, _ in (_SIEMENS, _GE_NUMBERS, _PHILIPS, _PHILIPS_MR)}
    | {*_GE_DIRECTION, *_PHILIPS_DIRECTION}
)
"""What `read_diffusion` looks at."""

_GE_OFFSET: Final = 1_000_000_000
"""Newer GE software adds it to the b-value."""
_MAX_B_VALUE: Final = 100_000.0


def read_diffusion(root: Elements) -> tuple[str, str]:
    """Return b-value (s/mm2) and direction as texts, only to be compared; ``""`` where not stated."""
    b_value = values.doubles(root, _B_VALUE) or _private_b_value(root)
    direction = values.doubles(root, _DIRECTION, 3) or _private_direction(root)
    return _text(b_value), _text(direction)


def _private_b_value(root: Elements) -> tuple[float, ...] | None:
    if _is_of(root, _SIEMENS):
        stated = values.integer(root, _SIEMENS_B_VALUE)
    elif _is_of(root, _GE_NUMBERS):
        stated = values.integer(root, _GE_B_VALUE)
        stated = None if stated is None else stated % _GE_OFFSET
    elif _is_of(root, _PHILIPS):
        numbers = _singles(root, _PHILIPS_B_VALUE)
        return numbers if numbers and 0 <= numbers[0] <= _MAX_B_VALUE else None
    else:
        return None
    return (float(stated),) if stated is not None and 0 <= stated <= _MAX_B_VALUE else None


def _private_direction(root: Elements) -> tuple[float, ...] | None:
    parts: list[tuple[float, ...] | None]
    if _is_of(root, _SIEMENS):
        return values.doubles(root, _SIEMENS_DIRECTION, 3)
    if _is_of(root, _GE_ACQUISITION):
        parts = [values.decimals(root, tag, 1) for tag in _GE_DIRECTION]
    elif _is_of(root, _PHILIPS_MR):
        parts = [_singles(root, tag) for tag in _PHILIPS_DIRECTION]
    else:
        return None
    found = [part[0] for part in parts if part]
    return tuple(found) if len(found) == len(parts) else None


def _is_of(root: Elements, block: tuple[int, bytes]) -> bool:
    tag, creator = block
    return root.values.get(tag, b"").strip(b"\0 ").upper() == creator


def _singles(root: Elements, tag: int) -> tuple[float, ...] | None:
    """One value of VR FL."""
    raw = root.values.get(tag, b"")
    if len(raw) != 4:
        return None
    (number,) = struct.unpack("<f" if root.is_little_endian else ">f", raw)
    return (number,) if math.isfinite(number) else None


def _text(numbers: tuple[float, ...] | None) -> str:
    return "\\".join(f"{number:g}" for number in numbers) if numbers else ""
