"""Structured reports of measurements (TID 1500 and its relatives): regions, points, numbers.

The tree is read as it stands, whatever its template: a container with coordinates, with references to images
or segments and with numbers is a group of measurements. Reports of makers deviate from the template, and what
highdicom refuses to parse (it is strict, by design) still has coordinates; see docs/adr/0134.

Source: DICOM PS3.16, TID 1410, 1411, 1500 and 1501; PS3.3, C.18.6 and C.18.9 (coordinates).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardflow.annotations.book import OpenRegion, RegionBook, RegionFacts
from shardflow.annotations.content_tree import Group, Node, groups_of, images_under
from shardflow.annotations.coordinates import BySlice, add_shape, add_shape_in_space, store_outlines
from shardflow.annotations.dicom_objects import (
    code_of,
    items_of,
    number_of,
    numbers_of,
    object_item,
    open_object,
    parsing,
    references_of,
    text_of,
)
from shardflow.annotations.limits import AnnotationLimits
from shardflow.annotations.targets import Targets
from shardflow.annotations.vocabulary import allow_code, allow_unit, side_of_code
from shardflow.sources.attachments import AttachmentItem

__all__ = ["describe_report_object", "read_structured_report"]

_TRACKING_ID: Final = ("112039",)
_TRACKING_UID: Final = ("112040",)
_FINDING: Final = ("121071",)
_FINDING_SITE: Final = ("363698007", "G-C0E3")
_LATERALITY: Final = ("272741003", "G-C171")
_DIAMETERS: Final = frozenset({"103339001", "103340004", "121206", "81827009", "G-A185", "G-A193", "M-02550"})
"""Long axis, short axis, distance, diameter; the largest of those in a group is its diameter."""
_MM: Final = {"mm": 1.0, "cm": 10.0}
_SHAPES: Final = frozenset({"SCOORD", "SCOORD3D"})


def describe_report_object(path: Path, limits: AnnotationLimits) -> AttachmentItem:
    """Say whose a structured report, a key object selection or a presentation state is.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, limits)
        series = [
            one
            for keyword in ("CurrentRequestedProcedureEvidenceSequence", "PertinentOtherEvidenceSequence")
            for study in items_of(dataset, keyword)
            for one in items_of(study, "ReferencedSeriesSequence")
        ] or list(items_of(dataset, "ReferencedSeriesSequence"))
        instances = [
            uid
            for one in series
            for keyword in ("ReferencedSOPSequence", "ReferencedImageSequence")
            for uid, _ in references_of(items_of(one, keyword))
        ]
        return object_item(dataset, instances, [text_of(one, "SeriesInstanceUID") for one in series])


def read_structured_report(path: Path, targets: Targets, book: RegionBook) -> None:
    """Read a report into regions, one a group of measurements.

    Args:
        path: The file.
        targets: The stored series of its study.
        book: Takes the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, book.limits)
        for group in groups_of(dataset, book.limits):
            shapes = [node for node in group.nodes if node.value_type in _SHAPES]
            images = [node for node in group.nodes if node.value_type == "IMAGE" and not _is_of_shape(node)]
            numbers = [node for node in group.nodes if node.value_type == "NUM"]
            if shapes or (images and numbers):
                _read_group(dataset, group, shapes, images, numbers, targets, book)


def _is_of_shape(node: Node) -> bool:
    return node.parent is not None and node.parent.value_type in _SHAPES


def _read_group(
    dataset: Any,
    group: Group,
    shapes: list[Node],
    images: list[Node],
    numbers: list[Node],
    targets: Targets,
    book: RegionBook,
) -> None:
    measured = [fact for fact in (_measurement(node) for node in numbers) if fact is not None]
    is_segment = any(
        items_of(node.item, "ReferencedSOPSequence")
        and number_of(items_of(node.item, "ReferencedSOPSequence")[0], "ReferencedSegmentNumber") is not None
        for node in images
    )
    region = book.open(
        RegionFacts(
            kind=_kind(shapes),
            source="sr-tid1500",
            label=group.text("TextValue", *_TRACKING_ID),
            code=group.code(*_FINDING),
            anatomy=group.code(*_FINDING_SITE),
            side=side_of_code(group.code(*_LATERALITY)),
            tracking=group.text("UID", *_TRACKING_UID),
            flags=("by_segment",) if is_segment and not shapes else (),
            measurements=tuple(measured),
            diameter_mm=_diameter_mm(numbers),
        )
    )
    by_slice: BySlice = defaultdict(list)
    for node in shapes:
        kind = text_of(node.item, "GraphicType")
        points = numbers_of(node.item, "GraphicData")
        if points is None:
            book.dangling("DEGENERATE")
        elif node.value_type == "SCOORD3D":
            frame = text_of(node.item, "ReferencedFrameOfReferenceUID")
            add_shape_in_space(region, kind, points, targets.of_frame(frame), book, by_slice)
        else:
            references = references_of(images_under(dataset, node))
            places = [place for uid, frames in references for place in targets.find(uid, frames)]
            if not places:
                book.dangling("IMAGE_NOT_PACKED" if references else "NO_REFERENCE")
            for target, index in places:
                add_shape(region, kind, points, target, index, book, by_slice)
    if not shapes:
        _add_images(region, images, targets, book)
    store_outlines(region, by_slice)


def _kind(shapes: list[Node]) -> Any:
    """What a group draws; numbers alone, or of a line, are a measurement."""
    types = {text_of(node.item, "GraphicType") for node in shapes}
    if types and types <= {"MULTIPOINT", "POINT"}:
        return "point"
    is_line = all(node.parent is not None and node.parent.value_type == "NUM" for node in shapes)
    return "measurement" if is_line else "contour"


def _add_images(region: OpenRegion, images: list[Node], targets: Targets, book: RegionBook) -> None:
    """Name the slices that a group speaks of without drawing in them."""
    for node in images:
        for uid, frames in references_of(items_of(node.item, "ReferencedSOPSequence")):
            places = targets.find(uid, frames)
            is_segment = node.concept is not None and node.concept.value == "121191"
            if not places and not is_segment:
                book.dangling("IMAGE_NOT_PACKED")
            for target, index in places:
                region.add_slice(target, index)


def _measurement(node: Node) -> Mapping[str, Any] | None:
    """Code, number and unit of an item, where all of them are controlled."""
    code = allow_code(node.concept)
    for value in items_of(node.item, "MeasuredValueSequence"):
        number = number_of(value, "NumericValue")
        unit = code_of(value, "MeasurementUnitsCodeSequence")
        name = allow_unit(unit.value) if unit is not None else None
        if code is not None and number is not None and name is not None:
            return {"code": code, "unit": name, "value": round(number, 6)}
    return None


def _diameter_mm(numbers: list[Node]) -> float | None:
    found = []
    for node in numbers:
        if node.concept is not None and node.concept.value in _DIAMETERS:
            for value in items_of(node.item, "MeasuredValueSequence"):
                number = number_of(value, "NumericValue")
                unit = code_of(value, "MeasurementUnitsCodeSequence")
                if number is not None and unit is not None and unit.value in _MM and number >= 0:
                    found.append(number * _MM[unit.value])
    return max(found, default=None)
