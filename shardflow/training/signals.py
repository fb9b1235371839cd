"""A polite end: SIGTERM and SIGUSR1 ask the run to finish its step, write a checkpoint and stop.

Schedulers send one of them before they take a machine away. The handler only sets a flag; the ranks look at
it once a step, together, because a rank that stopped alone would hang the others. A repeated signal changes
nothing: under SLURM a process may get the same one from the scheduler and from torchrun.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

__all__ = ["STOP_SIGNALS", "StopRequest"]

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process has been asked to stop, and by what."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @property
    def is_set(self) -> bool:
        """A stop signal has arrived."""
        return self.signal_name is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the stop signals inside the block, then give them back; for the main thread only."""
        former = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
