"""Model and optimizer as named tensors: there and back, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardflow.errors import CheckpointError
from shardflow.training.checkpoint.tensors import load_model, load_optimizer
from shardflow.training.rates import OptimizerConfig
from shardflow.training.step import build_optimizer
from tests.tiny_models import model_tensors, optimizer_tensors


class Tied(nn.Module):
    """A tied weight, a buffer that is state and one that is not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=True)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.full((2,), float(seed)))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids))
        return logits


def trained(seed: int, steps: int) -> tuple[Tied, torch.optim.AdamW]:
    model = Tied(seed)
    optimizer = build_optimizer(model, OptimizerConfig())
    for step in range(steps):
        train_step(model, optimizer, step)
    return model, optimizer


def train_step(model: Tied, optimizer: torch.optim.AdamW, step: int) -> None:
    torch.autograd.backward(model(torch.tensor([step % 5, 1])).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def test_training_goes_on_bit_for_bit() -> None:
    model, optimizer = trained(1, steps=3)
    other, other_optimizer = trained(2, steps=0)
    load_model(other, model_tensors(model))
    load_optimizer(other, other_optimizer, optimizer_tensors(model, optimizer))
    for step in range(3, 6):
        train_step(model, optimizer, step)
        train_step(other, other_optimizer, step)
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensor, model_tensors(other)[name]), name
    for name, tensor in optimizer_tensors(model, optimizer).items():
        assert torch.equal(tensor, optimizer_tensors(other, other_optimizer)[name]), name


def test_tied_weight_stands_once_and_scratch_does_not() -> None:
    assert sorted(model_tensors(Tied(1))) == ["count", "embedding.weight", "head.bias"]


def test_loading_shares_no_memory() -> None:
    model, optimizer = trained(1, steps=1)
    tensors = optimizer_tensors(model, optimizer)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    load_optimizer(model, optimizer, copies)
    train_step(model, optimizer, 1)
    assert all(
        torch.equal(copies[name], tensor) for name, tensor in optimizer_tensors(*trained(1, steps=1)).items()
    )


def test_other_model_is_refused_by_name() -> None:
    model, optimizer = trained(1, steps=1)
    tensors = model_tensors(model)
    with pytest.raises(CheckpointError, match=r"1 missing, head\.bias"):
        load_model(model, {name: tensor for name, tensor in tensors.items() if name != "head.bias"})
    with pytest.raises(CheckpointError, match="1 unknown, extra"):
        load_model(model, {**tensors, "extra": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"head\.bias must be \(5,\)"):
        load_model(model, {**tensors, "head.bias": torch.zeros(6)})
    with pytest.raises(CheckpointError, match=r"torch\.float16"):
        load_model(model, {**tensors, "head.bias": torch.zeros(5, dtype=torch.float16)})
    with pytest.raises(CheckpointError, match=r"got other\.exp_avg"):
        load_optimizer(model, optimizer, {"other.exp_avg": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"head\.bias\.exp_avg must be"):
        load_optimizer(model, optimizer, {"head.bias.exp_avg": torch.zeros(6)})
