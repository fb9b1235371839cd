"""Where slices lie in space."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StackGeometry"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackGeometry:
    """Spacing and place of one stack."""

    pixel_spacing_mm: tuple[float, float] | None
    """Between rows, then between columns."""
    slice_spacing_mm: float | None
    """Median gap along the normal; for a single slice its stated thickness, or None."""
    affine_lps: tuple[tuple[float, float, float, float], ...] | None
    """4 x 4: (column, row, slice, 1) to mm in LPS, pixel centres; None where no position is known."""
    num_missing: int = 0
    """Slices that a regular grid would hold between the first and the last and that are not there."""
    flags: tuple[str, ...] = ()
