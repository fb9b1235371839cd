"""Ground truth of a study as JSON: what a reader of its files and its report should find.

Coordinates are in the study's own frame of reference (mm, LPS), boxes in pixels (first column, first row,
one past the last column, one past the last row), spans in characters of the report's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardflow.synthetic.draws import GENERATED, patient_id
from shardflow.synthetic.geometry import move, round_vector
from shardflow.synthetic.instances import position_of
from shardflow.synthetic.lesions import Lesion
from shardflow.synthetic.options import SynthOptions
from shardflow.synthetic.render import Appearance, contrast_of
from shardflow.synthetic.reports.compose import Story
from shardflow.synthetic.reports.mentions import Report
from shardflow.synthetic.reports.sentences import place_of
from shardflow.synthetic.study import SeriesPlan, SlicePlan, StudyPlan

TRUTH_VERSION = 1


def truth_header(options: SynthOptions) -> dict[str, Any]:
    """Return the first line of the truth file."""
    return {
        "kind": "header",
        "generated": True,
        "note": GENERATED,
        "truth_version": TRUTH_VERSION,
        "options": options.to_json(),
    }


def study_truth(
    options: SynthOptions, story: Story, report: Report, prior: StudyPlan | None
) -> dict[str, Any]:
    """Return the line of one study."""
    study = story.study
    patient, visit = study.patient, study.visit
    return {
        "kind": "study",
        "generated": True,
        "number": study.number,
        "study_instance_uid": study.uid,
        "patient_id": patient_id(options.seed, patient.number),
        "patient": {"sex": patient.sex, "age_years": patient.age_years(visit)},
        "modality": visit.modality,
        "region": study.region,
        "study_date": visit.day.isoformat(),
        "prior_study_instance_uid": prior.uid if prior is not None else None,
        "series": [_series(study, series) for series in study.series],
        "copies": [{"sop_instance_uid": uid, "file": path} for uid, path in study.copies],
        "stray_files": list(study.stray_files),
        "lesions": [_lesion(study, lesion, story, report) for lesion in study.lesions],
        "resolved_lesion_ids": [lesion.lesion_id for lesion in study.resolved],
        "report": {
            "num_characters": len(report.text),
            "sections": report.sections,
            "entities": report.entities,
            "mentions": report.mentions,
            "distractors": report.distractors,
        },
    }


def _series(study: StudyPlan, series: SeriesPlan) -> dict[str, Any]:
    first, encoding = series.slices[0].plane, series.encoding
    grid = first.grid
    return {
        "series_instance_uid": series.uid,
        "series_number": series.number,
        "modality": series.modality,
        "kind": series.kind,
        "name": series.name,
        "rows": grid.rows,
        "columns": grid.columns,
        "pixel_spacing_mm": [grid.row_spacing_mm, grid.column_spacing_mm],
        "slice_spacing_mm": series.spacing_mm,
        "slice_thickness_mm": series.thickness_mm,
        "transfer_syntax": series.syntax,
        "encoding": {
            "bits_stored": encoding.bits_stored,
            "is_signed": encoding.is_signed,
            "slope": encoding.slope,
            "intercept": encoding.intercept if encoding.slope is not None else None,
            "photometric": encoding.photometric,
            "padding": encoding.padding,
            "has_padding_attribute": encoding.padding is not None and encoding.has_padding_attribute,
        },
        "pathologies": list(series.pathologies),
        "lost_grid_indexes": list(series.lost_grid_indexes),
        "stacks": [_stack(study, series, stack) for stack in sorted({item.stack for item in series.slices})],
    }


def _stack(study: StudyPlan, series: SeriesPlan, stack: int) -> dict[str, Any]:
    slices = [item for item in series.slices if item.stack == stack]
    plane = slices[0].plane
    is_placed = series.kind != "projection"
    return {
        "stack": stack,
        "contrast": slices[0].contrast,
        "view": slices[0].view or None,
        "orientation": [*plane.row_direction, *plane.column_direction] if is_placed else None,
        "affine_lps": _affine(study, series, slices) if is_placed else None,
        "slices": [
            {
                "sop_instance_uid": item.sop_instance_uid,
                "instance_number": item.instance_number,
                "grid_index": item.grid_index,
                "position_mm": list(position_of(study, item)) if is_placed else None,
                "file": study.files[item.sop_instance_uid],
                "is_truncated": item.is_truncated,
            }
            for item in slices
        ],
    }


def _affine(study: StudyPlan, series: SeriesPlan, slices: Sequence[SlicePlan]) -> list[list[float]]:
    """Map (column, row, grid index, 1) to mm, 4 x 4; the step keeps the shear of a tilted gantry."""
    # The first slice is never lost, so it lies at grid index 0.
    first, last = slices[0], slices[-1]
    plane, grid = first.plane, first.plane.grid
    start, end = position_of(study, first), position_of(study, last)
    gaps = last.grid_index - first.grid_index
    if gaps:
        away = move(end, start, -1.0)
        step = round_vector((away[0] / gaps, away[1] / gaps, away[2] / gaps))
    else:
        step = round_vector(move((0.0, 0.0, 0.0), plane.normal, series.thickness_mm or 1.0))
    across = round_vector(move((0.0, 0.0, 0.0), plane.row_direction, grid.column_spacing_mm), 9)
    down = round_vector(move((0.0, 0.0, 0.0), plane.column_direction, grid.row_spacing_mm), 9)
    return [[across[axis], down[axis], step[axis], start[axis]] for axis in range(3)] + [[0.0, 0.0, 0.0, 1.0]]


def _lesion(study: StudyPlan, lesion: Lesion, story: Story, report: Report) -> dict[str, Any]:
    center = move(lesion.bounds.center, study.origin)
    told = {row["lesion_id"] for row in report.entities if row["assertion"] in {"present", "uncertain"}}
    return {
        "lesion_id": lesion.lesion_id,
        "label": lesion.label,
        "organ": lesion.organ,
        "laterality": lesion.side or None,
        "anatomy": place_of(lesion),
        "center_mm": [round(value, 6) for value in center],
        "semi_axes_mm": list(lesion.semi_axes_mm),
        "diameter_mm": round(lesion.diameter_mm, 2),
        "matrix_per_mm2": [float(f"{value:.9g}") for value in lesion.bounds.matrix],
        "course": lesion.course,
        "is_reported": lesion.lesion_id in told,
        "appearances": _appearances(study, lesion, story),
    }


def _appearances(study: StudyPlan, lesion: Lesion, story: Story) -> list[dict[str, Any]]:
    groups: dict[tuple[int, int], list[Appearance]] = {}
    for item in story.appearances:
        if item.lesion_id == lesion.lesion_id:
            groups.setdefault((item.series_index, item.item.stack), []).append(item)
    return [
        {
            "series_instance_uid": study.series[series].uid,
            "stack": stack,
            "contrast": round(contrast_of(lesion, items[0].item.contrast), 3),
            "instances": [
                {
                    "sop_instance_uid": item.item.sop_instance_uid,
                    "instance_number": item.item.instance_number,
                    "box": list(item.box),
                    "num_pixels": item.num_pixels,
                }
                for item in items
            ],
        }
        for (series, stack), items in groups.items()
    ]
