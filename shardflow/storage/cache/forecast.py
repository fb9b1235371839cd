"""Access forecast: the next use of each block by the plans of all processes of a node, and eviction order.

`NextUseTable` holds, for one run, the steps of this epoch and the next at which a unit is read. It is a file
shared by the ranks of the node, or memory without a cache folder. One rank writes it while the others read.
Each rank reports its own progress, and the slowest living one defines the node's present. `AccessForecast`
combines the runs of this process with those of others in the folder.

`eviction_order` and `is_worth_keeping` are pure functions of numbers, used by the disk tier, the memory tier
and the simulation in benchmarks/stream, so that measured hit rates describe the code that runs.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import os_reason
from shardflow.storage.cache.config import EvictionPolicy
from shardflow.storage.cache.folder import CacheFolder
from shardflow.storage.local import file_locks

Float64Array = NDArray[np.float64]

NEVER = float("inf")
"""Next use of blocks that no plan needs any more."""
Int64Array = NDArray[np.int64]
_HEADER_NUM_BYTES = 64 << 10
_MAGIC = b"SFUSES1\0"
# Magic, units, then for even and odd epochs: epoch + 1, its steps, whether it is complete.
_HEADER = struct.Struct("<8sQQQQQQQ")
_EPOCH = struct.Struct("<QQQ")
_EPOCHS_AT = _HEADER.size - 2 * _EPOCH.size
# One process: whether it reads, epoch, step.
_READER = struct.Struct("<QQQ")
_READER_DTYPE = np.dtype([("reads", "<u8"), ("epoch", "<u8"), ("step", "<u8")])
_READERS_AT = 4096
_MAX_READERS = (_HEADER_NUM_BYTES - _READERS_AT) // _READER.size
_COLUMNS = 4
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}")
_LOGGER = logging.getLogger(__name__)
_LOOK_AGAIN_S = 5.0
_FILLING = ".filling"


def decayed(frequency: float, age: float, half_life: float) -> float:
    """Return a count of uses after some time: it is halved with each half-life."""
    return float(frequency * 2.0 ** (-age / half_life))


def eviction_order(
    policy: EvictionPolicy,
    *,
    next_use: Float64Array,
    last_use: Float64Array,
    frequency: Float64Array,
    clock: float,
    half_life: float,
) -> NDArray[np.intp]:
    """Sort blocks by how soon they go, the first to go first.

    Args:
        policy: ``belady``: the block needed last goes first, but before it blocks that no plan needs, the
            least frequently used of them first. ``lru``: the least recently used. ``lfu-decay``: the least
            frequently used, where uses count half after each half-life.
        next_use: ``(n,)`` distance to the next use, `NEVER` for none.
        last_use: ``(n,)`` clock of the last use; of ties, the oldest goes first.
        frequency: ``(n,)`` uses, decayed up to ``last_use``.
        clock: The current clock.
        half_life: Half-life of frequencies, in units of the clock.
    """
    if policy == "lru":
        return np.argsort(last_use, kind="stable")
    often = frequency * np.exp2((last_use - clock) / half_life)
    if policy == "lfu-decay":
        return np.lexsort((last_use, often))
    return np.lexsort((last_use, often, -next_use))


def is_worth_keeping(policy: EvictionPolicy, next_use: float, next_use_of_victim: float) -> bool:
    """Return whether a newly read block should replace a victim.

    With next uses known, a block needed later than all cached ones is not kept. If neither next use is known,
    the newer block is kept.
    """
    if policy != "belady":
        return True
    return next_use < next_use_of_victim or next_use == next_use_of_victim == NEVER


def _place(slot: int) -> int:
    return _READERS_AT + (slot - 1) * _READER.size


def uses_name(space: str, run: str) -> str | None:
    """Return the file name of a run's table; None if its names are malformed.

    Args:
        space: Name of the numbering of units: 64 hexadecimal digits.
        run: Name of the run: 16 hexadecimal digits.
    """
    name = f"{space}-{run}"
    return name if _NAME.fullmatch(name) else None


class NextUseTable:
    """Next uses of each unit of one run. Safe for many readers and one writer.

    Holds two epochs, the current and the next; for each unit the first use in an epoch and, if there are
    several, the last. Uses between these two count as late as the last.

    Args:
        num_units: Number of units.
        descriptor: A file to share, which this object closes; None keeps the table in memory.

    Raises:
        OSError: The disk space of the file cannot be allocated.
        ValueError: The file holds a table of other units.
    """

    def __init__(self, num_units: int, descriptor: int | None = None) -> None:
        self.num_units = num_units
        self.descriptor = descriptor
        num_bytes = _HEADER_NUM_BYTES + 4 * _COLUMNS * num_units
        memory: mmap.mmap
        if descriptor is None:
            memory = mmap.mmap(-1, num_bytes)
        else:
            if os.fstat(descriptor).st_size < num_bytes:
                # Allocate all of it: a map of a sparse file on a full disk would kill the process.
                os.posix_fallocate(descriptor, 0, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
        self._memory = memory
        found = _HEADER.unpack_from(memory, 0)
        if found[0] == b"\0" * 8:
            _HEADER.pack_into(memory, 0, _MAGIC, num_units, 0, 0, 0, 0, 0, 0)
        elif found[:2] != (_MAGIC, num_units):
            raise ValueError("the table of next uses is of another number of units.")
        self._columns = np.frombuffer(memory, "<u4", offset=_HEADER_NUM_BYTES).reshape(_COLUMNS, num_units)

    def __del__(self) -> None:
        """Close the descriptor; the memory is released with its last view."""
        if getattr(self, "descriptor", None) is not None:
            os.close(self.descriptor)  # type: ignore[arg-type]

    @staticmethod
    def num_units_in(descriptor: int) -> int | None:
        """Return the units of the table in a file; None if there is no table yet."""
        data = os.pread(descriptor, _HEADER.size, 0)
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            return None
        return int(_HEADER.unpack(data)[1])

    # ---- filling ---------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, num_steps: int) -> None:
        """Start to record an epoch, in place of the epoch before last."""
        side = epoch % 2
        self._write_epoch(side, 0, 0, 0)
        self._columns[2 * side : 2 * side + 2] = 0
        self._write_epoch(side, epoch + 1, num_steps, 0)

    def end_epoch(self, epoch: int) -> None:
        """Mark an epoch as complete."""
        number, num_steps, _ = self._epoch(epoch % 2)
        if number == epoch + 1:
            self._write_epoch(epoch % 2, number, num_steps, 1)

    def put(self, epoch: int, units: Int64Array, steps: Int64Array) -> None:
        """Record that units are read at steps; successive calls have ascending steps."""
        first, last = self._columns[2 * (epoch % 2) : 2 * (epoch % 2) + 2]
        numbers = (steps + 1).astype(np.uint32)
        distinct, place = np.unique(units, return_index=True)
        is_again = np.ones(len(units), bool)
        is_new = first[distinct] == 0
        first[distinct[is_new]] = numbers[place[is_new]]
        is_again[place[is_new]] = False
        # Of several assignments the last one stays, and steps ascend.
        last[units[is_again]] = numbers[is_again]

    def has_epoch(self, epoch: int) -> bool:
        """Return whether the uses of an epoch are complete."""
        number, _, is_whole = self._epoch(epoch % 2)
        return number == epoch + 1 and bool(is_whole)

    # ---- progress --------------------------------------------------------------------------------

    def report(self, slot: int, epoch: int, step: int) -> None:
        """Report the progress of a process.

        Args:
            slot: Slot of the process in the cache folder, from 1.
            epoch: The epoch.
            step: First step that the process has not read completely.
        """
        if 0 < slot <= _MAX_READERS:
            _READER.pack_into(self._memory, _place(slot), 1, epoch, step)

    def leave(self, slot: int) -> None:
        """Report that a process stopped reading."""
        if 0 < slot <= _MAX_READERS:
            _READER.pack_into(self._memory, _place(slot), 0, 0, 0)

    def now(self, is_held: Callable[[int], bool]) -> tuple[int, int] | None:
        """Return epoch and step of the slowest living process; None if there is none."""
        entries = np.frombuffer(self._memory, _READER_DTYPE, _MAX_READERS, _READERS_AT)
        found = [
            (int(entries["epoch"][place]), int(entries["step"][place]))
            for place in np.flatnonzero(entries["reads"]).tolist()
            if is_held(place + 1)
        ]
        return min(found) if found else None

    # ---- distances -------------------------------------------------------------------------------

    def distances(
        self, epoch: int, step: int, start: int = 0, stop: int | None = None
    ) -> NDArray[np.float64]:
        """Return the steps from a position to the next use of each unit, `NEVER` if none is known."""
        stop = self.num_units if stop is None else min(stop, self.num_units)
        distance = np.full(max(stop - start, 0), NEVER)
        side, other = epoch % 2, 1 - epoch % 2
        left = 0
        if self._epoch(side)[0] == epoch + 1:
            left = max(self._epoch(side)[1] - step, 0)
        if self._epoch(other)[0] == epoch + 2:
            first = self._columns[2 * other, start:stop]
            used = first > 0
            distance[used] = left + first[used] - 1.0
        if left:
            first, last = self._columns[2 * side : 2 * side + 2, start:stop]
            for column in (last, first):
                ahead = column > step
                distance[ahead] = column[ahead] - 1.0 - step
        return distance

    def _epoch(self, side: int) -> tuple[int, int, int]:
        """Return the epoch of a pair of columns plus one, its steps, and whether it is complete."""
        fields = _HEADER.unpack_from(self._memory, 0)
        number, num_steps, is_whole = fields[2 + 3 * side : 5 + 3 * side]
        return number, num_steps, is_whole

    def _write_epoch(self, side: int, *values: int) -> None:
        _EPOCH.pack_into(self._memory, _EPOCHS_AT + side * _EPOCH.size, *values)


def block_distances(
    distance: NDArray[np.float64], first: Int64Array, stop: Int64Array
) -> NDArray[np.float64]:
    """Return the distance of each block, that of its nearest unit; `NEVER` for blocks without units.

    A block whose first unit is after its last one is needed all the time.

    Args:
        distance: ``(n,)`` by unit.
        first: ``(b,)`` first unit of each block.
        stop: ``(b,)`` end of its units.
    """
    found = np.where(first > stop, 0.0, NEVER)
    stop = np.minimum(stop, len(distance))
    has_units = first < stop
    if has_units.any():
        bounds = np.stack([first[has_units], stop[has_units]], axis=1).ravel()
        # A bound may be the end of the array, which reduceat does not accept.
        padded = np.append(distance, NEVER)
        found[has_units] = np.minimum.reduceat(padded, bounds)[::2]
    return found


@dataclass(slots=True, eq=False)
class Run:
    """A run of this process over one numbering of units."""

    space: str
    table: NextUseTable
    epoch: int = 0
    next_step: int = 0
    """First step whose reads have not begun in this process."""


class AccessForecast:
    """Steps until the next use of blocks, over all runs of the node. Thread-safe.

    Args:
        folder: The cache folder in which tables are shared; None for tables of this process alone.
        slot: Slot of this process in the folder.
    """

    def __init__(self, folder: CacheFolder | None = None, slot: int = 1) -> None:
        self._folder = folder
        self._slot = slot
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._own: list[Run] = []
        self._others: dict[str, NextUseTable] = {}
        self._looked_at = 0.0
        self._fill_locks: dict[int, int] = {}
        if folder is not None:
            self._sweep(folder)

    def join(self, space: str, run: str, num_units: int) -> Run:
        """Register a run of this process.

        Args:
            space: Name of the numbering of units, see `uses_name`.
            run: Name of the run; processes with the same name share its table.
            num_units: Number of units.
        """
        joined = Run(space, self._open(uses_name(space, run), num_units))
        with self._lock:
            self._own.append(joined)
        return joined

    def leave(self, run: Run) -> None:
        """End a run."""
        if self._pid != os.getpid():
            return  # a forked child: the run is its parent's
        run.table.leave(self._slot)
        self.end_filling(run)
        with self._lock, suppress(ValueError):
            self._own.remove(run)

    def report(self, run: Run, epoch: int, step: int, next_step: int) -> None:
        """Report the progress of this process.

        Args:
            run: From `join`.
            epoch: The epoch.
            step: First step that is not read completely.
            next_step: First step whose reads have not begun.
        """
        run.epoch, run.next_step = epoch, next_step
        run.table.report(self._slot, epoch, step)

    def rest(self, run: Run) -> None:
        """Report that this process pauses, so that others do not wait for its progress."""
        run.table.leave(self._slot)

    def begin_filling(self, run: Run) -> bool:
        """Take the right to fill a run's table; return False while another process has it."""
        if self._folder is None or run.table.descriptor is None:
            return True
        name = os.fstat(run.table.descriptor).st_ino
        try:
            descriptor = self._folder.open_file(f"{name:x}{_FILLING}", "uses")
        except OSError:
            return True  # the folder was deleted; the open table stays usable
        try:
            fcntl = file_locks()
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._fill_locks[id(run)] = descriptor
        return True

    def end_filling(self, run: Run) -> None:
        """Give up the right to fill a table, if this process has it."""
        descriptor = self._fill_locks.pop(id(run), None)
        if descriptor is not None:
            os.close(descriptor)

    def distances(
        self, space: str, first: NDArray[np.int64], stop: NDArray[np.int64], *, is_scan: bool = False
    ) -> NDArray[np.float64]:
        """Return the steps to the next use of each block by any run.

        Args:
            space: Name of the numbering of units.
            first: ``(b,)`` first unit of each block.
            stop: ``(b,)`` end of its units.
            is_scan: The blocks are cached, and the slowest process counts; otherwise they are being read now
                by this process, whose current use no longer counts.
        """
        found = block_distances(np.zeros(0), first, stop)
        if not len(first):
            return found
        start, end = int(first.min()), int(stop.max())
        with self._lock:
            own = [run for run in self._own if run.space == space]
        positions = [(run.table, None if is_scan else (run.epoch, run.next_step)) for run in own]
        positions += [(table, None) for table in self._tables_of_others(space, own)]
        for table, position in positions:
            now = position or table.now(self._is_held)
            if now is not None and start < end:
                by_unit = table.distances(*now, start, end)
                found = np.minimum(found, block_distances(by_unit, first - start, stop - start))
        return found

    def close(self) -> None:
        """End all runs of this process."""
        for run in list(self._own):
            self.leave(run)

    def _is_held(self, slot: int) -> bool:
        if self._folder is None or slot == self._slot:
            return True
        try:
            return self._folder.is_slot_held(slot)
        except OSError:
            return True

    def _open(self, name: str | None, num_units: int) -> NextUseTable:
        if self._folder is None or name is None:
            return NextUseTable(num_units)
        try:
            return NextUseTable(num_units, _held(self._folder, name))
        except (OSError, ValueError) as error:
            # The disk is full, or the file holds another table: this process uses a table of its own.
            _LOGGER.warning("cannot share the plan of a run in the cache directory: %s", os_reason(error))
            return NextUseTable(num_units)

    def _tables_of_others(self, space: str, own: list[Run]) -> list[NextUseTable]:
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
            num_units = NextUseTable.num_units_in(descriptor)
            if num_units is None:
                os.close(descriptor)  # not written yet
                return
            self._others[name] = NextUseTable(num_units, descriptor)

    def _sweep(self, folder: CacheFolder) -> None:
        """Delete the tables that no process holds."""
        fcntl = file_locks()
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
    """Open a table and lock it while it is open, which keeps other processes from deleting it."""
    fcntl = file_locks()
    while True:
        descriptor = folder.open_file(name, "uses")
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        again = folder.open_file(name, "uses")
        is_same = os.fstat(again).st_ino == os.fstat(descriptor).st_ino
        os.close(again)
        if is_same:
            return descriptor
        os.close(descriptor)  # deleted between the two calls


def _is_table(name: str) -> bool:
    space, _, run = name.rpartition("-")
    return uses_name(space, run) is not None


def _identity(table: NextUseTable) -> int:
    return id(table) if table.descriptor is None else os.fstat(table.descriptor).st_ino
