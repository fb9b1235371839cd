"""State of one loader thread: scratch memory that it reuses, and a note of what it is doing."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

_STEP = 1 << 20


class Scratch:
    """Named, growing buffers of one thread; what a call returns is valid until the next call with that name.

    They only grow, to the largest slice and the largest read, so that a thread that has met both allocates
    nothing.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def bytes(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        """Return ``(num_bytes,)`` uint8 of undefined content."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers[name] = np.empty(-(-num_bytes // _STEP) * _STEP, np.uint8)
        return buffer[:num_bytes]

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a C-contiguous array of undefined content."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.bytes(name, num_bytes).view(dtype).reshape(shape)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class ThreadState:
    """State of one thread. Only its own thread writes.

    Others may read the note at any time and see one consistent triple, because it is stored with one
    assignment: so a wait that takes too long can name what it waits for (contract S8).
    """

    __slots__ = ("_now", "scratch")

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._now = ("idle", "", time.monotonic())

    def enter(self, stage: str, place: str) -> None:
        """Say what begins now.

        Args:
            stage: ``plan``, ``index``, ``read``, ``check``, ``decode``, ``transform`` or ``idle``.
            place: Which shard and tier, such as ``"shard train-000003, tier local"``.
        """
        self._now = (stage, place, time.monotonic())

    def describe(self) -> str:
        """Say the stage, the place and for how long."""
        stage, place, since = self._now
        return f"stage {stage}{f' of {place}' if place else ''} for {time.monotonic() - since:.1f} s"

    def describe_busy(self) -> str:
        """Say what the thread is at; nothing while it has nothing to do."""
        return "" if self._now[0] == "idle" else self.describe()
