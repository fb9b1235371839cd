"""The LightningDataModule beside a trainer of one process; two ranks are in tests/distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.facts.making import attach_facts
from shardflow.loading import Batch
from shardflow.sampling import BatchSpec
from shardflow.training.lightning import ShardDataModule
from tests.factories import make_dataset
from tests.field_cases import make_case

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning warns of is not ours to judge

SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=2)
SPLITS = {"train": 18, "val": 7, "test": 5}
FIELDS = {
    "image": sf.Image(series="role == 'frontal'", size=(8, 8), missing="pad"),
    "report": sf.Text(missing="pad"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("lightning") / "a"
    made = make_dataset(folder, samples_per_shard=4, make=make_case, splits=SPLITS)
    attach_facts(Dataset.open(made))
    return made


def with_keys(batch: Batch) -> dict[str, Any]:
    place = batch.epoch, batch.step, batch.micro
    return {**batch.torch(), "keys": batch.info.sample_keys, "place": place}


class Counting(LightningModule):
    """Trains a weight per pixel and notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = torch.nn.Parameter(torch.ones(64))
        self.trained: list[Any] = []
        self.validated: list[list[list[str]]] = []
        self.tested: list[str] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if "place" in batch:
            self.trained.append((batch["place"], batch["keys"]))
        image = batch["image"].float().flatten(1) / 65535
        loss: torch.Tensor = ((image * self.pixels).sum(1) * batch["weight"]).square().mean()
        return loss

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        while len(self.validated[-1]) <= dataloader_idx:
            self.validated[-1].append([])
        self.validated[-1][dataloader_idx] += counted(batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.tested += counted(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def counted(batch: dict[str, Any]) -> list[str]:
    return [key for key, weight in zip(batch["keys"], batch["weight"].tolist(), strict=True) if weight]


def trainer(**settings: object) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **settings,
    )


def data(dataset: str, **settings: Any) -> ShardDataModule:
    return ShardDataModule(dataset, batch=SPEC, fields=FIELDS, **{"convert": with_keys, **settings})


def fit(dataset: str, num_steps: int, saved: Path | None = None) -> tuple[Counting, Trainer]:
    module, run = Counting(), trainer(max_steps=num_steps, accumulate_grad_batches=2)
    run.fit(module, data(dataset), ckpt_path=saved, weights_only=True)
    return module, run


def test_every_validation_sees_every_sample_once_and_in_the_same_order(dataset: str) -> None:
    module = Counting()
    run = trainer(max_steps=8, accumulate_grad_batches=2, val_check_interval=4, num_sanity_val_steps=1)
    run.fit(module, data(dataset, eval_split="val"))
    sanity, *rounds = module.validated
    assert len(rounds) >= 2
    assert len(sanity[0]) == 2  # one batch, cut off
    for (keys,) in rounds:
        assert len(keys) == len(set(keys)) == SPLITS["val"]
        assert [keys] == rounds[0]


def test_several_validations_of_splits_and_parts_and_a_test(dataset: str) -> None:
    module = Counting()
    parts: list[Any] = ["val", ("val", "facts.modality == 'CR'"), "test"]
    module_data = data(dataset, eval_split=parts, test_split="test")
    run = trainer(max_steps=2, accumulate_grad_batches=2, val_check_interval=4, num_sanity_val_steps=0)
    run.fit(module, module_data)
    run.test(module, module_data)
    whole, some, other = module.validated[-1]
    assert len(set(whole)) == len(whole) == SPLITS["val"]
    opened = Dataset.open(dataset)
    modality = {opened.samples.sample_key(row): opened.samples.modality(row) for row in opened.splits["val"]}
    assert set(some) == {key for key, found in modality.items() if found == "CR"}
    assert 0 < len(some) < len(whole)
    assert sorted(other) == sorted(module.tested)
    assert len(set(other)) == SPLITS["test"]


def test_a_condition_of_all_and_one_of_a_part_are_both_kept(dataset: str) -> None:
    module, split = Counting(), ("train", "facts.modality == 'CR'")
    run = trainer(max_epochs=1, accumulate_grad_batches=2)
    run.fit(module, data(dataset, train_split=split, where="facts.modality in ('CR', 'DX')"))
    opened = Dataset.open(dataset)
    rows = {opened.samples.sample_key(row): opened.samples.modality(row) for row in opened.splits["train"]}
    assert {rows[key] for _, keys in module.trained for key in keys} == {"CR"}


def test_a_fit_resumed_after_any_step_sees_the_same_samples_and_ends_with_the_same_weights(
    dataset: str, tmp_path: Path
) -> None:
    whole, _ = fit(dataset, 7)
    assert len(whole.trained) == 14
    assert {place[0] for place, _ in whole.trained} == {0, 1}  # across the end of an epoch
    for step in range(1, 7):
        first, run = fit(dataset, step)
        run.save_checkpoint(tmp_path / f"{step}.ckpt")
        second, _ = fit(dataset, 7, tmp_path / f"{step}.ckpt")
        assert first.trained + second.trained == whole.trained, step
        assert torch.equal(second.pixels, whole.pixels), step


def test_steps_get_tensors_by_default(dataset: str) -> None:
    run = trainer(max_steps=2, accumulate_grad_batches=2)
    module = Counting()
    run.fit(module, data(dataset, convert=None))
    assert run.global_step == 2
    assert not torch.equal(module.pixels, torch.ones(64))


def test_a_trainer_that_steps_at_other_places_is_refused(dataset: str) -> None:
    with pytest.raises(ConfigError, match=r"pass accumulate_grad_batches=2"):
        trainer(max_steps=1).fit(Counting(), data(dataset))


def test_accumulation_covers_the_step(dataset: str) -> None:
    assert [data(dataset).accumulation(world_size) for world_size in (1, 2)] == [2, 1]
