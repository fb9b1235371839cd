"""What one loader thread has to itself: scratch memory, and a note of what it is doing now."""

from __future__ import annotations

import time

from shardflow.loading.scratch import Scratch

__all__ = ["ThreadState"]


class ThreadState:
    """State of one thread. Only its own thread writes.

    Others may read the note at any time and see one consistent triple, because it is stored with one
    assignment: so a wait that takes too long can name what it waits for (contract S8).
    """

    __slots__ = ("_now", "scratch")

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._now = ("idle", "", time.monotonic())

    def enter(self, stage: str, place: str) -> None:
        """Say what begins now.

        Args:
            stage: ``plan``, ``index``, ``read``, ``check``, ``decode``, ``transform`` or ``idle``.
            place: Which shard and tier, such as ``"shard train-000003, tier local"``.
        """
        self._now = (stage, place, time.monotonic())

    def describe(self) -> str:
        """Say the stage, the place and for how long."""
        stage, place, since = self._now
        return f"stage {stage}{f' of {place}' if place else ''} for {time.monotonic() - since:.1f} s"

    def describe_busy(self) -> str:
        """Say what the thread is at; nothing while it has nothing to do."""
        return "" if self._now[0] == "idle" else self.describe()
