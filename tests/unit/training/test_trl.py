"""What TRL's trainers get of a batch, and settings that would train something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardflow as sf
from shardflow.errors import ConfigError, TrainingError
from shardflow.format.writer import ShardWriter
from shardflow.loading import Loader
from shardflow.loading.sample import open_dataset
from shardflow.training.tokenizing import count_dataset
from tests.conversation_case import generate, make_folder

trl = pytest.importorskip("trl", reason="trl is not installed")
from shardflow.training.trl import (  # noqa: E402
    LoaderDPOTrainer,
    LoaderGRPOTrainer,
    LoaderRewardTrainer,
    LoaderSFTTrainer,
    _blank,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what TRL warns of is not ours to judge

PROMPT: dict[str, Any] = {"format_version": 1, "kind": "prompt", "form": "prompt", "images": []}
BAD: dict[str, Any] = {"format_version": 1, "kind": "no such kind", "messages": [], "images": []}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer alone."""
    folder = tmp_path_factory.mktemp("model")
    make_folder("qwen2", folder, with_model=False)
    return folder


def write(folder: Path, documents: list[dict[str, Any]]) -> Path:
    with ShardWriter(folder, splits={"train": 1}) as writer:
        for number, document in enumerate(documents):
            writer.write({"__key__": f"talk{number:04d}", "conversation.json": document})
    return folder


def loader_of(folder: Path, talk: sf.Field, size: int, **settings: Any) -> Loader:
    spec = sf.BatchSpec(micro_batch_size=size, micro_batches_per_step=1, **settings)
    return sf.Loader(sf.open(folder), split="train", seed=1, batch=spec, fields={"talk": talk})


def bare(kind: Any, loader: Loader | None = None) -> Any:
    """A trainer that was not made: what it makes of a batch depends on its field alone."""
    trainer = kind.__new__(kind)
    trainer._field, trainer.train_dataset, trainer._blank = "talk", loader, None
    return trainer


def documents_of(num: int, *, pairs: bool = False) -> Iterator[dict[str, Any]]:
    for document, _ in generate(num, 21, max_images=0, pairs=pairs):
        for message in [*document["messages"], *document.get("chosen", ()), *document.get("rejected", ())]:
            message.pop("weight", None)
        yield document


def test_labels_are_the_tokens_with_a_weight(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data", [*documents_of(5), BAD])
    talk = sf.Conversation(processor=str(model), max_tokens=400)
    with loader_of(data, talk, 6) as loader:
        batch = next(iter(loader))
        found = bare(LoaderSFTTrainer)._to_inputs(batch)
        learned = np.array(batch["talk_weights"]) > 0
        assert learned.any(axis=1).sum() == 5
        wanted = np.where(learned, batch["talk"], -100)
        assert np.array_equal(found["labels"].numpy(), wanted)
        assert np.array_equal(found["input_ids"].numpy(), batch["talk"])
        assert bool(found["attention_mask"].any(dim=1).all())


@pytest.mark.parametrize("kind", [LoaderSFTTrainer, LoaderDPOTrainer])
def test_a_weight_between_is_refused(model: Path, tmp_path: Path, kind: Any) -> None:
    """When the trainer is made, as far as the first batch says, and in every batch."""
    is_pair = kind is LoaderDPOTrainer
    document = next(documents_of(1, pairs=is_pair))
    document["chosen" if is_pair else "messages"][-1]["weight"] = 0.5
    talk = sf.Conversation(processor=str(model), max_tokens=400, pairs=is_pair)
    with loader_of(write(tmp_path / "data", [document]), talk, 1) as loader:
        batch = next(iter(loader))
        with pytest.raises(ConfigError, match="another weight than 0 and 1"):
            bare(kind)._to_inputs(batch)
        with pytest.raises(ConfigError, match="another weight than 0 and 1"):
            kind("no model", train_dataset=loader, field="talk")


def test_what_trl_would_train_otherwise_is_refused_before_the_model_is_read(
    model: Path, tmp_path: Path
) -> None:
    singles, pairs = (write(tmp_path / f"{one}", [*documents_of(4, pairs=one)]) for one in (False, True))
    turns: Any = [
        {"role": "user", "text": "Seen?", "when": "facts.num_series < 0"},
        {"role": "user", "text": "Well?", "when": "facts.num_series >= 0"},
        {"role": "assistant", "text": "No.", "weight": 0.5},
    ]
    template = sf.Template(turns=turns)
    budget = sf.TokenBudget(max_tokens=400, max_samples=8, padded=False)
    packed, each = {"budget": budget, "lanes": 1}, {"micro_batch_size": 1}
    cases: list[tuple[Any, Path, dict[str, Any], dict[str, Any], str]] = [
        (LoaderSFTTrainer, singles, {"packed": True}, packed, "leave out packed"),
        (LoaderDPOTrainer, pairs, {"packed": True, "pairs": True}, packed, "leave out packed"),
        (LoaderRewardTrainer, singles, {}, each, "takes pairs; set pairs"),
        (LoaderSFTTrainer, pairs, {"pairs": True}, each, "takes single conversations"),
        (LoaderSFTTrainer, singles, {"template": template}, each, "another weight than"),
    ]  # fmt: skip
    for folder in (singles, pairs):
        count_dataset(open_dataset(folder), model)
    for kind, data, settings, batch, said in cases:
        talk = sf.Conversation(processor=str(model), max_tokens=400, **settings)
        spec = sf.BatchSpec(micro_batches_per_step=1, **batch)
        with (
            sf.Loader(sf.open(data), split="train", seed=1, batch=spec, fields={"talk": talk}) as loader,
            pytest.raises(ConfigError, match=said),
        ):
            kind("no model", train_dataset=loader, field="talk")


def test_a_reward_is_refused_whose_last_token_trl_would_not_find(tmp_path: Path) -> None:
    make_folder("llama", tmp_path / "model")  # whose tokenizer has no padding token
    data = write(tmp_path / "data", [*documents_of(2, pairs=True)])
    talk = sf.Conversation(processor=str(tmp_path / "model"), max_tokens=400, pairs=True)
    settings = trl.RewardConfig(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, report_to=[])
    with (
        loader_of(data, talk, 2) as loader,
        pytest.raises(ConfigError, match="scores the last token that is not its padding token"),
    ):
        LoaderRewardTrainer(str(tmp_path / "model"), settings, train_dataset=loader, field="talk")


def test_a_micro_batch_without_pictures_shows_a_blank_one_that_counts_nothing(tmp_path: Path) -> None:
    import transformers

    make_folder("qwen2_5_vl", tmp_path / "model")
    own = transformers.AutoModelForImageTextToText.from_pretrained(str(tmp_path / "model")).eval()
    talk = sf.Conversation(processor=str(tmp_path / "model"), max_tokens=400)
    with loader_of(write(tmp_path / "data", [*documents_of(2)]), talk, 2) as loader:
        batch = next(iter(loader))
        trainer = bare(LoaderSFTTrainer)
        alone = own(**trainer._to_inputs(batch)).loss
        trainer._check_conversations(loader, talk)
        trainer._blank = _blank(talk)
        found = trainer._to_inputs(batch)
    assert len(found["input_ids"]) == 3
    loss = own(**found).loss
    torch.testing.assert_close(loss, alone)
    loss.backward()
    gradients = {name: one.grad for name, one in own.named_parameters()}
    assert all(one is not None for one in gradients.values())
    assert not any(one.any() for name, one in gradients.items() if "visual" in name)


@pytest.mark.parametrize("kind", [LoaderDPOTrainer, LoaderRewardTrainer])
def test_the_chosen_come_first_and_a_bad_pair_is_left_out(model: Path, tmp_path: Path, kind: Any) -> None:
    data = write(tmp_path / "data", [*documents_of(3, pairs=True), BAD])
    talk = sf.Conversation(processor=str(model), max_tokens=400, pairs=True)
    with loader_of(data, talk, 4) as loader:
        batch = next(iter(loader))
        found = bare(kind)._to_inputs(batch)
        used = batch.info.weight > 0
        assert used.sum() == 3
        for name, entry in (("input_ids", "talk"), ("attention_mask", "talk_mask")):
            wanted = np.concatenate([batch[entry][used, 0], batch[entry][used, 1]])
            assert np.array_equal(found[name].numpy(), wanted)
        if kind is LoaderDPOTrainer:
            learned = np.array(batch["talk_weights"])[used] > 0
            assert np.array_equal(found["completion_mask"].numpy(), np.concatenate([*learned.swapaxes(0, 1)]))


def test_a_micro_batch_of_bad_pairs_has_no_gradient(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data", [BAD, next(documents_of(1, pairs=True))])
    talk = sf.Conversation(processor=str(model), max_tokens=400, pairs=True)
    with loader_of(data, talk, 1) as loader:
        batches = {int(batch.info.weight[0]): batch for batch in loader}
        found = bare(LoaderDPOTrainer)._to_inputs(batches[0])
        assert found["completion_mask"].sum() == 0
        chosen, rejected = found["input_ids"]
        assert torch.equal(chosen, rejected)


def prompts(num: int) -> list[dict[str, Any]]:
    ask = {"role": "user", "content": [{"type": "text", "text": "What is 2 and 2?"}]}
    return [{**PROMPT, "messages": [ask], "answer": str(number)} for number in range(num)]


def test_slots_of_a_prompt_that_cannot_be_read_go_to_another(tmp_path: Path) -> None:
    data = write(tmp_path / "data", prompts(3))
    talk = sf.Json(member="conversation.json", num_samples=2, max_bytes=1 << 16)
    with loader_of(data, talk, 6) as loader:
        batch = next(iter(loader))
        trainer = bare(LoaderGRPOTrainer, loader)
        rows = trainer._to_inputs(batch)
        assert [row["sample_key"] for row in rows] == list(batch.sample_keys)
        assert rows[0]["prompt"] == [{"role": "user", "content": "What is 2 and 2?"}]
        documents = batch["talk"]
        documents[0] = documents[1] = None
        broken: Any = FakeBatch(batch, documents)
        first = [row["sample_key"] for row in trainer._to_inputs(broken)]
        assert first == [first[2], first[2], *batch.sample_keys[2:]]
        with pytest.raises(TrainingError, match="No prompt of a micro-batch"):
            trainer._to_inputs(FakeBatch(batch, [None] * 6))


class FakeBatch:
    """A batch with other values of its only entry."""

    def __init__(self, batch: sf.Batch, values: list[Any]) -> None:
        self.sample_keys, self.info, self._values = batch.sample_keys, batch.info, values

    def __getitem__(self, name: str) -> list[Any]:
        return self._values


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({**BAD, "kind": "conversation"}, "takes samples of the kind 'prompt'"),
        (
            {
                **PROMPT,
                "answer": "",
                "messages": [{"role": "user", "content": [{"type": "image", "image": 0}]}],
            },
            "shows pictures",
        ),
    ],
)
def test_what_is_no_prompt_is_refused(tmp_path: Path, document: dict[str, Any], said: str) -> None:
    talk = sf.Json(member="conversation.json", num_samples=2)
    with loader_of(write(tmp_path / "data", [document]), talk, 2) as loader:
        batch = next(iter(loader))
        with pytest.raises(TrainingError, match=said):
            bare(LoaderGRPOTrainer, loader)._to_inputs(batch)


def test_settings_that_train_something_else_are_refused(model: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False}
    talk = sf.Json(member="conversation.json", num_samples=2)
    given: dict[str, Any] = {"reward_funcs": len, "field": "talk"}
    with loader_of(write(tmp_path / "prompts", prompts(4)), talk, 4) as loader:
        wanted = {"num_generations": 2, "per_device_train_batch_size": 4, "steps_per_generation": 1}
        changes: list[tuple[str, Any]] = [
            ("num_generations", 4),
            ("per_device_train_batch_size", 2),
            ("steps_per_generation", 2),
        ]
        for name, value in changes:
            settings = trl.GRPOConfig(**common, **{**wanted, name: value})
            with pytest.raises(ConfigError, match=f"{name} is {value}, and the plan"):
                LoaderGRPOTrainer("no model", settings, train_dataset=loader, **given)
        settings = trl.GRPOConfig(**common, **wanted)
        with pytest.raises(ConfigError, match="none of the loader's fields"):
            LoaderGRPOTrainer("no model", settings, train_dataset=loader, **{**given, "field": "other"})
    pairs = sf.Conversation(processor=str(model), max_tokens=400, pairs=True)
    data = write(tmp_path / "pairs", [*documents_of(4, pairs=True)])
    with loader_of(data, pairs, 2, tail="mask") as loader:
        settings = trl.DPOConfig(**common)
        with pytest.raises(ConfigError, match="counts a padding slot as a sample"):
            LoaderDPOTrainer("no model", settings, train_dataset=loader, field="talk")
        with pytest.raises(ConfigError, match="evaluations take no loader"):
            LoaderDPOTrainer("no", settings, train_dataset=loader, field="talk", eval_dataset=loader)
