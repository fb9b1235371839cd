"""Signals that all processes of a rank get, and that only the rank itself is to hear.

A scheduler signals every process of a job, torchrun the process group of a rank, a terminal its foreground
group. What a signal means the rank decides; a process beside it that ended by itself would take the rank with
it, in the middle of the step that the signal let it finish. Ignoring them from the first line of its own code
on is too late: Python and the imports before it take a second. So whoever starts such a process holds the
signals back while it starts, which the new one inherits until it says that it ignores them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["group_signals_held_back", "ignore_group_signals"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def group_signals_held_back() -> Iterator[None]:
    """Start a process in the block that calls `ignore_group_signals`; this one hears of them after it."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def ignore_group_signals() -> None:
    """Ignore them from now on, those that came since the start included; for the main thread."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
