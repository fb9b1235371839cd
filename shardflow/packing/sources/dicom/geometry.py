"""Geometry of a stack: order, spacing and affine of its slices, and irregularities as flags.

Only positions count. (0018,0088) *Spacing Between Slices* and (0018,0050) *Slice Thickness* state what a
protocol asked for, not where slices are (a real series in the tests states 2.0 mm and has slices 7 mm apart);
only a single slice has to rely on them.

Source: DICOM PS3.3, C.7.6.2.1.1 (image position, image orientation).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardflow.packing.sources.dicom.planes import PlaneHeader

Vector = tuple[float, float, float]
Orientation = tuple[float, float, float, float, float, float]

POSITION_TOLERANCE_MM = 0.01
"""Slices closer than this along the normal lie at one position, where pixels are not finer than ten times
that."""

_TOLERANCE_PER_PIXEL = 0.1

_SPACING_TOLERANCE = 0.01
"""A gap that differs from the median by more than this share is irregular (highdicom uses the same 1 %)."""

_MULTIPLE_TOLERANCE = 0.05
"""A gap this close to a multiple of the median is a hole in a regular grid."""

_MAX_TILT_DEGREES = 0.5

_OFFSET_DECIMALS = 4
"""A tenth of a micrometer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackGeometry:
    """Spacing and place of one stack."""

    pixel_spacing_mm: tuple[float, float] | None
    """Between rows, then between columns."""
    slice_spacing_mm: float | None
    """Median gap along the normal; for a single slice its stated thickness, or None."""
    affine_lps: tuple[tuple[float, float, float, float], ...] | None
    """4 x 4: maps (column, row, slice, 1) to mm in LPS, at pixel centers. None where no position is known.
    The third column keeps the shear of a tilted gantry; for a single slice of unstated thickness it is the
    unit normal."""
    slice_offsets_mm: tuple[float, ...] | None = None
    """Distance of each slice from the first one along the normal, where the affine does not tell it: with the
    flags ``missing_slices`` and ``irregular_spacing``."""
    num_missing: int = 0
    """Slices that a regular grid would hold between the first and the last and that are not there."""
    flags: tuple[str, ...] = ()
    """Of ``single_slice``, ``missing_slices``, ``irregular_spacing``, ``gantry_tilt``,
    ``slices_not_aligned``."""


def normal_of(orientation: Orientation) -> Vector:
    """Return the unit normal of a plane: row direction x column direction.

    Example:
        >>> normal_of((1, 0, 0, 0, 1, 0))
        (0.0, 0.0, 1.0)
    """
    a, b, c, d, e, f = orientation
    x, y, z = b * f - c * e, c * d - a * f, a * e - b * d
    length = math.hypot(x, y, z)
    return x / length, y / length, z / length


def distance_along(normal: Vector, position: Vector) -> float:
    """Return the signed distance of a plane from the origin, mm."""
    return normal[0] * position[0] + normal[1] * position[1] + normal[2] * position[2]


def position_tolerance(pixel_spacing: tuple[float, float] | None) -> float:
    """Return the distance below which two slices count as one position, mm.

    Planes of optical coherence tomography are 6 micrometers apart.

    Example:
        >>> position_tolerance((0.5, 0.5)), round(position_tolerance((0.002, 0.006)), 6)
        (0.01, 0.0002)
    """
    if pixel_spacing is None:
        return POSITION_TOLERANCE_MM
    return min(POSITION_TOLERANCE_MM, _TOLERANCE_PER_PIXEL * min(pixel_spacing))


def describe_geometry(
    planes: Sequence[PlaneHeader], orientation: Orientation, *, stated_spacing_mm: float | None
) -> StackGeometry:
    """Describe planes that are parallel and sorted along their normal, each at its own position.

    Args:
        planes: All with a position.
        orientation: The one they share.
        stated_spacing_mm: Thickness for the case of a single slice.
    """
    normal = normal_of(orientation)
    positions = [plane.position for plane in planes if plane.position is not None]
    first, last = positions[0], positions[-1]
    pixel_spacing = planes[0].pixel_spacing
    if len(positions) == 1:
        step = _scaled(normal, stated_spacing_mm or 1.0)
        return StackGeometry(
            pixel_spacing_mm=pixel_spacing,
            slice_spacing_mm=stated_spacing_mm,
            affine_lps=_affine(orientation, pixel_spacing, step, first),
            flags=("single_slice",),
        )
    distances = [distance_along(normal, position) for position in positions]
    gaps = [after - before for before, after in itertools.pairwise(distances)]
    spacing = statistics.median_low(gaps)
    num_missing, is_irregular = _judge_gaps(gaps, spacing)
    direction = _scaled(_minus(last, first), 1 / (distances[-1] - distances[0]))
    flags = {
        "missing_slices": num_missing > 0,
        "irregular_spacing": is_irregular,
        "gantry_tilt": math.hypot(*direction) > 1 / math.cos(math.radians(_MAX_TILT_DEGREES)),
        "slices_not_aligned": _is_crooked(positions, distances, direction, pixel_spacing),
    }
    return StackGeometry(
        pixel_spacing_mm=pixel_spacing,
        slice_spacing_mm=spacing,
        affine_lps=_affine(orientation, pixel_spacing, _scaled(direction, spacing), first),
        slice_offsets_mm=(
            tuple(round(distance - distances[0], _OFFSET_DECIMALS) for distance in distances)
            if num_missing or is_irregular
            else None
        ),
        num_missing=num_missing,
        flags=tuple(sorted(flag for flag, holds in flags.items() if holds)),
    )


def _judge_gaps(gaps: Sequence[float], spacing: float) -> tuple[int, bool]:
    """Count slices missing from a regular grid, and tell whether other gaps differ from the median."""
    num_missing, is_irregular = 0, False
    for gap in gaps:
        ratio = gap / spacing
        if abs(ratio - 1) <= _SPACING_TOLERANCE:
            continue
        multiple = round(ratio)
        if multiple >= 2 and abs(ratio - multiple) <= _MULTIPLE_TOLERANCE * multiple:
            num_missing += multiple - 1
        else:
            is_irregular = True
    return num_missing, is_irregular


def _is_crooked(
    positions: Sequence[Vector],
    distances: Sequence[float],
    direction: Vector,
    pixel_spacing: tuple[float, float] | None,
) -> bool:
    """Whether a slice lies more than half a pixel beside the line from the first slice to the last."""
    tolerance = 0.5 * min(pixel_spacing) if pixel_spacing else POSITION_TOLERANCE_MM
    for position, distance in zip(positions, distances, strict=True):
        on_line = _plus(positions[0], _scaled(direction, distance - distances[0]))
        if math.dist(position, on_line) > tolerance:
            return True
    return False


def _affine(
    orientation: Orientation, pixel_spacing: tuple[float, float] | None, step: Vector, origin: Vector
) -> tuple[tuple[float, float, float, float], ...] | None:
    if pixel_spacing is None:
        return None
    between_rows, between_columns = pixel_spacing
    along_row = _scaled((orientation[0], orientation[1], orientation[2]), between_columns)
    down_column = _scaled((orientation[3], orientation[4], orientation[5]), between_rows)
    axes = zip(along_row, down_column, step, origin, strict=True)
    return (*axes, (0.0, 0.0, 0.0, 1.0))


def _plus(a: Vector, b: Vector) -> Vector:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _minus(a: Vector, b: Vector) -> Vector:
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]


def _scaled(a: Vector, factor: float) -> Vector:
    return a[0] * factor, a[1] * factor, a[2] * factor
