"""Main program of a loader process: a loader, and the delivery of its micro-batches to the trainer.

`LoaderProcess` starts it. The main thread receives the trainer's messages and ends with the trainer; a
delivery thread per iteration sends the micro-batches in order, a bounded number of bytes ahead.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from shardflow.errors import ConfigError
from shardflow.format.contents.pictures import opencv
from shardflow.loading.batch import Batch
from shardflow.loading.ipc import Channel, ChannelClosedError, SharedPool, error_to_json
from shardflow.loading.loader import Loader
from shardflow.loading.runtime import ThreadStream
from shardflow.processes import ignore_group_signals
from shardflow.telemetry import StageCounters

_PR_SET_PDEATHSIG = 1
_MAX_UNREAD = 64
_COUNTERS_EVERY_S = 0.2


def main(fileno: int, parent: int, *, dies_with_thread: bool) -> None:
    """Serve a trainer until it closes its end or dies.

    Args:
        fileno: This end of the channel.
        parent: Process id of the trainer.
        dies_with_thread: Whether the thread that started this process lives as long as the trainer, so that
            the kernel may end this process with that thread.
    """
    ignore_group_signals()
    if dies_with_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    channel = Channel(socket.socket(fileno=fileno))
    with suppress(ChannelClosedError, ProcessLookupError):
        trainer = os.pidfd_open(parent)
        if os.getppid() == parent:  # otherwise it died, and its process id was reused
            _serve(channel, trainer)
    # No cleanup: threads may be stuck in a read, and the kernel frees everything.
    os._exit(0)


def _serve(channel: Channel, trainer: int) -> None:
    try:
        setup = channel.receive_setup()
        with suppress(ConfigError):  # not installed
            opencv().setNumThreads(1)  # parallelism comes from our own threads
        loader = Loader(**setup["loader"])
        # Only from here on: what a loader logs when it is made, the trainer's own has logged.
        logging.getLogger().addHandler(_Forwarding(channel))
    except BaseException as error:  # noqa: BLE001 - the trainer raises it
        channel.send({"kind": "error", "iteration": -1, **error_to_json(error)})
        return
    pool = SharedPool(loader.config.prefetch_bytes)
    counters = _CounterUpdates(loader.counters)
    delivery: _Delivery | None = None
    unread_bytes: int = setup["unread_bytes"]
    channel.send({"kind": "ready"})
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(trainer, select.POLLIN)
    while True:
        message = channel.receive(0.0)
        if message is None:
            if any(found == trainer for found, _ in poll.poll()):
                return
            continue
        match message["kind"]:
            case "start":
                if delivery is not None:
                    delivery.stop()
                delivery = _begin(channel, loader, pool, counters, message)
                if delivery is not None:
                    delivery.start(unread_bytes)
            case "change":
                unread_bytes = _change(loader, pool, delivery, message)
            case "stop" if delivery is not None:
                delivery.stop()
            case "taken" if delivery is not None:
                delivery.taken(message["iteration"], message["num_bytes"])
            case "describe" if delivery is not None:
                channel.send({"kind": "waiting", **delivery.describe(message["timeout_s"])})


def _begin(
    channel: Channel, loader: Loader, pool: SharedPool, counters: _CounterUpdates, message: dict[str, Any]
) -> _Delivery | None:
    """Start an iteration; None if that fails, which is reported to the trainer."""
    iteration, numbers = message["iteration"], range(*message["numbers"])
    try:
        loader.load_masks(message["masks"])
        stream = loader.stream(message["epoch"], numbers, pool=pool)
    except BaseException as error:  # noqa: BLE001 - the trainer raises it
        channel.send({"kind": "error", "iteration": iteration, **error_to_json(error)})
        return None
    return _Delivery(channel, pool, stream, counters, num_batches=len(numbers), iteration=iteration)


def _change(loader: Loader, pool: SharedPool, delivery: _Delivery | None, message: dict[str, Any]) -> int:
    """Change settings; returns how many bytes may be delivered before they are taken from now on."""
    unread_bytes: int = message["unread_bytes"]
    loader.change(message["changes"])
    pool.bound(loader.config.prefetch_bytes)
    if delivery is not None:
        delivery.bound(unread_bytes)
    return unread_bytes


class _Delivery:
    """Delivery of the micro-batches of one iteration, in order."""

    def __init__(
        self,
        channel: Channel,
        pool: SharedPool,
        stream: ThreadStream,
        counters: _CounterUpdates,
        *,
        num_batches: int,
        iteration: int,
    ) -> None:
        self._channel = channel
        self._pool = pool
        self._stream = stream
        self._iteration = iteration
        self._num_left = num_batches
        self._counters = counters
        self._room = threading.Condition()
        self._unread_bytes = 0
        self._num_unread = 0
        self._max_unread_bytes = 0
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="shardflow-delivery", daemon=True)

    def start(self, max_unread_bytes: int) -> None:
        """Begin; at most so many bytes, or one micro-batch, are delivered before they are taken."""
        self._max_unread_bytes = max_unread_bytes
        self._thread.start()

    def bound(self, max_unread_bytes: int) -> None:
        """Change how many bytes may be delivered before they are taken."""
        with self._room:
            self._max_unread_bytes = max_unread_bytes
            self._room.notify()

    def taken(self, iteration: int, num_bytes: int) -> None:
        """Note that the trainer took a micro-batch."""
        with self._room:
            if iteration == self._iteration:
                self._num_unread -= 1
                self._unread_bytes -= num_bytes
                self._room.notify()

    def stop(self) -> None:
        """End the iteration's threads."""
        with self._room:
            self._is_stopped = True
            self._room.notify()
        self._stream.close()
        self._thread.join()

    def describe(self, timeout_s: float) -> dict[str, str]:
        """Describe what the next micro-batch waits for, and what the threads are doing."""
        return {"for": self._stream.describe_wait(timeout_s), "activity": self._stream.describe_activity()}

    def _run(self) -> None:
        try:
            while self._has_room():
                self._send(next(self._stream))
        except ChannelClosedError:
            return  # the main thread notices it too, and ends the process
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            if not self._is_stopped and not isinstance(error, StopIteration):
                with suppress(ChannelClosedError):
                    self._channel.send(
                        {"kind": "error", "iteration": self._iteration, **error_to_json(error)}
                    )

    def _has_room(self) -> bool:
        with self._room:
            while not self._is_stopped and (
                self._num_unread >= _MAX_UNREAD
                or (self._num_unread and self._unread_bytes >= self._max_unread_bytes)
            ):
                self._room.wait()
            return not self._is_stopped

    def _send(self, batch: Batch) -> None:
        num_bytes = len(batch.buffer)
        self._num_left -= 1
        segment, index = self._pool.hand_over(batch.buffer)
        for change in self._pool.take_changes():
            fields = {"segment": change.number, "size": change.buffer_num_bytes, "count": change.num_buffers}
            if change.fileno < 0:
                self._channel.send({"kind": "drop", "segment": change.number})
            else:
                self._channel.send({"kind": "segment", **fields}, [change.fileno])
                os.close(change.fileno)
        with self._room:
            self._num_unread += 1
            self._unread_bytes += num_bytes
        self._channel.send(
            {
                "kind": "batch",
                "iteration": self._iteration,
                "place": [segment, index, num_bytes],
                "batch": batch.descriptor,
                "counters": self._counters.take(is_last=not self._num_left),
            }
        )


class _CounterUpdates:
    """Counter totals since the last update, at most every `_COUNTERS_EVERY_S`.

    Waits of the delivery for its own engine are left out: the trainer counts its own waits.
    """

    def __init__(self, counters: StageCounters) -> None:
        self._window = counters.window()
        self._taken_at = 0.0

    def take(self, *, is_last: bool) -> dict[str, list[float]]:
        """Return new seconds, bytes and items of each stage, and the five totals of each gauge."""
        now = time.monotonic()
        if not is_last and now - self._taken_at < _COUNTERS_EVERY_S:
            return {}
        self._taken_at = now
        stages, gauges = self._window.take()
        totals = {
            name: [one.seconds, float(one.num_bytes), float(one.num_items)]
            for name, one in stages.items()
            if name not in {"wait", "starved"}
        }
        for name, seen in gauges.items():
            totals[name] = [seen.last, seen.least, seen.most, seen.weighted, seen.weight]
        return totals


class _Forwarding(logging.Handler):
    """Log handler that sends records to the trainer, whose own handlers take them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        message: dict[str, Any] = {"name": record.name, "level": record.levelno, "text": record.getMessage()}
        with suppress(ChannelClosedError):
            self._channel.send({"kind": "log", **message})
