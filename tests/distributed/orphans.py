"""Processes that outlive the ranks which started them: none may."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["adopt_orphans", "end_what_is_left"]

_PR_SET_CHILD_SUBREAPER: Final = 36
_PATIENCE_S: Final = 300.0
"""A watch that nobody talks to any more lingers for 5 s."""


def adopt_orphans() -> None:
    """Make this process the parent of whatever its children leave behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_what_is_left() -> list[str]:
    """Return the command lines of children that go on long after all ranks have ended; they are killed."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        # Whatever a rank had started is this process's child now, see `adopt_orphans`.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        listings = Path("/proc/self/task").glob("*/children")
        left = [int(pid) for listing in listings for pid in listing.read_text().split()]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    texts = []
    for pid in left:
        texts.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-200:])
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return texts
