"""Weights that are read to where they stay: equal to those that transformers reads, bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shardflow.errors import ConfigError
from shardflow.training.config import LoraConfig, ModelConfig
from shardflow.training.models.conversations import build_conversation_model
from shardflow.training.models.weights import hold_frozen, load_weights, weights_later
from tests.conversation_case import FAMILIES, IMAGE_FAMILIES, make_folder
from tests.sweeps import sampled
from tests.unit.training.test_conversations import first_inputs, make_run, settings

CPU = torch.device("cpu")


def stored(family: str, folder: Path) -> Any:
    """The model as transformers reads it."""
    kinds: Any = (
        transformers.AutoModelForImageTextToText
        if family in IMAGE_FAMILIES
        else transformers.AutoModelForCausalLM
    )
    return kinds.from_pretrained(str(folder), dtype=torch.float32)


def built(family: str, folder: Path, **named: Any) -> Any:
    """The model of a run."""
    tokens = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones((1, 3), dtype=torch.int64)}
    arguments = {"lora": LoraConfig(), "has_score": False, "is_packed": False, "seed": 3, **named}
    example = {"tokens": tokens, "pictures": {}}
    return build_conversation_model(ModelConfig(path=folder), example=example, **arguments)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, those that no file holds among them."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_equal(model: torch.nn.Module, wanted: torch.nn.Module) -> None:
    found, other = tensors_of(model), tensors_of(wanted)
    assert found.keys() == other.keys()
    for name, tensor in found.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("family", sampled(FAMILIES, {"llama", "gemma3", "qwen2_5_vl"}))
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_weights_are_those_that_transformers_reads(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Stored in half precision and in several files that an index names."""
    make_folder(family, tmp_path / "model")
    own = stored(family, tmp_path / "model").to(dtype)
    (tmp_path / "model" / "model.safetensors").unlink()
    own.save_pretrained(str(tmp_path / "model"), max_shard_size="40KB")
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 2
    with weights_later():
        model = built(family, tmp_path / "model")
    assert all(one.is_meta for one in model.parameters())
    load_weights(model, CPU)
    wanted = stored(family, tmp_path / "model")
    assert_equal(model.model, wanted)
    embedding, output = model.model.get_input_embeddings(), model.model.get_output_embeddings()
    assert (embedding.weight is output.weight) == (
        wanted.get_input_embeddings().weight is wanted.get_output_embeddings().weight
    )


def test_both_generations_of_names_are_known(tmp_path: Path) -> None:
    """Qwen2.5-VL as it was published, which is how it is saved, and as the model names its parts."""
    make_folder("qwen2_5_vl", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("visual.") for name in tensors)
    newer = {
        re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name)): one
        for name, one in tensors.items()
    }
    wanted = stored("qwen2_5_vl", tmp_path / "model")
    save_file(newer, file, metadata={"format": "pt"})
    with weights_later():
        model = built("qwen2_5_vl", tmp_path / "model")
    load_weights(model, CPU)
    assert_equal(model.model, wanted)


@pytest.mark.parametrize("family", sampled(FAMILIES, {"llava", "qwen2_5_vl", "gemma3"}))
def test_a_task_builds_the_same_model_with_and_without_its_weights(family: str, tmp_path: Path) -> None:
    """Adapters, parameters that take no part, the layer of scores: what is made before the weights come."""
    pytest.importorskip("peft")
    config = settings(make_run(tmp_path, family), "lora.rank=2")
    _, wanted, _, inputs = first_inputs(config)
    with weights_later():
        _, model, _, _ = first_inputs(config)
    trained = {name for name, one in wanted.named_parameters() if one.requires_grad}
    assert {name for name, one in model.named_parameters() if one.requires_grad} == trained
    load_weights(model, CPU)
    assert_equal(model, wanted)
    with torch.no_grad():
        assert torch.equal(inputs.forward(model), inputs.forward(wanted))


def test_a_model_of_scores_leaves_out_what_it_does_not_run(tmp_path: Path) -> None:
    make_folder("llama", tmp_path / "model")
    with weights_later():
        model = built("llama", tmp_path / "model", has_score=True)
    load_weights(model, CPU)
    assert_equal(model, built("llama", tmp_path / "model", has_score=True))


def test_frozen_weights_are_held_in_half_precision(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    make_folder("llama", tmp_path / "model")
    with weights_later():
        model = built("llama", tmp_path / "model", lora=LoraConfig(rank=2))
    hold_frozen(model, "bf16")
    load_weights(model, CPU)
    wanted = built("llama", tmp_path / "model", lora=LoraConfig(rank=2))
    for name, tensor in wanted.named_parameters():
        found = model.get_parameter(name)
        assert found.dtype == (torch.float32 if found.requires_grad else torch.bfloat16)
        assert torch.equal(found, tensor.to(found.dtype)), name


def test_weights_that_are_not_tied_after_all_are_read_by_transformers(tmp_path: Path) -> None:
    make_folder("qwen2", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = True
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with weights_later():
        model = built("qwen2", tmp_path / "model")
    load_weights(model, CPU)
    assert_equal(model.model, stored("qwen2", tmp_path / "model"))


def test_files_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    make_folder("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"

    def build() -> Any:
        with weights_later():
            model = built("llama", tmp_path / "model")
        load_weights(model, CPU)

    save_file({one: tensor for one, tensor in tensors.items() if one != name}, file)
    with pytest.raises(ConfigError, match=rf"lacks weights of its own model, {name}"):
        build()
    save_file({**tensors, name: tensors[name][:, 1:].contiguous()}, file)
    with pytest.raises(ConfigError, match=rf"holds {name} as"):
        build()
    save_file(tensors, file)
    with weights_later():
        model = built("llama", tmp_path / "model")
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 8)
    with pytest.raises(ConfigError, match=r"cannot be read \(EOFError in model\.safetensors\)"):
        load_weights(model, CPU)
