"""Threads that the end of the process waits for, for a bounded time.

A daemon thread that runs while the interpreter goes down is ended by force as soon as it wants to go on in
Python. Inside a C++ library, as NumPy's ``unique`` and OpenCV are in part, that ends the whole process with
``terminate called without an active exception`` and SIGABRT: a run that did all its work has failed. And one
that is no daemon would keep a process alive for as long as a disk hangs. So our threads are daemons, whoever
starts one tells it to end, and the exit waits a while until it has.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import Final

__all__ = ["join_all", "wait_for_at_exit", "waited_for"]

_EXIT_TIMEOUT_S: Final = 10.0
_KNOWN: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


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
