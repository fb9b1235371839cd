"""JSON of COCO: boxes, polygons and run lengths, with the image each lies in.

Source: cocodataset.org, "Data format"; run lengths go down the columns, as its reference code has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.annotations.book import OpenRegion, RegionBook, RegionFacts
from shardflow.annotations.csv_boxes import find_image, image_names
from shardflow.annotations.limits import AnnotationLimits
from shardflow.annotations.outlines import unite_outlines
from shardflow.annotations.targets import Floats, Target, Targets
from shardflow.sources.attachments import AttachmentItem
from shardflow.sources.reasons import Reason, source_error

__all__ = ["describe_coco", "is_coco", "read_coco", "unpack_runs"]

_NAMES = ("sop_instance_uid", "SOPInstanceUID", "file_name", "id")
_STUDIES = ("study_instance_uid", "StudyInstanceUID", "study_id")


def is_coco(path: Path, head: bytes) -> bool:
    """Tell whether a file is such a JSON: by its beginning, or by its end where the images come late."""
    if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(head)))
        seen = head + file.read(len(head))
    return sum(key in seen for key in (b'"images"', b'"annotations"', b'"categories"')) >= 2


def describe_coco(path: Path, limits: AnnotationLimits) -> list[AttachmentItem]:
    """Say whose the images of a file are: an item each.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    images, _, _ = _load(path, limits)
    items = []
    for item, image in enumerate(images):
        study = next((str(image[key]) for key in _STUDIES if image.get(key)), "")
        names = tuple(dict.fromkeys(name for one in _names_of(image) for name in image_names(one)))
        items.append(AttachmentItem(item=item, study_uids=(study,) if study else (), sop_uids=names))
    return items


def read_coco(path: Path, items: Sequence[int], targets: Targets, book: RegionBook) -> None:
    """Read the annotations of some images into regions, one each.

    Args:
        path: The file.
        items: Places of the images in the file's list.
        targets: The stored series of their study.
        book: Takes the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    images, annotations, categories = _load(path, book.limits)
    names = {str(one.get("id")): str(one.get("name", "")) for one in categories}
    chosen = {str(images[item].get("id")): images[item] for item in items if item < len(images)}
    for annotation in annotations:
        image = chosen.get(str(annotation.get("image_id")))
        if image is None:
            continue
        places = next(filter(None, (find_image(targets, name) for name in _names_of(image))), [])
        if not places:
            book.dangling("IMAGE_NOT_PACKED")
            continue
        drawn = annotation.get("segmentation")
        kind = "contour" if isinstance(drawn, list) and drawn else "segmentation" if drawn else "box"
        region = book.open(
            RegionFacts(
                kind=kind,  # type: ignore[arg-type] # three of the kinds
                source="coco",
                label=names.get(str(annotation.get("category_id")), ""),
                flags=("crowd",) if annotation.get("iscrowd") else (),
            )
        )
        for target, index in places:
            _draw(annotation, region, target, index, book)


def _draw(
    annotation: Mapping[str, Any], region: OpenRegion, target: Target, index: int, book: RegionBook
) -> None:
    drawn = annotation.get("segmentation")
    if isinstance(drawn, list) and drawn:
        outlines = [outline for outline in map(_outline, drawn) if outline is not None]
        book.dangling("DEGENERATE", len(drawn) - len(outlines))
        if outlines:
            # Parts of one region: where two overlap, both are of it.
            region.add_outlines(target, index, outlines, unite_outlines(outlines, *target.shape))
    elif isinstance(drawn, dict):
        mask = unpack_runs(drawn.get("counts"), drawn.get("size"), target.shape)
        if mask is None:
            book.dangling("GRID_MISMATCH")
        else:
            region.add_mask(target, index, mask)
    else:
        box = _finite(annotation.get("bbox"))
        if box is None or len(box) != 4:
            book.dangling("DEGENERATE")
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
    """Numbers of five bits a character, from 48, and a bit for more; later ones less the one two before."""
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
    try:
        num_bytes = path.stat().st_size
        if num_bytes > limits.max_file_bytes:
            raise source_error(
                Reason.LIMIT_EXCEEDED, f"{num_bytes} bytes, at most {limits.max_file_bytes} allowed"
            )
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, type(error).__name__) from None
    except (ValueError, RecursionError) as error:
        raise source_error(Reason.HEADER_UNREADABLE, type(error).__name__) from None
    lists = [
        data.get(key, []) if isinstance(data, dict) else None
        for key in ("images", "annotations", "categories")
    ]
    if not all(isinstance(one, list) and all(isinstance(item, dict) for item in one) for one in lists):
        raise source_error(Reason.HEADER_UNREADABLE, "the JSON is not of this form")
    if any(len(one) > limits.max_items for one in lists if one):
        raise source_error(Reason.LIMIT_EXCEEDED, f"more than {limits.max_items} entries")
    images, annotations, categories = lists
    return images or [], annotations or [], categories or []
