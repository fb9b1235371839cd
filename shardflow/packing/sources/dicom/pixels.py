"""Pixels in modality units: the form of a stack's slices, their conversion, and the display range.

All slices of a stack must have the same form, and packing needs it before it decodes one. The form therefore
follows from what the headers declare, never from the pixels that happen to be there.

Order of operations: stored values -> padding found -> modality LUT or slope and intercept -> range check ->
MONOCHROME1 mirrored -> padding filled. No window is applied; the display range says what a viewer, or a first
model, should map to black and white. CT has a fixed wide window, since Hounsfield units mean the same
everywhere. Projections bring their own window. Everything else, MR above all, has no absolute scale and takes
percentiles over the whole stack (per slice they would flicker).

Source: DICOM PS3.3, C.11.1 (modality LUT, rescale type), C.7.6.3.1.2 (photometric interpretation),
C.7.5.1.1.2 (pixel padding), C.11.2 (VOI LUT).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.dictionary import MAP_UNITS, STATED_UNITS
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.planes import PlaneHeader
from shardflow.packing.sources.dicom.stacks import Stack, Study
from shardflow.packing.sources.dicom.stored import LookupTable, iter_stored, read_modality_lut

AIR_HU = -1024
"""Value of padding in a CT."""

_QUANTITATIVE = frozenset({"CT", "MR", "NM", "PT"})
"""Modalities whose values are measurements: never mirrored."""

_UNITS = (STATED_UNITS | MAP_UNITS) - {"HU"}

_RANGES = {
    "uint8": (0, 255),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "uint16": (0, (1 << 16) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceForm:
    """Form that all slices of a stack share."""

    dtype: str
    """NumPy name: uint8, int16, uint16, int32 or float32."""
    unit: str
    """``HU``, ``rgb``, a unit that the files state (``BQML``, ``OD``, ...), or ``raw``: no defined unit."""
    mirror: float | None = None
    """MONOCHROME1 of a display image: each value v becomes ``mirror - v``, so that larger is brighter."""
    fill: float = 0.0
    """Value of padding, the same in every slice."""

    @property
    def range(self) -> tuple[int, int] | None:
        """Lowest and highest value of an integer dtype; None for float32."""
        return _RANGES.get(self.dtype)


class _Fact(NamedTuple):
    """The header facts that decide the form; 300 slices usually share one."""

    image: ImageDescription
    modality: str
    unit: str
    has_lut: bool
    is_localizer: bool
    is_float: bool
    slope: float | None
    intercept: float | None

    @property
    def is_hounsfield(self) -> bool:
        """A rescaled CT that says HU or nothing; a scout need not be in HU, so it must say so."""
        is_rescaled = self.slope is not None and self.intercept is not None and not self.has_lut
        return (
            self.modality == "CT"
            and is_rescaled
            and self.unit in (("HU",) if self.is_localizer else ("", "HU"))
        )

    @property
    def is_integral(self) -> bool:
        if self.is_float:
            return False
        return self.has_lut or ((self.slope or 1.0).is_integer() and (self.intercept or 0.0).is_integer())

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest value in modality units that the declared bits allow."""
        if self.has_lut:
            return 0.0, 65535.0
        ends = [stored * (self.slope or 1.0) + (self.intercept or 0.0) for stored in self.image.stored_range]
        return min(ends), max(ends)


def form_of(instances: Iterable[InstanceHeader]) -> SliceForm:
    """Decide the form of slices that must look alike.

    CT in Hounsfield units is always int16, color always uint8. Everything else takes the smallest of uint8,
    int16, uint16 and int32 that holds all values that bits stored, slope and intercept allow; float32 where
    one of these is not an integer or does not fit. Padding becomes air in a CT, elsewhere zero, or the value
    next to zero that the bits allow: the darkest pixel of a slice would differ from slice to slice.
    """
    facts = {
        _Fact(
            *(each.image, each.modality, each.unit, each.has_modality_lut, each.is_localizer, each.is_float),
            *rescale,
        )
        for each in instances
        for rescale in {(plane.slope, plane.intercept) for plane in each.planes}
    }
    if any(fact.image.is_color for fact in facts):
        return SliceForm(dtype="uint8", unit="rgb")
    low = min(fact.bounds[0] for fact in facts)
    high = max(fact.bounds[1] for fact in facts)
    if all(fact.is_hounsfield for fact in facts):
        return SliceForm(dtype="int16", unit="HU", fill=AIR_HU)
    is_mirrored = all(
        fact.image.photometric_interpretation == "MONOCHROME1" and fact.modality not in _QUANTITATIVE
        for fact in facts
    )
    units = {fact.unit for fact in facts}
    return SliceForm(
        dtype=_smallest(low, high) if all(fact.is_integral for fact in facts) else "float32",
        # A mirrored value is no longer an optical density, or whatever else the files state.
        unit=units.pop() if len(units) == 1 and units <= _UNITS and not is_mirrored else "raw",
        mirror=low + high if is_mirrored else None,
        fill=min(max(0.0, low), high),
    )


def _smallest(low: float, high: float) -> str:
    return next((name for name, (least, most) in _RANGES.items() if least <= low and high <= most), "float32")


Array = np.ndarray[Any, np.dtype[Any]]
StoredReader = Callable[[Path, InstanceHeader, Sequence[int], HeaderLimits], Iterator[tuple[Array, str]]]
"""Yields stored values of the asked-for frames, as `shardflow.packing.sources.dicom.stored.iter_stored`."""

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
    if header.is_slide:
        raise source_error(Reason.DECODE_FAILED, "a slide is read tile by tile")
    form = form or form_of([header])
    frames = range(header.image.num_frames) if frames is None else frames
    lut = (
        read_modality_lut(path, limits, is_signed=header.image.is_signed) if header.has_modality_lut else None
    )
    for frame, (stored, decoder) in zip(frames, read(path, header, frames, limits), strict=True):
        yield _to_modality(stored, header, header.plane(frame), form, lut, decoder)


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
    if header.image.is_color:
        return DecodedSlice(pixels=stored, num_clipped=0, num_padding=0, valid=None, decoder=decoder)
    valid = _valid(stored, header.padding) if not header.is_float else _finite(stored, header.padding)
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


def _valid(stored: Array, padding: tuple[float, float] | None) -> Array | None:
    """Return the mask of valid pixels, or None if all are."""
    if padding is None:
        return None
    low, high = padding
    is_padding = (stored >= low) & (stored <= high) if low != high else stored == low
    return None if not is_padding.any() else ~is_padding


def _finite(stored: Array, padding: tuple[float, float] | None) -> Array | None:
    """Return the mask of finite values that are no padding; the others lie outside the image."""
    finite = np.isfinite(stored)
    if padding is not None:
        finite &= stored != stored.dtype.type(padding[0])
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


CT_RANGE_HU = (-1000.0, 1000.0)
PERCENTILES = (0.5, 99.5)

_PROJECTIONS = frozenset({"CR", "DX", "IO", "MG", "PX", "RF", "RG", "XA"})
_MAX_SAMPLES = 1 << 20
_MIN_SIDE = 8


class DisplayRange:
    """Collects a stack slice by slice; keeps a grid of samples, about a million in all, never a slice."""

    def __init__(self, stack: Stack, form: SliceForm) -> None:
        self._fixed = _fixed_range(stack, form)
        self._side = max(_MIN_SIDE, math.isqrt(_MAX_SAMPLES // len(stack.slices)))
        self._samples: list[np.ndarray[Any, np.dtype[Any]]] = []

    def add(self, decoded: DecodedSlice) -> None:
        """Take one slice into account; padding is left out."""
        if self._fixed is not None:
            return
        rows, columns = decoded.pixels.shape[:2]
        grid = np.s_[:: -(-rows // self._side), :: -(-columns // self._side)]
        sample = decoded.pixels[grid]
        self._samples.append(sample.ravel().copy() if decoded.valid is None else sample[decoded.valid[grid]])

    def result(self) -> tuple[float, float]:
        """Low and high, low < high."""
        if self._fixed is not None:
            return self._fixed
        samples = np.concatenate(self._samples) if self._samples else np.zeros(0)
        if samples.size == 0:
            return 0.0, 1.0
        low, high = (float(value) for value in np.percentile(samples, PERCENTILES))
        return (low, high) if low < high else (low, low + 1.0)


def _fixed_range(stack: Stack, form: SliceForm) -> tuple[float, float] | None:
    """The range that needs no pixels, where there is one."""
    if form.unit == "rgb":
        return 0.0, 255.0
    if form.unit == "HU":
        return CT_RANGE_HU
    if stack.modality not in _PROJECTIONS:
        return None
    windows = [_bounds(one.plane.window, one.instance.window_function) for one in stack.slices]
    known = [window for window in windows if window is not None]
    if len(known) != len(windows):
        return None
    low, high = min(window[0] for window in known), max(window[1] for window in known)
    return (low, high) if form.mirror is None else (form.mirror - high, form.mirror - low)


def _bounds(window: tuple[float, float] | None, function: str) -> tuple[float, float] | None:
    """Ends of a window; None where it has no width. LINEAR counts from pixel center to pixel center."""
    if window is None:
        return None
    center, width = window
    if function in ("LINEAR_EXACT", "SIGMOID"):
        return center - width / 2, center + width / 2
    low, high = center - 0.5 - (width - 1) / 2, center - 0.5 + (width - 1) / 2
    return (low, high) if low < high else None
