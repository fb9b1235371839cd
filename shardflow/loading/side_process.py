"""One process that loads for this one, as the trainer sees it: start, take micro-batches, notice its end.

It is started anew, never forked, knows nothing of the trainer's main module, and ends with it.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from shardflow.errors import LoaderProcessError, WaitTimeoutError
from shardflow.group_signals import group_signals_held_back
from shardflow.loading.batch import Batch
from shardflow.loading.side_channel import ChannelClosedError, SideChannel, error_from_json
from shardflow.loading.slabs import Slab
from shardflow.telemetry import GaugeTotals, StageCounters

__all__ = ["SideProcess"]

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]); "
    "from shardflow.loading.side_child import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), dies_with_thread=sys.argv[3] == '1')"
)
# Decoders take and drop a picture's memory at every call; glibc would give it back to the system each time.
# Our threads are what runs side by side: no pool of a library may add others.
_ENVIRONMENT: Final = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "OMP_NUM_THREADS": "1",
    "BLOSC_NTHREADS": "1",
}
_ADD_UP: Final = ("buffered_bytes", "fetching_bytes", "threads_busy")
"""Gauges of which several processes together have the sum."""
_ASK_EVERY_S: Final = 1.0
_EXIT_S: Final = 5.0
_STARVED_S: Final = 1e-3
"""A wait that is longer found nothing handed over."""


class SideProcess:
    """One process; it starts when the object is made.

    Args:
        setup: What it needs before its first iteration, see `side_child`.
        number: Which of its loader's processes it is, for messages.
        num_processes: How many its loader has.
        counters: Gets what it counts, and the stage ``wait``.

    Attributes:
        channel: Our end of the way to it.
        activity: What it is at, while someone waits for it for a second and more.
        is_lost: Whether it was found dead.
    """

    def __init__(
        self, setup: Mapping[str, Any], number: int, num_processes: int, counters: StageCounters
    ) -> None:
        self._number = number
        self._num_processes = num_processes
        self._counters = counters
        self._slabs: dict[int, Slab] = {}
        self._is_ready = False
        self._wait = ""
        self.activity = ""
        self.is_lost = False
        ours, theirs = socket.socketpair()
        lives_long = threading.current_thread() is threading.main_thread()
        with theirs:
            # -P: a folder in the working directory must not shadow a library.
            command = [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), str(os.getpid())]
            # The trainer decides what a signal means; it may need batches until its last step.
            with group_signals_held_back():
                self._process = subprocess.Popen(
                    [*command, str(int(lives_long)), json.dumps(sys.path)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_ENVIRONMENT},
                )
        self.channel = SideChannel(ours)
        try:
            self._tell(setup=setup)
        except BaseException:  # what crosses no process boundary, say
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
        """Let it make some micro-batches of an epoch; what it makes of another iteration is dropped."""
        self._tell(
            {"kind": "start", "iteration": iteration, "epoch": epoch, "numbers": numbers, "masks": masks}
        )

    def change(self, changes: Mapping[str, int | str], unread_bytes: int) -> None:
        """Let it go on with other settings, by name, see `LoaderParts.change`."""
        self._tell({"kind": "change", "changes": changes, "unread_bytes": unread_bytes})

    def stop_iteration(self) -> None:
        """Let it end the iteration."""
        self._tell({"kind": "stop"})

    def take(self, iteration: int, timeout_s: float) -> Batch:
        """Return its next micro-batch of an iteration.

        Raises:
            WaitTimeoutError: It did not come in time; the message names what the process is at.
            LoaderProcessError: The process died.
            Exception: What was raised in it.
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
        stage = "gives no answer" if self._is_ready else "is still starting"
        raise WaitTimeoutError(
            self._wait
            or f"a micro-batch must be ready within {timeout_s:g} s, got nothing (loader process "
            f"{self._number} {stage}); look at the processors and the storage, or raise wait_timeout_s."
        )

    def end(self) -> None:
        """Wait for the end of a process whose channel is closed; it needs no time, so it is given little."""
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive_by(self, deadline: float, timeout_s: float) -> Mapping[str, Any] | None:
        """Return the next message; None if none comes in time. A long wait asks what it is for."""
        while (left_s := deadline - time.monotonic()) > 0:
            message = self.channel.receive(min(left_s, _ASK_EVERY_S, timeout_s / 2))
            if message is not None:
                return message
            self.activity = self.activity or f"loader process {self._number} has not answered"
            self._tell({"kind": "describe", "timeout_s": timeout_s})
        return None

    def _handle(self, message: Mapping[str, Any], iteration: int) -> Batch | None:
        match message["kind"]:
            case "ready":
                self._is_ready = True
            case "slab":
                fileno = self.channel.take_descriptor()
                number, size, count = message["slab"], message["size"], message["count"]
                self._slabs[number] = Slab(number, fileno, buffer_num_bytes=size, num_buffers=count)
                os.close(fileno)
            case "drop":
                del self._slabs[message["slab"]]
            case "log":
                logging.getLogger(message["name"]).log(message["level"], "%s", message["text"])
            case "waiting":
                self._wait, self.activity = message["for"], message["activity"]
            case "error" if message["iteration"] in (-1, iteration):
                raise error_from_json(message)
            case "batch":
                self._count(message["counters"])
                slab, index, num_bytes = message["place"]
                if message["iteration"] != iteration:
                    self._slabs[slab].release(index)
                    return None
                buffer = self._slabs[slab].lend(index)[:num_bytes]
                self._tell({"kind": "taken", "iteration": iteration, "num_bytes": num_bytes})
                return Batch(buffer, message["batch"])
        return None

    def _count(self, news: Mapping[str, Sequence[float]]) -> None:
        for name, values in news.items():
            if len(values) == 5:
                last, least, most, weighted, weight = values
                if name in _ADD_UP:
                    # Each of n processes counts for its own part of the time.
                    weight /= self._num_processes
                self._counters.merge(
                    name, GaugeTotals(last=last, least=least, most=most, weighted=weighted, weight=weight)
                )
            else:
                seconds, num_bytes, num_items = values
                self._counters.add(name, seconds, int(num_bytes), int(num_items))

    def _tell(
        self, message: Mapping[str, Any] | None = None, *, setup: Mapping[str, Any] | None = None
    ) -> None:
        """Send; that the other end is gone is said where its next micro-batch is taken."""
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
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        return LoaderProcessError(
            f"loader process {self._number} must live as long as its trainer, got its end by {how}; look for "
            "what killed it (out of memory, mostly), or set execution to threads; iter() starts another."
        )
