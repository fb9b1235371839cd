"""The folder of a cache: what is in it, and the few things that are ever done to files there.

Nothing is touched in a folder without our marker, unless it is empty. Every name is ours by its form, every
file is opened relative to a descriptor of its folder and never through a link, and only regular files with
such a name are deleted. So a folder that someone filled, linked elsewhere or emptied costs the cache, never
the data of others.

A block appears by a hard link to a finished file. Blocks are not synced: after a power cut one may be torn,
which its checksum shows, and it is fetched again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from shardflow.errors import ConfigError
from shardflow.storage.atomic import is_temporary_name

__all__ = ["MARKER", "BlockDamagedError", "CacheFolder"]

MARKER = "shardflow-cache.json"
_MARKER_BYTES = b'{"format":"shardflow-cache","format_version":1}\n'
_SUBFOLDERS = ("blocks", "incoming", "slots", "uses")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o600
_OBJECT_NAME = re.compile(r"[0-9a-f]{64}-(whole|[0-9]+)")
_BLOCK_NAME = re.compile(r"[0-9a-f]{8}")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}


class BlockDamagedError(Exception):
    """A file in a block's place is not the block: another size, a link, a folder."""


class CacheFolder:
    """An open cache folder. Every method may raise `OSError`; whoever calls decides what that means.

    Args:
        path: The folder; made, with those above it, if it is missing.

    Raises:
        ConfigError: It holds something and no marker of ours.
        OSError: It cannot be made, read or written to.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptors: dict[str, int] = {}
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._claim()
            for name in _SUBFOLDERS:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self._root)
                self._descriptors[name] = os.open(name, _FOLDER_FLAGS, dir_fd=self._root)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (*self._descriptors.values(), self._root):
            os.close(descriptor)
        self._descriptors, self._root = {}, -1

    def __del__(self) -> None:
        """Descriptors are plain numbers: nothing else closes them."""
        if getattr(self, "_root", -1) >= 0:
            self.close()

    def free_bytes(self) -> int:
        """Return what the disk has left for us."""
        found = os.fstatvfs(self._root)
        return found.f_bavail * found.f_frsize

    def open_file(self, name: str, folder: str = "") -> int:
        """Open one of the cache's own files for reading and writing; made if it is missing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, _MODE, dir_fd=self._descriptors[folder] if folder else self._root)

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a subfolder."""
        return sorted(_names(self._descriptors[folder]))

    def remove(self, folder: str, name: str) -> None:
        """Delete one of the cache's own files, if it stands; anything that is no regular file stays."""
        _remove(name, self._descriptors[folder])

    # ---- slots -----------------------------------------------------------------------------------

    def take_slot(self) -> tuple[int, int]:
        """Take the lowest free number for this process; returns it and the descriptor that holds it.

        The kernel frees it with the descriptor, however the process ends.
        """
        for number in range(1, 1 << 16):
            descriptor = self.open_file(f"{number:04x}", "slots")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return number, descriptor
        raise OSError(errno.EUSERS, "no free slot")

    def is_slot_held(self, number: int) -> bool:
        """Tell whether the process of a slot lives."""
        try:
            descriptor = os.open(f"{number:04x}", _READ_FLAGS, dir_fd=self._descriptors["slots"])
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    # ---- blocks ----------------------------------------------------------------------------------

    def open_block(self, name: str, number: int, num_bytes: int | None) -> int:
        """Open a block for reading; of any size where ``num_bytes`` is None.

        Raises:
            FileNotFoundError: There is none.
            BlockDamagedError: What stands there is no file of ``num_bytes``.
        """
        folder = self._open_object(name)
        try:
            descriptor = os.open(_block_name(number), _READ_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise BlockDamagedError from None
            raise
        finally:
            os.close(folder)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or num_bytes not in (None, found.st_size):
            os.close(descriptor)
            raise BlockDamagedError
        return descriptor

    def has_block(self, name: str, number: int, num_bytes: int | None = None) -> bool:
        """Tell whether a block stands, by its size where one is given."""
        try:
            os.close(self.open_block(name, number, num_bytes))
        except (FileNotFoundError, BlockDamagedError):
            return False
        return True

    def publish(self, name: str, number: int, incoming: str, payload: memoryview) -> bool:
        """Write a block; it appears whole or not at all.

        Returns:
            Whether it stands; False where something that is not ours has its place.
        """
        here = self._descriptors["incoming"]
        try:
            descriptor = os.open(incoming, _WRITE_FLAGS, _MODE, dir_fd=here)
        except FileExistsError:  # left by one who was killed
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
        """Delete a block; False where something that is no file of ours stands there, which stays."""
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
        """Delete all blocks, of which nothing is known any more."""
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
            # Left by one who was killed before it could say so, or not ours at all.
            return self.has_block(name, number, num_bytes)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without hard links; nothing of ours can stand there, we hold the only claim.
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
        """Check that the folder is ours, or make an empty one ours."""
        names = _names(self._root)
        if MARKER not in names:
            if any(name != "lost+found" and not is_temporary_name(name) for name in names):
                # Another process may have made it ours between the listing and this look.
                if MARKER in _names(self._root):
                    return self._check_marker()
                raise ConfigError(
                    f"a cache directory must be empty or a cache already ({MARKER} in it), got files of "
                    "others; name another folder, nothing was touched."
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
                f"a cache directory must hold the marker of cache format 1, got another {MARKER}; name "
                "another folder, nothing was touched."
            )


def _names(folder: int) -> list[str]:
    return os.listdir(folder)


def _block_name(number: int) -> str:
    return f"{number:08x}"


def _remove(name: str, folder: int) -> bool:
    """Delete a regular file; False where something else has the name."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return False
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    return True
