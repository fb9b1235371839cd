"""Node files: derived files that the processes of a machine share; the first that needs one makes it.

They are in a folder of the user's own below the folder for temporary files, so they are on this machine, and
pages of a file that several processes map are in memory once. A file's name says what it was made of, and
nothing changes it afterwards. One that was not opened for some weeks is deleted when another one is made.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardflow.errors import StorageError
from shardflow.storage.local import write_atomic

_MAX_IDLE_S = 30 * 24 * 3600.0
_POLL_S = 0.05
MAX_WAIT_S = 900.0
"""How long a process waits for another one that makes the same file."""


def node_folder() -> Path:
    """Return the folder of this user's node files, and make it.

    Raises:
        StorageError: It cannot be made, is a link, or others may write in it.
    """
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


def node_file(name: str, make: Callable[[Path], Iterable[bytes]], *, max_wait_s: float = MAX_WAIT_S) -> Path:
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
                write_atomic(path, make(folder), mode=0o600)
            except OSError as error:
                raise StorageError(f"Making {path} failed: {error.strerror or error}.") from error
    return path


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
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + max_wait_s
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
