"""Byte store interface: complete, write-once objects under relative POSIX names.

Objects never change after they are written, so anything read from one may be cached. The read call takes a
list of ranges, because the store knows best how to combine them into few requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardflow.errors import StorageError

_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


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
        """Path or URL of the store; `open_store` of it gives an equal store."""

    def size(self, path: str) -> int:
        """Return an object's size in bytes.

        Raises:
            NotFoundError: There is no such object.
        """

    def read(self, path: str) -> bytes:
        """Return all bytes of an object.

        Raises:
            NotFoundError: There is no such object.
        """

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with exactly the bytes of its range.

        Args:
            path: The object.
            ranges: What to read; ascending ranges close together cost one request.
            buffers: One writable, C-contiguous buffer per range, of exactly its size.

        Raises:
            NotFoundError: There is no such object.
            ShortReadError: The object ends before a range does.
            StorageError: Reading failed, or ranges and buffers do not fit each other.
        """

    def map(self, path: str) -> memoryview:
        """Return a read-only view of a whole object, paged in on access if the store supports it.

        Raises:
            NotFoundError: There is no such object.
        """

    def put_new(self, path: str, data: bytes) -> None:
        """Write an object atomically.

        Raises:
            AlreadyExistsError: The object exists; it is untouched.
            StorageError: Writing failed; nothing is left behind.
        """

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write an object of any size atomically from its pieces.

        Args:
            path: The object.
            chunks: Its bytes in order. Their exceptions propagate, and nothing is left behind; so a caller
                that computes a digest along the way can raise at the end.
            num_bytes: Size of the object.

        Raises:
            AlreadyExistsError: The object exists; it is untouched.
            StorageError: Writing failed, or the pieces have another size; nothing is left behind.
        """

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names that begin with ``prefix``; unfinished objects are not listed.

        Raises:
            NoListingError: The store cannot list.
        """


def origin_of(store: ByteStore) -> ByteStore:
    """Return the store that manifests are read from, behind those that wrap it: their ``origin``."""
    while (behind := getattr(store, "origin", None)) is not None:
        store = behind
    return store


def check_object_path(path: str) -> str:
    """Return ``path`` if it is a valid name in a store, which cannot lead out of its folder.

    Raises:
        StorageError: The name is absolute, has empty, hidden or parent parts, or other characters than
            ``[A-Za-z0-9._-]`` between slashes.
    """
    if not _PATH.fullmatch(path):
        raise StorageError(
            f"{path!a} is not a valid object path; it must be relative, with parts of "
            "[A-Za-z0-9_][A-Za-z0-9._-]*, as in the manifest."
        )
    return path


def check_ranges(path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
    """Check that ranges and buffers match.

    Raises:
        StorageError: The counts differ, a range is negative, or a buffer is read-only or of another size.
    """
    if len(ranges) != len(buffers):
        raise StorageError(f"expected {len(ranges)} buffers, one per range, got {len(buffers)} ({path}).")
    for span, buffer in zip(ranges, buffers, strict=True):
        if span.offset < 0 or span.num_bytes < 0:
            raise StorageError(f"a range must not be negative, got {span} ({path}).")
        if buffer.nbytes != span.num_bytes or buffer.readonly or not buffer.c_contiguous:
            raise StorageError(
                f"a buffer must be writable, contiguous and of its range's {span.num_bytes} bytes, "
                f"got {buffer.nbytes} bytes, readonly={buffer.readonly} ({path})."
            )


def sized(path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> Iterator[memoryview]:
    """Yield pieces as flat bytes, and raise at their end if their total size is not ``num_bytes``.

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
            f"{path} must have {num_bytes} bytes, but the data to write has more or fewer; check whether the "
            "source changed in the meantime."
        )
