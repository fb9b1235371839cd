"""Every rule and modifier by example; a report's words, a study's numbers, and what comes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError, FormatError
from shardflow.reports import ReportReader
from shardflow.reports.alignment.aligning import align
from shardflow.reports.alignment.evidence import AlignmentRules
from tests.alignment_cases import aligned, entry_of, radiograph, roi, series, study

pytestmark = pytest.mark.fast

NODULE = "FINDINGS: There is a 9 mm nodule in the right upper lobe"


def rules_of(entry: dict[str, Any]) -> list[str]:
    return [one["rule"] for one in entry["evidence"]]


def reasons(result: dict[str, Any]) -> list[str]:
    return [one["reason"] for one in result["unaligned"]]


# Rule E1, series and image.


def test_series_and_image_are_found_by_their_numbers_not_by_places() -> None:
    shuffled = series(3, [7, 45, 2, 9, 1])
    entry = entry_of(aligned(f"{NODULE} (series 3, image 45).", series(2, 60), shuffled))
    assert (entry["series"], entry["slices"], entry["confidence"]) == (1, [0, 1, 2], 0.98)
    assert entry["weights"] == [0.75, 1.0, 0.75]
    assert entry["evidence"] == [{"rule": "E1", "confidence": 0.98, "mention": 0, "candidates": 1}]


def test_frames_of_a_multiframe_image_are_found_by_their_numbers() -> None:
    entry = entry_of(aligned(f"{NODULE} (se 3 im 45).", series(3, [46, 45, 44])))
    assert entry["weights"][1] == max(entry["weights"])


def test_two_series_of_one_number_share_the_weight() -> None:
    result = aligned(f"{NODULE} (3:45).", series(3), series(3, [44, 45]))
    assert [(one["series"], one["confidence"]) for one in result["entities"]] == [(0, 0.5635), (1, 0.5635)]


def test_two_kernels_of_one_scan_are_one_place() -> None:
    soft, lung = series(3, frame="f"), series(4, frame="f")
    elsewhere = series(5, list(range(60, 0, -1)), frame="f")
    across = series(6, plane="coronal", frame="f")
    other_scan = series(7, frame="g")

    def confidences(*parts: dict[str, Any]) -> list[float]:
        return [one["confidence"] for one in aligned(f"{NODULE} (image 45).", *parts)["entities"]]

    assert confidences(soft, lung) == [0.92, 0.92]
    assert confidences(soft, lung, elsewhere) == [0.6133, 0.6133, 0.3067]
    # What crosses, or lies nobody knows how, may show the same.
    assert confidences(soft, across) == confidences(soft, other_scan) == [0.529, 0.529]


@pytest.mark.parametrize(
    ("apart_mm", "size", "share"),
    [
        (2.5, "9 mm ", 1.0),
        (4.5, "8 mm ", 0.75),
        (5.5, "8 mm ", 0.625),
        (6.5, "8 mm ", 0.5),
        (6.5, "40 mm ", 0.9),
        (2.5, "", 1.0),
        (2.6, "", 0.5),
    ],
)
def test_parallel_slices_show_the_same_as_far_as_the_finding_reaches(
    apart_mm: float, size: str, share: float
) -> None:
    first, second = series(3, frame="f"), series(4, frame="f")
    second["affine_lps"] = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, apart_mm], [0, 0, 0, 1]]
    result = aligned(f"FINDINGS: There is a {size}nodule in the right upper lobe (image 45).", first, second)
    assert [one["confidence"] for one in result["entities"]] == pytest.approx([0.92 * share] * 2)


def test_stacks_of_one_series_are_not_ambiguous_where_their_numbers_differ() -> None:
    first, second = series(3, list(range(1, 31))), series(3, list(range(31, 61)))
    assert entry_of(aligned(f"{NODULE} (3:45).", first, second))["confidence"] == 0.98


def test_number_twice_in_a_series_shares_the_weight() -> None:
    assert entry_of(aligned(f"{NODULE} (3:2).", series(3, [1, 2, 2, 3])))["confidence"] == 0.49


def test_localizer_is_meant_only_where_nothing_else_has_the_numbers() -> None:
    scout = series(3, 4, kind="localizer")
    assert entry_of(aligned(f"{NODULE} (3:2).", series(3), scout))["series"] == 0
    assert entry_of(aligned(f"{NODULE} (3:2).", series(4), scout))["series"] == 1


@pytest.mark.parametrize("numbers", [[None] * 60, 20])
def test_number_that_no_image_has_is_named_and_aligns_nothing(numbers: Any) -> None:
    result = aligned(f"{NODULE} (series 3, image 45).", series(3, numbers, body_part=None))
    assert result["entities"] == []
    assert reasons(result) == ["MENTION_UNRESOLVED"]
    assert result["unresolved"] == [{"mention": 0, "reason": "MENTION_UNRESOLVED"}]


def test_series_as_a_whole_names_no_slice_unless_it_has_only_one() -> None:
    text = "FINDINGS: There is a nodule in the right upper lobe, see series 3."
    assert reasons(aligned(text, series(3, body_part=None))) == ["MENTION_OF_A_SERIES"]
    assert entry_of(aligned(text, series(3, [45])))["slices"] == [0]


def test_range_is_the_extent_of_the_finding() -> None:
    entry = entry_of(aligned(f"{NODULE} (series 3, images 44-46)."))
    assert entry["slices"] == [43, 44, 45]
    assert entry["weights"] == [0.75, 1.0, 0.75]


def test_list_of_places_is_no_extent() -> None:
    entry = entry_of(aligned("FINDINGS: There are nodules (series 3, images 12 and 48)."))
    assert entry["slices"] == [10, 11, 12, 46, 47, 48]


def test_size_and_spacing_give_the_reach() -> None:
    text = "FINDINGS: There is a 24 mm nodule in the right upper lobe (series 3, image 30)."
    assert entry_of(aligned(text))["slices"] == list(range(26, 33))
    assert entry_of(aligned(text, series(3, spacing_mm=10.0)))["slices"] == [27, 28, 29, 30, 31]
    # The stack ends before the nodule does.
    assert entry_of(aligned(text, series(3, 30)))["slices"] == [26, 27, 28, 29]


def test_most_slices_are_those_of_the_highest_weight() -> None:
    text = "FINDINGS: There is a 24 mm nodule in the right upper lobe (series 3, image 30)."
    entry = entry_of(aligned(text, max_slices=3))
    assert (entry["slices"], entry["weights"][1]) == ([28, 29, 30], 1.0)


# Rule E2, an image without its series.


def test_image_alone_is_shared_by_the_series_that_have_it() -> None:
    assert entry_of(aligned(f"{NODULE} (image 45)."))["confidence"] == 0.92
    result = aligned(f"{NODULE} (image 45).", series(3), series(4), series(5, 20))
    assert [(one["series"], one["confidence"]) for one in result["entities"]] == [(0, 0.529), (1, 0.529)]


@pytest.mark.parametrize(
    ("text", "second"),
    [
        ("{} on coronal image 45.", {"plane": "coronal"}),
        ("{} on image 45 of 50.", {"numbers": 50}),
        ("{} on image 45 of the unenhanced series.", {"has_contrast": False}),
        ("TECHNIQUE: Image numbers refer to series 4 unless stated.\n\n{} (image 45).", {}),
    ],
)
def test_words_leave_one_series(text: str, second: dict[str, Any]) -> None:
    first = series(3, has_contrast=True)
    entry = entry_of(aligned(text.format(NODULE), first, series(4, **second)))
    assert (entry["series"], entry["confidence"]) == (1, 0.92)
    assert rules_of(entry) == ["E2"]


def test_plane_that_the_series_does_not_have_lowers() -> None:
    entry = entry_of(aligned(f"{NODULE} (coronal series 3, image 45)."))
    assert entry["confidence"] == 0.784
    assert entry["evidence"][0]["modifiers"] == ["other_plane"]


# Which finding a mention belongs to


@pytest.mark.parametrize(
    ("text", "concept"),
    [
        ("There is a cyst (3:40) and a nodule (3:45).", "nodule"),
        ("There is a nodule (3:45), and a calculus is seen.", "nodule"),
        ("On series 3, image 45, a nodule is seen, but there is a cyst in the liver.", "nodule"),
        ("Image 40 of series 3 shows a cyst and image 45 of series 3 shows a nodule.", "nodule"),
        ("There is a 5 mm nodule without calcification (3:45).", "nodule"),
        ("There is a cyst (with a nodule, 3:45).", "nodule"),
        ("There is a nodule in the right lung. It is best seen on series 3, image 45.", "nodule"),
        ("There is a cyst; a nodule is present on series 3, image 45.", "nodule"),
    ],
)
def test_mention_belongs_to_the_nearest_finding_of_its_clause(text: str, concept: str) -> None:
    result = aligned(f"FINDINGS: {text}")
    said = ReportReader().read(f"FINDINGS: {text}").entities
    owners = {said[one["entity"]].concept for one in result["entities"] if 44 in one["slices"]}
    assert {owner.split()[-1] for owner in owners} == {concept}


def test_mention_that_goes_on_after_two_findings_belongs_to_none() -> None:
    result = aligned(
        "FINDINGS: There is a cyst and a nodule. It is best seen on series 3, image 45.",
        series(body_part=None),
    )
    assert result["entities"] == []
    assert result["unresolved"] == [{"mention": 0, "reason": "MENTION_WITHOUT_FINDING"}]


def test_sentence_of_something_else_does_not_go_on() -> None:
    text = "FINDINGS: There is a nodule. Motion is noted on series 3, image 45."
    assert aligned(text, series(body_part=None))["entities"] == []


def test_other_mention_of_the_same_finding_gets_its_images() -> None:
    text = f"{NODULE} (series 3, image 45).\n\nIMPRESSION: 0.9 cm pulmonary nodule in the right upper lobe."
    first, second = aligned(text)["entities"]
    assert first["slices"] == second["slices"]
    assert (second["confidence"], second["evidence"][0]["from_entity"]) == (0.931, first["entity"])


@pytest.mark.parametrize(
    "other", ["4 mm nodule in the right upper lobe", "9 mm nodule in the left lung", "9 mm cyst"]
)
def test_another_finding_does_not_get_them(other: str) -> None:
    text = f"{NODULE} (series 3, image 45).\n\nIMPRESSION: There is a {other}."
    assert len(aligned(text, series(body_part=None))["entities"]) == 1


def test_finding_that_may_be_either_of_two_gets_none() -> None:
    text = (
        "FINDINGS: 9 mm nodule in the right upper lobe (3:45). 4 mm nodule in the RUL (3:20).\n\n"
        "IMPRESSION: Nodule in the right upper lobe."
    )
    assert [one["entity"] for one in aligned(text, series(body_part=None))["entities"]] == [0, 1]


# Rules E3 to E5, marked regions.


def test_region_of_the_finding() -> None:
    entry = entry_of(aligned(f"{NODULE}.", rois=[roi(0, "Nodule", [10, 11])]))
    assert (entry["slices"], entry["confidence"], rules_of(entry)) == ([10, 11], 0.95, ["E3"])
    assert entry["evidence"][0]["rois"] == [0]


def test_wider_name_of_the_finding_matches() -> None:
    assert rules_of(entry_of(aligned(f"{NODULE}.", rois=[roi(0, "lung lesion", [10])]))) == ["E3"]


def test_region_of_another_finding_or_place_is_nothing() -> None:
    for label in ("renal cyst", "thyroid nodule"):
        result = aligned(f"{NODULE}.", series(body_part=None), rois=[roi(0, label, [10])])
        assert reasons(result) == ["NO_EVIDENCE"], label


def test_regions_that_fit_equally_share_the_weight() -> None:
    rois = [roi(0, "nodule", [10]), roi(1, "nodule", [30])]
    assert entry_of(aligned(f"{NODULE}.", rois=rois))["confidence"] == 0.475


def test_size_and_side_choose_among_regions() -> None:
    sizes = [roi(0, "nodule", [10], diameter_mm=30.0), roi(1, "nodule", [30], diameter_mm=8.0)]
    assert entry_of(aligned(f"{NODULE}.", rois=sizes))["slices"] == [30]
    sides = [roi(0, "nodule", [10], laterality="R"), roi(1, "nodule", [30], laterality="L")]
    entry = entry_of(aligned(f"{NODULE}.", rois=sides))
    assert (entry["slices"], entry["confidence"]) == ([10], 0.95)


def test_drawings_of_one_thing_are_one_region() -> None:
    tracked = [roi(0, "nodule", [10], tracking_key="a"), roi(1, "nodule", [11], tracking_key="a")]
    entry = entry_of(aligned(f"{NODULE}.", rois=tracked))
    assert (entry["slices"], entry["confidence"]) == ([10, 11], 0.95)
    drawn_twice = [roi(0, "nodule", [10]), roi(1, "nodule", [10, 11])]
    assert entry_of(aligned(f"{NODULE}.", rois=drawn_twice))["confidence"] == 0.95


def test_region_drawn_in_two_series_is_one() -> None:
    parts = (series(3, frame="f"), series(4, frame="f"))
    rois = [roi(0, "nodule", [10]), roi(1, "nodule", [11], series=1)]
    entries = aligned(f"{NODULE}.", *parts, rois=rois)["entities"]
    assert [(one["series"], one["slices"], one["confidence"]) for one in entries] == [
        (0, [10], 0.95),
        (1, [11], 0.95),
    ]
    apart = [roi(0, "nodule", [10]), roi(1, "nodule", [40], series=1)]
    confidences = [one["confidence"] for one in aligned(f"{NODULE}.", *parts, rois=apart)["entities"]]
    assert confidences == [0.475, 0.475]
    other_scan = (parts[0], series(4, frame="g"))
    confidences = [one["confidence"] for one in aligned(f"{NODULE}.", *other_scan, rois=rois)["entities"]]
    assert confidences == [0.475, 0.475]


def test_mark_of_no_nodule_is_no_region() -> None:
    marks = [roi(0, "nodule", [10], flags=["non_nodule"])]
    assert aligned(f"{NODULE}.", series(body_part=None), rois=marks)["entities"] == []


def test_region_that_fits_two_findings_shares_its_weight() -> None:
    text = "FINDINGS: 9 mm nodule in the right upper lobe. 5 mm nodule in the left lower lobe."
    confidences = [one["confidence"] for one in aligned(text, rois=[roi(0, "nodule", [10])])["entities"]]
    assert confidences == [0.475, 0.475]


def test_closest_size_is_the_region_that_is_meant() -> None:
    rois = [roi(0, "nodule", [10], diameter_mm=12.5), roi(1, "nodule", [30], diameter_mm=9.5)]
    entry = entry_of(aligned(f"{NODULE}.", rois=rois))
    assert (entry["slices"], entry["confidence"]) == ([30], 0.95)
    # The other nodule of the report has a region of its own, and is no rival.
    both = aligned(f"{NODULE}. 14 mm nodule in the left lung.", rois=rois)["entities"]
    assert [(one["slices"], one["confidence"]) for one in both] == [([30], 0.95), ([10], 0.95)]


def test_unnamed_outline_in_an_organ_is_no_organ() -> None:
    outline = roi(0, None, [10], anatomy="lung", laterality="R")
    assert rules_of(entry_of(aligned(f"{NODULE}.", rois=[outline]))) == ["E4"]


def test_conflicts_of_side_and_size_lower() -> None:
    entry = entry_of(aligned(f"{NODULE}.", rois=[roi(0, "nodule", [10], laterality="L")]))
    assert (entry["confidence"], entry["evidence"][0]["modifiers"]) == (0.285, ["other_side"])
    entry = entry_of(aligned(f"{NODULE}.", rois=[roi(0, "nodule", [10], diameter_mm=18.1)]))
    assert (entry["confidence"], entry["evidence"][0]["modifiers"]) == (0.665, ["other_size"])
    assert (
        entry_of(aligned(f"{NODULE}.", rois=[roi(0, "nodule", [10], diameter_mm=18.0)]))["confidence"] == 0.95
    )


def test_region_in_the_same_place() -> None:
    place = roi(0, None, [10], kind="box", anatomy="right upper lobe", laterality="R")
    entry = entry_of(aligned(f"{NODULE}.", rois=[place]))
    assert (entry["confidence"], rules_of(entry)) == (0.85, ["E4"])


def test_sole_region_and_sole_focal_finding() -> None:
    entry = entry_of(aligned(f"{NODULE}. No effusion.", rois=[roi(0, None, [10], kind="box")]))
    assert (entry["confidence"], rules_of(entry)) == (0.6, ["E4"])
    two = f"{NODULE}. There is a cyst in the liver."
    assert aligned(two, series(body_part=None), rois=[roi(0, None, [10], kind="box")])["entities"] == []


def test_outline_of_the_organ() -> None:
    text = "FINDINGS: There is a cyst in the liver."
    organs = [roi(0, "liver", list(range(20, 30))), roi(1, "spleen", [40])]
    entry = entry_of(aligned(text, rois=organs))
    assert (entry["slices"], entry["confidence"], entry["region"]) == (list(range(20, 30)), 0.75, True)
    assert rules_of(entry) == ["E5"]
    kidney = [roi(0, "left kidney", [20], laterality="L")]
    assert (
        aligned("FINDINGS: Cyst in the right kidney.", series(body_part=None), rois=kidney)["entities"] == []
    )


# Rule E6, projections.


def test_single_projection() -> None:
    entry = entry_of(aligned(f"{NODULE}.", radiograph(1, "PA")))
    assert (entry["confidence"], rules_of(entry)) == (0.97, ["E6"])


def test_view_is_named() -> None:
    views = (radiograph(1, "PA"), radiograph(2, "LL"))
    assert entry_of(aligned(f"{NODULE} on the lateral view.", *views))["series"] == 1
    entry = entry_of(aligned(f"{NODULE} on the frontal view.", *views))
    assert (entry["series"], entry["confidence"]) == (0, 0.98)


def test_every_view_of_a_part_shows_what_no_view_is_named_for() -> None:
    result = aligned(f"{NODULE}.", radiograph(1, "PA"), radiograph(2, "LL"))
    assert [one["confidence"] for one in result["entities"]] == [0.98, 0.98]


def test_parts_of_the_body_share_the_weight() -> None:
    parts = (radiograph(1), {**radiograph(2), "body_part": "HAND"})
    assert [one["confidence"] for one in aligned(f"{NODULE}.", *parts)["entities"]] == [0.49, 0.49]


def test_views_of_one_name_share_the_weight_by_parts_too() -> None:
    text = f"{NODULE} on the frontal view."
    both = (radiograph(1, "PA"), radiograph(2, "AP"), radiograph(3, "LL"))
    assert [one["confidence"] for one in aligned(text, *both)["entities"]] == [0.98, 0.98]
    parts = (radiograph(1, "PA"), {**radiograph(2, "AP"), "body_part": "HAND"})
    assert [one["confidence"] for one in aligned(text, *parts)["entities"]] == [0.49, 0.49]


def test_finding_left_open_that_nothing_points_at_is_lowered_more() -> None:
    image = radiograph(1, "PA")
    assert entry_of(aligned("FINDINGS: Possible pneumonia.", image, old=True))["confidence"] == 0.291
    # A reader that gives a probability says so there: the confidence is of the place alone.
    assert entry_of(aligned("FINDINGS: Possible pneumonia.", image))["confidence"] == 0.97
    assert (
        entry_of(
            aligned("FINDINGS: Possible pneumonia on the frontal view.", radiograph(2), image, old=True)
        )["confidence"]
        == 0.833
    )


def test_side_chooses_the_image() -> None:
    images = (radiograph(1, image_laterality="L"), radiograph(2, image_laterality="R"))
    entry = entry_of(aligned("FINDINGS: There is a 9 mm mass in the right breast.", *images))
    assert (entry["series"], entry["confidence"], entry["evidence"][0]["cue"]) == (1, 0.98, "side")


# Rule E7, levels.


def test_level_is_a_capped_guess() -> None:
    entry = entry_of(aligned("FINDINGS: There is atelectasis at the lung bases."))
    assert (entry["confidence"], entry["region"], rules_of(entry)) == (0.1, True, ["E7"])
    # The head's side of these slices comes last.
    assert max(entry["slices"]) < 20
    with pytest.raises(ConfigError, match="level_prior"):
        AlignmentRules(level_prior=0.61)


def test_level_does_not_help_other_evidence() -> None:
    entry = entry_of(aligned(f"{NODULE} (series 3, image 50)."))
    assert rules_of(entry) == ["E1"]


# Together


def test_evidence_that_agrees_is_combined_up_to_the_cap() -> None:
    result = aligned(f"{NODULE} (image 45).", series(3), series(4), rois=[roi(0, "nodule", [43, 44])])
    first, second = result["entities"]
    assert first["confidence"] == round(1 - (1 - 0.529) * (1 - 0.95), 4)
    # Limited to what was drawn.
    assert first["slices"] == [43, 44]
    assert second["confidence"] == 0.529
    both = entry_of(aligned(f"{NODULE} (series 3, image 45).", rois=[roi(0, "nodule", [44])]))
    assert (both["confidence"], both["slices"]) == (0.99, [44])


def test_evidence_that_disagrees_leaves_the_strongest_and_less() -> None:
    entry = entry_of(aligned(f"{NODULE} (series 3, image 45).", rois=[roi(0, "nodule", [10])]))
    assert (entry["confidence"], entry["modifiers"]) == (0.784, ["disjoint"])
    assert entry["slices"] == [43, 44, 45]


def test_uncertain_findings_are_lowered() -> None:
    entry = entry_of(aligned("FINDINGS: Possible nodule (series 3, image 45).", old=True))
    assert (entry["confidence"], entry["modifiers"]) == (0.833, ["uncertain"])
    assert entry_of(aligned("FINDINGS: Possible nodule (series 3, image 45)."))["confidence"] == 0.98


def test_two_bare_numbers_count_only_where_a_series_has_the_image() -> None:
    assert entry_of(aligned("FINDINGS: Nodule in the right upper lobe (3-45)."))["slices"]
    assert entry_of(aligned("FINDINGS: Nodule in the RUL, 3/45."))["confidence"] == 0.98
    nothing = aligned("FINDINGS: Nodule in the RUL, 8/450.")
    assert ([one["confidence"] for one in nothing["entities"]], nothing["unresolved"]) == ([0.1], [])
    assert aligned("FINDINGS: Nodule in the RUL (series 8, image 450).")["unresolved"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("FINDINGS: No nodule is seen (series 3, image 45).", "ABSENT"),
        ("INDICATION: History of cancer (series 3, image 45).", "HISTORICAL"),
        ("INDICATION: Rule out pneumonia.", "HYPOTHETICAL"),
    ],
)
def test_what_no_image_shows_is_not_aligned(text: str, reason: str) -> None:
    result = aligned(text)
    assert (result["entities"], reasons(result)) == ([], [reason])


@pytest.mark.parametrize(
    "text",
    [
        "COMPARISON: CT with a nodule (series 3, image 45).",
        "FINDINGS: The nodule, previously on series 3, image 45, is larger.",
        "FINDINGS: There is a nodule, compared to the prior CT (series 3, image 45).",
    ],
)
def test_images_of_another_study_never_align(text: str) -> None:
    assert aligned(text, series(body_part=None))["entities"] == []


def test_mention_among_what_was_compared_with_is_refused_whoever_read_the_report() -> None:
    text = "COMPARISON: Nodule on series 3, image 45."
    entity = {"span": [12, 18], "concept": "nodule", "assertion": "present", "anatomy": None}
    report = {
        "sections": [{"kind": "comparison", "span": [0, len(text)], "header": [0, 11]}],
        "entities": [{**entity, "laterality": "", "size_mm": []}],
        "mentions": [{"span": [32, 40], "series": 3, "first": 45, "last": 45}],
    }
    result = align(study(series(body_part=None)), report, None, AlignmentRules(), text=text)
    assert result["entities"] == []
    assert result["unresolved"] == [{"mention": 0, "reason": "MENTION_OF_ANOTHER_STUDY"}]


def test_boundary_is_not_above_the_threshold() -> None:
    entry = entry_of(aligned(f"{NODULE} (image 45).", image_only=0.7))
    result = aligned(f"{NODULE} (image 45).", image_only=0.7)
    assert entry["confidence"] == 0.7 == result["threshold"]
    assert [one for one in result["entities"] if one["confidence"] > result["threshold"]] == []


# Configuration and inputs


def test_rules_are_a_configuration_with_a_digest(tmp_path: Path) -> None:
    changed = AlignmentRules(threshold=0.8)
    (tmp_path / "rules.toml").write_text(dump_config(changed), encoding="utf-8")
    assert load_config(AlignmentRules, tmp_path / "rules.toml") == changed
    assert changed.digest() != AlignmentRules().digest() == AlignmentRules().digest()
    assert aligned(f"{NODULE}.")["rules"] == AlignmentRules().digest()


def test_study_without_a_report_has_nothing_to_align() -> None:
    empty: dict[str, list[Any]] = {"sections": [], "entities": [], "mentions": []}
    result = align(study(series()), empty, None, AlignmentRules(), text="")
    assert (result["entities"], result["unaligned"], result["unresolved"]) == ([], [], [])


@pytest.mark.parametrize(
    ("about", "broken"),
    [
        ("study", {"series": [{}]}),
        ("report", {"entities": []}),
        ("annotations", {"rois": [{"roi": 0}]}),
    ],
)
def test_other_objects_are_refused_by_name(about: str, broken: dict[str, Any]) -> None:
    objects: dict[str, Any] = {
        "study": study(series()),
        "report": {"sections": [], "entities": [], "mentions": []},
        "annotations": None,
    }
    objects[about] = broken
    with pytest.raises(FormatError, match=f"{about}.json must"):
        align(objects["study"], objects["report"], objects["annotations"], AlignmentRules(), text="")
