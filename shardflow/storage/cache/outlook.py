"""What a process knows of the future: its own runs, and those of the others in the cache folder."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardflow.storage.cache.folder import CacheFolder
from shardflow.storage.cache.policy import NEVER
from shardflow.storage.cache.uses import UseTable, block_distances, uses_name

__all__ = ["Outlook", "Run"]

_LOGGER = logging.getLogger(__name__)
_LOOK_AGAIN_S = 5.0
_FILLING = ".filling"


@dataclass(slots=True, eq=False)
class Run:
    """A run of this process over the units of one space."""

    space: str
    table: UseTable
    epoch: int = 0
    next_step: int = 0
    """Step behind the last one whose reads have begun in this process."""


class Outlook:
    """Says how far off the next use of a block is. Safe for many threads.

    Args:
        folder: The cache folder that tables are shared in; None for tables of this process alone.
        slot: This process's number in the folder.
    """

    def __init__(self, folder: CacheFolder | None = None, slot: int = 1) -> None:
        self._folder = folder
        self._slot = slot
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._own: list[Run] = []
        self._others: dict[str, UseTable] = {}
        self._looked_at = 0.0
        self._fill_locks: dict[int, int] = {}
        if folder is not None:
            self._sweep(folder)

    def join(self, space: str, run: str, num_units: int) -> Run:
        """Begin to read by a plan.

        Args:
            space: What the units count, see `uses_name`.
            run: Which run; processes that name the same one share its table.
            num_units: How many units there are.
        """
        joined = Run(space, self._open(uses_name(space, run), num_units))
        with self._lock:
            self._own.append(joined)
        return joined

    def leave(self, run: Run) -> None:
        """End what `join` began."""
        if self._pid != os.getpid():
            return  # a forked child: the run is its parent's
        run.table.leave(self._slot)
        self.end_filling(run)
        with self._lock, suppress(ValueError):
            self._own.remove(run)

    def report(self, run: Run, epoch: int, step: int, next_step: int) -> None:
        """Say how far the reads of this process are.

        Args:
            run: From `join`.
            epoch: The epoch.
            step: First step that is not read whole.
            next_step: Step behind the last one whose reads have begun.
        """
        run.epoch, run.next_step = epoch, next_step
        run.table.report(self._slot, epoch, step)

    def rest(self, run: Run) -> None:
        """Say that this process reads no more, until it reports again: nobody must wait for it."""
        run.table.leave(self._slot)

    def begin_filling(self, run: Run) -> bool:
        """Take the right to fill a run's table; False while another process has it."""
        if self._folder is None or run.table.descriptor is None:
            return True
        name = os.fstat(run.table.descriptor).st_ino
        try:
            descriptor = self._folder.open_file(f"{name:x}{_FILLING}", "uses")
        except OSError:
            return True  # deleted under us; the table is still there for those who have it open
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._fill_locks[id(run)] = descriptor
        return True

    def end_filling(self, run: Run) -> None:
        """Give that right back, if this process has it."""
        descriptor = self._fill_locks.pop(id(run), None)
        if descriptor is not None:
            os.close(descriptor)

    def distances(
        self, space: str, first: NDArray[np.int64], stop: NDArray[np.int64], *, is_scan: bool = False
    ) -> NDArray[np.float64]:
        """Return the steps to the next use of blocks, by whichever run needs them first.

        Args:
            space: What their units count.
            first: ``(b,)`` first unit of each block.
            stop: ``(b,)`` behind its last one.
            is_scan: Blocks that are kept, seen from the slowest process; otherwise blocks that are being
                read now, whose present use no longer counts.
        """
        found = block_distances(np.zeros(0), first, stop)
        if not len(first):
            return found
        start, end = int(first.min()), int(stop.max())
        with self._lock:
            own = [run for run in self._own if run.space == space]
        for run in own:
            now = run.table.now(self._is_held) if is_scan else (run.epoch, run.next_step)
            found = np.minimum(found, self._blocks(run.table, now, first, stop, start, end))
        for table in self._tables_of_others(space, own):
            now = table.now(self._is_held)
            found = np.minimum(found, self._blocks(table, now, first, stop, start, end))
        return found

    def close(self) -> None:
        """End all runs of this process."""
        for run in list(self._own):
            self.leave(run)

    def _blocks(
        self,
        table: UseTable,
        now: tuple[int, int] | None,
        first: NDArray[np.int64],
        stop: NDArray[np.int64],
        start: int,
        end: int,
    ) -> NDArray[np.float64]:
        if now is None or start >= end:
            return np.full(len(first), NEVER)
        distance = table.distances(*now, start, end)
        return block_distances(distance, first - start, stop - start)

    def _is_held(self, slot: int) -> bool:
        if self._folder is None or slot == self._slot:
            return True
        try:
            return self._folder.is_slot_held(slot)
        except OSError:
            return True

    def _open(self, name: str | None, num_units: int) -> UseTable:
        if self._folder is None or name is None:
            return UseTable(num_units)
        try:
            return UseTable(num_units, _held(self._folder, name))
        except (OSError, ValueError) as error:
            # The disk is full, or there is another run's table: this process plans for itself alone.
            _LOGGER.warning(
                "the plan of a run is not shared in the cache directory: %s", type(error).__name__
            )
            return UseTable(num_units)

    def _tables_of_others(self, space: str, own: list[Run]) -> list[UseTable]:
        folder = self._folder
        if folder is None:
            return []
        with self._lock:
            if time.monotonic() - self._looked_at > _LOOK_AGAIN_S:
                self._looked_at = time.monotonic()
                self._look_around(folder)
            others = list(self._others.items())
        mine = {_identity(run.table) for run in own}
        return [table for name, table in others if name.startswith(space) and _identity(table) not in mine]

    def _look_around(self, folder: CacheFolder) -> None:
        with suppress(OSError):
            names = [name for name in folder.names("uses") if _is_table(name)]
            for name in names:
                if name not in self._others:
                    self._look_at(folder, name)
            self._others = {name: table for name, table in self._others.items() if name in names}

    def _look_at(self, folder: CacheFolder, name: str) -> None:
        with suppress(OSError, ValueError):
            descriptor = folder.open_file(name, "uses")
            num_units = UseTable.num_units_in(descriptor)
            if num_units is None:
                os.close(descriptor)  # not begun yet
                return
            self._others[name] = UseTable(num_units, descriptor)

    def _sweep(self, folder: CacheFolder) -> None:
        """Delete the tables that no process has open."""
        for name in folder.names("uses"):
            if not (_is_table(name) or name.endswith(_FILLING)):
                continue
            descriptor = folder.open_file(name, "uses")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                folder.remove("uses", name)
            except BlockingIOError:
                pass
            finally:
                os.close(descriptor)


def _held(folder: CacheFolder, name: str) -> int:
    """Open a table and hold it as long as it is open: what no one holds is swept away."""
    while True:
        descriptor = folder.open_file(name, "uses")
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        again = folder.open_file(name, "uses")
        is_same = os.fstat(again).st_ino == os.fstat(descriptor).st_ino
        os.close(again)
        if is_same:
            return descriptor
        os.close(descriptor)  # swept away between the two calls


def _is_table(name: str) -> bool:
    space, _, run = name.rpartition("-")
    return uses_name(space, run) is not None


def _identity(table: UseTable) -> int:
    return id(table) if table.descriptor is None else os.fstat(table.descriptor).st_ino
