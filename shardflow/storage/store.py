"""Byte store interface: complete, write-once objects under relative POSIX names.

Objects never change after they are written, so anything read from one may be cached. The read call takes a
list of ranges, because the store knows best how to turn them into few requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardflow.errors import StorageError

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A half-open range of an object's bytes: ``[offset, offset + num_bytes)``."""

    offset: int
    num_bytes: int


class ByteStore(Protocol):
    """Complete, write-once objects, read by ranges. Every method is thread-safe.

    Paths are relative POSIX names inside the store, such as ``"shards/train-000000.tar"``.
    """

    @property
    def url(self) -> str:
        """Where the store lies; `open_store` of it gives an equal store."""

    def size(self, path: str) -> int:
        """Return an object's size in bytes.

        Raises:
            NotFoundError: There is no such object.
        """

    def read(self, path: str) -> bytes:
        """Return an object whole.

        Raises:
            NotFoundError: There is no such object.
        """

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with exactly the bytes of its range. The reading call.

        Args:
            path: The object.
            ranges: What to read; ascending ranges that lie close together cost one request.
            buffers: One writable, C-contiguous buffer per range, of exactly its size.

        Raises:
            NotFoundError: There is no such object.
            ShortReadError: The object ends before a range does.
            StorageError: Reading failed, or ranges and buffers do not fit each other.
        """

    def map(self, path: str) -> memoryview:
        """Return a read-only view of a whole object, paged in when touched where the store can do so.

        Raises:
            NotFoundError: There is no such object.
        """

    def put_new(self, path: str, data: bytes) -> None:
        """Write an object that appears whole or not at all.

        Raises:
            AlreadyExistsError: The object exists; it is untouched.
            StorageError: Writing failed; nothing is left behind.
        """

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write an object of any size from its pieces; it appears whole or not at all.

        Args:
            path: The object.
            chunks: Its bytes in order. An exception of theirs passes on, and nothing is left behind: whoever
                checks a digest on the way raises at the end.
            num_bytes: Size of the object.

        Raises:
            AlreadyExistsError: The object exists; it is untouched.
            StorageError: Writing failed, or the pieces have another size; nothing is left behind.
        """

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names that begin with ``prefix``; unfinished objects are no objects.

        Raises:
            NoListingError: The store cannot list.
        """


def check_object_path(path: str) -> str:
    """Return ``path`` if it is a name inside a store; a manifest of others must not lead out of its folder.

    Raises:
        StorageError: The name is absolute, has empty, hidden or parent parts, or other characters than
            ``[A-Za-z0-9._-]`` between slashes.
    """
    if not all(_PART.fullmatch(part) for part in path.split("/")):
        raise StorageError(
            "an object path must be relative with parts of [A-Za-z0-9_][A-Za-z0-9._-]*, "
            f"got {path!a}; take paths from the manifest."
        )
    return path


def check_ranges(path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
    """Refuse ranges and buffers that do not fit each other.

    Raises:
        StorageError: The counts differ, a range is negative, or a buffer is read-only or of another size.
    """
    if len(ranges) != len(buffers):
        raise StorageError(f"buffers must be one per range ({len(ranges)}), got {len(buffers)} ({path}).")
    for span, buffer in zip(ranges, buffers, strict=True):
        if span.offset < 0 or span.num_bytes < 0:
            raise StorageError(f"a range must not be negative, got {span} ({path}).")
        if buffer.nbytes != span.num_bytes or buffer.readonly or not buffer.c_contiguous:
            raise StorageError(
                f"a buffer must be writable, contiguous and of its range's {span.num_bytes} bytes, "
                f"got {buffer.nbytes} bytes, readonly={buffer.readonly} ({path})."
            )


def sized(path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> Iterator[memoryview]:
    """Pass pieces on as flat bytes, and refuse them at their end if they are not of the size promised.

    Raises:
        StorageError: They are more or fewer bytes than ``num_bytes``.
    """
    num_seen = 0
    for chunk in chunks:
        piece = memoryview(chunk).cast("B")
        num_seen += piece.nbytes
        if num_seen > num_bytes:
            break
        yield piece
    if num_seen != num_bytes:
        raise StorageError(
            f"{path} must be written with {num_bytes} bytes, got others; did it change meanwhile?"
        )
