"""Write a local file so that a reader sees all of it or none of it.

The order of the calls is the whole point: write a hidden temporary in the same folder, flush, fsync, then
give it its name with one call that the file system does atomically, then fsync the folder so that the name
survives a power cut. A failed call removes the temporary and raises; an fsync that failed is never tried
again, because the kernel may have dropped the dirty pages and would report success the second time.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardflow.errors import AlreadyExistsError, StorageError

__all__ = ["fsync_directory", "is_temporary_name", "make_directories", "write_atomic"]

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def is_temporary_name(name: str) -> bool:
    """Tell whether a file name is one that `write_atomic` gives to unfinished files.

    A killed writer leaves such a file behind. Nothing ever reads one; whoever holds the only right to write
    into the folder may delete it.
    """
    return _TEMPORARY.fullmatch(name) is not None


def fsync_directory(path: Path) -> None:
    """Make the names in a folder durable.

    Raises:
        StorageError: The folder cannot be opened or synced.
    """
    with _naming("syncing the folder", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create a folder and the missing ones above it, durably; existing folders are left as they are.

    Raises:
        StorageError: A folder cannot be created, or a file stands where a folder must.
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
    """Write a file that appears whole, durably and, unless ``replace`` is given, only where none stood.

    Args:
        path: Final place; missing folders above it are created.
        chunks: The content in order; may be a generator, whose own exception also leaves nothing behind.
        replace: Take the place of an existing file instead of refusing it.
        mode: Permissions from the first byte on, less what the umask takes away.

    Raises:
        AlreadyExistsError: ``path`` exists and ``replace`` is false. The existing file is untouched.
        StorageError: The file could not be written (no space, no permission, failed fsync); nothing is left
            behind. Where only the last step failed, syncing the folder, the file stands whole, but a power
            cut may undo it.
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
                # A rename would silently replace what another writer published meanwhile; a link cannot.
                os.link(temporary, path)
    finally:
        _remove(temporary)
    fsync_directory(path.parent)


def _write_synced(path: Path, chunks: Iterable[bytes | memoryview], mode: int) -> None:
    # The errors of the caller's chunks pass as they are; only those of writing are translated.
    with _naming("creating", path):
        # Not tempfile's 0o600, which others could not read: a dataset's mode is left to the umask.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            with _naming("writing", path):
                while rest.nbytes:
                    rest = rest[os.write(descriptor, rest) :]
        with _naming("syncing", path):
            os.fsync(descriptor)
    finally:
        # On network file systems close is where a write error may show first, so its error must count too.
        with _naming("closing", path):
            os.close(descriptor)


@contextmanager
def _naming(action: str, path: Path) -> Iterator[None]:
    """Translate an error of the operating system; a name that stands already is an error of its own."""
    try:
        yield
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, type(error).__name__)
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        raise StorageError(f"{action} {path.name} must succeed, got {code} ({reason}).") from error


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _exists(path: Path) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"{path.name} must be new, got a file that stands already; files are written once."
    )
