"""Cache folder: its files, and the catalog of blocks that the processes of a node share.

A nonempty folder without the cache's marker is never touched. Every name has a fixed form, every file is
opened relative to a directory descriptor and never through a link, and only regular files with such names
are deleted. So other people's files in, or links out of, the folder may cost the cache, but no data. A
block appears by a hard link to a finished file. Blocks are not synced: a power failure may tear one, which
its checksum reveals, and it is fetched again.

`Catalog` is one file of fixed-size rows, a row per block in runs per object, and another file that names the
objects. Both are read and written by position under a file lock held for microseconds, and never mapped: a
map of a truncated file or on a full disk would kill the process. The block files are authoritative; where
the catalog disagrees, the catalog is corrected.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.storage.cache.blocks import ObjectBlocks
from shardflow.storage.local import file_locks, is_temporary_name

MARKER = "shardflow-cache.json"
_MARKER_BYTES = b'{"format":"shardflow-cache","format_version":1}\n'
_SUBFOLDERS = ("blocks", "incoming", "slots", "uses")
# Systems without these flags have no file locks either, so no folder is opened there.
_OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _OWN
_READ_FLAGS = os.O_RDONLY | _OWN
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OWN
_MODE = 0o600
_OBJECT_NAME = re.compile(r"[0-9a-f]{64}-(whole|[0-9]+)")
_BLOCK_NAME = re.compile(r"[0-9a-f]{8}")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}
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
"""A block: its state, the slot of the process that fetches it, its pages on disk, the clock of its last use,
its decayed number of uses, and the units that need it."""
_OBJECT = np.dtype([("name", "S96"), ("space", "S64"), ("first_row", "<u8"), ("num_rows", "<u8")])
_HEADER = struct.Struct("<8sQQQQQ")
_HEADER_NUM_BYTES = 4096
_MAGIC = b"SFCACHE1"
_LOCK_TIMEOUT_S = 30.0
_MAX_LINKS = 40
_MAX_UNIT = (1 << 32) - 1


class BlockDamagedError(Exception):
    """A file in a block's place is not the block: another size or owner, a link, a folder."""


class CacheFolder:
    """An open cache folder. Every method may raise `OSError`, which the caller handles.

    Args:
        path: The folder; created, with its parents, if it is missing.

    Raises:
        ConfigError: The folder is not empty and has no marker of a cache; it belongs to another user or
            others may write in it; or a link of another user leads to it.
        OSError: The folder cannot be created, read or written.
        StorageError: This system has no file locks.
    """

    def __init__(self, path: Path) -> None:
        self._fcntl = file_locks()
        _refuse_links_of_others(path)  # before a folder is made behind one
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptors: dict[str, int] = {}
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _refuse_folder_of_others(self._root, path)
            self._claim()
            for name in _SUBFOLDERS:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self._root)
                self._descriptors[name] = os.open(name, _FOLDER_FLAGS, dir_fd=self._root)
                _refuse_folder_of_others(self._descriptors[name], path / name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (*self._descriptors.values(), self._root):
            os.close(descriptor)
        self._descriptors, self._root = {}, -1

    def __del__(self) -> None:
        """Close the descriptors, which are plain numbers that nothing else closes."""
        if getattr(self, "_root", -1) >= 0:
            self.close()

    def free_bytes(self) -> int:
        """Return the free space of the disk in bytes."""
        found = os.fstatvfs(self._root)
        return found.f_bavail * found.f_frsize

    def open_file(self, name: str, folder: str = "") -> int:
        """Open one of the cache's own files for reading and writing; create it if it is missing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, _MODE, dir_fd=self._descriptors[folder] if folder else self._root)

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a subfolder."""
        return sorted(_names(self._descriptors[folder]))

    def remove(self, folder: str, name: str) -> None:
        """Delete one of the cache's own files if it exists; anything but a regular file stays."""
        _remove(name, self._descriptors[folder])

    # ---- slots -----------------------------------------------------------------------------------

    def take_slot(self) -> tuple[int, int]:
        """Take the lowest free slot for this process; return its number and the descriptor that holds it.

        The kernel releases it with the descriptor, however the process ends.
        """
        for number in range(1, 1 << 16):
            descriptor = self.open_file(f"{number:04x}", "slots")
            try:
                self._fcntl.flock(descriptor, self._fcntl.LOCK_EX | self._fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return number, descriptor
        raise OSError(errno.EUSERS, "no free slot")

    def is_slot_held(self, number: int) -> bool:
        """Return whether a living process holds a slot."""
        try:
            descriptor = os.open(f"{number:04x}", _READ_FLAGS, dir_fd=self._descriptors["slots"])
        except FileNotFoundError:
            return False
        try:
            self._fcntl.flock(descriptor, self._fcntl.LOCK_SH | self._fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    # ---- blocks ----------------------------------------------------------------------------------

    def open_block(self, name: str, number: int, num_bytes: int | None) -> int:
        """Open a block for reading; of any size if ``num_bytes`` is None.

        Raises:
            FileNotFoundError: There is no such block.
            BlockDamagedError: Its place holds no regular file of ``num_bytes``, or one of another user.
        """
        with self.opened(name) as folder:
            return self.open_block_in(folder, number, num_bytes)

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Open the folder of an object's blocks; errors as of `open_block`."""
        folder = self._open_object(name)
        try:
            yield folder
        finally:
            os.close(folder)

    def open_block_in(self, folder: int, number: int, num_bytes: int | None) -> int:
        """Open a block in the open folder of its object; as `open_block`, for many blocks of an object."""
        try:
            descriptor = os.open(_block_name(number), _READ_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise BlockDamagedError from None
            raise
        found = os.fstat(descriptor)
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not is_own or num_bytes not in (None, found.st_size):
            os.close(descriptor)
            raise BlockDamagedError
        return descriptor

    def has_block(self, name: str, number: int, num_bytes: int | None = None) -> bool:
        """Return whether a block exists, with the given size if any."""
        try:
            os.close(self.open_block(name, number, num_bytes))
        except (FileNotFoundError, BlockDamagedError):
            return False
        return True

    def publish(self, name: str, number: int, incoming: str, payload: memoryview) -> bool:
        """Write a block; it appears whole or not at all.

        Returns:
            Whether the block exists; False if something else has its place.
        """
        here = self._descriptors["incoming"]
        try:
            descriptor = os.open(incoming, _WRITE_FLAGS, _MODE, dir_fd=here)
        except FileExistsError:  # left by a killed process
            _remove(incoming, here)
            descriptor = os.open(incoming, _WRITE_FLAGS, _MODE, dir_fd=here)
        try:
            try:
                rest = payload
                while rest.nbytes:
                    rest = rest[os.write(descriptor, rest) :]
            finally:
                os.close(descriptor)
            return self._link(name, number, incoming, payload.nbytes)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(incoming, dir_fd=here)

    def remove_block(self, name: str, number: int) -> bool:
        """Delete a block; return False if its place holds anything but a regular file, which stays."""
        try:
            folder = self._open_object(name)
        except FileNotFoundError:
            return True
        except BlockDamagedError:
            return False
        try:
            return _remove(_block_name(number), folder)
        finally:
            os.close(folder)

    def sweep_blocks(self) -> None:
        """Delete all blocks, which the catalog no longer knows."""
        for name in self.names("blocks"):
            if _OBJECT_NAME.fullmatch(name):
                with suppress(BlockDamagedError):
                    folder = self._open_object(name)
                    try:
                        for block in _names(folder):
                            if _BLOCK_NAME.fullmatch(block):
                                _remove(block, folder)
                    finally:
                        os.close(folder)

    def _link(self, name: str, number: int, incoming: str, num_bytes: int) -> bool:
        here, blocks = self._descriptors["incoming"], self._descriptors["blocks"]
        try:
            folder = self._open_object(name)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=blocks)
            folder = self._open_object(name)
        try:
            os.link(incoming, _block_name(number), src_dir_fd=here, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            # Left by a process killed before it could record the block, or not a block at all.
            return self.has_block(name, number, num_bytes)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without hard links. We hold the only claim, so no block is replaced.
            os.rename(incoming, _block_name(number), src_dir_fd=here, dst_dir_fd=folder)
        finally:
            os.close(folder)
        return True

    def _open_object(self, name: str) -> int:
        try:
            return os.open(name, _FOLDER_FLAGS, dir_fd=self._descriptors["blocks"])
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise BlockDamagedError from None
            raise

    def _claim(self) -> None:
        """Check that the folder is a cache, or turn an empty folder into one."""
        names = _names(self._root)
        if MARKER not in names:
            if any(name != "lost+found" and not is_temporary_name(name) for name in names):
                # Another process may have written the marker after the listing.
                if MARKER in _names(self._root):
                    return self._check_marker()
                raise ConfigError(
                    f"a cache directory must be empty or a cache already (with {MARKER}), but it holds "
                    "other files; name another folder, nothing was touched."
                )
            self._write_marker()
        return self._check_marker()

    def _write_marker(self) -> None:
        temporary = f".{MARKER}.{secrets.token_hex(8)}.tmp"
        descriptor = os.open(temporary, _WRITE_FLAGS, _MODE, dir_fd=self._root)
        try:
            os.write(descriptor, _MARKER_BYTES)
            os.fsync(descriptor)
            os.close(descriptor)
            with suppress(FileExistsError):
                os.link(
                    temporary, MARKER, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False
                )
            os.fsync(self._root)
        finally:
            os.unlink(temporary, dir_fd=self._root)

    def _check_marker(self) -> None:
        descriptor = os.open(MARKER, _READ_FLAGS, dir_fd=self._root)
        try:
            found = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
        if found != _MARKER_BYTES:
            raise ConfigError(
                f"the cache directory has a {MARKER} of another format than 1; name another folder, nothing "
                "was touched."
            )


def _refuse_links_of_others(path: Path) -> None:
    """Refuse a path that leads through a link that another user made, such as one planted in /tmp.

    Links of root and of this user are followed, wherever they are.

    Raises:
        ConfigError: It does.
    """
    pending = list(reversed(path.absolute().parts[1:]))
    place, num_links = "/", 0
    while pending:
        following = os.path.normpath(f"{place}/{pending.pop()}")
        try:
            found = os.lstat(following)
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(found.st_mode):
            place = following
            continue
        num_links += 1
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                "the path of the cache directory leads through a link that another user made; remove the "
                "link, or name a folder of your own.",
                path=following,
            )
        if num_links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = str(Path(following).readlink())
        place = "/" if target.startswith("/") else place
        pending += reversed([part for part in target.split("/") if part])


def _refuse_folder_of_others(descriptor: int, path: Path) -> None:
    """Refuse a folder in which others could forge blocks: a checksum finds damage, not intent.

    Folders above it may be of anybody, such as /tmp: they decide which folder is opened, and this looks at
    the one that was.

    Raises:
        ConfigError: It belongs to another user, or others may write in it.
    """
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            "the cache directory belongs to another user, who could change what is read from it; name a "
            "folder of your own, such as a new one inside it.",
            path=str(path),
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            "others may write in the cache directory, and could change what is read from it; run chmod go-w "
            "on it and empty it, or name a new folder inside it.",
            path=str(path),
        )


def _names(folder: int) -> list[str]:
    return os.listdir(folder)


def _block_name(number: int) -> str:
    return f"{number:08x}"


def _remove(name: str, folder: int) -> bool:
    """Delete a regular file; return False if something else has the name."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return False
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    return True


@dataclass(slots=True)
class Header:
    """Totals of the catalog, in pages of 4 KiB; the clock counts claims."""

    used_pages: int = 0
    """Pages of published and claimed blocks."""
    claimed_pages: int = 0
    """Pages of claimed blocks."""
    clock: int = 0
    num_rows: int = 0
    num_objects: int = 0


@dataclass(frozen=True, slots=True)
class CatalogObject:
    """An object and its rows in the catalog."""

    name: str
    space: str
    first_row: int
    num_rows: int


class Catalog:
    """The shared tables of a cache folder. Safe for concurrent threads and processes.

    Args:
        folder: The cache folder.

    Raises:
        OSError: A table cannot be opened.
        ValueError: A table is damaged.
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
                # A new cache, or one whose catalog was deleted: blocks that are not counted must not stay.
                folder.sweep_blocks()
                os.truncate(self._objects_file, 0)
                self.write_header(Header())
                os.pwrite(self._rows_file, b"\0", _HEADER_NUM_BYTES - 1)
            self.header()

    def __del__(self) -> None:
        """Close the files, which are plain numbers that nothing else closes."""
        for descriptor in getattr(self, "_files", ()):
            os.close(descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the tables; the kernel releases it if the process dies.

        Raises:
            TimeoutError: Another process held the lock for 30 s.
        """
        fcntl = file_locks()
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
            raise ValueError("the catalog does not begin with its magic bytes.")
        return Header(*_HEADER.unpack(data)[1:])

    def write_header(self, header: Header) -> None:
        """Write the totals; under the lock."""
        os.pwrite(self._rows_file, _HEADER.pack(_MAGIC, *astuple(header)), 0)

    # ---- rows ------------------------------------------------------------------------------------

    def rows(self, first: int, num_rows: int) -> NDArray[Any]:
        """Read rows, which the caller may change; rows beyond the end of the file are absent."""
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
        """Record a use; without the lock, because losing one does no harm."""
        place = _HEADER_NUM_BYTES + row * ROW.itemsize + int(ROW.fields["last_use"][1])  # type: ignore[index]
        os.pwrite(self._rows_file, struct.pack("<If", last_use & 0xFFFFFFFF, frequency), place)

    # ---- objects ---------------------------------------------------------------------------------

    def object_of(self, blocks: ObjectBlocks) -> CatalogObject:
        """Return the rows of an object; a new object gets some."""
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
        """Store the units of a newer version of the dataset, whose blocks are the same."""
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
    """Return the pages of a file, at least one."""
    return max(1, -(-num_bytes // PAGE_NUM_BYTES))


def _with_units(rows: NDArray[Any], blocks: ObjectBlocks) -> NDArray[Any]:
    rows["unit_first"] = np.minimum(blocks.unit_first, _MAX_UNIT)
    rows["unit_stop"] = np.minimum(blocks.unit_stop, _MAX_UNIT)
    return rows
