"""A classifier: labels of every kind, metrics over ranks, resume on fewer of them, and what is refused."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardflow.cli.main import main
from shardflow.config import load_config
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.training.config import TrainConfig
from shardflow.training.ledger import read_ledger
from shardflow.training.metrics import read_metrics
from shardflow.training.run import TrainSummary, train
from shardflow.training.tasks.task import ArrayTask
from tests.distributed.launcher import job
from tests.factories import make_dataset

_SETTINGS = """
[data]
dataset = "dataset"
eval_split = "val"
[task]
type = "classify"
[fields.image]
type = "slices"
num_slices = 2
size = [16, 16]
missing = "pad"
[fields.label]
type = "column"
column = "labels.yes"
missing = "pad"
[image]
rows = 16
columns = 16
[batch]
micro_batch_size = 2
micro_batches_per_step = 4
[optimizer]
warmup_steps = 0
final_learning_rate_share = 1.0
[loader]
num_threads = 1
wait_timeout_s = 50
[run]
output = "run"
seed = 3
device = "cpu"
tensorboard = false
"""


_IMAGE = 'image={type="slices", num_slices=2, size=[16, 16], missing="pad"}'
_LABELS = 'label={type="columns", columns=["labels.yes", "labels.no"], missing="pad"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classify")
    make_dataset(
        folder / "dataset", num_samples=37, slices=(1, 5), splits={"train": 26, "val": 11}, facts=True
    )
    keys = [key.decode() for key in Dataset.open(folder / "dataset").samples.column("sample_key")]
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sample_key", "yes", "no", "grade", "word", "unsure", "never"])
        for number, key in enumerate(keys):
            yes = "" if number % 5 == 0 else number % 2
            unsure = number % 3 - 1
            word = ["mild", "none", "severe"][number % 3]
            rows.writerow([key, yes, 1 - number % 2, number % 4, word, unsure, 1 if number > 25 else ""])
    command = [str(folder / "dataset"), str(folder / "labels.csv"), "--name", "labels", "--on", "sample_key"]
    assert main(["attach", *command]) == 0
    (folder / "train.toml").write_text(_SETTINGS)
    return folder


def config(folder: Path, output: Path, *overrides: str) -> TrainConfig:
    return load_config(TrainConfig, folder / "train.toml", [f"run.output={output}", *overrides])


def run(folder: Path, output: Path, *overrides: str) -> TrainSummary:
    return train(config(folder, output, *overrides))


def make_residual(num_labels: int) -> nn.Module:
    """ResNet of transformers, with weights that follow from torch's seed."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "layer_type": "basic"}
    model: nn.Module = ResNetForImageClassification(
        ResNetConfig(num_channels=2, num_labels=num_labels, **sizes)
    )
    return model


class Brightness(ArrayTask):
    """Task of a user's own: the mean of an image."""

    def build_model(self, example: Any) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(example["image"][0].size, 1))

    def arrays(self, batch: Any, *, is_evaluation: bool) -> Mapping[str, Any]:
        return {"image": batch["image"].astype("float32") / 1000}

    def forward(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = model(tensors["image"])[:, 0]
        return found

    def losses(self, output: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (output - tensors["image"].flatten(1).mean(dim=1)) ** 2

    def scores(self, output: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"output": output}

    def metrics(self, scores: Mapping[str, Any]) -> Mapping[str, float | None]:
        return {"num_scores": float(len(scores["output"]))}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ((), "auroc"),
        (("fields.label.column=labels.word",), "auroc/severe"),
        (("fields.label.column=labels.grade", "task.labels=multi_class"), "auroc/3"),
        (("fields.label.column=labels.unsure", "task.ignore=[-1]"), "auroc"),
        (
            (f"fields={{{_IMAGE}, {_LABELS}}}",),
            "auroc/no",
        ),
        (
            (
                "model.target=tests.integration.test_classify:make_residual",
                "model.arguments={num_labels=1}",
            ),
            "average_precision",
        ),
    ],
    ids=["binary", "categories", "numbers", "ignored", "multi_label", "transformers"],
)
def test_labels_of_every_kind(folder: Path, tmp_path: Path, settings: tuple[str, ...], name: str) -> None:
    summary = run(folder, tmp_path, *settings)
    assert summary.outcome == "finished"
    assert isinstance(summary.evaluation_scores[name], float)
    (line,) = read_metrics(tmp_path, "evaluation")
    assert line[name] == summary.evaluation_scores[name]
    assert line["num_samples"] == 11, "every sample once, without padding"


def test_a_missing_label_counts_nothing(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path)
    (line,) = read_metrics(tmp_path, "evaluation")
    assert (line["num_samples"], line["num_tokens"]) == (11, 9), "two of eleven have no label"


def test_a_task_of_a_users_own(folder: Path, tmp_path: Path) -> None:
    text = (folder / "train.toml").read_text()
    text = text.replace('type = "classify"', 'target = "tests.integration.test_classify:Brightness"')
    text = text.replace("[image]\nrows = 16\ncolumns = 16\n", "")
    (folder / "own.toml").write_text(text)
    found = train(load_config(TrainConfig, folder / "own.toml", [f"run.output={tmp_path}"]))
    assert (found.outcome, found.evaluation_scores) == ("finished", {"num_scores": 11.0})


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_run_resumes_on_fewer_ranks_with_the_same_order_and_metrics(folder: Path, tmp_path: Path) -> None:
    every, resumed = "run.evaluate_every_steps=3", tmp_path / "cut"
    arguments = [f"--config={folder / 'train.toml'}"]
    for one in (f"run.output={resumed}", "run.max_steps=4", every):
        arguments += ["--set", one]
    with job(tmp_path, "shardflow.training", arguments, num_ranks=2, is_forked=True) as running:
        finished = running.wait(600)
    assert finished.exit_code == 0, finished.text
    for output in (resumed, tmp_path / "whole"):
        run(folder, output, "run.max_steps=6", every)
    taken = [
        [(step.global_step, sorted((one.micro, one.keys) for one in step.micro_batches)) for step in read]
        for read in (read_ledger(tmp_path / name) for name in ("cut", "whole"))
    ]
    assert taken[0] == taken[1]
    for event in ("step", "evaluation"):
        cut, whole = (
            {line["global_step"]: line for line in read_metrics(tmp_path / name, event)}
            for name in ("cut", "whole")
        )
        for step in whole:
            for name in {"loss", "auroc", "accuracy", "calibration_error"} & whole[step].keys():
                assert cut[step][name] == pytest.approx(whole[step][name], abs=1e-4), (event, step, name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("fields.label.column=labels.unsure",), r"labels.unsure has values that are no labels \(-1\)"),
        (("fields.label.column=labels.grade",), r"no labels \(2, 3\); binary labels are 0 and 1"),
        (
            ("fields.label.column=labels.word", "task.labels=binary"),
            "needs two classes, but labels.word has 3",
        ),
        (
            ("task.labels=multi_label",),
            "'multi_label', but fields.label is a column of numbers",
        ),
        (("fields.label.column=labels.never",), "No sample of the training split has a label: labels.never"),
        (("fields.label.column=labels.nothing",), "There is no column 'labels.nothing'"),
        (
            (
                "model.target=tests.integration.test_classify:make_residual",
                "model.arguments={num_labels=3}",
            ),
            r"returns logits of shape \(2, 3\) for 2 images, but binary labels need 1",
        ),
        (("model.target=tests.nothing:make",), "model.target must name a function that can be imported"),
        (("model.vision_width=64",), "model.vision_width has no effect with task.type 'classify'"),
        (("fields.label.type=text",), "fields.label"),
        (("data.unit=patient",), "unit must be"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(
    folder: Path, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(folder, tmp_path, *settings)
    assert read_metrics(tmp_path) == []
