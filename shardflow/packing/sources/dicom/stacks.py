"""Stacks and studies: groups headers by patient, study and series, and splits each series into stacks.

A stack is what can be one array: slices of one shape, one orientation and one spacing, each at its own
position. File names never count, and (0020,0013) *Instance Number* counts only where positions are absent: it
rises with position in some series and falls in others. No file is read; the result depends on the set of
headers alone, not on their order.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from shardflow.format.reasons import PHASE_NAMES, Reason
from shardflow.packing.sources.dicom.axes import AxisPoint, find_axes
from shardflow.packing.sources.dicom.dictionary import MAP_CLASSES, SECONDARY_CLASSES
from shardflow.packing.sources.dicom.geometry import (
    Orientation,
    StackGeometry,
    describe_geometry,
    distance_along,
    normal_of,
    position_tolerance,
)
from shardflow.packing.sources.dicom.headers import InstanceHeader, SliceRef
from shardflow.packing.sources.dicom.planes import MAX_SPACING_MM

_ORIENTATION_TOLERANCE = 1e-3
_MIN_VOLUME_SLICES = 4
_SECONDARY_MODALITIES = frozenset({"DOC", "OT", "SC"})
_NEVER_COLOR = frozenset({"CT", "MR", "PT", "NM"})
_MISSING_NUMBER = 1 << 62
_Member = TypeVar("_Member", SliceRef, InstanceHeader)


class StackKind(StrEnum):
    """Kind of a stack; the order is the order of preference for the primary series."""

    VOLUME = "volume"
    """Four or more parallel slices at known positions."""
    IMAGES = "images"
    """Single images: projections, few slices, slices with no position, mosaics."""
    FRAMES = "frames"
    """Frames of multi-frame instances with no position, such as a cine loop."""
    SLIDE = "slide"
    """A whole slide: levels of one image in tiles."""
    SECONDARY = "secondary"
    """Secondary captures, screen saves, dose pages."""
    LOCALIZER = "localizer"
    """Scouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Slices of one series with one shape, in geometric order: what becomes one series of a sample."""

    series_instance_uid: str
    stack_index: int
    """Counts the stacks of one series from 0; a stack is named by (series_instance_uid, stack_index)."""
    kind: StackKind
    modality: str
    rows: int
    columns: int
    samples_per_pixel: int
    """1, or 3 (palette images are color once decoded)."""
    series_number: int | None
    slices: tuple[SliceRef, ...]
    geometry: StackGeometry
    flags: tuple[str, ...]
    """Sorted codes of what was odd, of the instances and of the geometry; docs/dicom.md lists them."""
    axis: AxisPoint | None = None
    """Its place in a 4-D object; None where it is in none."""
    levels: tuple[InstanceHeader, ...] = ()
    """Files of a slide, the one of the finest level first, which is its only slice; empty for others."""

    @property
    def frame_of_reference_uid(self) -> str:
        """(0020,0052) *Frame of Reference UID* of all slices; ``""`` where they name several, or none."""
        files = self.levels or [one.instance for one in self.slices]
        uids = {each.frame_of_reference_uid for each in files}
        return uids.pop() if len(uids) == 1 else ""

    @property
    def primary_rank(self) -> tuple[bool, int, int]:
        """Sort key for the primary series, smallest first: images before maps of them, kind, most slices."""
        is_map = self.slices[0].instance.sop_class_uid in MAP_CLASSES
        return is_map, list(StackKind).index(self.kind), -len(self.slices)

    def __repr__(self) -> str:
        return f"Stack({self.kind}, {self.modality}, {len(self.slices)} x {self.rows} x {self.columns})"


def split_series(instances: Sequence[InstanceHeader]) -> tuple[Stack, ...]:
    """Split the instances of one series into stacks; the result does not depend on their order."""
    slides = _slides([each for each in instances if each.is_slide])
    slices = [
        SliceRef(instance=each, frame=frame)
        for each in instances
        if not each.is_slide
        for frame in range(each.image.num_frames)
    ]
    orientations = _Orientations(slices)
    found: list[_Found] = []
    shapes = _group(slices, lambda each: _shape_key(each, orientations))
    for group in itertools.chain.from_iterable(map(_frames_of_reference, shapes)):
        orientation = orientations.of(group[0])
        if orientation is None:
            found += [_Found(*_order_without_positions(part)) for part in _runs(group)]
        else:
            found += _volumes(group, orientation, len(found))
    found.sort(key=lambda each: min(one.order for one in each.ordered))
    firsts: dict[int, int] = {}
    for index, each in enumerate(found):
        if each.point is not None:
            firsts.setdefault(each.point[0], index)
    stacks = [_stack(index, each, firsts) for index, each in enumerate(found)]
    for index, (levels, flags) in enumerate(slides, start=len(stacks)):
        slide = [SliceRef(instance=levels[0], frame=0)]
        spacing = levels[0].plane(0).pixel_spacing
        geometry = StackGeometry(pixel_spacing_mm=spacing, slice_spacing_mm=None, affine_lps=None)
        stacks.append(replace(_stack(index, _Found(slide, geometry, flags), {}), levels=levels))
    return tuple(stacks)


def _slides(instances: Sequence[InstanceHeader]) -> list[tuple[tuple[InstanceHeader, ...], set[str]]]:
    """Group the levels of a series into slides, the largest first, with flags.

    Each container (the glass) is a slide of its own. So is each optical path, and each pyramid or else frame
    of reference, unless every file names one of its own, which tells nothing. What nobody tells apart is one
    slide where levels have one shape, and each another size.
    """
    found: list[tuple[tuple[InstanceHeader, ...], set[str]]] = []
    for glass in _group(instances, lambda each: each.pyramid[:1]):
        for group in _pyramids(glass):
            repeats = len({(each.image.rows, each.image.columns) for each in group}) < len(group)
            for levels in _by_shape(group):
                is_odd = {
                    "frame_of_reference_varies": len({each.frame_of_reference_uid for each in levels}) > 1,
                    "pyramid_varies": len({each.pyramid[2:] for each in levels}) > 1,
                    "split_by_order": repeats,
                }
                flags = {flag for each in levels for flag in each.flags}
                found.append((levels, flags | {name for name, is_so in is_odd.items() if is_so}))
    if len(found) > 1:
        found = [(levels, flags | {"several_slides"}) for levels, flags in found]
    return sorted(found, key=lambda slide: _level_order(slide[0][0]))


def _pyramids(levels: list[InstanceHeader]) -> list[list[InstanceHeader]]:
    """Split the levels of a container by what names their pyramid."""
    found = []
    for group in _named(levels, lambda each: "".join(each.pyramid[1:2])) or [levels]:
        found += (
            _named(group, lambda each: "".join(each.pyramid[2:]))
            or _named(group, lambda each: each.frame_of_reference_uid)
            or [group]
        )
    return found


def _named(
    levels: list[InstanceHeader], name_of: Callable[[InstanceHeader], str]
) -> list[list[InstanceHeader]]:
    """Group levels by a name; nothing where one has no name, or each file its own."""
    groups = _group(levels, name_of)
    return groups if all(map(name_of, levels)) and len(groups) < len(levels) else []


def _by_shape(levels: list[InstanceHeader]) -> list[tuple[InstanceHeader, ...]]:
    """Split levels where a size repeats, and where one is no reduction of the finest: another area."""
    slides: list[list[InstanceHeader]] = []
    for each in sorted(levels, key=_level_order):
        sides = each.image.rows, each.image.columns
        for slide in slides:
            if all((one.image.rows, one.image.columns) != sides for one in slide) and _is_reduced(
                (slide[0].image.rows, slide[0].image.columns), sides
            ):
                slide.append(each)
                break
        else:
            slides.append([each])
    return [tuple(slide) for slide in slides]


def _is_reduced(whole: tuple[int, int], sides: tuple[int, int]) -> bool:
    """Return whether sides are those of the whole by one factor, each rounded up or down."""
    factor = max(whole) / max(sides)
    return all(abs(most - factor * side) <= 2 * factor for most, side in zip(whole, sides, strict=True))


def _level_order(level: InstanceHeader) -> tuple[int, str]:
    return -level.image.rows * level.image.columns, level.sop_instance_uid


@dataclass(frozen=True, slots=True)
class _Found:
    """A stack whose index is not known yet."""

    ordered: list[SliceRef]
    geometry: StackGeometry
    flags: set[str]
    point: tuple[int, AxisPoint] | None = None
    """Number of its 4-D object in the series, and its place there."""


def _volumes(group: list[SliceRef], orientation: Orientation, first_object: int) -> list[_Found]:
    """Separate parallel slices into stacks, and link those that are points of one 4-D object.

    Args:
        group: Slices of one shape.
        orientation: The one that they share.
        first_object: Number of the first 4-D object; no other group has it or a larger one.
    """
    numbered = _along_normal(group, orientation)
    parts = _separate(numbered)
    points: list[tuple[int, AxisPoint] | None] = [None] * len(parts)
    if len(parts) > 1:
        position = {(one.instance.sop_instance_uid, one.frame): place for place, one in numbered}
        covered = [
            tuple(position[one.instance.sop_instance_uid, one.frame] for one in ordered)
            for ordered, _ in parts
        ]
        counts = Counter(covered)
        whole = max(counts, key=lambda positions: (counts[positions], len(positions), positions))
        chosen = [at for at, positions in enumerate(covered) if positions == whole]
        if len(chosen) > 1 and _kind(group) not in (StackKind.LOCALIZER, StackKind.SECONDARY):
            for at in set(range(len(parts))).difference(chosen):
                parts[at][1].add("incomplete_volume")
            for at, (number, point) in zip(chosen, find_axes([parts[at][0] for at in chosen]), strict=True):
                points[at] = None if point is None else (first_object + number, point)
    return [
        _Found(ordered, _geometry(ordered, orientation), flags, point)
        for (ordered, flags), point in zip(parts, points, strict=True)
    ]


def _runs(group: list[SliceRef]) -> list[list[SliceRef]]:
    """Split slices without positions: each multi-frame instance is a run of its own, stills stay together."""
    if _kind(group) is not StackKind.FRAMES:
        return [group]
    return _group(
        group, lambda one: one.instance.sop_instance_uid if one.instance.image.num_frames > 1 else ""
    )


class _Orientations:
    """Orientations of a series that are equal within a tolerance count as one, the smallest of them."""

    def __init__(self, slices: Iterable[SliceRef]) -> None:
        known: list[Orientation] = []
        self._representative: dict[Orientation, Orientation] = {}
        for orientation in sorted(
            {each.plane.orientation for each in slices if each.plane.orientation is not None}
        ):
            match = next((one for one in known if _close(one, orientation)), None)
            if match is None:
                known.append(orientation)
            self._representative[orientation] = match or orientation

    def of(self, one: SliceRef) -> Orientation | None:
        """Orientation of a slice that has a position as well, else None."""
        plane = one.plane
        if plane.position is None or plane.orientation is None:
            return None
        return self._representative[plane.orientation]


def _close(a: Orientation, b: Orientation) -> bool:
    return all(abs(x - y) <= _ORIENTATION_TOLERANCE for x, y in zip(a, b, strict=True))


def _group(members: Iterable[_Member], key: Callable[[_Member], Hashable]) -> list[list[_Member]]:
    groups: defaultdict[Hashable, list[_Member]] = defaultdict(list)
    for one in members:
        groups[key(one)].append(one)
    return list(groups.values())


def _shape_key(one: SliceRef, orientations: _Orientations) -> Hashable:
    instance, image, spacing = one.instance, one.instance.image, one.plane.pixel_spacing
    return (
        *(instance.modality, image.rows, image.columns, image.is_color, instance.is_localizer),
        image.photometric_interpretation == "MONOCHROME1",
        instance.sop_class_uid in SECONDARY_CLASSES,
        spacing and (round(spacing[0], 4), round(spacing[1], 4)),
        orientations.of(one),
        # Each dose grid or parametric map is an array of its own.
        instance.sop_instance_uid if instance.sop_class_uid in MAP_CLASSES else "",
    )


def _frames_of_reference(group: list[SliceRef]) -> list[list[SliceRef]]:
    """Split slices by frame of reference, unless that varies slice by slice.

    A series has one frame of reference (PS3.3, A.1.2), and two that are both drawn from have positions that
    cannot be compared. But collections are published whose de-identification gave every file a UID of its
    own: a UID that a single slice has tells nothing of geometry.
    """
    frames = _group(group, lambda each: each.instance.frame_of_reference_uid)
    return frames if min(map(len, frames)) > 1 else [group]


def _along_normal(group: Sequence[SliceRef], orientation: Orientation) -> list[tuple[int, SliceRef]]:
    """Sort by position along the normal (then by `SliceRef.order`); number the distinct positions."""
    normal = normal_of(orientation)
    tolerance = position_tolerance(group[0].plane.pixel_spacing)
    measured = [
        (distance_along(normal, one.plane.position), one) for one in group if one.plane.position is not None
    ]
    measured.sort(key=lambda pair: (pair[0], pair[1].order))
    numbered: list[tuple[int, SliceRef]] = []
    position, previous = 0, measured[0][0]
    for distance, one in measured:
        if distance - previous > tolerance:
            position += 1
        numbered.append((position, one))
        previous = distance
    return numbered


def _separate(numbered: list[tuple[int, SliceRef]]) -> list[tuple[list[SliceRef], set[str]]]:
    """Split where positions repeat: by the first phase that tells the repeats apart, else by order.

    A phase counts where it has no more values than the positions have repeats, so that a value that differs
    on every slice (a trigger time, say) does not tear a stack into single slices.
    """
    repeats = _repeats(numbered)
    if repeats == 1:
        return [([one for _, one in numbered], set())]
    for index, name in enumerate(PHASE_NAMES):
        groups: defaultdict[str, list[tuple[int, SliceRef]]] = defaultdict(list)
        for position, one in numbered:
            groups[one.plane.phase[index]].append((position, one))
        if 2 <= len(groups) <= repeats and max(map(_repeats, groups.values())) < repeats:
            return [
                (ordered, flags | {f"split_by_{name}"})
                for group in groups.values()
                for ordered, flags in _separate(group)
            ]
    return [(ordered, {"split_by_order"}) for ordered in _by_occurrence(numbered)]


def _repeats(numbered: Iterable[tuple[int, SliceRef]]) -> int:
    return max(Counter(position for position, _ in numbered).values())


def _by_occurrence(numbered: Iterable[tuple[int, SliceRef]]) -> list[list[SliceRef]]:
    """The k-th slice of each position, by `SliceRef.order`, goes into stack k."""
    at_position: defaultdict[int, list[SliceRef]] = defaultdict(list)
    for position, one in numbered:
        at_position[position].append(one)
    stacks: defaultdict[int, list[SliceRef]] = defaultdict(list)
    for position in sorted(at_position):
        for occurrence, one in enumerate(sorted(at_position[position], key=lambda each: each.order)):
            stacks[occurrence].append(one)
    return list(stacks.values())


def _order_without_positions(group: list[SliceRef]) -> tuple[list[SliceRef], StackGeometry, set[str]]:
    """Order by slice location where all have one of their own, else by number, else by identifier."""
    locations = {one.instance.slice_location for one in group}
    numbers = {one.instance.instance_number for one in group}
    if None not in locations and len(locations) == len(group) > 1:
        flag = "ordered_by_slice_location"
        ordered = sorted(group, key=lambda one: (one.instance.slice_location or 0.0, one.order))
    else:
        is_numbered = None not in numbers and len(numbers) == len(
            {one.instance.sop_instance_uid for one in group}
        )
        flag = "ordered_by_instance_number" if is_numbered else "ordered_by_identifier"
        ordered = sorted(group, key=lambda one: one.order)
    spacing = ordered[0].plane.pixel_spacing
    flags = {"no_position", flag} if len(group) > 1 else {"no_position"}
    detector = ordered[0].instance.detector_spacing
    if detector is not None and spacing in (None, detector):
        # Equal ones say that nobody has calibrated (PS3.3, 10.7.1.3).
        spacing = detector
        flags.add("detector_plane_spacing")
    return ordered, StackGeometry(pixel_spacing_mm=spacing, slice_spacing_mm=None, affine_lps=None), flags


def _geometry(ordered: Sequence[SliceRef], orientation: Orientation) -> StackGeometry:
    first = ordered[0]
    stated = first.plane.slice_thickness or first.instance.spacing_between_slices
    return describe_geometry(
        [one.plane for one in ordered],
        orientation,
        stated_spacing_mm=stated if stated and 0 < stated <= MAX_SPACING_MM else None,
    )


def _stack(index: int, found: _Found, firsts: Mapping[int, int]) -> Stack:
    ordered, geometry = found.ordered, found.geometry
    first = ordered[0].instance
    kind = _kind(ordered)
    of_instances = {flag for one in ordered for flag in one.instance.flags}
    more = {"mosaic"} if any(map(_is_mosaic, ordered)) else set()
    if any(one.instance.image_type[:1] == ("DERIVED",) for one in ordered):
        more.add("derived")
    if len({one.instance.frame_of_reference_uid for one in ordered}) > 1:
        more.add("frame_of_reference_varies")
    axis = None
    if found.point is not None:
        number, point = found.point
        axis = replace(point, first=firsts[number])
    elif kind is StackKind.FRAMES:
        axis = AxisPoint(name="time", first=index, index=None, num=len(ordered))
    return Stack(
        series_instance_uid=first.series_instance_uid,
        stack_index=index,
        kind=kind,
        modality=first.modality,
        rows=first.image.rows,
        columns=first.image.columns,
        samples_per_pixel=3 if first.image.is_color else 1,
        series_number=first.series_number,
        slices=tuple(ordered),
        geometry=geometry,
        flags=tuple(sorted(found.flags | more | of_instances | set(geometry.flags))),
        axis=axis,
    )


def _is_mosaic(one: SliceRef) -> bool:
    """Whether many slices are tiled into the image, and nothing says how to take them apart."""
    return "MOSAIC" in one.instance.image_type and not one.instance.mosaic


def _kind(ordered: Sequence[SliceRef]) -> StackKind:
    first = ordered[0].instance
    is_mosaic = any(map(_is_mosaic, ordered))
    if first.is_slide:
        return StackKind.SLIDE
    if first.is_localizer:
        return StackKind.LOCALIZER
    if first.sop_class_uid not in MAP_CLASSES and (
        first.sop_class_uid in SECONDARY_CLASSES
        or first.modality in _SECONDARY_MODALITIES
        or (first.image.is_color and first.modality in _NEVER_COLOR)
    ):
        return StackKind.SECONDARY
    has_positions = ordered[0].plane.position is not None and ordered[0].plane.orientation is not None
    if has_positions and len(ordered) >= _MIN_VOLUME_SLICES and not is_mosaic:
        return StackKind.VOLUME
    if not has_positions and any(one.instance.image.num_frames > 1 for one in ordered):
        return StackKind.FRAMES
    return StackKind.IMAGES


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A second file with the SOP Instance UID of a kept one; `check_copies` compares their pixels."""

    kept: InstanceHeader
    copy: InstanceHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One study with all its stacks. Holds identifiers; its ``repr`` shows none."""

    patient_id: str
    study_instance_uid: str
    stacks: tuple[Stack, ...]
    """Sorted by series number, series identifier and stack index."""
    copies: tuple[Copy, ...]

    @property
    def instances(self) -> tuple[InstanceHeader, ...]:
        """Every instance that has a slice in a stack, once, sorted by identifier."""
        found = {one.instance.sop_instance_uid: one.instance for stack in self.stacks for one in stack.slices}
        return tuple(found[uid] for uid in sorted(found))

    def __repr__(self) -> str:
        return f"Study({len(self.stacks)} stacks, {len(self.copies)} copies)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """An instance that grouping cannot place."""

    instance: InstanceHeader
    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """All studies, sorted by patient and study identifier, and what was left out."""

    studies: tuple[Study, ...]
    rejections: tuple[Rejection, ...]


def build_studies(headers: Iterable[InstanceHeader]) -> Grouping:
    """Group instances into studies, and order everything.

    A study whose instances name several patients is rejected whole (CONFLICTING_IDENTIFIER): it could be in
    two splits at once. Of several files with one SOP Instance UID one is kept, an uncompressed one if there
    is one; the others are listed as copies.
    """
    by_study: defaultdict[str, list[InstanceHeader]] = defaultdict(list)
    for header in headers:
        by_study[header.study_instance_uid].append(header)
    studies: list[Study] = []
    rejections: list[Rejection] = []
    for uid in sorted(by_study):
        instances = by_study[uid]
        if len({each.patient_id for each in instances}) > 1:
            rejections += [
                Rejection(instance=each, reason=Reason.CONFLICTING_IDENTIFIER)
                for each in sorted(instances, key=_preference)
            ]
        else:
            studies.append(_build_study(instances))
    studies.sort(key=lambda study: (study.patient_id, study.study_instance_uid))
    return Grouping(studies=tuple(studies), rejections=tuple(rejections))


def _build_study(instances: Sequence[InstanceHeader]) -> Study:
    kept: dict[str, InstanceHeader] = {}
    copies: list[Copy] = []
    for header in sorted(instances, key=_preference):
        first = kept.setdefault(header.sop_instance_uid, header)
        if first is not header:
            copies.append(Copy(kept=first, copy=header))
    by_series: defaultdict[str, list[InstanceHeader]] = defaultdict(list)
    for header in kept.values():
        by_series[header.series_instance_uid].append(header)
    stacks = [stack for series in by_series.values() for stack in split_series(series)]
    stacks.sort(key=_stack_order)
    return Study(
        patient_id=instances[0].patient_id,
        study_instance_uid=instances[0].study_instance_uid,
        stacks=tuple(stacks),
        copies=tuple(copies),
    )


def _preference(header: InstanceHeader) -> tuple[str, bool, int, int, str, int]:
    """Order of preference among files with one identifier: the smallest, then by place."""
    return (
        header.sop_instance_uid,
        not header.is_native,
        len(header.flags),
        -header.num_bytes,
        header.series_instance_uid,
        header.file_index,
    )


def _stack_order(stack: Stack) -> tuple[int, str, int]:
    number = _MISSING_NUMBER if stack.series_number is None else stack.series_number
    return number, stack.series_instance_uid, stack.stack_index
