"""Findings of a model beside those of the rules: a tiny token classifier, made here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from shardflow.errors import ConfigError
from shardflow.packing.settings import ReportsConfig
from shardflow.packing.studies.report_content import ReportParser, reading_basis, reading_setup
from shardflow.reports import ReportReader
from shardflow.reports.alignment.evidence import AlignmentRules
from shardflow.reports.lexicon import load_lexicon
from shardflow.reports.model_extractor import ModelExtractor
from shardflow.reports.token_classifier import TokenClassifier, model_digest
from tests.tiny_classifier import save_classifier

LABELS = {0: "O", 1: "B-nodule", 2: "I-nodule", 3: "mass:absent", 4: "OBS-U", 5: "ANAT-DP"}
WORDS = {"zorb": 1, "lump": 2, "Quux": 3, "fuzz": 4, "lung": 5}


def _read(model: ModelExtractor, text: str) -> list[tuple[str, str, str, str]]:
    found = ReportReader(extractors=[("model", model)]).read(text).entities
    return [(text[slice(*one.span)], one.concept, one.assertion, one.source) for one in found]


def test_a_model_names_what_the_rules_judge(tmp_path: Path) -> None:
    model = ModelExtractor(save_classifier(tmp_path, LABELS, WORDS))
    text = "FINDINGS: No zorb lump in the lung. A 9 mm zorb on the left. Effusion. Quux. Fuzz fuzz."
    assert _read(model, text) == [
        ("zorb lump", "pulmonary nodule", "absent", "model"),
        ("zorb", "nodule", "present", "model"),
        ("Effusion", "pleural effusion", "present", "lexicon"),
        ("Quux", "mass", "absent", "model"),
        ("fuzz", "abnormality", "uncertain", "model"),
    ]
    found = ReportReader(extractors=[("model", model)]).read("FINDINGS: A 9 mm zorb on the left.").entities
    assert [(one.laterality, one.size_mm, one.section) for one in found] == [("L", (9.0,), "findings")]


def test_a_name_without_rules_to_judge_it_is_left_out(tmp_path: Path) -> None:
    model = ModelExtractor(save_classifier(tmp_path, LABELS, WORDS))
    assert _read(model, "Geen zorb. Niet Quux aanwezig.") == [("Quux", "mass", "absent", "model")]
    assert _read(model, "Kein zorb links. Ohne zorb.") == [
        ("zorb", "nodule", "absent", "model"),
        ("zorb", "nodule", "absent", "model"),
    ]


def test_batches_of_reports_give_what_single_reports_give(tmp_path: Path) -> None:
    texts = ["A zorb here.", "", "No zorb. " * 40 + "Quux.", "Nothing at all.", "A zorb there."]
    folder = save_classifier(tmp_path, LABELS, WORDS)
    single = ModelExtractor(folder, batch_size=1)
    expected = [single([text])[0] for text in texts]
    for batch_size in (1, 3, 64):
        assert ModelExtractor(folder, batch_size=batch_size)(texts) == expected
    assert [len(one) for one in expected] == [1, 0, 41, 0, 1]


def test_what_was_found_before_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_classifier(tmp_path / "model", LABELS, WORDS)
    asked: list[str] = []
    find = TokenClassifier.find

    def counted(self: TokenClassifier, texts: Any, **options: Any) -> Any:
        asked.extend(texts)
        return find(self, texts, **options)

    monkeypatch.setattr(TokenClassifier, "find", counted)
    model = ModelExtractor(folder, cache=tmp_path / "cache")
    first = model(["A zorb.", "Clear."])
    assert ModelExtractor(folder, cache=tmp_path / "cache")(["A zorb.", "Clear.", "New zorb."])[:2] == first
    assert asked == ["A zorb.", "Clear.", "New zorb."]
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(kept) == 3
    assert not any(b"zorb" in path.read_bytes() for path in kept)
    kept[0].write_text("{", encoding="utf-8")  # a damaged file is made again
    assert ModelExtractor(folder, cache=tmp_path / "cache")(["A zorb.", "Clear."]) == first
    save_classifier(folder, LABELS, {**WORDS, "Clear": 1})
    assert len(ModelExtractor(folder, cache=tmp_path / "cache")(["Clear."])[0]) == 1


def test_labels_and_devices_that_cannot_serve_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, {0: "O", 1: "PATIENT"}, {"zorb": 1})
    with pytest.raises(
        ConfigError, match=r"'PATIENT', which is no finding of the lexicon; rename it in id2label"
    ):
        ModelExtractor(folder)
    with pytest.raises(ConfigError, match=r"'nodule:maybe'"):
        ModelExtractor(save_classifier(tmp_path / "b", {0: "O", 1: "nodule:maybe"}, {"zorb": 1}))
    with pytest.raises(ConfigError, match=r"reports\.model cannot be moved to the device"):
        ModelExtractor(save_classifier(tmp_path / "c", LABELS, WORDS), device="nowhere")
    with pytest.raises(ConfigError, match=r"reports\.model must be a readable folder"):
        ModelExtractor(tmp_path / "none")


def _cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def _drop_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in weights.items() if not name.startswith("classifier")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _drop_labels(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["id2label"], config["label2id"] = {"0": "O", "1": "nodule"}, {"O": 0, "nodule": 1}
    (folder / "config.json").write_text(json.dumps(config))


def _drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut_weights, r"cannot be loaded as a token classifier \(SafetensorError\)"),
        (_drop_labels, r"cannot be loaded as a token classifier \(RuntimeError\)"),
        (_drop_head, r"lacks weights of a token classifier, 2 in all"),
        (_drop_tokenizer, r"has no tokenizer"),
    ],
)
def test_a_folder_that_holds_only_some_of_a_model_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(save_classifier(tmp_path, LABELS, WORDS))
    with pytest.raises(ConfigError, match=rf"reports\.model {message}"):
        ModelExtractor(tmp_path)


def test_words_without_a_name_have_that_of_a_table_of_ones_own(tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text("name,kind,parent,synonyms\nzorblax,finding,,fuzz\n", encoding="utf-8")
    folder = save_classifier(tmp_path / "model", LABELS, WORDS)
    model = ModelExtractor(folder, lexicon_of=lambda language: load_lexicon([table], language=language))
    for text in ("There is fuzz in the lung.", "BEFUND: Es zeigt sich fuzz in der Lunge."):
        assert [one.concept for one in model([text])[0]] == ["zorblax"], text


def test_the_model_decides_what_a_dataset_holds_and_its_device_does_not(tmp_path: Path) -> None:
    folder, rules = save_classifier(tmp_path, LABELS, WORDS), AlignmentRules()
    config = ReportsConfig(model=folder)
    content = config.content()
    assert content is not None
    assert content["model_sha256"] == model_digest(folder, "reports.model")
    assert ReportsConfig().content() is None
    assert ReportsConfig(model_device="cuda", model_cache=tmp_path).content() is None
    assert "model_sha256" not in (ReportsConfig(extract=False, align=False).content() or {})
    assert reading_basis(config, rules) != reading_basis(ReportsConfig(), rules)
    setup = reading_setup(config, rules)
    assert setup is not None
    read = ReportParser(setup).read("FINDINGS: No zorb.")
    assert [(one["concept"], one["assertion"], one["source"]) for one in read["entities"]] == [
        ("nodule", "absent", "model")
    ]
    save_classifier(folder, LABELS, {**WORDS, "Clear": 1})
    with pytest.raises(ConfigError, match="must not change while a job runs"):
        ReportParser(setup).check()
