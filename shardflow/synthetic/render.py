"""Rendering of planned slices, and the appearances of lesions in them.

Values are Hounsfield units, MR signal or attenuation, with noise. Appearances, the instances and pixel boxes
that show a lesion, are computed from geometry alone: a pixel belongs to a lesion if its center, on the
slice's middle plane, is inside the lesion's ellipsoid (on a radiograph: inside its outline along the beam).
Scouts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from shardflow.synthetic.anatomy import Lesion, kinds_of
from shardflow.synthetic.draws import Draws, Kernel, filtered_noise
from shardflow.synthetic.geometry import Grid, Plane, Solid, move
from shardflow.synthetic.scene import (
    LESION_CONTRASTS,
    TISSUES,
    Rectangle,
    Scene,
    attenuation,
    contrast_index,
    cut,
    inside_mask,
    project,
    project_lesion,
    rectangle_of,
    silhouette,
)
from shardflow.synthetic.study import SeriesPlan, SlicePlan, StudyPlan

_MIN_RADIOGRAPH_MM = 8.0
_ON_RADIOGRAPHS = frozenset(kind.label for kind in kinds_of(("lung",), radiograph=True))
_TOUCHING = 1e-3
_HOST_TISSUES = {
    "brain": "brain-white",
    "kidney": "kidney",
    "liver": "liver",
    "lung": "lung",
    "spleen": "spleen",
    "vertebra": "spongy-bone",
}
"""Tissue that a lesion replaces, by organ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Appearance:
    """One lesion on one instance."""

    lesion_id: str
    series_index: int
    item: SlicePlan
    box: tuple[int, int, int, int]
    """First column, first row, one past the last column, one past the last row."""
    num_pixels: int


def contrast_of(lesion: Lesion, contrast: str) -> float:
    """Return how much a lesion differs from its organ: HU, or MR signal before the series' gain."""
    column = contrast_index(contrast)
    return LESION_CONTRASTS[lesion.label][column] - TISSUES[_HOST_TISSUES[lesion.organ]][column]


def find_appearances(study: StudyPlan) -> list[Appearance]:
    """Return every appearance, by series, then slice, then lesion."""
    found: list[Appearance] = []
    for series in study.series:
        if series.kind != "localizer":
            for item in series.slices:
                found.extend(_on_slice(study, series, item))
    return found


def _on_slice(study: StudyPlan, series: SeriesPlan, item: SlicePlan) -> Iterator[Appearance]:
    plane = item.plane
    whole = Rectangle(0, plane.grid.rows, 0, plane.grid.columns)
    for lesion in study.lesions:
        if series.kind == "projection":
            if lesion.label not in _ON_RADIOGRAPHS or lesion.diameter_mm < _MIN_RADIOGRAPH_MM:
                continue
            conic = silhouette(lesion.bounds, plane)
        else:
            conic = cut(lesion.bounds, plane)
        rectangle = rectangle_of(conic, _TOUCHING, whole)
        if rectangle.is_empty:
            continue
        mask = inside_mask(conic, rectangle)
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        if len(rows) == 0:
            continue
        yield Appearance(
            lesion_id=lesion.lesion_id,
            series_index=series.index,
            item=item,
            box=(
                rectangle.left + int(columns[0]),
                rectangle.top + int(rows[0]),
                rectangle.left + int(columns[-1]) + 1,
                rectangle.top + int(rows[-1]) + 1,
            ),
            num_pixels=int(mask.sum()),
        )


_Array = np.ndarray[Any, np.dtype[Any]]
_EDGE_PIXELS: dict[Kernel, float] = {"smooth": 1.7, "standard": 1.25, "sharp": 0.85}
_THICK_MM = 2.0
# What a radiograph's full range stands for, in mm of water; scouts are scaled to look like HU.
_FULL_RANGE_MM = {"AP": 280.0, "PA": 280.0, "LL": 400.0}
_SCOUT_HU_PER_MM = {"AP": 5.5, "LL": 4.0}


class Renderer:
    """Renders the slices of one study."""

    def __init__(self, seed: int, study: StudyPlan) -> None:
        self._seed = seed
        self._study = study
        self._body = Scene(study.anatomy.solids)
        self._lesions = Scene(
            [Solid(tissue=lesion.label, parts=(lesion.bounds,), parent="") for lesion in study.lesions]
        )

    def render(self, series: SeriesPlan, item: SlicePlan) -> _Array:
        """Return the values of one slice, ``(rows, columns)`` float32.

        CT and scouts: HU. MR: signal times the series' gain. CR and DX: 0 (nothing in the way) to 1.
        """
        draws = Draws(self._seed, "noise", self._study.number, series.index, item.stack, item.grid_index)
        if series.kind == "projection":
            return self._radiograph(series, item, draws)
        grid = item.plane.grid
        if series.kind == "localizer" and series.modality == "CT":
            scout = self._projection(item.plane) * np.float32(_SCOUT_HU_PER_MM[item.view]) - np.float32(1000)
            scout += filtered_noise(draws.key(), grid.rows, grid.columns, "standard", series.noise)
            return scout
        canvas = self._cut(series, item)
        if series.modality == "CT":
            canvas += filtered_noise(draws.key(), grid.rows, grid.columns, series.kernel, series.noise)
            return canvas
        return _as_magnitude(canvas, draws, series)

    def _cut(self, series: SeriesPlan, item: SlicePlan) -> _Array:
        column, plane = contrast_index(item.contrast), item.plane
        edge = _EDGE_PIXELS[series.kernel]
        canvas = np.full((plane.grid.rows, plane.grid.columns), TISSUES["air"][column], dtype=np.float32)
        self._body.paint(canvas, plane, [TISSUES[solid.tissue][column] for solid in self._body.solids], edge)
        values = [LESION_CONTRASTS[solid.tissue][column] for solid in self._lesions.solids]
        thickness = series.thickness_mm or 0.0
        if thickness <= _THICK_MM:
            self._lesions.paint(canvas, plane, values, edge)
        elif values:
            self._paint_thick(canvas, plane, values, edge, thickness)
        return canvas

    def _paint_thick(
        self, canvas: _Array, plane: Plane, values: list[float], edge: float, thickness_mm: float
    ) -> None:
        """Paint lesions as the mean of three planes across the slice, so that small ones fade."""
        base = canvas.copy()
        for step in (-thickness_mm / 3, 0.0, thickness_mm / 3):
            shifted = plane.moved(plane.normal, step)
            for number, box, alpha in self._lesions.coverages(shifted, edge):
                part = (slice(box.top, box.bottom), slice(box.left, box.right))
                canvas[part] += alpha * ((np.float32(values[number]) - base[part]) * np.float32(1 / 3))

    def _projection(self, plane: Plane) -> _Array:
        total = project(self._study.anatomy.solids, plane)
        for lesion in self._study.lesions:
            host = TISSUES[_HOST_TISSUES[lesion.organ]][0]
            gain = attenuation(LESION_CONTRASTS[lesion.label][0]) - attenuation(host)
            project_lesion(total, lesion.bounds, plane, gain)
        return total

    def _radiograph(self, series: SeriesPlan, item: SlicePlan, draws: Draws) -> _Array:
        """Project at half resolution, for a detector's blur, and add the noise at full resolution."""
        grid = item.plane.grid
        values = _doubled(self._projection(_halved(item.plane)) * np.float32(1 / _FULL_RANGE_MM[item.view]))
        values = values[: grid.rows, : grid.columns]
        noise = filtered_noise(draws.key(), grid.rows, grid.columns, "standard", series.noise)
        values += noise
        clipped: _Array = np.clip(values, np.float32(0), np.float32(1), out=values)
        return clipped


def _as_magnitude(canvas: _Array, draws: Draws, series: SeriesPlan) -> _Array:
    """Turn tissue signal into an MR magnitude image: coil shading, noise, the series' scale."""
    rows, columns = canvas.shape
    canvas *= _shading(rows, columns)
    deviation = series.noise
    real = canvas + filtered_noise(draws.key(), rows, columns, "standard", deviation)
    imaginary = filtered_noise(draws.key(), rows, columns, "standard", deviation)
    magnitude: _Array = np.sqrt(real * real + imaginary * imaginary)
    magnitude *= np.float32(series.gain)
    return magnitude


@lru_cache(maxsize=4)
def _shading(rows: int, columns: int) -> _Array:
    down = ((np.arange(rows, dtype=np.float64) + 0.5) / rows - 0.5) * 2
    across = ((np.arange(columns, dtype=np.float64) + 0.5) / columns - 0.5) * 2
    field: _Array = (1.0 - 0.16 * down * down + 0.06 * down).astype(np.float32)[:, None] + (
        0.05 * across - 0.14 * across * across
    ).astype(np.float32)[None, :]
    field.flags.writeable = False
    return field


def _halved(plane: Plane) -> Plane:
    """Return the plane with pixels twice as large."""
    grid = plane.grid
    corner = move(plane.position, plane.row_direction, grid.column_spacing_mm / 2)
    return replace(
        plane,
        grid=Grid(
            rows=(grid.rows + 1) // 2,
            columns=(grid.columns + 1) // 2,
            row_spacing_mm=2 * grid.row_spacing_mm,
            column_spacing_mm=2 * grid.column_spacing_mm,
        ),
        position=move(corner, plane.column_direction, grid.row_spacing_mm / 2),
    )


def _doubled(image: _Array) -> _Array:
    """Interpolate to twice the rows and columns: three quarters of the nearest, one of the next."""
    for axis in (0, 1):
        image = np.moveaxis(image, axis, 0)
        before = np.concatenate((image[:1], image[:-1]))
        after = np.concatenate((image[1:], image[-1:]))
        fine = np.empty((2 * image.shape[0], image.shape[1]), dtype=np.float32)
        fine[0::2] = image * np.float32(0.75) + before * np.float32(0.25)
        fine[1::2] = image * np.float32(0.75) + after * np.float32(0.25)
        image = np.moveaxis(fine, 0, axis)
    doubled: _Array = np.ascontiguousarray(image)
    return doubled
