"""Batch memory that two processes share, without a name that anyone could leave behind.

A slab is an anonymous file in memory (``memfd_create``), cut into equal buffers. The process that decodes
makes slabs and sends their descriptors to the trainer; both map them once. A buffer that goes to the trainer
is marked in the slab's first page, and the trainer takes the mark away when its last array on the buffer has
died: one byte, no message, so that it may happen inside a garbage collection. The kernel frees a slab when
both processes are gone, however they ended.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardflow.loading.buffers import BufferPool, Lease

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SharedPool", "Slab", "SlabNews"]

_HEAD_NUM_BYTES = mmap.PAGESIZE
# Small buffers share a slab, so that thousands of them cost a few descriptors.
_SLAB_NUM_BYTES = 16 << 20
_NUM_SPARE = 2


class Slab:
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
class SlabNews:
    """A slab that the other process has to map, or to let go."""

    number: int
    fileno: int
    """Descriptor to send and then to close; -1 for a slab that is gone."""
    buffer_num_bytes: int
    num_buffers: int


class SharedPool:
    """Recycles shared memory of nearly equal sizes; the counterpart of `BufferPool`.

    Args:
        max_free_bytes: How much memory may lie idle, and two buffers more; beyond it slabs that nobody uses
            go back to the system.
    """

    def __init__(self, max_free_bytes: int) -> None:
        self._max_free_bytes = max_free_bytes
        self._lock = threading.Lock()
        self._slabs: dict[int, Slab] = {}
        self._places: dict[int, tuple[Slab, int]] = {}  # by address
        self._free: dict[int, list[tuple[Slab, int]]] = {}  # by size
        self._away: dict[int, list[tuple[Slab, int]]] = {}
        self._free_bytes = 0
        # As in `BufferPool`: a lease may die inside this very pool.
        self._returned: deque[tuple[Slab, int]] = deque()
        self._news: list[SlabNews] = []
        self._num_made = 0

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Return how much memory a buffer of ``num_bytes`` takes."""
        return BufferPool.size_of(num_bytes)

    @property
    def num_slabs(self) -> int:
        """Slabs that are mapped now."""
        return len(self._slabs)

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
                self._make_slab(size)
            slab, index = self._free[size].pop()
            slab.num_free -= 1
            self._free_bytes -= size
        address = slab.start + index * size
        return np.asarray(Lease(address, size, partial(self._returned.append, (slab, index))))[:num_bytes]

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
            Number of the slab and of the buffer in it.
        """
        slab, index = self._places[buffer.ctypes.data]
        slab.mark(index)
        return slab.number, index

    def take_news(self) -> list[SlabNews]:
        """Return what the other process must be told before the next batch."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def _drain(self) -> None:
        while self._returned:
            slab, index = self._returned.popleft()
            if slab.is_away(index):
                self._away.setdefault(slab.buffer_num_bytes, []).append((slab, index))
            else:
                self._keep(slab, index)

    def _reclaim(self, size: int) -> None:
        """Take back the buffers of a size that the other process has let go."""
        away, self._away[size] = self._away.pop(size, []), []
        for slab, index in away:
            if slab.is_away(index):
                self._away[size].append((slab, index))
            else:
                self._keep(slab, index)
        if not self._away[size]:
            del self._away[size]

    def _keep(self, slab: Slab, index: int) -> None:
        self._free.setdefault(slab.buffer_num_bytes, []).append((slab, index))
        slab.num_free += 1
        self._free_bytes += slab.buffer_num_bytes

    def _make_slab(self, size: int) -> None:
        num_buffers = min(max(_SLAB_NUM_BYTES // size, 1), _HEAD_NUM_BYTES)
        fileno = os.memfd_create("shardflow-batches", os.MFD_CLOEXEC)
        os.ftruncate(fileno, _HEAD_NUM_BYTES + size * num_buffers)
        slab = Slab(self._num_made, fileno, buffer_num_bytes=size, num_buffers=num_buffers)
        self._num_made += 1
        self._slabs[slab.number] = slab
        self._news.append(SlabNews(slab.number, fileno, size, num_buffers))
        for index in reversed(range(num_buffers)):
            self._places[slab.start + index * size] = slab, index
            self._keep(slab, index)

    def _trim(self, size: int) -> None:
        """Let go slabs of other sizes that lie idle beyond the bound, those of the oldest size first."""
        for slab in list(self._slabs.values()):
            if self._free_bytes <= self._max_free_bytes + _NUM_SPARE * size:
                return
            if slab.num_free < slab.num_buffers:
                continue
            idle = self._free[slab.buffer_num_bytes]
            self._free[slab.buffer_num_bytes] = [place for place in idle if place[0] is not slab]
            self._free_bytes -= slab.num_buffers * slab.buffer_num_bytes
            for index in range(slab.num_buffers):
                del self._places[slab.start + index * slab.buffer_num_bytes]
            del self._slabs[slab.number]
            self._news.append(SlabNews(slab.number, -1, 0, 0))
