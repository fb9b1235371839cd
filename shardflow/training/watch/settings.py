"""What a side is started with, and where the watch writes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

__all__ = ["FAULTS_FILE", "HEALTH_FOLDER", "LAST_STACKS_SIGNAL", "MAIN_STACK_SIGNAL", "SideSettings"]

HEALTH_FOLDER: Final = "health"
"""In the run folder: faults, and the stacks of the ranks when one came."""
FAULTS_FILE: Final = "faults.jsonl"
"""A line for each fault."""
MAIN_STACK_SIGNAL: Final = signal.SIGUSR2
"""A person may send it to a rank at any time: the stack of the main thread is written."""
LAST_STACKS_SIGNAL: Final = signal.SIGRTMIN + 3
"""The side sends it to a rank that does not answer: the stacks of all threads are written, at a risk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideSettings:
    """What a side is started with, as JSON."""

    rank: int
    pid: int
    host: str
    board: int
    """Descriptor of the rank's page."""
    hang_s: float
    lost_s: float
    tick_s: float
    folder: str
    """The run's folder ``health``."""
    listen: str
    """Address that the hub listens on; empty in the others."""
    token: str
    """Known to this run's processes only."""
    kill_after_s: float
    """A rank that does not end by itself after a fault is killed then; it tries to end sooner."""
