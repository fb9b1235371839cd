"""Which drawings of ``annotations.json`` are of one thing: several readers, several series."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardflow.alignment.images import SeriesFacts

__all__ = ["group_drawings", "is_mark"]

_NEAR_MM = 5.0
"""Centres in two series that are nearer are of one thing, however small it is."""
_OVERLAP = 0.3
"""Regions of one label on one slice whose boxes share this much are two drawings of one thing."""


def is_mark(roi: Mapping[str, Any]) -> bool:
    """Whether something is marked; LIDC's readers also mark what they say is no nodule."""
    return bool(roi["slices"]) and "non_nodule" not in (roi.get("flags") or ())


def group_drawings(
    rois: Sequence[Mapping[str, Any]], series: Sequence[SeriesFacts]
) -> Iterable[list[Mapping[str, Any]]]:
    """Put drawings of one thing together: one tracking key, or one label at one place."""
    parents = list(range(len(rois)))

    def root(place: int) -> int:
        while parents[place] != place:
            place = parents[place]
        return place

    for place, one in enumerate(rois):
        for before in range(place):
            if root(before) != root(place) and _is_one_thing(rois[before], one, series):
                first, second = sorted((root(before), root(place)))
                parents[second] = first
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for place, one in enumerate(rois):
        groups[root(place)].append(one)
    return (groups[key] for key in sorted(groups))


def _is_one_thing(one: Mapping[str, Any], other: Mapping[str, Any], series: Sequence[SeriesFacts]) -> bool:
    if one.get("tracking_key") and other.get("tracking_key"):
        return bool(one["tracking_key"] == other["tracking_key"])
    if (one.get("label") or "") != (other.get("label") or ""):
        return False
    if one["series"] != other["series"]:
        return _is_one_point(one, other, series)
    boxes = {int(part["slice"]): part.get("box_px") for part in one["slices"]}
    return any(
        _overlap(boxes.get(int(part["slice"])), part.get("box_px")) >= _OVERLAP for part in other["slices"]
    )


def _is_one_point(one: Mapping[str, Any], other: Mapping[str, Any], series: Sequence[SeriesFacts]) -> bool:
    """Whether the centres of two drawings in one frame of reference lie within their size of each other."""
    first, second = series[int(one["series"])], series[int(other["series"])]
    if not first.frame or first.frame != second.frame:
        return False
    centers = [_center(one, first), _center(other, second)]
    if centers[0] is None or centers[1] is None:
        return False
    apart = sum((a - b) ** 2 for a, b in zip(*centers, strict=True)) ** 0.5
    sizes = [float(roi["diameter_mm"]) for roi in (one, other) if roi.get("diameter_mm")]
    return bool(apart <= max(min(sizes, default=0.0) / 2, _NEAR_MM))


def _center(roi: Mapping[str, Any], series: SeriesFacts) -> tuple[float, ...] | None:
    """Mean of the middles of its boxes, mm."""
    points = [
        series.point_of((box[0] + box[2]) / 2, (box[1] + box[3]) / 2, int(part["slice"]))
        for part in roi["slices"]
        if (box := part.get("box_px"))
    ]
    known = [point for point in points if point is not None]
    return tuple(sum(axis) / len(known) for axis in zip(*known, strict=True)) if known else None


def _overlap(one: Sequence[float] | None, other: Sequence[float] | None) -> float:
    """Intersection over union of two boxes ``[x0, y0, x1, y1]``."""
    if not one or not other:
        return 0.0
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    both = (one[2] - one[0]) * (one[3] - one[1]) + (other[2] - other[0]) * (other[3] - other[1])
    return shared / (both - shared)
