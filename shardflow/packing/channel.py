"""Messages between the job and its packing processes: length-prefixed JSON over a socket pair.

JSON, not pickle: the other end decodes files that others made, and a process that such a file took over must
not be able to run code in the job.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Channel", "ChannelClosedError"]

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16
_MAX_MESSAGE_BYTES: Final = 1 << 28


class ChannelClosedError(Exception):
    """The other end is gone, or sent what is no message; never leaves the packing package."""


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
            ChannelClosedError: The other end is gone, or took nothing for ``timeout_s``.
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
        """Read once, without waiting, and yield the messages that are whole by then.

        Raises:
            ChannelClosedError: The other end is gone; what it had sent whole was yielded before.
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
