"""Conversations train a model that a user's function returns, as docs/howto/conversations.md says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from shardflow.errors import ConfigError
from shardflow.loading.sample import open_dataset
from shardflow.training.jobs.memory import plan_memory
from shardflow.training.run import train
from shardflow.training.tokenizing import count_dataset
from tests.distributed.runs import committed_samples, differing_weights
from tests.sweeps import sampled
from tests.unit.training.test_conversations import first_inputs, leave, make_run, settings, tokens_of

PACKED = 'batch={max_tokens = 800, packed = true, micro_batches_per_step = 2, tail = "mask", lanes = 1}'


def target(name: str) -> str:
    return f'model={{target = "tests.tiny_talker:{name}", arguments = {{width = 24}}}}'


def test_the_loss_is_that_of_the_logits(tmp_path: Path) -> None:
    config = settings(make_run(tmp_path, "qwen2"), target("Talker"))
    _, model, batch, inputs = first_inputs(config)
    tokens = tokens_of(batch)
    weights = torch.from_numpy(np.array(batch["conversation_weights"]))
    with torch.no_grad():
        logits = model.model(**tokens)
        losses = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens["input_ids"][:, 1:].flatten(), reduction="none"
        )
        wanted = (losses * weights[:, 1:].flatten()).sum()
        torch.testing.assert_close(inputs.loss(inputs.forward(model)), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("task", "name"),
    sampled(
        [("sft", "Talker"), ("dpo", "Talker"), ("reward", "make_score"), ("score", "make_score")],
        {("dpo", "Talker"), ("reward", "make_score")},
    ),
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(task: str, name: str, tmp_path: Path) -> None:
    config, other = make_run(tmp_path, "qwen2", task), tmp_path / "other"
    assert train(settings(config, target(name))).outcome == "finished"
    leave()
    train(settings(config, target(name), f"run.output={other}", "run.max_steps=2"))
    leave()
    again = train(settings(config, target(name), f"run.output={other}"))
    leave()
    assert again.resumed_from == "step-00000002"
    assert committed_samples(other) == committed_samples(tmp_path / "run")
    assert differing_weights(other, tmp_path / "run") == []


def test_a_score_is_that_of_the_last_token(tmp_path: Path) -> None:
    _, model, batch, inputs = first_inputs(
        settings(make_run(tmp_path, "qwen2", "reward"), target("make_score"))
    )
    tokens = tokens_of(batch)
    with torch.no_grad():
        scores = inputs.forward(model)
        every = model.model(**tokens)
    last = tokens["attention_mask"].sum(dim=1) - 1
    assert torch.equal(scores, every[torch.arange(len(last)), last, 0])


@pytest.mark.parametrize(
    ("task", "name", "said"),
    [
        ("sft", "make_flat", r"must return logits \(N, T, V\) for input_ids .*, got a tensor"),
        ("sft", "make_mute", r"got neither a tensor nor one as \.logits"),
        ("reward", "Talker", r"must return scores \(N, T, 1\)"),
        ("sft", "make_deaf", r"does not take what the processor returns .*input_ids, attention_mask"),
    ],
)
def test_a_model_that_breaks_the_protocol_is_refused_in_a_sentence(
    task: str, name: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        first_inputs(settings(make_run(tmp_path, "qwen2", task), target(name)))


def test_packed_rows_go_to_a_model_that_says_that_it_takes_them(tmp_path: Path) -> None:
    config = make_run(tmp_path, "qwen2")
    count_dataset(open_dataset(tmp_path / "dataset"), tmp_path / "model")
    with pytest.raises(ConfigError, match="set its attribute takes_packed to True"):
        first_inputs(settings(config, target("Talker"), PACKED))
    _, model, batch, inputs = first_inputs(settings(config, target("PackedTalker"), PACKED))
    assert len(batch["conversation_cu_seqlens"]) > 2
    with torch.no_grad():
        found = inputs.forward(model)
        for start, stop in pairwise(batch["conversation_cu_seqlens"].tolist()):
            alone = model.model(torch.from_numpy(np.array(batch["conversation"]))[:, start:stop])
            torch.testing.assert_close(found[:, start:stop], alone)


def test_pictures_go_to_a_model_that_has_features_for_them(tmp_path: Path) -> None:
    config = make_run(tmp_path, "llava")
    with pytest.raises(ConfigError, match=r"that of model\.target takes text alone"):
        first_inputs(settings(config, target("Talker")))
    _, model, _, inputs = first_inputs(settings(config, target("SeeingTalker"), "batch.micro_batch_size=7"))
    assert "pictures.pixel_values" in inputs.tensors
    inputs.loss(inputs.forward(model)).backward()
    assert model.model.look.weight.grad.any()


def test_adapters_and_the_memory_plan_take_it(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = make_run(tmp_path, "qwen2", "dpo")
    whole = settings(config, target("Talker"))
    (plan,) = plan_memory(whole, [1])
    size = sum(one.numel() for one in first_inputs(whole)[1].parameters())
    assert (plan.weights_bytes, plan.gradients_bytes) == (2 * 4 * size, 4 * size), (
        "the reference has weights too"
    )
    _, model, _, _ = first_inputs(settings(config, target("Talker"), "lora.rank=2", 'lora.targets=["mix"]'))
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert trained == ["model.mix.lora_A.default.weight", "model.mix.lora_B.default.weight"]


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    config = make_run(tmp_path, "qwen2")
    with pytest.raises(ConfigError, match="got both; name one of them"):
        settings(config, "model.target=tests.tiny_talker:Talker")
    with pytest.raises(ConfigError, match="got neither"):
        settings(config, "model={}")
    recomputed = settings(config, target("Talker").replace("}}", "}, activation_checkpointing = true}"))
    with pytest.raises(ConfigError, match=r"activation_checkpointing_enable\(\) of the model"):
        first_inputs(recomputed)
