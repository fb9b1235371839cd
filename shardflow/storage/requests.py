"""Remote requests: retry policy, request cost, coalescing of ranges, and translated errors.

A transient fault is retried with full jitter, so that a thousand ranks do not return at once; within a
deadline, so that every wait ends; and within a budget, so that a store in trouble is not flooded with
retries.

The cost of a request is declared (`RequestCost`): its latency is time in which its connection carries
nothing. A gap between two ranges that is cheaper to read than another request is read and dropped; a read
larger than a request should be is split into equal parts, because several connections carry more than one.

Error texts of the client quote URLs, keys and response bodies, so only the HTTP status is kept. Transient
errors become `PassingFaultError`; all others are raised at once.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar

from shardflow.config import Bounds, check_fields
from shardflow.errors import (
    AlreadyExistsError,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
    StorageError,
)
from shardflow.storage.store import ByteRange

_Value = TypeVar("_Value")
_RANDOM: Final = secrets.SystemRandom()
# Successful requests that earn one retry.
_COST: Final = 10
_STATUS: Final = re.compile(r"status code: (\d{3})")
_PASSING: Final = {"408", "425", "429", "500", "502", "503", "504"}
_REFUSALS: Final = {"429", "503"}
# Client message for a response whose headers do not match the request: "Requested 0..10, got 5..15".
_MISMATCH: Final = re.compile(r"Requested \d+\.\.\d+, got|CONTENT_RANGE|Content-Range|MissingContentLength")
# A proxy's error page may come once or twice; a server without range support always responds like this.
_FEW_ATTEMPTS: Final = 3
# The client refuses a plain HTTP endpoint that the environment sets for a cloud.
_PLAIN_HTTP: Final = "builder error"
# Queried for the role of the machine, the last possible source of credentials.
_METADATA_SERVERS: Final = ("169.254.169.254", "metadata.google.internal")
# Nothing takes the connection, by what the client says of it.
_UNREACHED: Final = {
    "ConnectionRefused": "a refused connection",
    "dns error": "a name that is not known here",
    "HostUnreachable": "a host that cannot be reached",
    "NetworkUnreachable": "a network that cannot be reached",
}
_NO_SUCH_RANGE: Final = "416"
_NOT_IMPLEMENTED: Final = "501"
_LENGTH_REQUIRED: Final = "411"
_READING: Final = "reading"


class PassingFaultError(StorageError):
    """A transient fault: a 5xx or 429, a reset, a timeout, a truncated body.

    Attributes:
        max_attempts: Attempts after which it counts as permanent; None for those of the policy.
        is_refusal: Whether the store reports overload.
        is_unreached: Whether nothing was there to take the connection, as at a wrong address.
    """

    def __init__(
        self,
        message: str,
        *,
        max_attempts: int | None = None,
        is_refusal: bool = False,
        is_unreached: bool = False,
    ) -> None:
        super().__init__(message)
        self.max_attempts = max_attempts
        self.is_refusal = is_refusal
        self.is_unreached = is_unreached


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Limits on the retries of transient faults."""

    max_attempts: Annotated[int, Bounds(1)] = 12
    """Attempts of one request, including the first."""
    deadline_s: Annotated[float, Bounds(0.001)] = 180.0
    """Time from the first attempt, including waits; a read still running then is abandoned."""
    first_wait_s: Annotated[float, Bounds(0.0)] = 0.1
    """Upper limit of the first wait, doubled with each attempt; waits are drawn uniformly below the limit."""
    max_wait_s: Annotated[float, Bounds(0.0)] = 15.0
    budget: Annotated[int, Bounds(0)] = 256
    """Retries shared by all requests of a store in a process; ten successful requests earn one back."""

    def __post_init__(self) -> None:
        check_fields(self)


class Retrying:
    """Runs requests under a retry policy and keeps its budget. Thread-safe.

    A store that has answered before is waited for as the policy says. Where none has, and nothing takes the
    connection, the address is probably wrong: three attempts are enough to say so.

    Attributes:
        num_retries: Attempts beyond the first, of all requests so far.

    Args:
        policy: The limits.
        sleep: Waits for so many seconds between two attempts in a thread.
        server: Names the server for the message: ``https://host:port``.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        sleep: Callable[[float], object] = time.sleep,
        *,
        server: Callable[[], str] = str,
    ) -> None:
        self._policy = policy
        self._sleep = sleep
        self._server = server
        self._budget = policy.budget * _COST
        self._lock = threading.Lock()
        self._has_answered = False
        self.num_retries = 0

    def __call__(self, what: str, attempt: Callable[[int], _Value]) -> _Value:
        """Run a request in the calling thread until it succeeds or fails permanently.

        Args:
            what: Action and object for the message: ``"writing shards/a.tar"``.
            attempt: The request; takes the number of the attempt, from 0, and raises `PassingFaultError`
                for transient faults. Every other error is final.

        Raises:
            StorageError: The fault persisted beyond attempts, deadline or budget.
        """
        start, number = time.monotonic(), 0
        while True:
            try:
                value = attempt(number)
            except PassingFaultError as fault:
                wait_s = self._next_wait_s(what, fault, number, start)
            except StorageError:
                self._has_answered = True
                raise
            else:
                self._earn()
                return value
            self._sleep(wait_s)
            number += 1

    async def run(self, what: str, attempt: Callable[[], Awaitable[_Value]]) -> _Value:
        """Run a request as `__call__` does, in an event loop; the deadline cancels a running attempt.

        Raises:
            StorageError: The fault persisted beyond attempts, deadline or budget.
        """
        import asyncio  # here, because options of remote stores are read where no event loop runs

        start, number = time.monotonic(), 0
        while True:
            try:
                async with asyncio.timeout(max(0.0, start + self._policy.deadline_s - time.monotonic())):
                    value = await attempt()
            except TimeoutError:
                wait_s = self._next_wait_s(what, PassingFaultError("a timeout"), number, start)
            except PassingFaultError as fault:
                wait_s = self._next_wait_s(what, fault, number, start)
            except StorageError:
                self._has_answered = True
                raise
            else:
                self._earn()
                return value
            await asyncio.sleep(wait_s)
            number += 1

    def _earn(self) -> None:
        self._has_answered = True
        with self._lock:
            self._budget = min(self._budget + 1, self._policy.budget * _COST)

    def _next_wait_s(self, what: str, fault: PassingFaultError, number: int, start: float) -> float:
        """Take a retry from the budget, and draw the wait before it.

        Raises:
            StorageError: No retry is left.
        """
        policy = self._policy
        passed_s = time.monotonic() - start
        wait_s = _RANDOM.uniform(0, min(policy.max_wait_s, policy.first_wait_s * 2**number))
        self._has_answered |= fault.is_refusal  # an answer, too
        is_first_contact = fault.is_unreached and not self._has_answered
        most = min(policy.max_attempts, fault.max_attempts or policy.max_attempts)
        with self._lock:
            if is_first_contact and number + 1 >= min(most, _FEW_ATTEMPTS):
                limit = f"nothing answers at {self._server() or 'the address'}: is it right?"
            elif number + 1 >= most:
                limit = "no attempts left"
            elif passed_s + wait_s >= policy.deadline_s:
                limit = f"deadline {policy.deadline_s:g} s"
            elif self._budget < _COST:
                limit = "the store's retry budget is spent"
            else:
                self._budget -= _COST
                self.num_retries += 1
                return wait_s
        raise StorageError(
            f"{what} failed: {fault.message} in the last of {number + 1} attempts "
            f"({passed_s:.1f} s; {limit}); check that the store is up and reachable."
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestCost:
    """Declared cost of a request: a latency, then its bytes at the rate of one connection."""

    latency_s: Annotated[float, Bounds(0.0, 60.0)] = 0.02
    """From a request to its first byte."""
    place_bytes_per_s: Annotated[float, Bounds(1.0)] = 12.5e6
    """Rate of one connection while all are busy: the link rate divided by the concurrent requests."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def gap_bytes(self) -> int:
        """Bytes that arrive within the latency of another request."""
        return int(self.latency_s * self.place_bytes_per_s)

    def seconds(self, num_bytes: int) -> float:
        """Return the expected duration of a request of so many bytes."""
        return self.latency_s + num_bytes / self.place_bytes_per_s + 1e-6


@dataclass(slots=True)
class RangeRequest:
    """One range request, ``[start, stop)``, and the destinations of the parts of its body."""

    start: int
    stop: int
    pieces: list[tuple[int, memoryview]] = field(default_factory=list)
    """Offset in the object, and the buffer to fill from there."""

    @property
    def num_bytes(self) -> int:
        """Requested bytes, including gaps."""
        return self.stop - self.start

    def deliver(self, body: memoryview) -> None:
        """Copy the body, of ``stop - start`` bytes, to its destinations."""
        for offset, target in self.pieces:
            at = offset - self.start
            target[:] = body[at : at + target.nbytes]


def plan_requests(
    ranges: Sequence[ByteRange], buffers: Sequence[memoryview], *, gap_bytes: int, request_bytes: int
) -> list[RangeRequest]:
    """Plan the requests that fill buffers with ranges, in any order and overlapping.

    Args:
        ranges: The wanted ranges.
        buffers: One writable buffer per range, of its size.
        gap_bytes: Largest gap that is read rather than skipped.
        request_bytes: Largest request.
    """
    spans = sorted(
        (
            (span.offset, buffer.cast("B"))
            for span, buffer in zip(ranges, buffers, strict=True)
            if span.num_bytes
        ),
        key=lambda pair: pair[0],
    )
    requests: list[RangeRequest] = []
    run: list[tuple[int, memoryview]] = []
    stop = 0
    for offset, buffer in spans:
        if run and offset > stop + gap_bytes:
            requests += _cut(run, stop, request_bytes)
            run = []
        stop = max(stop, offset + buffer.nbytes) if run else offset + buffer.nbytes
        run.append((offset, buffer))
    return requests + _cut(run, stop, request_bytes) if run else requests


def _cut(run: list[tuple[int, memoryview]], stop: int, request_bytes: int) -> list[RangeRequest]:
    """Split a run of ranges into as few requests of equal size as possible, without gaps at the edges."""
    start = run[0][0]
    part_bytes = -(-(stop - start) // -(-(stop - start) // request_bytes))
    parts: list[RangeRequest] = []
    by_number: dict[int, RangeRequest] = {}
    for offset, buffer in run:
        position, left = offset, buffer
        while left.nbytes:
            number = (position - start) // part_bytes
            num_bytes = min(left.nbytes, start + (number + 1) * part_bytes - position)
            part = by_number.get(number)
            if part is None:
                part = by_number[number] = RangeRequest(position, position)
                parts.append(part)
            part.pieces.append((position, left[:num_bytes]))
            part.stop = max(part.stop, position + num_bytes)
            left, position = left[num_bytes:], position + num_bytes
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """Sizes, limits and timeouts of the requests of a remote store."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    cost: RequestCost = field(default_factory=RequestCost)
    """Decides which gaps are read, and when a request is late."""
    timeout_s: Annotated[float, Bounds(0.001)] = 60.0
    """Of one request, including its body; a request that exceeds it is retried."""
    stall_timeout_s: Annotated[float, Bounds(0.001)] = 10.0
    """Longest time without a byte before a request is abandoned and retried."""
    request_bytes: Annotated[int, Bounds(1)] = 8 << 20
    """Largest range request; a larger read becomes several concurrent ones."""
    max_concurrency: Annotated[int, Bounds(1)] = 16
    """Concurrent read requests of one process; fewer while the store reports overload."""
    pause_s: Annotated[float, Bounds(0.0)] = 2.0
    """First pause of all requests after a store refused several in a row (503 SlowDown, 429)."""
    hedge_share: Annotated[float, Bounds(0.0, 1.0)] = 0.02
    """Limit on hedged (second) requests, as a share of all; 0 sends none."""
    part_bytes: Annotated[int, Bounds(5 << 20)] = 16 << 20
    """Larger objects are uploaded in parts of this size."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteCounts:
    """Request counts of a remote store in this process."""

    num_requests: int
    """Read requests, including hedges and retries."""
    num_bytes: int
    """Bytes of the accepted bodies."""
    num_retries: int
    num_hedges: int
    num_pauses: int
    """Pauses because the store was overloaded."""


class LengthRequiredError(StorageError):
    """The server requires a Content-Length on a request without a body (411), so it cannot copy."""


@contextmanager
def translated(action: str, path: str) -> Iterator[None]:
    """Translate the exceptions of obstore.

    Args:
        action: The action: ``"reading"``, ``"writing"``, ``"listing"``.
        path: The object, as the dataset names it.

    Raises:
        NotFoundError: There is no such object.
        AlreadyExistsError: A conditional write met an object.
        ObjectChangedError: A conditional read met another version.
        ShortReadError: The range begins behind the end of the object.
        PassingFaultError: The fault is transient.
        StorageError: Anything else.
    """
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, StorageError):
            raise
        raise NotFoundError(
            f"{path} does not exist in the store; check the URL, and that the dataset is complete."
        ) from None
    except exceptions.AlreadyExistsError:
        raise AlreadyExistsError(
            f"{path} must be new, but it already exists; objects are written once."
        ) from None
    except exceptions.PreconditionError:
        raise changed(path) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise StorageError(
            f"{action} {path} was refused by the store; give credentials in the environment (AWS_*, "
            "GOOGLE_*, AZURE_*) that permit it."
        ) from None
    except exceptions.NotSupportedError:
        if action == _READING:
            raise _mismatched() from None
        raise _not_supported(action, path) from None
    except exceptions.BaseError as error:
        raise _of_text(str(error), action, path) from None


def changed(path: str) -> ObjectChangedError:
    """Make the error of an object that changed since it was first read."""
    return ObjectChangedError(
        f"{path} has changed since it was first read (ETag); objects are written once: restore the version "
        "that the manifest names (check with `shardflow verify`), or start again with a new dataset version."
    )


def _of_text(text: str, action: str, path: str) -> StorageError:
    found = _STATUS.search(text)
    status = found[1] if found else ""
    if _PLAIN_HTTP in text:
        return StorageError(
            f"{action} {path} must go to an https:// endpoint, but the environment sets one of plain HTTP, "
            "which is refused for gs:// and az://; correct GOOGLE_* or AZURE_*."
        )
    if any(server in text for server in _METADATA_SERVERS):
        return PassingFaultError(
            "no credentials (none in the environment or a profile, and no role of this machine; set AWS_*, "
            "GOOGLE_* or AZURE_*)",
            max_attempts=_FEW_ATTEMPTS,
        )
    if status == _NO_SUCH_RANGE:
        return ShortReadError(f"{path} ends before the requested range; verify the dataset.")
    if status == _LENGTH_REQUIRED:
        return LengthRequiredError(
            f"{action} {path} failed: the server requires a Content-Length (HTTP status {status})."
        )
    if status == _NOT_IMPLEMENTED:
        return _not_supported(action, path)
    if status in _PASSING:
        return PassingFaultError(f"HTTP status {status}", is_refusal=status in _REFUSALS)
    if status:
        return StorageError(
            f"{action} {path} failed: HTTP status {status}; check address, region and permissions."
        )
    if _MISMATCH.search(text):
        return _mismatched()
    if "timed out" in text or "TimedOut" in text:
        return PassingFaultError("a timeout")
    for sign, name in _UNREACHED.items():
        if sign in text:
            return PassingFaultError(name, is_unreached=True)
    return PassingFaultError("a broken connection")


def _mismatched() -> PassingFaultError:
    return PassingFaultError(
        "a response other than the requested range (an error page, a wrong Content-Range, or a server "
        "without ranges, which shardflow needs)",
        max_attempts=_FEW_ATTEMPTS,
    )


def _not_supported(action: str, path: str) -> StorageError:
    return StorageError(
        f"{action} {path} is not supported by the store; shardflow needs ranged reads (HTTP 206) and "
        "conditional writes (If-None-Match)."
    )
