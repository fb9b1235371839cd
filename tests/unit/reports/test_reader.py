"""A report read whole, with extractors of others."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.errors import ConfigError
from shardflow.reports import ENTRY_POINTS, Entity, ReportReader, load_extractors

pytestmark = pytest.mark.fast

READER = ReportReader()
REPORT = """INDICATION: Possible pneumonia.
COMPARISON: CT with effusion (series 9, image 9).
FINDINGS: A 9 mm nodule in the right upper lobe (series 4, image 52). No effusion.
RECOMMENDATION: CT for metastasis.
Signed by: Dr. Mass
"""


def shout(texts: Sequence[str]) -> list[list[Entity]]:
    """Find every exclamation mark."""
    return [
        [
            Entity(span=(place, place + 1), concept="shout", assertion="present")
            for place, character in enumerate(text)
            if character == "!"
        ]
        for text in texts
    ]


def outside(texts: Sequence[str]) -> Iterator[list[Entity]]:
    for text in texts:
        yield [Entity(span=(0, len(text) + 1), concept="all", assertion="present")]


@given(st.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_every_place_is_in_the_text(text: str) -> None:
    content = READER.read(text)
    rows = json.loads(json.dumps(content.to_json()))
    spans = [row["span"] for kind in ("sections", "entities", "mentions") for row in rows[kind]]
    assert all(0 <= first < last <= len(text) for first, last in spans)


def test_sections_change_what_is_said() -> None:
    content = READER.read(REPORT)
    assert [(REPORT[slice(*one.span)], one.assertion) for one in content.entities] == [
        ("pneumonia", "hypothetical"),
        ("effusion", "historical"),
        ("nodule", "present"),
        ("effusion", "absent"),
        ("metastasis", "hypothetical"),
    ]
    assert [str(one) for one in content.mentions] == ["S4:52"]


def test_offsets_are_of_the_whole_report() -> None:
    nodule = READER.read(REPORT).entities[2]
    assert nodule.anatomy
    assert REPORT[slice(*nodule.anatomy.span)] == "right upper lobe"


def test_extractors_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [importlib.metadata.EntryPoint("loud", f"{__name__}:shout", ENTRY_POINTS)]

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return offered if group == ENTRY_POINTS else []

    monkeypatch.setattr("shardflow.reports.reader.entry_points", entry_points)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: globals()[self.attr])
    (pair,) = load_extractors()
    assert pair[0] == "loud"
    found = ReportReader(extractors=[pair]).read("A nodule!").entities
    assert [(one.concept, one.source) for one in found] == [("nodule", "lexicon"), ("shout", "loud")]


def test_an_extractor_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = importlib.metadata.EntryPoint("broken", "no_such_module_here:find", ENTRY_POINTS)
    monkeypatch.setattr("shardflow.reports.reader.entry_points", lambda group: [broken])
    with pytest.raises(ConfigError, match=r"'broken' must be importable, got ModuleNotFoundError"):
        load_extractors()
    with pytest.raises(ConfigError, match="a span outside the text"):
        ReportReader(extractors=[("outside", outside)]).read("A nodule.")
    with pytest.raises(ConfigError, match="got 0 answers for 2 reports"):
        ReportReader(extractors=[("lazy", lambda texts: [])]).read_many(["A nodule.", "Clear."])
