"""What the slices of a stack look like once decoded: dtype, unit, polarity. A pure function of headers.

All slices of a stack must look alike, and packing wants to know how before it decodes one; so the form
follows from what the headers declare, never from the pixels that happen to be there.

Source: DICOM PS3.3, C.11.1 (modality LUT, rescale type), C.7.6.3.1.2 (photometric interpretation).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shardflow.sources.dicom.description import ImageDescription
from shardflow.sources.dicom.dictionary import STATED_UNITS
from shardflow.sources.dicom.headers import InstanceHeader

__all__ = ["AIR_HU", "SliceForm", "form_of"]

AIR_HU = -1024
"""What padding of a CT becomes."""

_QUANTITATIVE = frozenset({"CT", "MR", "NM", "PT"})
"""Modalities whose values are measurements: never mirrored."""

_RANGES = {
    "uint8": (0, 255),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "uint16": (0, (1 << 16) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceForm:
    """What all slices of a stack look like."""

    dtype: str
    """NumPy name: uint8, int16, uint16, int32 or float32."""
    unit: str
    """``HU``, ``rgb``, a unit that the files state (``BQML``, ``OD``, ...), or ``raw``: no defined unit."""
    mirror: float | None = None
    """MONOCHROME1 of a display image: each value v becomes ``mirror - v``, so that larger is brighter."""
    fill: float = 0.0
    """What padding becomes, the same in every slice."""

    @property
    def range(self) -> tuple[int, int] | None:
        """Lowest and highest value of an integer dtype; None for float32."""
        return _RANGES.get(self.dtype)


class _Fact(NamedTuple):
    """What the form depends on; 300 slices usually share one."""

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

    CT in Hounsfield units is always int16, colour always uint8. Everything else takes the smallest of uint8,
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
    if any(fact.image.is_colour for fact in facts):
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
        unit=units.pop() if len(units) == 1 and units <= STATED_UNITS - {"HU"} and not is_mirrored else "raw",
        mirror=low + high if is_mirrored else None,
        fill=min(max(0.0, low), high),
    )


def _smallest(low: float, high: float) -> str:
    return next((name for name, (least, most) in _RANGES.items() if least <= low and high <= most), "float32")
