"""Planning of one study without pixels: patient, body, lesions, series and file names.

Files are named in four ways found in archives, none of them in the order of the slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardflow.synthetic.acquisitions import (
    FOCUS_MM,
    LENGTH_MM,
    add_ct_series,
    add_mr_series,
    add_radiographs,
)
from shardflow.synthetic.anatomy import Anatomy, build_head, build_torso
from shardflow.synthetic.draws import Draws, make_uid
from shardflow.synthetic.lesions import Lesion, kinds_of, place_lesions
from shardflow.synthetic.options import Patient, Region, SynthOptions
from shardflow.synthetic.study import SeriesPlan, StudyDraft, StudyPlan, spacing_for

IMAGE_FOLDER = "dicom"
"""Folder below the output that holds the images and nothing about them."""

_STYLES = ("numbered", "uid", "hex", "modality")
_STRAY_NAMES = ("SYNTHETIC-readme.txt", "SYNTHETIC-Thumbs.db", "SYNTHETIC-series.json")


def place_files(
    options: SynthOptions, draws: Draws, *, patient: int, study: int, series: Sequence[SeriesPlan]
) -> tuple[dict[str, str], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Name the files of one study; return its files, copies and stray files, as in `StudyPlan`."""
    style = draws.choice(_STYLES)
    folder = f"{IMAGE_FOLDER}/SYN{patient:07d}/ST{study:07d}"
    files: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for plan in series:
        own = draws.at("series", plan.index)
        below = folder if style in {"uid", "hex"} else f"{folder}/SE{plan.index + 1:04d}"
        # Files are numbered in the order in which an archive happened to receive them.
        for count, item in enumerate(own.shuffled(plan.slices)):
            files[item.sop_instance_uid] = _name(style, below, plan, count, item.sop_instance_uid, own)
        if own.at("duplicates").chance(options.chance_of("duplicates")):
            for item in own.at("copied").some([item for item in plan.slices if not item.is_truncated], 2):
                path = files[item.sop_instance_uid]
                stem, dot, suffix = path.rpartition(".")
                copy = f"{stem}_1.{suffix}" if dot and "/" not in suffix else f"{path}_1"
                copies.append((item.sop_instance_uid, copy))
    stray: tuple[str, ...] = ()
    if draws.at("stray-files").chance(options.chance_of("stray-files")):
        stray = tuple(f"{folder}/{name}" for name in draws.some(_STRAY_NAMES, draws.integer(1, 3)))
    return files, tuple(copies), stray


def _name(style: str, folder: str, plan: SeriesPlan, count: int, uid: str, draws: Draws) -> str:
    if style == "numbered":
        return f"{folder}/IM{count + 1:06d}"
    if style == "uid":
        return f"{folder}/{uid}.dcm"
    if style == "hex":
        return f"{folder}/{plan.index:01X}{count:03X}{draws.key() % 16**6:06X}"
    return f"{folder}/{plan.modality}.{draws.key() % 10**8:08d}.{count + 1}.dcm"


_ORGANS: dict[Region, tuple[str, ...]] = {
    "chest": ("lung", "lung", "vertebra"),
    "abdomen": ("liver", "kidney", "spleen", "vertebra"),
    "head": ("brain",),
    "spine": ("vertebra",),
}


def plan_study(options: SynthOptions, number: int, patient: Patient, visit_number: int) -> StudyPlan:
    """Plan one study.

    Args:
        options: What is generated.
        number: The study's number, from 0.
        patient: The patient.
        visit_number: Number of the patient's study, from 0.
    """
    draws = Draws(options.seed, "study", number)
    visit = patient.visits[visit_number]
    anatomy = _build_body(options, patient)
    draft = StudyDraft(options, draws, patient, visit, anatomy, number)
    if visit.modality == "CT":
        add_ct_series(draft)
    elif visit.modality == "MR":
        add_mr_series(draft)
    else:
        add_radiographs(draft)
    lesions = _grow(options, patient, anatomy, visit_number)
    before = _grow(options, patient, anatomy, visit_number - 1) if visit_number else ()
    present = {lesion.lesion_id for lesion in lesions}
    files, copies, stray_files = place_files(
        options, draws.at("files"), patient=patient.number, study=number, series=draft.series
    )
    offset = draws.at("origin")
    return StudyPlan(
        number=number,
        patient=patient,
        visit=visit,
        uid=make_uid(options.seed, "study", number),
        region=patient.region,
        anatomy=anatomy,
        origin=(offset.integer(-40, 40) / 2, offset.integer(-400, 100) / 2, offset.integer(-1600, 1600) / 2),
        lesions=lesions,
        resolved=tuple(lesion for lesion in before if lesion.lesion_id not in present),
        series=tuple(draft.series),
        files=files,
        copies=copies,
        stray_files=stray_files,
    )


def _build_body(options: SynthOptions, patient: Patient) -> Anatomy:
    draws = Draws(options.seed, "anatomy", patient.number)
    if patient.region == "head":
        return build_head(draws, scale=patient.scale)
    return build_torso(draws, scale=patient.scale, is_female=patient.sex == "F")


def _grow(options: SynthOptions, patient: Patient, anatomy: Anatomy, visit: int) -> tuple[Lesion, ...]:
    draws = Draws(options.seed, "lesions", patient.number)
    only_radiographs = options.modality in {"CR", "DX"}
    return place_lesions(
        draws,
        anatomy,
        kinds_of(_ORGANS[patient.region], radiograph=only_radiographs),
        count=draws.integer(options.min_lesions, options.max_lesions),
        window_mm=_window(options, patient.region),
        visit=visit,
    )


def _window(options: SynthOptions, region: Region) -> tuple[float, float]:
    """Return the heights of lesions that the shortest stack of the region still shows."""
    if options.modality in {"CR", "DX"}:
        return 30.0, 200.0
    middle = FOCUS_MM[region][2]
    if region == "spine":
        return middle - 100, middle + 100
    reach = min(
        count * spacing_for(count, LENGTH_MM[region])
        for count in range(options.min_slices, options.max_slices + 1)
    )
    return middle - 0.42 * reach, middle + 0.42 * reach
