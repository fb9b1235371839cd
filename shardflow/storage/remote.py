"""A byte store in S3, Google Cloud Storage, Azure or behind plain HTTP (read-only), through obstore.

Reads are ranged requests, joined, cut and sent side by side, each tried again on its own. The ETag of an
object is kept from its first read on, and every later read is bound to it: what is stitched together is one
version or an error. Writes are conditional, so that an object is written once whoever else writes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shardflow.errors import NoListingError, NotFoundError, ShortReadError, StorageError
from shardflow.storage.atomic import is_temporary_name
from shardflow.storage.client import (
    READ_ONLY_SCHEMES,
    check_process,
    check_remote_url,
    make_client,
    require_client,
)
from shardflow.storage.event_loop import EventLoopThread
from shardflow.storage.ranged_reads import RangedReads, Versions
from shardflow.storage.remote_faults import translated
from shardflow.storage.remote_options import RemoteCounts, RemoteOptions
from shardflow.storage.requests import plan_requests
from shardflow.storage.retrying import Retrying
from shardflow.storage.store import ByteRange, check_object_path, check_ranges
from shardflow.storage.uploads import Uploader

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["RemoteStore"]


class RemoteStore:
    """Objects below an address; safe for many threads. Crosses a process boundary as its address.

    A fork of a process that used any remote store must not use one; it is told so instead of waiting forever.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
            ``https://host/prefix``.
        options: How to ask.

    Raises:
        StorageError: The address names no store, or carries credentials.
    """

    def __init__(self, url: str, options: RemoteOptions | None = None) -> None:
        self._url = check_remote_url(url)
        self._options = options or RemoteOptions()
        self._is_read_only = urlsplit(self._url).scheme in READ_ONLY_SCHEMES
        self._reset()

    @property
    def url(self) -> str:
        """The address."""
        return self._url

    @property
    def max_concurrency(self) -> int:
        """Reading requests of this process under way at once, in health."""
        return self._options.max_concurrency

    def answer_bytes(self, max_concurrency: int | None = None) -> int:
        """Return the most bytes of responses in memory at once, with so many concurrent requests."""
        return (max_concurrency or self.max_concurrency) * self._options.request_bytes

    def bound(self, max_concurrency: int) -> None:
        """Change how many reading requests are under way at once; may be called while reads run.

        Raises:
            StorageError: The process ends.
        """
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            self._options = replace(self._options, max_concurrency=max_concurrency)
            thread = self._thread
            if thread is None:  # nobody reads yet, so nobody is waiting either
                self._reads = RangedReads(self._client, self._versions, self._retrying, self._options)
        if thread is not None:
            thread.run(self._reads.bound(max_concurrency))

    @property
    def counts(self) -> RemoteCounts:
        """What was asked of the store in this process."""
        return self._reads.counts

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[str, RemoteOptions]]:
        """Cross a process boundary as an address, without connections."""
        return type(self), (self._url, self._options)

    def __repr__(self) -> str:
        return f"RemoteStore({self._url!r})"

    def size(self, path: str) -> int:
        """Return an object's size in bytes; see `ByteStore.size`."""
        check_object_path(path)
        self._check_ready()
        return self._loop().run(self._reads.size(path))

    def read(self, path: str) -> bytes:
        """Return an object whole; see `ByteStore.read`."""
        check_object_path(path)
        self._check_ready()
        try:
            start = self._loop().run(self._reads.read_start(path))
        except ShortReadError:
            # Of an empty object there is no range; whatever else it may be, its size tells.
            start = b""
        num_bytes = (self._versions.num_bytes(path) if start else None) or self.size(path)
        if len(start) == num_bytes:
            return start
        data = bytearray(num_bytes)
        data[: len(start)] = start
        rest = ByteRange(len(start), num_bytes - len(start))
        self.read_ranges(path, [rest], [memoryview(data)[rest.offset :]])
        return bytes(data)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with its range; see `ByteStore.read_ranges`.

        Raises:
            ObjectChangedError: The object is no longer the one that was read first.
        """
        check_object_path(path)
        check_ranges(path, ranges, buffers)
        options = self._options
        requests = plan_requests(
            ranges, buffers, gap_bytes=options.cost.gap_bytes, request_bytes=options.request_bytes
        )
        if requests:
            self._check_ready()
            self._loop().run(self._reads.fill(path, requests))

    def map(self, path: str) -> memoryview:
        """Return an object whole, in memory: there is nothing remote to page in from."""
        return memoryview(self.read(path))

    def put_new(self, path: str, data: bytes) -> None:
        """Write an object where none is, by a conditional request; see `ByteStore.put_new`."""
        self.put_stream(path, [data], len(data))

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write an object from its pieces, in parts where it is large; see `ByteStore.put_stream`.

        A large object is uploaded under a hidden name and copied by the store to its own, on the condition
        that none is there. A killed upload leaves parts behind that no one sees; buckets have a lifecycle
        rule for them (`AbortIncompleteMultipartUpload`).
        """
        check_object_path(path)
        if self._is_read_only:
            raise StorageError(f"{path} must go to a store that takes objects, got plain HTTP; use s3://.")
        self._check_ready()
        self._uploader.put(path, chunks, num_bytes)

    def erase(self, path: str) -> None:
        """Delete an object, for `shardflow.storage.erase`; one that is not there is no error.

        Raises:
            StorageError: The store refuses, or takes no changes.
        """
        check_object_path(path)
        if self._is_read_only:
            raise StorageError(f"{path} must lie in a store that deletes, got plain HTTP; use s3://.")
        self._check_ready()
        with suppress(NotFoundError):
            self._retrying(f"deleting {path}", lambda _: self._uploader.delete(path))
        self._versions.forget(path)

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names that begin with ``prefix``; see `ByteStore.list`."""
        if self._is_read_only:
            raise NoListingError(f"names of {prefix!a} must be listed, got plain HTTP; it cannot.")
        folder = prefix.rpartition("/")[0]

        self._check_ready()
        names = self._retrying(
            f"listing {folder or 'the store'}", lambda _: _list_below(self._client(), folder, prefix)
        )
        return sorted(
            name
            for name in names
            if name.startswith(prefix) and not is_temporary_name(name.rpartition("/")[2])
        )

    # ---- inside ----------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._reader: ObjectStore | None = None
        self._thread: EventLoopThread | None = None
        self._versions = Versions()
        self._retrying = Retrying(self._options.retry)
        self._reads = RangedReads(self._client, self._versions, self._retrying, self._options)
        self._uploader = Uploader(
            self._client,
            self._large_client,
            self._retrying,
            part_bytes=self._options.part_bytes,
        )

    def _check_ready(self) -> None:
        require_client()
        if self._pid != os.getpid():
            # The parent's lock may be held by a thread that does not exist here.
            self._reset()

    def _loop(self) -> EventLoopThread:
        check_process()
        with self._lock:
            if self._thread is None:
                self._thread = EventLoopThread("shardflow-remote")
            return self._thread

    def _client(self) -> ObjectStore:
        check_process()
        with self._lock:
            if self._reader is None:
                # Tries again in our hands, where a budget, the deadline and the version are known.
                self._reader = self._make_client(max_retries=0, retry_timeout_s=0)
            return self._reader

    def _large_client(self) -> ObjectStore:
        """A client that tries each part of an upload again by itself."""
        retry = self._options.retry
        return self._make_client(max_retries=retry.max_attempts - 1, retry_timeout_s=retry.deadline_s)

    def _make_client(self, *, max_retries: int, retry_timeout_s: float) -> ObjectStore:
        return make_client(
            self._url,
            timeout_s=self._options.timeout_s,
            stall_timeout_s=self._options.stall_timeout_s,
            max_retries=max_retries,
            retry_timeout_s=retry_timeout_s,
        )


def _list_below(client: ObjectStore, folder: str, prefix: str) -> list[str]:
    import obstore

    with translated("listing", folder or "the store"):
        if not prefix:
            return [meta["path"] for page in obstore.list(client) for meta in page]
        level = obstore.list_with_delimiter(client, folder or None)
        names = [meta["path"] for meta in level["objects"]]
        for below in level["common_prefixes"]:
            # Do not walk through a thousand shards to find a manifest.
            if f"{below}/".startswith(prefix):
                names += [meta["path"] for page in obstore.list(client, below) for meta in page]
        return names
