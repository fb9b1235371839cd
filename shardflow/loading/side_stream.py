"""Processes that read and decode for this one, so that a trainer busy in Python does not slow its data down.

Process ``p`` of ``n`` makes every n-th micro-batch, and what comes out is the plan's order. One process with
several threads is the execution ``process``; several with one thread each are ``workers``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from shardflow.errors import ShardflowError, StateError
from shardflow.loading.batch import Batch
from shardflow.loading.config import LoaderConfig
from shardflow.loading.side_process import SideProcess
from shardflow.telemetry import StageCounters

__all__ = ["SideProcesses", "SideStream"]

_ENDLESS_S: Final = 1e8
"""Deadline of a wait inside a loader process: the trainer's own is what counts."""
_TOLD: Final = ("num_threads", "prefetch_bytes", "read_bytes")


class SideProcesses:
    """The processes of one loader; they start with its first micro-batch and serve all its iterations.

    A quarter of the bytes that may be under way may be handed over and wait to be taken.

    Args:
        loader: Arguments of the loader, but for its config; each process makes one of its own.
        config: How the loader runs; its ``execution`` is not ``threads``.
        counters: Gets what they count, and the stage ``wait``.
    """

    def __init__(self, loader: Mapping[str, Any], config: LoaderConfig, counters: StageCounters) -> None:
        self._execution = config.execution
        self._num_processes = _num_processes(config)
        self._loader = loader
        self._config = config
        self._counters = counters
        self._wait_timeout_s = config.wait_timeout_s
        self._processes: list[SideProcess] = []
        self._num_iterations = 0
        self._pid = os.getpid()

    @property
    def structure(self) -> dict[str, Any]:
        """The settings that these processes cannot change."""
        if self._execution == "process":
            return {"execution": self._execution}
        return {"execution": self._execution, "num_threads": self._num_processes}

    def fits(self, config: LoaderConfig) -> bool:
        """Tell whether these are the processes that a config asks for."""
        return (config.execution, _num_processes(config)) == (self._execution, self._num_processes)

    def change(self, config: LoaderConfig, others: Mapping[str, int | str]) -> None:
        """Let the processes go on with other threads and bounds; how many there are stays as it is.

        Args:
            config: How the loader runs from now on.
            others: What else changes by name, of stores and their caches.
        """
        # What is asked for may be another execution, which these processes do not live to see.
        self._config = config = replace(config, execution=self._execution)
        if os.getpid() != self._pid:
            return
        theirs, unread_bytes = _share(config, self._num_processes)
        settings = {f"loader.{name}": getattr(theirs, name) for name in _TOLD}
        for process in list(self._processes):
            process.change({**settings, **others}, unread_bytes)

    @property
    def pids(self) -> list[int]:
        """Process ids of those that were started."""
        return [process.pid for process in list(self._processes)]

    def stream(self, epoch: int, numbers: range, masks: Sequence[Mapping[str, Any]]) -> SideStream:
        """Yield some of the rank's micro-batches of an epoch; nothing begins before the first one is asked.

        Args:
            epoch: The epoch.
            numbers: Which micro-batches.
            masks: Slots that are known to be masked.
        """
        return SideStream(self, epoch, numbers, masks)

    def begin(self, epoch: int, numbers: range, masks: Sequence[Mapping[str, Any]]) -> int:
        """Start the processes where need be, and an iteration in each; returns its number."""
        if any(process.is_lost for process in self._processes):
            self.close()
        while len(self._processes) < self._num_processes:
            theirs, unread_bytes = _share(self._config, self._num_processes)
            setup = {"loader": {**self._loader, "config": theirs}, "unread_bytes": unread_bytes}
            self._processes.append(
                SideProcess(setup, len(self._processes), self._num_processes, self._counters)
            )
        self._num_iterations += 1
        for place, process in enumerate(self._processes):
            part = numbers[place :: self._num_processes]
            process.start_iteration(
                self._num_iterations, epoch, (part.start, part.stop, part.step), list(masks)
            )
        return self._num_iterations

    def take(self, iteration: int, place: int) -> Batch:
        """Return the micro-batch at a place of an iteration.

        Raises:
            WaitTimeoutError: It did not come in time; the message names what the process is at.
            LoaderProcessError: The process died.
            ShardflowError: We are a forked child, or the process raised it.
        """
        if os.getpid() != self._pid:
            raise ShardflowError(
                "an iteration must go on in the process that began it, got a forked child; "
                "call iter() on the loader in the child."
            )
        return self._processes[place % self._num_processes].take(iteration, self._wait_timeout_s)

    def describe_activity(self) -> str:
        """Say what a wait that takes long is for, from any thread."""
        return "; ".join(process.activity for process in list(self._processes) if process.activity)

    def end(self, iteration: int) -> None:
        """End an iteration that is not to go on; its processes stay."""
        if os.getpid() == self._pid and iteration == self._num_iterations:
            for process in self._processes:
                process.stop_iteration()

    def close(self) -> None:
        """End the processes; the next iteration starts others."""
        processes, self._processes = self._processes, []
        if os.getpid() == self._pid:
            for process in processes:
                process.channel.close()
            for process in processes:
                process.end()


def _num_processes(config: LoaderConfig) -> int:
    return config.num_threads if config.execution == "workers" else 1


def _share(config: LoaderConfig, num_processes: int) -> tuple[LoaderConfig, int]:
    """Return the config of each process, and how many bytes it may hand over before they are taken."""
    share = max(config.prefetch_bytes // num_processes, 4)
    theirs = replace(
        config,
        execution="threads",
        num_threads=config.num_threads if config.execution == "process" else 1,
        prefetch_bytes=share - share // 4,
        wait_timeout_s=_ENDLESS_S,
    )
    return theirs, share // 4


class SideStream(Iterator[Batch]):
    """Micro-batches that other processes make, in order; see `BatchStream`."""

    def __init__(
        self, processes: SideProcesses, epoch: int, numbers: range, masks: Sequence[Mapping[str, Any]]
    ) -> None:
        self._processes = processes
        self._what = (epoch, numbers, masks)
        self._num_batches = len(numbers)
        self._num_taken = 0
        self._iteration = 0
        self._is_closed = False
        self._finalizer: weakref.finalize[..., SideStream] | None = None

    def __next__(self) -> Batch:
        """Return the next micro-batch; raises what `SideProcesses.take` raises."""
        if self._num_taken == self._num_batches:
            raise StopIteration
        if self._is_closed:
            num_left = self._num_batches - self._num_taken
            raise StateError(
                f"an iteration must go on to its end, got {num_left} micro-batches left of one that was "
                "closed or ended with an error; call iter() again."
            )
        try:
            self.start()
            batch = self._processes.take(self._iteration, self._num_taken)
        except BaseException:
            self.close()
            raise
        self._num_taken += 1
        return batch

    def start(self) -> None:
        """Begin before the first micro-batch is asked for."""
        if not self._iteration:
            self._iteration = self._processes.begin(*self._what)
            self._finalizer = weakref.finalize(self, self._processes.end, self._iteration)

    def describe_activity(self) -> str:
        """Say which shard, tier and stage a wait is for, from any thread."""
        return self._processes.describe_activity()

    def close(self) -> None:
        """End the iteration; the stream yields nothing more."""
        self._is_closed = True
        if self._finalizer is not None:
            self._finalizer()
