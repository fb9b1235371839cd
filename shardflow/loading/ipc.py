"""Interprocess communication of loader processes: messages over a socket pair, batches in shared memory.

Messages are JSON. The socket pair is inherited and has no name, so nobody else can write to it. Only the very
first message, from the trainer to its own child, is not JSON: what to load goes as `multiprocessing` passes
the arguments of a process, because stores have settings of many kinds.

A shared-memory segment is an anonymous file in memory (``memfd_create``), cut into equal buffers. The process
that decodes makes segments and sends their descriptors to the trainer; both map them once. A buffer that goes
to the trainer is marked in the segment's first page, and the trainer takes the mark away when its last array
on the buffer has died: one byte, no message, so that it may happen inside a garbage collection. The kernel
frees a segment when both processes are gone, however they ended.
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
    """The other end is gone; never leaves the loader."""


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


class SharedSegment:
    """One piece of shared memory, mapped in this process.

    Args:
        number: Its name between the two processes.
        fileno: Descriptor of the memory; the caller may close it afterwards.
        buffer_num_bytes: Size of each buffer.
        num_buffers: How many there are; at most the bytes of a page, since each has a mark there.
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
        """Return a buffer that the other process handed over; its mark goes with its last view.

        Returns:
            ``(buffer_num_bytes,)`` uint8, writable.
        """
        address = self.start + index * self.buffer_num_bytes
        # A forked child holds copies of the arrays, and their end says nothing about the parent's.
        return np.asarray(Lease(address, self.buffer_num_bytes, partial(self._release, index, os.getpid())))

    def release(self, index: int) -> None:
        """Take the mark of a buffer away."""
        self._memory[index] = 0

    def mark(self, index: int) -> None:
        """Say that the other process has a buffer."""
        self._memory[index] = 1

    def is_away(self, index: int) -> bool:
        """Tell whether the other process has a buffer."""
        return bool(self._memory[index])

    def _release(self, index: int, pid: int) -> None:
        if os.getpid() == pid:
            self.release(index)


@dataclass(frozen=True, slots=True)
class SegmentNews:
    """A segment that the other process has to map, or to let go."""

    number: int
    fileno: int
    """Descriptor to send and then to close; -1 for a segment that is gone."""
    buffer_num_bytes: int
    num_buffers: int


class SharedPool:
    """Recycles shared memory of nearly equal sizes; the counterpart of `BufferPool`.

    Args:
        max_free_bytes: How much memory may lie idle, and two buffers more; beyond it segments that nobody
            uses go back to the system.
    """

    def __init__(self, max_free_bytes: int) -> None:
        self._max_free_bytes = max_free_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, SharedSegment] = {}
        self._places: dict[int, tuple[SharedSegment, int]] = {}  # by address
        self._free: dict[int, list[tuple[SharedSegment, int]]] = {}  # by size
        self._away: dict[int, list[tuple[SharedSegment, int]]] = {}
        self._free_bytes = 0
        # As in `BufferPool`: a lease may die inside this very pool.
        self._returned: deque[tuple[SharedSegment, int]] = deque()
        self._news: list[SegmentNews] = []
        self._num_made = 0

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Return how much memory a buffer of ``num_bytes`` takes."""
        return BufferPool.size_of(num_bytes)

    @property
    def num_segments(self) -> int:
        """Slabs that are mapped now."""
        return len(self._segments)

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a writable buffer, ``(num_bytes,)`` uint8, of undefined content."""
        size = self.size_of(num_bytes)
        with self._lock:
            self._drain()
            if not self._free.get(size):
                self._reclaim(size)
            if not self._free.get(size):
                for other in list(self._away):
                    self._reclaim(other)
                self._trim(size)
                self._make_segment(size)
            segment, index = self._free[size].pop()
            segment.num_free -= 1
            self._free_bytes -= size
        address = segment.start + index * size
        return np.asarray(Lease(address, size, partial(self._returned.append, (segment, index))))[:num_bytes]

    def bound(self, max_free_bytes: int) -> None:
        """Change how much memory may lie idle; see `BufferPool.bound`."""
        with self._lock:
            self._max_free_bytes = max_free_bytes
            self._drain()
            for size in list(self._away):
                self._reclaim(size)
            self._trim(0)

    def hand_over(self, buffer: NDArray[np.uint8]) -> tuple[int, int]:
        """Mark a buffer as the other process's, before it is told of it.

        Args:
            buffer: From `lend`, from its first byte.

        Returns:
            Number of the segment and of the buffer in it.
        """
        segment, index = self._places[buffer.ctypes.data]
        segment.mark(index)
        return segment.number, index

    def take_news(self) -> list[SegmentNews]:
        """Return what the other process must be told before the next batch."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def _drain(self) -> None:
        while self._returned:
            segment, index = self._returned.popleft()
            if segment.is_away(index):
                self._away.setdefault(segment.buffer_num_bytes, []).append((segment, index))
            else:
                self._keep(segment, index)

    def _reclaim(self, size: int) -> None:
        """Take back the buffers of a size that the other process has let go."""
        away, self._away[size] = self._away.pop(size, []), []
        for segment, index in away:
            if segment.is_away(index):
                self._away[size].append((segment, index))
            else:
                self._keep(segment, index)
        if not self._away[size]:
            del self._away[size]

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
        self._news.append(SegmentNews(segment.number, fileno, size, num_buffers))
        for index in reversed(range(num_buffers)):
            self._places[segment.start + index * size] = segment, index
            self._keep(segment, index)

    def _trim(self, size: int) -> None:
        """Let go segments of other sizes that lie idle beyond the bound, those of the oldest size first."""
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
            self._news.append(SegmentNews(segment.number, -1, 0, 0))
