"""Interval measurements of a run: stages of its steps, cache use, process facts.

Stages are timed by the wall clock on CPUs and by events in the device's stream on GPUs. Nothing waits for a
device: events are read once the device has passed them, where the step asks for its loss anyway. The gradient
exchange overlaps the backward and ends after it; its cost is the time after this rank's last gradient, seen
by a hook on the parameter whose gradient came last at the last check.

All ranks end an interval at the same step without a message of its own: each rank's time since the last step
travels with the numbers of the step, and an interval ends with the first step at which the longest of these
add up to ``interval_s``.
"""

from __future__ import annotations

import logging
import shutil
import socket
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, cast
from urllib.parse import urlsplit

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from shardflow.loading import Loader
from shardflow.telemetry import Interval, IntervalListener, RankMeasures, StageCounters, interval_of
from shardflow.training.device.transfer import Transfer
from shardflow.training.distributed import Ranks
from shardflow.training.hooks import LoopHook, StepReport, StepReports
from shardflow.training.metrics import MetricsWriter, StepMetrics

# ruff: noqa: ARG002 - a hook gets more than it needs

_LOGGER = logging.getLogger(__name__)
_TIERS: Final = ("cache_ram", "cache_disk", "cache_origin")
_LOCAL: Final = "local"


class StepClock(LoopHook):
    """Clock of the parts of a step; this one measures nothing."""

    def on_last_gradient(self) -> None:
        """Note that what may be the backward's last gradient of this rank came; called from any thread."""


class HostClock(StepClock):
    """Clock for models on the CPU, whose work is done when a call returns.

    Args:
        counters: Gets the stages ``forward``, ``backward``, ``exchange`` and ``optimizer``.
    """

    def __init__(self, counters: StageCounters) -> None:
        self._counters = counters
        self._began: Any = None
        self._last: Any = None

    def on_forward(self) -> None:
        """See `LoopHook`."""
        self._began = self._now()

    def on_backward(self, *, is_exchanged: bool) -> None:
        """See `LoopHook`."""
        self._end("forward", self._now())
        self._last = None

    def on_last_gradient(self) -> None:
        """See `StepClock`."""
        self._last = self._now()

    def on_backward_end(self) -> None:
        """See `LoopHook`."""
        ended = self._now()
        if self._last is None:
            self._end("backward", ended)
            return
        self._end("backward", self._last)
        self._end("exchange", ended)

    def on_optimizer(self) -> None:
        """See `LoopHook`."""
        self._began = self._now()

    def on_optimizer_end(self) -> None:
        """See `LoopHook`."""
        self._end("optimizer", self._now())

    def _now(self) -> Any:
        return time.perf_counter()

    def _end(self, stage: str, ended: Any) -> None:
        """Count a stage that began where the one before ended."""
        self._counters.add(stage, ended - self._began, 0, 1)
        self._began = ended


class DeviceClock(HostClock):
    """Clock for models on a GPU: events in the stream that computes.

    Args:
        counters: As of `HostClock`.
        device: The GPU.
    """

    def __init__(self, counters: StageCounters, device: torch.device) -> None:
        super().__init__(counters)
        self._device = device
        self._stream: Any = None
        self._ended: list[tuple[str, Any, Any]] = []

    def on_forward(self) -> None:
        """See `LoopHook`."""
        self._stream = torch.cuda.current_stream(self._device)
        super().on_forward()

    def on_last_gradient(self) -> None:
        """See `StepClock`."""
        # In the stream of the step, whatever stream the thread of the hook has; the newest record counts.
        if self._last is None:
            super().on_last_gradient()
        else:
            self._last.record(self._stream)

    def on_optimizer(self) -> None:
        """See `LoopHook`."""
        self._stream = torch.cuda.current_stream(self._device)
        super().on_optimizer()

    def on_loss(self) -> None:
        """See `LoopHook`."""
        while self._ended and self._ended[0][2].query():
            stage, began, ended = self._ended.pop(0)
            self._counters.add(stage, began.elapsed_time(ended) / 1000, 0, 1)

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _end(self, stage: str, ended: Any) -> None:
        self._ended.append((stage, self._began, ended))
        self._began = ended


class LastGradient(LoopHook):
    """Notifier of a clock when the last gradient of a backward has come; costs one hook a step.

    Which parameter's comes last depends on the graph: one backward with a hook on each finds it, and until
    the next such search only that one has a hook.

    Args:
        model: Its parameters get the hooks, for the time of a backward.
        clock: Receives the times.
    """

    def __init__(self, model: nn.Module, clock: StepClock) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._clock = clock
        self._last: nn.Parameter | None = None
        self._handles: list[RemovableHandle] = []

    def search_again(self) -> None:
        """Put a hook on each parameter in the next backward."""
        self._last = None

    def on_backward(self, *, is_exchanged: bool) -> None:
        """Time the backward, if it ends with an exchange."""
        if is_exchanged:
            hooked = self._parameters if self._last is None else [self._last]
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                for parameter in hooked
            ]

    def on_backward_end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._last = cast("nn.Parameter", parameter)
        self._clock.on_last_gradient()


class CacheUse(LoopHook):
    """Cache counters of a step, from the growing totals of the cache stages.

    Args:
        counters: Of the loader.

    Attributes:
        names: What `since` counts, in its order: blocks and bytes that readers found in memory, in the
            folder, and that were fetched, ahead or not; waits for blocks that others fetched, and their
            seconds over all threads.
    """

    names = (
        *(f"{tier}_{what}" for tier in _TIERS for what in ("blocks", "bytes")),
        "cache_waits",
        "cache_wait_s",
    )

    def __init__(self, counters: StageCounters) -> None:
        self._counters = counters
        self._seen = self._totals()

    def since(self) -> dict[str, float]:
        """Return this rank's numbers since the last call."""
        before, self._seen = self._seen, self._totals()
        return {name: self._seen[name] - before[name] for name in self.names}

    def fill(self, report: StepReport) -> None:
        """Set the fields of the same names."""
        for name, number in self.since().items():
            setattr(report, name, number)

    @classmethod
    def of(cls, report: StepReport) -> dict[str, float]:
        """Return the numbers of a report."""
        return {name: getattr(report, name) for name in cls.names}

    def _totals(self) -> dict[str, float]:
        tiers = [self._counters.totals(tier) for tier in _TIERS]
        found = [float(number) for tier in tiers for number in (tier.num_items, tier.num_bytes)]
        waits = self._counters.totals("cache_wait")
        return dict(zip(self.names, [*found, float(waits.num_items), waits.seconds], strict=True))


class RunMeasures(LoopHook):
    """Interval measurements of a run of any number of ranks.

    Args:
        interval_s: Length of an interval; 0 measures nothing.
        ranks: The ranks of the run.
        loader: Its counters, processes and settings are measured.
        wrapped: The model with its gradient exchange.
        transfer: Its pinned memory is measured.
        metrics: Writes the intervals, on rank 0.
        pinned_bytes: The setting ``loader.pinned_bytes``, noted in each interval.

    Attributes:
        clock: Times the parts of a step.
        last_gradient: Detects when only the exchange remains; None where no exchange can be separated from
            the backward.
        listeners: Get each interval, on rank 0.
        total_steps: Steps of the whole run.
    """

    def __init__(
        self,
        interval_s: float,
        ranks: Ranks,
        loader: Loader,
        wrapped: nn.Module,
        transfer: Transfer,
        metrics: MetricsWriter | None,
        *,
        pinned_bytes: int,
    ) -> None:
        self.listeners: list[IntervalListener] = []
        self.total_steps = 0
        self.clock = StepClock()
        self.last_gradient: LastGradient | None = None
        self._rows: RankMeasures | None = None
        if interval_s:
            self._rows = RankMeasures(
                loader.counters,
                children=lambda: loader.process_ids,
                every_s=interval_s,
                memory=lambda: _memory(loader, transfer, ranks.device),
                num_masked=lambda: len(loader.quarantined),
            )
            self.clock = _clock(ranks.device, loader.counters)
            if ranks.world_size > 1 and isinstance(wrapped, DistributedDataParallel):
                self.last_gradient = LastGradient(wrapped, self.clock)
        self._ranks = ranks
        self._loader = loader
        self._interval_s = interval_s
        self._pinned_bytes = pinned_bytes
        self._tier = _tier(loader)
        self._metrics = metrics
        self._hosts: list[str] = []
        self._is_warm_up = True
        self._passed_s = self._step_s = self._slowest_wait_s = 0.0
        self._num_steps = 0
        self._num_samples = self._num_tokens = 0.0
        self._newest: StepMetrics | None = None
        self._began_s = self._reported_s = time.perf_counter()

    def close(self) -> None:
        """Stop measuring this process."""
        if self._rows is not None:
            self._rows.close()

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Return a context manager that counts the time of its block."""
        return nullcontext() if self._rows is None else self._loader.counters.timed(stage)

    def fill(self, report: StepReport) -> None:
        """Report the time since the last call."""
        before, self._reported_s = self._reported_s, time.perf_counter()
        report.elapsed_s = self._reported_s - before

    def on_step_end(self, metrics: StepMetrics, reports: StepReports) -> None:
        """Count the step, and end the interval if it is time; an exchange then.

        Raises:
            WaitTimeoutError: a rank did not give its numbers.
        """
        if self._rows is None:
            return
        self._passed_s += reports.largest.elapsed_s
        self._step_s += metrics.step_s
        self._slowest_wait_s += metrics.data_wait_s
        self._num_steps += 1
        self._num_samples += metrics.num_samples
        self._num_tokens += metrics.num_tokens
        self._newest = metrics
        if self._is_warm_up or self._passed_s >= self._interval_s:
            self.on_run_end()

    def on_run_end(self) -> None:
        """End the interval, if it has a step; an exchange. See `on_step_end`."""
        if self._rows is None or self._newest is None:
            return
        self._hosts = self._hosts or self._ranks.all_gather_json(socket.gethostname())
        by_rank = self._ranks.all_gather_numbers(self._rows.take(), self._ranks.timeouts.control_s)
        before_s, self._began_s = self._began_s, time.perf_counter()
        if self._ranks.rank == 0:
            self._publish(
                interval_of(
                    by_rank.tolist(),
                    hosts=self._hosts,
                    global_step=self._newest.global_step,
                    num_steps=self._num_steps,
                    epoch=self._newest.epoch,
                    is_warm_up=self._is_warm_up,
                    wall_s=self._began_s - before_s,
                    step_s=self._step_s,
                    slowest_wait_s=self._slowest_wait_s,
                    num_samples=self._num_samples,
                    num_tokens=self._num_tokens,
                    settings={"loader.pinned_bytes": self._pinned_bytes, **self._loader.tunables.values()},
                    tier=self._tier,
                    total_steps=self.total_steps,
                )
            )
        self._passed_s = self._step_s = self._slowest_wait_s = 0.0
        self._num_steps, self._num_samples, self._num_tokens = 0, 0.0, 0.0
        self._newest, self._is_warm_up = None, False
        if self.last_gradient is not None:
            self.last_gradient.search_again()

    def _publish(self, interval: Interval) -> None:
        if self._metrics is not None:
            self._metrics.write_interval(interval)
        for listener in list(self.listeners):
            try:
                listener.measured(interval)
            except Exception:
                # A listener must not end the run that it observes.
                _LOGGER.exception("%s failed on an interval and gets no more", type(listener).__name__)
                self.listeners.remove(listener)


def _clock(device: torch.device, counters: StageCounters) -> StepClock:
    if device.type == "cuda":
        return DeviceClock(counters, device)
    # The wall clock cannot time an asynchronous device, and of devices but CUDA we know no events.
    return HostClock(counters) if device.type == "cpu" else StepClock()


def _memory(loader: Loader, transfer: Transfer, device: torch.device) -> dict[str, int]:
    memory = {"pinned_bytes": transfer.pinned_bytes}
    if device.type == "cuda":
        memory["device_bytes"] = torch.cuda.max_memory_allocated(device)
    caches = {id(found): found for one in loader.selection.datasets if (found := one.cache) is not None}
    for cache in caches.values():
        ram, disk = cache.memory, cache.disk
        if ram is not None:
            memory["cache_ram_bytes"] = memory.get("cache_ram_bytes", 0) + ram.num_bytes
        if disk is not None and cache.config.directory is not None:
            memory["cache_disk_bytes"] = memory.get("cache_disk_bytes", 0) + disk.num_bytes
            with suppress(OSError):  # the folder may have been removed; the cache reports that itself
                free = shutil.disk_usage(cache.config.directory.expanduser()).free
                memory["cache_free_bytes"] = min(memory.get("cache_free_bytes", free), free)
    return memory


def _tier(loader: Loader) -> str:
    """Return ``local``, or the scheme of the data's address; in a blend, of the first remote component."""
    schemes = [urlsplit(dataset.store.url).scheme for dataset in loader.selection.datasets]
    return next((scheme for scheme in schemes if scheme not in {"", "file"}), _LOCAL)
