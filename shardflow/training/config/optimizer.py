"""Settings of the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from shardflow.configs import Bounds, check_fields
from shardflow.errors import ConfigError
from shardflow.training.config.ranges import Count, CountOrZero, Share

__all__ = ["OptimizerSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW, linear warm-up, cosine decay."""

    learning_rate: Annotated[float, Bounds(0.0)] = 3e-4
    """Highest learning rate, reached at the end of the warm-up."""
    final_learning_rate_share: Share = 0.1
    """The cosine ends at this share of the highest learning rate."""
    warmup_steps: CountOrZero = 10
    weight_decay: Annotated[float, Bounds(0.0)] = 0.01
    """Applied to matrices only, not to biases, norms and position tables."""
    beta1: Annotated[float, Bounds(0.0, 0.9999)] = 0.9
    beta2: Annotated[float, Bounds(0.0, 0.99999)] = 0.95
    epsilon: Annotated[float, Bounds(0.0)] = 1e-8
    max_gradient_norm: Annotated[float, Bounds(0.0)] = 1.0
    """Gradients of a larger norm are scaled down to it."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """A step whose gradient is not finite: ends the run, or changes nothing and is counted."""
    max_skipped_steps: Count = 10
    """Under ``skip``, this many such steps in a row end the run all the same."""
    initial_loss_scale: Annotated[float, Bounds(1.0)] = 16384.0
    """Under ``run.precision = "fp16"``: halved when a gradient overflows, doubled after 1,000 good steps."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.epsilon == 0.0:
            # A weight that got no gradient yet would become 0 / 0.
            raise ConfigError("epsilon must be above 0, got 0; use 1e-8.")
        if self.max_gradient_norm == 0.0:
            raise ConfigError(
                "max_gradient_norm must be above 0, got 0; use 1.0, or a large number for no clipping."
            )
