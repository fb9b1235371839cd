"""Who is alive, who hangs, and what each rank is at: the watch over a run.

Every rank has a small process beside it, the *side* (``side``), which shares a page of memory with it
(``page``), needs neither torch nor the rank's interpreter, and so notices what the rank cannot say itself:
that it was killed, is stopped, or holds the interpreter. The sides of all ranks report to that of rank 0
(``judge`` decides, ``lines`` carries), and the first fault is told to every rank, which ends with a sentence
that names rank, host and phase instead of a broken connection's traceback (docs/adr/0120).

``rank`` is what the run talks to.
"""

from __future__ import annotations

from shardflow.training.health.heartbeat import HEALTH_FOLDER, Beat, Fault
from shardflow.training.health.monitor import HealthMonitor, NoHealthMonitor, RankHealthMonitor

__all__ = [
    "HEALTH_FOLDER",
    "Beat",
    "Fault",
    "HealthMonitor",
    "NoHealthMonitor",
    "RankHealthMonitor",
]
