"""How a job that can be gone on with is stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["interruptible"]


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM (a scheduler's way) end the job as Ctrl-C does; a second signal does not disturb it."""

    def stop(*_: Any) -> NoReturn:
        for number in stopping:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    stopping = (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, stop) for number in stopping}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
