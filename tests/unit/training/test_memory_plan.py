"""The memory plan: to the byte what real ranks hold and what autograd saves, without a weight in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardflow.cli.main import main
from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError
from shardflow.training.config import TrainConfig
from shardflow.training.data import sample_inputs
from shardflow.training.distributed import blocks_of, local_part
from shardflow.training.jobs.memory import _outermost, _SavedBytes, plan_memory
from shardflow.training.run import open_task
from shardflow.training.step import WeightAverage, build_optimizer, compute_loss
from tests.conversation_case import make_folder
from tests.sweeps import sampled
from tests.tiny_models import make_encoder_decoder, make_llava, model_of
from tests.tiny_runs import TinyInput, tiny_config

SWITCH = "model.activation_checkpointing"
MAKERS = {"llava": make_llava, "encoder-decoder": make_encoder_decoder}


@pytest.fixture(params=["reference", *MAKERS])
def settings(request: pytest.FixtureRequest, tiny: TinyInput, tmp_path: Path) -> tuple[str, ...]:
    if request.param == "reference":
        return ("model.dropout=0",)
    folder = MAKERS[request.param](tmp_path / "model", tiny.tokenizer)
    return (f"model.path={folder}", f"text.tokenizer={folder}")


class DropsInKernels(TorchFunctionMode):
    """Attention without dropout, for which the CPU, unlike GPUs, has no fused kernel."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
        return function(*args, **(kwargs or {}))


def test_whole_models_hold_what_is_planned(
    tiny: TinyInput, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    config = tiny_config(tiny, tmp_path / "run", *settings, "optimizer.ema_decay=0.9")
    (plan,) = plan_memory(config, [4])
    model, _ = model_of(config)
    inputs = sample_inputs(
        config.image_field,
        config.image,
        config.augment,
        torch.device("cpu"),
        packed=False,
        num_tokens=config.text.max_tokens,
        is_full=True,
    )
    counter = _SavedBytes(model, item_bytes=4)
    with counter.counting([]), DropsInKernels():
        loss = compute_loss(model, inputs, None)
    assert plan.activations_bytes == counter.peak_bytes
    torch.autograd.backward(loss)
    optimizer = build_optimizer(model, config.optimizer)
    optimizer.step()
    WeightAverage(optimizer, 0.9).update()
    assert plan.weights_bytes == sum(one.nbytes for one in [*model.parameters(), *model.buffers()])
    assert plan.gradients_bytes == sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert plan.optimizer_bytes == sum(value.nbytes for value in states)
    assert plan.copies_bytes == 0
    assert json.loads(json.dumps(plan.to_json()))["total_bytes"] == plan.total_bytes


@pytest.fixture
def eight_ranks() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def test_shares_are_those_of_fsdp(
    tiny: TinyInput, tmp_path: Path, settings: tuple[str, ...], eight_ranks: Any
) -> None:
    config = tiny_config(tiny, tmp_path / "run", *settings, "parallel.strategy=fsdp2", "run.precision=bf16")
    (plan,) = plan_memory(config, [8])
    model, _ = model_of(config)
    sizes = {id(block): sum(one.numel() for one in block.parameters()) for block in blocks_of(model)}
    whole = sum(one.numel() for one in model.parameters())
    for block in blocks_of(model):
        fully_shard(block, mesh=eight_ranks)
    fully_shard(model, mesh=eight_ranks)
    shares = [local_part(one).numel() for one in model.parameters()]
    trained = [local_part(one).numel() for one in model.parameters() if one.requires_grad]
    assert plan.weights_bytes == 4 * sum(shares) + sum(one.nbytes for one in model.buffers())
    assert plan.optimizer_bytes == 2 * 4 * sum(trained)
    assert plan.gradients_bytes == 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert plan.copies_bytes == 2 * (whole - sum(sizes.values()) + sum(sorted(sizes.values())[-2:]))


CONVERSATIONS = """
[data]
dataset = "none"
[batch]
{batch}
micro_batches_per_step = 64
[task]
type = "{task}"
[fields.conversation]
type = "conversation"
processor = "model"
max_tokens = {length}
pairs = {pairs}
[model]
path = "model"
{model}
[run]
output = "run"
precision = "{precision}"
[parallel]
strategy = "{strategy}"
accumulation = "{accumulation}"
"""


def conversations(folder: Path, task: str, **changes: Any) -> TrainConfig:
    """Settings of a run on conversations, for a folder with a model."""
    values: dict[str, Any] = {
        "batch": "micro_batch_size = 2",
        "length": 300,
        "precision": "fp32",
        "strategy": "ddp",
        "accumulation": "whole",
        "model": "",
    }
    text = CONVERSATIONS.format(task=task, pairs=str(task == "dpo").lower(), **(values | changes))
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return load_config(TrainConfig, folder / "run.toml")


@pytest.mark.parametrize(
    ("family", "task", "is_packed"),
    sampled(
        [
            ("llama", "dpo", False),
            ("qwen2_5_vl", "sft", False),
            ("gemma3", "sft", False),
            ("llava", "dpo", False),
            ("gemma3", "sft", True),
            ("gemma3", "dpo", True),
            ("qwen2_5_vl", "sft", True),
            ("qwen2", "reward", True),
        ],
        {("qwen2_5_vl", "sft", False), ("llama", "dpo", False), ("gemma3", "sft", True)},
    ),
)
@pytest.mark.parametrize("is_recomputed", sampled([False, True], {False}))
def test_models_of_conversations_hold_what_is_planned(
    family: str, task: str, is_packed: bool, is_recomputed: bool, tmp_path: Path
) -> None:
    make_folder(family, tmp_path / "model")
    batch = "max_tokens = 600\npacked = true\nmax_samples = 2" if is_packed else "micro_batch_size = 2"
    config = conversations(
        tmp_path, task, batch=batch, model=f"activation_checkpointing = {str(is_recomputed).lower()}"
    )
    (plan,) = plan_memory(config, [4])
    made: Any = open_task(replace(config, model=replace(config.model, activation_checkpointing=False)))
    model = made.build_model(None)
    inputs = made.largest_inputs()
    tensors = {
        name: torch.zeros(one.shape) + 0.1 if one.is_meta else one for name, one in inputs.tensors.items()
    }
    ids = tensors["tokens.input_ids"]
    num_rows = 2 * (1 + (task == "dpo"))
    assert ids.shape == ((1, 600) if is_packed else (num_rows, 300))
    if family not in {"llama", "qwen2"}:  # pictures have most of the tokens
        assert (ids == model.model.config.image_token_id).sum() > 0.3 * ids.numel()
    inputs = replace(inputs, tensors=tensors)
    counter = _SavedBytes(model, item_bytes=4)
    with counter.counting(_outermost(blocks_of(model)) if is_recomputed else []):
        loss = inputs.loss(inputs.forward(model))
    # Rows of ids and places differ on a device. Masks of all pairs of tokens are most of a packed row here.
    assert plan.activations_bytes == pytest.approx(counter.peak_bytes, rel=0.01)
    torch.autograd.backward(loss)
    held = [one for each in (model, *made.references) for one in [*each.parameters(), *each.buffers()]]
    assert plan.weights_bytes == sum(one.nbytes for one in held)
    assert plan.gradients_bytes == sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)


SIZES = {
    "8": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "32": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
    },
}


@pytest.mark.parametrize("size", sampled(["8", "32"], {"8"}))
def test_models_of_8_and_32_billion_parameters_are_planned(size: str, tmp_path: Path) -> None:
    """No weight of them exists; docs/training.md has the figures."""
    make_folder("qwen2", tmp_path / "model")
    own = {"vocab_size": 152064 if size == "32" else 128256, "num_key_value_heads": 8}
    qwen = transformers.Qwen2Config(**SIZES[size], **own)
    (tmp_path / "model" / "config.json").write_text(qwen.to_json_string(), encoding="utf-8")
    (tmp_path / "model" / "model.safetensors").unlink()
    config = conversations(
        tmp_path,
        "sft",
        batch="max_tokens = 8192\npacked = true",
        length=8192,
        precision="bf16",
        strategy="fsdp2",
        accumulation="sharded",
        model="activation_checkpointing = true",
    )
    few, many = plan_memory(config, [8, 64])
    assert few.weights_bytes == pytest.approx(float(size) * 1e9 * 4 / 8, rel=0.03)
    assert few.weights_bytes == pytest.approx(8 * many.weights_bytes, rel=0.001)
    page = (Path(__file__).resolve().parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    assert f"| {size}B | {few.total_bytes / 1e9:.1f} | {many.total_bytes / 1e9:.1f} |" in page


def test_recomputed_layers_keep_less(tiny: TinyInput, tmp_path: Path) -> None:
    sizes = ("model.language_layers=6", "model.vision_layers=6")
    settings = [(*sizes, f"{SWITCH}={is_on}") for is_on in ("false", "true")]
    (kept,), (recomputed,) = (plan_memory(tiny_config(tiny, tmp_path / "run", *one), [1]) for one in settings)
    assert recomputed.activations_bytes < kept.activations_bytes / 2
    assert recomputed.weights_bytes == kept.weights_bytes


def test_a_model_that_no_machine_here_holds_is_planned(
    tiny: TinyInput, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of 8 B parameters in the language part alone, by the command."""
    large = ("model.language=llama", "model.language_width=4096", "model.language_layers=40")
    settings = (*large, "model.language_heads=32", "parallel.strategy=fsdp2", "parallel.accumulation=sharded")
    config = tiny_config(tiny, tmp_path / "run", *settings, "run.precision=bf16")
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert main(["train", f"--config={path}", "--plan-memory=8,64"]) == 0
    few, many = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert few["weights_bytes"] > 4e9
    for part in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert few[part] == pytest.approx(8 * many[part], rel=0.001)
    assert few["activations_bytes"] == many["activations_bytes"]


def test_what_cannot_be_planned_is_refused(tiny: TinyInput, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run")
    with pytest.raises(ConfigError, match="a token budget"):
        plan_memory(replace(config, batch=replace(config.batch, micro_batch_size=None, max_tokens=100)), [1])
    assert main(["train", "--config=none.toml", "--plan-memory=8,x"]) == 2
