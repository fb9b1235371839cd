"""XML of LIDC-IDRI: what up to four readers drew, each by itself.

A nodule's number is a reader's own: what several readers drew of one nodule has nothing in common but its
place, so these regions have no tracking key. An edge map is the border outside of a nodule, in whole pixels.
``inclusion`` FALSE cuts the inside of another outline out. A map of one point is a nodule below 3 mm, or
something that is none.

Source: LIDC-IDRI, "LIDC XML file documentation" of The Cancer Imaging Archive.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from xml.parsers import expat

import numpy as np

from shardflow.annotations.book import OpenRegion, RegionBook, RegionFacts
from shardflow.annotations.limits import AnnotationLimits
from shardflow.annotations.outlines import unite_outlines
from shardflow.annotations.targets import Floats, Target, Targets
from shardflow.sources.attachments import AttachmentItem
from shardflow.sources.reasons import Reason, source_error

__all__ = ["describe_lidc", "is_lidc", "read_lidc"]

_MAX_REFERENCES: Final = 64


def is_lidc(path: Path, head: bytes) -> bool:  # noqa: ARG001
    """Tell from its beginning whether a file is such an XML."""
    return b"LidcReadMessage" in head or b"IdriReadMessage" in head


def describe_lidc(path: Path, limits: AnnotationLimits) -> AttachmentItem:
    """Say whose an XML is.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    root = _parse(path, limits)
    instances = dict.fromkeys(_text(one) for one in root.iter("imageSOP_UID"))
    return AttachmentItem(
        study_uids=tuple(filter(None, (_text(root.find(".//StudyInstanceUID")),))),
        series_uids=tuple(filter(None, (_text(root.find(".//SeriesInstanceUid")),))),
        sop_uids=tuple(filter(None, instances))[:_MAX_REFERENCES],
    )


def read_lidc(path: Path, targets: Targets, book: RegionBook) -> None:
    """Read an XML into regions: a nodule of a reader each, or a place that a reader found to be none.

    Args:
        path: The file.
        targets: The stored series of its study.
        book: Takes the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    root = _parse(path, book.limits)
    for reader, session in enumerate(root.iter("readingSession")):
        for name, tag in (("nodule", "unblindedReadNodule"), ("", "nonNodule")):
            for drawn in session.iter(tag):
                region = book.open(
                    RegionFacts(
                        kind="contour" if name else "point",
                        source="lidc-xml",
                        label=name,
                        reader=reader,
                        flags=() if name else ("non_nodule",),
                    )
                )
                _read_drawing(drawn, region, targets, book)


def _read_drawing(drawn: ET.Element, region: OpenRegion, targets: Targets, book: RegionBook) -> None:
    kept: dict[tuple[int, int], list[Floats]] = defaultdict(list)
    holes: dict[tuple[int, int], list[Floats]] = defaultdict(list)
    series: dict[int, Target] = {}
    for roi in [*drawn.iter("roi")] or [drawn]:
        points = np.array([*_points(roi)], np.float64).reshape(-1, 2) + 0.5
        places = targets.find(_text(roi.find("imageSOP_UID")))
        if not places:
            book.dangling("IMAGE_NOT_PACKED")
            continue
        if not len(points):
            book.dangling("DEGENERATE")
            continue
        is_hole = _text(roi.find("inclusion")).upper() == "FALSE"
        for target, index in places:
            series[target.number] = target
            if len(points) < 3:
                region.add_open(target, index, points)
            else:
                (holes if is_hole else kept)[target.number, index].append(points)
    for place in sorted({*kept, *holes}):
        target, index = series[place[0]], place[1]
        if not kept[place]:
            # A hole in nothing: the reader excluded what no outline of the same nodule holds.
            book.dangling("DEGENERATE", len(holes[place]))
            continue
        inside, cut = (
            unite_outlines(outlines, *target.shape, is_border_outside=True)
            for outlines in (kept[place], holes[place])
        )
        inside[cut != 0] = 0
        region.add_outlines(target, index, [*kept[place], *holes[place]], inside)


def _points(roi: ET.Element) -> Iterator[tuple[float, float]]:
    for tag in ("edgeMap", "locus"):
        for point in roi.iter(tag):
            try:
                x, y = float(_text(point.find("xCoord"))), float(_text(point.find("yCoord")))
            except ValueError:
                continue
            if np.isfinite((x, y)).all():
                yield x, y


def _text(element: ET.Element | None) -> str:
    return "" if element is None or element.text is None else element.text.strip()


class _Builder(ET.TreeBuilder):
    """Builds the tree without the names of namespaces, and counts."""

    def __init__(self, limits: AnnotationLimits) -> None:
        super().__init__()
        self._limits, self._num_elements, self._depth = limits, 0, 0

    def start(self, tag: str, attrs: dict[str, str]) -> ET.Element:
        self._num_elements += 1
        self._depth += 1
        if self._num_elements > 16 * self._limits.max_items or self._depth > self._limits.max_depth:
            raise source_error(Reason.LIMIT_EXCEEDED, "too many elements or levels")
        return super().start(tag.rpartition("}")[2], attrs)

    def end(self, tag: str) -> ET.Element:
        self._depth -= 1
        return super().end(tag.rpartition("}")[2])


def _parse(path: Path, limits: AnnotationLimits) -> ET.Element:
    """Parse a file without document types, and so without entities of its own.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    builder = _Builder(limits)
    parser = expat.ParserCreate(namespace_separator="}")
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = _refuse_doctype
    try:
        num_bytes = path.stat().st_size
        if num_bytes > limits.max_file_bytes:
            raise source_error(
                Reason.LIMIT_EXCEEDED, f"{num_bytes} bytes, at most {limits.max_file_bytes} allowed"
            )
        with path.open("rb") as file:
            parser.ParseFile(file)
        return builder.close()
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, type(error).__name__) from None
    except (expat.ExpatError, AssertionError, ValueError) as error:
        raise source_error(Reason.HEADER_UNREADABLE, type(error).__name__) from None


def _refuse_doctype(*_: object) -> None:
    raise source_error(Reason.HEADER_UNREADABLE, "the XML declares a document type")
