"""Languages of reports: told apart, and never read as English."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.reports import ReportReader
from shardflow.reports.detection import detect_languages
from shardflow.reports.language import LANGUAGES

pytestmark = pytest.mark.fast

READER = ReportReader()
GOLD = Path(__file__).parents[3] / "benchmarks" / "reports" / "gold"
SENTENCES = {
    "german": (
        "Kein Pneumothorax.",
        "Kein Nachweis eines Pneumothorax.",
        "Keine Pneumonie, kein Pneumothorax.",
        "Kein Pleuraerguss beidseits.",
        "Pneumothorax rechts.",
        "FINDINGS: Kein Pneumothorax.",
    ),
    "french": (
        "Pas de pneumothorax.",
        "Absence de pneumothorax.",
        "Pas d'épanchement pleural.",
        "Il n'y a pas de pneumothorax ni de consolidation.",
    ),
    "spanish": (
        "Sin neumotórax.",
        "No se observa neumotórax.",
        "No hay derrame pleural.",
        "Sin evidencia de fractura.",
    ),
    "portuguese": ("Sem pneumotórax.", "Não há derrame pleural."),
    "italian": ("Non versamento pleurico.", "Assenza di pneumotorace."),
    "dutch": ("Geen pneumothorax.", "Geen aanwijzingen voor pneumothorax."),
    "polish": ("Bez cech odmy opłucnowej.",),
    "turkish": ("Pnömotoraks izlenmedi.",),
    "chinese": ("未见气胸。", "双肺未见明显异常。"),
    "japanese": ("気胸を認めない。",),
    "korean": ("기흉 없음.",),
    "russian": ("Пневмоторакс не выявлен.",),
    "greek": ("Χωρίς πνευμοθώρακα.",),
    "arabic": ("لا يوجد استرواح صدري.",),
}
CASES = [(language, text) for language, texts in SENTENCES.items() for text in texts]


@pytest.mark.parametrize(("language", "text"), CASES)
def test_a_denial_in_any_language_is_never_a_finding(language: str, text: str) -> None:
    content = READER.read(text)
    assert content.languages[0] == language
    if language in LANGUAGES:
        assert not content.unread
    else:
        assert not content.entities
        assert not content.mentions
        (unread,) = {(one.language, one.reason) for one in content.unread}
        assert unread == (language, "LANGUAGE_WITHOUT_RULES")
    if "rechts" not in text:
        assert "present" not in {one.assertion for one in content.entities}


@pytest.mark.parametrize(
    "text",
    [
        "Cardiomegaly.",
        "x",
        "",
        "Report 3:\nclear.",
        "Pneumothorax.",
        "Stone (se 3 im 45).",
        "LR-3, 12 mm.",
        "r/o SBO",
    ],
)
def test_short_reports_in_english_stay_english(text: str) -> None:
    found = detect_languages(text)
    assert found.languages == ("english",)
    assert found.unread == ()


def test_no_sentence_of_the_english_gold_sets_is_taken_for_another_language() -> None:
    lines = [
        line.partition("=>")[0]
        for path in sorted((*GOLD.glob("*.txt"), *GOLD.glob("styles/*.txt")))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert len(lines) > 1000
    assert [line for line in lines if detect_languages(line).unread] == ["Im Bereich der Leber. "]


def test_of_a_mixed_report_only_the_known_language_is_read() -> None:
    text = "FINDINGS: No effusion. A nodule (series 3, image 4).\nCONCLUSION: Pas de pneumothorax (image 7)."
    content = READER.read(text)
    assert content.languages == ("english", "french")
    assert [(text[slice(*one.span)], one.assertion) for one in content.entities] == [
        ("effusion", "absent"),
        ("nodule", "present"),
    ]
    assert [str(one) for one in content.mentions] == ["S3:4"]
    (unread,) = content.unread
    assert text[slice(*unread.span)].strip() == "Pas de pneumothorax (image 7)"


def test_a_long_text_that_no_table_knows_is_of_an_unknown_language() -> None:
    found = detect_languages("Pneumothorax nincs, infiltratum nincs, pleuralis folyadék nincs egyik oldalon")
    assert found.languages == ("unknown",)
    assert len(found.unread) == 1


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_places_stay(text: str) -> None:
    found = detect_languages(text)
    for language in {one for _, _, one in found.pieces}:
        blank = found.blank(text, language)
        assert len(blank) == len(text)
        assert all(was == is_now or is_now == " " for was, is_now in zip(text, blank, strict=True))
    assert found.languages
