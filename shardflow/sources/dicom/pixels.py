"""From stored values to slices in modality units.

Order of operations: stored values -> padding found -> modality LUT or slope and intercept -> range check ->
MONOCHROME1 mirrored -> padding filled. No window is applied: `display` says what a viewer should show, the
values stay.

Source: DICOM PS3.3, C.11.1 (modality LUT), C.7.5.1.1.2 (pixel padding), C.7.6.3.1.2 (MONOCHROME1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardflow.sources.dicom.headers import InstanceHeader
from shardflow.sources.dicom.limits import HeaderLimits
from shardflow.sources.dicom.luts import LookupTable, read_modality_lut
from shardflow.sources.dicom.planes import PlaneHeader
from shardflow.sources.dicom.series import Study
from shardflow.sources.dicom.stacks import Stack
from shardflow.sources.dicom.stored import iter_stored
from shardflow.sources.dicom.units import SliceForm, form_of
from shardflow.sources.reasons import Reason, source_error

__all__ = ["DecodedSlice", "StoredReader", "check_copies", "iter_slices", "iter_stack"]

Array = np.ndarray[Any, np.dtype[Any]]
StoredReader = Callable[[Path, InstanceHeader, Sequence[int], HeaderLimits], Iterator[tuple[Array, str]]]
"""Yields stored values of the asked-for frames, as `shardflow.sources.dicom.stored.iter_stored`."""

_DEFAULT_LIMITS = HeaderLimits()
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedSlice:
    """One slice in modality units."""

    pixels: Array
    """``(rows, columns)`` or ``(rows, columns, 3)`` of the dtype of the form; C order; may be read-only."""
    num_clipped: int
    """Pixels that did not fit the dtype and were cut to its range."""
    num_padding: int
    """Pixels that the file marks as outside the image."""
    valid: Array | None
    """``(rows, columns)`` bool, False at padding; None where there is none."""
    decoder: str
    """``native``, ``imagecodecs``, ``pillow`` or ``pydicom``."""


def iter_slices(
    path: Path,
    header: InstanceHeader,
    *,
    form: SliceForm | None = None,
    frames: Sequence[int] | None = None,
    limits: HeaderLimits = _DEFAULT_LIMITS,
    read: StoredReader = iter_stored,
) -> Iterator[DecodedSlice]:
    """Decode the frames of one file in modality units; one frame in memory at a time.

    Args:
        path: The file that ``header`` was read from.
        header: Its header.
        form: What the slices must look like; by default what this one header asks for.
        frames: Which frames, in which order; by default all in file order.
        limits: Bounds on what the file may inflate to.
        read: Reads the stored values; another one reads other formats.

    Raises:
        SourceError: PIXEL_DATA_TRUNCATED, DECODE_FAILED, UNSUPPORTED_TRANSFER_SYNTAX, LIMIT_EXCEEDED,
            FILE_UNREADABLE
            or INVALID_IMAGE_DESCRIPTION.
    """
    form = form or form_of([header])
    frames = range(header.image.num_frames) if frames is None else frames
    lut = (
        read_modality_lut(path, limits, is_signed=header.image.is_signed) if header.has_modality_lut else None
    )
    for frame, (stored, decoder) in zip(frames, read(path, header, frames, limits), strict=True):
        yield _to_modality(stored, header, header.plane(frame), form, lut, decoder)


def iter_stack(
    stack: Stack,
    locate: Callable[[InstanceHeader], Path],
    *,
    form: SliceForm | None = None,
    limits: HeaderLimits = _DEFAULT_LIMITS,
) -> Iterator[DecodedSlice]:
    """Decode a stack in geometric order, all slices in one form. Raises as `iter_slices`.

    Args:
        stack: What to decode.
        locate: Path of an instance's file.
        form: The form of the whole stack, where the caller has it already.
        limits: Bounds on what a file may inflate to.
    """
    form = form or form_of([one.instance for one in stack.slices])
    position = 0
    while position < len(stack.slices):
        # Neighbours out of one multi-frame file are read in one go.
        instance = stack.slices[position].instance
        stop = position + 1
        while stop < len(stack.slices) and stack.slices[stop].instance is instance:
            stop += 1
        frames = [one.frame for one in stack.slices[position:stop]]
        yield from iter_slices(locate(instance), instance, form=form, frames=frames, limits=limits)
        position = stop


def check_copies(
    study: Study,
    locate: Callable[[InstanceHeader], Path],
    *,
    limits: HeaderLimits = _DEFAULT_LIMITS,
    read: StoredReader = iter_stored,
) -> None:
    """Make sure that files with one SOP Instance UID hold the same image, however they are compressed.

    Raises:
        SourceError: CONFLICTING_INSTANCE where they differ; else as `iter_slices`.
    """
    for pair in study.copies:
        kept, copy = pair.kept, pair.copy
        if _places(kept) != _places(copy):
            raise source_error(Reason.CONFLICTING_INSTANCE, "frames or positions")
        form = form_of([kept])
        both = zip(
            iter_slices(locate(kept), kept, form=form, limits=limits, read=read),
            iter_slices(locate(copy), copy, form=form, limits=limits, read=read),
            strict=True,
        )
        if not all(np.array_equal(first.pixels, second.pixels) for first, second in both):
            raise source_error(Reason.CONFLICTING_INSTANCE, "pixels")


def _places(header: InstanceHeader) -> list[object]:
    return [header.image.num_frames, *((plane.position, plane.orientation) for plane in header.planes)]


def _to_modality(
    stored: Array,
    header: InstanceHeader,
    plane: PlaneHeader,
    form: SliceForm,
    lut: LookupTable | None,
    decoder: str,
) -> DecodedSlice:
    if header.image.is_colour:
        return DecodedSlice(pixels=stored, num_clipped=0, num_padding=0, valid=None, decoder=decoder)
    valid = _valid(stored, header.padding) if not header.is_float else _finite(stored)
    if header.is_float and valid is not None:
        stored = np.where(valid, stored, 0)
    if lut is not None:
        pixels, num_clipped = _mirror_and_fit(lut.apply(stored), form, valid)
    else:
        # Of native ones no bit beyond those that the header states is left.
        bounds = header.image.stored_range if decoder == "native" else None
        pixels, num_clipped = _rescale(stored, plane, form, valid, bounds)
    if valid is not None:
        pixels = np.where(valid, pixels, np.asarray(form.fill).astype(pixels.dtype))
    num_padding = 0 if valid is None else int(valid.size - np.count_nonzero(valid))
    return DecodedSlice(
        pixels=pixels, num_clipped=num_clipped, num_padding=num_padding, valid=valid, decoder=decoder
    )


def _valid(stored: Array, padding: tuple[int, int] | None) -> Array | None:
    """Where a slice holds data; None where it is all data."""
    if padding is None:
        return None
    low, high = padding
    is_padding = (stored >= low) & (stored <= high) if low != high else stored == low
    return None if not is_padding.any() else ~is_padding


def _finite(stored: Array) -> Array | None:
    """Where floating point values are numbers; what is none lies outside the image."""
    finite = np.isfinite(stored)
    return None if finite.all() else finite


def _rescale(
    stored: Array,
    plane: PlaneHeader,
    form: SliceForm,
    valid: Array | None,
    bounds: tuple[int, int] | None = None,
) -> tuple[Array, int]:
    """Apply slope and intercept; ``bounds`` are what all values lie between, where that is known."""
    slope, intercept = plane.slope or 1.0, plane.intercept or 0.0
    if form.mirror is not None:
        slope, intercept = -slope, form.mirror - intercept
    if form.range is not None and abs(slope) == 1.0 and intercept.is_integer() and stored.dtype.kind != "f":
        steps = int(slope), int(intercept)
        # What the header allows says enough, mostly; only where it does not are the values looked at.
        if (bounds is not None and _fits(bounds, *steps, form.range)) or _fits(
            (int(stored.min()), int(stored.max())), *steps, form.range
        ):
            return _add_exactly(stored, int(intercept), np.dtype(form.dtype), is_negative=slope < 0), 0
    pixels = stored.astype(np.float64)
    pixels *= slope
    pixels += intercept
    return _fit(pixels, form, valid)


def _fits(ends: tuple[int, int], slope: int, intercept: int, target: tuple[int, int]) -> bool:
    lowest, highest = sorted(slope * end + intercept for end in ends)
    return target[0] <= lowest and highest <= target[1]


def _mirror_and_fit(looked_up: Array, form: SliceForm, valid: Array | None) -> tuple[Array, int]:
    pixels = looked_up.astype(np.float64)
    return _fit(pixels if form.mirror is None else form.mirror - pixels, form, valid)


def _add_exactly(stored: Array, intercept: int, dtype: np.dtype[Any], *, is_negative: bool) -> Array:
    """Plus or minus ``stored`` plus an integer, in the target dtype, with no wider array in between.

    The caller has checked that every result fits. Then arithmetic modulo the width of the dtype is exact,
    whatever the steps between wrap to.
    """
    # Another sign of the same width is a view: modulo the width it is the same number.
    pixels = stored.view(dtype) if stored.dtype.itemsize == dtype.itemsize else stored.astype(dtype)
    if intercept == 0 and not is_negative:
        return pixels
    offset = np.array([intercept]).astype(dtype)
    result: Array = (np.subtract if is_negative else np.add)(offset, pixels)
    return result


def _fit(pixels: Array, form: SliceForm, valid: Array | None) -> tuple[Array, int]:
    """Round to the dtype, cut what lies outside its range, and count it."""
    if form.range is None:
        if pixels.min() >= -_MAX_FLOAT32 and pixels.max() <= _MAX_FLOAT32:
            return pixels.astype(np.float32), 0
        outside = np.abs(pixels) > _MAX_FLOAT32
        return np.clip(pixels, -_MAX_FLOAT32, _MAX_FLOAT32).astype(np.float32), int(np.count_nonzero(outside))
    np.rint(pixels, out=pixels)
    low, high = form.range
    if low <= pixels.min() and pixels.max() <= high:
        return pixels.astype(form.dtype), 0
    outside = (pixels < low) | (pixels > high)
    if valid is not None:
        outside &= valid
    return np.clip(pixels, low, high).astype(form.dtype), int(np.count_nonzero(outside))
