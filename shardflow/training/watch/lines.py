"""JSON objects, a line each, over a stream that must never block who writes.

The sides of a run speak this over TCP. What is not JSON, or longer than a line may be, ends the connection:
the port is open to whoever reaches it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["Lines", "split_lines"]

_MAX_BYTES: Final = 64 * 1024


class Lines:
    """One connection.

    Args:
        stream: A connected socket; it is made non-blocking.

    Attributes:
        is_open: False once the peer is gone, reads nothing, or sends what it must not; then `close` it.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.stream = stream
        self.is_open = True
        self._incoming = b""
        self._outgoing = b""

    def send(self, value: Mapping[str, Any]) -> None:
        """Send an object, or as much of it as goes; the rest goes with the next one."""
        self._outgoing += json.dumps(value).encode() + b"\n"
        try:
            while self.is_open and self._outgoing:
                self._outgoing = self._outgoing[self.stream.send(self._outgoing) :]
        except BlockingIOError:
            self.is_open = len(self._outgoing) <= _MAX_BYTES
        except OSError:
            self.is_open = False

    def receive(self) -> list[dict[str, Any]]:
        """Return the objects that have come whole."""
        try:
            data = self.stream.recv(_MAX_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        objects, self._incoming, is_sound = split_lines(self._incoming + data)
        self.is_open = self.is_open and is_sound and bool(data)
        return objects

    def close(self) -> None:
        """End the connection; closing twice is harmless."""
        self.is_open = False
        self.stream.close()


def split_lines(data: bytes) -> tuple[list[dict[str, Any]], bytes, bool]:
    """Cut bytes into objects.

    Returns:
        The objects, the bytes of a line that is not whole yet, and whether all of it was sound.
    """
    *lines, rest = data.split(b"\n")
    objects: list[dict[str, Any]] = []
    try:
        for line in lines:
            value = json.loads(line)
            if not isinstance(value, dict):
                return objects, b"", False
            objects.append(value)
    except (ValueError, RecursionError):
        return objects, b"", False
    return objects, rest, len(rest) <= _MAX_BYTES
