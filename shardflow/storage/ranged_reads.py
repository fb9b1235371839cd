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
# The distribution's own edge is not lateness: a request may take as long again.
_PATIENCE: Final = 2.0
_MIN_DELAY_S: Final = 0.02
_MAX_SAVED: Final = 8.0
_MAX_VERSIONS_KEPT: Final = 1 << 16
# An answer of another kind than asked for may be the error page of something between; it does not come twice.
_FEW_ATTEMPTS: Final = 3


class Admission:
    """Places for requests, first come, first served. Belongs to one event loop; not for several threads.

    Args:
        max_concurrency: Requests under way at once in health.
        pause_s: First pause of an overloaded store; it doubles while the overload lasts, four times at most.
            A pause is drawn between its half and its whole, so that ranks do not come back together.

    Attributes:
        num_pauses: How often the store was left alone.
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
        """How many requests may be under way now."""
        return int(self._limit)

    def bound(self, max_concurrency: int) -> None:
        """Change how many requests are under way at once in health; those that are too many end first.

        A store that is being spared stays spared: its limit goes down with the bound, and up by good answers.
        """
        is_spared = self._limit < self._most
        self._limit = min(self._limit, max_concurrency) if is_spared else float(max_concurrency)
        self._most = max_concurrency
        self._admit()

    async def __aenter__(self) -> None:
        """Wait for a place."""
        if not self._waiting and self._has_room():
            self._num_under_way += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled in one breath
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def succeeded(self) -> None:
        """Note a good answer."""
        self._num_in_a_row = 0
        self._num_doublings = 0
        self._limit = min(float(self._most), self._limit + 1 / self._limit)

    def was_refused(self) -> None:
        """Note an answer that says the store is overloaded."""
        now = time.monotonic()
        if now < self._resume_at:
            return  # of a request that began before the pause
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
    """Belongs to one event loop; not for several threads.

    Args:
        share: Second requests are at most this share of the first ones; 0 sends none.
        cost: What is expected of a request by its size.

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
            request: Makes the request; must be without effect but its value.
            num_bytes: What it reads.

        Raises:
            Exception: What the request raised, if both failed; that of the later one.
        """
        start = time.monotonic()
        self._saved = min(self._saved + self._share, _MAX_SAVED)
        expected_s = self._cost.seconds(num_bytes)
        delay_s = self._delay_s(expected_s)
        value = await (request() if delay_s is None else self._run_guarded(request, delay_s))
        self._note((time.monotonic() - start) / expected_s)
        return value

    def _delay_s(self, expected_s: float) -> float | None:
        """Return when a request of that expectation is late; None while too little is known to tell."""
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
                task.cancel()  # one that is done does not mind; the client closes the other's connection
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
