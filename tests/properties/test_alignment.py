"""Alignment under any order, any numbers and any text: caps, orders and other studies' images."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardflow.reports import ReportReader
from shardflow.reports.alignment.aligning import align
from shardflow.reports.alignment.evidence import AlignmentRules
from tests.alignment_cases import roi, series, study

pytestmark = pytest.mark.fast

READER = ReportReader()
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PLACES = ("right upper lobe", "left lower lobe", "liver", "spleen")
FINDINGS = ("nodule", "cyst", "mass", "calculus", "pleural effusion")
SENTENCES = st.builds(
    "{} {} in the {} {}.".format,
    st.sampled_from(("There is a", "Possible", "No", "There is a 9 mm", "12 mm")),
    st.sampled_from(FINDINGS),
    st.sampled_from(PLACES),
    st.one_of(
        st.just(""),
        st.builds("(series {}, image {})".format, st.integers(1, 4), st.integers(1, 30)),
        st.builds("(image {})".format, st.integers(1, 30)),
        st.builds("(se {0} im {1}-{2})".format, st.integers(1, 4), st.integers(1, 9), st.integers(9, 30)),
    ),
)
TEXTS = st.builds(lambda rows: "FINDINGS: " + " ".join(rows), st.lists(SENTENCES, min_size=1, max_size=5))
STUDIES = st.builds(
    lambda parts: study(*parts),
    st.lists(
        st.builds(
            lambda number, count, plane: series(number, count, plane=plane),
            st.integers(1, 4),
            st.integers(1, 30),
            st.sampled_from(("axial", "coronal")),
        ),
        min_size=1,
        max_size=4,
    ),
)
ROIS = st.lists(
    st.tuples(
        st.sampled_from(("nodule", "cyst", "liver", "lesion", None)),
        st.lists(st.integers(0, 29), min_size=1, max_size=4, unique=True),
        st.sampled_from((None, "L", "R")),
        st.sampled_from((None, 8.0, 30.0)),
    ),
    max_size=4,
)


def regions(rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [
        roi(number, label, slices, laterality=side, diameter_mm=diameter)
        for number, (label, slices, side, diameter) in enumerate(rows)
    ]


@SETTINGS
@given(about=STUDIES, text=TEXTS, rows=ROIS, cap=st.sampled_from((0.99, 0.9, 0.3)))
def test_no_confidence_is_above_the_cap_and_slices_are_of_their_series(
    about: dict[str, Any], text: str, rows: list[tuple[Any, ...]], cap: float
) -> None:
    report = READER.read(text).to_json()
    result = align(about, report, {"rois": regions(rows)}, AlignmentRules(cap=cap, max_slices=5), text=text)
    for one in result["entities"]:
        assert 0 <= one["confidence"] <= cap
        assert one["slices"] == sorted(set(one["slices"]))
        assert 1 <= len(one["slices"]) == len(one["weights"]) <= 5
        assert all(0 < weight <= 1 for weight in one["weights"])
        rules = {piece["rule"] for piece in one["evidence"]}
        if rules == {"E7"}:
            assert one["confidence"] <= 0.6
    # Every finding comes out once on one of the two sides.
    said = {one["entity"] for one in result["entities"]}, {one["entity"] for one in result["unaligned"]}
    assert said[0].isdisjoint(said[1])
    assert said[0] | said[1] == set(range(len(report["entities"])))


@SETTINGS
@given(about=STUDIES, text=TEXTS, rows=ROIS, data=st.data())
def test_orders_of_mentions_and_regions_change_nothing(
    about: dict[str, Any], text: str, rows: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    report, rois = READER.read(text).to_json(), regions(rows)
    expected = align(about, report, {"rois": rois}, AlignmentRules(), text=text)
    order = data.draw(st.permutations(range(len(report["mentions"]))))
    turned = {**report, "mentions": [report["mentions"][number] for number in order]}
    result = align(about, turned, {"rois": data.draw(st.permutations(rois))}, AlignmentRules(), text=text)

    def plain(one: dict[str, Any], numbers: list[int] | range) -> dict[str, Any]:
        pieces = [
            {**piece, "mention": numbers[piece["mention"]]} if "mention" in piece else piece
            for piece in one["evidence"]
        ]
        return {**one, "evidence": sorted(pieces, key=repr)}

    same = range(len(order))
    assert [plain(one, order) for one in result["entities"]] == [
        plain(one, same) for one in expected["entities"]
    ]
    assert result["unaligned"] == expected["unaligned"]


@SETTINGS
@given(
    finding=st.sampled_from(FINDINGS),
    number=st.integers(1, 3),
    image=st.integers(1, 20),
    form=st.sampled_from(
        (
            "FINDINGS: There is a {0}, previously on series {1}, image {2}.",
            "FINDINGS: Unchanged {0} compared to the prior CT (series {1}, image {2}).",
            "FINDINGS: {0} (prior series {1}, image {2}).",
            "COMPARISON: CT of the chest showing a {0} (series {1}, image {2}).",
            "FINDINGS: On the previous study there was a {0} on series {1}, image {2}.",
        )
    ),
)
def test_images_of_other_studies_never_align(finding: str, number: int, image: int, form: str) -> None:
    text = form.format(finding, number, image)
    parts = [series(one, 20, body_part=None) for one in (1, 2, 3)]
    result = align(study(*parts), READER.read(text).to_json(), None, AlignmentRules(), text=text)
    assert result["entities"] == []
