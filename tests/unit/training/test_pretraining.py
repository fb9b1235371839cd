"""Pretraining on documents: every token is learned, in packed sequences, and a stop costs nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from shardflow.config import load_config
from shardflow.errors import ConfigError
from shardflow.loading.sample import open_dataset
from shardflow.packing.corpora import CorpusConfig, pack_corpus
from shardflow.training.run import train
from shardflow.training.tokenizing import count_dataset
from tests.conversation_case import generate, make_folder, write_conversations
from tests.distributed.runs import committed_samples, differing_weights
from tests.unit.training.test_conversations import TEMPLATE, first_inputs, leave, settings

CORPUS = """
output = "dataset"
private_dir = "private"
[inputs]
files = ["texts.jsonl"]
[fields]
kind = "conversations"
[deid]
text = "keep"
[splits]
parts = { train = 3, val = 1 }
"""
PACKED = 'batch={max_tokens = 400, packed = true, micro_batches_per_step = 2, tail = "mask", lanes = 1}'


def pack_texts(folder: Path, num: int = 40) -> Path:
    """A corpus of texts, packed by the job, and the settings of a run of four steps."""
    lines = [
        {"text": f"Report {number}. " + "The lungs are clear, no effusion. " * (1 + number % 7)}
        for number in range(num)
    ]
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")
    (folder / "corpus.toml").write_text(CORPUS, encoding="utf-8")
    pack_corpus(load_config(CorpusConfig, folder / "corpus.toml"))
    text = TEMPLATE.format(task="pretrain", pairs="false")
    (folder / "train.toml").write_text(text, encoding="utf-8")
    return folder / "train.toml"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of a run on packed texts, whose tokens are counted."""
    folder = tmp_path_factory.mktemp("corpus")
    make_folder("llama", folder / "model")
    config = pack_texts(folder)
    count_dataset(open_dataset(folder / "dataset"), folder / "model")
    return config


def test_packed_texts_are_trained_and_a_stop_costs_nothing(corpus: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    whole = train(settings(corpus, PACKED, f"run.output={run}"))
    leave()
    assert whole.evaluation_scores.keys() == {"token_accuracy"}
    train(settings(corpus, PACKED, f"run.output={other}", "run.max_steps=2"))
    leave()
    assert train(settings(corpus, PACKED, f"run.output={other}")).resumed_from == "step-00000002"
    leave()
    assert committed_samples(other) == committed_samples(run)
    assert differing_weights(other, run) == []


def test_the_loss_counts_every_token_but_the_first(corpus: Path) -> None:
    config, folder = settings(corpus), corpus.parent
    _, model, batch, inputs = first_inputs(config)
    own = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "model"), dtype=torch.float32).eval()
    ids, mask = (
        torch.from_numpy(np.array(batch[name])).long() for name in ("conversation", "conversation_mask")
    )
    total = torch.zeros(())
    with torch.no_grad():
        for row, length in zip(ids, mask.sum(dim=1).tolist(), strict=True):
            logits = own(row[None, :length]).logits[0]
            total += functional.cross_entropy(logits[:-1], row[1:length], reduction="sum")
        found = inputs.loss(inputs.forward(model))
    torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-5)
    assert inputs.num_tokens == float((mask.sum(dim=1) - 1).sum())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_conversations_are_learned_whole_but_for_pictures(family: str, tmp_path: Path) -> None:
    """Those with markers of generation in their template, and those without; weights of messages are kept."""
    processor = make_folder(family, tmp_path / "model")
    tokenizer: Any = getattr(processor, "tokenizer", processor)
    found = generate(12, 5, max_images=2 if family == "gemma3" else 0)
    for document, _ in found:
        for message in document["messages"]:
            message.pop("weight", None)
    found[0][0]["messages"][-1]["weight"] = 0.0
    write_conversations(tmp_path / "dataset", found, splits={"train": 1})
    text = TEMPLATE.format(task="pretrain", pairs="false").replace('eval_split = "val"', "")
    (tmp_path / "train.toml").write_text(text, encoding="utf-8")
    config = settings(tmp_path / "train.toml", "batch.micro_batch_size=12", "batch.micro_batches_per_step=1")
    _, _, batch, _ = first_inputs(config)
    picture = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    for slot, key in enumerate(batch.info.sample_keys):
        is_token = batch["conversation_mask"][slot] > 0
        weights, ids = batch["conversation_weights"][slot][is_token], batch["conversation"][slot][is_token]
        is_picture = (ids == picture) & (family == "gemma3")
        if key == "talk0000":
            left_out = tokenizer.decode(ids[(weights == 0) & ~is_picture])
            answer = found[0][0]["messages"][-1]["content"][0]["text"].strip()
            assert answer in left_out
            continue
        left_out = tokenizer.decode(ids[weights == 0])
        for mark in ("<start_of_image>", "<image_soft_token>", "<end_of_image>"):
            left_out = left_out.replace(mark, "")
        assert not left_out.strip()
        assert {*weights.tolist()} <= {0.0, 1.0}
        assert not weights[is_picture].any()


def test_the_first_sample_is_shown_in_a_private_file_where_it_is_asked_for(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    caplog.set_level(logging.DEBUG)
    train(settings(corpus, "run.max_steps=1", f"run.output={run}"))
    leave()
    assert not (run / "first_sample.txt").exists()
    train(settings(corpus, "run.max_steps=1", "monitor.first_sample=true", f"run.output={other}"))
    leave()
    path = other / "first_sample.txt"
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text(encoding="utf-8")
    assert "⟦<|begin|>Report " in text
    assert text.rstrip().endswith("<|eot_id|>⟧")
    assert "the first sample is in first_sample.txt: 0 pictures and" in caplog.text
    for folder in (run, other):
        for file in folder.rglob("*"):
            is_text = file.is_file() and file.suffix not in {".safetensors", ".txt"}
            assert not (is_text and b"lungs" in file.read_bytes()), file.name
    assert "lungs" not in caplog.text


def test_settings_without_an_effect_are_refused(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="learns every token"):
        settings(corpus, 'fields.conversation.train_on=["user"]')
    with pytest.raises(ConfigError, match="takes single conversations"):
        settings(corpus, "fields.conversation.pairs=true")
