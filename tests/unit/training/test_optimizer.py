"""The optimizer's groups and the learning rate's shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    get_constant_schedule,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from shardflow.errors import ConfigError
from shardflow.training.rates import OptimizerConfig, learning_rate
from shardflow.training.step import WeightAverage, build_optimizer, learning_rate_scales, set_learning_rate


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


def optimizer_of_oracle() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)


ORACLES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "linear": lambda one: get_linear_schedule_with_warmup(one, 0, 20),
    "cosine": lambda one: get_cosine_schedule_with_warmup(one, 0, 20),
    "constant": get_constant_schedule,
    "wsd": lambda one: get_wsd_schedule(
        one, num_warmup_steps=0, num_decay_steps=5, num_training_steps=20, decay_type="linear"
    ),
}


@pytest.mark.parametrize("schedule", ORACLES)
def test_schedules_are_those_of_transformers(schedule: Any) -> None:
    settings = OptimizerConfig(
        learning_rate=2.0,
        schedule=schedule,
        decay_steps=5 if schedule == "wsd" else 0,
        warmup_steps=0,
        final_learning_rate_share=0.0,
    )
    optimizer = optimizer_of_oracle()
    oracle = ORACLES[schedule](optimizer)
    for step in range(20):
        assert learning_rate(settings, step, 20) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        oracle.step()


def test_stable_part_does_not_depend_on_the_length_of_the_run() -> None:
    settings = OptimizerConfig(learning_rate=1.0, schedule="wsd", warmup_steps=2)
    shorter, longer = (
        [learning_rate(settings, step, length) for step in range(length)] for length in (30, 60)
    )
    assert shorter[:28] == longer[:28] == [0.5, *[1.0] * 27]
    assert shorter[28:] == pytest.approx([0.7, 0.4])
    assert longer[54:] == [1.0, *(pytest.approx(1 - 0.15 * number) for number in range(1, 6))]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, 2, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(2))
        self.norm = nn.LayerNorm(2, bias=False)


def test_rates_of_layers_and_of_names() -> None:
    model = nn.ModuleDict({"first": Encoder(), "second": Encoder(), "head": nn.Linear(2, 1, bias=False)})
    settings = OptimizerConfig(layer_decay=0.5, learning_rate_scales={"second": 0.1, "second.norm": 10.0})
    scales = learning_rate_scales(model, settings)
    assert scales == {
        "first.embedding.weight": 0.125,
        "first.layers.0.0.weight": 0.25,
        "first.layers.1.0.weight": 0.5,
        "first.norm.weight": 1.0,
        "second.embedding.weight": 0.0125,
        "second.layers.0.0.weight": 0.025,
        "second.layers.1.0.weight": 0.05,
        "second.norm.weight": 10.0,
        "head.weight": 1.0,
    }
    optimizer = build_optimizer(model, settings)
    set_learning_rate(optimizer, 2.0)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in model.parameters()] == [
        2.0 * scales[n] for n, _ in model.named_parameters()
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"layer_decay": 0.5}, "repeated layers"), ({"learning_rate_scales": {"tower": 0.5}}, "'tower'")],
)
def test_rates_of_what_a_model_has_not_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(nn.Linear(2, 2), OptimizerConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay_steps": 4}, "needs optimizer.schedule 'wsd'"),
        ({"learning_rate_scales": {"a": 0.0}}, "model.frozen"),
    ],
)
def test_settings_without_an_effect_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)


def test_average_is_that_of_torch_and_weights_return_after_a_swap() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    oracle = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    optimizer = build_optimizer(model, OptimizerConfig())
    average = WeightAverage(optimizer, 0.9)
    for _ in range(4):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        oracle.update_parameters(model)
    before = [parameter.clone() for parameter in model.parameters()]
    with average.swapped():
        assert all(map(torch.equal, model.parameters(), oracle.module.parameters()))
        assert not torch.equal(model.weight, before[0])
    assert all(map(torch.equal, model.parameters(), before))
