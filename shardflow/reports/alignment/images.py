"""Images of a study as reports refer to them: series and image numbers, planes and views.

They come from ``study.json`` (docs/format.md, section 4). Numbers are those of the source (SeriesNumber,
InstanceNumber, of a multi-frame image the frame's), never positions in a list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardflow.errors import FormatError

_PROJECTIONS = frozenset(("CR", "DX", "IO", "MG", "PX", "RF", "RG", "XA"))
_VIEWS = {
    "AP": "frontal",
    "PA": "frontal",
    "LAT": "lateral",
    "LATERAL": "lateral",
    "LL": "lateral",
    "RL": "lateral",
    "CC": "cc",
    "LCC": "cc",
    "RCC": "cc",
    "MLO": "mlo",
    "LMLO": "mlo",
    "RMLO": "mlo",
    "OBLIQUE": "oblique",
}
_PLANES = ("sagittal", "coronal", "axial")
_PARALLEL = 0.999
_STEEP = 0.8
"""Cosine between a stack's normal and an axis of the body from which on the plane has the axis' name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesFacts:
    """One series of a sample."""

    index: int
    """Number in the sample, from 0."""
    number: int | None
    """SeriesNumber."""
    numbers: tuple[int | None, ...]
    """InstanceNumber of each slice."""
    is_localizer: bool
    is_projection: bool
    plane: str
    """``axial``, ``coronal``, ``sagittal``, or empty: oblique or unknown."""
    spacing_mm: float | None
    """Between neighboring slices."""
    heights_mm: tuple[float, ...]
    """Of each slice's center towards the head (the third axis of LPS); empty where unknown."""
    frame: str
    """Surrogate of the frame of reference; empty where unknown."""
    normal: tuple[float, float, float] | None
    """Unit vector across the slices; None where unknown."""
    offsets_mm: tuple[float, ...]
    """Of each slice along the normal, in the frame of reference; empty where unknown."""
    affine: tuple[tuple[float, ...], ...] | None
    """Maps (column, row, slice, 1) to mm, at pixel centers; None where unknown."""
    view: str
    """Of a projection: ``frontal``, ``lateral``, ...; empty where unknown."""
    laterality: str
    """``L`` or ``R`` where the image is of one side."""
    has_contrast: bool | None
    body_part: str

    def point_of(self, x: float, y: float, place: int) -> tuple[float, ...] | None:
        """Return where a point of a slice lies, mm; ``(0.5, 0.5)`` is the first pixel's center."""
        if self.affine is None:
            return None
        return tuple(
            row[0] * (x - 0.5) + row[1] * (y - 0.5) + row[2] * place + row[3] for row in self.affine[:3]
        )

    def likeness(self, place: int, other: SeriesFacts, other_place: int, extent_mm: float) -> float | None:
        """Return how likely a slice shows what one of another series shows.

        Args:
            place: The slice.
            other: The other series; may be this one.
            other_place: Its slice.
            extent_mm: Size of what is shown; 0 where unknown.

        Returns:
            1 where both lie at one place (two kernels of one scan, say), falling to 0 where they are half the
            size further apart: there a cut through the middle of a thing is what touches its edge. None
            where planes cross, or nobody knows how they lie.
        """
        if self is other:
            return float(place == other_place)
        if not self.frame or self.frame != other.frame or self.normal is None or other.normal is None:
            return None
        if sum(one * two for one, two in zip(self.normal, other.normal, strict=True)) <= _PARALLEL:
            return None
        apart = abs(self.offsets_mm[place] - other.offsets_mm[other_place])
        beyond = apart - min(self.spacing_mm or 0.0, other.spacing_mm or 0.0) / 2
        if beyond <= 0:
            return 1.0
        return max(0.0, 1.0 - beyond / (extent_mm / 2)) if extent_mm else 0.0

    @property
    def num_slices(self) -> int:
        """Number of its slices."""
        return len(self.numbers)

    def slices_of(self, first: int, last: int) -> tuple[int, ...]:
        """Return the places of the slices whose numbers lie in a closed range."""
        return tuple(
            place
            for place, number in enumerate(self.numbers)
            if number is not None and first <= number <= last
        )


def read_series(study: Mapping[str, Any]) -> tuple[SeriesFacts, ...]:
    """Read the series of a study.

    Raises:
        FormatError: The object does not describe a study.
    """
    try:
        return tuple(_read(index, one) for index, one in enumerate(study["series"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FormatError(
            "study.json must describe a study (docs/format.md, section 4), got "
            f"{type(error).__name__} while reading its series; pack the study again."
        ) from None


def is_of_projections(series: Sequence[SeriesFacts]) -> bool:
    """Whether all images but localizers are projections, each a picture of the whole."""
    images = [one for one in series if not one.is_localizer]
    return bool(images) and all(one.is_projection for one in images)


def _read(index: int, series: Mapping[str, Any]) -> SeriesFacts:
    technical = series.get("technical") or {}
    num_slices = int(series["num_slices"])
    numbers = series.get("instance_numbers") or [None] * num_slices
    if len(numbers) != num_slices:
        raise ValueError
    affine = series.get("affine_lps")
    modality = series.get("modality") or ""
    normal = _normal(affine)
    side = technical.get("image_laterality") or technical.get("laterality") or ""
    return SeriesFacts(
        index=index,
        number=series.get("series_number"),
        numbers=tuple(numbers),
        is_localizer=series.get("kind") == "localizer",
        is_projection=modality in _PROJECTIONS and affine is None,
        plane=_plane(normal),
        spacing_mm=series.get("slice_spacing_mm"),
        heights_mm=_heights(series, affine, num_slices),
        frame=series.get("frame_of_reference_key") or "",
        normal=normal,
        offsets_mm=_offsets(series, affine, normal, num_slices),
        affine=None if affine is None else tuple(tuple(map(float, row)) for row in affine),
        view=_VIEWS.get(technical.get("view_position") or "", ""),
        laterality=side if side in ("L", "R") else "",
        has_contrast=technical.get("has_contrast"),
        body_part=str(series.get("body_part") or "").upper(),
    )


def _normal(affine: Sequence[Sequence[float]] | None) -> tuple[float, float, float] | None:
    """Return the direction of rows times that of columns, as a unit vector."""
    if affine is None:
        return None
    across, down = ([affine[axis][column] for axis in range(3)] for column in (0, 1))
    x = across[1] * down[2] - across[2] * down[1]
    y = across[2] * down[0] - across[0] * down[2]
    z = across[0] * down[1] - across[1] * down[0]
    length = math.sqrt(x * x + y * y + z * z)
    return (x / length, y / length, z / length) if length else None


def _plane(normal: tuple[float, float, float] | None) -> str:
    for value, name in zip(normal or (), _PLANES, strict=False):
        if abs(value) > _STEEP:
            return name
    return ""


def _offsets(
    series: Mapping[str, Any],
    affine: Sequence[Sequence[float]] | None,
    normal: tuple[float, float, float] | None,
    num_slices: int,
) -> tuple[float, ...]:
    """Place of each slice's center along the normal."""
    if affine is None or normal is None:
        return ()
    column, row = (int(series["columns"]) - 1) / 2, (int(series["rows"]) - 1) / 2
    start = step = 0.0
    for axis in range(3):
        across, down, along, origin = affine[axis]
        start += normal[axis] * (across * column + down * row + origin)
        step += normal[axis] * along
    given = series.get("slice_offsets_mm")
    return tuple(start + (given[place] if given else step * place) for place in range(num_slices))


def _heights(
    series: Mapping[str, Any], affine: Sequence[Sequence[float]] | None, num_slices: int
) -> tuple[float, ...]:
    """Height of the center of each slice, by the affine: slice ``n`` lies ``n`` steps from the first."""
    if affine is None:
        return ()
    column, row = (int(series["columns"]) - 1) / 2, (int(series["rows"]) - 1) / 2
    across, down, step, start = affine[2]
    return tuple(across * column + down * row + step * place + start for place in range(num_slices))
