"""How many requests of a store are under way, and when none may begin.

A store in trouble says so (503 SlowDown, 429). One such answer among many good ones is noise, and its request
is simply tried again. Several in a row with nothing good between them are an overloaded store: then fewer
requests may run side by side, and all of them wait a while. Each good answer earns a part of a place back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from typing import Final

__all__ = ["Admission"]

_IN_A_ROW: Final = 4
_MAX_DOUBLINGS: Final = 4
_RANDOM: Final = secrets.SystemRandom()


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
