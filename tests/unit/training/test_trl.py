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
from tests.conversation_case import generate, make_folder

trl = pytest.importorskip("trl", reason="trl is not installed")
from shardflow.training.trl import (  # noqa: E402
    LoaderDPOTrainer,
    LoaderGRPOTrainer,
    LoaderRewardTrainer,
    LoaderSFTTrainer,
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
    trainer._field, trainer.train_dataset = "talk", loader
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


def test_a_weight_between_is_refused(model: Path, tmp_path: Path) -> None:
    document = next(documents_of(1))
    document["messages"][-1]["weight"] = 0.5
    talk = sf.Conversation(processor=str(model), max_tokens=400)
    with loader_of(write(tmp_path / "data", [document]), talk, 1) as loader:
        batch = next(iter(loader))
        with pytest.raises(ConfigError, match="another weight than 0 and 1"):
            bare(LoaderSFTTrainer)._to_inputs(batch)


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
