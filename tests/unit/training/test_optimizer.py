"""The optimizer's groups and the learning rate's shape."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from shardflow.training.config import OptimizerConfig
from shardflow.training.step import build_optimizer, learning_rate, set_learning_rate


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decays[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0]


def test_rate_rises_falls_and_ends_at_its_share() -> None:
    settings = OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_learning_rate_share=0.25)
    rates = [learning_rate(settings, step, 20) for step in range(21)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert rates[20] == pytest.approx(0.5)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_warm_up_longer_than_the_run_is_no_mistake(num_steps: int) -> None:
    settings = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert all(0 < learning_rate(settings, step, num_steps) <= 1 for step in range(num_steps))


def test_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    assert isinstance(optimizer, torch.optim.AdamW)
