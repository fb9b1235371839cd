"""Local byte store, and atomic writes of local files.

`write_atomic` shows readers all of a file or none of it. The order of its calls is essential: write a hidden
temporary file in the same folder, flush, fsync, give it its name with one atomic call, then fsync the folder
so that the name survives a power failure. A failed call removes the temporary file and raises. A failed
fsync is never retried, because the kernel may have dropped the dirty pages and would report success the
second time.

`LocalStore` reads positionally (``preadv``) on cached descriptors, so threads share a descriptor without a
lock and the GIL is released during the copy. Descriptors are reference-counted, so the cache stays bounded
without closing one that is in use. A child process starts with an empty cache.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import AlreadyExistsError, NotFoundError, ShortReadError, StorageError, os_reason
from shardflow.storage.store import ByteRange, check_object_path, check_ranges, sized

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
# A tar header and padding, at most 1,023 bytes, separate two fields of a shard: reading them into a scratch
# buffer is cheaper than another system call, and far cheaper on a parallel file system.
_MAX_GAP_BYTES = 4096
# Takes what lies between neighbors, from all threads at once; nobody reads it.
_GAP = memoryview(bytearray(_MAX_GAP_BYTES))
_MAX_OPEN_FILES = 4096
# The kernel takes 1,024 buffers a call (IOV_MAX on Linux); a range may need one more for the gap before it.
_MAX_BUFFERS = 1022
# Windows has neither of the first two, and without the third it changes line ends.
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_READ_FLAGS = os.O_RDONLY | _CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_SEEKING = threading.Lock()


def is_temporary_name(name: str) -> bool:
    """Return whether `write_atomic` gives such a name to unfinished files.

    A killed writer leaves such a file behind. Nothing reads it; the only writer of the folder may delete it.
    """
    return _TEMPORARY.fullmatch(name) is not None


def file_locks() -> ModuleType:
    """Return `fcntl`, whose locks end with the process that holds them.

    Raises:
        StorageError: This system, such as Windows, has none.
    """
    try:
        import fcntl
    except ImportError:
        raise StorageError(
            "File locks must exist to write datasets, runs and cache folders, got a system without fcntl; "
            "read and plan here, and write on Linux or macOS."
        ) from None
    return fcntl


def fsync_directory(path: Path) -> None:
    """Sync a folder, so that the names in it are durable; nothing where folders cannot be opened.

    Raises:
        StorageError: The folder cannot be opened or synced.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    with _naming("syncing the folder", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create a folder and its missing parents durably; existing folders stay as they are.

    Raises:
        StorageError: A folder cannot be created, or a file has its name.
    """
    missing: list[Path] = []
    while not path.is_dir():
        missing.append(path)
        if path.parent == path:
            break
        path = path.parent
    for folder in reversed(missing):
        with _naming("creating the folder", folder):
            folder.mkdir(exist_ok=True)
        fsync_directory(folder.parent)


def write_atomic(
    path: Path, chunks: Iterable[bytes | memoryview], *, replace: bool = False, mode: int = 0o666
) -> None:
    """Write a file atomically and durably; an existing file is an error unless ``replace`` is given.

    Args:
        path: Final place; missing folders above it are created.
        chunks: The content in order; may be a generator, whose own exception also leaves nothing behind.
        replace: Replace an existing file.
        mode: Permissions from the first byte on, masked by the umask.

    Raises:
        AlreadyExistsError: ``path`` exists and ``replace`` is false. The existing file is untouched.
        StorageError: The file could not be written (no space, no permission, failed fsync); nothing is left
            behind. If only the last step, syncing the folder, failed, the file is complete, but a power
            failure may undo it.
    """
    if not replace and path.exists():
        raise _exists(path)
    make_directories(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_synced(temporary, chunks, mode)
        with _naming("publishing", path):
            if replace:
                temporary.replace(path)
            else:
                # A rename would silently replace a file that another writer published meanwhile; a link
                # cannot.
                os.link(temporary, path)
    finally:
        _remove(temporary)
    fsync_directory(path.parent)


def _write_synced(path: Path, chunks: Iterable[bytes | memoryview], mode: int) -> None:
    # Errors of the caller's chunks propagate unchanged; only those of writing are translated.
    with _naming("creating", path):
        # Not tempfile's 0o600, which other users could not read: the umask decides the mode of a dataset.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOEXEC, mode)
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            with _naming("writing", path):
                while rest.nbytes:
                    rest = rest[os.write(descriptor, rest) :]
        with _naming("syncing", path):
            os.fsync(descriptor)
    finally:
        # On network file systems a write error may first appear at close.
        with _naming("closing", path):
            os.close(descriptor)


@contextmanager
def _naming(action: str, path: Path) -> Iterator[None]:
    """Translate an `OSError`; an existing name becomes `AlreadyExistsError`."""
    try:
        yield
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, os_reason(error))
        raise StorageError(f"{action} {path.name} failed: {code} ({os_reason(error)}).") from error


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _exists(path: Path) -> AlreadyExistsError:
    return AlreadyExistsError(f"{path.name} must be new, but it already exists; files are written only once.")


class _Descriptor:
    """An open file and its number of current readers."""

    __slots__ = ("fileno", "is_evicted", "num_users")

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno
        self.num_users = 0
        self.is_evicted = False


class _OpenFiles:
    """Cached descriptors of all local stores of a process; the least recently used ones are closed.

    A dataset has more shards than a process may have open files, and a blend has a thousand stores.

    Args:
        max_files: Bound; more are open only while more threads read at once.
    """

    def __init__(self, max_files: int) -> None:
        self.max_files = max_files
        self.reset()

    def reset(self) -> None:
        """Forget all descriptors, in a process that was forked; those of the parent stay the parent's."""
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self._files: OrderedDict[tuple[int, str], _Descriptor] = OrderedDict()
        self._unused: deque[int] = deque()

    def take(self, owner: int, path: str, open_file: Callable[[], int]) -> _Descriptor:
        """Return an open file of a store, for one reader more."""
        if self.pid != os.getpid():
            # After a fork the parent's lock may be held by a thread that does not exist here.
            self.reset()
        key = owner, path
        with self.lock:
            self._close_unused()
            if key in self._files:
                return self._used(key)
        # Without the lock: where each sample is in another file, no thread waits for the opens of others.
        fileno = open_file()
        with self.lock:
            if key in self._files:  # another thread has opened it meanwhile
                os.close(fileno)
                return self._used(key)
            self._files[key] = _Descriptor(fileno)
            descriptor = self._used(key)
            while len(self._files) > self.max_files:
                self._evict(self._files.popitem(last=False)[1])
        return descriptor

    def _used(self, key: tuple[int, str]) -> _Descriptor:
        """Count one more reader of a file and mark it as the most recently used; needs the lock."""
        self._files.move_to_end(key)
        descriptor = self._files[key]
        descriptor.num_users += 1
        return descriptor

    def give_back(self, descriptor: _Descriptor) -> None:
        """Count a reader less."""
        with self.lock:
            descriptor.num_users -= 1
            if descriptor.is_evicted and not descriptor.num_users:
                os.close(descriptor.fileno)

    def close(self, owner: int) -> None:
        """Close the files of a store."""
        if self.pid != os.getpid():
            self.reset()
        with self.lock:
            self._unused.append(owner)
            self._close_unused()

    def forget(self, owner: int) -> None:
        """Close the files of a store that nothing refers to any more.

        The garbage collector may call this inside any other method, on a thread that holds the lock: then the
        next call closes them.
        """
        if self.pid != os.getpid():
            return
        self._unused.append(owner)
        if self.lock.acquire(blocking=False):
            try:
                self._close_unused()
            finally:
                self.lock.release()

    def _close_unused(self) -> None:
        while self._unused:
            owner = self._unused.popleft()
            for key in [key for key in list(self._files) if key[0] == owner]:
                self._evict(self._files.pop(key))

    @staticmethod
    def _evict(descriptor: _Descriptor) -> None:
        descriptor.is_evicted = True
        if not descriptor.num_users:
            os.close(descriptor.fileno)


def _max_open_files() -> int:
    """Return an eighth of the files that this process may open: the rest is for others."""
    try:
        import resource
    except ImportError:  # the C library of Windows keeps 512 files at most
        return 64
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_FILES if soft < 0 else max(32, min(_MAX_OPEN_FILES, soft // 8))


_OPEN_FILES = _OpenFiles(_max_open_files())
_OWNERS = itertools.count()


class LocalStore:
    """Byte store in a local folder. Thread-safe and fork-safe.

    Args:
        root: The folder; need not exist before the first read.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.trust: object | None = None
        self._prefix = f"{self.root}/"
        # A number of its own: another store of the same folder may find other files there.
        self._owner = next(_OWNERS)

    @property
    def url(self) -> str:
        """The folder as a path."""
        return str(self.root)

    def __reduce__(self) -> tuple[type[LocalStore], tuple[Path], dict[str, object]]:
        """Pickle the path, without descriptors."""
        return type(self), (self.root,), {"trust": self.trust}

    def __del__(self) -> None:
        """Close the descriptors: they are plain numbers that nothing else closes."""
        if hasattr(self, "_owner") and _OPEN_FILES is not None:  # at the end of the interpreter it may be
            _OPEN_FILES.forget(self._owner)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def size(self, path: str) -> int:
        """Return an object's size in bytes; see `ByteStore.size`."""
        with self._opened(path) as fileno:
            return os.fstat(fileno).st_size

    def read(self, path: str) -> bytes:
        """Return an object whole; see `ByteStore.read`."""
        with self._opened(path) as fileno:
            data = bytearray(os.fstat(fileno).st_size)
            read_into(fileno, path, 0, [memoryview(data)] if data else [])
        return bytes(data)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with its range; see `ByteStore.read_ranges`."""
        check_ranges(path, ranges, buffers)
        with self._opened(path) as fileno:
            read_scattered(fileno, path, [span.offset for span in ranges], buffers)

    def read_pieces(self, path: str, offsets: Sequence[int], pieces: Sequence[NDArray[np.uint8]]) -> None:
        """Fill each piece from its offset; for many small, scattered pieces.

        Equivalent to `read_ranges`, without an object and a comparison per piece.

        Args:
            path: The object.
            offsets: Where each piece begins.
            pieces: ``(num_bytes,)`` uint8 each, writable and contiguous, none empty.

        Raises:
            NotFoundError: There is no such object.
            ShortReadError: The object ends before a piece does.
            StorageError: Reading failed.
        """
        with self._opened(path) as fileno:
            preadv = getattr(os, "preadv", _seek_and_read)
            for offset, piece in zip(offsets, pieces, strict=True):
                if preadv(fileno, (piece,), offset) != len(piece):
                    read_into(fileno, path, offset, [piece.data])  # retry, in as many calls as needed

    def map(self, path: str) -> memoryview:
        """Return a read-only memory map of an object; see `ByteStore.map`."""
        with self._opened(path) as fileno:
            num_bytes = os.fstat(fileno).st_size
            if not num_bytes:
                return memoryview(b"")
            return memoryview(mmap.mmap(fileno, num_bytes, access=mmap.ACCESS_READ))

    def put_new(self, path: str, data: bytes) -> None:
        """Write an object atomically and durably; see `ByteStore.put_new`."""
        write_atomic(self.root / check_object_path(path), [data])

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write an object from its pieces, atomically and durably; see `ByteStore.put_stream`."""
        write_atomic(self.root / check_object_path(path), sized(path, chunks, num_bytes))

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names that begin with ``prefix``; see `ByteStore.list`."""
        names: list[str] = []
        for where, folders, files in os.walk(self.root / prefix.rpartition("/")[0]):
            below = Path(where).relative_to(self.root)
            # Do not walk through a thousand shards to find a manifest.
            folders[:] = [
                folder
                for folder in folders
                if f"{(below / folder).as_posix()}/".startswith(prefix)
                or prefix.startswith(f"{(below / folder).as_posix()}/")
            ]
            names += [(below / name).as_posix() for name in files if not is_temporary_name(name)]
        return sorted(name for name in names if name.startswith(prefix))

    def close(self) -> None:
        """Close the cached descriptors; the store stays usable."""
        _OPEN_FILES.close(self._owner)

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        descriptor = _OPEN_FILES.take(self._owner, path, lambda: self._open(path))
        try:
            yield descriptor.fileno
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"{path} cannot be read: {os_reason(error)}; check the file system."
            ) from error
        finally:
            _OPEN_FILES.give_back(descriptor)

    def _open(self, path: str) -> int:
        try:
            # Without O_NONBLOCK a pipe waits for someone who writes.
            fileno = os.open(self._prefix + check_object_path(path), _READ_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"{path} does not exist in the store; is the dataset complete?") from None
        except OSError as error:
            raise StorageError(
                f"{path} cannot be opened: {os_reason(error)}; check its permissions."
            ) from error
        if not stat.S_ISREG(os.fstat(fileno).st_mode):
            os.close(fileno)
            raise StorageError(f"{path} must be a regular file, got a pipe, folder or device; name a file.")
        return fileno


def read_scattered(fileno: int, path: str, offsets: Iterable[int], buffers: Iterable[memoryview]) -> None:
    """Fill each buffer from its offset of an open file; neighbors are read in one call.

    Raises:
        ShortReadError: The file ends before; the message names ``path``.
        OSError: Reading failed.
    """
    pieces: list[memoryview] = []
    start = position = 0
    for offset, buffer in zip(offsets, buffers, strict=True):
        if not buffer.nbytes:
            continue
        gap = offset - position
        if pieces and (not 0 <= gap <= _MAX_GAP_BYTES or len(pieces) >= _MAX_BUFFERS):
            read_into(fileno, path, start, pieces)
            pieces = []
        if not pieces:
            start, gap = offset, 0
        if gap:
            pieces.append(_GAP[:gap])
        pieces.append(buffer.cast("B"))
        position = offset + buffer.nbytes
    if pieces:
        read_into(fileno, path, start, pieces)


def read_into(fileno: int, path: str, offset: int, pieces: list[memoryview]) -> None:
    """Fill pieces, none empty, one after another from ``offset`` of an open file.

    Raises:
        ShortReadError: The file ends before; the message names ``path``.
        OSError: Reading failed.
    """
    preadv = getattr(os, "preadv", _seek_and_read)
    while pieces:
        num_read = preadv(fileno, pieces, offset)
        if not num_read:
            missing = sum(piece.nbytes for piece in pieces)
            raise ShortReadError(
                f"{path} ends {missing} bytes before the end of the range to read (at offset {offset}); "
                "verify the dataset and fetch the file again."
            )
        offset += num_read
        while pieces and num_read >= pieces[0].nbytes:
            num_read -= pieces.pop(0).nbytes
        if num_read:
            pieces[0] = pieces[0][num_read:]


def _seek_and_read(fileno: int, pieces: Sequence[memoryview | NDArray[np.uint8]], offset: int) -> int:
    """Do what ``preadv`` does where there is none; threads share the descriptor and its position."""
    with _SEEKING:
        os.lseek(fileno, offset, os.SEEK_SET)
        data = os.read(fileno, len(pieces[0]))
    memoryview(pieces[0])[: len(data)] = data  # type: ignore[arg-type]  # a buffer
    return len(data)
