"""Sentences in the manners of several institutions: what a rule is there for, by class of the taxonomy.

Each of the classes has rules of its own, so that a rule that breaks turns its class red. The floors are those
of the goals; the test styles are scored by their number alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.reports.gold_sets import styled_sentences
from benchmarks.reports.run import EntityScores, calibration, read_styled, score_styles
from shardflow.reports import ReportReader
from shardflow.reports.assertion import Scopes, _cue_index, find_cues
from shardflow.reports.language import load_language, table_rows

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


def accuracy(group: str, name: str = "assertion") -> float:
    """Return how many findings of a class a reader made now reads rightly."""
    reader, score = ReportReader(), EntityScores()
    for case in styled_sentences("development"):
        if case.group == group:
            score.add(case, read_styled(reader, case))
    if name == "assertion":
        return float(score.summary()["assertion_accuracy"])
    return float(score.summary()["of_those_with_one"][name]["accuracy"])


@pytest.mark.parametrize(
    ("effect", "direction", "group"),
    [
        ("absent", "forward", "list"),
        ("absent", "backward", "post-modifier"),
        ("uncertain", "forward", "hedge"),
        ("uncertain", "backward", "hedge"),
        ("uncertain", "both", "hedge"),
        ("hypothetical", "forward", "section"),
        ("historical", "forward", "section"),
        ("none", "forward", "comparison"),
        ("present", "forward", "comparison"),
        ("stop", "both", "contrast"),
        ("absent", "both", "post-modifier"),
    ],
)
def test_each_family_of_cues_is_needed(
    effect: str, direction: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str, language: str = "english") -> list[dict[str, str]]:
        return [
            row
            for row in table_rows(name, language)
            if (row["effect"], row["direction"]) != (effect, direction)
        ]

    monkeypatch.setattr("shardflow.reports.assertion.table_rows", without)
    monkeypatch.setattr("shardflow.reports.assertion._cue_index", _cue_index.__wrapped__)
    monkeypatch.setattr("shardflow.reports.findings.find_cues", _once(find_cues))
    assert accuracy(group) < 0.999


def _once(found: Any) -> Any:
    """Keep the index of the mutated cues for one test."""
    index = found.__globals__["_cue_index"]("english")

    def find(tokens: Any, language: str) -> Any:
        return sorted(index.find(tokens), key=lambda one: one.first)

    return find


@pytest.mark.parametrize(
    ("role", "group", "name"),
    [
        ("adjective", "contrast", "assertion"),
        ("closing", "list-adjective", "assertion"),
        ("list", "list", "assertion"),
        ("own_statement", "nested", "assertion"),
        ("verb", "post-modifier", "assertion"),
        ("purpose", "section", "assertion"),
        ("complement", "list", "assertion"),
        ("almost", "comparison", "assertion"),
        ("alteration", "comparison", "assertion"),
        ("dating", "comparison", "assertion"),
        ("degree", "comparison", "assertion"),
        ("denying", "comparison", "assertion"),
        ("resolving", "comparison", "assertion"),
        ("unbroken", "list", "assertion"),
        ("adjoining", "contrast", "assertion"),
        ("enumerating", "hedge", "assertion"),
        ("severity", "attribute", "severity"),
        ("sides", "attribute", "laterality"),
        ("changes", "comparison", "change"),
        ("preposition", "attribute", "anatomy"),
    ],
)
def test_each_role_of_words_is_needed(
    role: str, group: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An index of no phrases is none: one that no report has stands for them.
    nothing: dict[str, Any] = {"changes": {"zzz": "new"}, "sides": {}}
    empty = nothing.get(role, frozenset())
    mutated = replace(load_language(), **{role: empty})
    monkeypatch.setattr("shardflow.reports.findings.load_language", lambda name: mutated)
    assert accuracy(group, name) < 0.97 if name != "assertion" else accuracy(group) < 0.999


def test_conclusions_from_what_is_denied_and_sections_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Scopes, "_is_of_denied", staticmethod(lambda *_: False))
        assert accuracy("list") < 0.999
    with monkeypatch.context() as patch:
        patch.setattr("shardflow.reports.reader._BY_SECTION", {})
        assert accuracy("section") < 0.97
    with monkeypatch.context() as patch:
        patch.setattr("shardflow.reports.assertion._REACH_OF_ASKING", -1)
        assert accuracy("section") < 0.999
