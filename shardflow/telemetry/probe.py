"""A thread that watches the process from beside: how long the interpreter lets it wait, and its memory.

Nothing here is on the way of a step. Every 20 ms the thread wakes up and sees how late it is: a thread that
wants Python's interpreter while others keep it waits for them, up to the interpreter's switch interval (5 ms)
for one that runs Python, or for as long as a call into a library does not let go of it. What the thread
waited for a processor, which the kernel tells, is not counted.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shardflow.telemetry.machine import available_bytes
from shardflow.telemetry.process import ProcessTimes, pss_bytes

__all__ = ["ProcessFacts", "ProcessProbe"]

_PERIOD_S: Final = 0.02
_HELD_S: Final = 1e-3
"""A wait for the interpreter that is longer found it held; a shorter one is the timer's."""
_LOOKS: Final = 5
"""Looks at processor times for one call of `take`."""
_JOIN_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """What a process and its loader processes took in a stretch of time, see `RankNumbers`."""

    cpu_s: float = 0.0
    runnable_s: float = 0.0
    gil_wait_share: float = 0.0
    pss_bytes: int = 0
    available_bytes: int = 0
    """Of the machine or its cgroup."""


class ProcessProbe:
    """Watches this process and those that load for it, from the first moment to `close`.

    Args:
        children: Returns the process ids of others that belong to this one.
        every_s: How often `take` is called, about: memory is read as often, times five times.
    """

    def __init__(self, children: Callable[[], Sequence[int]] | None = None, *, every_s: float = 5.0) -> None:
        self._children = children or (lambda: ())
        self._every_s = every_s
        self._lock = threading.Lock()
        self._held_s = 0.0
        self._probed_s = 0.0
        self._pss_bytes = 0
        self._available_bytes = available_bytes()
        self._times = ProcessTimes()
        self._times.look(self._pids())
        now = time.monotonic()
        # When, and how much processor time and waiting for a processor until then.
        self._seen = self._used = (now, self._times.run_s, self._times.delay_s)
        self._rates = (0.0, 0.0)
        self._taken_at = now
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shardflow-probe", daemon=True)
        self._thread.start()

    def take(self) -> ProcessFacts:
        """Return what was taken since the last call.

        No file is read for it: times are those of the looks that the thread took meanwhile, brought to the
        length of the stretch, and memory is as it was seen last.
        """
        now = time.monotonic()
        with self._lock:
            held_s, self._held_s = self._held_s, 0.0
            probed_s, self._probed_s = self._probed_s, 0.0
            passed_s = self._seen[0] - self._used[0]
            if passed_s > 0:
                run_s, delay_s = self._seen[1] - self._used[1], self._seen[2] - self._used[2]
                self._rates, self._used = (run_s / passed_s, delay_s / passed_s), self._seen
            length_s, self._taken_at = now - self._taken_at, now
            return ProcessFacts(
                cpu_s=self._rates[0] * length_s,
                runnable_s=self._rates[1] * length_s,
                gil_wait_share=held_s / probed_s if probed_s else 0.0,
                pss_bytes=self._pss_bytes,
                available_bytes=self._available_bytes,
            )

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _pids(self) -> list[int]:
        return [os.getpid(), *self._children()]

    def _run(self) -> None:
        times_at = memory_at = time.monotonic()
        with _OwnDelay() as delay:
            while not self._is_closed:
                now = time.monotonic()
                if now >= times_at:
                    times_at = now + self._every_s / _LOOKS
                    self._look()
                    if now >= memory_at:
                        memory_at = now + self._every_s
                        self._pss_bytes = sum(map(pss_bytes, self._pids()))
                        self._available_bytes = available_bytes()
                    delay.since()
                self._probe(delay)

    def _look(self) -> None:
        self._times.look(self._pids())
        with self._lock:
            self._seen = (time.monotonic(), self._times.run_s, self._times.delay_s)

    def _probe(self, delay: _OwnDelay) -> None:
        """Sleep, and see for how long others kept the interpreter when it was wanted again.

        Whether it is held at the end of a sleep says so of the sleep, on average; so each probe counts for
        its sleep and its wait, as held or as free.
        """
        began = time.perf_counter()
        # Not a wait for an event: that one needs a lock and the interpreter twice.
        time.sleep(_PERIOD_S)
        probed_s = time.perf_counter() - began
        waited_s = probed_s - _PERIOD_S - delay.since()
        with self._lock:
            self._probed_s += probed_s
            if waited_s > _HELD_S and _has_gil():
                self._held_s += probed_s


class _OwnDelay:
    """How long the calling thread could have run and had no processor."""

    def __init__(self) -> None:
        self._file = -1
        self._seen_s = 0.0

    def __enter__(self) -> _OwnDelay:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1
        self.since()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def since(self) -> float:
        """Return the seconds since the last call; 0 where the kernel does not tell."""
        if self._file < 0:
            return 0.0
        fields = os.pread(self._file, 64, 0).split()
        now_s = int(fields[1]) / 1e9 if len(fields) == 3 else self._seen_s
        before_s, self._seen_s = self._seen_s, now_s
        return now_s - before_s


def _has_gil() -> bool:
    """Whether this interpreter runs one thread at a time."""
    asked: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return asked is None or asked()
