"""An object read from its first byte to its last, in one window of memory, and hashed on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardflow.storage import ByteRange, ByteStore

__all__ = ["HashedStream"]

WINDOW_NUM_BYTES = 4 * 1024 * 1024


class HashedStream:
    """The bytes of an object in order.

    Args:
        store: Where the object lies.
        path: The object.
        window_bytes: How much is read at once, and held; 4 MiB if not given.

    Attributes:
        num_bytes: Size of the object.
        position: Where the next byte comes from.

    Raises:
        NotFoundError: There is no such object.
    """

    def __init__(self, store: ByteStore, path: str, *, window_bytes: int | None = None) -> None:
        self._store = store
        self._path = path
        self.num_bytes = store.size(path)
        self.position = 0
        self._digest = hashlib.sha256()
        self._window = np.empty(window_bytes or WINDOW_NUM_BYTES, np.uint8)
        self._window_start = self._window_stop = 0

    def take(self, num_bytes: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the next bytes, fewer where the object ends; each piece is valid until the next one."""
        stop = min(self.position + num_bytes, self.num_bytes)
        while self.position < stop:
            if self.position == self._window_stop:
                self._advance()
            piece_stop = min(stop, self._window_stop)
            start = self.position
            self.position = piece_stop
            yield self._window[start - self._window_start : piece_stop - self._window_start]

    def take_bytes(self, num_bytes: int) -> bytes:
        """Return the next bytes; fewer where the object ends."""
        return b"".join(piece.tobytes() for piece in self.take(num_bytes))

    def hexdigest(self) -> str:
        """SHA-256 of the whole object; reads what is left of it."""
        for _ in self.take(self.num_bytes):
            pass
        return self._digest.hexdigest()

    def _advance(self) -> None:
        start = self._window_stop
        stop = min(start + len(self._window), self.num_bytes)
        view = self._window[: stop - start]
        self._store.read_ranges(self._path, [ByteRange(start, stop - start)], [view.data])
        self._digest.update(view.data)
        self._window_start, self._window_stop = start, stop
