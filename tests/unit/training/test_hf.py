"""The Trainer of transformers over a loader of fields, with tiny models: resume, evaluation, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

import shardflow as sf
from shardflow.errors import ConfigError, StateError
from shardflow.format import Dataset
from shardflow.format.facts.making import attach_facts
from shardflow.loading import Batch, Loader, World
from shardflow.training.hf import LoaderTrainer
from tests.factories import make_dataset
from tests.field_cases import make_case

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours to judge

NUM_TRAIN, NUM_VAL, CLASSES = 18, 7, 3
FIELDS: Mapping[str, sf.Field] = {
    "image": sf.Image(series="role == 'frontal'", size=(16, 16), missing="pad"),
    "report": sf.Text(missing="pad"),
}
SPEC = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2)
EVAL_SPEC = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=1, tail="mask")
STEPS_PER_EPOCH = NUM_TRAIN // 4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("hf") / "a"
    splits = {"train": NUM_TRAIN, "val": NUM_VAL}
    made = make_dataset(
        folder, num_samples=NUM_TRAIN + NUM_VAL, samples_per_shard=4, make=make_case, splits=splits
    )
    found = Dataset.open(made)
    attach_facts(found)
    return found


def _loader(dataset: Dataset, split: str = "train", **settings: Any) -> Loader:
    spec = SPEC if split == "train" else EVAL_SPEC
    return Loader(dataset, split=split, fields=FIELDS, **{"batch": spec, "seed": 3, **settings})


class Inputs:
    """A data collator that notes which samples it saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        self.seen.append((batch.epoch, batch.step, batch.micro, tuple(batch.info.sample_keys)))
        tensors = batch.torch()
        label = torch.tensor([len(report) % CLASSES for report in tensors["report"]])
        label[tensors["weight"] == 0] = -100
        return {"pixel_values": tensors["image"].float() / 65535, "labels": label}


class Classifier(torch.nn.Module):
    """Two layers with dropout between them, as a model of transformers is called.

    Not a ViT of transformers: its checkpoints name the layers differently, and the Trainer (5.23) resumes
    them with new weights and a warning.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(256, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, CLASSES)
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(pixel_values)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def _arguments(folder: Path, **settings: Any) -> TrainingArguments:
    defaults = {
        "gradient_accumulation_steps": 2,
        "max_steps": 7,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    return TrainingArguments(str(folder), **{**defaults, **settings})


def _train(dataset: Dataset, folder: Path, *, resume: Any = None, **settings: Any) -> tuple[Any, Inputs]:
    inputs = Inputs()
    with _loader(dataset) as loader:
        trainer = LoaderTrainer(
            Classifier(), _arguments(folder, **settings), train_dataset=loader, data_collator=inputs
        )
        trainer.train(resume_from_checkpoint=resume)
    return trainer, inputs


def test_a_run_resumed_after_any_step_sees_the_same_samples_and_ends_with_the_same_weights(
    dataset: Dataset, tmp_path: Path
) -> None:
    whole, seen = _train(dataset, tmp_path / "whole", save_strategy="steps", save_steps=1)
    assert len(seen.seen) == 7 * 2
    assert {place[0] for place in seen.seen} == {0, 1}  # across the end of an epoch
    with _loader(dataset) as loader:
        wanted = [[(b.epoch, b.step, b.micro, tuple(b.info.sample_keys)) for b in loader] for _ in range(2)]
    assert seen.seen == [*wanted[0], *wanted[1]][:14]
    for step in (1, 3, 4, 5):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        resumed, rest = _train(dataset, folder, resume=True)
        assert rest.seen == seen.seen[2 * step :]
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(tensor, resumed.model.state_dict()[name]), (step, name)
        logged = {line["step"]: line["epoch"] for line in whole.state.log_history if "loss" in line}
        again = {line["step"]: line["epoch"] for line in resumed.state.log_history if "loss" in line}
        assert again == logged


def test_epochs_are_those_of_the_loader(dataset: Dataset, tmp_path: Path) -> None:
    trainer, inputs = _train(dataset, tmp_path, max_steps=-1, num_train_epochs=2)
    assert trainer.state.global_step == 2 * STEPS_PER_EPOCH
    assert trainer.state.epoch == 2
    assert len(set(inputs.seen)) == len(inputs.seen) == 2 * STEPS_PER_EPOCH * 2


def test_a_token_budget_needs_a_number_of_steps_and_trains_them(dataset: Dataset, tmp_path: Path) -> None:
    budget = sf.BatchSpec(
        micro_batches_per_step=2, lanes=1, budget=sf.TokenBudget(max_tokens=60, max_samples=4)
    )
    for number, settings in enumerate(({"max_steps": -1}, {"max_steps": 6})):
        with _loader(dataset, batch=budget) as loader:
            trainer = LoaderTrainer(
                Classifier(),
                _arguments(tmp_path / str(number), **settings),
                train_dataset=loader,
                data_collator=Inputs(),
            )
            if number == 0:
                with pytest.raises(ValueError, match="max_steps"):
                    trainer.train()
                continue
            trainer.train()
            assert trainer.state.global_step == 6
            position = loader.position
            assert sum(loader.num_steps_in(e) for e in range(position.epoch)) + position.step == 6


def _mean_loss(model: Any, dataset: Dataset, inputs: Any) -> tuple[float, int]:
    """Mean over the labeled samples of a split, one at a time."""
    model.eval()
    total, number = 0.0, 0
    single = sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
    with _loader(dataset, "val", batch=single) as loader, torch.no_grad():
        for batch in loader:
            found = inputs(batch)
            if (found["labels"] != -100).any():
                total += float(model(**found)["loss"])
                number += 1
    return total / number, number


def test_an_evaluation_is_the_mean_over_every_sample_however_often(dataset: Dataset, tmp_path: Path) -> None:
    inputs = Inputs()
    with _loader(dataset) as loader, _loader(dataset, "val") as val, _loader(dataset, "val", seed=9) as other:
        trainer = LoaderTrainer(
            Classifier(),
            _arguments(tmp_path, eval_strategy="steps", eval_steps=3),
            train_dataset=loader,
            eval_dataset={"val": val, "other": other},
            data_collator=inputs,
        )
        trainer.train()
        metrics = trainer.evaluate()
        again = trainer.evaluate(val)
        assert val.epoch in (0, 1)
    wanted, number = _mean_loss(trainer.model, dataset, Inputs())
    assert number == NUM_VAL  # seven samples in four batches of two: a mean of batches would differ
    assert metrics["eval_val_loss"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["eval_other_loss"] == pytest.approx(wanted, rel=1e-5)
    assert again["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    logged = [line for line in trainer.state.log_history if "eval_val_loss" in line]
    assert len(logged) >= 2


def test_a_language_model_counts_tokens_in_training_and_evaluation(dataset: Dataset, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )

    def convert(batch: Batch) -> dict[str, torch.Tensor]:
        rows = [torch.tensor([1, *report.encode()]) for report in batch["report"]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        labels[torch.from_numpy(batch.info.weight) == 0] = -100
        return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}

    with _loader(dataset) as loader, _loader(dataset, "val") as val:
        trainer = LoaderTrainer(
            model,
            _arguments(tmp_path, max_steps=2),
            train_dataset=loader,
            eval_dataset=val,
            data_collator=convert,
        )
        trainer.train()
        found = trainer.evaluate()["eval_loss"]
    total, number = 0.0, 0
    model.eval()
    single = sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
    with _loader(dataset, "val", batch=single) as loader, torch.no_grad():
        for batch in loader:
            inputs = convert(batch)
            tokens = int((inputs["labels"][:, 1:] != -100).sum())
            if tokens:
                total += float(model(**inputs).loss) * tokens
                number += tokens
    assert found == pytest.approx(total / number, rel=1e-5)


def test_predictions_are_those_of_every_slot(dataset: Dataset, tmp_path: Path) -> None:
    with _loader(dataset, "val") as val:
        output = LoaderTrainer(Classifier(), _arguments(tmp_path), data_collator=Inputs()).predict(val)
    assert output.predictions.shape == (8, CLASSES)
    assert (output.label_ids == -100).sum() == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "pass gradient_accumulation_steps=2"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True would distribute"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True would distribute"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_settings_that_would_train_on_something_else_are_refused(
    dataset: Dataset, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with _loader(dataset) as loader, pytest.raises(ConfigError, match=message):
        LoaderTrainer(
            Classifier(), _arguments(tmp_path, **settings), train_dataset=loader, data_collator=Inputs()
        )


def test_loaders_that_do_not_fit_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    def make(loader: Any = None, **settings: Any) -> LoaderTrainer:
        settings = {"data_collator": Inputs(), **settings}
        return LoaderTrainer(Classifier(), _arguments(tmp_path), train_dataset=loader, **settings)

    with pytest.raises(ConfigError, match="rank 1 of 2 and this process is rank 0 of 1"):
        make(_loader(dataset, world=World(rank=1, world_size=2)))
    with pytest.raises(ConfigError, match="data_collator="):
        make(_loader(dataset), data_collator=None)
    with pytest.raises(ConfigError, match="needs train_dataset="):
        make().train()
    with pytest.raises(ConfigError, match="an evaluation needs a loader"):
        make().evaluate()
    with pytest.raises(ConfigError, match="tail='mask'"):
        make(eval_dataset=_loader(dataset)).evaluate()


def test_a_checkpoint_without_a_position_or_of_another_run_is_refused(
    dataset: Dataset, tmp_path: Path
) -> None:
    _train(dataset, tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    path = tmp_path / "checkpoint-2" / "shardflow.json"
    with _loader(dataset, seed=4) as loader, pytest.raises(StateError, match="seed"):
        LoaderTrainer(Classifier(), _arguments(tmp_path), train_dataset=loader, data_collator=Inputs()).train(
            resume_from_checkpoint=True
        )
    path.unlink()
    with pytest.raises(StateError, match=r"shardflow\.json .* cannot be read"):
        _train(dataset, tmp_path, resume=str(path.parent))
