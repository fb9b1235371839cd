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

import asyncio
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
# A retry costs as much as so many good requests earn.
_COST: Final = 10
_STATUS: Final = re.compile(r"status code: (\d{3})")
_PASSING: Final = {"408", "425", "429", "500", "502", "503", "504"}
_REFUSALS: Final = {"429", "503"}
# What the client says of an answer whose head does not fit the request: "Requested 0..10, got 5..15".
_OTHER_ANSWER: Final = re.compile(
    r"Requested \d+\.\.\d+, got|CONTENT_RANGE|Content-Range|MissingContentLength"
)
# An error page of something between may come once or twice; a server without ranges answers so for ever.
_FEW_ATTEMPTS: Final = 3
# The client builds no request for an endpoint of plain HTTP that the environment names for a cloud.
_PLAIN_HTTP: Final = "builder error"
# Asked for the role of the machine, as the last place where credentials may be found.
_METADATA_SERVERS: Final = ("169.254.169.254", "metadata.google.internal")
_NO_SUCH_RANGE: Final = "416"
_NOT_IMPLEMENTED: Final = "501"
_LENGTH_REQUIRED: Final = "411"
_READING: Final = "reading"


class PassingFaultError(StorageError):
    """A fault that may pass: a 5xx or 429, a reset, a timeout, a body that was cut on its way.

    Attributes:
        max_attempts: Tries after which it will not pass; the policy's where it is None.
        is_refusal: Whether the store says that it is asked too much.
    """

    def __init__(self, message: str, *, max_attempts: int | None = None, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.max_attempts = max_attempts
        self.is_refusal = is_refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How long one request goes on in the face of faults that may pass."""

    max_attempts: Annotated[int, Bounds(1)] = 12
    """Tries of one request, the first one included."""
    deadline_s: Annotated[float, Bounds(0.001)] = 180.0
    """From the first try on, waits and all; a read that is under way then is given up."""
    first_wait_s: Annotated[float, Bounds(0.0)] = 0.1
    """Bound on the first wait; it doubles with each try. A wait is drawn evenly from 0 to its bound."""
    max_wait_s: Annotated[float, Bounds(0.0)] = 15.0
    budget: Annotated[int, Bounds(0)] = 256
    """Retries that all requests of a store in a process share; ten requests that go well earn one back."""

    def __post_init__(self) -> None:
        check_fields(self)


class Retrying:
    """Runs requests under a policy and keeps the budget. Safe for many threads.

    Attributes:
        num_retries: Tries beyond the first, of all requests so far.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._budget = policy.budget * _COST
        self._lock = threading.Lock()
        self.num_retries = 0

    def __call__(self, what: str, attempt: Callable[[int], _Value]) -> _Value:
        """Run a request until it succeeds or fails for good, in the calling thread.

        Args:
            what: What is done to which object, for the message: ``"writing shards/a.tar"``.
            attempt: The request; takes the number of the try, from 0, and raises `PassingFaultError` for
                what may pass. Every other error ends it.

        Raises:
            StorageError: The fault did not pass within tries, deadline and budget.
        """
        start, number = time.monotonic(), 0
        while True:
            try:
                value = attempt(number)
            except PassingFaultError as fault:
                wait_s = self._next_wait_s(what, fault, number, start)
            else:
                self._earn()
                return value
            time.sleep(wait_s)
            number += 1

    async def run(self, what: str, attempt: Callable[[], Awaitable[_Value]]) -> _Value:
        """Run a request as `__call__` does, in an event loop; a try that passes the deadline is cancelled.

        Raises:
            StorageError: The fault did not pass within tries, deadline and budget.
        """
        start, number = time.monotonic(), 0
        while True:
            try:
                async with asyncio.timeout(max(0.0, start + self._policy.deadline_s - time.monotonic())):
                    value = await attempt()
            except TimeoutError:
                wait_s = self._next_wait_s(what, PassingFaultError("a timeout"), number, start)
            except PassingFaultError as fault:
                wait_s = self._next_wait_s(what, fault, number, start)
            else:
                self._earn()
                return value
            await asyncio.sleep(wait_s)
            number += 1

    def _earn(self) -> None:
        with self._lock:
            self._budget = min(self._budget + 1, self._policy.budget * _COST)

    def _next_wait_s(self, what: str, fault: PassingFaultError, number: int, start: float) -> float:
        """Take a retry from the budget, and draw the wait before it.

        Raises:
            StorageError: There is none.
        """
        policy = self._policy
        passed_s = time.monotonic() - start
        wait_s = _RANDOM.uniform(0, min(policy.max_wait_s, policy.first_wait_s * 2**number))
        with self._lock:
            if number + 1 >= min(policy.max_attempts, fault.max_attempts or policy.max_attempts):
                limit = "no tries left"
            elif passed_s + wait_s >= policy.deadline_s:
                limit = f"deadline {policy.deadline_s:g} s"
            elif self._budget < _COST:
                limit = "the store's retry budget is spent"
            else:
                self._budget -= _COST
                self.num_retries += 1
                return wait_s
        raise StorageError(
            f"{what} must succeed, got {fault.message} in the last of {number + 1} tries "
            f"({passed_s:.1f} s; {limit}); is the store up and reachable?"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestCost:
    """What a request costs: a wait, and then its bytes at the rate of one place."""

    latency_s: Annotated[float, Bounds(0.0, 60.0)] = 0.02
    """From a request to its first byte."""
    place_bytes_per_s: Annotated[float, Bounds(1.0)] = 12.5e6
    """Rate of one connection while all of them are busy: the link by the number of concurrent requests."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def gap_bytes(self) -> int:
        """Bytes that come in the time that a request of its own would wait."""
        return int(self.latency_s * self.place_bytes_per_s)

    def seconds(self, num_bytes: int) -> float:
        """Return how long a request of so many bytes should take."""
        return self.latency_s + num_bytes / self.place_bytes_per_s + 1e-6


@dataclass(slots=True)
class RangeRequest:
    """One ranged request, ``[start, stop)``, and which parts of its body go where."""

    start: int
    stop: int
    pieces: list[tuple[int, memoryview]] = field(default_factory=list)
    """Offset in the object, and the bytes to fill from there."""

    @property
    def num_bytes(self) -> int:
        """Bytes asked for, those of gaps with them."""
        return self.stop - self.start

    def deliver(self, body: memoryview) -> None:
        """Copy the body to where it belongs; it must have ``stop - start`` bytes."""
        for offset, target in self.pieces:
            at = offset - self.start
            target[:] = body[at : at + target.nbytes]


def plan_requests(
    ranges: Sequence[ByteRange], buffers: Sequence[memoryview], *, gap_bytes: int, request_bytes: int
) -> list[RangeRequest]:
    """Plan the requests that fill buffers with ranges, in any order and overlapping.

    Args:
        ranges: What is asked for.
        buffers: One writable buffer per range, of its size.
        gap_bytes: Largest gap that is read rather than left out.
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
    stretch: list[tuple[int, memoryview]] = []
    stop = 0
    for offset, buffer in spans:
        if stretch and offset > stop + gap_bytes:
            requests += _cut(stretch, stop, request_bytes)
            stretch = []
        stop = max(stop, offset + buffer.nbytes) if stretch else offset + buffer.nbytes
        stretch.append((offset, buffer))
    return requests + _cut(stretch, stop, request_bytes) if stretch else requests


def _cut(stretch: list[tuple[int, memoryview]], stop: int, request_bytes: int) -> list[RangeRequest]:
    """Make as few requests as may be of one stretch, of equal size; a gap at an edge is left out."""
    start = stretch[0][0]
    part_bytes = -(-(stop - start) // -(-(stop - start) // request_bytes))
    parts: list[RangeRequest] = []
    by_number: dict[int, RangeRequest] = {}
    for offset, buffer in stretch:
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
    """How a remote store asks."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    cost: RequestCost = field(default_factory=RequestCost)
    """Decides which gaps are read over, and when a request is late."""
    timeout_s: Annotated[float, Bounds(0.001)] = 60.0
    """Of one request, its body with it; what passes it is tried again."""
    stall_timeout_s: Annotated[float, Bounds(0.001)] = 10.0
    """Longest time without a byte before a request is given up and tried again."""
    request_bytes: Annotated[int, Bounds(1)] = 8 << 20
    """Largest ranged request; a larger read becomes several, side by side."""
    max_concurrency: Annotated[int, Bounds(1)] = 16
    """Reading requests of one process under way at once; fewer while the store says that it is overloaded."""
    pause_s: Annotated[float, Bounds(0.0)] = 2.0
    """First pause of all requests when a store refuses several in a row (503 SlowDown, 429)."""
    hedge_share: Annotated[float, Bounds(0.0, 1.0)] = 0.02
    """Second requests for late ones, as a share of all; 0 sends none."""
    part_bytes: Annotated[int, Bounds(5 << 20)] = 16 << 20
    """Objects above this are uploaded in parts of it."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteCounts:
    """What a remote store did in this process."""

    num_requests: int
    """Reading requests, second ones and tries again with them."""
    num_bytes: int
    """Of the bodies that were taken."""
    num_retries: int
    num_hedges: int
    num_pauses: int
    """How often the store was left alone because it was overloaded."""


class LengthRequiredError(StorageError):
    """The server wants the length of a body that a request does not have (411): it cannot copy as asked."""


@contextmanager
def translated(action: str, path: str) -> Iterator[None]:
    """Translate what obstore raises.

    Args:
        action: What is done: ``"reading"``, ``"writing"``, ``"listing"``.
        path: The object, as the dataset names it.

    Raises:
        NotFoundError: There is no such object.
        AlreadyExistsError: A conditional write met an object.
        ObjectChangedError: A conditional read met another version.
        ShortReadError: The range begins behind the end of the object.
        PassingFaultError: It may pass.
        StorageError: Anything else.
    """
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, StorageError):
            raise
        raise NotFoundError(
            f"{path} must exist in the store, found nothing; is the address right, and the dataset whole?"
        ) from None
    except exceptions.AlreadyExistsError:
        raise AlreadyExistsError(
            f"{path} must be new, got an object that stands already; objects are written once."
        ) from None
    except exceptions.PreconditionError:
        raise changed(path) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise StorageError(
            f"{action} {path} must be permitted, got a refusal of the store; give credentials in the "
            "environment (AWS_*, GOOGLE_*, AZURE_*) that allow it."
        ) from None
    except exceptions.NotSupportedError:
        if action == _READING:
            raise _other_answer() from None
        raise _not_supported(action, path) from None
    except exceptions.BaseError as error:
        raise _of_text(str(error), action, path) from None


def changed(path: str) -> ObjectChangedError:
    """Make the error that an object is no longer the one that was read before."""
    return ObjectChangedError(
        f"{path} must stay as it was first read, got another version (ETag); objects are written once: put "
        "back the one that the manifest names (`shardflow verify` tells), or start again with a new version."
    )


def _of_text(text: str, action: str, path: str) -> StorageError:
    found = _STATUS.search(text)
    status = found[1] if found else ""
    if _PLAIN_HTTP in text:
        return StorageError(
            f"{action} {path} must go to an https:// endpoint, got one of plain HTTP, which is refused for "
            "gs:// and az://; correct the endpoint in GOOGLE_* or AZURE_*."
        )
    if any(server in text for server in _METADATA_SERVERS):
        return PassingFaultError(
            "no credentials (none in the environment or a profile, and no role of this machine; set AWS_*, "
            "GOOGLE_* or AZURE_*)",
            max_attempts=_FEW_ATTEMPTS,
        )
    if status == _NO_SUCH_RANGE:
        return ShortReadError(
            f"{path} must hold the range asked for, got the end of the object; verify the dataset."
        )
    if status == _LENGTH_REQUIRED:
        return LengthRequiredError(f"{action} {path} must be taken without a body, got HTTP status {status}.")
    if status == _NOT_IMPLEMENTED:
        return _not_supported(action, path)
    if status in _PASSING:
        return PassingFaultError(f"HTTP status {status}", is_refusal=status in _REFUSALS)
    if status:
        return StorageError(
            f"{action} {path} must succeed, got HTTP status {status}; check address, region and permissions."
        )
    if _OTHER_ANSWER.search(text):
        return _other_answer()
    if "timed out" in text or "TimedOut" in text:
        return PassingFaultError("a timeout")
    return PassingFaultError("a broken connection")


def _other_answer() -> PassingFaultError:
    return PassingFaultError(
        "another answer than the range asked for (an error page, a wrong Content-Range, or a server without "
        "ranges, which shardflow needs)",
        max_attempts=_FEW_ATTEMPTS,
    )


def _not_supported(action: str, path: str) -> StorageError:
    return StorageError(
        f"{action} {path} must be a thing the store can do, got its refusal; shardflow needs ranged reads "
        "(HTTP 206) and conditional writes (If-None-Match)."
    )
