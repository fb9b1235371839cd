"""Intervals of one process whose loop is not ours: what its loader counts, and the stages that it names."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from shardflow.errors import ConfigError
from shardflow.telemetry.counters import StageCounters, StageTimer
from shardflow.telemetry.intervals import Interval
from shardflow.telemetry.measures import RankMeasures, interval_of
from shardflow.telemetry.stages import STAGES

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["IntervalListener", "IntervalRecorder"]


class IntervalListener(Protocol):
    """Whoever wants a run's intervals as they are measured."""

    def measured(self, interval: Interval) -> None:
        """Take the newest interval; called on rank 0, between two steps: be quick."""


class IntervalRecorder:
    """Measures the loop of one process.

    What the loader does is counted by itself; the loop says what it is at with `stage` and where a step ends
    with `step`. The time that the loop waits for the loader is its data wait.

    Args:
        counters: The loader's, ``loader.counters``.
        listeners: Get each interval.
        interval_s: An interval ends with the first step after so many seconds. The first step of all is an
            interval of its own, see `Interval.is_warm_up`.
        children: Returns the process ids of the loader's processes, ``lambda: loader.process_ids``.
        settings: Returns the settings to note in each interval, by name.
        memory: Returns bytes by name, see `RankMeasures`.
        clock: Seconds, never going back.

    Raises:
        ConfigError: ``interval_s`` is not above 0.

    Example::

        with IntervalRecorder(loader.counters, listeners=[metrics]) as recorder:
            for batch in loader:
                with recorder.stage("forward"):
                    loss = model(batch)
                with recorder.stage("backward"):
                    loss.backward()
                with recorder.stage("optimizer"):
                    optimizer.step()
                recorder.step(num_samples=len(batch.rows))
    """

    def __init__(
        self,
        counters: StageCounters,
        *,
        listeners: Sequence[IntervalListener] = (),
        interval_s: float = 5.0,
        children: Callable[[], Sequence[int]] | None = None,
        settings: Callable[[], Mapping[str, int | float | str]] | None = None,
        memory: Callable[[], Mapping[str, int]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if interval_s <= 0:
            raise ConfigError(f"interval_s must be above 0, got {interval_s:g}; give some seconds.")
        self.listeners = list(listeners)
        self._counters = counters
        self._interval_s = interval_s
        self._settings = settings or dict
        self._clock = clock
        self._host = socket.gethostname()
        self._waited = counters.totals("wait")
        self._measures = RankMeasures(counters, children=children, every_s=interval_s, memory=memory)
        self._num_steps_done = 0
        self._num_steps = 0
        self._num_samples = self._num_tokens = 0.0
        self._began_s = clock()

    def stage(self, name: str) -> StageTimer:
        """Return a context manager that counts the time of its block.

        On a GPU it measures what the loop does there, not what the device does, unless the block waits for
        the device.

        Raises:
            ConfigError: There is no such stage.
        """
        if name not in STAGES:
            raise ConfigError(f"a stage must be one of {', '.join(STAGES)}, got {name!r}; correct it.")
        return self._counters.timed(name)

    def step(self, *, num_samples: float = 0.0, num_tokens: float = 0.0, epoch: int = 0) -> Interval | None:
        """Say that a step has ended; returns the interval that ended with it, if any."""
        self._num_steps_done += 1
        self._num_steps += 1
        self._num_samples += num_samples
        self._num_tokens += num_tokens
        is_first = self._num_steps_done == 1
        if not is_first and self._clock() - self._began_s < self._interval_s:
            return None
        return self._end(epoch, is_warm_up=is_first)

    def close(self) -> None:
        """End the thread that watches the process."""
        self._measures.close()

    def __enter__(self) -> IntervalRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _end(self, epoch: int, *, is_warm_up: bool) -> Interval:
        waited, self._waited = self._waited, self._counters.totals("wait")
        self._counters.add(
            "data_wait", self._waited.seconds - waited.seconds, 0, self._waited.num_items - waited.num_items
        )
        began_s, self._began_s = self._began_s, self._clock()
        wall_s = self._began_s - began_s
        interval = interval_of(
            [self._measures.take()],
            hosts=[self._host],
            global_step=self._num_steps_done - 1,
            num_steps=self._num_steps,
            epoch=epoch,
            is_warm_up=is_warm_up,
            wall_s=wall_s,
            step_s=wall_s,
            slowest_wait_s=self._waited.seconds - waited.seconds,
            num_samples=self._num_samples,
            num_tokens=self._num_tokens,
            settings=self._settings(),
        )
        self._num_steps, self._num_samples, self._num_tokens = 0, 0.0, 0.0
        for listener in self.listeners:
            listener.measured(interval)
        return interval
