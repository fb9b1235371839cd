"""Messages between a trainer and the processes that load for it: JSON over a socket pair, and descriptors.

The pair is inherited and has no name, so nobody else can write to it. Only the very first message, from the
trainer to its own child, is not JSON: what to load goes as `multiprocessing` passes the arguments of a
process, because stores have settings of many kinds.
"""

from __future__ import annotations

import builtins
import json
import os
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shardflow import errors
from shardflow.errors import LoaderProcessError, ShardflowError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ChannelClosedError", "SideChannel", "error_from_json", "error_to_json"]

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_MAX_DESCRIPTORS = 64


class ChannelClosedError(Exception):
    """The other end is gone; never leaves the loader."""


class SideChannel:
    """One end of a socket pair. Any thread may send, one at a time receives.

    Args:
        end: The socket; this object closes it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._received = bytearray()
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        """Return the descriptor, for polling; -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message, and descriptors with it.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        self._send(json.dumps(message, separators=(",", ":")).encode(), descriptors)

    def send_setup(self, setup: Mapping[str, Any]) -> None:
        """Send what to load, with stores and their settings, to a process of our own.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        try:
            with Connection(os.dup(self._socket.fileno())) as way:
                way.send(dict(setup))
        except OSError:
            raise ChannelClosedError from None

    def receive_setup(self) -> dict[str, Any]:
        """Wait for what `send_setup` sent.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        try:
            with Connection(os.dup(self._socket.fileno())) as way:
                setup: dict[str, Any] = way.recv()
        except (OSError, EOFError):
            raise ChannelClosedError from None
        return setup

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for a message.

        Args:
            timeout_s: How long; None without end.

        Returns:
            The message; None if none came in time.

        Raises:
            ChannelClosedError: The other end is gone, and all that it sent was received.
        """
        body = self._receive(timeout_s)
        if body is None:
            return None
        message: dict[str, Any] = json.loads(body)
        return message

    def take_descriptor(self) -> int:
        """Return the oldest descriptor that came with the messages so far; the caller closes it.

        Raises:
            ChannelClosedError: There is none, so the other end is not what it should be.
        """
        if not self._descriptors:
            raise ChannelClosedError
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close this end; closing twice is harmless."""
        self._socket.close()

    def _send(self, body: bytes, descriptors: Sequence[int]) -> None:
        data = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else 0
                self._socket.sendall(data[sent:])
        except OSError:
            raise ChannelClosedError from None

    def _receive(self, timeout_s: float | None) -> bytes | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (body := self._cut()) is None:
            if deadline is not None and not self._is_readable(deadline - time.monotonic()):
                return None
            self._read()
        return body

    def _is_readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except (OSError, ValueError):
            raise ChannelClosedError from None
        return bool(poll.poll(max(0.0, timeout_s) * 1e3))

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MAX_DESCRIPTORS)
        except OSError:
            raise ChannelClosedError from None
        self._descriptors.extend(descriptors)
        if not data:
            raise ChannelClosedError
        self._received += data

    def _cut(self) -> bytes | None:
        """Return the oldest message that is whole."""
        if len(self._received) < _LENGTH.size:
            return None
        stop = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < stop:
            return None
        body = bytes(self._received[_LENGTH.size : stop])
        del self._received[:stop]
        return body


def error_to_json(error: BaseException) -> dict[str, str]:
    """Describe an error for the other process."""
    return {
        "class": type(error).__name__,
        "message": error.message if isinstance(error, ShardflowError) else str(error),
        "trace": "".join(traceback.format_tb(error.__traceback__)),
    }


def error_from_json(value: Mapping[str, str]) -> Exception:
    """Make the error that `error_to_json` described: one of ours, one of Python's own, or a general one.

    Returns:
        The error; a note on it says where it was raised.
    """
    name, message = value["class"], value["message"]
    kind: Any = getattr(errors, name, None) or getattr(builtins, name, None)
    error: Exception | None = None
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # some take more than a message
            error = kind(message)
    if error is None:
        error = LoaderProcessError(
            f"a loader process must deliver its micro-batches, got {name} in it: {message}."
        )
    error.add_note(f"raised in a loader process:\n{value['trace']}")
    return error
