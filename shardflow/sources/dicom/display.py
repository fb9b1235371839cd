"""What a viewer, or a first model, should map to black and white; in modality units, per stack.

CT has a fixed wide window: Hounsfield units mean the same everywhere. Projections bring their own window.
Everything else, MR above all, has no absolute scale and takes percentiles over the whole stack (per slice
they would flicker).

Source: DICOM PS3.3, C.11.2 (VOI LUT).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardflow.sources.dicom.pixels import DecodedSlice
from shardflow.sources.dicom.stacks import Stack
from shardflow.sources.dicom.units import SliceForm

__all__ = ["CT_RANGE_HU", "PERCENTILES", "DisplayRange"]

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
    """Ends of a window; None where it has no width. LINEAR counts from pixel centre to pixel centre."""
    if window is None:
        return None
    center, width = window
    if function in ("LINEAR_EXACT", "SIGMOID"):
        return center - width / 2, center + width / 2
    low, high = center - 0.5 - (width - 1) / 2, center - 0.5 + (width - 1) / 2
    return (low, high) if low < high else None
