"""The loss is a weighted sum over labelled tokens."""

from __future__ import annotations

import math

import torch

from shardflow.training.sequences import IGNORED_LABEL, weighted_token_loss


def test_equals_the_sum_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[1, 4, IGNORED_LABEL], [0, IGNORED_LABEL, IGNORED_LABEL]])
    weights = torch.tensor([1.0, 0.5])
    expected = 0.0
    for row, column, label, weight in ((0, 0, 1, 1.0), (0, 1, 4, 1.0), (1, 0, 0, 0.5)):
        exponentials = [math.exp(value) for value in logits[row, column].tolist()]
        expected -= weight * math.log(exponentials[label] / sum(exponentials))
    assert abs(float(weighted_token_loss(logits, labels, weights)) - expected) < 1e-12


def test_nothing_to_predict_is_zero_with_zero_gradients() -> None:
    for labels, weights in (
        (torch.full((2, 3), IGNORED_LABEL), torch.ones(2)),
        (torch.ones(2, 3, dtype=torch.int64), torch.zeros(2)),
    ):
        logits = torch.randn(2, 3, 5, requires_grad=True)
        loss = weighted_token_loss(logits, labels, weights)
        torch.autograd.backward(loss)
        assert float(loss.detach()) == 0.0
        assert logits.grad is not None
        assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_half_precision_is_added_up_in_single() -> None:
    logits = torch.zeros(1, 4096, 3, dtype=torch.bfloat16)
    labels = torch.zeros(1, 4096, dtype=torch.int64)
    loss = weighted_token_loss(logits, labels, torch.ones(1))
    assert loss.dtype == torch.float32
    assert abs(float(loss) - 4096 * math.log(3)) < 0.5
