"""How far long work is, said in lines: what a log gets where a terminal would get a bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TextIO

__all__ = ["LINE_EVERY_S", "Pace", "time_left"]

LINE_EVERY_S: Final = 10.0
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600


def time_left(done: int, total: int, elapsed_s: float) -> str:
    """Say how long the rest takes if it goes on like this: ``, about 4 min left``.

    Returns:
        The words with the comma that joins them to a sentence; empty while nothing is done, or all of it.
    """
    if not 0 < done < total:
        return ""
    left_s = elapsed_s / done * (total - done)
    if left_s < _MINUTE_S:
        return f", about {max(1, round(left_s))} s left"
    if left_s < _HOUR_S:
        return f", about {round(left_s / _MINUTE_S)} min left"
    return f", about {left_s / _HOUR_S:.1f} h left"


class Pace:
    """A line every ten seconds, so that short work says nothing and long work is never silent."""

    def __init__(self, label: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            label: What is being done, such as ``verifying shards``.
            stream: Where lines go.
            clock: Seconds that never go back.
        """
        self._label = label
        self._stream = stream
        self._clock = clock
        self._started_s = self._said_s = clock()

    def advance(self, done: int, total: int) -> None:
        """Note how much is done and how much there is; a line comes if it is time for one."""
        now_s = self._clock()
        if now_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now_s
        rest = time_left(done, total, now_s - self._started_s)
        self._stream.write(f"{self._label}: {done} of {total}{rest}\n")
        self._stream.flush()
