"""Batch memory that comes back by itself when nobody looks at it any more.

A fresh 21 MB buffer per batch costs as much in page faults as decoding the batch. So memory is lent: a lease
is an object that NumPy arrays are views of, and when the last array, torch tensor or memoryview on it has
died, the lease gives its memory back to the pool. Nobody calls release, and nobody can be handed memory that
something still looks at.

Memory is mapped anonymously and privately: page-aligned, given back to the system at once when it is dropped,
and never shared with a forked child by accident.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["BufferPool", "Lease", "Pool"]

_MIN_BYTES = 1 << 16
_STEPS_PER_DOUBLING = 8
_NUM_SPARE = 2
# NumPy asks for huge pages from this size on as well.
_MIN_HUGE_BYTES = 4 << 20


class Pool(Protocol):
    """Where the memory of batches comes from."""

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Return how much memory a buffer of ``num_bytes`` takes."""

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a writable buffer, ``(num_bytes,)`` uint8; it comes back when its last view dies."""

    def bound(self, max_free_bytes: int) -> None:
        """Change how much memory may lie idle; what is too much goes back to the system."""


class BufferPool:
    """Recycles memory of nearly equal sizes.

    Sizes are rounded up by at most an eighth, so that batches whose text differs a little share buffers.

    Args:
        max_free_bytes: How much memory may lie idle in the pool, and two buffers more, which are those that a
            consumer held; beyond it the sizes that were not asked for the longest go back to the system.
    """

    def __init__(self, max_free_bytes: int) -> None:
        self._max_free_bytes = max_free_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[mmap.mmap]] = {}  # in the order of last use
        self._free_bytes = 0
        # A lease may die anywhere, also while this thread is inside the pool: so it only appends here, which
        # needs no lock.
        self._returned: deque[mmap.mmap] = deque()
        self._num_allocated = 0

    @property
    def num_allocated(self) -> int:
        """Buffers ever asked from the system; stands still once iteration is in its stride."""
        return self._num_allocated

    @property
    def free_bytes(self) -> int:
        """Memory that lies idle in the pool."""
        self._settle()
        return self._free_bytes

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Return how much memory a buffer of ``num_bytes`` takes: at most an eighth more, at least 64 KiB."""
        size = max(num_bytes, _MIN_BYTES)
        step = max((1 << (size - 1).bit_length()) // (2 * _STEPS_PER_DOUBLING), mmap.PAGESIZE)
        return -(-size // step) * step

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a writable buffer whose content is whatever its last user left.

        Args:
            num_bytes: Size; may be zero.

        Returns:
            ``(num_bytes,)`` uint8, page-aligned. The memory returns to the pool when the last view of it
            dies.
        """
        size = self.size_of(num_bytes)
        with self._lock:
            self._drain()
            memory = self._pop(size)
            self._num_allocated += memory is None
        self._settle()  # what came back while we held the lock
        if memory is None:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size >= _MIN_HUGE_BYTES:
                _ask_for_huge_pages(memory)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        return np.asarray(Lease(address, size, partial(self.take_back, memory)))[:num_bytes]

    def bound(self, max_free_bytes: int) -> None:
        """Change how much memory may lie idle; what is too much goes back to the system."""
        with self._lock:
            self._max_free_bytes = max_free_bytes
            self._drain()
            self._trim(0)
        self._settle()

    def take_back(self, memory: mmap.mmap) -> None:
        """Accept memory from a lease that died; safe in any thread and inside a garbage collection."""
        self._returned.append(memory)
        self._settle()

    def _settle(self) -> None:
        """Move what was returned to the free lists, unless someone else is at it."""
        while self._returned:
            if not self._lock.acquire(blocking=False):
                return  # the holder, possibly this very thread further up, looks again when it is done
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._returned:
            self._keep(self._returned.popleft())

    def _keep(self, memory: mmap.mmap) -> None:
        size = len(memory)
        self._free[size] = [*self._free.pop(size, ()), memory]
        self._free_bytes += size
        self._trim(_NUM_SPARE * size)

    def _trim(self, spare_bytes: int) -> None:
        while self._free_bytes > self._max_free_bytes + spare_bytes:
            oldest = next(iter(self._free))
            self._free_bytes -= len(self._free[oldest].pop())
            if not self._free[oldest]:
                del self._free[oldest]

    def _pop(self, size: int) -> mmap.mmap | None:
        """Take a free buffer of a size, which then counts as the size asked for last."""
        stack = self._free.pop(size, None)
        if stack is None:
            return None
        memory = stack.pop()
        self._free_bytes -= size
        if stack:
            self._free[size] = stack
        return memory


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Ask for pages of 2 MiB: a first touch of 21 MB costs 3 ms in place of 17, and decoding into it less."""
    # Systems without them (their kernel, or not Linux) go on with small pages.
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


class Lease:
    """What the arrays on a lent buffer keep alive.

    Args:
        address: Of the buffer.
        size: Of the buffer in bytes.
        give_back: Keeps the memory alive until it is called, when the last array on the buffer has died; that
            may be in any thread and inside a garbage collection.
    """

    __slots__ = ("_address", "_give_back", "_size")

    def __init__(self, address: int, size: int, give_back: Callable[[], None]) -> None:
        self._address = address
        self._size = size
        self._give_back = give_back

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self._size,), "typestr": "|u1", "data": (self._address, False)}

    def __del__(self) -> None:
        self._give_back()
