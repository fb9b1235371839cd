"""Tables of boxes: a row a box, with the image it lies in.

Columns are found by the names that public tables use; an image is named by its SOP Instance UID, or by what
the layout calls it, with or without a folder and a suffix.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from shardflow.annotations.book import RegionBook, RegionFacts
from shardflow.annotations.limits import AnnotationLimits
from shardflow.annotations.targets import Target, Targets
from shardflow.sources.attachments import AttachmentItem
from shardflow.sources.reasons import Reason, source_error

__all__ = ["describe_boxes", "find_image", "image_names", "is_box_table", "read_boxes"]

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
_MAX_FIELD: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """Which column of a table is what."""

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
    """Say whose the rows of a table are: an item for each image, in the order of their first rows.

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


def read_boxes(path: Path, items: Sequence[int], targets: Targets, book: RegionBook) -> None:
    """Read the rows of some images into regions, one a row.

    Args:
        path: The file.
        items: Numbers of the images, as `describe_boxes` counts them.
        targets: The stored series of their study.
        book: Takes the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    wanted, numbers = set(items), dict[str, int]()
    for columns, row in _rows(path, book.limits):
        image = row[columns.image]
        if numbers.setdefault(image, len(numbers)) not in wanted:
            continue
        cells = [row[name] for name in columns.box]
        if not any(cells):
            # A row without a box says that nothing was found.
            continue
        box = _numbers(cells)
        frame = _numbers([row[columns.frame]]) if columns.frame else None
        if box is None:
            book.dangling("DEGENERATE")
            continue
        if columns.has_size:
            box = [box[0], box[1], box[0] + box[2], box[1] + box[3]]
        places = find_image(targets, image, () if frame is None else (int(frame[0]),))
        if not places:
            book.dangling("IMAGE_NOT_PACKED")
            continue
        label = row[columns.label] if columns.label else ""
        region = book.open(RegionFacts(kind="box", source="csv", label=label))
        for target, index in places:
            region.add_box(target, index, box)


def image_names(name: str) -> tuple[str, ...]:
    """What an image may be called that a table names: as it stands, without folders, without its suffixes."""
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


def _rows(path: Path, limits: AnnotationLimits) -> Iterator[tuple[_Columns, Mapping[str, str]]]:
    try:
        num_bytes = path.stat().st_size
        if num_bytes > limits.max_file_bytes:
            raise source_error(
                Reason.LIMIT_EXCEEDED, f"{num_bytes} bytes, at most {limits.max_file_bytes} allowed"
            )
        with path.open(encoding="utf-8-sig", newline="") as file:
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
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, type(error).__name__) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise source_error(Reason.HEADER_UNREADABLE, type(error).__name__) from None


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
