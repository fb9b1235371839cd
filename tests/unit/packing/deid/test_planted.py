"""Planted identifiers are found in five languages, findings stay, and no family of rules is idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardflow.packing.deid import report_text
from shardflow.packing.deid.known_values import KnownValues
from shardflow.packing.deid.pseudonyms import ReportTextMode
from shardflow.packing.deid.report_text import find_spans, scrub
from shardflow.synthetic.identifiers import CATEGORIES, LANGUAGES, Measured, PlantedText, measure, plant

pytestmark = pytest.mark.fast

_NOBODY = KnownValues(())


def _measure(num_values: int, mode: ReportTextMode) -> tuple[Measured, list[str]]:
    faults: list[str] = []
    result = measure(
        plant("development", num_values=num_values),
        lambda text: ((span.start, span.end) for span in find_spans(text, _NOBODY, mode=mode)),
        on_fault=lambda text, kind, token: faults.append(f"{kind} {token!r}: {text.text}"),
    )
    return result, faults


def test_the_corpus_holds_every_category_in_every_language_in_parts_that_share_no_template() -> None:
    development, test = (list(plant(part, num_values=8)) for part in ("development", "test"))
    for texts in (development, test):
        assert {(text.language, one.category) for text in texts for one in text.identifiers} == {
            (language, category) for language in LANGUAGES for category in CATEGORIES
        }
        assert sum(len(text.identifiers) for text in texts) >= 2000
        for text in texts:
            assert all(text.text[one.start : one.end].strip() for one in text.identifiers)
    frames = [{(text.language, _frame(text)) for text in texts} for texts in (development, test)]
    assert not frames[0] & frames[1]
    assert development == list(plant("development", num_values=8))


def _frame(text: PlantedText) -> str:
    """Return what a text is without its identifiers."""
    parts, at = [], 0
    for one in text.identifiers:
        parts.append(text.text[at : one.start])
        at = one.end
    return "{}".join([*parts, text.text[at:]])


def test_every_identifier_of_the_development_part_is_found_and_no_word_is_lost() -> None:
    result, faults = _measure(2, "strict")
    assert not faults
    assert result.recall == 1.0
    assert sum(result.words.values()) > 2000


def _families() -> Iterator[tuple[str, str]]:
    for table in ("FAMILIES", "CHINESE_FAMILIES", "STRICT_FAMILIES"):
        yield from ((table, name) for name in getattr(report_text, table))


def test_bare_years_are_a_family_of_the_strict_mode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A year is no identifier of the safe harbor, so none is planted."""
    assert scrub("In 2017.", _NOBODY, mode="strict").text == "In [DATE]."
    rules = {name: rule for name, rule in report_text.STRICT_FAMILIES.items() if name != "years"}
    monkeypatch.setattr(report_text, "STRICT_FAMILIES", rules)
    assert scrub("In 2017.", _NOBODY, mode="strict").text == "In 2017."


@pytest.mark.parametrize(("table", "name"), sorted(set(_families()) - {("STRICT_FAMILIES", "years")}))
def test_every_family_of_rules_finds_what_no_other_does(
    table: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode: ReportTextMode = "strict" if table == "STRICT_FAMILIES" else "scrub"
    before, _ = _measure(1, mode)
    rules = dict(getattr(report_text, table))
    del rules[name]
    monkeypatch.setattr(report_text, table, rules)
    after, _ = _measure(1, mode)
    assert after.missed.total() > before.missed.total()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Discussed with Thandi Okafor by telephone.", "Discussed with [NAME] by telephone."),
        ("94F with cough.", "[AGE]F with cough."),
        ("A ninety-four year old man.", "A [AGE] year old man."),
        ("PATIENT: OKAFOR, THANDI", "PATIENT: [NAME]"),
        ("cc: Thandi Okafor", "cc: [NAME]"),
        ("Studies from CHOP are missing.", "Studies from [PLACE] are missing."),
        ("Stable since 2017.", "Stable since [DATE]."),
        ("Seen by Dr. Smith; Smith fracture.", "Seen by Dr. [NAME]; Smith fracture."),
        ("Circle of Willis; Hill-Sachs deformity.", "Circle of Willis; Hill-Sachs deformity."),
        ("Reviewed with Rose White.", "Reviewed with [NAME]."),
        ("White matter is normal; Stone in the duct.", "White matter is normal; Stone in the duct."),
    ],
)
def test_families_of_a_trial_in_the_strict_mode(text: str, expected: str) -> None:
    assert scrub(text, _NOBODY, mode="strict").text == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d/w Grace in the ED", "d/w [NAME] in the ED"),
        ("Discussed w/ Okafor at bedside.", "Discussed w/ [NAME] at bedside."),
        ("Thank you, Rose, for this referral.", "Thank you, [NAME], for this referral."),
        ("Reviewed with my colleague Thandi Okafor.", "Reviewed with my colleague [NAME]."),
        ("Scan by Okafor PGY-4.", "Scan by [NAME] PGY-4."),
        ("RE: Okafor, Thandi", "RE: [NAME]"),
        ("seen with mrs. okafor", "seen with mrs. [NAME]"),
        ("Pat. Wechselberger, Annegret, kommt.", "Pat. [NAME], kommt."),
        ("Hr. Wechselberger war nüchtern.", "Hr. [NAME] war nüchtern."),
        ("Se comenta con Etxeberria.", "Se comenta con [NAME]."),
        ("She turned 95 last month.", "She turned [AGE] last month."),
        ("The arm was turned 95 degrees.", "The arm was turned 95 degrees."),
        ("SSN ending 4471", "SSN ending [ID]"),
        ("Call 5-1234 with questions.", "Call [PHONE] with questions."),
        ("Member 99120-33 of the plan.", "Member [ID] of the plan."),
        ("RE: nodule in the right lung", "RE: nodule in the right lung"),
        ("Attention: right chest tube in the fissure", "Attention: right chest tube in the fissure"),
        ("Requesting: MRCP", "Requesting: MRCP"),
        ("Attention: Okafor", "Attention: [NAME]"),
        ("Requesting: Rose White", "Requesting: [NAME]"),
        ("14 Fr. Malecot drain; 14-Fr. Malecot", "14 Fr. Malecot drain; 14-Fr. Malecot"),
        ("Fr. Wechselberger kommt.", "Fr. [NAME] kommt."),
        ("SSN ends in 1234", "SSN ends in [ID]"),
        ("Final report. /es/ Thandi Okafor", "Final report. /es/ [NAME]"),
    ],
)
def test_families_of_a_second_trial(text: str, expected: str) -> None:
    assert scrub(text, _NOBODY, mode="scrub").text == expected


def test_known_values_are_not_cut_at_any_number() -> None:
    numbers = [f"ZX{number:06d}" for number in range(2000)]
    known = KnownValues([{"AccessionNumber": tuple(numbers)}])
    assert scrub(f"See {numbers[-1].lower()}.", known, mode="scrub").text == "See [ID]."


def test_an_accession_number_without_a_digit_is_known_and_a_word_is_none() -> None:
    known = KnownValues([{"AccessionNumber": ("QXRTLM",), "StudyID": ("CHEST",)}])
    done = scrub("Under q-x-r-t-l-m: the chest is clear.", known, mode="scrub").text
    assert done == "Under [ID]: the chest is clear."
