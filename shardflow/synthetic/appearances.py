"""Where lesions appear: on which instances, within which box of pixels; computed from geometry alone.

A pixel belongs to a lesion where its centre, on the slice's middle plane, lies inside the lesion's
ellipsoid (on a radiograph: inside its outline along the beam). Scouts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardflow.synthetic.lesions import Lesion, kinds_of
from shardflow.synthetic.projection import silhouette
from shardflow.synthetic.scene import Rectangle, cut, inside_mask, rectangle_of
from shardflow.synthetic.study import SeriesPlan, SlicePlan, StudyPlan
from shardflow.synthetic.tissues import LESION_CONTRASTS, TISSUES, contrast_index

__all__ = ["Appearance", "contrast_of", "find_appearances", "host_tissue"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Appearance:
    """One lesion on one instance."""

    lesion_id: str
    series_index: int
    item: SlicePlan
    box: tuple[int, int, int, int]
    """First column, first row, one past the last column, one past the last row."""
    num_pixels: int


def host_tissue(organ: str) -> str:
    """Return the tissue that a lesion of an organ replaces."""
    return _HOST_TISSUES[organ]


def contrast_of(lesion: Lesion, contrast: str) -> float:
    """Return how much a lesion differs from its organ: HU, or MR signal before the series' gain."""
    column = contrast_index(contrast)
    return LESION_CONTRASTS[lesion.label][column] - TISSUES[host_tissue(lesion.organ)][column]


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
