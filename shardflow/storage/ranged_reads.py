"""Ranged requests, side by side: each admitted, hedged, checked and tried again on its own.

The ETag of an object is kept from its first read on, and every later request is bound to it: what is stitched
together is one version or an error. What an answer says of itself is compared with what came: a body of
another length, another range, or all of the object where a part was asked for is never data.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardflow.errors import ShortReadError
from shardflow.storage.admission import Admission
from shardflow.storage.event_loop import call_client, run_all
from shardflow.storage.hedging import Hedging
from shardflow.storage.remote_faults import changed, translated
from shardflow.storage.remote_options import RemoteCounts, RemoteOptions
from shardflow.storage.requests import RangeRequest
from shardflow.storage.retrying import PassingFaultError, Retrying

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["RangedReads", "Versions"]

_MAX_VERSIONS_KEPT: Final = 1 << 16
# An answer of another kind than asked for may be the error page of something between; it does not come twice.
_FEW_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class _Version:
    """What the first read of an object said of it."""

    etag: str | None
    modified: str
    """Tells versions apart where a server gives no ETag."""
    num_bytes: int


class Versions:
    """The version of each object that was read first. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Version] = OrderedDict()

    def __contains__(self, path: str) -> bool:
        return path in self._known

    def num_bytes(self, path: str) -> int | None:
        """Return the size of an object; None where nothing is known of it."""
        known = self._known.get(path)
        return None if known is None else known.num_bytes

    def strong_etag(self, path: str) -> str | None:
        """Return what a request can be bound to; a weak ETag never matches (RFC 9110, 8.8.3.2)."""
        known = self._known.get(path)
        return None if known is None or known.etag is None or known.etag.startswith("W/") else known.etag

    def remember(self, path: str, etag: str | None, modified: object, num_bytes: int) -> int:
        """Keep what is said of an object first, and compare what is said later; returns its size.

        Raises:
            ObjectChangedError: It is another version.
        """
        found = _Version(etag, "" if etag else str(modified), num_bytes)
        with self._lock:
            known = self._known.setdefault(path, found)
            self._known.move_to_end(path)
            if len(self._known) > _MAX_VERSIONS_KEPT:
                self._known.popitem(last=False)
        if known != found:
            raise changed(path)
        return num_bytes

    def forget(self, path: str) -> None:
        """Forget an object that is gone."""
        with self._lock:
            self._known.pop(path, None)


class RangedReads:
    """The reading side of a remote store; its coroutines belong to one event loop.

    Args:
        client: Gives the client.
        versions: Of the store.
        retrying: Of the store.
        options: Of the store.
    """

    def __init__(
        self,
        client: Callable[[], ObjectStore],
        versions: Versions,
        retrying: Retrying,
        options: RemoteOptions,
    ) -> None:
        self._client = client
        self._versions = versions
        self._retrying = retrying
        self._request_bytes = options.request_bytes
        self._admission = Admission(options.max_concurrency, options.pause_s)
        self._hedging = Hedging(options.hedge_share, options.cost)
        self._num_requests = 0
        self._num_bytes = 0

    @property
    def counts(self) -> RemoteCounts:
        """What was done so far."""
        return RemoteCounts(
            num_requests=self._num_requests,
            num_bytes=self._num_bytes,
            num_retries=self._retrying.num_retries,
            num_hedges=self._hedging.num_hedges,
            num_pauses=self._admission.num_pauses,
        )

    async def bound(self, max_concurrency: int) -> None:
        """Change how many requests are under way at once."""
        self._admission.bound(max_concurrency)

    async def fill(self, path: str, requests: Sequence[RangeRequest]) -> None:
        """Fill the buffers of some requests for one object."""
        # The first one alone where nothing is known of the object: the others are bound to what it says.
        first = 0 if path in self._versions else 1
        for request in requests[:first]:
            await self._fill(path, request)
        rest = requests[first:]
        if len(rest) == 1:
            await self._fill(path, rest[0])
        elif rest:
            await run_all([self._fill(path, request) for request in rest])

    async def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        import obstore

        async def attempt() -> int:
            with translated("reading", path):
                meta = await call_client(lambda: obstore.head_async(self._client(), path))
            return self._versions.remember(path, meta["e_tag"], meta["last_modified"], meta["size"])

        return await self._retrying.run(f"reading {path}", attempt)

    async def read_start(self, path: str) -> bytes:
        """Read as much as one request takes, of an object of unknown size."""
        return bytes(await self._read(path, 0, self._request_bytes))

    async def _fill(self, path: str, request: RangeRequest) -> None:
        num_bytes = self._versions.num_bytes(path)
        if num_bytes is not None and request.stop > num_bytes:
            raise _short(path, request.start, request.stop)
        body = await self._read(path, request.start, request.stop)
        if body.nbytes != request.num_bytes:
            raise _short(path, request.start, request.stop)
        request.deliver(body)

    async def _read(self, path: str, start: int, stop: int) -> memoryview:
        """Read a range, or what the object has of it."""

        async def attempt() -> memoryview:
            try:
                async with self._admission:
                    body = await self._hedging.run(lambda: self._ask(path, start, stop), stop - start)
            except PassingFaultError as fault:
                if fault.is_refusal:
                    self._admission.was_refused()
                raise
            self._admission.succeeded()
            self._num_bytes += body.nbytes
            return body

        return await self._retrying.run(f"reading {path}", attempt)

    async def _ask(self, path: str, start: int, stop: int) -> memoryview:
        """Send one request and check its answer."""
        import obstore

        etag = self._versions.strong_etag(path)
        options = {"range": (start, stop)} if etag is None else {"range": (start, stop), "if_match": etag}
        self._num_requests += 1
        with translated("reading", path):
            result = await call_client(
                lambda: obstore.get_async(self._client(), path, options=options)  # type: ignore[arg-type]
            )
            meta = result.meta
            size = self._versions.remember(path, meta["e_tag"], meta["last_modified"], meta["size"])
            coding = str(result.attributes.get("Content-Encoding", "identity"))
            if coding != "identity":
                raise PassingFaultError(
                    "a body that something on its way compressed (Content-Encoding)",
                    max_attempts=_FEW_ATTEMPTS,
                )
            body = memoryview(await call_client(result.bytes_async))
        if body.nbytes != min(stop, size) - start:
            raise PassingFaultError("a body that was cut on its way")
        return body


def _short(path: str, start: int, stop: int) -> ShortReadError:
    return ShortReadError(
        f"{path} must hold bytes {start} to {stop}, got the end of the object before; verify the dataset and "
        "fetch the file again."
    )
