"""Region writer: turns regions into entries of ``annotations.json`` and mask fields.

Readers open a region and add its shape slice by slice; each mask is encoded at once, so memory holds
compressed masks only. A region that lies in several series becomes an entry in each.

An outline is an ``(n, 2)`` array of ``(x, y)`` pixel coordinates, see `targets`; it is filled as readers
fill it (`shardflow.format.contents.regions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.format.codecs import codec_for, encode_array
from shardflow.format.contents.regions import fill_outlines
from shardflow.format.keys import mask_field, mask_prefix
from shardflow.format.reasons import Reason, source_error
from shardflow.packing.attachments.annotations.targets import AnnotationLimits, Floats, Target
from shardflow.packing.attachments.annotations.vocabulary import Term, Vocabulary
from shardflow.packing.attachments.codes import Code, allow_code
from shardflow.packing.sources.placement import ClassNames

Bits: TypeAlias = NDArray[np.uint8]

_ELLIPSE_POINTS = 72


def clip_outline(outline: Floats, rows: int, columns: int) -> Floats:
    """Cut a closed outline at the edges of the slice.

    Returns:
        The outline of the part inside, which may run along the edges; ``(0, 2)`` where there is none. Of an
        outline that lies inside, the outline itself.

    Source: Sutherland and Hodgman, Reentrant polygon clipping, CACM 17 (1974).
    """
    inside = (outline >= 0).all() and (outline[:, 0] <= columns).all() and (outline[:, 1] <= rows).all()
    if inside:
        return outline
    for axis, bound, sign in ((0, 0, 1), (0, columns, -1), (1, 0, 1), (1, rows, -1)):
        if not len(outline):
            break
        depth = sign * (outline[:, axis] - bound)
        following, depth_after = np.roll(outline, -1, axis=0), np.roll(depth, -1)
        crosses = (depth >= 0) != (depth_after >= 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(crosses, depth / (depth - depth_after), 0.0)[:, None]
        cuts = outline + share * (following - outline)
        pairs = np.stack([outline, cuts], axis=1).reshape(-1, 2)
        outline = pairs[np.stack([depth >= 0, crosses], axis=1).reshape(-1)]
    return outline


def ellipse_outline(center: Floats, first: Floats, second: Floats) -> Floats:
    """Make an outline of an ellipse.

    Args:
        center: ``(d,)``.
        first: From the center to the end of one axis, ``(d,)``.
        second: To the end of the other.

    Returns:
        ``(n, d)`` points on the ellipse.
    """
    angle = np.linspace(0, 2 * np.pi, _ELLIPSE_POINTS, endpoint=False)[:, None]
    return np.asarray(center + np.cos(angle) * first + np.sin(angle) * second, np.float64)


def outline_box(points: Floats) -> tuple[float, float, float, float]:
    """Return the smallest box around points: x0, y0, x1, y1."""
    (x0, y0), (x1, y1) = points.min(axis=0), points.max(axis=0)
    return float(x0), float(y0), float(x1), float(y1)


def largest_extent(points: Floats) -> float:
    """Return the largest distance between two of ``(n, 2)`` points, in their unit; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    # As differences, which float32 holds to a ten-millionth of the extent.
    corners = cv2.convexHull((points - points[0]).astype(np.float32), returnPoints=False).reshape(-1)
    hull = points[corners[:: max(1, len(corners) // 2048)]]
    gaps = hull[:, None, :] - hull[None, :, :]
    return float(np.sqrt((gaps**2).sum(axis=2).max()))


Kind = Literal["segmentation", "contour", "box", "point", "measurement", "key_image", "graphic"]
Source = Literal["dicom-seg", "rtstruct", "sr-tid1500", "gsps", "ko", "lidc-xml", "coco", "csv", "nifti"]
Dangling = Literal[
    "DEGENERATE",
    "FRAME_OF_REFERENCE_UNKNOWN",
    "GRID_MISMATCH",
    "IMAGE_NOT_PACKED",
    "NOT_PLANAR",
    "NO_REFERENCE",
    "OUTSIDE",
    "UNSUPPORTED_SHAPE",
]
"""Reasons for which a part of an annotation has no place in the stored images; see docs/attachments.md."""

Counted = Literal["points of outlines", "regions", "regions read", "slices of regions"]
_LIMITS: Final[Mapping[Counted, str]] = {
    "points of outlines": "max_points",
    "regions": "max_rois",
    "regions read": "max_items",
    "slices of regions": "max_slices",
}
_DECIMALS: Final = 3
_FULL: Final = 255


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionFacts:
    """Facts of a region other than its place; labels, codes and identifiers as in the file."""

    kind: Kind
    source: Source
    label: str = ""
    also: str = ""
    """Further texts that may serve as its label."""
    code: Code | None = None
    """Concept of the region: property type, finding."""
    anatomy: Code | None = None
    """Anatomic region or finding site."""
    side: Literal["B", "L", "R"] | None = None
    tracking: str = ""
    """Identifier shared by all annotations of one lesion."""
    reader: int | None = None
    """Number of the reader who drew it, from 0."""
    value: int | None = None
    """Number that stood for it in a volume of labels."""
    class_name: str = ""
    """Its name in the layout's list of classes, which is published as it is."""
    is_fractional: bool = False
    """Whether masks hold 0..255, which are parts of a whole pixel, and not 0 and 1."""
    flags: tuple[str, ...] = ()
    measurements: tuple[Mapping[str, Any], ...] = ()
    """Controlled codes and numbers only."""
    diameter_mm: float | None = None
    """A measured one; else it is measured here."""

    def __repr__(self) -> str:
        return f"RegionFacts({self.kind}, {self.source})"


@dataclass(slots=True)
class _Place:
    """A region in one slice."""

    box: tuple[float, float, float, float] | None = None
    area_pixels: float | None = None
    extent_mm: float | None = None
    mask: bytes | None = None
    outlines: list[list[float]] | None = None


@dataclass(slots=True)
class _Entry:
    """A region in one series."""

    target: Target
    places: dict[int, _Place] = field(default_factory=dict)
    codec: str = ""


class OpenRegion:
    """One region under construction; created by `RegionWriter.open`."""

    def __init__(self, writer: RegionWriter, facts: RegionFacts) -> None:
        self._writer = writer
        self.facts = facts
        self.flags = set(facts.flags)
        self.entries: dict[int, _Entry] = {}

    def add_mask(self, target: Target, index: int, mask: Bits) -> None:
        """Store a mask of one slice; an empty one is ignored.

        Args:
            target: The series.
            index: Index of the slice.
            mask: ``(rows, columns)``, 0 and 1, or 0..255 where the region is fractional.
        """
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        if not len(rows):
            return
        place = self._place(target, index)
        self._measure(place, target, mask)
        place.box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))

    def add_outlines(
        self, target: Target, index: int, outlines: Sequence[Floats], mask: Bits | None = None
    ) -> None:
        """Store closed outlines of one slice, all at once, and the mask that fills them.

        Args:
            target: The series.
            index: Index of the slice.
            outlines: ``(n, 2)`` pixel coordinates each; cut at the edges of the slice.
            mask: What they enclose, where it is not what the even-odd rule fills.
        """
        clipped = [clip_outline(outline, *target.shape) for outline in outlines]
        if any(one is not other for one, other in zip(clipped, outlines, strict=True)):
            self.flags.add("clipped")
        kept = [outline for outline in clipped if len(outline) >= 3]
        self._writer.dangling("OUTSIDE", len(clipped) - len(kept))
        if not kept:
            return
        self._writer.count("points of outlines", sum(map(len, kept)))
        place = self._place(target, index)
        self._measure(place, target, fill_outlines(kept, *target.shape) if mask is None else mask)
        points = np.concatenate(kept)
        place.box, place.extent_mm = outline_box(points), _extent_mm(points, target)
        place.outlines = [np.round(outline, _DECIMALS).ravel().tolist() for outline in kept]

    def add_open(self, target: Target, index: int, points: Floats) -> None:
        """Store points or a line, which enclose nothing; what lies outside of the slice is left out.

        Args:
            target: The series.
            index: Index of the slice.
            points: ``(n, 2)`` pixel coordinates.
        """
        inside = points[((points >= 0) & (points <= (target.columns, target.rows))).all(axis=1)]
        if len(inside) < len(points):
            self.flags.add("clipped")
        if not len(inside):
            self._writer.dangling("OUTSIDE", 1)
            return
        self._writer.count("points of outlines", len(inside))
        place = self._place(target, index)
        box = outline_box(inside)
        before = place.box or box
        place.box = (*map(min, before[:2], box[:2]), *map(max, before[2:], box[2:]))  # type: ignore[assignment]
        place.area_pixels = place.area_pixels or 0.0
        place.extent_mm = max(filter(None, (place.extent_mm, _extent_mm(inside, target))), default=None)
        outline = np.round(inside, _DECIMALS).ravel().tolist()
        place.outlines = [*(place.outlines or []), outline]

    def add_box(self, target: Target, index: int, box: Sequence[float]) -> None:
        """Store a box, ``x0, y0, x1, y1``, cut at the edges of the slice; it gets no mask."""
        x0, y0, x1, y1 = box
        cut = (max(x0, 0.0), max(y0, 0.0), min(x1, float(target.columns)), min(y1, float(target.rows)))
        if not (x1 > x0 and y1 > y0):
            self._writer.dangling("DEGENERATE", 1)
            return
        if not (cut[2] > cut[0] and cut[3] > cut[1]):
            self._writer.dangling("OUTSIDE", 1)
            return
        if cut != (x0, y0, x1, y1):
            self.flags.add("clipped")
        place = self._place(target, index)
        place.box, place.area_pixels = cut, (cut[2] - cut[0]) * (cut[3] - cut[1])
        corners = np.array([cut[:2], cut[2:]], np.float64)
        place.extent_mm = _extent_mm(corners, target)

    def add_slice(self, target: Target, index: int) -> None:
        """Add a slice as a whole."""
        self._place(target, index)

    def _place(self, target: Target, index: int) -> _Place:
        entry = self.entries.get(target.number)
        if entry is None:
            self._writer.count("regions")
            entry = self.entries[target.number] = _Entry(target)
        if index not in entry.places:
            self._writer.count("slices of regions")
            entry.places[index] = _Place()
        return entry.places[index]

    def _measure(self, place: _Place, target: Target, mask: Bits) -> None:
        total = int(mask.sum(dtype=np.int64))
        place.area_pixels = total / _FULL if self.facts.is_fractional else float(total)
        if total:
            entry = self.entries[target.number]
            entry.codec = codec_for(target.codec, mask.shape, mask.dtype)
            place.mask = encode_array(entry.codec, mask)
            place.extent_mm = _extent_mm(_corners(mask), target)


class RegionWriter:
    """Collects the regions of the annotation files of one study.

    Args:
        vocabulary: What labels may say.
        surrogate: Stand-in for an identifier: from its kind and its value.
        first_region: Number of the first region: those of files before this one are below.
        limits: Bounds.
        classes: Classes of a volume of labels that a layout names; None for all else.
    """

    def __init__(
        self,
        *,
        vocabulary: Vocabulary,
        surrogate: Callable[[str, str], str],
        first_region: int = 0,
        limits: AnnotationLimits | None = None,
        classes: ClassNames | None = None,
    ) -> None:
        self.classes = classes
        self.is_placed = False
        """Whether what was read lies in an image, also if nothing is marked there."""
        self.limits = limits or AnnotationLimits()
        self._vocabulary = vocabulary
        self._surrogate = surrogate
        self._first = first_region
        self._regions: list[OpenRegion] = []
        self._dangling: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def open(self, facts: RegionFacts) -> OpenRegion:
        """Begin a region."""
        region = OpenRegion(self, facts)
        self._regions.append(region)
        self.count("regions read")
        return region

    def dangling(self, reason: Dangling, count: int = 1) -> None:
        """Count parts of an annotation that have no place in the stored images."""
        if count:
            self._dangling[reason] += count

    def count(self, what: Counted, number: int = 1) -> None:
        """Count what the limits bound.

        Raises:
            SourceError: LIMIT_EXCEEDED.
        """
        self._counts[what] += number
        limit: int = getattr(self.limits, _LIMITS[what])
        if self._counts[what] > limit:
            raise source_error(Reason.LIMIT_EXCEEDED, f"more than {limit} {what}")

    def finish(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the part of ``annotations.json`` and the fields of masks by name."""
        rois: list[dict[str, Any]] = []
        fields: dict[str, bytes] = {}
        for region in self._regions:
            for number in sorted(region.entries):
                roi = self._first + len(rois)
                entry = region.entries[number]
                if entry.places:
                    rois.append(self._roi(roi, region, entry))
                    fields.update(_masks(roi, entry))
        dangling = [{"reason": reason, "count": self._dangling[reason]} for reason in sorted(self._dangling)]
        return {"rois": rois, "dangling": dangling}, fields

    def _roi(self, roi: int, region: OpenRegion, entry: _Entry) -> dict[str, Any]:
        facts, target = region.facts, entry.target
        places = sorted(entry.places.items())
        extents = [place.extent_mm for _, place in places if place.extent_mm is not None]
        diameter = facts.diameter_mm if facts.diameter_mm is not None else max(extents, default=None)
        has_mask = any(place.mask is not None for _, place in places)
        has_outlines = any(place.outlines for _, place in places)
        optional = {
            "measurements": list(facts.measurements) or None,
            "reader": facts.reader,
            "value": facts.value,
        }
        return {
            "roi": roi,
            "kind": facts.kind,
            "source": facts.source,
            **self._words(facts),
            "code": allow_code(facts.code),
            "tracking_key": self._surrogate("tracking", facts.tracking) if facts.tracking else None,
            "series": target.number,
            "slices": [_slice_facts(index, place, target) for index, place in places],
            "diameter_mm": _rounded(diameter),
            "mask": mask_prefix(target.number, roi) if has_mask else None,
            "polygons": [place.outlines or [] for _, place in places] if has_outlines else None,
            "flags": sorted(region.flags | ({"fractional"} if facts.is_fractional else set())),
            **{name: value for name, value in optional.items() if value is not None},
        }

    def _words(self, facts: RegionFacts) -> dict[str, str | None]:
        """Return label, anatomy and side, in the words of the lexicon."""
        terms = [
            self._vocabulary.term(text) if text else None
            for text in (
                facts.label or facts.class_name,
                facts.also,
                facts.code.meaning if facts.code else "",
                facts.anatomy.meaning if facts.anatomy else "",
            )
        ]
        label = next((term for term in terms[:3] if term is not None and term.name), None)
        place = next((term for term in reversed(terms) if term is not None and term.is_anatomy), None)
        sides = [term.side for term in terms if term is not None and term.side]
        return {
            "label": facts.class_name or (label.name if label else _name_of(terms[3])),
            "anatomy": place.name if place else None,
            "laterality": facts.side or next(iter(sides), None),
        }


def _name_of(term: Term | None) -> str | None:
    return term.name or None if term is not None else None


def _masks(roi: int, entry: _Entry) -> dict[str, bytes]:
    return {
        mask_field(entry.target.number, roi, index, entry.codec): place.mask
        for index, place in sorted(entry.places.items())
        if place.mask is not None
    }


def _slice_facts(index: int, place: _Place, target: Target) -> dict[str, Any]:
    spacing = target.pixel_mm
    area = None
    if place.area_pixels is not None and spacing is not None:
        area = _rounded(place.area_pixels * spacing[0] * spacing[1])
    pixels = target.rows * target.columns
    return {
        "slice": index,
        "box_px": None if place.box is None else [_rounded(edge) for edge in place.box],
        "area_mm2": area,
        "diameter_mm": _rounded(place.extent_mm),
        "fraction": None if place.area_pixels is None else round(place.area_pixels / pixels, 6),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), _DECIMALS)


def _extent_mm(points: Floats, target: Target) -> float | None:
    """Return the largest distance of two points of a slice, mm; None if pixels have no known size."""
    spacing = target.pixel_mm
    return None if spacing is None else largest_extent(points * (spacing[1], spacing[0]))


def _corners(mask: Bits) -> Floats:
    """Return the corners of the outermost pixels of every row: all that the hull of a mask can touch."""
    rows = np.flatnonzero(mask.any(axis=1))
    is_set = mask[rows] > 0
    left = is_set.argmax(axis=1)
    right = mask.shape[1] - is_set[:, ::-1].argmax(axis=1)
    corners = [np.stack([x, rows + down], axis=1) for x in (left, right) for down in (0, 1)]
    return np.concatenate(corners).astype(np.float64)
