"""Readers of drawings in DICOM objects: key object selections, presentation states, structure sets and SR.

Of typed texts and layer names only a word of the lexicon is kept. The tree of a structured report is read
whatever its template: a container with coordinates, with references to images or segments and with numbers is
a group of measurements. Vendors deviate from the template (TID 1500), and what highdicom refuses to parse (it
is strict, by design) still has coordinates; see docs/adr/0132.

Source: DICOM PS3.16, TID 1410, 1411, 1500, 1501 and 2010, CID 7010; PS3.3, C.8.8.5 (Structure Set), C.8.8.6
(ROI Contour), C.8.8.8 (RT ROI Observations), C.10.4 (Displayed Area), C.10.5 (Graphic Annotation), C.10.6
(Spatial Transformation), C.18.6 and C.18.9 (coordinates).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from shardflow.packing.attachments.annotations.dicom_objects import (
    Group,
    Node,
    code_of,
    groups_of,
    images_under,
    items_of,
    number_of,
    numbers_of,
    object_item,
    open_object,
    parsing,
    references_of,
    text_of,
    walk,
)
from shardflow.packing.attachments.annotations.geometry import Drawing, Placed, place_outline, place_points
from shardflow.packing.attachments.annotations.region_writer import (
    Dangling,
    OpenRegion,
    RegionFacts,
    RegionWriter,
)
from shardflow.packing.attachments.annotations.targets import AnnotationLimits, Floats, Target, Targets
from shardflow.packing.attachments.annotations.vocabulary import allow_unit, side_of_code
from shardflow.packing.attachments.codes import allow_code
from shardflow.packing.sources.attachments import AttachmentItem


def read_key_objects(path: Path, targets: Targets, writer: RegionWriter) -> None:
    """Read a selection into one region, whose slices are the marked images.

    Args:
        path: The file.
        targets: The stored series of its study.
        writer: Receives the region.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, writer.limits)
        title = code_of(dataset, "ConceptNameCodeSequence")
        region = writer.open(RegionFacts(kind="key_image", source="ko", code=title))
        for node in walk(dataset, writer.limits):
            if node.value_type != "IMAGE":
                continue
            for uid, frames in references_of(items_of(node.item, "ReferencedSOPSequence")):
                places = targets.find(uid, frames)
                if not places:
                    writer.dangling("IMAGE_NOT_PACKED")
                for target, index in places:
                    region.add_slice(target, index)


Place = tuple[Target, int]

_COMPOUND: Final = {
    "ELLIPSE": "ELLIPSE",
    "MULTILINE": "POLYLINE",
    "RECTANGLE": "POLYGON",
    "RULER": "POLYLINE",
}
"""Compound graphics that can be drawn, as simple ones; rulers, arrows and axes of others are left out."""


def read_presentation_state(path: Path, targets: Targets, writer: RegionWriter) -> None:
    """Read a presentation state into regions, one a graphic.

    Args:
        path: The file.
        targets: The stored series of its study.
        writer: Receives the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, writer.limits)
        everything = [
            reference
            for one in items_of(dataset, "ReferencedSeriesSequence")
            for reference in references_of(items_of(one, "ReferencedImageSequence"))
        ]
        for annotation in items_of(dataset, "GraphicAnnotationSequence"):
            named = references_of(items_of(annotation, "ReferencedImageSequence")) or everything
            places = targets.find_all(named)
            if not places:
                writer.dangling("IMAGE_NOT_PACKED" if named else "NO_REFERENCE")
                continue
            for graphic in _graphics(annotation):
                _add(dataset, graphic, places, _label(annotation), writer)


class _Graphic(NamedTuple):
    kind: str
    """Graphic type; empty for one that cannot be drawn."""
    units: str
    numbers: Floats | None


def _graphics(annotation: Any) -> Iterator[_Graphic]:
    """Yield the graphics of an annotation, and the anchor points of its texts."""
    for item in items_of(annotation, "GraphicObjectSequence"):
        units = text_of(item, "GraphicAnnotationUnits")
        yield _Graphic(text_of(item, "GraphicType"), units, numbers_of(item, "GraphicData"))
    for item in items_of(annotation, "CompoundGraphicSequence"):
        kind = _COMPOUND.get(text_of(item, "CompoundGraphicType"), "")
        yield _Graphic(kind, text_of(item, "CompoundGraphicUnits"), numbers_of(item, "GraphicData"))
    for item in items_of(annotation, "TextObjectSequence"):
        point = numbers_of(item, "AnchorPoint", 2)
        if point is not None:
            yield _Graphic("POINT", text_of(item, "AnchorPointAnnotationUnits"), point)


def _label(annotation: Any) -> str:
    """Return the first text of an annotation; the writer publishes only words of the lexicon."""
    texts = (text_of(one, "UnformattedTextValue") for one in items_of(annotation, "TextObjectSequence"))
    return next((text for text in texts if text), "")


def _add(dataset: Any, graphic: _Graphic, places: Sequence[Place], label: str, writer: RegionWriter) -> None:
    """Add one graphic to all images that it is drawn on."""
    kind, units, numbers = graphic
    if not kind or numbers is None or len(numbers) < 2 or len(numbers) % 2:
        writer.dangling("UNSUPPORTED_SHAPE" if not kind else "DEGENERATE")
        return
    if units not in ("DISPLAY", "PIXEL"):
        writer.dangling("UNSUPPORTED_SHAPE")
        return
    is_turned = int(number_of(dataset, "ImageRotation") or 0) % 360 in (90, 270)
    region = writer.open(
        RegionFacts(kind="point" if kind == "POINT" else "graphic", source="gsps", label=label)
    )
    drawing = Drawing(region, writer)
    for target, index in places:
        points = numbers.reshape(-1, 2)
        if units == "DISPLAY":
            area = _displayed_area(dataset, target.instances[index][0], target)
            # The graphic is stated in shares of the displayed area.
            points = area[0] + (points[:, ::-1] if is_turned else points) * (area[1] - area[0])
        drawing.add(kind, points.ravel(), target, index)
    drawing.store()


def _displayed_area(dataset: Any, sop_uid: str, target: Target) -> Floats:
    """Return the first and last corner of the displayed part of an image, as ``((x, y), (x, y))`` edges.

    The corners are those of the display: after a turn or a flip the first may lie right of or below the last.
    """
    for selection in items_of(dataset, "DisplayedAreaSelectionSequence"):
        uids = [uid for uid, _ in references_of(items_of(selection, "ReferencedImageSequence"))]
        first = numbers_of(selection, "DisplayedAreaTopLeftHandCorner", 2)
        last = numbers_of(selection, "DisplayedAreaBottomRightHandCorner", 2)
        if first is not None and last is not None and (not uids or sop_uid in uids):
            # Pixels are counted from 1, and both corners are displayed.
            is_ahead = first <= last
            return np.stack([np.where(is_ahead, first - 1, first), np.where(is_ahead, last, last - 1)])
    return np.array([[0.0, 0.0], [target.columns, target.rows]])


_CLOSED: Final = frozenset({"CLOSED_PLANAR", "CLOSEDPLANAR_XOR"})
_OPEN: Final = frozenset({"OPEN_NONPLANAR", "OPEN_PLANAR", "POINT"})


def describe_structure_set(path: Path, limits: AnnotationLimits) -> AttachmentItem:
    """Identify the patient and study of a structure set.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, limits)
        return object_item(dataset, list(_referenced_series(dataset)), "ContourImageSequence")


def read_structure_set(path: Path, targets: Targets, writer: RegionWriter) -> None:
    """Read a structure set into regions, one a ROI.

    Args:
        path: The file.
        targets: The stored series of its study.
        writer: Receives the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, writer.limits)
        rois = {number_of(one, "ROINumber"): one for one in items_of(dataset, "StructureSetROISequence")}
        observed = {
            number_of(one, "ReferencedROINumber"): one
            for one in items_of(dataset, "RTROIObservationsSequence")
        }
        series = targets.of_series({text_of(one, "SeriesInstanceUID") for one in _referenced_series(dataset)})
        frame = text_of(dataset, "FrameOfReferenceUID")
        for contours in items_of(dataset, "ROIContourSequence"):
            number = number_of(contours, "ReferencedROINumber")
            roi = rois.get(number)
            in_space = targets.of_frame(text_of(roi, "ReferencedFrameOfReferenceUID") or frame)
            drawn_on = [target for target in in_space if target in series]
            outlines = items_of(contours, "ContourSequence")
            region = writer.open(_facts(roi, observed.get(number), outlines))
            _read_contours(outlines, region, targets, drawn_on or in_space, writer)


def _referenced_series(dataset: Any) -> Iterator[Any]:
    for frame in items_of(dataset, "ReferencedFrameOfReferenceSequence"):
        for study in items_of(frame, "RTReferencedStudySequence"):
            yield from items_of(study, "RTReferencedSeriesSequence")


def _facts(roi: Any, observation: Any, contours: Sequence[Any]) -> RegionFacts:
    types = {text_of(one, "ContourGeometricType") for one in contours}
    name = text_of(roi, "ROIName")
    return RegionFacts(
        kind="point" if types == {"POINT"} else "contour",
        source="rtstruct",
        label=name,
        also=text_of(observation, "RTROIInterpretedType"),
        code=code_of(observation, "RTROIIdentificationCodeSequence"),
    )


def _read_contours(
    contours: Sequence[Any],
    region: OpenRegion,
    targets: Targets,
    in_space: Sequence[Target],
    writer: RegionWriter,
) -> None:
    drawing = Drawing(region, writer)
    for contour in contours:
        kind = text_of(contour, "ContourGeometricType")
        data = numbers_of(contour, "ContourData")
        if kind not in _CLOSED | _OPEN:
            writer.dangling("UNSUPPORTED_SHAPE")
        elif data is None or len(data) % 3 or len(data) < (9 if kind in _CLOSED else 3):
            writer.dangling("DEGENERATE")
        else:
            points = data.reshape(-1, 3)
            writer.count("points of outlines", len(points))
            references = references_of(items_of(contour, "ContourImageSequence"))
            named = targets.find_all(references)
            places: Sequence[Placed] | Dangling
            if kind == "OPEN_NONPLANAR":
                places = place_points(points, in_space) or "OUTSIDE"
            else:
                places = place_outline(points, in_space, named)
            if isinstance(places, str):
                is_missing = references and not named
                writer.dangling("IMAGE_NOT_PACKED" if is_missing else places)
                continue
            if references and not named:
                region.flags.add("by_position")
            for target, index, pixels, height_mm in places:
                if kind in _CLOSED:
                    drawing.add_closed(target, index, pixels, height_mm)
                else:
                    region.add_open(target, index, pixels)
    drawing.store()


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
    """Identify the patient and study of a structured report, key object selection or presentation state.

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
        return object_item(dataset, series, "ReferencedSOPSequence", "ReferencedImageSequence")


def read_structured_report(path: Path, targets: Targets, writer: RegionWriter) -> None:
    """Read a report into regions, one a group of measurements.

    Args:
        path: The file.
        targets: The stored series of its study.
        writer: Receives the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, writer.limits)
        for group in groups_of(dataset, writer.limits):
            shapes = [node for node in group.nodes if node.value_type in _SHAPES]
            images = [node for node in group.nodes if node.value_type == "IMAGE" and not _is_of_shape(node)]
            numbers = [node for node in group.nodes if node.value_type == "NUM"]
            if shapes or (images and numbers):
                _read_group(dataset, group, shapes, images, numbers, targets, writer)


def _is_of_shape(node: Node) -> bool:
    return node.parent is not None and node.parent.value_type in _SHAPES


def _read_group(
    dataset: Any,
    group: Group,
    shapes: list[Node],
    images: list[Node],
    numbers: list[Node],
    targets: Targets,
    writer: RegionWriter,
) -> None:
    measured = [fact for fact in (_measurement(node) for node in numbers) if fact is not None]
    is_segment = any(
        items_of(node.item, "ReferencedSOPSequence")
        and number_of(items_of(node.item, "ReferencedSOPSequence")[0], "ReferencedSegmentNumber") is not None
        for node in images
    )
    region = writer.open(
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
    drawing = Drawing(region, writer)
    for node in shapes:
        kind = text_of(node.item, "GraphicType")
        points = numbers_of(node.item, "GraphicData")
        if points is None:
            writer.dangling("DEGENERATE")
        elif node.value_type == "SCOORD3D":
            frame = text_of(node.item, "ReferencedFrameOfReferenceUID")
            drawing.add_in_space(kind, points, targets.of_frame(frame))
        else:
            references = references_of(images_under(dataset, node))
            places = targets.find_all(references)
            if not places:
                writer.dangling("IMAGE_NOT_PACKED" if references else "NO_REFERENCE")
            for target, index in places:
                drawing.add(kind, points, target, index)
    if not shapes:
        _add_images(region, images, targets, writer)
    drawing.store()


def _kind(shapes: list[Node]) -> Any:
    """Return the kind of region of a group; numbers alone, or of a line, are a measurement."""
    types = {text_of(node.item, "GraphicType") for node in shapes}
    if types and types <= {"MULTIPOINT", "POINT"}:
        return "point"
    is_line = all(node.parent is not None and node.parent.value_type == "NUM" for node in shapes)
    return "measurement" if is_line else "contour"


def _add_images(region: OpenRegion, images: list[Node], targets: Targets, writer: RegionWriter) -> None:
    """Name the slices that a group references without drawing in them."""
    for node in images:
        for uid, frames in references_of(items_of(node.item, "ReferencedSOPSequence")):
            places = targets.find(uid, frames)
            is_segment = node.concept is not None and node.concept.value == "121191"
            if not places and not is_segment:
                writer.dangling("IMAGE_NOT_PACKED")
            for target, index in places:
                region.add_slice(target, index)


def _measurement(node: Node) -> Mapping[str, Any] | None:
    """Return code, number and unit of an item if all of them are controlled."""
    code = allow_code(node.concept)
    for number, unit in _measured(node):
        name = allow_unit(unit)
        if code is not None and name is not None:
            return {"code": code, "unit": name, "value": round(number, 6)}
    return None


def _diameter_mm(numbers: list[Node]) -> float | None:
    found = [
        number * _MM[unit]
        for node in numbers
        if node.concept is not None and node.concept.value in _DIAMETERS
        for number, unit in _measured(node)
        if unit in _MM and number >= 0
    ]
    return max(found, default=None)


def _measured(node: Node) -> Iterator[tuple[float, str]]:
    """Yield the numbers of an item with the codes of their units."""
    for value in items_of(node.item, "MeasuredValueSequence"):
        number = number_of(value, "NumericValue")
        unit = code_of(value, "MeasurementUnitsCodeSequence")
        if number is not None and unit is not None:
            yield number, unit.value
