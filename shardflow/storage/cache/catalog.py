"""What the processes of a node know together: which blocks stand, who fetches which, how much that is.

One file of fixed rows, a row a block, in runs of rows per object; another that names the objects. Both are
read and written by position under a file lock that is held for microseconds, never mapped: a map of a file
that someone cuts or a disk that is full would kill the process. The files of the blocks are the truth and the
catalog is what is known of them; where they differ, the catalog gives way.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.storage.cache.blocks import ObjectBlocks
from shardflow.storage.cache.folder import CacheFolder

__all__ = ["ABSENT", "BLOCKED", "CLAIMED", "PAGE_NUM_BYTES", "READY", "ROW", "Catalog", "Header", "pages_of"]

PAGE_NUM_BYTES = 4096
ABSENT, CLAIMED, READY, BLOCKED = range(4)

ROW = np.dtype(
    [
        ("state", "u1"),
        ("reserved", "u1"),
        ("owner", "<u2"),
        ("pages", "<u4"),
        ("last_use", "<u4"),
        ("frequency", "<f4"),
        ("unit_first", "<u4"),
        ("unit_stop", "<u4"),
    ]
)
"""A block: its state, the slot of the process that fetches it, its pages on disk, when it was used last and
how often, and the units that need it."""
_OBJECT = np.dtype([("name", "S96"), ("space", "S64"), ("first_row", "<u8"), ("num_rows", "<u8")])
_HEADER = struct.Struct("<8sQQQQQ")
_HEADER_NUM_BYTES = 4096
_MAGIC = b"SFCACHE1"
_LOCK_TIMEOUT_S = 30.0
_MAX_UNIT = (1 << 32) - 1


@dataclass(slots=True)
class Header:
    """Totals; in pages of 4 KiB, and ``clock`` in claims."""

    used_pages: int = 0
    """Of blocks that stand and of those that are under way."""
    claimed_pages: int = 0
    """Of those under way."""
    clock: int = 0
    num_rows: int = 0
    num_objects: int = 0


@dataclass(frozen=True, slots=True)
class CatalogObject:
    """An object and its run of rows."""

    name: str
    space: str
    first_row: int
    num_rows: int


class Catalog:
    """The shared tables of a cache folder. Safe for many threads and processes.

    Args:
        folder: The cache folder.

    Raises:
        OSError: A table cannot be opened.
        ValueError: It is not one of ours.
    """

    def __init__(self, folder: CacheFolder) -> None:
        self._thread_lock = threading.Lock()
        self._objects: dict[str, CatalogObject] = {}
        self._by_number: list[CatalogObject] = []
        self._files: list[int] = []
        for name in ("lock", "catalog", "objects"):
            self._files.append(folder.open_file(name))
        self._lock_file, self._rows_file, self._objects_file = self._files
        with self.locked():
            if os.fstat(self._rows_file).st_size < _HEADER_NUM_BYTES:
                # A new cache, or one whose catalog was deleted: blocks that no one counts must not stay.
                folder.sweep_blocks()
                os.truncate(self._objects_file, 0)
                self.write_header(Header())
                os.pwrite(self._rows_file, b"\0", _HEADER_NUM_BYTES - 1)
            self.header()

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []

    def __del__(self) -> None:
        """Descriptors are plain numbers: nothing else closes them."""
        if getattr(self, "_files", None):
            self.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the tables; the kernel frees it if the process dies.

        Raises:
            TimeoutError: A stopped process holds it.
        """
        with self._thread_lock:
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            wait_s = 0.0001
            while True:
                try:
                    fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError from None
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, 0.002)
            try:
                yield
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    # ---- totals ----------------------------------------------------------------------------------

    def header(self) -> Header:
        """Read the totals."""
        data = os.pread(self._rows_file, _HEADER.size, 0)
        if len(data) != _HEADER.size or not data.startswith(_MAGIC):
            raise ValueError("the catalog must begin with its magic bytes, got others.")
        return Header(*_HEADER.unpack(data)[1:])

    def write_header(self, header: Header) -> None:
        """Write the totals; under the lock."""
        data = _HEADER.pack(
            _MAGIC,
            header.used_pages,
            header.claimed_pages,
            header.clock,
            header.num_rows,
            header.num_objects,
        )
        os.pwrite(self._rows_file, data, 0)

    # ---- rows ------------------------------------------------------------------------------------

    def rows(self, first: int, num_rows: int) -> NDArray[Any]:
        """Read rows, to be changed by the caller; rows that were cut off are read as absent."""
        rows = np.zeros(num_rows, ROW)
        flat = rows.view(np.uint8).data
        position = _HEADER_NUM_BYTES + first * ROW.itemsize
        while flat.nbytes:
            num_bytes = os.preadv(self._rows_file, [flat], position)
            if not num_bytes:
                break
            flat, position = flat[num_bytes:], position + num_bytes
        return rows

    def write_rows(self, first: int, rows: NDArray[Any]) -> None:
        """Write rows; under the lock."""
        os.pwrite(self._rows_file, rows.tobytes(), _HEADER_NUM_BYTES + first * ROW.itemsize)

    def write_use(self, row: int, last_use: int, frequency: float) -> None:
        """Note a use; without the lock, because a lost one does no harm."""
        place = _HEADER_NUM_BYTES + row * ROW.itemsize + int(ROW.fields["last_use"][1])  # type: ignore[index]
        os.pwrite(self._rows_file, struct.pack("<If", last_use & 0xFFFFFFFF, frequency), place)

    # ---- objects ---------------------------------------------------------------------------------

    def object_of(self, blocks: ObjectBlocks) -> CatalogObject:
        """Return the rows of an object, which get some if it is new."""
        known = self._objects.get(blocks.name)
        if known is not None and known.space == blocks.space:
            return known
        with self.locked():
            self._learn(self.header())
            known = self._objects.get(blocks.name)
            return self._append(blocks) if known is None else self._renumber(known, blocks)

    def objects(self) -> list[CatalogObject]:
        """Return all objects by ascending rows; under the lock."""
        self._learn(self.header())
        return self._by_number

    def _append(self, blocks: ObjectBlocks) -> CatalogObject:
        header = self.header()
        found = CatalogObject(blocks.name, blocks.space, header.num_rows, blocks.num_blocks)
        self.write_rows(found.first_row, _with_units(np.zeros(found.num_rows, ROW), blocks))
        self._write_object(header.num_objects, found)
        header.num_rows += found.num_rows
        header.num_objects += 1
        self.write_header(header)
        self._learn(header)
        return found

    def _renumber(self, known: CatalogObject, blocks: ObjectBlocks) -> CatalogObject:
        """Take over the units of a newer version of the dataset; its blocks are the same."""
        if known.space == blocks.space or known.num_rows != blocks.num_blocks:
            return known
        found = CatalogObject(known.name, blocks.space, known.first_row, known.num_rows)
        self.write_rows(found.first_row, _with_units(self.rows(found.first_row, found.num_rows), blocks))
        number = self._by_number.index(known)
        self._write_object(number, found)
        self._by_number[number] = self._objects[found.name] = found
        return found

    def _learn(self, header: Header) -> None:
        """Read the objects that others have added."""
        known = len(self._by_number)
        if header.num_objects <= known:
            return
        data = os.pread(
            self._objects_file, (header.num_objects - known) * _OBJECT.itemsize, known * _OBJECT.itemsize
        )
        for name, space, first_row, num_rows in np.frombuffer(data, _OBJECT).tolist():
            found = CatalogObject(name.decode(), space.decode(), first_row, num_rows)
            self._by_number.append(found)
            self._objects[found.name] = found

    def _write_object(self, number: int, found: CatalogObject) -> None:
        row = np.array(
            [(found.name.encode(), found.space.encode(), found.first_row, found.num_rows)], _OBJECT
        )
        os.pwrite(self._objects_file, row.tobytes(), number * _OBJECT.itemsize)


def pages_of(num_bytes: int) -> int:
    """Return the pages that a file of a size takes, at least one."""
    return max(1, -(-num_bytes // PAGE_NUM_BYTES))


def _with_units(rows: NDArray[Any], blocks: ObjectBlocks) -> NDArray[Any]:
    rows["unit_first"] = np.minimum(blocks.unit_first, _MAX_UNIT)
    rows["unit_stop"] = np.minimum(blocks.unit_stop, _MAX_UNIT)
    return rows
