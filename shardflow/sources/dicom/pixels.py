"""From stored values to slices in modality units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardflow.sources.dicom.headers import InstanceHeader
from shardflow.sources.dicom.series import Study
from shardflow.sources.dicom.stacks import Stack

__all__ = [
    "DecodedSlice",
    "DisplayRange",
    "SliceForm",
    "check_copies",
    "form_of",
    "iter_slices",
    "iter_stack",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceForm:
    """What all slices of a stack look like; a pure function of headers, so it is known before anything is decoded."""

    dtype: str
    """NumPy name: int16, uint16, uint8, int32 or float32."""
    unit: str
    """``HU``, ``rgb``, ``raw``, or a unit of a closed list such as ``BQML``."""
    invert: bool
    """MONOCHROME1 of a display image: values are mirrored once, so that larger is brighter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedSlice:
    """One slice: ``(rows, columns)`` or ``(rows, columns, 3)`` in modality units, C order."""

    pixels: np.ndarray[Any, np.dtype[Any]]
    num_clipped: int
    """Pixels that did not fit the dtype and were cut to its range."""
    num_padding: int
    """Pixels that the file marks as outside the image."""


def form_of(instances: Sequence[InstanceHeader]) -> SliceForm:
    """Decide dtype, unit and polarity for slices that must look alike."""
    raise NotImplementedError


def iter_slices(
    path: Path, header: InstanceHeader, *, form: SliceForm | None = None, frames: Sequence[int] | None = None
) -> Iterator[DecodedSlice]:
    """Decode the frames of one file, in file order or as listed, in modality units.

    Raises:
        SourceError: PIXEL_DATA_TRUNCATED, DECODE_FAILED, UNSUPPORTED_TRANSFER_SYNTAX, LIMIT_EXCEEDED, FILE_UNREADABLE.
    """
    raise NotImplementedError


def iter_stack(stack: Stack, locate: Callable[[InstanceHeader], Path]) -> Iterator[DecodedSlice]:
    """Decode a stack in geometric order; one slice in memory at a time. Raises as `iter_slices`."""
    raise NotImplementedError


def check_copies(study: Study, locate: Callable[[InstanceHeader], Path]) -> None:
    """Make sure that files with one SOP Instance UID hold the same pixels.

    Raises:
        SourceError: CONFLICTING_INSTANCE where they differ; else as `iter_slices`.
    """
    raise NotImplementedError


class DisplayRange:
    """Collects, slice by slice, what a viewer should map to black and white; in stored units of the stack."""

    def __init__(self, stack: Stack, form: SliceForm) -> None:
        raise NotImplementedError

    def add(self, decoded: DecodedSlice) -> None:
        """Take one slice into account."""

    def result(self) -> tuple[float, float]:
        """Low and high, low < high."""
        raise NotImplementedError
