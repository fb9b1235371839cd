"""Node files: derived files that the processes of a machine share; the first that needs one makes it.

They are in a folder of the user's own below the folder for temporary files, so they are on this machine, and
pages of a file that several processes map are in memory once. A file's name says what it was made of, and
nothing changes it afterwards; a `PartialFile` is filled as it is needed, each byte with one value alone. One
that was not opened for some weeks is deleted when another one is made.

`own_bytes` opens the tables of datasets: a process that maps a file of a folder that others write is ended by
SIGBUS when the file is cut, and reads other bytes than it checked when the file is written over.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from shardflow.errors import AlreadyExistsError, ChecksumError, NotFoundError, StorageError, os_reason
from shardflow.storage.cache.store import CachedStore
from shardflow.storage.local import LocalStore, file_locks, write_atomic
from shardflow.storage.store import ByteRange, ByteStore

_MAX_IDLE_S = 30 * 24 * 3600.0
_POLL_S = 0.05
MAX_WAIT_S = 900.0
"""How long a process waits for another one that makes the same file."""
MAX_IN_MEMORY_BYTES = 1 << 20
"""Largest object that each process holds for itself; larger ones are shared by those of a node."""
_MAX_WITHOUT_NODE_FILE_BYTES: Final = 1 << 30
_PIECE_NUM_BYTES: Final = 16 << 20
logger = logging.getLogger(__name__)


def node_folder() -> Path:
    """Return the folder of this user's node files, and make it.

    Raises:
        StorageError: It cannot be made, is a link, others may write in it, or this system has no file locks.
    """
    file_locks()
    path = Path(tempfile.gettempdir()) / f"shardflow-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise StorageError(f"The folder {path} cannot be used: {error.strerror}; set TMPDIR.") from error
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not is_own:
        raise StorageError(
            f"The folder {path} is a link, or belongs to or is open to other users; remove it or set TMPDIR."
        )
    return path


def node_file(
    name: str, make: Callable[[Path], Iterable[bytes | memoryview]], *, max_wait_s: float = MAX_WAIT_S
) -> Path:
    """Return a node file, and make it if it does not exist.

    Args:
        name: Of the file; says what it is made of, such as a digest.
        make: Gets the folder, for temporary files of its own, and returns the content in pieces.
        max_wait_s: How long to wait for a process that makes the same file.

    Raises:
        StorageError: The folder cannot be used, there is no space, or another process takes too long.
        ShardflowError: Errors of ``make``; nothing is left behind.
    """
    folder = node_folder()
    path = folder / name
    if _touch(path):
        return path
    with _locked(folder / f".{name}.lock", max_wait_s):
        if not _touch(path):
            _remove_idle(folder)
            try:
                with suppress(AlreadyExistsError):
                    write_atomic(path, make(folder), mode=0o400)
            except OSError as error:
                raise StorageError(f"Making {path} failed: {error.strerror or error}.") from error
    return path


class PartialFile:
    """A node file of known size that its users fill, one piece or another, as they need it.

    Whoever writes a piece writes the same bytes, so that processes need no lock.

    Args:
        name: Of the file; says what it is made of, such as a digest.
        num_bytes: Its size.

    Attributes:
        view: The file, mapped read-only; bytes that nobody has written are zero.

    Raises:
        StorageError: The folder cannot be used, or has no room for the rest of the file.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        self._fileno = -1
        folder = node_folder()
        self._path = path = folder / name
        if not _touch(path):
            _remove_idle(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fileno = os.open(path, flags, 0o600)
            found = os.fstat(self._fileno)
            if found.st_size != num_bytes:
                os.truncate(self._fileno, num_bytes)  # it is new, or was cut: what is missing is zero
            free = os.statvfs(folder)
            if free.f_bavail * free.f_frsize < num_bytes - 512 * found.st_blocks:
                raise StorageError(f"{path} needs {num_bytes >> 20} MiB, and there is less free; set TMPDIR.")
            self.view = memoryview(mmap.mmap(self._fileno, num_bytes, access=mmap.ACCESS_READ))
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{path} cannot be used: {os_reason(error)}; set TMPDIR.") from error

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Fill a piece.

        Raises:
            StorageError: There is no room.
        """
        rest = memoryview(data)
        try:
            while rest:
                written = os.pwrite(self._fileno, rest, offset)
                rest, offset = rest[written:], offset + written
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {os_reason(error)}; free some space or set TMPDIR."
            ) from error

    def __del__(self) -> None:
        """Close the descriptor; the map stays as long as somebody uses it."""
        if self._fileno >= 0:
            os.close(self._fileno)


def own_bytes(store: ByteStore, path: str, *, sha256: str, num_bytes: int | None = None) -> memoryview:
    """Return the bytes of an object that a manifest names, read-only, where nobody else changes them.

    An object of up to 1 MiB is copied into memory. A larger one is copied to a node file by the first process
    that needs it, and mapped by all; its digest is compared while it is copied.

    Args:
        store: Where the object is stored.
        path: Its name.
        sha256: Its digest in the manifest.
        num_bytes: Its size in the manifest; None if that has none.

    Raises:
        ChecksumError: The object is cut, damaged, or another one than the manifest names.
        NotFoundError: There is no such object.
        StorageError: Reading failed; or it is larger than 1 GiB, and the node has no place for the copy.
    """
    expected = store.size(path) if num_bytes is None else num_bytes
    if expected > MAX_IN_MEMORY_BYTES:
        try:
            return _copied(store, path, sha256, expected)
        except NotFoundError:
            raise
        except StorageError as error:
            if expected > _MAX_WITHOUT_NODE_FILE_BYTES:
                raise
            logger.warning("%s is held in memory by each process: %s", path, error)
    return memoryview(named_bytes(store, path, sha256=sha256, num_bytes=expected))


def named_bytes(store: ByteStore, path: str, *, sha256: str, num_bytes: int) -> bytes:
    """Read an object that a manifest names into memory, and compare it; errors as of `own_bytes`."""
    for _ in range(2):  # once more, because it may have been corrupted in transit
        data = store.read(path)
        if (len(data), hashlib.sha256(data).hexdigest()) == (num_bytes, sha256):
            return data
    raise _not_named(path)


def _copied(store: ByteStore, path: str, sha256: str, num_bytes: int) -> memoryview:
    """Map the copy of an object among the node files; make it if it is missing or was cut."""
    name = f"table-{sha256}.tbl"
    for _ in range(2):
        place = node_file(name, lambda _: _named_pieces(store, path, sha256, num_bytes))
        found = LocalStore(place.parent).map(place.name)
        if found.nbytes == num_bytes:
            return found
        place.unlink(missing_ok=True)
    raise StorageError(f"{place} was truncated right after it was made; set TMPDIR to another folder.")


def _named_pieces(store: ByteStore, path: str, sha256: str, num_bytes: int) -> Iterator[bytes | memoryview]:
    """Yield an object in pieces; raises `ChecksumError` at its end if it is another one than is named."""
    digest, num_read = hashlib.sha256(), 0
    for piece in object_pieces(store, path, num_bytes):
        digest.update(piece)
        num_read += len(piece)
        yield piece
    if (digest.hexdigest(), num_read) != (sha256, num_bytes):
        raise _not_named(path)


def object_pieces(
    store: ByteStore, path: str, num_bytes: int, piece_num_bytes: int = _PIECE_NUM_BYTES
) -> Iterator[bytes | memoryview]:
    """Yield an object of known size in pieces of some size, each of which is valid until the next one.

    Raises:
        ChecksumError: It has another size.
        StorageError: Reading failed.
    """
    if isinstance(store, CachedStore):
        yield store.read(path)  # a table is one block of a cache, which is fetched and checked whole
        return
    if store.size(path) != num_bytes:
        raise _not_named(path)
    buffer = memoryview(bytearray(min(piece_num_bytes, num_bytes)))
    for start in range(0, num_bytes, piece_num_bytes):
        piece = buffer[: min(piece_num_bytes, num_bytes - start)]
        store.read_ranges(path, [ByteRange(start, len(piece))], [piece])
        yield piece


def _not_named(path: str) -> ChecksumError:
    return ChecksumError(
        f"{path} must have the manifest's size and sha256, got others: it is damaged, cut or another file; "
        "run `shardflow verify`, and fetch it or make it again."
    )


def _touch(path: Path) -> bool:
    """Record that a file is in use; tell whether it exists."""
    try:
        os.utime(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be used: {error.strerror}.") from error
    return path.is_file()


@contextmanager
def _locked(path: Path, max_wait_s: float) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"{path} cannot be made: {os_reason(error)}; set TMPDIR.") from None
    try:
        deadline = time.monotonic() + max_wait_s
        fcntl = file_locks()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    name = path.name[1:-5]
                    raise StorageError(
                        f"Another process has been making {name} for {max_wait_s:.0f} s; is it stopped?"
                    ) from None
                time.sleep(_POLL_S)
            except OSError:
                break  # no locks here: several may make the file, and the first one stays
        yield
    finally:
        os.close(descriptor)


def _remove_idle(folder: Path) -> None:
    """Delete files that nobody has opened for long; those that are mapped stay readable."""
    oldest = time.time() - _MAX_IDLE_S
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                if (
                    entry.is_file(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_mtime < oldest
                ):
                    Path(entry.path).unlink()
