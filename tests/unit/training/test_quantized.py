"""Adapters beside weights of 4 bits: the numbers are NF4, only adapters change, and a resume is exact."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

from shardflow.errors import ConfigError
from shardflow.training.jobs.memory import plan_memory
from shardflow.training.models.weights import QuantizedLinear, hold_frozen, load_weights, weights_later
from shardflow.training.run import train
from tests.distributed.runs import committed_samples, differing_weights
from tests.sweeps import sampled
from tests.unit.training.test_conversations import first_inputs, leave, make_run, settings

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
QLORA = ("lora.rank=2", "model.quantize=nf4")
LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)
"""Of the paper, appendix E."""


def read_back(weight: torch.Tensor) -> torch.Tensor:
    """The weights as NF4 keeps them: the nearest level of each, times the largest of its block."""
    blocks = weight.detach().reshape(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    nearest = ((blocks / scale)[..., None] - LEVELS).abs().argmin(dim=-1)
    return (LEVELS[nearest] * scale).reshape(weight.shape)


@pytest.mark.parametrize("family", sampled(["llama", "qwen2_5_vl", "gemma3"], {"qwen2_5_vl"}))
def test_the_model_computes_with_the_nearest_levels(family: str, tmp_path: Path) -> None:
    _, model, _, inputs = first_inputs(settings(make_run(tmp_path, family), "lora.rank=2"))
    wanted = copy.deepcopy(model)
    hold_frozen(model, "fp32", "nf4")
    quantized = {name for name, one in model.named_modules() if isinstance(one, QuantizedLinear)}
    assert len(quantized) > 10
    with torch.no_grad():
        for name, module in wanted.named_modules():
            if name in quantized:
                module.get_parameter("weight").copy_(read_back(module.get_parameter("weight")))
    found, expected = (inputs.loss(inputs.forward(one)) for one in (model, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.backward()
    expected.backward()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert all("lora_" in name for name in trained)
    for name, one in trained.items():
        torch.testing.assert_close(one.grad, wanted.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)


def test_layers_are_read_one_by_one_as_whole_models_are(tmp_path: Path) -> None:
    config = settings(make_run(tmp_path, "qwen2"), "lora.rank=2")
    _, wanted, _, _ = first_inputs(config)
    with weights_later():
        _, model, _, _ = first_inputs(config)
    for one in (wanted, model):
        hold_frozen(one, "fp32", "nf4")
    load_weights(model, torch.device("cpu"))
    assert not [name for name, one in [*model.named_parameters(), *model.named_buffers()] if one.is_meta]
    for name, buffer in wanted.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name


@pytest.mark.parametrize("task", sampled(["sft", "dpo"], {"sft"}))
def test_a_stopped_run_goes_on_as_if_nothing_had_been(task: str, tmp_path: Path) -> None:
    config, other = make_run(tmp_path, "qwen2", task), tmp_path / "other"
    assert train(settings(config, *QLORA)).outcome == "finished"
    leave()
    train(settings(config, *QLORA, f"run.output={other}", "run.max_steps=2"))
    leave()
    assert train(settings(config, *QLORA, f"run.output={other}")).resumed_from == "step-00000002"
    leave()
    assert committed_samples(other) == committed_samples(tmp_path / "run")
    assert differing_weights(other, tmp_path / "run") == []


def test_the_memory_plan_knows_it(tmp_path: Path) -> None:
    config = settings(make_run(tmp_path, "qwen2"), *QLORA)
    (plan,) = plan_memory(config, [1])
    _, model, _, _ = first_inputs(config)
    hold_frozen(model, "fp32", "nf4")
    assert plan.weights_bytes == sum(one.nbytes for one in [*model.parameters(), *model.buffers()])


def test_it_is_refused_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(tmp_path, "qwen2")
    with pytest.raises(ConfigError, match="which is 0; set a rank"):
        settings(config, "model.quantize=nf4")
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ConfigError, match=r"install shardflow\[qlora\]"):
        train(settings(config, *QLORA))
    leave()
