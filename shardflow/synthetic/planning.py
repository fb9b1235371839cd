"""From a number to a study: patient, body, lesions, series and files, without a single pixel."""

from __future__ import annotations

from shardflow.synthetic.anatomy import Anatomy
from shardflow.synthetic.ct import FOCUS_MM, LENGTH_MM, add_ct_series
from shardflow.synthetic.draft import StudyDraft, spacing_for
from shardflow.synthetic.draws import Draws
from shardflow.synthetic.head import build_head
from shardflow.synthetic.identifiers import make_uid
from shardflow.synthetic.lesions import Lesion, kinds_of, place_lesions
from shardflow.synthetic.mr import add_mr_series
from shardflow.synthetic.naming import place_files
from shardflow.synthetic.options import SynthOptions
from shardflow.synthetic.patients import Patient, Region
from shardflow.synthetic.radiograph import add_radiographs
from shardflow.synthetic.study import StudyPlan
from shardflow.synthetic.torso import build_torso

__all__ = ["plan_study"]

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
        patient: Who.
        visit_number: Which of the patient's studies it is.
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
    placement = place_files(
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
        files=placement.files,
        copies=placement.copies,
        stray_files=placement.stray_files,
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
    """Heights at which lesions may lie, so that the shortest stack of the region still shows them."""
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
