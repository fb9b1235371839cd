"""From a step's summed gradient to new weights: scale, clip, update; or nothing at all.

Owns what becomes of a step whose gradient is not finite, and the loss scale of fp16. Every rank sees the same
norm (that of the exchanged gradient), so all take the same branch without asking one another. Invariant: a
step that is not taken leaves weights, moments and the optimizer's count as they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from shardflow.errors import TrainingError
from shardflow.training.config import OptimizerSettings
from shardflow.training.sharding import gather_whole

__all__ = ["Update", "Updates"]

_LOWEST_SCALE: Final = 2.0**-24
_HIGHEST_SCALE: Final = 2.0**24
_GROWTH_STEPS: Final = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What became of one step's gradient."""

    norm: float | None
    """Before clipping; None for a step without tokens or with a gradient that is not finite."""
    is_skipped: bool
    """The gradient was not finite, and nothing changed."""


class Updates:
    """Applies the gradients of one run.

    Args:
        model: Its parameters hold the gradients; whole or shares.
        optimizer: Its optimizer.
        settings: The table ``[optimizer]``.
        is_scaled: Whether the loss is scaled, for fp16.

    Attributes:
        loss_scale: What the next step's loss is multiplied by.
        num_skipped: Steps of the whole run that changed nothing because of their gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: OptimizerSettings,
        *,
        is_scaled: bool = False,
    ) -> None:
        self.loss_scale = settings.initial_loss_scale if is_scaled else 1.0
        self.num_skipped = 0
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._is_scaled = is_scaled
        self._good_steps = 0
        self._skipped_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; JSON values."""
        return {
            "loss_scale": self.loss_scale if self._is_scaled else None,
            "good_steps": self._good_steps,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; one of another precision has no loss scale, and an old one nothing."""
        if self._is_scaled and state.get("loss_scale") is not None:
            self.loss_scale, self._good_steps = float(state["loss_scale"]), int(state["good_steps"])
        self.num_skipped = int(state.get("num_skipped", 0))
        self._skipped_in_a_row = int(state.get("skipped_in_a_row", 0))

    def apply(self, num_tokens: float, *, loss: float, where: str) -> Update:
        """Divide the summed gradient by the step's tokens, clip it and update the weights; then forget it.

        Args:
            num_tokens: Weighted tokens of the step over all ranks.
            loss: The step's summed loss over all ranks, without the scale.
            where: Names the step in an error.

        Returns:
            What became of it. A step without tokens changes neither weights nor optimizer (AdamW would
            decay weights and coast on its momentum even with a zero gradient).

        Raises:
            TrainingError: the gradient is not finite, and the settings do not let the step be skipped;
                weights and optimizer are as they were.
        """
        try:
            return self._apply(num_tokens, loss, where)
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _apply(self, num_tokens: float, loss: float, where: str) -> Update:
        if num_tokens == 0.0:
            return Update(norm=None, is_skipped=False)
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.div_(num_tokens * self.loss_scale)
        norm = gather_whole(nn.utils.get_total_norm(gradients))
        if not bool(torch.isfinite(norm)):
            self._skip(loss, where)
            return Update(norm=None, is_skipped=True)
        nn.utils.clip_grads_with_norm_(parameters, self._settings.max_gradient_norm, norm)
        self._optimizer.step()
        self._skipped_in_a_row = 0
        self._good_steps += 1
        if self._is_scaled and self._good_steps >= _GROWTH_STEPS:
            self.loss_scale, self._good_steps = min(self.loss_scale * 2.0, _HIGHEST_SCALE), 0
        return Update(norm=float(norm), is_skipped=False)

    def _skip(self, loss: float, where: str) -> None:
        self.num_skipped += 1
        if self._is_scaled and math.isfinite(loss) and self.loss_scale > _LOWEST_SCALE:
            # The forward was sound, so the backward overflowed; that is no mistake of the run.
            self.loss_scale, self._good_steps = self.loss_scale / 2.0, 0
            return
        self._skipped_in_a_row += 1
        settings = self._settings
        if settings.on_nonfinite == "raise" or self._skipped_in_a_row > settings.max_skipped_steps:
            times = f" {self._skipped_in_a_row} times in a row" if self._skipped_in_a_row > 1 else ""
            raise TrainingError(
                f"the gradient must be finite, got a norm that is not{times} ({where}); lower "
                "optimizer.learning_rate, or look at this step's samples in the run ledger."
            )
