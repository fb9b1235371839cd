"""Which entities of a study become rows, and what of slices and text goes with them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from shardflow.errors import ConfigError, FormatError
from shardflow.format.entities import EntityRules
from shardflow.reports import ReportReader
from shardflow.reports.entity_rows import EntityRow, study_rows
from shardflow.reports.entity_views import choose

pytestmark = pytest.mark.fast

TEXT = (
    "FINDINGS: Small pleural effusion \u2013 stable. Possible pneumonia at the left base. No pneumothorax.\n"
)
CONTENT = ReportReader().read(TEXT).to_json()
PROBABILITIES = [entity.pop("probability") for entity in CONTENT["entities"]]
"""Taken out, as an earlier reader wrote it: the confidences alone decide."""
ENTITIES = [entity["concept"] for entity in CONTENT["entities"]]
EFFUSION = ENTITIES.index("pleural effusion")
SERIES = {"num_slices": 10, "rows": 8, "columns": 9, "modality": "CT"}


def entry(**changes: Any) -> dict[str, Any]:
    usual = {"entity": EFFUSION, "series": 0, "slices": [4], "weights": [1.0], "confidence": 0.9}
    return {**usual, **changes}


def rows(*entries: dict[str, Any], **rules: Any) -> list[EntityRow]:
    fields = {
        "alignment.json": json.dumps({"format_version": 1, "entities": entries, "unaligned": []}).encode(),
        "report.json": json.dumps({"format_version": 1, **CONTENT}).encode(),
        "report.txt": TEXT.encode(),
        "study.json": json.dumps(
            {"format_version": 1, "series": [SERIES, {**SERIES, "modality": None}]}
        ).encode(),
    }
    of = EntityRules(**rules)
    return choose(list(study_rows(fields, of)), of, Counter())


@pytest.mark.parametrize(
    ("confidence", "is_row"), [(0.7, False), (0.7000000000000001, True), (0.6999999, False), (1.0, True)]
)
def test_a_confidence_must_be_above_the_threshold(confidence: float, is_row: bool) -> None:
    assert bool(rows(entry(confidence=confidence))) == is_row
    assert not rows(entry(confidence=confidence), threshold=confidence)


def test_only_what_is_there_or_may_be_is_a_row() -> None:
    found = rows(*[entry(entity=number) for number in range(len(ENTITIES))])
    assert {(row.label, row.assertion) for row in found} == {
        ("pleural effusion", "present"),
        ("pneumonia", "uncertain"),
    }
    pneumonia = next(row for row in found if row.label == "pneumonia")
    assert (pneumonia.anatomy, pneumonia.laterality) == ("lung base", "L")


def test_rows_are_ordered_by_entity_and_series() -> None:
    found = rows(entry(series=1), entry(entity=ENTITIES.index("pneumonia")), entry())
    assert [(row.entity, row.series) for row in found] == sorted((row.entity, row.series) for row in found)
    assert [row.modality for row in found if row.entity == EFFUSION] == ["CT", ""]


@pytest.mark.parametrize(
    ("slices", "weights", "context", "expected", "centre"),
    [
        ([4], [1.0], 0, [(4, 1.0)], 4),
        ([4], [1.0], 1, [(3, 0.0), (4, 1.0), (5, 0.0)], 4),
        ([9, 0], [0.5, 1.0], 1, [(0, 1.0), (1, 0.0), (8, 0.0), (9, 0.5)], 0),
        ([2, 3, 4, 5], [0.5, 1.0, 1.0, 1.0], 0, [(2, 0.5), (3, 1.0), (4, 1.0), (5, 1.0)], 4),
        ([3, 4], [1.0, 1.0], 0, [(3, 1.0), (4, 1.0)], 3),
    ],
)
def test_context_has_no_weight_and_the_centre_the_most(
    slices: list[int], weights: list[float], context: int, expected: list[tuple[int, float]], centre: int
) -> None:
    (row,) = rows(entry(slices=slices, weights=weights), context_slices=context)
    assert list(zip(row.slices, row.weights, strict=True)) == expected
    assert row.slices[row.centre] == centre


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sentence", "Small pleural effusion \u2013 stable."),
        ("entity", "pleural effusion"),
        ("report", TEXT),
    ],
)
def test_the_text_is_bytes_of_the_report_and_holds_the_entity(kind: str, expected: str) -> None:
    (row,) = rows(entry(), text=kind)
    data = TEXT.encode()
    assert data[slice(*row.text)].decode() == expected
    assert data[slice(*row.span)].decode() == "pleural effusion"
    assert row.text[0] <= row.span[0]
    assert row.span[1] <= row.text[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"entity": 99},
        {"entity": -1},
        {"series": 2},
        {"slices": [10]},
        {"slices": [4, 4], "weights": [1.0, 1.0]},
        {"weights": []},
        {"weights": [1.5]},
        {"slices": [], "weights": []},
        {"confidence": 1.5},
        {"confidence": "high"},
    ],
)
def test_an_alignment_that_does_not_fit_is_refused_without_its_content(wrong: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"alignment\.json must name") as caught:
        rows(entry(**wrong))
    assert "effusion" not in str(caught.value)


def test_one_pair_of_entity_and_series_stands_once() -> None:
    with pytest.raises(FormatError, match=r"alignment\.json must name"):
        rows(entry(), entry())


def test_a_newer_format_and_broken_json_are_refused() -> None:
    for content in (b'{"format_version": 2}', b"{", b"[]"):
        fields = dict.fromkeys(("alignment.json", "report.json", "report.txt", "study.json"), content)
        with pytest.raises(FormatError, match=r"alignment\.json must be"):
            list(study_rows(fields, EntityRules()))


@pytest.mark.parametrize("wrong", [{"threshold": 1.1}, {"context_slices": -1}, {"text": "words"}])
def test_rules_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EntityRules(**wrong)


def read_rows(text: str, left_out: Counter[str] | None = None, **rules: Any) -> list[EntityRow]:
    """Return the rows of a report whose findings are all placed with the confidence 0.95."""
    content = ReportReader().read(text).to_json()
    entries = [
        entry(entity=number, confidence=0.95)
        for number, one in enumerate(content["entities"])
        if one["assertion"] in ("present", "uncertain")
    ]
    fields = {
        "alignment.json": json.dumps({"format_version": 1, "entities": entries, "unaligned": []}).encode(),
        "report.json": json.dumps({"format_version": 1, **content}).encode(),
        "report.txt": text.encode(),
        "study.json": json.dumps({"format_version": 1, "series": [SERIES]}).encode(),
    }
    of = EntityRules(**rules)
    return choose(list(study_rows(fields, of)), of, Counter() if left_out is None else left_out)


MIXED = """INDICATION: Chest pain and cough. History of asthma.
FINDINGS: New 9 mm nodule in the right upper lobe. Endotracheal tube in place. Possible pneumonia.
Fractures of the left sixth rib.
IMPRESSION: Likely small effusion.
RECOMMENDATION: CT to exclude malignancy.
"""


def test_usual_views_serve_findings_of_findings_and_impression_and_count_the_rest() -> None:
    left_out: Counter[str] = Counter()
    found = read_rows(MIXED, left_out)
    assert [(row.label, row.section) for row in found] == [
        ("pulmonary nodule", "findings"),
        ("rib fracture", "findings"),
        ("pleural effusion", "impression"),
    ]
    assert left_out == {
        "symptom, present, in indication": 2,
        "device, present, in findings": 1,
        "below the threshold": 1,  # a possible pneumonia
    }


@pytest.mark.parametrize(
    ("where", "labels"),
    [
        ("kind == 'device'", ["endotracheal tube"]),
        ("kind == 'symptom' and section == 'indication'", ["chest pain", "cough"]),
        ("probability < 0.9", ["pleural effusion"]),
        ("change == 'new' and size_mm > 5", ["pulmonary nodule"]),
        ("certainty == 'likely'", ["pleural effusion"]),
        # Synonyms, plurals and what a finding is a kind of find it.
        ("label == 'rib fractures'", ["rib fracture"]),
        ("label == 'fracture'", ["rib fracture"]),
        ("label in ('nodule', 'effusion')", ["pulmonary nodule", "pleural effusion"]),
        ("label != 'lesion' and kind == 'finding'", ["rib fracture", "pleural effusion"]),
    ],
)
def test_an_expression_selects_what_a_view_serves(where: str, labels: list[str]) -> None:
    assert [row.label for row in read_rows(MIXED, where=where)] == labels


def test_probability_and_place_count_together() -> None:
    (row,) = read_rows("FINDINGS: Likely pneumonia.", threshold=0.71)
    assert row.probability == 0.75
    assert row.is_above(0.75 * 0.95 - 1e-9)
    assert not read_rows("FINDINGS: Likely pneumonia.", threshold=0.75 * 0.95)


def test_reports_of_an_earlier_reader_get_kinds_and_sections() -> None:
    content = ReportReader().read(MIXED).to_json()
    for one in content["entities"]:
        for name in ("kind", "section", "probability", "certainty", "change", "basis"):
            del one[name]
    entries = [entry(entity=number) for number, one in enumerate(content["entities"])]
    fields = {
        "alignment.json": json.dumps({"format_version": 1, "entities": entries, "unaligned": []}).encode(),
        "report.json": json.dumps({"format_version": 1, **content}).encode(),
        "report.txt": MIXED.encode(),
        "study.json": json.dumps({"format_version": 1, "series": [SERIES]}).encode(),
    }
    found = [(row.label, row.kind, row.section) for row in study_rows(fields, EntityRules())]
    assert ("chest pain", "symptom", "indication") in found
    assert ("endotracheal tube", "device", "findings") in found
    assert ("rib fracture", "finding", "findings") in found


def test_a_condition_of_other_columns_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        read_rows(MIXED, where="kinds == 'finding'")
