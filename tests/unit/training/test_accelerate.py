"""Accelerate over a loader of fields: registered, not prepared; resumed exactly; distributed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import Loader, World
from shardflow.training.frameworks import register_loader
from tests.field_cases import make_case_dataset

pytestmark = pytest.mark.filterwarnings("ignore")  # what Accelerate warns of is not ours to judge

SPEC = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2)
FIELDS = {
    "image": sf.Image(series="role == 'frontal'", size=(8, 8), missing="pad"),
    "report": sf.Text(missing="pad"),
}
NUM_STEPS = 5


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_case_dataset(tmp_path_factory.mktemp("accelerate") / "a")


@pytest.fixture(autouse=True)
def fresh() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def _loader(dataset: Dataset, **settings: Any) -> Loader:
    return Loader(dataset, split="train", batch=SPEC, seed=3, fields=FIELDS, **settings)


class Progress:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def _train(dataset: Dataset, saved: Path, stop: int) -> tuple[list[Any], torch.Tensor]:
    """Train to a step, from a saved state if there is one; return the samples seen and the weights."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    seen: list[Any] = []
    progress = Progress()
    with _loader(dataset) as loader:
        register_loader(accelerator, loader)
        accelerator.register_for_checkpointing(progress)
        if saved.exists():
            accelerator.load_state(str(saved))
        while progress.step < stop:
            for batch in loader:
                seen.append((batch.epoch, batch.step, batch.micro, batch.info.sample_keys))
                with accelerator.accumulate(model):
                    tensors = batch.torch(accelerator.device)
                    outputs = model(tensors["image"].float() / 65535)[:, 0]
                    accelerator.backward(((outputs - 1).square() * tensors["weight"]).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                progress.step += accelerator.sync_gradients
                if progress.step == stop:
                    break
        accelerator.save_state(str(saved))
    weights: torch.Tensor = model[2].weight.detach()
    return seen, weights


def test_a_loop_resumed_after_any_step_sees_the_same_samples_and_ends_with_the_same_weights(
    dataset: Dataset, tmp_path: Path
) -> None:
    whole, weights = _train(dataset, tmp_path / "whole", NUM_STEPS)
    with _loader(dataset) as loader:
        wanted = [(b.epoch, b.step, b.micro, b.info.sample_keys) for _ in range(2) for b in loader]
    assert whole == wanted[: 2 * NUM_STEPS]
    assert {place[0] for place in whole} == {0, 1}  # across the end of an epoch
    for step in range(1, NUM_STEPS):
        first, _ = _train(dataset, tmp_path / str(step), step)
        second, ended = _train(dataset, tmp_path / str(step), NUM_STEPS)
        assert first + second == whole, step
        assert torch.equal(ended, weights), step


def test_prepare_leaves_a_loader_as_it_is(dataset: Dataset) -> None:
    with _loader(dataset) as loader:
        assert Accelerator(cpu=True).prepare(loader) is loader


@pytest.mark.parametrize("name", ["dispatch_batches", "split_batches"])
def test_a_second_distribution_is_refused(dataset: Dataset, name: str) -> None:
    config = DataLoaderConfiguration(**{name: True})
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    with _loader(dataset) as loader, pytest.raises(ConfigError, match=f"{name}=True would distribute"):
        register_loader(accelerator, loader)


def test_another_accumulation_or_rank_is_refused(dataset: Dataset) -> None:
    with _loader(dataset) as loader, pytest.raises(ConfigError, match="pass gradient_accumulation_steps=2"):
        register_loader(Accelerator(cpu=True), loader)
    other = _loader(dataset, world=World(rank=1, world_size=2))
    with other, pytest.raises(ConfigError, match="rank 1 of 2 and this process is rank 0 of 1"):
        register_loader(Accelerator(cpu=True), other)
