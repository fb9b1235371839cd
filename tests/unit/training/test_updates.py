"""From gradients to weights: means over tokens, clipping, steps that are not taken, the loss scale."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from shardflow.errors import TrainingError
from shardflow.training.rates import OptimizerConfig
from shardflow.training.step import Updates, build_optimizer
from tests.tiny_models import optimizer_tensors


class Case:
    """A small model with gradients made by hand."""

    def __init__(self, *, scaled: bool = False, sgd: bool = False, **settings: object) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(3, 2).double()
        chosen = OptimizerConfig(**settings)  # type: ignore[arg-type]
        self.optimizer = (
            torch.optim.SGD(self.model.parameters(), lr=1.0) if sgd else build_optimizer(self.model, chosen)
        )
        self.updates = Updates(self.model, self.optimizer, chosen, is_scaled=scaled)

    def set_gradients(self, value: float = 1.0) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, value * self.updates.loss_scale)

    def step(self, value: float = 1.0, *, num_tokens: float = 4.0, loss: float = 1.0) -> bool:
        """Take a step; returns whether it was skipped."""
        self.set_gradients(value)
        before = self.updates.num_skipped
        self.updates.apply(num_tokens, loss=loss, where="epoch 1, step 7")
        return self.updates.num_skipped > before

    def state(self) -> dict[str, torch.Tensor]:
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        moments = optimizer_tensors(self.model, self.optimizer)
        return weights | {name: tensor.clone() for name, tensor in moments.items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_step_without_tokens_changes_nothing() -> None:
    """AdamW would decay weights and coast on its momentum even with a zero gradient."""
    case = Case(weight_decay=0.5, learning_rate=0.1)
    case.step()
    before = case.state()
    case.set_gradients(0.0)
    assert case.updates.apply(0.0, loss=0.0, where="here") is None
    assert case.updates.num_skipped == 0
    assert_same(before, case.state())
    assert all(parameter.grad is None for parameter in case.model.parameters())


@pytest.mark.parametrize("scaled", [False, True])
def test_update_follows_the_mean_over_the_steps_tokens(scaled: bool) -> None:
    case = Case(sgd=True, scaled=scaled, max_gradient_norm=1e9)
    before = copy.deepcopy(case.model)
    case.set_gradients(3.0)
    norm = case.updates.apply(4.0, loss=1.0, where="here")
    for old, new in zip(before.parameters(), case.model.parameters(), strict=True):
        assert torch.allclose(new, old - 3.0 / 4.0, rtol=1e-12, atol=1e-14)
    assert norm == pytest.approx(0.75 * 8**0.5)


def test_gradient_is_clipped_to_its_norm() -> None:
    case = Case(sgd=True, max_gradient_norm=1e-3)
    before = copy.deepcopy(case.model)
    case.set_gradients()
    norm = case.updates.apply(1.0, loss=1.0, where="here")
    assert norm == pytest.approx(8**0.5)
    moved = torch.cat(
        [(a - b).flatten() for a, b in zip(before.parameters(), case.model.parameters(), strict=True)]
    )
    assert float(moved.norm().detach()) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradient_that_is_not_finite_ends_the_run_and_changes_nothing(value: float) -> None:
    case = Case()
    case.step()
    before = case.state()
    with pytest.raises(TrainingError, match="epoch 1, step 7"):
        case.step(value)
    assert_same(before, case.state())


def test_skipped_steps_are_counted_and_change_nothing() -> None:
    case = Case(on_nonfinite="skip", max_skipped_steps=2)
    case.step()
    before = case.state()
    assert [case.step(float("nan")) for _ in range(2)] == [True, True]
    assert case.updates.num_skipped == 2
    assert_same(before, case.state())
    assert not case.step()  # a good one in between: the row begins anew
    assert [case.step(float("nan")) for _ in range(2)] == [True, True]
    with pytest.raises(TrainingError, match="3 times in a row"):
        case.step(float("nan"))


def test_the_row_of_skipped_steps_goes_on_over_a_restart() -> None:
    case = Case(on_nonfinite="skip", max_skipped_steps=2)
    for _ in range(2):
        case.step(float("nan"))
    resumed = Case(on_nonfinite="skip", max_skipped_steps=2)
    resumed.updates.load_state_dict(json.loads(json.dumps(case.updates.state_dict())))
    assert resumed.updates.num_skipped == 2
    with pytest.raises(TrainingError, match="3 times in a row"):
        resumed.step(float("nan"))


def test_an_overflow_halves_the_loss_scale_and_is_no_mistake() -> None:
    case = Case(scaled=True, initial_loss_scale=8.0)
    before = case.state()
    assert case.step(float("inf"))
    assert case.updates.loss_scale == 4.0
    assert_same(before, case.state())
    assert not case.step()


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    case = Case(scaled=True, initial_loss_scale=8.0)
    with pytest.raises(TrainingError, match="gradient is not finite"):
        case.step(float("nan"), loss=float("nan"))
    assert case.updates.loss_scale == 8.0


def test_an_overflow_at_the_smallest_scale_is_a_mistake() -> None:
    case = Case(scaled=True, initial_loss_scale=1.0)
    for _ in range(24):
        assert case.step(float("inf"))
    with pytest.raises(TrainingError, match="gradient is not finite"):
        case.step(float("inf"))


def test_the_loss_scale_grows_again_and_survives_a_restart() -> None:
    case = Case(scaled=True, initial_loss_scale=8.0)
    for _ in range(999):
        case.step()
    resumed = Case(scaled=True)
    resumed.updates.load_state_dict(json.loads(json.dumps(case.updates.state_dict())))
    assert resumed.updates.loss_scale == 8.0
    resumed.step()
    assert resumed.updates.loss_scale == 16.0


def test_a_checkpoint_of_another_precision_leaves_the_initial_scale() -> None:
    case = Case(scaled=True, initial_loss_scale=32.0)
    case.updates.load_state_dict(Case().updates.state_dict())
    assert case.updates.loss_scale == 32.0
    case.updates.load_state_dict({})  # written before there was one
    assert case.updates.loss_scale == 32.0
