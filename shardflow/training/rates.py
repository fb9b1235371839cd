"""Settings of the optimizer, and the learning rate of each step; without torch.

The learning rate is computed from the step number, never stored, so a resumed run has it right by
construction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from shardflow.config import Bounds, check_fields
from shardflow.errors import ConfigError

_DECAY_SHARE = 10
"""``wsd`` decays in the last tenth of a run where nothing else is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, a linear warm-up, and a schedule of the learning rate."""

    learning_rate: Annotated[float, Bounds(0.0)] = 3e-4
    """Highest learning rate, reached at the end of the warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up: ``cosine`` and ``linear`` fall to the final share at the run's end; ``constant``
    stays; ``wsd`` (warm-up, stable, decay; Hu et al. 2024) stays until the last ``decay_steps``, in which it
    falls in a straight line. Where a run is made longer, steps of the last two remain as they were, but for
    those of the decay."""
    decay_steps: Annotated[int, Bounds(0)] = 0
    """Under ``wsd``; 0 is a tenth of the run."""
    final_learning_rate_share: Annotated[float, Bounds(0.0, 1.0)] = 0.1
    """A schedule that falls ends at this share of the highest learning rate."""
    warmup_steps: Annotated[int, Bounds(0)] = 10
    layer_decay: Annotated[float, Bounds(0.01, 1.0)] = 1.0
    """Layer-wise rates (Bao et al. 2022, BEiT): each of n repeated layers of an encoder or a decoder gets
    this share of the rate of the next one, the last one this share once, what comes before them n + 1 times,
    and what comes behind them the rate itself."""
    learning_rate_scales: dict[str, float] = field(default_factory=dict)
    """Factors of the rate by the beginning of a parameter's name, the longest that fits, such as
    ``"model.model.vision_tower" = 0.1``; on top of ``layer_decay``."""
    weight_decay: Annotated[float, Bounds(0.0)] = 0.01
    """Applied to matrices only, not to biases, norms and position tables."""
    beta1: Annotated[float, Bounds(0.0, 0.9999)] = 0.9
    beta2: Annotated[float, Bounds(0.0, 0.99999)] = 0.95
    epsilon: Annotated[float, Bounds(0.0)] = 1e-8
    max_gradient_norm: Annotated[float, Bounds(0.0)] = 1.0
    """Gradients of a larger norm are scaled down to it."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """A step whose gradient is not finite: ends the run, or changes nothing and is counted."""
    max_skipped_steps: Annotated[int, Bounds(1)] = 10
    """Under ``skip``, this many such steps in a row end the run all the same."""
    initial_loss_scale: Annotated[float, Bounds(1.0)] = 16384.0
    """Under ``run.precision = "fp16"``: halved when a gradient overflows, doubled after 1,000 good steps."""
    ema_decay: Annotated[float, Bounds(0.0, 0.999999)] = 0.0
    """Keep an exponential moving average of the trained weights, such as 0.999: a step moves it by ``1 -
    ema_decay`` of the way to them. It begins with the weights of the first step, takes as much memory as the
    weights, and is ``NAME.ema`` in a checkpoint's optimizer. 0 keeps none."""
    evaluate_ema: bool = True
    """Evaluate the average, where there is one, in place of the weights."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.epsilon == 0.0:
            # A weight that got no gradient yet would become 0 / 0.
            raise ConfigError("epsilon must be above 0, got 0; use 1e-8.")
        if self.max_gradient_norm == 0.0:
            raise ConfigError(
                "max_gradient_norm must be above 0, got 0; use 1.0, or a large number for no clipping."
            )
        if self.decay_steps and self.schedule != "wsd":
            raise ConfigError(
                f"optimizer.decay_steps needs optimizer.schedule 'wsd', got {self.schedule!r}; leave out one."
            )
        for name, scale in self.learning_rate_scales.items():
            if not 0.0 < scale < math.inf:
                raise ConfigError(
                    f"optimizer.learning_rate_scales must be above 0, got {scale:g} for {name!r}; name what "
                    "is not trained in model.frozen."
                )


def learning_rate(settings: OptimizerConfig, step: int, num_steps: int) -> float:
    """Compute the learning rate of a step: linear warm-up, then the schedule.

    Args:
        settings: Highest rate, length of the warm-up, schedule, final share.
        step: Global step, from 0.
        num_steps: Steps of the whole run.

    Example:
        >>> settings = OptimizerConfig(learning_rate=1.0, warmup_steps=2, final_learning_rate_share=0.1)
        >>> [round(learning_rate(settings, step, 6), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232]
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    begin = settings.warmup_steps
    if settings.schedule == "wsd":
        begin = max(begin, num_steps - (settings.decay_steps or num_steps // _DECAY_SHARE))
    progress = min(1.0, max(0, step - begin) / max(1, num_steps - begin))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1.0 - progress
    final = settings.final_learning_rate_share
    return settings.learning_rate * (final + (1.0 - final) * left)
