"""Reports: every span is where the truth says, and every mention can be resolved from its words."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest

from shardflow.synthetic.draws import GENERATED
from shardflow.synthetic.options import SynthOptions, iter_visits
from shardflow.synthetic.planning import plan_study
from shardflow.synthetic.render import find_appearances
from shardflow.synthetic.reports.compose import Story, write_report
from shardflow.synthetic.reports.mentions import Report
from shardflow.synthetic.study import StudyPlan

pytestmark = pytest.mark.fast

OPTIONS = SynthOptions(num_studies=80, seed=8, size=96, min_slices=12, max_slices=24, min_lesions=1)


@lru_cache(maxsize=1)
def told() -> tuple[tuple[StudyPlan, StudyPlan | None, Report], ...]:
    rows: list[tuple[StudyPlan, StudyPlan | None, Report]] = []
    before: Story | None = None
    for number, (patient, visit) in enumerate(iter_visits(OPTIONS)):
        study = plan_study(OPTIONS, number, patient, visit)
        story = Story(study=study, appearances=find_appearances(study))
        prior = before if visit else None
        rows.append((study, prior.study if prior else None, write_report(OPTIONS.seed, story, prior)))
        before = story
    return tuple(rows)


def test_reports_say_that_they_are_generated_and_are_plain_text() -> None:
    for _, _, report in told():
        assert report.text.startswith(GENERATED + "\n")
        assert report.text.isascii()
        assert "{" not in report.text
        assert ".." not in report.text
        assert " ." not in report.text
        assert "( " not in report.text
        assert "  " not in report.text
        assert ", (" not in report.text


def test_spans_are_where_the_truth_says() -> None:
    for _, _, report in told():
        for row in (*report.entities, *report.mentions, *report.distractors):
            start, end = row["span"]
            assert report.text[start:end] == row["text"]
            section = next(item for item in report.sections if item["name"] == row["section"])
            assert section["span"][0] <= start < end <= section["span"][1]
        spans = sorted(row["span"] for row in (*report.entities, *report.mentions, *report.distractors))
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        ends = [item["span"] for item in report.sections]
        assert all(a[1] <= b[0] for a, b in pairwise(ends))
        assert ends[-1][1] == len(report.text)


def test_mentions_name_what_they_mean() -> None:
    for study, prior, report in told():
        for row in report.mentions:
            where = prior if row["refers_to"] == "prior" else study
            assert where is not None
            assert row["target"]["study_instance_uid"] == where.uid
            series = next(item for item in where.series if item.uid == row["target"]["series_instance_uid"])
            numbers = {item.sop_instance_uid: item.instance_number for item in series.slices}
            targets = [numbers[uid] for uid in row["target"]["sop_instance_uids"]]
            assert targets
            words = list(map(int, re.findall(r"\d+", row["text"])))
            if row["form"] == "view":
                assert words == []
                assert row["series_number"] is None
                continue
            assert sorted(targets) == sorted(row["image_numbers"])
            if row["series_number"] is not None:
                assert row["series_number"] == series.number
                assert series.number in words
            ends = (row["image_numbers"][0], row["image_numbers"][-1])
            assert set(ends) <= set(words)
            if row["form"] == "range":
                assert row["image_numbers"] == list(range(ends[0], ends[1] + 1))


def test_mentions_of_lesions_show_the_lesion() -> None:
    for study, _, report in told():
        seen = {(item.lesion_id, item.item.sop_instance_uid) for item in find_appearances(study)}
        for row in report.mentions:
            if row["lesion_id"] is not None and row["refers_to"] == "current":
                assert all((row["lesion_id"], uid) in seen for uid in row["target"]["sop_instance_uids"])


def test_ambiguity_is_marked() -> None:
    marked = Counter(row["is_ambiguous"] for _, _, report in told() for row in report.mentions)
    assert marked[True] > 0
    assert marked[False] > marked[True]
    for study, _, report in told():
        for row in report.mentions:
            if row["refers_to"] == "current" and row["series_number"] is not None and not row["is_ambiguous"]:
                fitting = [
                    series
                    for series in study.series
                    if series.number == row["series_number"]
                    and set(row["image_numbers"]) <= {item.instance_number for item in series.slices}
                ]
                assert len(fitting) == 1


def test_no_finding_is_both_denied_and_left_open() -> None:
    for _, _, report in told():
        assertions: dict[str, set[str]] = {}
        for row in report.entities:
            if row["section"] in {"findings", "impression"} and row["assertion"] in {
                "absent",
                "uncertain",
                "present",
            }:
                assertions.setdefault(row["lesion_id"] or row["label"], set()).add(row["assertion"])
        assert all(len(found) == 1 for found in assertions.values()), assertions


def test_there_is_variety() -> None:
    mentions = [row for _, _, report in told() for row in report.mentions]
    entities = [row for _, _, report in told() for row in report.entities]
    shapes = {re.sub(r"\d+", "#", row["text"].lower()) for row in mentions}
    assert len(shapes) >= 25
    forms = Counter(row["form"] for row in mentions)
    assert {
        "series-image",
        "abbreviated",
        "pair",
        "image-first",
        "bare",
        "range",
        "view",
        "image-only",
    } <= set(forms)
    assert {row["assertion"] for row in mentions} == {"present", "absent", "uncertain", "historical"}
    assert {row["refers_to"] for row in mentions} == {"current", "prior"}
    assert {row["assertion"] for row in entities} == {
        *("present", "absent", "uncertain", "historical", "hypothetical")
    }
    kinds = {row["kind"] for _, _, report in told() for row in report.distractors}
    assert {"fraction", "level", "time", "date", "count", "size"} <= kinds
    assert {item["name"] for _, _, report in told() for item in report.sections} == {
        *("indication", "technique", "comparison", "findings", "impression", "addendum")
    }


def odd(name: str) -> list[tuple[StudyPlan, Report]]:
    rows = []
    for number, (patient, visit) in list(enumerate(iter_visits(OPTIONS)))[:12]:
        study = plan_study(OPTIONS, number, patient, visit)
        story = Story(study=study, appearances=find_appearances(study))
        rows.append((study, write_report(OPTIONS.seed, story, None, {name: 100})))
    return rows


def of_lesions(report: Report) -> list[dict[str, Any]]:
    return [row for row in report.mentions if row["lesion_id"] and row["form"] != "view"]


def test_reports_can_leave_out_images_and_series() -> None:
    assert not any(of_lesions(report) for _, report in odd("no-image"))
    rows = [row for _, report in odd("no-series") for row in of_lesions(report)]
    assert rows
    assert all(row["form"] == "image-only" and row["series_number"] is None for row in rows)


def test_wrong_images_do_not_show_the_finding() -> None:
    rows = [(study, row) for study, report in odd("wrong-image") for row in of_lesions(report)]
    assert rows
    for study, row in rows:
        (number,) = row["image_numbers"]
        right = set(row["target"]["sop_instance_uids"])
        (series,) = [one for one in study.series if one.uid == row["target"]["series_instance_uid"]]
        named = {one.sop_instance_uid for one in series.slices if one.instance_number == number}
        assert row["is_wrong"]
        assert str(number) in row["text"]
        assert not named & right


def test_overcalls_speak_of_no_lesion() -> None:
    for _, report in odd("overcall"):
        (row,) = [row for row in report.mentions if row["assertion"] == "uncertain" and not row["lesion_id"]]
        assert any(one["lesion_id"] is None and one["assertion"] == "uncertain" for one in report.entities)
        assert row["refers_to"] == "current"
