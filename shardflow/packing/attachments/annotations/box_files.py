"""Readers of annotation files that name images: box tables (CSV), COCO (JSON) and LIDC-IDRI (XML).

Tables have one box per row; their columns are found by the names that public tables use. An image is named by
its SOP Instance UID or by its name in the layout, with or without a folder and a suffix.

In LIDC-IDRI, up to four readers drew independently. A nodule's number is a reader's own: outlines of one
nodule by several readers share nothing but their place, so these regions have no tracking key. An edge map is
the border outside of a nodule, in whole pixels. ``inclusion`` FALSE cuts the inside of another outline out. A
map of one point is a nodule below 3 mm, or not a nodule.

Source: cocodataset.org, "Data format" (run lengths go down the columns, as its reference code has them);
"LIDC XML file documentation" of The Cancer Imaging Archive.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import SourceError, os_reason
from shardflow.format.contents.regions import unite_outlines
from shardflow.format.reasons import Reason, source_error
from shardflow.packing.attachments.annotations.region_writer import (
    OpenRegion,
    RegionFacts,
    RegionWriter,
)
from shardflow.packing.attachments.annotations.targets import AnnotationLimits, Floats, Target, Targets
from shardflow.packing.sources.attachments import AttachmentItem
from shardflow.packing.sources.documents.bounded import DocumentLimits, XmlNode, parse_xml, read_bounded
from shardflow.packing.sources.layouts.table_layout import LIDC_RATINGS

_STUDIES: Final = ("study_instance_uid", "studyinstanceuid", "study_uid", "study_id", "studyid", "study")
_IMAGES: Final = (
    "sop_instance_uid", "sopinstanceuid", "sop_uid", "image_id", "imageid", "image_uid", "dicom_id",
    "instance_uid", "image_path", "file_name", "filename", "image_index", "image", "path", "patientid",
)  # fmt: skip
"""Names of the column of the image, the best first; a table of RSNA calls it ``patientId``."""
_LABELS: Final = ("label", "class_name", "finding_label", "finding", "category", "class", "lesion_type")
_CORNERS: Final = (
    ("x_min", "y_min", "x_max", "y_max"),
    ("xmin", "ymin", "xmax", "ymax"),
    ("x1", "y1", "x2", "y2"),
    ("x0", "y0", "x1", "y1"),
)
_SIZES: Final = (("x", "y", "width", "height"), ("x", "y", "w", "h"))
_FRAMES: Final = ("frame", "frame_number")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """Columns of a table, by role."""

    image: str
    study: str
    label: str
    frame: str
    box: tuple[str, str, str, str]
    has_size: bool
    """Whether the last two are a width and a height."""


def is_box_table(path: Path, head: bytes) -> bool:  # noqa: ARG001
    """Tell from its beginning whether a file is a table of boxes."""
    line, end, _ = head.removeprefix(b"\xef\xbb\xbf").partition(b"\n")
    if not end or b"\0" in line:
        return False
    return _columns(next(csv.reader([line.decode("utf-8", "replace").strip("\r")]), [])) is not None


def describe_boxes(path: Path, limits: AnnotationLimits) -> list[AttachmentItem]:
    """Identify the studies of the rows of a table: an item for each image, in the order of their first rows.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    images: dict[str, str] = {}
    for columns, row in _rows(path, limits):
        images.setdefault(row[columns.image], row[columns.study] if columns.study else "")
    return [
        AttachmentItem(item=item, study_uids=(study,) if study else (), sop_uids=image_names(image))
        for item, (image, study) in enumerate(images.items())
    ]


def read_boxes(path: Path, items: Sequence[int], targets: Targets, writer: RegionWriter) -> None:
    """Read the rows of some images into regions, one a row.

    Args:
        path: The file.
        items: Numbers of the images, as `describe_boxes` counts them.
        targets: The stored series of their study.
        writer: Receives the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    wanted, numbers = set(items), dict[str, int]()
    for columns, row in _rows(path, writer.limits):
        image = row[columns.image]
        if numbers.setdefault(image, len(numbers)) not in wanted:
            continue
        cells = [row[name] for name in columns.box]
        if not any(cells):
            # A row without a box states that nothing was found.
            continue
        box = _numbers(cells)
        frame = _numbers([row[columns.frame]]) if columns.frame else None
        if box is None:
            writer.dangling("DEGENERATE")
            continue
        if columns.has_size:
            box = [box[0], box[1], box[0] + box[2], box[1] + box[3]]
        places = find_image(targets, image, () if frame is None else (int(frame[0]),))
        if not places:
            writer.dangling("IMAGE_NOT_PACKED")
            continue
        label = row[columns.label] if columns.label else ""
        region = writer.open(RegionFacts(kind="box", source="csv", label=label))
        for target, index in places:
            region.add_box(target, index, box)


def image_names(name: str) -> tuple[str, ...]:
    """Return the names under which a table may list an image: in full, without folders, without suffixes."""
    base = name.replace("\\", "/").rpartition("/")[2]
    stems = [base]
    for suffix in (".gz", ".dcm", ".dicom", ".jpg", ".jpeg", ".png", ".nii"):
        if stems[-1].lower().endswith(suffix):
            stems.append(stems[-1][: -len(suffix)])
    return tuple(dict.fromkeys(one for one in (name, *stems) if one))


def find_image(targets: Targets, name: str, frames: Sequence[int] = ()) -> list[tuple[Target, int]]:
    """Find the slices of an image that a table names."""
    found = (targets.find(one, frames) for one in image_names(name))
    return next((places for places in found if places), [])


@contextmanager
def _parsing(path: Path, limits: AnnotationLimits, *malformed: type[Exception]) -> Iterator[None]:
    """Check the size of a file, and convert the errors of reading it.

    Raises:
        SourceError: FILE_UNREADABLE; HEADER_UNREADABLE for the errors in ``malformed``; LIMIT_EXCEEDED.
    """
    try:
        limits.check_file(path)
        yield
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, os_reason(error)) from None
    except malformed as error:
        raise source_error(Reason.HEADER_UNREADABLE, type(error).__name__) from None


def _rows(path: Path, limits: AnnotationLimits) -> Iterator[tuple[_Columns, Mapping[str, str]]]:
    with (
        _parsing(path, limits, UnicodeDecodeError, csv.Error),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.reader(file)
        names = [name.strip().lower() for name in next(reader, [])]
        columns = _columns(names)
        if columns is None:
            raise source_error(Reason.HEADER_UNREADABLE, "the table has no columns of boxes")
        for number, cells in enumerate(reader):
            if number >= limits.max_items:
                raise source_error(Reason.LIMIT_EXCEEDED, f"more than {limits.max_items} rows")
            row = dict(zip(names, (cell.strip() for cell in cells), strict=False))
            if row.get(columns.image):
                yield columns, {name: row.get(name, "") for name in names}


def _columns(names: Sequence[str]) -> _Columns | None:
    known = {name.strip().lower() for name in names}
    boxes = [(box, False) for box in _CORNERS] + [(box, True) for box in _SIZES]
    image = next((name for name in _IMAGES if name in known), "")
    box, has_size = next(((box, sized) for box, sized in boxes if known.issuperset(box)), (None, False))
    if not image or box is None:
        return None
    study, label, frame = (
        next((name for name in wanted if name in known), "") for wanted in (_STUDIES, _LABELS, _FRAMES)
    )
    return _Columns(image=image, study=study, label=label, frame=frame, box=box, has_size=has_size)


def _numbers(cells: Sequence[str]) -> list[float] | None:
    try:
        values = [float(cell) for cell in cells]
    except ValueError:
        return None
    return values if np.isfinite(values).all() else None


_NAMES = ("sop_instance_uid", "SOPInstanceUID", "file_name", "id")
_STUDIES_COCO = ("study_instance_uid", "StudyInstanceUID", "study_id")


def is_coco(path: Path, head: bytes) -> bool:
    """Tell whether a file is COCO: by its beginning, or by its end if the images come late."""
    if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(head)))
        seen = head + file.read(len(head))
    return sum(key in seen for key in (b'"images"', b'"annotations"', b'"categories"')) >= 2


def describe_coco(path: Path, limits: AnnotationLimits) -> list[AttachmentItem]:
    """Identify the studies of the images of a file: an item each.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    images, _, _ = _load(path, limits)
    items = []
    for item, image in enumerate(images):
        study = next((str(image[key]) for key in _STUDIES_COCO if image.get(key)), "")
        names = tuple(dict.fromkeys(name for one in _names_of(image) for name in image_names(one)))
        items.append(AttachmentItem(item=item, study_uids=(study,) if study else (), sop_uids=names))
    return items


def read_coco(path: Path, items: Sequence[int], targets: Targets, writer: RegionWriter) -> None:
    """Read the annotations of some images into regions, one each.

    Args:
        path: The file.
        items: Places of the images in the file's list.
        targets: The stored series of their study.
        writer: Receives the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    images, annotations, categories = _load(path, writer.limits)
    names = {str(one.get("id")): str(one.get("name", "")) for one in categories}
    chosen = {str(images[item].get("id")): images[item] for item in items if item < len(images)}
    for annotation in annotations:
        image = chosen.get(str(annotation.get("image_id")))
        if image is None:
            continue
        places = next(filter(None, (find_image(targets, name) for name in _names_of(image))), [])
        if not places:
            writer.dangling("IMAGE_NOT_PACKED")
            continue
        drawn = annotation.get("segmentation")
        kind = "contour" if isinstance(drawn, list) and drawn else "segmentation" if drawn else "box"
        region = writer.open(
            RegionFacts(
                kind=kind,  # type: ignore[arg-type] # three of the kinds
                source="coco",
                label=names.get(str(annotation.get("category_id")), ""),
                flags=("crowd",) if annotation.get("iscrowd") else (),
            )
        )
        for target, index in places:
            _draw(annotation, region, target, index, writer)


def _draw(
    annotation: Mapping[str, Any], region: OpenRegion, target: Target, index: int, writer: RegionWriter
) -> None:
    drawn = annotation.get("segmentation")
    if isinstance(drawn, list) and drawn:
        outlines = [outline for outline in map(_outline, drawn) if outline is not None]
        writer.dangling("DEGENERATE", len(drawn) - len(outlines))
        if outlines:
            # Parts of one region: where two overlap, both are of it.
            region.add_outlines(target, index, outlines, unite_outlines(outlines, *target.shape))
    elif isinstance(drawn, dict):
        mask = unpack_runs(drawn.get("counts"), drawn.get("size"), target.shape)
        if mask is None:
            writer.dangling("GRID_MISMATCH")
        else:
            region.add_mask(target, index, mask)
    else:
        box = _finite(annotation.get("bbox"))
        if box is None or len(box) != 4:
            writer.dangling("DEGENERATE")
        else:
            x, y, width, height = box
            region.add_box(target, index, (x, y, x + width, y + height))


def unpack_runs(counts: Any, size: Any, shape: tuple[int, int]) -> NDArray[np.uint8] | None:
    """Unpack a mask from its run lengths.

    Args:
        counts: Lengths of runs of 0, 1, 0, ... down the columns: a list, or packed into a text.
        size: Rows and columns that the file states.
        shape: Rows and columns of the slice.

    Returns:
        ``(rows, columns)`` of 0 and 1; None where it is no mask of this shape.
    """
    rows, columns = shape
    if not isinstance(size, list) or size != [rows, columns]:
        return None
    runs = _unpack_text(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        return None
    if sum(runs) != rows * columns:
        return None
    values = np.arange(len(runs), dtype=np.uint8) & 1
    return np.repeat(values, runs).reshape(columns, rows).T.copy()


def _unpack_text(text: str) -> list[int] | None:
    """Unpack run lengths: five bits per character and a continuation bit; deltas from the third on."""
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 40:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    return None if shift else runs


def _outline(numbers: Any) -> Floats | None:
    values = _finite(numbers)
    return None if values is None or len(values) < 6 or len(values) % 2 else values.reshape(-1, 2)


def _finite(numbers: Any) -> Floats | None:
    if not isinstance(numbers, list) or not all(isinstance(one, int | float) for one in numbers):
        return None
    try:
        values = np.array(numbers, np.float64)
    except OverflowError:
        return None
    return values if np.isfinite(values).all() else None


def _names_of(image: Mapping[str, Any]) -> list[str]:
    return [str(image[key]) for key in _NAMES if image.get(key) not in (None, "")]


def _load(path: Path, limits: AnnotationLimits) -> tuple[list[Any], list[Any], list[Any]]:
    with _parsing(path, limits, ValueError, RecursionError):
        data = json.loads(path.read_bytes())
    if not isinstance(data, dict):
        raise source_error(Reason.HEADER_UNREADABLE, "the JSON is not of this form")
    images, annotations, categories = (data.get(key, []) for key in ("images", "annotations", "categories"))
    for entries in (images, annotations, categories):
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise source_error(Reason.HEADER_UNREADABLE, "the JSON is not of this form")
        if len(entries) > limits.max_items:
            raise source_error(Reason.LIMIT_EXCEEDED, f"more than {limits.max_items} entries")
    return images, annotations, categories


_MAX_REFERENCES: Final = 64


def is_lidc(path: Path, head: bytes) -> bool:  # noqa: ARG001
    """Tell from its beginning whether a file is an XML of LIDC-IDRI."""
    return b"LidcReadMessage" in head or b"IdriReadMessage" in head


def describe_lidc(path: Path, limits: AnnotationLimits) -> AttachmentItem:
    """Identify the study of a file.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    root = _parse(path, limits)
    instances = dict.fromkeys(_text(one) for one in _all(root, "imageSOP_UID"))
    return AttachmentItem(
        study_uids=tuple(filter(None, (_text(next(_all(root, "StudyInstanceUID"), None)),))),
        series_uids=tuple(filter(None, (_text(next(_all(root, "SeriesInstanceUid"), None)),))),
        sop_uids=tuple(filter(None, instances))[:_MAX_REFERENCES],
    )


def read_lidc(path: Path, targets: Targets, writer: RegionWriter) -> None:
    """Read an XML into regions: a nodule of a reader each, or a place that a reader found to be none.

    Args:
        path: The file.
        targets: The stored series of its study.
        writer: Receives the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    root = _parse(path, writer.limits)
    for reader, session in enumerate(_all(root, "readingSession")):
        for name, tag in (("nodule", "unblindedReadNodule"), ("", "nonNodule")):
            for drawn in _all(session, tag):
                region = writer.open(
                    RegionFacts(
                        kind="contour" if name else "point",
                        source="lidc-xml",
                        label=name,
                        reader=reader,
                        flags=() if name else ("non_nodule",),
                        measurements=tuple(_ratings(drawn)),
                    )
                )
                _read_drawing(drawn, region, targets, writer)


def _ratings(drawn: XmlNode) -> Iterator[Mapping[str, Any]]:
    """Yield what a reader rated of a nodule as measurements without a unit; small nodules have none."""
    for name in LIDC_RATINGS:
        text = _text(drawn.find(f"characteristics/{name}"))
        if len(text) == 1 and text in "123456":
            yield {"code": {"scheme": "LIDC", "value": name}, "unit": "1", "value": int(text)}


def _read_drawing(drawn: XmlNode, region: OpenRegion, targets: Targets, writer: RegionWriter) -> None:
    kept: dict[tuple[int, int], list[Floats]] = defaultdict(list)
    holes: dict[tuple[int, int], list[Floats]] = defaultdict(list)
    series: dict[int, Target] = {}
    for roi in [*_all(drawn, "roi")] or [drawn]:
        points = np.array([*_points(roi)], np.float64).reshape(-1, 2) + 0.5
        places = targets.find(_text(roi.find("imageSOP_UID")))
        if not places:
            writer.dangling("IMAGE_NOT_PACKED")
            continue
        if not len(points):
            writer.dangling("DEGENERATE")
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
            # A hole in nothing: the reader excluded what no outline of the same nodule contains.
            writer.dangling("DEGENERATE", len(holes[place]))
            continue
        inside, cut = (
            unite_outlines(outlines, *target.shape, is_border_outside=True)
            for outlines in (kept[place], holes[place])
        )
        inside[cut != 0] = 0
        region.add_outlines(target, index, [*kept[place], *holes[place]], inside)


def _points(roi: XmlNode) -> Iterator[tuple[float, float]]:
    for tag in ("edgeMap", "locus"):
        for point in _all(roi, tag):
            try:
                x, y = float(_text(point.find("xCoord"))), float(_text(point.find("yCoord")))
            except ValueError:
                continue
            if np.isfinite((x, y)).all():
                yield x, y


def _text(node: XmlNode | None) -> str:
    return "" if node is None else node.text().strip()


def _all(node: XmlNode, name: str) -> Iterator[XmlNode]:
    return (one for one in node.walk() if one.name == name)


def _parse(path: Path, limits: AnnotationLimits) -> XmlNode:
    """Parse a file, refusing document types and with them entities.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    bounds = DocumentLimits(
        max_bytes=limits.max_file_bytes, max_depth=limits.max_depth, max_nodes=16 * limits.max_items
    )
    try:
        return parse_xml(read_bounded(path, bounds), bounds)
    except SourceError as error:
        if error.reason != Reason.REPORT_UNREADABLE.value:
            raise
        raise source_error(Reason.HEADER_UNREADABLE, "no XML, or one with a document type") from None
