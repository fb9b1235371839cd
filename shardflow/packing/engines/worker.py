"""Packing process: takes its limits, then runs tasks until the job closes the channel.

It is started by `shardflow.packing.engines.local`: in a fresh interpreter, or by a fork of a command that has
no threads and has read nothing (`shardflow.packing.engines.forking`). Once it runs, its standard streams are
closed, because native libraries print text of inputs. Only results reach the job; a failure carries a class
name and a place in the code, no text.

Messages are length-prefixed JSON over a socket pair. JSON, not pickle: the process decodes files from others,
and a process that such a file took over must not be able to run code in the job.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import resource
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shardflow.errors import StorageError
from shardflow.logs import describe_exception
from shardflow.packing.engines.base import (
    Answer,
    Task,
    WorkerLimits,
    WorkerSetup,
    decode,
    encode,
    end_with,
    on_step,
)
from shardflow.packing.registry import TASK_HANDLERS

if TYPE_CHECKING:
    from collections.abc import Iterator

_KIB: Final = 1024
_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16
_MAX_MESSAGE_BYTES: Final = 1 << 28


Handler: TypeAlias = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""Runs one task: ``handler(kind, payload) -> result``, records as JSON; see `answering`."""


class ChannelClosedError(Exception):
    """The other end is gone or sent an invalid message; never leaves the packing package."""


class Channel:
    """One end of a socket pair that carries JSON objects, in order."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], *, timeout_s: float | None = None) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: The other end is gone, or accepted nothing for ``timeout_s``.
        """
        body = json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode()
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError:
            raise ChannelClosedError from None

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        self._socket.settimeout(None)
        while (message := self._take()) is None:
            self._read()
        return message

    def receive_available(self) -> Iterator[dict[str, Any]]:
        """Read once, without waiting, and yield the complete messages.

        Raises:
            ChannelClosedError: The other end is gone; its complete messages were yielded before.
        """
        self._socket.settimeout(0.0)
        try:
            self._read()
        finally:
            while (message := self._take()) is not None:
                yield message

    def close(self) -> None:
        """Close this end; closing twice is harmless."""
        self._socket.close()

    def _read(self) -> None:
        try:
            piece = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            raise ChannelClosedError from None
        if not piece:
            raise ChannelClosedError
        self._received += piece

    def _take(self) -> dict[str, Any] | None:
        if len(self._received) < _LENGTH.size:
            return None
        (num_bytes,) = _LENGTH.unpack_from(self._received)
        if num_bytes > _MAX_MESSAGE_BYTES:
            raise ChannelClosedError
        end = _LENGTH.size + num_bytes
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise ChannelClosedError from None
        if not isinstance(message, dict):
            raise ChannelClosedError
        return message


def main(channel_fileno: int, parent_pid: int) -> None:
    """Run until the channel closes.

    Args:
        channel_fileno: This process's end of the socket pair.
        parent_pid: The job; this process ends with it.
    """
    end_with(parent_pid)
    log_fileno = os.dup(sys.stderr.fileno())
    faulthandler.enable(file=log_fileno)
    channel = Channel(socket.socket(fileno=channel_fileno))
    with suppress(ChannelClosedError):
        try:
            start = decode(WorkerSetup, channel.receive())
            start.limits.apply()
            handler = _silently(lambda: _make_handler(start.handlers, start.setup))
        except Exception as error:  # noqa: BLE001 - reported to the job, which gives up
            channel.send(encode(Answer(cannot_start=describe_exception(error))))
            return
        channel.send(encode(Answer(pid=os.getpid())))
        _close_streams()
        while True:
            task = decode(Task, channel.receive())
            start.limits.start_task()
            on_step(_Steps(channel, start.limits, task.timeout_s))
            channel.send(encode(replace(_answer(handler, task), peak_memory_bytes=peak_memory_bytes())))


class _Steps:
    """Tells the job that a task goes on, not more often than its deadline needs."""

    def __init__(self, channel: Channel, limits: WorkerLimits, timeout_s: float) -> None:
        self._channel, self._limits = channel, limits
        self._pause_s = min(1.0, timeout_s / 8)
        self._told = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._told >= self._pause_s:
            self._told = now
            self._limits.start_task()
            self._channel.send(encode(Answer(is_step=True)))


def answering(kinds: Mapping[str, tuple[type[Any], Callable[[Any], Any]]]) -> Handler:
    """Return the handler for a table with the record and the function of each kind of task."""

    def handle(kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        record, answer = kinds[kind]
        result: dict[str, Any] = encode(answer(decode(record, payload)))
        return result

    return handle


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process."""
    with suppress(OSError, ValueError):
        # Not ru_maxrss, which on Linux starts with that of the parent.
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * _KIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB


def _make_handler(name: str, setup: Mapping[str, Any]) -> Handler:
    handler: Handler = resolve_name(TASK_HANDLERS.get(name, name))(setup)
    return handler


def _silently(make: Callable[[], Handler]) -> Handler:
    """Silence warnings and logs before importing libraries that print text of inputs."""
    warnings.simplefilter("ignore")
    logging.lastResort = None
    logging.disable(logging.CRITICAL)
    # Imported modules stay until the end: keep them out of garbage collection.
    gc.disable()
    try:
        return make()
    finally:
        gc.freeze()
        gc.enable()


def _close_streams() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _answer(handler: Handler, task: Task) -> Answer:
    try:
        return Answer(result=handler(task.kind, task.payload))
    except MemoryError:
        return Answer(failure="out_of_memory", detail="MemoryError")
    except StorageError as error:
        return Answer(failure="storage", detail=error.message)
    except Exception as error:  # noqa: BLE001 - the one place where any failure of a study becomes an outcome
        return Answer(failure="failed", detail=describe_exception(error))
