"""Write down where the threads of a rank are, without harm to a rank that still runs.

faulthandler reads the frames of other threads without the interpreter's lock. Where they run meanwhile it
follows pointers that they free, and the process dies of a segmentation fault. So a thread that has the lock
writes the stacks of all; only a process that cannot run Python any more has its threads read from outside of
the lock, on :data:`LAST_STACKS_SIGNAL`.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import traceback
from pathlib import Path
from typing import IO

from shardflow.errors import StorageError
from shardflow.storage.atomic import make_directories
from shardflow.training.watch.settings import LAST_STACKS_SIGNAL, MAIN_STACK_SIGNAL

__all__ = ["StacksFile"]


class StacksFile:
    """Where the stacks of a rank go.

    Has the two signals heard from now on, and a crash shown on standard error.

    Args:
        path: Of the file, which is appended to; standard error where it cannot be opened, because that the
            run folder cannot be written is the run's to say.
    """

    def __init__(self, path: Path) -> None:
        try:
            make_directories(path.parent)
            self._file: IO[str] = path.open("a", encoding="utf-8")
        except (OSError, StorageError):
            self._file = sys.stderr
        faulthandler.register(MAIN_STACK_SIGNAL, file=self._file, all_threads=False, chain=False)
        faulthandler.register(LAST_STACKS_SIGNAL, file=self._file, all_threads=True, chain=False)
        faulthandler.enable()

    def write(self) -> None:
        """Append the stacks of all threads, in faulthandler's order: the most recent call first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = []
        for ident, frame in sys._current_frames().items():
            lines.append(f"Thread {names.get(ident, 'unknown')} (most recent call first):")
            lines += [
                f'  File "{place.f_code.co_filename}", line {number} in {place.f_code.co_name}'
                for place, number in traceback.walk_stack(frame)
            ]
        self._file.write("\n".join([*lines, "", ""]))
        self._file.flush()
