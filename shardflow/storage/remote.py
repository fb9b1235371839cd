"""Remote byte store: S3, Google Cloud Storage, Azure, or read-only HTTP, through obstore.

Reads become coalesced range requests that run concurrently and are bound to the ETag of the first read (see
`shardflow.storage.ranged_reads`). Writes are conditional (``If-None-Match: *`` or the store's equivalent),
so an object is written once, no matter who else writes: small objects in one request, large ones as a
multipart upload to a hidden name that the store then copies. A store that accepts the header and overwrites
anyway would lose data silently, so the first write of a process is made twice; the second attempt must be
refused (and writes the same bytes if it is not).

`erase` is not part of the `ByteStore` interface, whose objects never change. It exists for data that must
not be kept, such as that of a person who withdrew consent; its caller is responsible for concurrent readers.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from shardflow.errors import (
    AlreadyExistsError,
    NoListingError,
    NotFoundError,
    ShortReadError,
    StorageError,
    os_reason,
)
from shardflow.storage.client import (
    READ_ONLY_SCHEMES,
    check_process,
    check_remote_url,
    endpoint_of,
    make_client,
    require_client,
)
from shardflow.storage.event_loop import EventLoopThread
from shardflow.storage.local import LocalStore, is_temporary_name
from shardflow.storage.ranged_reads import RangedReads, Versions
from shardflow.storage.requests import (
    LengthRequiredError,
    PassingFaultError,
    RemoteCounts,
    RemoteOptions,
    Retrying,
    plan_requests,
    translated,
)
from shardflow.storage.store import ByteRange, ByteStore, check_object_path, check_ranges, sized

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_MAX_PARTS: Final = 10_000
_MAX_OBJECT_BYTES: Final = 5 << 30
_CONCURRENT_PARTS: Final = 4


class Uploader:
    """Writes objects conditionally. Thread-safe.

    Args:
        client: Returns the client for single requests.
        large_client: Returns a client that retries each part of an upload by itself.
        retrying: Runs single requests.
        part_bytes: Larger objects are uploaded in parts of this size.
    """

    def __init__(
        self,
        client: Callable[[], ObjectStore],
        large_client: Callable[[], ObjectStore],
        retrying: Retrying,
        *,
        part_bytes: int,
    ) -> None:
        self._client = client
        self._large_client = large_client
        self._retrying = retrying
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._refuses_twice = False

    def put(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write an object; see `ByteStore.put_stream`."""
        if num_bytes > _MAX_OBJECT_BYTES:
            raise StorageError(
                f"{path} has {num_bytes} bytes, but stores copy at most {_MAX_OBJECT_BYTES} bytes; "
                "make smaller shards."
            )
        pieces = sized(path, chunks, num_bytes)
        if num_bytes <= self._part_bytes:
            # Not join, which collects all views first: the next piece may overwrite the previous one.
            gathered = bytearray()
            for piece in pieces:
                gathered += piece
            data = bytes(gathered)
            self._publish(
                path, lambda: self._put_small(path, data), lambda: _whole(self._client(), path) == data
            )
            return
        folder, _, name = path.rpartition("/")
        hidden = f"{folder}{'/' if folder else ''}.{name}.{secrets.token_hex(8)}.tmp"
        try:
            self._upload(path, hidden, pieces, num_bytes)
            self._publish(
                path, lambda: self._copy(path, hidden), lambda: self._are_equal(path, hidden, num_bytes)
            )
        finally:
            with suppress(StorageError):
                self.delete(hidden)

    def _publish(self, path: str, write: Callable[[], None], is_ours: Callable[[], bool]) -> None:
        """Write conditionally; a retry after a lost response finds its own object."""

        def attempt(number: int) -> None:
            try:
                write()
            except AlreadyExistsError:
                if not number or not is_ours():
                    raise

        self._retrying(f"writing {path}", attempt)
        with self._lock:
            if self._refuses_twice:
                return
            try:
                self._retrying(f"writing {path}", lambda _: write())
            except AlreadyExistsError:
                self._refuses_twice = True
                return
        raise StorageError(
            "the store must refuse to write an object twice (If-None-Match), but it overwrites; another "
            f"writer could replace {path}: use a store with conditional writes."
        )

    def _put_small(self, path: str, data: bytes) -> None:
        import obstore

        with translated("writing", path):
            obstore.put(self._client(), path, data, mode="create", use_multipart=False)

    def _upload(self, path: str, hidden: str, pieces: Iterator[memoryview], num_bytes: int) -> None:
        import obstore

        failures: list[BaseException] = []

        def guarded() -> Iterator[bytes]:
            # The client wraps exceptions of the pieces; the caller gets the original.
            try:
                yield from (bytes(piece) for piece in pieces)
            except BaseException as failure:
                failures.append(failure)
                raise

        part_bytes = max(self._part_bytes, -(-num_bytes // _MAX_PARTS))
        try:
            with translated("writing", path):
                obstore.put(
                    self._large_client(),
                    hidden,
                    guarded(),
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=_CONCURRENT_PARTS,
                )
        except PassingFaultError as fault:
            if failures:
                raise failures[0] from None
            raise StorageError(f"writing {path} failed: {fault.message} in all attempts.") from None
        except BaseException:
            if failures:
                raise failures[0] from None
            raise

    def _copy(self, path: str, hidden: str) -> None:
        import obstore

        try:
            with translated("writing", path):
                obstore.copy(self._client(), hidden, path, overwrite=False)
        except LengthRequiredError:
            # Ceph's gateway rejects the client's part copy. Download the upload into memory, and write it in
            # one conditional request.
            self._put_small(path, bytes(_whole(self._large_client(), hidden)))

    def delete(self, path: str) -> None:
        """Delete an object in one request."""
        import obstore

        with translated("deleting", path):
            obstore.delete(self._client(), path)

    def _are_equal(self, path: str, hidden: str, num_bytes: int) -> bool:
        """Compare two objects, after the response to a copy was lost."""
        import obstore

        client = self._client()
        with translated("reading", path):
            if obstore.head(client, path)["size"] != num_bytes:
                return False
            for start in range(0, num_bytes, self._part_bytes):
                stop = min(start + self._part_bytes, num_bytes)
                found, ours = (
                    obstore.get_range(client, name, start=start, end=stop) for name in (path, hidden)
                )
                if memoryview(found) != memoryview(ours):
                    return False
        return True


def _whole(client: ObjectStore, path: str) -> memoryview:
    import obstore

    with translated("reading", path):
        return memoryview(obstore.get(client, path).bytes())


class RemoteStore:
    """Byte store at a URL. Thread-safe; pickles as its URL and options.

    A fork of a process that used any remote store must not use one: it gets an error instead of a deadlock.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
            ``https://host/prefix``.
        options: Request settings.

    Raises:
        StorageError: The URL names no store, or contains credentials.
    """

    def __init__(self, url: str, options: RemoteOptions | None = None) -> None:
        self._url = check_remote_url(url)
        self._options = options or RemoteOptions()
        self.trust: object | None = None
        self._is_read_only = urlsplit(self._url).scheme in READ_ONLY_SCHEMES
        self._reset()

    @property
    def url(self) -> str:
        """The URL."""
        return self._url

    @property
    def max_concurrency(self) -> int:
        """Concurrent read requests of this process, while the store is healthy."""
        return self._options.max_concurrency

    def answer_bytes(self, max_concurrency: int | None = None) -> int:
        """Return the maximum bytes of responses in memory, with so many concurrent requests."""
        return (max_concurrency or self.max_concurrency) * self._options.request_bytes

    def bound(self, max_concurrency: int) -> None:
        """Change the limit on concurrent read requests, also while reads run.

        Raises:
            StorageError: The process is ending.
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
        """Request counts of this process."""
        return self._reads.counts

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[str, RemoteOptions], dict[str, object]]:
        """Pickle URL and options, without connections."""
        return type(self), (self._url, self._options), {"trust": self.trust}

    def __repr__(self) -> str:
        return f"RemoteStore({self._url!r})"

    def size(self, path: str) -> int:
        """Return an object's size in bytes; see `ByteStore.size`."""
        self._check_ready(path)
        return self._loop().run(self._reads.size(path))

    def read(self, path: str) -> bytes:
        """Return an object whole; see `ByteStore.read`."""
        self._check_ready(path)
        try:
            start = self._loop().run(self._reads.read_start(path))
        except ShortReadError:
            # An empty object has no range; its size decides.
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
        """Return an object in memory, since a remote one cannot be paged in."""
        return memoryview(self.read(path))

    def put_new(self, path: str, data: bytes) -> None:
        """Write a new object with a conditional request; see `ByteStore.put_new`."""
        self.put_stream(path, [data], len(data))

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write an object from its pieces, in parts where it is large; see `ByteStore.put_stream`.

        A large object is uploaded under a hidden name and copied by the store to its own, on the condition
        that it is new. A killed upload leaves invisible parts behind, for which buckets have a lifecycle rule
        (`AbortIncompleteMultipartUpload`).
        """
        self._check_ready(path)
        if self._is_read_only:
            raise StorageError(f"cannot write {path}: plain HTTP is read-only; use s3://.")
        self._uploader.put(path, chunks, num_bytes)

    def erase(self, path: str) -> None:
        """Delete an object if it exists, for `shardflow.storage.remote.erase`.

        Raises:
            StorageError: The store refuses, or is read-only.
        """
        self._check_ready(path)
        if self._is_read_only:
            raise StorageError(f"cannot delete {path}: plain HTTP is read-only; use s3://.")
        with suppress(NotFoundError):
            self._retrying(f"deleting {path}", lambda _: self._uploader.delete(path))
        self._versions.forget(path)

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names that begin with ``prefix``; see `ByteStore.list`."""
        if self._is_read_only:
            raise NoListingError(f"cannot list {prefix!a}: plain HTTP has no listing; use s3://.")
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
        self._retrying = Retrying(self._options.retry, server=partial(endpoint_of, self._url))
        self._reads = RangedReads(self._client, self._versions, self._retrying, self._options)
        self._uploader = Uploader(
            self._client,
            self._large_client,
            self._retrying,
            part_bytes=self._options.part_bytes,
        )

    def _check_ready(self, path: str | None = None) -> None:
        """Check the path of an object, if given, and that this process can send requests."""
        if path is not None:
            check_object_path(path)
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
                # Retries are ours: they need the budget, the deadline and the version.
                self._reader = self._make_client(max_retries=0, retry_timeout_s=0)
            return self._reader

    def _large_client(self) -> ObjectStore:
        """Return a client that retries each part of an upload by itself."""
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


def erase(store: ByteStore, path: str) -> None:
    """Delete an object if it exists.

    Raises:
        StorageError: It cannot be deleted, or the store cannot delete.
    """
    check_object_path(path)
    if isinstance(store, LocalStore):
        try:
            (store.root / path).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be deleted: {os_reason(error)}.") from None
    elif isinstance(store, RemoteStore):
        store.erase(path)
    else:
        raise StorageError(f"{path} cannot be deleted: a {type(store).__name__} does not delete.")
