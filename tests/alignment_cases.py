"""Small studies, reports and marked regions as the JSON objects that alignment reads."""

from __future__ import annotations

from typing import Any

from shardflow.reports import ReportReader
from shardflow.reports.alignment.aligning import align
from shardflow.reports.alignment.evidence import AlignmentRules

__all__ = ["aligned", "entry_of", "radiograph", "roi", "series", "study"]

_READER = ReportReader()
_AXIAL = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
_CORONAL = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]


def series(
    number: int | None = 3,
    numbers: list[int | None] | int = 60,
    *,
    kind: str = "volume",
    modality: str = "CT",
    plane: str = "axial",
    spacing_mm: float | None = 5.0,
    body_part: str | None = "CHEST",
    frame: str | None = None,
    **technical: Any,
) -> dict[str, Any]:
    """Describe a series; ``numbers`` counts from 1 where it is one number."""
    listed = list(range(1, numbers + 1)) if isinstance(numbers, int) else numbers
    return {
        "affine_lps": {"axial": _AXIAL, "coronal": _CORONAL, "": None}[plane],
        "body_part": body_part,
        "columns": 64,
        "frame_of_reference_key": frame,
        "instance_numbers": listed,
        "kind": kind,
        "modality": modality,
        "num_slices": len(listed),
        "rows": 64,
        "series_number": number,
        "slice_spacing_mm": spacing_mm,
        "technical": technical,
    }


def study(*parts: dict[str, Any]) -> dict[str, Any]:
    """Describe a study."""
    return {"format_version": 1, "series": list(parts)}


def radiograph(number: int, view: str = "", **technical: Any) -> dict[str, Any]:
    """Describe a radiograph."""
    facts = {"view_position": view, **technical} if view else technical
    return series(number, [1], kind="images", modality="DX", plane="", spacing_mm=None, **facts)


def roi(number: int, label: str | None, slices: list[int], **facts: Any) -> dict[str, Any]:
    """Describe a marked region."""
    return {
        "roi": number,
        "kind": "segmentation",
        "source": "dicom-seg",
        "label": label,
        "code": None,
        "anatomy": None,
        "laterality": None,
        "tracking_key": None,
        "series": 0,
        "slices": [{"slice": one, "box_px": [0, 0, 9, 9], "area_mm2": 50.0} for one in slices],
        "diameter_mm": None,
        "mask": None,
        "flags": [],
        **facts,
    }


def aligned(
    text: str,
    *parts: dict[str, Any],
    rois: list[dict[str, Any]] | None = None,
    old: bool = False,
    **weights: Any,
) -> dict[str, Any]:
    """Align a text; without series it is about one axial stack, series 3 with images 1 to 60.

    An ``old`` report was read by a reader that gave no probabilities.
    """
    report = _READER.read(text).to_json()
    if old:
        for entity in report["entities"]:
            del entity["probability"]
    annotations = None if rois is None else {"format_version": 1, "rois": rois, "dangling": []}
    return align(study(*(parts or (series(),))), report, annotations, AlignmentRules(**weights), text=text)


def entry_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return the only entry."""
    (entry,) = result["entities"]
    return dict(entry)
