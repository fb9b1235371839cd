"""Lookup tables of a file: its modality LUT and its palette. Read only where a header says there is one.

Source: DICOM PS3.3, C.11.1.1 (modality LUT), C.7.6.3.1.5 and C.7.6.3.1.6 (palette), C.7.9.2 (segmented
    palette).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardflow.sources.dicom import values
from shardflow.sources.dicom.elements import read_elements
from shardflow.sources.dicom.limits import HeaderLimits
from shardflow.sources.dicom.quiet import third_party_silence
from shardflow.sources.dicom.walk import Elements, FileElements
from shardflow.sources.reasons import Reason, source_error

__all__ = ["LookupTable", "read_modality_lut", "read_palette"]

Array = np.ndarray[Any, np.dtype[Any]]

_MODALITY_LUT, _LUT_DESCRIPTOR, _LUT_DATA = 0x00283000, 0x00283002, 0x00283006
_PALETTE_DESCRIPTORS = (0x00281101, 0x00281102, 0x00281103)
_PALETTE_DATA = (0x00281201, 0x00281202, 0x00281203)
_SEGMENTED_DATA = (0x00281221, 0x00281222, 0x00281223)
_MAX_ENTRIES = 1 << 16


class LookupTable:
    """Maps stored values to table entries; values outside take the first or the last entry."""

    def __init__(self, entries: Array, first: int) -> None:
        """Take ``(n,)`` or ``(n, 3)`` entries, the first of which belongs to the stored value ``first``."""
        self.entries = entries
        self._first = first

    def apply(self, stored: Array) -> Array:
        """Look every value up; a palette adds an axis of three samples."""
        index = stored.astype(np.int64) - self._first
        return np.take(self.entries, np.clip(index, 0, len(self.entries) - 1), axis=0)


def read_modality_lut(path: Path, limits: HeaderLimits, *, is_signed: bool) -> LookupTable:
    """Read the table that replaces slope and intercept.

    Raises:
        SourceError: INVALID_IMAGE_DESCRIPTION where the table is damaged; else as `read_elements`.
    """
    item = _read(path, {_MODALITY_LUT}, limits).items(_MODALITY_LUT)[0]
    num_entries, first, bits = _descriptor(item, _LUT_DESCRIPTOR, is_signed=is_signed)
    data = item.values.get(_LUT_DATA, b"")
    if bits == 8 and len(data) in (num_entries, num_entries + 1):
        return LookupTable(np.frombuffer(data, np.uint8, num_entries), first)
    if len(data) < 2 * num_entries:
        raise _invalid("the modality LUT is shorter than its descriptor says")
    order = "<" if item.is_little_endian else ">"
    return LookupTable(np.frombuffer(data, f"{order}u2", num_entries).astype(np.uint16), first)


def read_palette(path: Path, limits: HeaderLimits, *, is_signed: bool) -> LookupTable:
    """Read the palette of a PALETTE COLOR image as 8-bit RGB entries.

    Raises:
        SourceError: INVALID_IMAGE_DESCRIPTION where the palette is absent or damaged; else as
            `read_elements`.
    """
    elements = _read(path, {*_PALETTE_DESCRIPTORS, *_PALETTE_DATA, *_SEGMENTED_DATA}, limits)
    num_entries, first, bits = _descriptor(elements, _PALETTE_DESCRIPTORS[0], is_signed=is_signed)
    from pydicom.dataset import Dataset
    from pydicom.pixels import apply_color_lut

    dataset = Dataset()
    for tag in _PALETTE_DESCRIPTORS:
        dataset.add_new(tag, "US", [num_entries % _MAX_ENTRIES, 0, bits])
    for tag in (*_PALETTE_DATA, *_SEGMENTED_DATA):
        if elements.values.get(tag):
            dataset.add_new(tag, "OW", elements.values[tag])
    try:
        with third_party_silence():
            entries = np.asarray(apply_color_lut(np.arange(num_entries, dtype=np.uint16), dataset))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the table is the input's; whatever it breaks is its fault
        raise _invalid(f"the palette cannot be read: {type(error).__name__}") from None
    if entries.shape != (num_entries, 3):
        raise _invalid("the palette does not have three tables of one length")
    shift = 8 * (entries.dtype.itemsize - 1)
    # Sixteen-bit entries that hold eight-bit values all lie in the low byte.
    is_wide = shift > 0 and int(entries.max(initial=0)) > 255
    return LookupTable((entries >> shift if is_wide else entries).astype(np.uint8), first)


def _read(path: Path, tags: set[int], limits: HeaderLimits) -> FileElements:
    return read_elements(
        path,
        frozenset(tags),
        max_header_bytes=limits.max_header_bytes,
        max_inflated_bytes=limits.max_inflated_bytes,
    )


def _descriptor(elements: Elements, tag: int, *, is_signed: bool) -> tuple[int, int, int]:
    """Number of entries, first stored value that is mapped, bits of an entry."""
    unsigned = values.integers(elements, tag)
    if len(unsigned) != 3 or not 8 <= unsigned[2] <= 16:
        raise _invalid("a lookup table has no proper descriptor")
    first = values.integers(elements, tag, is_signed=is_signed)[1]
    return unsigned[0] or _MAX_ENTRIES, first, unsigned[2]


def _invalid(detail: str) -> Exception:
    return source_error(Reason.INVALID_IMAGE_DESCRIPTION, detail)
