"""The loss of a micro-batch: a weighted sum over tokens, never a mean.

A mean over a micro-batch would make the step depend on how its samples were dealt to micro-batches of
unequal length; sums add up to the same step for every world size (docs/adr/0050).
"""

# ruff: noqa: N803, N806
# Tensors carry their axes as a suffix: B slots, T tokens, V vocabulary.
from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["IGNORED_LABEL", "weighted_token_loss"]

IGNORED_LABEL = -100
"""Label of a position that is not predicted: padding, and the last token of a row."""


def weighted_token_loss(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, weights_B: torch.Tensor
) -> torch.Tensor:
    """Sum the negative log-likelihood over the labelled tokens, each weighted as its sample is.

    Args:
        logits_BTV: ``(B, T, V)``, any float type; half precision is widened to float32 first.
        labels_BT: ``(B, T)`` int64, the token that follows each position, or :data:`IGNORED_LABEL`.
        weights_B: ``(B,)`` float, 1 for a sample and 0 for a padding slot.

    Returns:
        A scalar in nats, 0 with zero gradients where nothing is labelled or weighted.
    """
    if logits_BTV.dtype in {torch.float16, torch.bfloat16}:
        logits_BTV = logits_BTV.float()
    losses = functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return (losses.view_as(labels_BT).sum(dim=1) * weights_B.to(losses.dtype)).sum()
