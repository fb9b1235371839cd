"""AdamW, and the learning rate as a function of the step alone.

The learning rate is never state: it is computed from the step number, so a resumed run has it right by
construction.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from shardflow.training.config import OptimizerSettings

__all__ = ["build_optimizer", "learning_rate", "set_learning_rate"]


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Build AdamW; matrices decay, vectors (biases, norms, the start embedding) do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )


def learning_rate(settings: OptimizerSettings, step: int, num_steps: int) -> float:
    """Compute the learning rate of a step: linear warm-up, then a cosine down to the final share.

    Args:
        settings: Highest rate, length of the warm-up, final share.
        step: Global step, from 0.
        num_steps: Steps of the whole run.

    Example:
        >>> settings = OptimizerSettings(learning_rate=1.0, warmup_steps=2, final_learning_rate_share=0.1)
        >>> [round(learning_rate(settings, step, 6), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232]
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    final = settings.final_learning_rate_share
    return settings.learning_rate * (final + (1.0 - final) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
