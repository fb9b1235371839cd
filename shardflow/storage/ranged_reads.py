"""Ranged reads: concurrent range requests, each admitted, hedged, checked and retried on its own.

`Versions` keeps the ETag of an object from its first read and binds every later request to it, so the result
comes from one version or is an error. A body of another length, another range, or a whole object in place of
a part is never accepted as data.

`Admission` limits concurrency. One 503 or 429 among good responses is noise and is just retried; several in
a row mean an overloaded store: concurrency is halved and all requests pause. Each good response restores a
part of the limit.

`Hedging` sends a second request for a late one and takes the first response. Late means slower than 95 of
100 earlier requests, relative to the time expected for the size. Second requests are a bounded share of all,
so a store that is slow as a whole does not get twice the load.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardflow.errors import ShortReadError
from shardflow.storage.event_loop import call_client, run_all
from shardflow.storage.requests import (
    PassingFaultError,
    RangeRequest,
    RemoteCounts,
    RemoteOptions,
    RequestCost,
    Retrying,
    changed,
    translated,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_IN_A_ROW: Final = 4
_MAX_DOUBLINGS: Final = 4
_RANDOM: Final = secrets.SystemRandom()
_Value = TypeVar("_Value")
_QUANTILE: Final = 0.95
_WINDOW: Final = 256
_ENOUGH: Final = 24
_RENEWED_EVERY: Final = 16
# A request at the edge of the distribution is not late yet: it may take as long again.
_PATIENCE: Final = 2.0
_MIN_DELAY_S: Final = 0.02
_MAX_SAVED: Final = 8.0
_MAX_VERSIONS_KEPT: Final = 1 << 16
# A response of another kind may be a proxy's error page, which does not persist.
_FEW_ATTEMPTS: Final = 3


class Admission:
    """FIFO limit on concurrent requests. Belongs to one event loop; not thread-safe.

    Args:
        max_concurrency: Concurrent requests of a healthy store.
        pause_s: First pause of an overloaded store; it doubles while the overload lasts, four times at most.
            A pause is drawn between its half and its whole, so that ranks do not come back together.

    Attributes:
        num_pauses: Pauses so far.
    """

    def __init__(self, max_concurrency: int, pause_s: float) -> None:
        self._most = max_concurrency
        self._limit = float(max_concurrency)
        self._pause_s = pause_s
        self._num_under_way = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_in_a_row = 0
        self._num_doublings = 0
        self._resume_at = 0.0
        self.num_pauses = 0

    @property
    def limit(self) -> int:
        """Concurrent requests allowed now."""
        return int(self._limit)

    def bound(self, max_concurrency: int) -> None:
        """Change the limit for a healthy store; running requests above it finish first.

        For an overloaded store the current limit only goes down; good responses raise it again.
        """
        is_reduced = self._limit < self._most
        self._limit = min(self._limit, max_concurrency) if is_reduced else float(max_concurrency)
        self._most = max_concurrency
        self._admit()

    async def __aenter__(self) -> None:
        """Wait for admission."""
        if not self._waiting and self._has_room():
            self._num_under_way += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at the same time
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def succeeded(self) -> None:
        """Record a good response."""
        self._num_in_a_row = 0
        self._num_doublings = 0
        self._limit = min(float(self._most), self._limit + 1 / self._limit)

    def was_refused(self) -> None:
        """Record a response that reports overload."""
        now = time.monotonic()
        if now < self._resume_at:
            return  # the request began before the pause
        self._num_in_a_row += 1
        if self._num_in_a_row < _IN_A_ROW:
            return
        self._num_in_a_row = 0
        self._limit = max(1.0, self._limit / 2)
        pause = self._pause_s * 2**self._num_doublings * _RANDOM.uniform(0.5, 1)
        self._num_doublings = min(self._num_doublings + 1, _MAX_DOUBLINGS)
        self._resume_at = now + pause
        self.num_pauses += 1
        asyncio.get_running_loop().call_later(pause, self._admit)

    def _has_room(self) -> bool:
        return self._num_under_way < int(self._limit) and time.monotonic() >= self._resume_at

    def _leave(self) -> None:
        self._num_under_way -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room():
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_under_way += 1
                turn.set_result(None)


class Hedging:
    """Hedged requests. Belongs to one event loop; not thread-safe.

    Args:
        share: Second requests are at most this share of the first ones; 0 sends none.
        cost: Gives the expected duration of a request by its size.

    Attributes:
        num_hedges: Second requests so far.
    """

    def __init__(self, share: float, cost: RequestCost) -> None:
        self._share = share
        self._cost = cost
        self._saved = 0.0
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._num_seen = 0
        self._late_ratio = 0.0
        self.num_hedges = 0

    async def run(self, request: Callable[[], Coroutine[Any, Any, _Value]], num_bytes: int) -> _Value:
        """Run a request, and a second one beside it if it is late.

        Args:
            request: Starts the request, which must have no side effects.
            num_bytes: Bytes that it reads.

        Raises:
            Exception: The error of the later request, if both failed.
        """
        start = time.monotonic()
        self._saved = min(self._saved + self._share, _MAX_SAVED)
        expected_s = self._cost.seconds(num_bytes)
        delay_s = self._delay_s(expected_s)
        value = await (request() if delay_s is None else self._run_guarded(request, delay_s))
        self._note((time.monotonic() - start) / expected_s)
        return value

    def _delay_s(self, expected_s: float) -> float | None:
        """Return the delay after which a request is late; None while too few were measured."""
        if not self._share or self._num_seen < _ENOUGH:
            return None
        return max(_MIN_DELAY_S, _PATIENCE * self._late_ratio * expected_s)

    def _note(self, ratio: float) -> None:
        self._ratios.append(ratio)
        self._num_seen += 1
        if self._num_seen % _RENEWED_EVERY == 0 or self._num_seen == _ENOUGH:
            ordered = sorted(self._ratios)
            self._late_ratio = ordered[int(len(ordered) * _QUANTILE)]

    async def _run_guarded(
        self, request: Callable[[], Coroutine[Any, Any, _Value]], delay_s: float
    ) -> _Value:
        tasks = [asyncio.create_task(request())]
        try:
            done, _ = await asyncio.wait(tasks, timeout=delay_s)
            if not done and self._saved >= 1:
                self._saved -= 1
                self.num_hedges += 1
                tasks.append(asyncio.create_task(request()))
            return await _first_good(tasks)
        finally:
            for task in tasks:
                task.cancel()  # no effect on a finished task; the client closes the other's connection
            await asyncio.gather(*tasks, return_exceptions=True)


async def _first_good(tasks: list[asyncio.Task[_Value]]) -> _Value:
    """Return the value of the first task that has one; the error of a last one if none has."""
    pending = set(tasks)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        good = [task for task in done if task.exception() is None]
        if good or not pending:
            return (good or list(done))[0].result()


@dataclass(frozen=True, slots=True)
class _Version:
    """Identity and size of an object, as reported by its first read."""

    etag: str | None
    modified: str
    """Identifies the version if the server sends no ETag."""
    num_bytes: int


class Versions:
    """The first version seen of each object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Version] = OrderedDict()

    def __contains__(self, path: str) -> bool:
        return path in self._known

    def num_bytes(self, path: str) -> int | None:
        """Return the size of an object, if known."""
        known = self._known.get(path)
        return None if known is None else known.num_bytes

    def strong_etag(self, path: str) -> str | None:
        """Return the ETag to bind requests to; a weak one never matches (RFC 9110, 8.8.3.2)."""
        known = self._known.get(path)
        return None if known is None or known.etag is None or known.etag.startswith("W/") else known.etag

    def remember(self, path: str, etag: str | None, modified: object, num_bytes: int) -> int:
        """Record the first version of an object, or compare a later one with it; return its size.

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
    """Read operations of a remote store; its coroutines belong to one event loop.

    Args:
        client: Returns the client.
        versions: Versions of the store's objects.
        retrying: Retry policy and budget of the store.
        options: Settings of the store.
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
        """Request counts so far."""
        return RemoteCounts(
            num_requests=self._num_requests,
            num_bytes=self._num_bytes,
            num_retries=self._retrying.num_retries,
            num_hedges=self._hedging.num_hedges,
            num_pauses=self._admission.num_pauses,
        )

    async def bound(self, max_concurrency: int) -> None:
        """Change the limit on concurrent requests."""
        self._admission.bound(max_concurrency)

    async def fill(self, path: str, requests: Sequence[RangeRequest]) -> None:
        """Fill the buffers of some requests for one object."""
        # If the object is unknown, the first request runs alone: the others are bound to its version.
        first = 0 if path in self._versions else 1
        for request in requests[:first]:
            await self._fill(path, request)
        rest = requests[first:]
        if rest:
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
        """Read the start of an object of unknown size, in one request."""
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
        """Read a range, or the part of it that the object has."""

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
        """Send one request and check its response."""
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
                    "a body compressed in transit (Content-Encoding)",
                    max_attempts=_FEW_ATTEMPTS,
                )
            body = memoryview(await call_client(result.bytes_async))
        if body.nbytes != min(stop, size) - start:
            raise PassingFaultError("a truncated body")
        return body


def _short(path: str, start: int, stop: int) -> ShortReadError:
    return ShortReadError(
        f"{path} ends before byte {stop} of the range {start} to {stop}; verify the dataset and fetch "
        "the file again."
    )
