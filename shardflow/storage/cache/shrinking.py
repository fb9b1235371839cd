"""A cache folder that comes down to a lower bound while others read from it.

The bound is each process's own and lies nowhere on disk: who sets a lower one deletes down to it, and brings
the folder within it before it keeps anything more. So the ranks of a node agree as soon as all of them were
told, in any order, and the bound of a process that died died with it. Until then the folder holds at most
what the largest bound of the living allows.

Deleting goes on in a thread, a few blocks at a time, since everybody else waits for the lock meanwhile.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from shardflow.storage.cache.catalog import Catalog
from shardflow.storage.cache.eviction import Evictor
from shardflow.threads import wait_for_at_exit

__all__ = ["Shrinker"]

_BLOCKS_AT_ONCE: Final = 64
# A block that is being fetched cannot go before it has come; whoever fetches it may take his time.
_PATIENCE_S: Final = 30.0
_LOOK_AGAIN_S: Final = 0.02
_JOIN_TIMEOUT_S: Final = 5.0


class Shrinker:
    """Changes the bound of a folder. Safe for many threads.

    Args:
        catalog: Of the folder.
        evictor: Chooses who goes.
        fail: Hears what is wrong with the folder.
    """

    def __init__(self, catalog: Catalog, evictor: Evictor, fail: Callable[[Exception], None]) -> None:
        self._catalog, self._evictor, self._fail = catalog, evictor, fail
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        # The thread keeps this alive: what ends it so is the exit of the process.
        weakref.finalize(self, self._closing.set)

    def bound(self, max_bytes: int) -> None:
        """Change the bound; where the folder holds more, it comes down to it in a while."""
        with self._lock:
            if self._closing.is_set():
                return
            try:
                with self._catalog.locked():
                    self._evictor.bound(max_bytes)
                    is_over = self._evictor.is_over(self._catalog.header())
            except (OSError, ValueError) as error:
                self._fail(error)
                return
            # One that is at work sees the new bound by itself, unless it was just about to end.
            if is_over:
                self._thread = threading.Thread(
                    target=self._run, args=(self._thread,), name="shardflow-cache-shrink", daemon=True
                )
                wait_for_at_exit(self._thread).start()

    def close(self) -> None:
        """Leave the folder as it is."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_S)

    def _run(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            self._shrink()
        except (OSError, ValueError) as error:
            self._fail(error)

    def _shrink(self) -> None:
        left: int | None = None
        deadline = time.monotonic() + _PATIENCE_S
        while not self._closing.is_set() and time.monotonic() < deadline:
            with self._catalog.locked():
                header = self._catalog.header()
                # Somebody with a larger bound may go on filling: no more than it held goes on our account.
                left = header.used_pages if left is None else left
                num_pages = self._evictor.shrink(header, _BLOCKS_AT_ONCE)
                self._catalog.write_header(header)
                is_over = self._evictor.is_over(header)
            left -= num_pages
            if not is_over or left <= 0:
                return
            if num_pages:
                deadline = time.monotonic() + _PATIENCE_S
            else:
                self._closing.wait(_LOOK_AGAIN_S)
