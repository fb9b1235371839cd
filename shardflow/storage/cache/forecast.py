"""Access forecast: when each block is read next, by the plans of all processes of a node; and eviction order.

`NextUseTable` holds, for one run, the steps of this epoch and the next at which a unit is read. It is a file
shared by the ranks of the node, or memory without a cache folder. One rank writes it while the others read.
Each rank reports its own progress, and the slowest living one defines the node's present. `AccessForecast`
combines the runs of this process with those of others in the folder.

`eviction_order` and `is_worth_keeping` are pure functions of numbers, used by the disk tier, the memory tier
and the simulation in benchmarks/stream, so that measured hit rates describe the code that runs.
"""

from __future__ import annotations

import fcntl
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

from shardflow.storage.cache.config import EvictionPolicy
from shardflow.storage.cache.folder import CacheFolder

Float64Array = NDArray[np.float64]

NEVER = float("inf")
"""Next use of what no plan needs any more."""
Int64Array = NDArray[np.int64]
UInt32Array = NDArray[np.uint32]
_HEADER_NUM_BYTES = 64 << 10
_MAGIC = b"SFUSES1\0"
# magic, units, then for even and odd epochs: epoch + 1, its steps, whether all of it is filled
_HEADER = struct.Struct("<8sQQQQQQQ")
_EPOCH = struct.Struct("<QQQ")
_EPOCHS_AT = _HEADER.size - 2 * _EPOCH.size
# a process that reads: whether it does, epoch, step
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
    """Return what a count of uses is worth after a while: half of it after each half-life."""
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
        policy: ``belady``: what is needed last goes first, and what no plan speaks of before that, the
            least often used of it. ``lru``: what was used least recently. ``lfu-decay``: what was used least
            often, uses counting half after each half-life.
        next_use: ``(n,)`` distance to the next use, `NEVER` for none.
        last_use: ``(n,)`` clock of the last use; settles ties, the oldest first.
        frequency: ``(n,)`` uses, decayed up to ``last_use``.
        clock: Now.
        half_life: Of frequencies, in units of the clock.
    """
    if policy == "lru":
        return np.argsort(last_use, kind="stable")
    often = frequency * np.exp2((last_use - clock) / half_life)
    if policy == "lfu-decay":
        return np.lexsort((last_use, often))
    return np.lexsort((last_use, often, -next_use))


def is_worth_keeping(policy: EvictionPolicy, next_use: float, next_use_of_victim: float) -> bool:
    """Tell whether a block that was just read should take the place of a victim.

    Only who knows the future can say no: a block that is needed later than everything that is kept is not
    kept at all. Where neither is known, the newer one is kept.
    """
    if policy != "belady":
        return True
    return next_use < next_use_of_victim or next_use == next_use_of_victim == NEVER


def _place(slot: int) -> int:
    return _READERS_AT + (slot - 1) * _READER.size


def uses_name(space: str, run: str) -> str | None:
    """Name the file of a run's table; None where its names do not make one.

    Args:
        space: What the units count: 64 hexadecimal digits.
        run: Which run: 16 hexadecimal digits.
    """
    name = f"{space}-{run}"
    return name if _NAME.fullmatch(name) else None


class NextUseTable:
    """When each unit is needed. Safe for many readers and one filler.

    Numbers are kept for two epochs, the present and the next; for each unit the first use in an epoch and, if
    there are several, the last. Of more than two the middle ones are taken to be as late as the last.

    Args:
        num_units: Number of units.
        descriptor: A file to share, which is taken over; None keeps the table in memory.

    Raises:
        OSError: The file cannot get its size.
        ValueError: The file is another table's.
    """

    def __init__(self, num_units: int, descriptor: int | None = None) -> None:
        self.num_units = num_units
        self._descriptor = descriptor
        num_bytes = _HEADER_NUM_BYTES + 4 * _COLUMNS * num_units
        memory: mmap.mmap
        if descriptor is None:
            memory = mmap.mmap(-1, num_bytes)
        else:
            if os.fstat(descriptor).st_size < num_bytes:
                # All of it at once: a map of a file with holes on a full disk would kill the process.
                os.posix_fallocate(descriptor, 0, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
        self._memory = memory
        found = _HEADER.unpack_from(memory, 0)
        if found[0] == b"\0" * 8:
            _HEADER.pack_into(memory, 0, _MAGIC, num_units, 0, 0, 0, 0, 0, 0)
        elif found[:2] != (_MAGIC, num_units):
            raise ValueError("a table of uses must be of this many units, got another.")
        self._columns = np.frombuffer(memory, "<u4", offset=_HEADER_NUM_BYTES).reshape(_COLUMNS, num_units)

    def __del__(self) -> None:
        """The descriptor is a plain number; the memory goes with its last view."""
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]

    @staticmethod
    def num_units_in(descriptor: int) -> int | None:
        """Return the units of the table in a file; None where there is none yet."""
        data = os.pread(descriptor, _HEADER.size, 0)
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            return None
        return int(_HEADER.unpack(data)[1])

    @property
    def descriptor(self) -> int | None:
        """The file, for a lock on it."""
        return self._descriptor

    # ---- filling ---------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, num_steps: int) -> None:
        """Forget the epoch before last, and take numbers for this one."""
        side = epoch % 2
        self._write_epoch(side, 0, 0, 0)
        self._columns[2 * side : 2 * side + 2] = 0
        self._write_epoch(side, epoch + 1, num_steps, 0)

    def end_epoch(self, epoch: int) -> None:
        """Say that an epoch's uses are all there."""
        number, num_steps, _ = self._epoch(epoch % 2)
        if number == epoch + 1:
            self._write_epoch(epoch % 2, number, num_steps, 1)

    def put(self, epoch: int, units: Int64Array, steps: Int64Array) -> None:
        """Note that units are read at steps; calls go on in the order of the steps."""
        first, last = self._columns[2 * (epoch % 2) : 2 * (epoch % 2) + 2]
        numbers = (steps + 1).astype(np.uint32)
        distinct, place = np.unique(units, return_index=True)
        is_again = np.ones(len(units), bool)
        is_new = first[distinct] == 0
        first[distinct[is_new]] = numbers[place[is_new]]
        is_again[place[is_new]] = False
        # Of several the one that is written last stays, and steps ascend.
        last[units[is_again]] = numbers[is_again]

    def has_epoch(self, epoch: int) -> bool:
        """Tell whether an epoch's uses are all here."""
        number, _, is_whole = self._epoch(epoch % 2)
        return number == epoch + 1 and bool(is_whole)

    # ---- who is where ----------------------------------------------------------------------------

    def report(self, slot: int, epoch: int, step: int) -> None:
        """Say how far a process has read.

        Args:
            slot: Of the process in the cache folder, from 1; the kernel says by it whether it lives.
            epoch: The epoch.
            step: First step that it has not read whole.
        """
        if 0 < slot <= _MAX_READERS:
            _READER.pack_into(self._memory, _place(slot), 1, epoch, step)

    def leave(self, slot: int) -> None:
        """Say that a process reads no more."""
        if 0 < slot <= _MAX_READERS:
            _READER.pack_into(self._memory, _place(slot), 0, 0, 0)

    def now(self, is_held: Callable[[int], bool]) -> tuple[int, int] | None:
        """Return epoch and first step that some living process still reads; None where none lives."""
        entries = np.frombuffer(self._memory, _READER_DTYPE, _MAX_READERS, _READERS_AT)
        found = [
            (int(entries["epoch"][place]), int(entries["step"][place]))
            for place in np.flatnonzero(entries["reads"]).tolist()
            if is_held(place + 1)
        ]
        return min(found) if found else None

    # ---- looking ---------------------------------------------------------------------------------

    def distances(
        self, epoch: int, step: int, start: int = 0, stop: int | None = None
    ) -> NDArray[np.float64]:
        """Return the steps from a position to the next use of units, `NEVER` if none is known."""
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
        """Return the epoch that columns hold, plus one, its steps, and whether it is filled."""
        fields = _HEADER.unpack_from(self._memory, 0)
        number, num_steps, is_whole = fields[2 + 3 * side : 5 + 3 * side]
        return number, num_steps, is_whole

    def _write_epoch(self, side: int, *values: int) -> None:
        _EPOCH.pack_into(self._memory, _EPOCHS_AT + side * _EPOCH.size, *values)


def block_distances(
    distance: NDArray[np.float64], first: Int64Array, stop: Int64Array
) -> NDArray[np.float64]:
    """Return the distance of blocks: that of their nearest unit; `NEVER` for blocks without units.

    A first unit behind the last says that a block is needed all the time.

    Args:
        distance: ``(n,)`` by unit.
        first: ``(b,)`` first unit of each block.
        stop: ``(b,)`` behind its last one.
    """
    found = np.where(first > stop, 0.0, NEVER)
    stop = np.minimum(stop, len(distance))
    has_units = first < stop
    if has_units.any():
        bounds = np.stack([first[has_units], stop[has_units]], axis=1).ravel()
        # A bound may be the end of the array, which reduceat does not take.
        padded = np.append(distance, NEVER)
        found[has_units] = np.minimum.reduceat(padded, bounds)[::2]
    return found


@dataclass(slots=True, eq=False)
class Run:
    """A run of this process over the units of one space."""

    space: str
    table: NextUseTable
    epoch: int = 0
    next_step: int = 0
    """Step behind the last one whose reads have begun in this process."""


class AccessForecast:
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
        self._others: dict[str, NextUseTable] = {}
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
        table: NextUseTable,
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

    def _open(self, name: str | None, num_units: int) -> NextUseTable:
        if self._folder is None or name is None:
            return NextUseTable(num_units)
        try:
            return NextUseTable(num_units, _held(self._folder, name))
        except (OSError, ValueError) as error:
            # The disk is full, or there is another run's table: this process plans for itself alone.
            _LOGGER.warning(
                "the plan of a run is not shared in the cache directory: %s", type(error).__name__
            )
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
                os.close(descriptor)  # not begun yet
                return
            self._others[name] = NextUseTable(num_units, descriptor)

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


def _identity(table: NextUseTable) -> int:
    return id(table) if table.descriptor is None else os.fstat(table.descriptor).st_ino
