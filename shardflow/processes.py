"""Process hygiene: daemon threads joined at exit, and helper processes that ignore group signals.

A daemon thread that is still inside a C++ library (NumPy, OpenCV) when the interpreter shuts down aborts the
process with SIGABRT; a non-daemon thread would keep it alive for as long as a disk hangs. So all threads are
daemons, their owners stop them, and exit waits a bounded time for them.

A scheduler or terminal signals a whole process group, but only the rank decides what a signal means. A
helper process killed by it would take the rank down in the middle of a step, and ignoring the signals in
the helper's own code is too late: Python starts for a second before that. So the parent blocks them while it
starts the helper, which inherits the mask until it ignores them.
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
_NAMES: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS: Final = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


def wait_for_at_exit(thread: threading.Thread) -> threading.Thread:
    """Register a daemon thread to be joined at exit, within 10 s for all of them together.

    Its owner must stop it at exit, by a finalizer created after this module was imported.

    Returns:
        The thread.
    """
    _KNOWN.add(thread)
    return thread


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> bool:
    """Join threads, except the calling one.

    Args:
        threads: Threads that were asked to stop; one that was not started counts as stopped.
        timeout_s: For all of them together.

    Returns:
        Whether all have stopped.
    """
    deadline = time.monotonic() + timeout_s
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


def waited_for() -> list[threading.Thread]:
    """Return the running threads that exit would wait for."""
    return [thread for thread in threading.enumerate() if thread in _KNOWN]


def _wait() -> None:
    join_all(waited_for(), _EXIT_TIMEOUT_S)


# Finalizers run newest first: those that stop the threads run before this one, as do those of stores, which
# wake up threads that wait for a request.
weakref.finalize(_KNOWN, _wait)


@contextmanager
def group_signals_held_back() -> Iterator[None]:
    """Block group signals while a child that calls `ignore_group_signals` starts; deliver them afterwards."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def handler_kept(number: int) -> Iterator[None]:
    """Have a signal handled afterwards as it was before, whatever the body installs: Ray takes SIGTERM."""
    former = signal.getsignal(number)
    try:
        yield
    finally:
        if former is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, former)


def ignore_group_signals() -> None:
    """Ignore group signals, including those pending since the start; call it in the main thread."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
