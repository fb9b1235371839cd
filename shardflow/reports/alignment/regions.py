"""Rules E3, E4 and E5: regions that people or models marked on the images (``annotations.json``).

Drawings of one lesion by several readers or in several series are grouped first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardflow.errors import FormatError
from shardflow.reports.alignment.evidence import AlignmentRules, Evidence, Rule
from shardflow.reports.alignment.images import SeriesFacts
from shardflow.reports.alignment.lesions import (
    Finding,
    Label,
    are_alike,
    are_close_sizes,
    are_same_side,
    are_similar_sizes,
    count_distinct,
    is_focal,
    is_same_place,
    read_label,
)

_NEAR_MM = 5.0
"""Centers in two series that are nearer are of one thing, however small it is."""
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
    """Whether the centers of two drawings in one frame of reference lie within their size of each other."""
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


_OUTLINES = frozenset(("contour", "segmentation"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Everything that is marked as one thing, in all series."""

    numbers: tuple[int, ...]
    """The regions' numbers in ``annotations.json``, ascending."""
    label: Label
    side: str
    diameter_mm: float | None
    is_organ: bool
    """Whether it outlines anatomy, and names no finding."""
    slices: Mapping[int, Mapping[int, float]]
    """Series to slice to weight: the share of the largest area."""


def read_regions(annotations: Mapping[str, Any] | None, series: Sequence[SeriesFacts]) -> tuple[Region, ...]:
    """Read what is marked; drawings of one thing become one region.

    Args:
        annotations: ``annotations.json``.
        series: Of the study: drawings in two series may be of one thing.

    Raises:
        FormatError: The object is no ``annotations.json``.
    """
    if annotations is None:
        return ()
    try:
        rois = sorted((one for one in annotations["rois"] if is_mark(one)), key=lambda one: int(one["roi"]))
        return tuple(_region(group) for group in group_drawings(rois, series))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise FormatError(
            "annotations.json must hold marked regions (docs/format.md, section 4), got "
            f"{type(error).__name__} while reading them; pack the study again."
        ) from None


def region_evidence(
    finding: Finding, findings: Sequence[Finding], regions: Sequence[Region], rules: AlignmentRules
) -> list[Evidence]:
    """Find the regions that may be a finding.

    Args:
        finding: The finding.
        findings: All of the report that images can show; it is among them.
        regions: From `read_regions`.
        rules: The weights.
    """
    marks = [one for one in regions if not one.is_organ]
    fitting = _fitting(finding, [one for one in marks if _is_named(finding, one)])
    if fitting:
        return _evidence("E3", rules.roi_finding, finding, findings, fitting, rules)
    organs = [
        one
        for one in regions
        if one.is_organ and _is_organ_of(one, finding) and are_same_side(one.side, finding.side) is not False
    ]
    found = [
        Evidence(
            rule="E5",
            family="organ",
            series=series,
            weights=weights,
            confidence=rules.organ_mask,
            is_region=True,
            facts={"rois": list(organ.numbers)},
        )
        for organ in organs
        for series, weights in organ.slices.items()
    ]
    unnamed = [one for one in marks if one.label.is_generic]
    placed = _fitting(finding, [one for one in unnamed if _is_in_place(finding, one)])
    if placed:
        return found + _evidence("E4", rules.roi_place, finding, findings, placed, rules)
    focal = [one for one in findings if is_focal(one)]
    # Whose anatomy is named elsewhere is no match, however alone it is.
    is_sole = len(marks) == 1 and is_focal(finding) and count_distinct(focal) == 1
    if is_sole and unnamed and not _is_elsewhere(finding, unnamed[0]):
        return found + _evidence("E4", rules.roi_sole, finding, focal[:1], unnamed, rules)
    return found


def _is_named(finding: Finding, region: Region) -> bool:
    """Whether a region's label is the finding, in no other anatomy."""
    return any(are_alike(finding.concept, one) for one in region.label.findings) and not _is_elsewhere(
        finding, region
    )


def _may_be(finding: Finding, region: Region) -> bool:
    """Whether a region may be a finding as well as another one, by its names."""
    names = region.label.findings
    is_alike = not names or any(are_alike(finding.concept, one) for one in names)
    return is_alike and not _is_elsewhere(finding, region)


def _is_elsewhere(finding: Finding, region: Region) -> bool:
    places = [is_same_place(finding.anatomy, one) for one in region.label.anatomy]
    return bool(places) and all(place is False for place in places)


def _is_in_place(finding: Finding, region: Region) -> bool:
    """Whether anatomy is stated on both and is the same, and the side too."""
    return (
        any(is_same_place(finding.anatomy, one) for one in region.label.anatomy)
        and finding.side == region.side
    )


def _is_organ_of(region: Region, finding: Finding) -> bool:
    """Whether a finding lies in an organ: in it or in a part of it."""
    return any(is_same_place(finding.anatomy, one) for one in region.label.anatomy)


def _fitting(finding: Finding, regions: Sequence[Region]) -> list[Region]:
    """Keep the regions that fit best: of the same size, else those that nothing speaks against, else all."""
    most = max((_fit(finding, one) for one in regions), default=0)
    return [one for one in regions if _fit(finding, one) == most]


def _fit(finding: Finding, region: Region) -> int:
    """2: about the same size; 1: nothing speaks against it; 0: something does."""
    if _conflicts(finding, region):
        return 0
    return 2 if are_close_sizes(finding.longest_mm, region.diameter_mm) else 1


def _conflicts(finding: Finding, region: Region) -> tuple[str, ...]:
    """Name what speaks against a region."""
    found = []
    if are_same_side(finding.side, region.side) is False:
        found.append("other_side")
    if are_similar_sizes(finding.longest_mm, region.diameter_mm) is False:
        found.append("other_size")
    return tuple(found)


def _evidence(
    rule: Rule,
    base: float,
    finding: Finding,
    findings: Sequence[Finding],
    regions: Sequence[Region],
    rules: AlignmentRules,
) -> list[Evidence]:
    """Share a weight among the regions that fit the finding, or the findings that fit a region."""
    found = []
    for region in regions:
        conflicts = _conflicts(finding, region)
        fit = _fit(finding, region)
        rivals = [
            one
            for one in findings
            if one.entity == finding.entity or (_may_be(one, region) and _fit(one, region) >= fit)
        ]
        share = max(len(regions), count_distinct(rivals))
        confidence = base / share
        for conflict in conflicts:
            confidence *= rules.other_side if conflict == "other_side" else rules.other_size
        found += [
            Evidence(
                rule=rule,
                family="roi",
                series=series,
                weights=weights,
                confidence=confidence,
                modifiers=conflicts,
                facts={"rois": list(region.numbers), "candidates": share},
            )
            for series, weights in region.slices.items()
        ]
    return found


def _region(rois: Sequence[Mapping[str, Any]]) -> Region:
    labels = read_label(_words(rois, "label"))
    label = read_label(_words(rois, "label", "anatomy"))
    sides = {one["laterality"] for one in rois if one.get("laterality")}
    diameters = [float(one["diameter_mm"]) for one in rois if one.get("diameter_mm")]
    areas: dict[int, dict[int, float]] = defaultdict(dict)
    for one in rois:
        for part in one["slices"]:
            kept = areas[int(one["series"])]
            place = int(part["slice"])
            kept[place] = max(kept.get(place, 0.0), float(part.get("area_mm2") or 0.0))
    return Region(
        numbers=tuple(sorted(int(one["roi"]) for one in rois)),
        label=label,
        side=sides.pop() if len(sides) == 1 else "",
        diameter_mm=max(diameters, default=None),
        is_organ=not labels.findings
        and bool(labels.anatomy)
        and all(one["kind"] in _OUTLINES for one in rois),
        slices={series: _shares(areas[series]) for series in sorted(areas)},
    )


def _words(rois: Sequence[Mapping[str, Any]], *names: str) -> str:
    return " ; ".join(sorted({str(one[name]) for one in rois for name in names if one.get(name)}))


def _shares(areas: Mapping[int, float]) -> dict[int, float]:
    """Make areas shares of the largest; all are 1 where no area is known."""
    largest = max(areas.values())
    # A slice without an area among others that have one (a point) still shows something.
    return {place: max(areas[place] / largest, 0.01) if largest else 1.0 for place in sorted(areas)}
