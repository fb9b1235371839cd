"""A process that reads and decodes for a trainer: the loader's own threads, and a way out for their batches.

Started by `LoaderProcess`. The main thread listens to the trainer and dies with it; for each iteration one
thread more takes the micro-batches in order and hands them over, a bounded number of bytes ahead.
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

from shardflow.loading.batch import Batch
from shardflow.loading.ipc import Channel, ChannelClosedError, SharedPool, error_to_json
from shardflow.loading.loader import Loader
from shardflow.loading.runtime import BatchStream
from shardflow.processes import ignore_group_signals
from shardflow.telemetry import StageCounters

_PR_SET_PDEATHSIG = 1
_MAX_UNREAD = 64
_COUNTERS_EVERY_S = 0.2


def main(fileno: int, parent: int, *, dies_with_thread: bool) -> None:
    """Serve a trainer until it closes its end or dies.

    Args:
        fileno: Our end of the channel.
        parent: Process id of the trainer.
        dies_with_thread: Whether the thread that started us lives as long as the trainer, so that the kernel
            may tie our life to it as well.
    """
    ignore_group_signals()
    if dies_with_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    channel = Channel(socket.socket(fileno=fileno))
    with suppress(ChannelClosedError, ProcessLookupError):
        trainer = os.pidfd_open(parent)
        if os.getppid() == parent:  # else it died before we looked, and another has its number
            _serve(channel, trainer)
    # No clean-up: threads may be stuck in a read, and the kernel frees all that is ours.
    os._exit(0)


def _serve(channel: Channel, trainer: int) -> None:
    setup = channel.receive_setup()
    logging.getLogger().addHandler(_Forwarding(channel))
    try:
        import cv2

        cv2.setNumThreads(1)  # threads of ours are what runs side by side
        loader = Loader(**setup["loader"])
    except BaseException as error:  # noqa: BLE001 - the trainer raises it
        channel.send({"kind": "error", "iteration": -1, **error_to_json(error)})
        return
    pool = SharedPool(loader.config.prefetch_bytes)
    counters = _CountersNews(loader.counters)
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
    channel: Channel, loader: Loader, pool: SharedPool, counters: _CountersNews, message: dict[str, Any]
) -> _Delivery | None:
    """Open an iteration; None where it cannot be opened, which the trainer was told."""
    iteration, numbers = message["iteration"], range(*message["numbers"])
    try:
        loader.load_masks(message["masks"])
        stream = loader.stream(message["epoch"], numbers, pool=pool)
    except BaseException as error:  # noqa: BLE001 - the trainer raises it
        channel.send({"kind": "error", "iteration": iteration, **error_to_json(error)})
        return None
    return _Delivery(channel, pool, stream, counters, num_batches=len(numbers), iteration=iteration)


def _change(loader: Loader, pool: SharedPool, delivery: _Delivery | None, message: dict[str, Any]) -> int:
    """Let settings be others; returns how many bytes are handed over and not taken from now on."""
    unread_bytes: int = message["unread_bytes"]
    loader.change(message["changes"])
    pool.bound(loader.config.prefetch_bytes)
    if delivery is not None:
        delivery.bound(unread_bytes)
    return unread_bytes


class _Delivery:
    """Hands the micro-batches of one iteration over, in order."""

    def __init__(
        self,
        channel: Channel,
        pool: SharedPool,
        stream: BatchStream,
        counters: _CountersNews,
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
        """Begin; at most so many bytes are handed over and not taken yet, or one micro-batch."""
        self._max_unread_bytes = max_unread_bytes
        self._thread.start()

    def bound(self, max_unread_bytes: int) -> None:
        """Change how many bytes are handed over and not taken."""
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
        """Say what the next micro-batch waits for, as a sentence, and what the threads are at."""
        return {"for": self._stream.describe_wait(timeout_s), "activity": self._stream.describe_activity()}

    def _run(self) -> None:
        try:
            while self._has_room():
                self._send(next(self._stream))
        except ChannelClosedError:
            return  # the main thread sees it too, and ends the process
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
        for news in self._pool.take_news():
            fields = {"segment": news.number, "size": news.buffer_num_bytes, "count": news.num_buffers}
            if news.fileno < 0:
                self._channel.send({"kind": "drop", "segment": news.number})
            else:
                self._channel.send({"kind": "segment", **fields}, [news.fileno])
                os.close(news.fileno)
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


class _CountersNews:
    """What was counted since the last look, now and then.

    How long the delivery waited for its own engine is not told: the trainer counts its own waits.
    """

    def __init__(self, counters: StageCounters) -> None:
        self._window = counters.window()
        self._told_at = 0.0

    def take(self, *, is_last: bool) -> dict[str, list[float]]:
        """Return seconds, bytes and items per stage that were not told yet, and the five totals of gauges."""
        now = time.monotonic()
        if not is_last and now - self._told_at < _COUNTERS_EVERY_S:
            return {}
        self._told_at = now
        stages, gauges = self._window.take()
        news = {
            name: [one.seconds, float(one.num_bytes), float(one.num_items)]
            for name, one in stages.items()
            if name not in {"wait", "starved"}
        }
        for name, seen in gauges.items():
            news[name] = [seen.last, seen.least, seen.most, seen.weighted, seen.weight]
        return news


class _Forwarding(logging.Handler):
    """Sends log records to the trainer, whose handlers they are for."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        message: dict[str, Any] = {"name": record.name, "level": record.levelno, "text": record.getMessage()}
        with suppress(ChannelClosedError):
            self._channel.send({"kind": "log", **message})
