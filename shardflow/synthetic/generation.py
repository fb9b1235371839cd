"""Generation of a whole output: studies in any number of processes, always with identical bytes.

Layout below the output folder: ``dicom/`` (as a hospital would deliver it: images alone),
``reports.csv``, ``annotations.csv`` (boxes), ``truth.jsonl``, ``README.txt``.

The truth of a study is what a reader of its files and its report should find. Coordinates are in the study's
own frame of reference (mm, LPS), boxes in pixels (first column, first row, one past the last column, one past
the last row), spans in characters of the report's text.
"""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardflow.errors import ConfigError, ShardflowError, StorageError, os_reason
from shardflow.synthetic.anatomy import Lesion
from shardflow.synthetic.draws import GENERATED, patient_id
from shardflow.synthetic.geometry import move, round_vector
from shardflow.synthetic.instances import SeriesWriter, position_of, store
from shardflow.synthetic.options import Patient, SynthOptions, iter_visits
from shardflow.synthetic.planning import plan_study
from shardflow.synthetic.render import Appearance, Renderer, contrast_of, find_appearances
from shardflow.synthetic.reports.compose import Story, write_report
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


ANNOTATION_COLUMNS = (
    "study_instance_uid",
    "series_instance_uid",
    "sop_instance_uid",
    "series_number",
    "instance_number",
    "lesion_id",
    "label",
    "x",
    "y",
    "width",
    "height",
    "note",
)
"""Columns of annotations.csv; x and y are the first column and row of the box, from 0."""

_README = """\
{generated}

Everything in this folder was made by a program. It shows no patient, and must not be used for diagnosis.

dicom/           images only: no file here says anything of lesions
reports.csv      study_instance_uid, text
annotations.csv  a box for each lesion on each image, in pixels
truth.jsonl      first line: settings; then one line a study: series, geometry, lesions, and every
                 finding, mention and distractor of the report with its place in the text

Settings: {settings}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthSummary:
    """Counts of what was generated."""

    num_studies: int = 0
    num_patients: int = 0
    num_series: int = 0
    num_instances: int = 0
    num_lesions: int = 0
    num_mentions: int = 0
    num_bytes: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the numbers as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    number: int
    patient: Patient
    visit: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """Rows that one study adds to the tables and the truth."""

    report_row: tuple[str, str]
    annotation_rows: list[tuple[object, ...]]
    truth: str
    counts: dict[str, int]


def generate(
    options: SynthOptions,
    output: Path,
    *,
    num_processes: int = 1,
    progress: Callable[[int], None] | None = None,
) -> SynthSummary:
    """Generate studies, reports, annotations and truth.

    Args:
        options: What to generate.
        output: Folder to fill; created if it is missing.
        num_processes: Number of processes; the bytes do not depend on it.
        progress: Called with the number of studies that are done.

    Returns:
        The counts.

    Raises:
        ConfigError: The folder is not empty, or not a folder.
        StorageError: It cannot be written.
        ShardflowError: A process was killed.
    """
    try:
        return _generate(options, output, num_processes, progress)
    except BrokenProcessPool:
        raise ShardflowError(
            "a generating process was killed, probably for lack of memory; OUT is incomplete: empty it, and "
            "run again with fewer --processes or a smaller --size."
        ) from None
    except OSError as error:
        raise StorageError(
            f"OUT cannot be written ({error.strerror or os_reason(error)}) and is incomplete; make room, "
            "empty it and run again."
        ) from None


def _generate(
    options: SynthOptions, output: Path, num_processes: int, progress: Callable[[int], None] | None
) -> SynthSummary:
    _claim(output)
    settings = json.dumps(options.to_json(), sort_keys=True)
    (output / "README.txt").write_text(
        _README.format(generated=GENERATED, settings=settings), encoding="ascii"
    )
    tasks = (
        _Task(number=number, patient=patient, visit=visit)
        for number, (patient, visit) in enumerate(iter_visits(options))
    )
    made = _run(options, output, tasks, num_processes)
    totals: dict[str, int] = dict.fromkeys(SynthSummary.__slots__, 0)
    with (
        (output / "reports.csv").open("w", encoding="utf-8", newline="") as reports,
        (output / "annotations.csv").open("w", encoding="utf-8", newline="") as annotations,
        (output / "truth.jsonl").open("w", encoding="utf-8", newline="\n") as truth,
    ):
        report_rows, annotation_rows = _table(reports), _table(annotations)
        report_rows(("study_instance_uid", "text"))
        annotation_rows(ANNOTATION_COLUMNS)
        truth.write(_json_line(truth_header(options)))
        for count, study in enumerate(made, 1):
            report_rows(study.report_row)
            for row in study.annotation_rows:
                annotation_rows(row)
            truth.write(study.truth)
            for name, value in study.counts.items():
                totals[name] += value
            if progress is not None:
                progress(count)
    return SynthSummary(**totals)


def _claim(output: Path) -> None:
    """Create the folder, or check that it is empty."""
    if output.exists() and not output.is_dir():
        raise ConfigError("OUT is a file; choose another name for the folder.")
    output.mkdir(parents=True, exist_ok=True)
    found = next(output.iterdir(), None)
    if found is not None:
        raise ConfigError("OUT is not empty; choose a new or empty folder, or empty this one.")


def _run(options: SynthOptions, output: Path, tasks: Iterable[_Task], num_processes: int) -> Iterator[_Made]:
    """Make studies, a bounded number of them ahead, and yield them in order."""
    if num_processes == 1:
        for task in tasks:
            yield _make(options, output, task)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        waiting: deque[Future[_Made]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(_make, options, output, task))
                if len(waiting) >= 4 * num_processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _make(options: SynthOptions, output: Path, task: _Task) -> _Made:
    """Make one study: its files, and its rows of the tables."""
    story = _story(options, task.number, task.patient, task.visit)
    prior = _story(options, task.number - 1, task.patient, task.visit - 1) if task.visit else None
    report = write_report(options.seed, story, prior, options.report_oddities)
    num_bytes = _write_files(options, output, story.study)
    study = story.study
    truth = study_truth(options, story, report, prior.study if prior is not None else None)
    return _Made(
        report_row=(study.uid, report.text),
        annotation_rows=list(_annotations(story)),
        truth=_json_line(truth),
        counts=_counts(study, report, num_bytes),
    )


def _story(options: SynthOptions, number: int, patient: Patient, visit: int) -> Story:
    study = plan_study(options, number, patient, visit)
    return Story(study=study, appearances=find_appearances(study))


def _write_files(options: SynthOptions, output: Path, study: StudyPlan) -> int:
    renderer = Renderer(options.seed, study)
    copies: dict[str, list[str]] = {}
    for uid, path in study.copies:
        copies.setdefault(uid, []).append(path)
    folders: set[Path] = set()
    num_bytes = 0
    for series in study.series:
        writer = SeriesWriter(options, study, series)
        for item in series.slices:
            values = renderer.render(series, item)
            stored = store(values, series.encoding, full_scale=series.kind == "projection")
            data = writer.encode(item, stored)
            uid = item.sop_instance_uid
            for name in (study.files[uid], *copies.get(uid, ())):
                _write(output / name, data, folders)
                num_bytes += len(data)
    for name in study.stray_files:
        _write(output / name, f"{GENERATED}\nNot an image.\n".encode(), folders)
    return num_bytes


def _write(path: Path, data: bytes, folders: set[Path]) -> None:
    if path.parent not in folders:
        path.parent.mkdir(parents=True, exist_ok=True)
        folders.add(path.parent)
    path.write_bytes(data)


def _annotations(story: Story) -> Iterator[tuple[object, ...]]:
    study = story.study
    labels = {lesion.lesion_id: lesion.label for lesion in study.lesions}
    for item in story.appearances:
        left, top, right, bottom = item.box
        series = study.series[item.series_index]
        yield (
            *(study.uid, series.uid, item.item.sop_instance_uid, series.number, item.item.instance_number),
            *(item.lesion_id, labels[item.lesion_id], left, top, right - left, bottom - top, "SYNTHETIC"),
        )


def _counts(study: StudyPlan, report: Report, num_bytes: int) -> dict[str, int]:
    return {
        "num_studies": 1,
        "num_patients": int(study.visit.number == 0),
        "num_series": len(study.series),
        "num_instances": len(study.files),
        "num_lesions": len(study.lesions),
        "num_mentions": len(report.mentions),
        "num_bytes": num_bytes,
    }


def _table(file: io.TextIOBase | Any) -> Callable[[Iterable[object]], Any]:
    return csv.writer(file, lineterminator="\n").writerow


def _json_line(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True) + "\n"
