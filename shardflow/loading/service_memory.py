"""Memory that a trainer shares with the data servers of its own host, so that batches need not be sent.

A buffer is an anonymous file in memory, sealed against another size. The trainer names it in a ticket by its
process id and descriptor, and a server of the same user opens it by ``/proc`` and makes the micro-batch in
it. A server that cannot (another host, user or container) sends the batch instead. The trainer owns the
memory; a buffer whose request did not end well is never lent again, because a server that was passed over may
still write to it.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import socket
import stat
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from shardflow.loading.engine import BufferPool, Memory

try:
    import fcntl

    _SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
except (ImportError, AttributeError):  # only Linux has such files
    _SEALS = 0  # type: ignore[misc]

_NAME: Final = "shardflow-batch"
_SECRET_NUM_BYTES: Final = 16
_MAX_MAPPED: Final = 256


def is_of_this_host(address: str) -> bool:
    """Tell whether a network address belongs to this host, and buffers can be shared here at all."""
    if not _SEALS or not hasattr(os, "memfd_create"):
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


class _SharedMemory(Memory):
    """Anonymous file in memory, mapped."""

    descriptor = -1
    is_lost = False

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class SharedBuffers(BufferPool):
    """Pool of buffers that servers of this host can write to; otherwise as `BufferPool`.

    Behind the bytes that are lent each buffer has a secret, so that a ticket can name no other's.
    """

    def __init__(self, max_free_bytes: int) -> None:
        super().__init__(max_free_bytes)
        self._by_address: WeakValueDictionary[int, _SharedMemory] = WeakValueDictionary()

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Return how much memory a buffer of ``num_bytes`` takes."""
        return BufferPool.size_of(num_bytes + _SECRET_NUM_BYTES)

    def place_of(self, buffer: NDArray[np.uint8]) -> dict[str, Any]:
        """Describe a lent buffer for a ticket."""
        memory = self._by_address[buffer.ctypes.data]
        secret = memory[-_SECRET_NUM_BYTES:].hex()
        return {"pid": os.getpid(), "descriptor": memory.descriptor, "secret": secret}

    def forget(self, buffer: NDArray[np.uint8]) -> None:
        """Never lend a buffer again."""
        self._by_address[buffer.ctypes.data].is_lost = True

    def take_back(self, memory: Memory) -> None:
        """Take memory back from a freed lease, unless it is to be forgotten."""
        if not (isinstance(memory, _SharedMemory) and memory.is_lost):
            super().take_back(memory)

    def _allocate(self, size: int) -> Memory:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = _SharedMemory(descriptor, size)
            memory[-_SECRET_NUM_BYTES:] = secrets.token_bytes(_SECRET_NUM_BYTES)
        except BaseException:
            os.close(descriptor)
            raise
        memory.descriptor = descriptor
        memory.address = np.frombuffer(memory, np.uint8).ctypes.data
        self._by_address[memory.address] = memory
        return memory


class ClientMemory:
    """Buffers of trainers of this host, mapped in a server. Safe for many threads.

    A buffer stays mapped for the next batch, until `collect` finds that its trainer has freed it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: OrderedDict[tuple[int, int], tuple[tuple[int, int], mmap.mmap]] = OrderedDict()

    def find(self, told: Any) -> NDArray[np.uint8] | None:
        """Return a trainer's buffer, writable, ``(size,)`` uint8.

        Args:
            told: As `SharedBuffers.place_of` describes it; it came over the wire.

        Returns:
            The buffer; None if there is no such buffer that this process may write to.
        """
        if not _SEALS or not isinstance(told, Mapping):
            return None
        pid, descriptor, secret = (told.get(name) for name in ("pid", "descriptor", "secret"))
        if type(pid) is not int or type(descriptor) is not int or not isinstance(secret, str):
            return None
        with self._lock:
            memory = self._map(pid, descriptor)
        expected = b"" if memory is None else memory[-_SECRET_NUM_BYTES:].hex().encode()
        if memory is None or not hmac.compare_digest(expected, secret.encode("utf-8", "replace")):
            return None
        return np.frombuffer(memory, np.uint8)

    def collect(self) -> None:
        """Unmap the buffers that their trainers have freed."""
        with self._lock:
            for key in list(self._mapped):
                if _file_of(*key) != self._mapped[key][0]:
                    del self._mapped[key]

    def _map(self, pid: int, descriptor: int) -> mmap.mmap | None:
        """Return a mapped buffer; needs the lock."""
        key, found = (pid, descriptor), _file_of(pid, descriptor)
        file, memory = self._mapped.get(key, (None, None))
        if memory is not None and file == found:
            self._mapped.move_to_end(key)
            return memory
        self._mapped.pop(key, None)
        memory = None if found is None else _map(_path(pid, descriptor), found)
        if memory is not None and found is not None:
            self._mapped[key] = found, memory
            while len(self._mapped) > _MAX_MAPPED:
                self._mapped.popitem(last=False)
        return memory


def _path(pid: int, descriptor: int) -> Path:
    return Path(f"/proc/{pid}/fd/{descriptor}")


def _file_of(pid: int, descriptor: int) -> tuple[int, int] | None:
    """Return device and inode of a descriptor of a process; None if it is no buffer of this user."""
    path = _path(pid, descriptor)
    with suppress(OSError):
        # By its name before anything is opened: a pipe or device might react to that.
        if str(path.readlink()).startswith(f"/memfd:{_NAME} "):
            found = path.stat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                return found.st_dev, found.st_ino
    return None


def _map(path: Path, file: tuple[int, int]) -> mmap.mmap | None:
    """Map a file that nobody can cut off; None if it is another one, or can be."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if (found.st_dev, found.st_ino) == file and is_sealed:
                return mmap.mmap(descriptor, found.st_size)
        finally:
            os.close(descriptor)
    return None
