"""What a machine gives at most: bytes from its page cache and from its disk, measured on the same bytes.

A dataset in a folder is read where it lies. For one in an object store the bytes of the samples are written
to a scratch file first: that is how fast a cache on this disk would give them back.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Extent", "drop_from_memory", "read_extents", "scratch_extent"]

READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file."""

    path: Path
    start: int
    stop: int


def read_extents(extents: Sequence[Extent], buffer: NDArray[np.uint8]) -> None:
    """Read extents in their order, one thread, checking nothing; the buffer holds 8 MiB."""
    for extent in extents:
        with extent.path.open("rb", buffering=0) as file:
            file.seek(extent.start)
            left = extent.stop - extent.start
            while left:
                num_read = file.readinto(buffer[: min(left, READ_BYTES)].data)
                if not num_read:
                    return
                left -= num_read


def drop_from_memory(extents: Sequence[Extent]) -> bool:
    """Ask the kernel to forget extents; whether it did, so that the next read comes from the disk.

    It does not where the files lie in memory anyway (tmpfs), are mapped by others, or on some network file
    systems.
    """
    for extent in extents:
        with extent.path.open("rb") as file:
            os.fsync(file.fileno())  # what is not on the disk yet cannot be forgotten
            os.posix_fadvise(file.fileno(), extent.start, extent.stop - extent.start, os.POSIX_FADV_DONTNEED)
    return not any(map(_is_in_memory, extents))


def _is_in_memory(extent: Extent) -> bool:
    """Whether the middle of an extent can be read without waiting for a disk."""
    middle = (extent.start + extent.stop) // 2
    with extent.path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError:
            return True  # cannot be told, so it is not claimed


@contextmanager
def scratch_extent(payloads: Iterator[NDArray[np.uint8]], folder: Path | None) -> Iterator[list[Extent]]:
    """Write bytes to a scratch file; yields where they lie."""
    with tempfile.NamedTemporaryFile(prefix="shardflow-bench-", dir=folder) as file:
        for payload in payloads:
            file.write(payload.data)
        file.flush()
        yield [Extent(Path(file.name), 0, file.tell())]
