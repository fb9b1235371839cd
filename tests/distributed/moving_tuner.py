"""A tuner that measures nothing and moves: through all executions and back, and other settings between."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final
from unittest import mock

from shardflow.monitoring.tuner import Change, Tuner
from shardflow.monitoring.tuner_numbers import StepNumbers

__all__ = ["MovingTuner", "moving"]

_MOVES: Final[dict[int, tuple[str, int | str]]] = {
    1: ("loader.execution", "process"),
    3: ("loader.prefetch_bytes", 2 << 20),
    4: ("loader.execution", "workers"),
    5: ("loader.num_threads", 2),
    7: ("loader.execution", "threads"),
    9: ("loader.num_threads", 1),
}
"""By the step of this start, from 1. The decision travels in the next step and acts after it."""


class MovingTuner(Tuner):
    """Changes what `_MOVES` says, whatever was measured."""

    def step(self, numbers: StepNumbers, global_step: int) -> Change | None:
        self.num_steps += 1
        self._global_step = global_step
        move = _MOVES.get(self.num_steps)
        return None if move is None else Change(setting=move[0], value=move[1])


def moving(stack: ExitStack) -> None:
    """Let runs of this process, as long as the stack, be tuned by it; ``tune.mode`` is theirs to set."""
    stack.enter_context(mock.patch("shardflow.training.tuning.Tuner", MovingTuner))
