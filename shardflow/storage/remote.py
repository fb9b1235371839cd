"""Remote byte store: S3, Google Cloud Storage, Azure, or read-only HTTP, through obstore.

Reads become coalesced range requests that run concurrently and are bound to the ETag of the first read (see
`shardflow.storage.ranged_reads`). Writes are conditional (``If-None-Match: *`` or the store's equivalent),
so an object is written once whoever else writes: small objects in one request, large ones as a multipart
upload to a hidden name that the store then copies. A store that accepts the header and overwrites anyway
would lose data silently, so the first write of a process is made twice; the second attempt must be refused
(and writes the same bytes if it is not).
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from shardflow.errors import AlreadyExistsError, NoListingError, NotFoundError, ShortReadError, StorageError
from shardflow.storage.client import (
    READ_ONLY_SCHEMES,
    check_process,
    check_remote_url,
    make_client,
    require_client,
)
from shardflow.storage.event_loop import EventLoopThread
from shardflow.storage.local import is_temporary_name
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
from shardflow.storage.store import ByteRange, check_object_path, check_ranges, sized

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_MAX_PARTS: Final = 10_000
_MAX_OBJECT_BYTES: Final = 5 << 30
_CONCURRENT_PARTS: Final = 4


class Uploader:
    """Writes objects. Safe for many threads.

    Args:
        client: Gives the client for single requests.
        large_client: Gives one that tries each part of an upload again by itself.
        retrying: Runs single requests.
        part_bytes: Objects above this go in parts of it.
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
                f"{path} must have at most {_MAX_OBJECT_BYTES} bytes to be copied by the store, got "
                f"{num_bytes}; make smaller shards."
            )
        pieces = sized(path, chunks, num_bytes)
        if num_bytes <= self._part_bytes:
            # Not join, which gathers all views first: the next piece may overwrite the one before.
            gathered = bytearray()
            for piece in pieces:
                gathered += piece
            data = bytes(gathered)
            self._publish(path, lambda: self._put_small(path, data), lambda: self._holds(path, data))
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
        """Write conditionally; a write whose answer was lost meets itself at the next try."""

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
            "a store must refuse to write an object twice (If-None-Match), got one that overwrites; another "
            f"writer could replace what stands there ({path}): use a store with conditional writes."
        )

    def _put_small(self, path: str, data: bytes) -> None:
        import obstore

        with translated("writing", path):
            obstore.put(self._client(), path, data, mode="create", use_multipart=False)

    def _upload(self, path: str, hidden: str, pieces: Iterator[memoryview], num_bytes: int) -> None:
        import obstore

        failures: list[BaseException] = []

        def guarded() -> Iterator[bytes]:
            # The client wraps what the pieces raise; the caller shall get it as it was.
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
            raise StorageError(f"writing {path} must succeed, got {fault.message} in all tries.") from None
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
            # Ceph's gateway takes no copy of a part as the client sends it. What was uploaded comes back, and
            # goes there in one conditional request; it is in memory meanwhile.
            self._put_small(path, self._fetch(hidden))

    def _fetch(self, hidden: str) -> bytes:
        import obstore

        with translated("reading", hidden):
            return bytes(obstore.get(self._large_client(), hidden).bytes())

    def delete(self, path: str) -> None:
        """Delete an object, by one request."""
        import obstore

        with translated("deleting", path):
            obstore.delete(self._client(), path)

    def _holds(self, path: str, data: bytes) -> bool:
        import obstore

        with translated("reading", path):
            return memoryview(obstore.get(self._client(), path).bytes()) == data

    def _are_equal(self, path: str, hidden: str, num_bytes: int) -> bool:
        """Compare two objects; only where the answer to a copy was lost."""
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
