"""A token classifier beside the rules, tiny and made here: its spans are added, nothing is taken away."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from shardflow.errors import ConfigError
from shardflow.packing.deid.known_values import KnownValues
from shardflow.packing.deid.report_text import scrub
from shardflow.packing.deid.text_model import TextModel, model_digest
from shardflow.packing.settings import DeidConfig

_WORDS = ["[UNK]", "[PAD]", "the", "nodule", "quokka", "is", "small", "."]


def _save(folder: Path, labels: dict[int, str]) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(
        str(folder)
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(_WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=16, id2label=labels, label2id={name: at for at, name in labels.items()},
    )  # fmt: skip
    model = BertForTokenClassification(config)
    with torch.no_grad():  # the word decides: quokka is a name, all else is none
        model.bert.encoder.layer[0].output.dense.weight.zero_()
        model.bert.encoder.layer[0].attention.output.dense.weight.zero_()
        model.bert.embeddings.position_embeddings.weight.zero_()
        model.bert.embeddings.token_type_embeddings.weight.zero_()
        words = model.bert.embeddings.word_embeddings.weight
        words.zero_()
        words[:, 0] = 1.0
        words[_WORDS.index("quokka"), 0], words[_WORDS.index("quokka"), 1] = 0.0, 1.0
        model.classifier.weight.zero_()
        model.classifier.bias.zero_()
        model.classifier.weight[0, 0] = model.classifier.weight[1, 1] = 1.0
    model.save_pretrained(str(folder))
    return folder


def test_a_model_adds_spans_to_those_of_the_rules_in_any_window(tmp_path: Path) -> None:
    model = TextModel(_save(tmp_path, {0: "O", 1: "B-PATIENT"}))
    text = "the small nodule . " * 30 + "the quokka is small, 03/14/2019."
    done = scrub(text, KnownValues(()), mode="scrub", recognize=model.find)
    assert done.text == "the small nodule . " * 30 + "the [NAME] is small, [DATE]."
    assert scrub(text, KnownValues(()), mode="scrub").text.endswith("the quokka is small, [DATE].")
    assert scrub(text, KnownValues(()), mode="keep", recognize=model.find).text == text


def test_a_model_that_cannot_serve_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        TextModel(tmp_path)
    unnamed = _save(tmp_path / "unnamed", {0: "LABEL_0", 1: "LABEL_1"})
    with pytest.raises(ConfigError, match="id2label"):
        TextModel(unnamed)


def test_the_weights_decide_the_settings_digest_and_no_model_leaves_it_alone(tmp_path: Path) -> None:
    folder = _save(tmp_path, {0: "O", 1: "B-PATIENT"})
    before = model_digest(folder)
    assert DeidConfig(model=folder).content()["model_sha256"] == before
    assert not {"model", "model_sha256"} & DeidConfig().content().keys()
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ", encoding="utf-8")
    assert model_digest(folder) != before
