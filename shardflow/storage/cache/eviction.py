"""Eviction: frees space in the cache folder within its limits on bytes and on free disk space.

Whoever needs space frees it; no process watches. Victims are chosen a few at a time from a scan of the
catalog, which also corrects the catalog's totals.

`Shrinker` brings a folder down to a lower limit while others read from it. The limit belongs to each process
and is never stored: a process that lowers it deletes down to it, and keeps the folder within it before it
adds anything. So the ranks of a node agree once all of them have changed it, in any order, and the limit of a
dead process ends with it; until then the largest limit of a living process applies. A thread deletes a few
blocks at a time, because all others wait for the lock meanwhile.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.processes import wait_for_at_exit
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.folder import (
    ABSENT,
    BLOCKED,
    CLAIMED,
    PAGE_NUM_BYTES,
    READY,
    ROW,
    CacheFolder,
    Catalog,
    CatalogObject,
    Header,
)
from shardflow.storage.cache.forecast import NEVER, AccessForecast, eviction_order, is_worth_keeping
from shardflow.telemetry import StageCounters

# Choose victims that make up one part in this many of the cache with one scan.
_BATCH_SHARE = 64
_SCAN_ROWS = 1 << 18
_MOST_WHILE_OVER = 64
_BLOCKS_AT_ONCE: Final = 64
# A block cannot be evicted while it is being fetched, which may take long.
_PATIENCE_S: Final = 30.0
_LOOK_AGAIN_S: Final = 0.02
_JOIN_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Victim:
    """A block that may be evicted, as it was when it was chosen."""

    owner: CatalogObject
    number: int
    last_use: int


class Evictor:
    """Frees space; every method must be called under the catalog's lock.

    Args:
        config: Limits and policy.
        folder: The folder.
        catalog: Its catalog.
        forecast: Next uses of blocks.
        counters: Receive ``cache_disk_evicted``.
    """

    def __init__(
        self,
        config: CacheConfig,
        folder: CacheFolder,
        catalog: Catalog,
        forecast: AccessForecast,
        counters: StageCounters,
    ) -> None:
        self._folder, self._catalog, self._forecast = folder, catalog, forecast
        self._counters = counters
        self._policy = config.policy
        self._max_pages = config.max_bytes // PAGE_NUM_BYTES
        self._min_free_pages = -(-config.min_free_bytes // PAGE_NUM_BYTES)
        self._victims: deque[_Victim] = deque()
        self._num_ready = 0
        self._scanned_at = -1

    @property
    def half_life(self) -> float:
        """Half-life of frequencies, in claims: about one turnover of the cache."""
        return float(max(self._num_ready, 64))

    def bound(self, max_bytes: int) -> None:
        """Change the limit on the folder without evicting anything yet."""
        self._max_pages = max_bytes // PAGE_NUM_BYTES
        self._victims.clear()

    def is_over(self, header: Header) -> bool:
        """Return whether the folder exceeds the limit."""
        return header.used_pages > self._max_pages

    def shrink(self, header: Header, max_blocks: int) -> int:
        """Evict blocks until the folder is within the limit, whatever their value.

        Args:
            header: The totals, which are changed.
            max_blocks: Most blocks to evict.

        Returns:
            The freed pages; 0 if no block can be evicted now.
        """
        num_pages = 0
        for _ in range(max_blocks):
            if not self.is_over(header):
                break
            victim = self._next_victim(header, header.used_pages - self._max_pages)
            if victim is None:
                break
            num_pages += self._evict(header, victim)
        return num_pages

    def make_room(self, header: Header, num_pages: int, distance: float) -> bool:
        """Free space for a new block; return False if it is not worth it or not possible.

        Args:
            header: The totals, which are changed.
            num_pages: Size of the new block.
            distance: Steps to its next use.
        """
        if num_pages > self._max_pages:
            return False
        missing = self._missing(header, num_pages)
        # Above a lowered limit, evict in small batches: all others wait for the lock meanwhile.
        left = _MOST_WHILE_OVER if self.is_over(header) else None
        while missing > 0:
            if left is not None:
                if not left:
                    return False
                left -= 1
            victim = self._next_victim(header, missing)
            if victim is None:
                return False
            if not is_worth_keeping(self._policy, distance, self._distance(victim)):
                self._victims.appendleft(victim)
                return False
            missing -= self._evict(header, victim)
        return True

    def scan(self, header: Header, *, dead_slot: int = 0, missing: int = 0) -> None:
        """Scan the catalog: settle claims of dead processes, correct the totals, choose victims.

        Args:
            header: The totals, which are changed.
            dead_slot: A slot whose claims belong to a dead process although the slot is held again.
            missing: Pages needed now.
        """
        objects = self._catalog.objects()
        rows = self._read_all(header.num_rows)
        self._settle_dead(header, objects, rows, dead_slot)
        is_claimed, is_ready = rows["state"] == CLAIMED, rows["state"] == READY
        header.claimed_pages = int(rows["pages"][is_claimed].sum())
        header.used_pages = header.claimed_pages + int(rows["pages"][is_ready].sum())
        self._num_ready = int(np.count_nonzero(is_ready))
        self._scanned_at = header.clock
        self._choose(header, objects, rows, np.flatnonzero(is_ready), missing)

    def settle(self, header: Header, known: CatalogObject, number: int, rows: Any) -> None:
        """Settle the claim of a dead process: keep a published block, forget anything else."""
        pages = int(rows["pages"][0])
        header.claimed_pages -= min(header.claimed_pages, pages)
        self._folder.remove("incoming", incoming_name(known.first_row + number, int(rows["owner"][0])))
        # Only finished files are linked, so a block that exists is complete.
        if self._folder.has_block(known.name, number):
            rows["state"] = READY
        else:
            header.used_pages -= min(header.used_pages, pages)
            rows["state"] = ABSENT
        self._catalog.write_rows(known.first_row + number, rows)

    # ---- inside ----------------------------------------------------------------------------------

    def _missing(self, header: Header, num_pages: int) -> int:
        free_pages = self._folder.free_bytes() // PAGE_NUM_BYTES - header.claimed_pages
        return max(
            header.used_pages + num_pages - self._max_pages, num_pages + self._min_free_pages - free_pages
        )

    def _next_victim(self, header: Header, missing: int) -> _Victim | None:
        # A list older than a sixteenth of the cache does not know recent uses.
        if header.clock - self._scanned_at > 16 + self._num_ready // 16:
            self._victims.clear()
        for is_scanned in (False, True):
            while self._victims:
                victim = self._victims.popleft()
                row = self._catalog.rows(victim.owner.first_row + victim.number, 1)[0]
                if row["state"] == READY and row["last_use"] == victim.last_use:
                    return victim
            if not is_scanned:
                self.scan(header, missing=missing)
        return None

    def _evict(self, header: Header, victim: _Victim) -> int:
        """Delete a block, and return the freed pages."""
        place = victim.owner.first_row + victim.number
        rows = self._catalog.rows(place, 1)
        pages = int(rows["pages"][0])
        is_gone = self._folder.remove_block(victim.owner.name, victim.number)
        rows["state"], rows["pages"] = (ABSENT if is_gone else BLOCKED), 0
        self._catalog.write_rows(place, rows)
        header.used_pages -= min(header.used_pages, pages)
        self._counters.add("cache_disk_evicted", num_bytes=pages * PAGE_NUM_BYTES, num_items=1)
        return pages

    def _distance(self, victim: _Victim) -> float:
        row = self._catalog.rows(victim.owner.first_row + victim.number, 1)
        return float(self._distances(victim.owner.space, row)[0])

    def _distances(self, space: str, rows: NDArray[Any]) -> NDArray[np.float64]:
        first, stop = rows["unit_first"].astype(np.int64), rows["unit_stop"].astype(np.int64)
        return self._forecast.distances(space, first, stop, is_scan=True)

    def _read_all(self, num_rows: int) -> NDArray[Any]:
        parts = [
            self._catalog.rows(first, min(_SCAN_ROWS, num_rows - first))
            for first in range(0, num_rows, _SCAN_ROWS)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, ROW)

    def _settle_dead(
        self, header: Header, objects: list[CatalogObject], rows: NDArray[Any], dead_slot: int
    ) -> None:
        """Settle claims of dead processes, also in ``rows``."""
        claimed = np.flatnonzero(rows["state"] == CLAIMED)
        is_dead = {
            slot: slot == dead_slot or not self._folder.is_slot_held(slot)
            for slot in np.unique(rows["owner"][claimed]).tolist()
        }
        for place, number in zip(claimed.tolist(), _owners(objects, claimed).tolist(), strict=True):
            if is_dead[int(rows["owner"][place])]:
                owner = objects[number]
                self.settle(header, owner, place - owner.first_row, rows[place : place + 1])

    def _choose(
        self,
        header: Header,
        objects: list[CatalogObject],
        rows: NDArray[Any],
        ready: NDArray[np.intp],
        missing: int,
    ) -> None:
        self._victims.clear()
        if not len(ready):
            return
        owners = _owners(objects, ready)
        found = rows[ready]
        next_use = np.full(len(ready), NEVER)
        if self._policy == "belady":
            spaces = np.array([entry.space for entry in objects])[owners]
            for space in np.unique(spaces).tolist():
                here = spaces == space
                next_use[here] = self._distances(space, found[here])
        order = eviction_order(
            self._policy,
            next_use=next_use,
            last_use=found["last_use"].astype(np.float64),
            frequency=found["frequency"].astype(np.float64),
            clock=float(header.clock),
            half_life=self.half_life,
        )
        left = max(missing, self._max_pages // _BATCH_SHARE)
        for place in order.tolist():
            if left <= 0:
                break
            owner = objects[int(owners[place])]
            number = int(ready[place]) - owner.first_row
            self._victims.append(_Victim(owner, number, int(found["last_use"][place])))
            left -= int(found["pages"][place])


def _owners(objects: list[CatalogObject], rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the number of the object that each row belongs to."""
    return np.searchsorted([entry.first_row for entry in objects], rows, side="right") - 1


def incoming_name(row: int, slot: int) -> str:
    """Return the name of the unfinished file of a block, from its row and the slot of its writer."""
    return f"{row:x}-{slot:04x}"


class Shrinker:
    """Changes the limit of a folder, and evicts down to it in the background. Thread-safe.

    Args:
        catalog: Of the folder.
        evictor: Chooses the victims.
        fail: Called with a fault of the folder.
    """

    def __init__(self, catalog: Catalog, evictor: Evictor, fail: Callable[[Exception], None]) -> None:
        self._catalog, self._evictor, self._fail = catalog, evictor, fail
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        # The thread keeps this object alive, so the finalizer runs at exit.
        weakref.finalize(self, self._closing.set)

    def bound(self, max_bytes: int) -> None:
        """Change the limit; a thread evicts the excess."""
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
            # A running thread sees the new limit, unless it is just about to end; so another one follows it.
            if is_over:
                self._thread = threading.Thread(
                    target=self._run, args=(self._thread,), name="shardflow-cache-shrink", daemon=True
                )
                wait_for_at_exit(self._thread).start()

    def close(self) -> None:
        """Stop the thread, and leave the folder as it is."""
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
                # A process with a larger limit may keep filling: evict no more than the folder held at first.
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
