"""Tasks of conversations: losses written out, any family, a stop and a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from shardflow.config import load_config
from shardflow.errors import ConfigError, StateError
from shardflow.loading import Loader
from shardflow.loading.rows.selection import select
from shardflow.loading.sample import open_dataset
from shardflow.training.checkpoint.files import Checkpoint
from shardflow.training.checkpoint.tensors import PiecewiseTensors
from shardflow.training.config import TrainConfig
from shardflow.training.distributed import blocks_of
from shardflow.training.jobs.reference_columns import store_reference
from shardflow.training.run import check_bindings, open_task, train
from tests import conversation_case
from tests.conversation_case import FAMILIES, IMAGE_FAMILIES, generate, make_folder, write_conversations
from tests.distributed.runs import committed_samples, differing_weights
from tests.sweeps import sampled

TEMPLATE = """
[data]
dataset = "dataset"
eval_split = "val"
[batch]
micro_batch_size = 2
micro_batches_per_step = 2
[task]
type = "{task}"
[fields.conversation]
type = "conversation"
processor = "model"
max_tokens = 400
pairs = {pairs}
[model]
path = "model"
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
[run]
output = "run"
seed = 3
max_steps = 4
checkpoint_every_steps = 2
device = "cpu"
tensorboard = false
"""


def make_run(folder: Path, family: str, task: str = "sft", *, num: int = 16) -> Path:
    """A model, conversations, pairs or scores, and the settings of a run of four steps."""
    make_folder(family, folder / "model")
    most = 2 if family in IMAGE_FAMILIES else 0
    has_pairs = task not in ("sft", "score")
    found = generate(num, 21, max_images=most, pairs=has_pairs)
    if task == "score":
        task = "reward"
        scores = [{"kind": "reward", "score": number / 4 - 1} for number in range(num)]
        found = [({**one, **score}, pictures) for (one, pictures), score in zip(found, scores, strict=True)]
    write_conversations(folder / "dataset", found, splits={"train": 3, "val": 1})
    text = TEMPLATE.format(task=task, pairs=str(has_pairs).lower())
    (folder / "train.toml").write_text(text, encoding="utf-8")
    return folder / "train.toml"


def settings(config: Path, *changes: str) -> TrainConfig:
    return load_config(TrainConfig, config, list(changes))


def first_inputs(config: TrainConfig) -> tuple[Any, Any, Any, Any]:
    """The task, its model in evaluation mode, the first batch, and its inputs."""
    task: Any = open_task(config)
    selection = select(open_dataset(config.data.dataset), "train")
    fields = task.fields(selection, is_evaluation=False)
    loader = Loader(selection, batch=task.batch_spec(selection, None), seed=3, fields=fields)
    with loader:
        model = task.make_model(loader, None).eval()
        batch = next(iter(loader))
        inputs = task.open_inputs(loader, torch.device("cpu"), pinned_bytes=0)(batch)
        return task, model, batch, inputs


def tokens_of(batch: Any) -> dict[str, torch.Tensor]:
    """What a model of transformers takes of a batch, sequences on the first axis."""
    names = {"conversation": "input_ids", "conversation_mask": "attention_mask"}
    found = {}
    for name, value in batch.items():
        short = names.get(name, name.removeprefix("conversation_"))
        if short == "weights" or short.endswith("_offsets"):
            continue
        is_of_tokens = value.shape[-1] == batch["conversation"].shape[-1] and value.ndim == (
            batch["conversation"].ndim
        )
        array = np.array(value.reshape(-1, value.shape[-1]) if is_of_tokens else value)
        if is_of_tokens or len(array):
            found[short] = torch.from_numpy(array).long() if is_of_tokens else torch.from_numpy(array)
    return found


@pytest.mark.parametrize("family", sampled(FAMILIES, {"llama", "gemma3", "qwen2_5_vl"}))
def test_loss_is_that_of_the_model_of_transformers(family: str, tmp_path: Path) -> None:
    config = settings(make_run(tmp_path, family))
    _, model, batch, inputs = first_inputs(config)
    kind: Any = (
        transformers.AutoModelForImageTextToText
        if family in IMAGE_FAMILIES
        else transformers.AutoModelForCausalLM
    )
    own = kind.from_pretrained(str(tmp_path / "model"), dtype=torch.float32).eval()
    tokens = tokens_of(batch)
    weights = torch.from_numpy(np.array(batch["conversation_weights"]))
    # With weights of 0 and 1 the loss of the model itself, which averages over its labels.
    labels = torch.where(weights > 0, tokens["input_ids"], -100)
    with torch.no_grad():
        wanted = own(**tokens, labels=labels)
        output = inputs.forward(model)
        is_there = tokens["attention_mask"].bool()
        torch.testing.assert_close(output[is_there], wanted.logits[is_there], rtol=0, atol=1e-5)
        losses = functional.cross_entropy(
            wanted.logits[:, :-1].flatten(0, 1), tokens["input_ids"][:, 1:].flatten(), reduction="none"
        )
        total = (losses * weights[:, 1:].flatten()).sum()
        torch.testing.assert_close(inputs.loss(output), total, rtol=1e-5, atol=1e-5)
        if bool(((weights == 0) | (weights == 1)).all()):
            mean = inputs.loss(output) / inputs.num_tokens
            torch.testing.assert_close(mean, wanted.loss, rtol=1e-5, atol=1e-5)
    assert inputs.num_tokens == float(weights[:, 1:].sum())


def written_out(model: Any, batch: Any) -> torch.Tensor:
    """Log-probabilities of the learned tokens of each sequence, by a loop."""
    tokens = tokens_of(batch)
    weights = torch.from_numpy(np.array(batch["conversation_weights"])).reshape(tokens["input_ids"].shape)
    logits = torch.log_softmax(model(**tokens).logits, dim=-1)
    found = []
    for row, ids in enumerate(tokens["input_ids"]):
        chosen = [logits[row, at - 1, ids[at]] * weights[row, at] for at in range(1, len(ids))]
        found.append(torch.stack(chosen).sum())
    return torch.stack(found)


def test_preference_loss_follows_the_paper(tmp_path: Path) -> None:
    config = settings(make_run(tmp_path, "qwen2_5_vl", "dpo"), "task.beta=0.3")
    _, model, batch, inputs = first_inputs(config)
    own = transformers.AutoModelForImageTextToText.from_pretrained(
        str(tmp_path / "model"), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        # At first both are equal, and the loss is log 2 for each pair.
        loss = inputs.loss(inputs.forward(model))
        torch.testing.assert_close(loss, torch.tensor(2 * np.log(2.0)).float())
        before = written_out(own, batch)
        for mine, other in zip(model.parameters(), own.parameters(), strict=True):
            change = torch.randn_like(mine) * 0.05
            mine.add_(change)
            other.add_(change)
        gained = (written_out(own, batch) - before).reshape(-1, 2)
        wanted = -functional.logsigmoid(0.3 * (gained[:, 0] - gained[:, 1])).sum()
        torch.testing.assert_close(inputs.loss(inputs.forward(model)), wanted, rtol=1e-4, atol=1e-4)
    assert inputs.num_tokens == 2.0


@pytest.mark.parametrize("family", sampled(IMAGE_FAMILIES, {"llava"}))
def test_a_processor_that_counts_other_tokens_of_a_picture_is_refused(family: str, tmp_path: Path) -> None:
    config = settings(make_run(tmp_path, family))
    task: Any = open_task(config)
    task.build_model(None)
    token = transformers.AutoConfig.from_pretrained(str(tmp_path / "model")).image_token_id
    ids = task._small.ids
    task._small = replace(
        task._small, ids=np.where((ids == token) & (np.arange(len(ids)) == np.argmax(ids == token)), 0, ids)
    )
    with pytest.raises(ConfigError, match=r"writes 3 tokens for a picture of which model\.path makes 4"):
        task.build_model(None)


def test_adapters_are_off_in_the_reference(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = settings(make_run(tmp_path, "llama", "dpo"), "lora.rank=2")
    _, model, _, inputs = first_inputs(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
        own, expected = inputs.forward(model)
        assert not torch.allclose(own, expected)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
        torch.testing.assert_close(inputs.forward(model)[0], expected)


@pytest.mark.parametrize("task", ["reward", "score"])
def test_reward_loss_is_that_of_the_model_of_transformers(task: str, tmp_path: Path) -> None:
    config = settings(make_run(tmp_path, "llama", task))
    _, model, batch, inputs = first_inputs(config)
    own = transformers.AutoModelForSequenceClassification.from_pretrained(
        str(tmp_path / "model"), num_labels=1, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        own.score.weight.copy_(model.score.weight)
        tokens = tokens_of(batch)
        # The padding token is that of the end of a turn here, so each sequence is scored alone.
        lengths = tokens["attention_mask"].sum(dim=1).tolist()
        hidden = [
            own.model(tokens["input_ids"][row : row + 1, :length]).last_hidden_state[0, -1]
            for row, length in enumerate(lengths)
        ]
        scores = own.score(torch.stack(hidden))[:, 0]
        if task == "score":
            expected = [int(key.removeprefix("talk")) / 4 - 1 for key in batch.info.sample_keys]
            wanted = ((scores - torch.tensor(expected)) ** 2).sum()
        else:
            scores = scores.reshape(-1, 2)
            wanted = -functional.logsigmoid(scores[:, 0] - scores[:, 1]).sum()
        assert inputs.num_tokens == 2.0
        torch.testing.assert_close(inputs.loss(inputs.forward(model)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sampled(["gemma3", "qwen2_5_vl"], {"gemma3"}))
def test_a_batch_without_words_and_pictures_has_every_gradient(family: str, tmp_path: Path) -> None:
    """Else the exchange of gradients waits for them; none of them is NaN, and layers run in one order."""
    task, model, batch, inputs = first_inputs(settings(make_run(tmp_path, family)))
    order: list[str] = []
    for block in blocks_of(model):
        block.register_forward_pre_hook(lambda block, _: order.append(type(block).__name__))
    inputs.forward(model)
    usual = order.copy()
    order.clear()
    is_of_pictures = {"conversation_pixel_values", "conversation_image_grid_thw"}
    empty = {
        name: np.zeros_like(value)[: 0 if name in is_of_pictures else None] for name, value in batch.items()
    }
    arrays = task.arrays(empty, is_evaluation=False)
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
    loss = task.losses(task.forward(model, tensors), tensors).sum()
    assert float(loss.detach()) == 0.0
    assert order == usual
    assert len({*usual}) > 1
    loss.backward()
    trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    assert len(trained) > 20
    for name, gradient in trained.items():
        assert gradient is not None, name
        assert not gradient.any(), name


def test_other_weights_of_the_same_size_are_another_model(tmp_path: Path) -> None:
    config = settings(make_run(tmp_path, "llama"))
    before = open_task(config).bindings()
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    after = open_task(config).bindings()
    assert {name for name in before if before[name] != after[name]} == {"model.path weights"}
    old = {name: value for name, value in before.items() if name != "model.path weights"}
    nothing = PiecewiseTensors([])
    made = Checkpoint(name="step-00000002", state={"bindings": before}, model=nothing, optimizer=nothing)
    with pytest.raises(StateError, match=r"model\.path weights"):
        check_bindings(made, after)
    check_bindings(replace(made, state={"bindings": old}), after)


def test_a_token_that_fills_up_needs_no_row_of_the_model(tmp_path: Path) -> None:
    config = settings(make_run(tmp_path, "llama"))
    words = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    words.add_special_tokens({"pad_token": "<added>"})
    words.save_pretrained(str(tmp_path / "model"))
    _, model, batch, inputs = first_inputs(config)
    assert int(batch["conversation"].max()) == model.model.config.vocab_size
    assert torch.isfinite(inputs.loss(inputs.forward(model)))


def test_adapters_in_a_layer_without_a_part_are_not_trained(tmp_path: Path) -> None:
    """LLaVA takes the features from before the last layer of its vision tower."""
    pytest.importorskip("peft")
    changes = ("lora.rank=2", 'lora.targets=["q_proj"]', "model.activation_checkpointing=true")
    _, model, _, inputs = first_inputs(settings(make_run(tmp_path, "llava"), *changes))
    inputs.loss(inputs.forward(model.train())).backward()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert any("vision" in name for name in trained)
    assert [name for name, one in trained.items() if one.grad is None] == []


@pytest.mark.parametrize(
    ("family", "task"),
    sampled(
        [
            ("llama", "sft"),
            ("qwen2_5_vl", "dpo"),
            ("gemma3", "reward"),
            ("llava", "sft"),
            ("llama", "score"),
        ],
        {("llama", "sft"), ("qwen2_5_vl", "dpo")},
    ),
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(family: str, task: str, tmp_path: Path) -> None:
    config = make_run(tmp_path, family, task)
    whole = train(settings(config))
    assert whole.outcome == "finished"
    metric = {"sft": "token_accuracy", "score": "score_mae"}.get(task, "pair_accuracy")
    assert whole.evaluation_scores.keys() == {metric}
    leave()
    other = tmp_path / "other"
    train(settings(config, f"run.output={other}", "run.max_steps=2"))
    leave()
    again = train(settings(config, f"run.output={other}"))
    assert again.resumed_from == "step-00000002"
    assert committed_samples(other) == committed_samples(tmp_path / "run")
    assert differing_weights(other, tmp_path / "run") == []


def leave() -> None:
    """Leave the process group, as a run that ends does with its process."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # what TRL warns of is not ours to judge
def test_losses_are_those_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batch through its three trainers."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    rows = pytest.importorskip("datasets").Dataset.from_dict
    monkeypatch.setattr(conversation_case, "WEIGHTED", 0.0)  # it knows no weights of messages
    common = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "report_to": [], "max_length": None}
    common |= {"bf16": False, "activation_checkpointing": False, "dataloader_pin_memory": False}
    for task in ("sft", "dpo", "reward"):
        (tmp_path / task).mkdir()
        file = make_run(tmp_path / task, "qwen2", task)
        _, model, batch, inputs = first_inputs(settings(file))
        folder, kind = str(tmp_path / task / "model"), transformers.AutoModelForCausalLM
        own: Any = kind.from_pretrained(folder, dtype=torch.float32)
        words = transformers.AutoTokenizer.from_pretrained(folder)
        tokens = tokens_of(batch)
        learned = torch.from_numpy(np.array(batch["conversation_weights"]) > 0)
        learned = learned.reshape(tokens["input_ids"].shape)
        order = torch.arange(len(learned)).reshape(-1, 2).T.reshape(-1)  # the chosen ones come first
        given = {name: one if task == "sft" else one[order] for name, one in tokens.items()}
        if task == "sft":
            given["labels"] = torch.where(learned, tokens["input_ids"], -100)
            trainer = trl.SFTTrainer(
                own,
                trl.SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True}),
                train_dataset=rows({"input_ids": [[1, 2]], "labels": [[-100, 2]]}),
                processing_class=words,
            )
        elif task == "dpo":
            given["completion_mask"] = learned[order].long()
            pairs = rows({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})
            first = kind.from_pretrained(folder, dtype=torch.float32)
            config = trl.DPOConfig(**common, beta=0.1)
            trainer = trl.DPOTrainer(own, first, config, train_dataset=pairs, processing_class=words)
            with torch.no_grad():
                for name, one in own.named_parameters():
                    one.add_(torch.randn_like(one) * 0.05)
                    model.get_parameter(f"model.{name}").copy_(one)
        else:
            own = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, dtype=torch.float32
            )
            with torch.no_grad():
                own.score.weight.copy_(model.score.weight)
            pairs = rows({"chosen": ["a"], "rejected": ["b"]})
            config = trl.RewardConfig(**common)
            trainer = trl.RewardTrainer(own, config, train_dataset=pairs, processing_class=words)
        with torch.no_grad():
            wanted = trainer.compute_loss(trainer.model.eval(), given)
            mine = inputs.loss(inputs.forward(model)) / inputs.num_tokens
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5, msg=task)
        if task == "dpo":
            store_reference(settings(file))
            leave()
            _, _, _, stored = first_inputs(settings(file, "task.reference=stored"))
            with torch.no_grad():
                mine = stored.loss(stored.forward(model)) / stored.num_tokens
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5, msg="with a stored reference")


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    config = make_run(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"takes pairs; set fields\.conversation\.pairs"):
        settings(config, "task.type=dpo")
    with pytest.raises(ConfigError, match=r"frozen_dtype 'bf16' needs run\.precision 'bf16'"):
        settings(config, "model.frozen_dtype=bf16")
    with pytest.raises(ConfigError, match=r"task\.beta needs task\.type = 'dpo'"):
        settings(config, "task.beta=0.5")
    make_folder("qwen2_5_vl", tmp_path / "pictures", with_model=False)
    with pytest.raises(ConfigError, match=r"returns pictures, and model\.path holds 'llama'"):
        first_inputs(settings(config, "fields.conversation.processor=" + str(tmp_path / "pictures")))
