"""How long the parts of a step take: by the wall on CPUs, by events in the device's stream on GPUs.

Nothing here waits for a device: events are read once the device has passed them, which is where the step asks
for its loss anyway. Nor does anything here touch a number: the hook of a parameter only looks at the clock.

The gradient exchange runs beside the backward, and ends after it. What it costs is the time after this rank's
last gradient: it is told by a hook on the parameter whose gradient came last when that was looked at last.
"""

# ruff: noqa: ARG002 - a hook gets more than it needs
from __future__ import annotations

import time
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardflow.telemetry import StageCounters
from shardflow.training.hooks import LoopHook


class StepClock(LoopHook):
    """Times the parts of a step; this one measures nothing."""

    def on_last_gradient(self) -> None:
        """Note that what may be the backward's last gradient of this rank came; called from any thread."""


class HostClock(StepClock):
    """For models on the CPU, whose work is done when a call returns.

    Args:
        counters: Gets the stages ``forward``, ``backward``, ``exchange`` and ``optimizer``.
    """

    def __init__(self, counters: StageCounters) -> None:
        self._counters = counters
        self._began_s = 0.0
        self._last_s: float | None = None

    def on_forward(self) -> None:
        """See `LoopHook`."""
        self._began_s = time.perf_counter()

    def on_backward(self, *, is_exchanged: bool) -> None:
        """See `LoopHook`."""
        self._end("forward", time.perf_counter())
        self._last_s = None

    def on_last_gradient(self) -> None:
        """See `StepClock`."""
        self._last_s = time.perf_counter()

    def on_backward_end(self) -> None:
        """See `LoopHook`."""
        now = time.perf_counter()
        if self._last_s is None:
            self._end("backward", now)
            return
        self._end("backward", self._last_s)
        self._end("exchange", now)

    def on_optimizer(self) -> None:
        """See `LoopHook`."""
        self._began_s = time.perf_counter()

    def on_optimizer_end(self) -> None:
        """See `LoopHook`."""
        self._end("optimizer", time.perf_counter())

    def _end(self, stage: str, now_s: float) -> None:
        self._counters.add(stage, now_s - self._began_s, 0, 1)
        self._began_s = now_s


class DeviceClock(StepClock):
    """For models on a GPU: events in the stream that computes.

    Args:
        counters: As of `HostClock`.
        device: The GPU.
    """

    def __init__(self, counters: StageCounters, device: torch.device) -> None:
        self._counters = counters
        self._device = device
        self._stream: Any = None
        self._began: Any = None
        self._last: Any = None
        self._ended: list[tuple[str, Any, Any]] = []

    def on_forward(self) -> None:
        """See `LoopHook`."""
        self._stream = torch.cuda.current_stream(self._device)
        self._began = self._record()

    def on_backward(self, *, is_exchanged: bool) -> None:
        """See `LoopHook`."""
        self._end("forward", self._record())
        self._last = None

    def on_last_gradient(self) -> None:
        """See `StepClock`."""
        # In the stream of the step, whatever stream the thread of the hook has; the newest record counts.
        if self._last is None:
            self._last = _event()
        self._last.record(self._stream)

    def on_backward_end(self) -> None:
        """See `LoopHook`."""
        ended = self._record()
        if self._last is None:
            self._end("backward", ended)
            return
        self._end("backward", self._last)
        self._end("exchange", ended)

    def on_optimizer(self) -> None:
        """See `LoopHook`."""
        self._stream = torch.cuda.current_stream(self._device)
        self._began = self._record()

    def on_optimizer_end(self) -> None:
        """See `LoopHook`."""
        self._end("optimizer", self._record())

    def on_loss(self) -> None:
        """See `LoopHook`."""
        while self._ended and self._ended[0][2].query():
            stage, began, ended = self._ended.pop(0)
            self._counters.add(stage, began.elapsed_time(ended) / 1000, 0, 1)

    def _end(self, stage: str, ended: Any) -> None:
        self._ended.append((stage, self._began, ended))
        self._began = ended

    def _record(self) -> Any:
        event = _event()
        event.record(self._stream)
        return event


class LastGradient(LoopHook):
    """Tells a clock when the last gradient of a backward has come, for the price of one hook a step.

    Which parameter's comes last depends on the graph: a look at all of them finds it out, and until the next
    look that one alone is asked.

    Args:
        model: Its parameters get the hooks, for the time of a backward.
        clock: Is told.
    """

    def __init__(self, model: nn.Module, clock: StepClock) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._clock = clock
        self._last: nn.Parameter | None = None
        self._handles: list[RemovableHandle] = []

    def look_again(self) -> None:
        """Look at all parameters in the next backward."""
        self._last = None

    def on_backward(self, *, is_exchanged: bool) -> None:
        """Watch the backward, if it ends with an exchange."""
        if is_exchanged:
            asked = self._parameters if self._last is None else [self._last]
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._came)  # type: ignore[no-untyped-call]
                for parameter in asked
            ]

    def on_backward_end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _came(self, parameter: torch.Tensor) -> None:
        self._last = cast("nn.Parameter", parameter)
        self._clock.on_last_gradient()


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
