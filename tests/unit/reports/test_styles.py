"""Sentences in the manners of several institutions: what a rule is there for, by class of the taxonomy.

Each of the classes has rules of its own, so that a rule that breaks turns its class red. The floors are those
of the goals; the test styles are scored by their number alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from benchmarks.reports.gold_sets import styled_sentences
from benchmarks.reports.run import calibration, score_styles

pytestmark = pytest.mark.fast


@cache
def development() -> tuple[dict[str, Any], tuple[str, ...]]:
    errors: list[str] = []
    return score_styles("development", errors), tuple(errors)


@cache
def held_out() -> dict[str, Any]:
    return score_styles("test")


@pytest.mark.parametrize(
    "group",
    [
        "attribute",
        "comparison",
        "contrast",
        "device",
        "hedge",
        "list",
        "list-adjective",
        "nested",
        "post-modifier",
        "section",
    ],
)
def test_each_class_of_sentences_is_read_rightly(group: str) -> None:
    score, errors = development()
    found = score["by_group"][group]
    wrong = [error for error in errors if error.split(":")[0].endswith(f" {group}")]
    assert found["assertion_accuracy"] >= 0.995, wrong[:5]
    assert found["f1"] >= 0.995, wrong[:5]


def test_attributes_belong_to_the_right_finding() -> None:
    score, errors = development()
    for name, one in score["of_those_with_one"].items():
        assert one["accuracy"] >= 0.97, (name, [error for error in errors if f"| {name} of" in error][:5])


def test_styles_that_no_rule_was_made_for() -> None:
    score = held_out()
    assert score["sentences"] >= 700
    assert len(styled_sentences("development")) + score["sentences"] >= 1500
    assert score["overlap"]["f1"] >= 0.98
    assert score["assertion_accuracy"] >= 0.985
    assert score["absent_or_not_accuracy"] >= 0.985


def test_probabilities_are_calibrated_on_styles_that_no_rule_was_made_for() -> None:
    assert calibration("test")["expected_calibration_error"] <= 0.05
