"""Graphic annotations of presentation states: what somebody drew on an image to show it.

Texts and the names of layers are what that somebody typed; of a text only a word of the lexicon is kept.

Source: DICOM PS3.3, C.10.4 (Displayed Area), C.10.5 (Graphic Annotation) and C.10.6 (Spatial Transformation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardflow.annotations.book import RegionBook, RegionFacts
from shardflow.annotations.coordinates import BySlice, add_shape, store_outlines
from shardflow.annotations.dicom_objects import (
    items_of,
    number_of,
    numbers_of,
    open_object,
    parsing,
    references_of,
    text_of,
)
from shardflow.annotations.targets import Floats, Target, Targets

__all__ = ["read_presentation_state"]

Place = tuple[Target, int]

_COMPOUND: Final = {
    "ELLIPSE": "ELLIPSE",
    "MULTILINE": "POLYLINE",
    "RECTANGLE": "POLYGON",
    "RULER": "POLYLINE",
}
"""Compound graphics that can be drawn, as simple ones; rulers, arrows and axes of others are left out."""


def read_presentation_state(path: Path, targets: Targets, book: RegionBook) -> None:
    """Read a presentation state into regions, one a graphic.

    Args:
        path: The file.
        targets: The stored series of its study.
        book: Takes the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, book.limits)
        everything = [
            reference
            for one in items_of(dataset, "ReferencedSeriesSequence")
            for reference in references_of(items_of(one, "ReferencedImageSequence"))
        ]
        turn = int(number_of(dataset, "ImageRotation") or 0) % 360
        for annotation in items_of(dataset, "GraphicAnnotationSequence"):
            named = references_of(items_of(annotation, "ReferencedImageSequence")) or everything
            places = [place for uid, frames in named for place in targets.find(uid, frames)]
            if not places:
                book.dangling("IMAGE_NOT_PACKED" if named else "NO_REFERENCE")
                continue
            label = _label(annotation)
            for graphic in items_of(annotation, "GraphicObjectSequence"):
                kind = text_of(graphic, "GraphicType")
                units = text_of(graphic, "GraphicAnnotationUnits")
                points = numbers_of(graphic, "GraphicData")
                _add(dataset, kind, points, units, turn, places, label, book)
            for graphic in items_of(annotation, "CompoundGraphicSequence"):
                kind = _COMPOUND.get(text_of(graphic, "CompoundGraphicType"), "")
                units = text_of(graphic, "CompoundGraphicUnits")
                _add(dataset, kind, numbers_of(graphic, "GraphicData"), units, turn, places, label, book)
            for text in items_of(annotation, "TextObjectSequence"):
                units = text_of(text, "AnchorPointAnnotationUnits")
                point = numbers_of(text, "AnchorPoint", 2)
                if point is not None:
                    _add(dataset, "POINT", point, units, turn, places, label, book)


def _label(annotation: Any) -> str:
    """First text of an annotation; the book lets only words of the lexicon pass."""
    texts = (text_of(one, "UnformattedTextValue") for one in items_of(annotation, "TextObjectSequence"))
    return next((text for text in texts if text), "")


def _add(
    dataset: Any,
    kind: str,
    numbers: Floats | None,
    units: str,
    turn: int,
    places: Sequence[Place],
    label: str,
    book: RegionBook,
) -> None:
    """Add one graphic to all images that it is drawn on."""
    if not kind or numbers is None or len(numbers) < 2 or len(numbers) % 2:
        book.dangling("UNSUPPORTED_SHAPE" if not kind else "DEGENERATE")
        return
    if units not in ("DISPLAY", "PIXEL"):
        book.dangling("UNSUPPORTED_SHAPE")
        return
    is_point = kind == "POINT"
    region = book.open(RegionFacts(kind="point" if is_point else "graphic", source="gsps", label=label))
    by_slice: BySlice = defaultdict(list)
    for target, index in places:
        points = numbers.reshape(-1, 2)
        if units == "DISPLAY":
            area = _displayed_area(dataset, target.instances[index][0], target)
            points = _from_display(points, area, is_turned=turn in (90, 270))
        add_shape(region, kind, points.ravel(), target, index, book, by_slice)
    store_outlines(region, by_slice)


def _displayed_area(dataset: Any, sop_uid: str, target: Target) -> Floats:
    """First and last corner of what is displayed of an image, as ``((x, y), (x, y))`` edges.

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


def _from_display(points: Floats, area: Floats, *, is_turned: bool) -> Floats:
    """Map shares of the displayed area to pixel coordinates."""
    shares = points[:, ::-1] if is_turned else points
    return np.asarray(area[0] + shares * (area[1] - area[0]), np.float64)
