"""The LightningDataModule beside a trainer of one process; two ranks are in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from lightning import LightningModule, Trainer

from shardflow.errors import ConfigError
from shardflow.loading import Batch, ImageView, LoaderConfig
from shardflow.sampling import BatchSpec
from shardflow.training.lightning import ShardDataModule
from tests.tiny_runs import NUM_VAL, TinyInput

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning warns of is not ours to judge

SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=2)
CONFIG = LoaderConfig(view=ImageView(num_slices=2, rows=8, columns=8))


class Counting(LightningModule):
    """Trains one number and notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(()))
        self.validated: list[list[str]] = []

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        return (self.number - 1).square()

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Batch, _: int) -> None:
        weights = batch.arrays["weight"].tolist()
        self.validated[-1] += [
            k for k, w in zip(batch.sample_keys, weights, strict=True) if w and k is not None
        ]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


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


def data(tiny: TinyInput) -> ShardDataModule:
    return ShardDataModule(tiny.dataset, batch=SPEC, config=CONFIG, eval_split="val")


def test_every_validation_sees_every_sample_once_and_in_the_same_order(tiny: TinyInput) -> None:
    module = Counting()
    run = trainer(max_steps=8, accumulate_grad_batches=2, val_check_interval=4, num_sanity_val_steps=1)
    run.fit(module, data(tiny))
    sanity, *rounds = module.validated
    assert len(rounds) >= 2
    assert len(sanity) == 2  # one batch, cut off
    for keys in rounds:
        assert len(keys) == len(set(keys)) == NUM_VAL
        assert keys == rounds[0]


def test_a_trainer_that_steps_at_other_places_is_refused(tiny: TinyInput) -> None:
    with pytest.raises(ConfigError, match=r"accumulate_grad_batches must be 2, .* got 1"):
        trainer(max_steps=1).fit(Counting(), data(tiny))


def test_accumulation_covers_the_step(tiny: TinyInput) -> None:
    assert [data(tiny).accumulation(world_size) for world_size in (1, 2)] == [2, 1]
