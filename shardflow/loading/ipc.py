"""Interprocess communication of loader processes: messages over a socket pair, batches in shared memory.

Messages are JSON. The socket pair is inherited and has no name, so no other process can write to it. Only the
first message, from the trainer to its own child, is pickled, as `multiprocessing` passes the arguments of a
process, because stores have settings of many kinds.

A shared-memory segment is an anonymous file in memory (``memfd_create``), divided into equal buffers. The
loader process creates segments and sends their descriptors to the trainer; both map them once. A buffer that
is delivered is marked in the segment's first page, and the trainer clears the mark when the last array on the
buffer is freed: one byte, no message, so that it may happen inside a garbage collection. The kernel frees a
segment when both processes are gone, however they ended.
"""

from __future__ import annotations

import builtins
import json
import mmap
import os
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow import errors
from shardflow.errors import LoaderProcessError, ShardflowError
from shardflow.loading.engine import BufferPool, Lease

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_MAX_DESCRIPTORS = 64
_HEAD_NUM_BYTES = mmap.PAGESIZE
# Small buffers share a segment, so that thousands of them cost a few descriptors.
_SEGMENT_NUM_BYTES = 16 << 20
_NUM_SPARE = 2


class ChannelClosedError(Exception):
    """The other end is gone; internal to the loader."""


class Channel:
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
        """Send a message, with descriptors attached.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        self._send(json.dumps(message, separators=(",", ":")).encode(), descriptors)

    def send_setup(self, setup: Mapping[str, Any]) -> None:
        """Send the setup of a loader, with stores and their settings, to a child process.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        try:
            with Connection(os.dup(self._socket.fileno())) as connection:
                connection.send(dict(setup))
        except OSError:
            raise ChannelClosedError from None

    def receive_setup(self) -> dict[str, Any]:
        """Wait for the setup that `send_setup` sent.

        Raises:
            ChannelClosedError: The other end is gone.
            ShardflowError: A dataset of the setup cannot be opened any more.
        """
        try:
            with Connection(os.dup(self._socket.fileno())) as connection:
                setup: dict[str, Any] = connection.recv()
        except ShardflowError:
            raise  # some are an OSError too
        except (OSError, EOFError):
            raise ChannelClosedError from None
        return setup

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for a message.

        Args:
            timeout_s: How long; None waits forever.

        Returns:
            The message; None if none arrived in time.

        Raises:
            ChannelClosedError: The other end is gone, and everything that it sent was received.
        """
        body = self._receive(timeout_s)
        if body is None:
            return None
        message: dict[str, Any] = json.loads(body)
        return message

    def take_descriptor(self) -> int:
        """Return the oldest descriptor received so far; the caller closes it.

        Raises:
            ChannelClosedError: There is none, so the other end is broken.
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
        """Return the oldest complete message."""
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


def error_from_json(value: Mapping[str, str], where: str = "a loader process") -> Exception:
    """Recreate the error that `error_to_json` described: of this library, of Python, or a generic one.

    Args:
        value: The description.
        where: Who sent it, for the note.

    Returns:
        The error, with a note on where it was raised.
    """
    name, message = value["class"], value["message"]
    kind: Any = getattr(errors, name, None) or getattr(builtins, name, None)
    error: Exception | None = None
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # some take more arguments
            error = kind(message)
    if error is None:
        error = LoaderProcessError(f"{where} must deliver its micro-batches, got {name} in it: {message}.")
    trace = value.get("trace", "")
    error.add_note(f"raised in {where}:\n{trace}" if trace else f"raised in {where}")
    return error


class SharedSegment:
    """Segment of shared memory, mapped in this process.

    Args:
        number: Its name in messages.
        fileno: Descriptor of the memory; the caller may close it afterwards.
        buffer_num_bytes: Size of each buffer.
        num_buffers: How many buffers; at most the bytes of a page, since each has a mark there.
    """

    __slots__ = ("_address", "_memory", "buffer_num_bytes", "num_buffers", "num_free", "number")

    def __init__(self, number: int, fileno: int, *, buffer_num_bytes: int, num_buffers: int) -> None:
        self.number = number
        self.buffer_num_bytes = buffer_num_bytes
        self.num_buffers = num_buffers
        self.num_free = 0
        self._memory = mmap.mmap(fileno, _HEAD_NUM_BYTES + buffer_num_bytes * num_buffers)
        self._address = np.frombuffer(self._memory, np.uint8).ctypes.data

    @property
    def start(self) -> int:
        """Address of the first buffer."""
        return self._address + _HEAD_NUM_BYTES

    def lend(self, index: int) -> NDArray[np.uint8]:
        """Return a buffer that the other process delivered; its mark is cleared with its last view.

        Returns:
            ``(buffer_num_bytes,)`` uint8, writable.
        """
        address = self.start + index * self.buffer_num_bytes
        # A forked child holds copies of the arrays, whose end must not clear the parent's mark.
        return np.asarray(Lease(address, self.buffer_num_bytes, partial(self._release, index, os.getpid())))

    def release(self, index: int) -> None:
        """Clear the mark of a buffer."""
        self._memory[index] = 0

    def mark(self, index: int) -> None:
        """Mark a buffer as held by the other process."""
        self._memory[index] = 1

    def is_held(self, index: int) -> bool:
        """Tell whether the other process holds a buffer."""
        return bool(self._memory[index])

    def _release(self, index: int, pid: int) -> None:
        if os.getpid() == pid:
            self.release(index)


@dataclass(frozen=True, slots=True)
class SegmentChange:
    """Segment that the other process must map or unmap before the next batch."""

    number: int
    fileno: int
    """Descriptor to send and then to close; -1 for a segment to unmap."""
    buffer_num_bytes: int
    num_buffers: int


class SharedPool:
    """Pool of shared-memory buffers, grouped by rounded size; the counterpart of `BufferPool`.

    Args:
        max_free_bytes: How much memory may be idle, plus two buffers; beyond that, unused segments return to
            the system.
    """

    def __init__(self, max_free_bytes: int) -> None:
        self._max_free_bytes = max_free_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, SharedSegment] = {}
        self._places: dict[int, tuple[SharedSegment, int]] = {}  # by address
        self._free: dict[int, list[tuple[SharedSegment, int]]] = {}  # by size
        self._held: dict[int, list[tuple[SharedSegment, int]]] = {}
        self._free_bytes = 0
        # As in `BufferPool`: a lease may be freed inside a call of this pool.
        self._returned: deque[tuple[SharedSegment, int]] = deque()
        self._changes: list[SegmentChange] = []
        self._num_made = 0

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Return how much memory a buffer of ``num_bytes`` takes."""
        return BufferPool.size_of(num_bytes)

    @property
    def num_segments(self) -> int:
        """Segments that are mapped now."""
        return len(self._segments)

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a writable buffer, ``(num_bytes,)`` uint8, of undefined content."""
        size = self.size_of(num_bytes)
        with self._lock:
            self._drain()
            if not self._free.get(size):
                self._reclaim(size)
            if not self._free.get(size):
                for other in list(self._held):
                    self._reclaim(other)
                self._trim(size)
                self._make_segment(size)
            segment, index = self._free[size].pop()
            segment.num_free -= 1
            self._free_bytes -= size
        address = segment.start + index * size
        return np.asarray(Lease(address, size, partial(self._returned.append, (segment, index))))[:num_bytes]

    def bound(self, max_free_bytes: int) -> None:
        """Change how much memory may be idle; see `BufferPool.bound`."""
        with self._lock:
            self._max_free_bytes = max_free_bytes
            self._drain()
            for size in list(self._held):
                self._reclaim(size)
            self._trim(0)

    def hand_over(self, buffer: NDArray[np.uint8]) -> tuple[int, int]:
        """Mark a buffer as held by the other process, before its message is sent.

        Args:
            buffer: From `lend`, from its first byte.

        Returns:
            Number of the segment and of the buffer in it.
        """
        segment, index = self._places[buffer.ctypes.data]
        segment.mark(index)
        return segment.number, index

    def take_changes(self) -> list[SegmentChange]:
        """Return the segments that the other process must map or unmap before the next batch."""
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def _drain(self) -> None:
        while self._returned:
            segment, index = self._returned.popleft()
            if segment.is_held(index):
                self._held.setdefault(segment.buffer_num_bytes, []).append((segment, index))
            else:
                self._keep(segment, index)

    def _reclaim(self, size: int) -> None:
        """Take back the buffers of a size that the other process has released."""
        held, self._held[size] = self._held.pop(size, []), []
        for segment, index in held:
            if segment.is_held(index):
                self._held[size].append((segment, index))
            else:
                self._keep(segment, index)
        if not self._held[size]:
            del self._held[size]

    def _keep(self, segment: SharedSegment, index: int) -> None:
        self._free.setdefault(segment.buffer_num_bytes, []).append((segment, index))
        segment.num_free += 1
        self._free_bytes += segment.buffer_num_bytes

    def _make_segment(self, size: int) -> None:
        num_buffers = min(max(_SEGMENT_NUM_BYTES // size, 1), _HEAD_NUM_BYTES)
        fileno = os.memfd_create("shardflow-batches", os.MFD_CLOEXEC)
        os.ftruncate(fileno, _HEAD_NUM_BYTES + size * num_buffers)
        segment = SharedSegment(self._num_made, fileno, buffer_num_bytes=size, num_buffers=num_buffers)
        self._num_made += 1
        self._segments[segment.number] = segment
        self._changes.append(SegmentChange(segment.number, fileno, size, num_buffers))
        for index in reversed(range(num_buffers)):
            self._places[segment.start + index * size] = segment, index
            self._keep(segment, index)

    def _trim(self, size: int) -> None:
        """Unmap unused segments beyond the bound, oldest first."""
        for segment in list(self._segments.values()):
            if self._free_bytes <= self._max_free_bytes + _NUM_SPARE * size:
                return
            if segment.num_free < segment.num_buffers:
                continue
            idle = self._free[segment.buffer_num_bytes]
            self._free[segment.buffer_num_bytes] = [place for place in idle if place[0] is not segment]
            self._free_bytes -= segment.num_buffers * segment.buffer_num_bytes
            for index in range(segment.num_buffers):
                del self._places[segment.start + index * segment.buffer_num_bytes]
            del self._segments[segment.number]
            self._changes.append(SegmentChange(segment.number, -1, 0, 0))
