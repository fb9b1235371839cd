"""A second request for one that is late: the one that answers first is taken, the other one is dropped.

Late means later than 95 of 100 requests before it, each measured by what its size lets expect. The second
requests are at most a fixed share of all, so that a store that is slow as a whole is not asked twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from shardflow.storage.requests import RequestCost

__all__ = ["Hedging"]

_Value = TypeVar("_Value")

_QUANTILE: Final = 0.95
_WINDOW: Final = 256
_ENOUGH: Final = 24
_RENEWED_EVERY: Final = 16
# The distribution's own edge is not lateness: a request may take as long again.
_PATIENCE: Final = 2.0
_MIN_DELAY_S: Final = 0.02
_MAX_SAVED: Final = 8.0


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
