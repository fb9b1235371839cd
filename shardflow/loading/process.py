"""Loader processes: read and decode beside a trainer whose own Python is busy.

Process ``p`` of ``n`` makes every n-th micro-batch, so that their order is the plan's. The execution
``process`` is one process with several threads; ``workers`` are several processes with one thread each. A
process is spawned, never forked, does not import the trainer's main module, and ends with the trainer.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from shardflow.errors import LoaderProcessError, ShardflowError, WaitTimeoutError
from shardflow.loading.batch import Batch, BatchStream
from shardflow.loading.config import LoaderConfig
from shardflow.loading.ipc import Channel, ChannelClosedError, SharedSegment, error_from_json
from shardflow.processes import group_signals_held_back
from shardflow.telemetry import GaugeTotals, StageCounters

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]); "
    "from shardflow.loading.process_main import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), dies_with_thread=sys.argv[3] == '1')"
)
# Decoders allocate and free the memory of an image at every call; glibc would return it to the system each
# time. Parallelism comes from our own threads: thread pools of libraries must not add more.
_ENVIRONMENT: Final = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "OMP_NUM_THREADS": "1",
    "BLOSC_NTHREADS": "1",
}
_SUMMED_GAUGES: Final = ("buffered_bytes", "fetching_bytes", "threads_busy")
"""Gauges whose value for several processes is the sum of theirs."""
_DESCRIBE_EVERY_S: Final = 1.0
_EXIT_S: Final = 5.0
_STARVED_S: Final = 1e-3
"""A longer wait means that no micro-batch was ready."""
_ENDLESS_S: Final = 1e8
"""Deadline of a wait inside a loader process; the trainer's own deadline is the one that counts."""
_FORWARDED: Final = ("num_threads", "prefetch_bytes", "read_bytes")


class LoaderProcess:
    """Handle of one loader process, which starts when the object is created.

    Args:
        setup: What the process needs before its first iteration, see `process_main`.
        number: Its number among the loader's processes, for messages.
        num_processes: How many processes the loader has.
        counters: Gets what the process counts, and the stage ``wait``.

    Attributes:
        channel: The trainer's end of the connection.
        activity: What the process is doing, while a wait for it takes a second or more.
        is_lost: Whether it was found dead.
    """

    def __init__(
        self, setup: Mapping[str, Any], number: int, num_processes: int, counters: StageCounters
    ) -> None:
        self._number = number
        self._num_processes = num_processes
        self._counters = counters
        self._segments: dict[int, SharedSegment] = {}
        self._is_ready = False
        self._wait = ""
        self.activity = ""
        self.is_lost = False
        ours, theirs = socket.socketpair()
        is_main_thread = threading.current_thread() is threading.main_thread()
        with theirs:
            # -P: a folder of the working directory must not shadow a library.
            command = [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), str(os.getpid())]
            # The trainer handles signals, and may need batches until its last step.
            with group_signals_held_back():
                self._process = subprocess.Popen(
                    [*command, str(int(is_main_thread)), json.dumps(sys.path)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_ENVIRONMENT},
                )
        self.channel = Channel(ours)
        try:
            self._send(setup=setup)
        except BaseException:  # for example a setup that cannot be pickled
            self.channel.close()
            self.end()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start_iteration(
        self, iteration: int, epoch: int, numbers: tuple[int, int, int], masks: list[Mapping[str, Any]]
    ) -> None:
        """Start an iteration over some micro-batches of an epoch; any other iteration is dropped."""
        self._send(
            {"kind": "start", "iteration": iteration, "epoch": epoch, "numbers": numbers, "masks": masks}
        )

    def change(self, changes: Mapping[str, int | str], unread_bytes: int) -> None:
        """Change settings of the process by name, see `LoaderRuntime.change`."""
        self._send({"kind": "change", "changes": changes, "unread_bytes": unread_bytes})

    def stop_iteration(self) -> None:
        """End the iteration."""
        self._send({"kind": "stop"})

    def take(self, iteration: int, timeout_s: float) -> Batch:
        """Return its next micro-batch of an iteration.

        Raises:
            WaitTimeoutError: It was not ready in time; the message names what the process is doing.
            LoaderProcessError: The process died.
            Exception: Whatever was raised in the process.
        """
        start = time.monotonic()
        deadline = start + timeout_s
        self._wait = ""
        try:
            while (message := self._receive_by(deadline, timeout_s)) is not None:
                batch = self._handle(message, iteration)
                if batch is not None:
                    waited_s = time.monotonic() - start
                    self._counters.add("wait", waited_s, len(batch.buffer), 1)
                    if waited_s > _STARVED_S:
                        self._counters.add("starved", waited_s, 0, 1)
                    return batch
        except ChannelClosedError:
            raise self._lost() from None
        finally:
            self.activity = ""
        state = "gives no answer" if self._is_ready else "is still starting"
        raise WaitTimeoutError(
            self._wait
            or f"a micro-batch must be ready within {timeout_s:g} s, got nothing (loader process "
            f"{self._number} {state}); look at the processors and the storage, or raise wait_timeout_s."
        )

    def end(self) -> None:
        """Wait for the end of a process whose channel is closed, and kill it if it takes too long."""
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive_by(self, deadline: float, timeout_s: float) -> Mapping[str, Any] | None:
        """Return the next message; None if none arrives in time. A long wait requests a description."""
        while (left_s := deadline - time.monotonic()) > 0:
            message = self.channel.receive(min(left_s, _DESCRIBE_EVERY_S, timeout_s / 2))
            if message is not None:
                return message
            self.activity = self.activity or f"loader process {self._number} has not answered"
            self._send({"kind": "describe", "timeout_s": timeout_s})
        return None

    def _handle(self, message: Mapping[str, Any], iteration: int) -> Batch | None:
        match message["kind"]:
            case "ready":
                self._is_ready = True
            case "segment":
                fileno = self.channel.take_descriptor()
                number, size, count = message["segment"], message["size"], message["count"]
                self._segments[number] = SharedSegment(
                    number, fileno, buffer_num_bytes=size, num_buffers=count
                )
                os.close(fileno)
            case "drop":
                del self._segments[message["segment"]]
            case "log":
                logging.getLogger(message["name"]).log(message["level"], "%s", message["text"])
            case "waiting":
                self._wait, self.activity = message["for"], message["activity"]
            case "error" if message["iteration"] in (-1, iteration):
                raise error_from_json(message)
            case "batch":
                self._count(message["counters"])
                segment, index, num_bytes = message["place"]
                if message["iteration"] != iteration:
                    self._segments[segment].release(index)
                    return None
                buffer = self._segments[segment].lend(index)[:num_bytes]
                self._send({"kind": "taken", "iteration": iteration, "num_bytes": num_bytes})
                return Batch(buffer, message["batch"])
        return None

    def _count(self, totals: Mapping[str, Sequence[float]]) -> None:
        for name, values in totals.items():
            if len(values) == 5:
                last, least, most, weighted, weight = values
                if name in _SUMMED_GAUGES:
                    # Each of n processes covers the same time, so together they count it once.
                    weight /= self._num_processes
                self._counters.merge(
                    name, GaugeTotals(last=last, least=least, most=most, weighted=weighted, weight=weight)
                )
            else:
                seconds, num_bytes, num_items = values
                self._counters.add(name, seconds, int(num_bytes), int(num_items))

    def _send(
        self, message: Mapping[str, Any] | None = None, *, setup: Mapping[str, Any] | None = None
    ) -> None:
        """Send a message; a lost process is reported when its next micro-batch is taken."""
        with suppress(ChannelClosedError):
            if setup is not None:
                self.channel.send_setup(setup)
            if message is not None:
                self.channel.send(message)

    def _lost(self) -> LoaderProcessError:
        self.is_lost = True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        code = self._process.poll()
        ending = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        return LoaderProcessError(
            f"loader process {self._number} must live as long as its trainer, but ended by {ending}; look "
            "for what killed it (out of memory, mostly), or set execution to threads; iter() starts another."
        )


class LoaderProcesses:
    """Loader processes of one loader; they start with its first micro-batch and serve all its iterations.

    A quarter of ``prefetch_bytes`` is for micro-batches that were delivered and are not taken yet.

    Args:
        loader: Arguments of the loader, except its config; each process creates a loader of its own.
        config: How the loader runs; its ``execution`` is not ``threads``.
        counters: Gets what the processes count, and the stage ``wait``.
    """

    def __init__(self, loader: Mapping[str, Any], config: LoaderConfig, counters: StageCounters) -> None:
        self._execution = config.execution
        self._num_processes = _num_processes(config)
        self._loader = loader
        self._config = config
        self._counters = counters
        self._wait_timeout_s = config.wait_timeout_s
        self._processes: list[LoaderProcess] = []
        self._num_iterations = 0
        self._pid = os.getpid()

    @property
    def structure(self) -> dict[str, Any]:
        """Settings that these processes cannot change."""
        if self._execution == "process":
            return {"execution": self._execution}
        return {"execution": self._execution, "num_threads": self._num_processes}

    def fits(self, config: LoaderConfig) -> bool:
        """Tell whether these are the processes that a config needs."""
        return (config.execution, _num_processes(config)) == (self._execution, self._num_processes)

    def change(self, config: LoaderConfig, others: Mapping[str, int | str]) -> None:
        """Change threads and bounds of the processes; their number stays the same.

        Args:
            config: How the loader runs from now on.
            others: Other changes by name, of stores and their caches.
        """
        # The request may be for another execution mode; these processes are shut down before it applies.
        self._config = config = replace(config, execution=self._execution)
        if os.getpid() != self._pid:
            return
        theirs, unread_bytes = _share(config, self._num_processes)
        settings = {f"loader.{name}": getattr(theirs, name) for name in _FORWARDED}
        for process in list(self._processes):
            process.change({**settings, **others}, unread_bytes)

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that were started."""
        return [process.pid for process in list(self._processes)]

    def begin(self, epoch: int, numbers: range, masks: Sequence[Mapping[str, Any]]) -> int:
        """Start missing processes, and an iteration in each; returns the number of the iteration."""
        if any(process.is_lost for process in self._processes):
            self.close()
        while len(self._processes) < self._num_processes:
            theirs, unread_bytes = _share(self._config, self._num_processes)
            setup = {"loader": {**self._loader, "config": theirs}, "unread_bytes": unread_bytes}
            self._processes.append(
                LoaderProcess(setup, len(self._processes), self._num_processes, self._counters)
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
            WaitTimeoutError: It was not ready in time; the message names what the process is doing.
            LoaderProcessError: The process died.
            ShardflowError: This is a forked child, or the process raised it.
        """
        if os.getpid() != self._pid:
            raise ShardflowError(
                "an iteration must go on in the process that began it, got a forked child; "
                "call iter() on the loader in the child."
            )
        return self._processes[place % self._num_processes].take(iteration, self._wait_timeout_s)

    def describe_activity(self) -> str:
        """Describe what a long wait is for; may be called from any thread."""
        return "; ".join(process.activity for process in list(self._processes) if process.activity)

    def end(self, iteration: int) -> None:
        """End an iteration; the processes stay."""
        if os.getpid() == self._pid and iteration == self._num_iterations:
            for process in self._processes:
                process.stop_iteration()

    def close(self) -> None:
        """End the processes; the next iteration starts new ones."""
        processes, self._processes = self._processes, []
        if os.getpid() == self._pid:
            for process in processes:
                process.channel.close()
            for process in processes:
                process.end()


def _num_processes(config: LoaderConfig) -> int:
    return config.num_threads if config.execution == "workers" else 1


def _share(config: LoaderConfig, num_processes: int) -> tuple[LoaderConfig, int]:
    """Return the config of each process, and how many bytes it may deliver before they are taken."""
    share = max(config.prefetch_bytes // num_processes, 4)
    theirs = replace(
        config,
        execution="threads",
        num_threads=config.num_threads if config.execution == "process" else 1,
        prefetch_bytes=share - share // 4,
        wait_timeout_s=_ENDLESS_S,
    )
    return theirs, share // 4


class ProcessStream(BatchStream):
    """Stream whose micro-batches loader processes make; nothing begins before the first one is requested.

    Args:
        processes: The loader processes.
        epoch: The epoch.
        numbers: Which of the rank's micro-batches of the epoch.
        masks: Slots that are known to be masked.
    """

    def __init__(
        self, processes: LoaderProcesses, epoch: int, numbers: range, masks: Sequence[Mapping[str, Any]]
    ) -> None:
        super().__init__(len(numbers))
        self._processes = processes
        self._what = (epoch, numbers, masks)
        self._num_taken = 0
        self._iteration = 0
        self._finalizer: weakref.finalize[..., ProcessStream] | None = None

    def _take(self) -> Batch:
        self.start()
        batch = self._processes.take(self._iteration, self._num_taken)
        self._num_taken += 1
        return batch

    def start(self) -> None:
        """Begin before the first micro-batch is requested."""
        if not self._iteration:
            self._iteration = self._processes.begin(*self._what)
            self._finalizer = weakref.finalize(self, self._processes.end, self._iteration)

    def describe_activity(self) -> str:
        """Describe what a long wait is for; may be called from any thread."""
        return self._processes.describe_activity()

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
