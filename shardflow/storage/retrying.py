"""When a request is tried again: how often, how long, and how many in all.

A fault that passes is retried with full jitter, so that a thousand ranks do not come back at once; within a
deadline, so that a wait ends; and within a budget, so that a store in trouble is not asked many times as
often as one in health.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from shardflow.configs import Bounds, check_fields
from shardflow.errors import StorageError

__all__ = ["PassingFaultError", "RetryPolicy", "Retrying"]

_Value = TypeVar("_Value")
_RANDOM: Final = secrets.SystemRandom()
# A retry costs as much as so many good requests earn.
_COST: Final = 10


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
