"""Structure sets of radiotherapy: contours in space, filled in the slices that they lie in.

Source: DICOM PS3.3, C.8.8.5 (Structure Set), C.8.8.6 (ROI Contour) and C.8.8.8 (RT ROI Observations).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from shardflow.annotations.book import Dangling, OpenRegion, RegionBook, RegionFacts
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
from shardflow.annotations.placing import Placed, nearest_plane, place_outline, place_points
from shardflow.annotations.targets import Floats, Target, Targets
from shardflow.sources.attachments import AttachmentItem

__all__ = ["describe_structure_set", "read_structure_set"]

_CLOSED: Final = frozenset({"CLOSED_PLANAR", "CLOSEDPLANAR_XOR"})
_OPEN: Final = frozenset({"OPEN_NONPLANAR", "OPEN_PLANAR", "POINT"})


def describe_structure_set(path: Path, limits: AnnotationLimits) -> AttachmentItem:
    """Say whose a structure set is.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, limits)
        series = list(_referenced_series(dataset))
        instances = [uid for one in series for uid, _ in references_of(items_of(one, "ContourImageSequence"))]
        return object_item(dataset, instances, [text_of(one, "SeriesInstanceUID") for one in series])


def read_structure_set(path: Path, targets: Targets, book: RegionBook) -> None:
    """Read a structure set into regions, one a ROI.

    Args:
        path: The file.
        targets: The stored series of its study.
        book: Takes the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, book.limits)
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
            region = book.open(_facts(roi, observed.get(number), outlines))
            _read_contours(outlines, region, targets, drawn_on or in_space, book)


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
    book: RegionBook,
) -> None:
    """Gather the outlines of each slice, because one may be a hole in another; then store them."""
    closed: dict[tuple[int, int], tuple[Target, list[tuple[float, Floats]]]] = {}
    for contour in contours:
        kind = text_of(contour, "ContourGeometricType")
        data = numbers_of(contour, "ContourData")
        if kind not in _CLOSED | _OPEN:
            book.dangling("UNSUPPORTED_SHAPE")
        elif data is None or len(data) % 3 or len(data) < (9 if kind in _CLOSED else 3):
            book.dangling("DEGENERATE")
        else:
            points = data.reshape(-1, 3)
            book.count_points(len(points))
            references = references_of(items_of(contour, "ContourImageSequence"))
            named = [place for uid, frames in references for place in targets.find(uid, frames)]
            places: Sequence[Placed] | Dangling
            if kind == "OPEN_NONPLANAR":
                places = place_points(points, in_space) or "OUTSIDE"
            else:
                places = place_outline(points, in_space, named)
            if isinstance(places, str):
                is_missing = references and not named
                book.dangling("IMAGE_NOT_PACKED" if is_missing else places)
                continue
            if references and not named:
                region.flags.add("by_position")
            for target, index, pixels, height_mm in places:
                if kind in _CLOSED:
                    closed.setdefault((target.number, index), (target, []))[1].append((height_mm, pixels))
                else:
                    region.add_open(target, index, pixels)
    for (_, index), (target, outlines) in closed.items():
        region.add_outlines(target, index, nearest_plane(outlines, target.thickness_mm))
