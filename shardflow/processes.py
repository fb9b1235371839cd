"""Threads that the end of the process waits for, for a bounded time.

A daemon thread that runs while the interpreter goes down is ended by force as soon as it wants to go on in
Python. Inside a C++ library, as NumPy's ``unique`` and OpenCV are in part, that ends the whole process with
``terminate called without an active exception`` and SIGABRT: a run that did all its work has failed. And one
that is no daemon would keep a process alive for as long as a disk hangs. So our threads are daemons, whoever
starts one tells it to end, and the exit waits a while until it has.

Signals that all processes of a rank get, and that only the rank itself is to hear.

A scheduler signals every process of a job, torchrun the process group of a rank, a terminal its foreground
group. What a signal means the rank decides; a process beside it that ended by itself would take the rank with
it, in the middle of the step that the signal let it finish. Ignoring them from the first line of its own code
on is too late: Python and the imports before it take a second. So whoever starts such a process holds the
signals back while it starts, which the new one inherits until it says that it ignores them.
"""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

_EXIT_TIMEOUT_S: Final = 10.0
_KNOWN: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def wait_for_at_exit(thread: threading.Thread) -> threading.Thread:
    """Let the interpreter's exit wait for a daemon thread, at most 10 s for all of them together.

    Something that is closed at exit, by a finalizer made after this module was imported, must tell it to end.

    Returns:
        The thread.
    """
    _KNOWN.add(thread)
    return thread


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> bool:
    """Wait for threads, but for the calling one.

    Args:
        threads: Threads that were told to end; one that was not started counts as ended.
        timeout_s: For all of them together.

    Returns:
        Whether all have ended.
    """
    deadline = time.monotonic() + timeout_s
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


def waited_for() -> list[threading.Thread]:
    """Return the threads that run and that the exit would wait for."""
    return [thread for thread in threading.enumerate() if thread in _KNOWN]


def _wait() -> None:
    join_all(waited_for(), _EXIT_TIMEOUT_S)


# Finalizers run at exit from the newest to the oldest: those that end the threads come before this one, and
# so do the stores', which wake up whoever waits for a request.
weakref.finalize(_KNOWN, _wait)


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
