"""The future as plain numbers: at which steps of this epoch and the next a unit is read by the node.

One table a run, in a file that the ranks of a node share, or in memory where there is no cache folder. One of
the ranks fills it while the others look. Each says how far its own reads are; the slowest that lives is the
node's present.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardflow.storage.cache.policy import NEVER

__all__ = ["UseTable", "block_distances", "uses_name"]

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


class UseTable:
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
