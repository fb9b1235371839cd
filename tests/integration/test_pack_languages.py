"""Packing of reports in several languages: each is counted, and none is read as another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardflow.cli.main import main
from shardflow.errors import ConfigError
from shardflow.packing import pack
from shardflow.packing.engines.worker import Handler
from shardflow.packing.handlers import make_handler
from shardflow.packing.progress import SilentProgress
from shardflow.packing.versions.removal import Withdrawn, remove
from shardflow.reports import detection, reader
from shardflow.reports.alignment.evidence import AlignmentRules
from tests.dicom_factory import make_study
from tests.pack_case import PackCase

pytestmark = pytest.mark.usefixtures("packs_inline")

ITALIAN = "REPERTI: Non pneumotorace. Assenza di versamento pleurico."
MIXED = "FINDINGS: No effusion.\nCONCLUSION: Non si osserva pneumotorace."
ENGLISH = "FINDINGS: A nodule. No effusion."
CURRENT = reader.reader_name()


def _prepare(folder: Path, texts: list[str]) -> tuple[PackCase, list[str]]:
    case = PackCase(folder)
    case.prepare(has_reports=True)
    made = [
        make_study(case.dicom / f"p{number}", patient=f"P{number}", modality="CT", num_slices=2, seed=number)
        for number in range(len(texts))
    ]
    case.write_reports({one.study_instance_uid: text for one, text in zip(made, texts, strict=True)})
    return case, [case.sample_key(one.study_instance_uid) for one in made]


def make_handler_of_earlier_rules(setup: Mapping[str, Any]) -> Handler:
    """Make the handler of a shardflow whose rules were others."""
    reader.RULES_VERSION = 1  # type: ignore[misc]
    return make_handler(setup)


def test_reports_that_other_rules_read_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, keys = _prepare(tmp_path, [ENGLISH])
    case.pack(handlers=f"{__name__}:make_handler_of_earlier_rules")
    new = make_study(case.dicom / "new", patient="P9", modality="CT", num_slices=1, seed=9)
    case.write_reports({new.study_instance_uid: ENGLISH})
    rules = case.pack(mode="append").reports["rules"]
    assert [(name[:8], count) for name, count in rules.items()] == [("rules-1-", 1), (CURRENT[:8], 1)]
    assert len({name.split("/")[1] for name in rules}) == 1  # the weights of the alignment
    capsys.readouterr()
    assert main(["info", str(case.output)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "read by 2 sets of rules: 1 by rules-1-" in shown
    assert f"1 by {CURRENT}/" in shown
    remove(case.output, case.private, Withdrawn(sample_keys=keys))
    extra: Any = case.open().manifest.extra["reports"]
    assert [*extra["rules"]] == [name for name in rules if name.startswith(CURRENT)]


def test_languages_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, keys = _prepare(tmp_path, [ENGLISH, ENGLISH, MIXED, ITALIAN])
    counts = {
        "languages": {"english": 2, "italian": 1, "english+italian": 1},
        "rules": {f"{CURRENT}/{AlignmentRules().digest()}": 4},
        "unread": {"LANGUAGE_WITHOUT_RULES": 2},
    }
    assert case.pack().reports == counts
    assert case.pack().reports == counts  # already packed
    dataset = case.open()
    content = json.loads(dataset.read_fields(dataset.samples.find(keys[3]), ["report.json"])["report.json"])
    assert content["entities"] == content["mentions"] == []
    assert {one["reason"] for one in content["unread"]} == {"LANGUAGE_WITHOUT_RULES"}
    capsys.readouterr()
    assert main(["info", str(case.output)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 english, 1 english+italian, 1 italian; 2 not read whole (LANGUAGE_WITHOUT_RULES)" in shown
    assert dataset.manifest.page is not None
    page = (case.output / dataset.manifest.page.path).read_text(encoding="utf-8")
    assert "Reports by language" in page
    assert "2 not read whole" in page
    remove(case.output, case.private, Withdrawn(sample_keys=[keys[3]]))
    assert case.open().manifest.extra["reports"] == {
        "languages": {"english": 2, "english+italian": 1},
        "rules": dict.fromkeys(counts["rules"], 3),
        "unread": {"LANGUAGE_WITHOUT_RULES": 1},
    }


def test_alignment_of_a_corpus_that_no_rule_reads_is_refused_before_work(tmp_path: Path) -> None:
    case, _ = _prepare(tmp_path, [ITALIAN, ITALIAN, ENGLISH])
    with pytest.raises(
        ConfigError, match=r"got 2 of 3 in languages without rules \(most of them: italian\); set"
    ):
        case.pack()
    assert not list(case.output.rglob("*.tar"))


class _Log(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    "texts", [[ITALIAN, ITALIAN, ENGLISH, MIXED], [ENGLISH, MIXED]], ids=["refused", "packed"]
)
def test_a_report_that_fails_does_not_hide_the_languages_of_others(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    detect_languages = detection.detect_languages

    def fail_for_one(text: str) -> detection.Detected:
        if "CONCLUSION" in text:
            raise RuntimeError
        return detect_languages(text)

    monkeypatch.setattr(detection, "detect_languages", fail_for_one)
    case, _ = _prepare(tmp_path, texts)
    log = _Log()
    if ITALIAN in texts:
        with pytest.raises(ConfigError, match="got 2 of 3 in languages without rules"):
            pack(case.config(), log)
        return
    assert pack(case.config(), log).inputs["packed"]
    assert "the languages of 1 of 2 reports could not be detected: the packing process failed" in log.notes
