"""Memory that a thread uses again and again while it makes samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scratch"]

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
