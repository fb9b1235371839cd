"""Files named ``*.dcm.gz``: DICOM in gzip, as some collections are handed out; inflated once, with a bound.

What comes out is a descriptor of the inflated bytes, which lie in memory under no name, so everything that
reads DICOM reads these files too.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shardflow.sources.reasons import Reason, source_error

__all__ = ["open_file"]

_CHUNK_BYTES: Final = 1 << 20


@contextlib.contextmanager
def open_file(path: Path, max_inflated_bytes: int) -> Iterator[int]:
    """Open a file for ``os.pread``.

    Args:
        path: The file; inflated first where its name ends in ``.dcm.gz``.
        max_inflated_bytes: Bound on what it inflates to.

    Raises:
        SourceError: LIMIT_EXCEEDED, or HEADER_UNREADABLE where the compressed stream is damaged.
        OSError: As from the operating system.
    """
    if path.name.lower().endswith(".dcm.gz"):
        descriptor = _inflate(path, max_inflated_bytes)
    else:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _inflate(path: Path, max_bytes: int) -> int:
    descriptor = _nameless_file()
    try:
        with gzip.open(path, "rb") as stream:
            num_bytes = 0
            while chunk := stream.read(_CHUNK_BYTES):
                num_bytes += len(chunk)
                _check_size(num_bytes, max_bytes)
                _write(descriptor, chunk)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        os.close(descriptor)
        raise source_error(Reason.HEADER_UNREADABLE, "the gzip stream is damaged") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise source_error(Reason.LIMIT_EXCEEDED, f"the file inflates to more than {max_bytes} bytes")


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("inflated", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
