"""A token classifier beside the rules, tiny and made here: its spans are added, nothing is taken away."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.packing.deid.known_values import KnownValues
from shardflow.packing.deid.report_text import TextModel, scrub
from shardflow.packing.settings import DeidConfig
from shardflow.reports.token_classifier import model_digest
from tests.tiny_classifier import save_classifier

_WORDS = {"quokka": 1}


def test_a_model_adds_spans_to_those_of_the_rules_in_any_window(tmp_path: Path) -> None:
    model = TextModel(save_classifier(tmp_path, {0: "O", 1: "B-PATIENT"}, _WORDS))
    text = "the small nodule . " * 30 + "the quokka is small, 03/14/2019."
    done = scrub(text, KnownValues(()), mode="scrub", recognize=model.find)
    assert done.text == "the small nodule . " * 30 + "the [NAME] is small, [DATE]."
    assert scrub(text, KnownValues(()), mode="scrub").text.endswith("the quokka is small, [DATE].")
    assert scrub(text, KnownValues(()), mode="keep", recognize=model.find).text == text


def test_a_model_that_cannot_serve_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        TextModel(tmp_path)
    unnamed = save_classifier(tmp_path / "unnamed", {0: "LABEL_0", 1: "LABEL_1"}, _WORDS)
    with pytest.raises(ConfigError, match="id2label"):
        TextModel(unnamed)


def test_the_weights_decide_the_settings_digest_and_no_model_leaves_it_alone(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, {0: "O", 1: "B-PATIENT"}, _WORDS)
    before = model_digest(folder, "deid.model")
    assert DeidConfig(model=folder).content()["model_sha256"] == before
    assert not {"model", "model_sha256"} & DeidConfig().content().keys()
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ", encoding="utf-8")
    assert model_digest(folder, "deid.model") != before
