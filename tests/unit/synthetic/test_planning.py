"""Plans: who comes, what is scanned, where lesions lie; without pixels."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest

from shardflow.errors import ConfigError
from shardflow.synthetic.draws import make_uid
from shardflow.synthetic.geometry import dot
from shardflow.synthetic.options import DEFAULT_PATHOLOGIES, PATHOLOGIES, SynthOptions, iter_visits
from shardflow.synthetic.planning import plan_study
from shardflow.synthetic.render import find_appearances
from shardflow.synthetic.study import StudyPlan

pytestmark = pytest.mark.fast

OPTIONS = SynthOptions(num_studies=60, seed=5, size=64, min_slices=8, max_slices=20, min_lesions=1)


@lru_cache(maxsize=1)
def studies() -> tuple[StudyPlan, ...]:
    return tuple(
        plan_study(OPTIONS, number, patient, visit)
        for number, (patient, visit) in enumerate(iter_visits(OPTIONS))
    )


def test_a_larger_set_holds_the_smaller_one() -> None:
    few, many = (list(iter_visits(replace(OPTIONS, num_studies=count))) for count in (7, 40))
    assert len(few) == 7
    assert many[:7] == few


def test_every_kind_of_study_is_made() -> None:
    kinds = Counter((study.visit.modality, study.region) for study in studies())
    assert {modality for modality, _ in kinds} == {"CT", "MR", "CR", "DX"}
    assert {region for _, region in kinds} == {"chest", "abdomen", "head", "spine"}
    assert any(study.visit.number for study in studies())
    made = {series.kind for study in studies() for series in study.series}
    assert made == {"volume", "reformat", "localizer", "projection"}
    assert {series.syntax for study in studies() for series in study.series} == {
        *("explicit-little", "implicit-little", "explicit-big", "deflated", "rle")
    }


def test_every_pathology_happens_where_it_is_asked_for_and_nowhere_else() -> None:
    asked = SynthOptions(
        num_studies=25,
        seed=5,
        size=64,
        min_slices=8,
        max_slices=20,
        pathologies=dict.fromkeys(PATHOLOGIES, 100),
    )
    seen: set[str] = set()
    for number, (patient, visit) in enumerate(iter_visits(asked)):
        study = plan_study(asked, number, patient, visit)
        seen.update(name for series in study.series for name in series.pathologies)
        seen.update(("duplicates",) if study.copies else (), ("stray-files",) if study.stray_files else ())
    assert seen == set(PATHOLOGIES)
    calm = replace(asked, pathologies={})
    for number, (patient, visit) in enumerate(iter_visits(calm)):
        study = plan_study(calm, number, patient, visit)
        assert not any(series.pathologies for series in study.series)
        assert not study.copies
        assert not study.stray_files
    assert DEFAULT_PATHOLOGIES["truncated"] == 0


def test_identifiers_are_unique_and_valid() -> None:
    uids = [
        uid
        for study in studies()
        for uid in (
            study.uid,
            *(series.uid for series in study.series),
            *(item.sop_instance_uid for series in study.series for item in series.slices),
        )
    ]
    assert len(uids) == len(set(uids))
    assert all(len(uid) <= 64 and uid.startswith("2.25.") and uid[5] != "0" for uid in uids)
    paths = [path for study in studies() for path in study.files.values()]
    paths += [path for study in studies() for _, path in study.copies]
    assert len({path.lower() for path in paths}) == len(paths)
    assert make_uid(1, "study", 2) != make_uid(2, "study", 2)


def test_instance_numbers_are_unique_in_a_series_and_seldom_follow_the_places() -> None:
    follow = 0
    volumes = [series for study in studies() for series in study.series if series.kind == "volume"]
    for series in volumes:
        numbers = [item.instance_number for item in series.slices]
        assert len(set(numbers)) == len(numbers)
        follow += numbers == sorted(numbers)
        places = [dot(item.plane.position, item.plane.normal) for item in series.slices if item.stack == 0]
        assert all(a < b for a, b in pairwise(places))
    assert 0 < follow < 0.6 * len(volumes)


def test_file_names_do_not_follow_the_slices() -> None:
    in_order = 0
    volumes = [(study, series) for study in studies() for series in study.series if len(series.slices) > 5]
    for study, series in volumes:
        names = [study.files[item.sop_instance_uid] for item in series.slices]
        in_order += names == sorted(names) or names == sorted(names, reverse=True)
    assert in_order < 0.05 * len(volumes)


def test_lesions_lie_in_their_organ_and_apart() -> None:
    for study in studies():
        for number, lesion in enumerate(study.lesions):
            hosts = [
                host
                for host in study.anatomy.hosts
                if (host.organ, host.side, host.name) == (lesion.organ, lesion.side, lesion.level)
            ]
            assert len(hosts) == 1
            assert hosts[0].bounds.value(lesion.bounds.center) < 1
            for other in study.lesions[:number]:
                gap = math.dist(lesion.bounds.center, other.bounds.center)
                assert gap > max(lesion.semi_axes_mm) + max(other.semi_axes_mm)


def test_a_patients_lesions_are_found_again_and_follow_their_course() -> None:
    courses: set[str] = set()
    for before, after in pairwise(studies()):
        if before.patient.number != after.patient.number:
            continue
        old = {lesion.lesion_id: lesion for lesion in before.lesions}
        new = {lesion.lesion_id: lesion for lesion in after.lesions}
        assert {lesion.lesion_id for lesion in after.resolved} == old.keys() - new.keys()
        for lesion_id, lesion in new.items():
            if lesion_id not in old:
                assert lesion.course == "new"
                assert lesion.prior_mm is None
                continue
            courses.add(lesion.course)
            was = old[lesion_id]
            assert lesion.bounds.center == was.bounds.center
            assert lesion.prior_mm == pytest.approx(was.diameter_mm, abs=0.05)
            assert (lesion.diameter_mm > was.diameter_mm + 0.1) == (lesion.course == "growing")
            assert (lesion.diameter_mm < was.diameter_mm - 0.1) == (lesion.course == "shrinking")
    assert {"stable", "growing"} <= courses


def test_most_lesions_are_seen_and_every_appearance_lies_inside_its_image() -> None:
    num_lesions = num_seen = 0
    for study in studies():
        appearances = find_appearances(study)
        for item in appearances:
            left, top, right, bottom = item.box
            grid = item.item.plane.grid
            assert 0 <= left < right <= grid.columns
            assert 0 <= top < bottom <= grid.rows
            assert 0 < item.num_pixels <= (right - left) * (bottom - top)
            assert study.series[item.series_index].kind != "localizer"
        if study.visit.modality in {"CT", "MR"} and study.region != "spine":
            num_lesions += len(study.lesions)
            num_seen += len({item.lesion_id for item in appearances})
    assert num_seen > 0.8 * num_lesions > 10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_studies": 0}, "num_studies must be from 1"),
        ({"size": 8}, "size must be from 16"),
        ({"min_slices": 9, "max_slices": 4}, "max_slices must be from 9"),
        ({"max_lesions": 99}, "max_lesions must be from 0 to 20"),
        ({"modality": "PT"}, "modality must be one of CT, MR"),
        ({"pathologies": {"ghosts": 5}}, "a pathology must be one of"),
        ({"pathologies": {"tilt": 101}}, "tilt must be from 0 to 100"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SynthOptions(**{"num_studies": 3, "seed": 1, **changes})  # type: ignore[arg-type]
