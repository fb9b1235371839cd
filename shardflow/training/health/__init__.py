"""Health monitor of a run: which ranks are alive, which hang, and what each is doing.

Every rank has a small *monitor process* beside it (``side``), which shares a page of memory with it
(``heartbeat``), needs neither torch nor the rank's interpreter, and so notices what the rank cannot report
itself: that it was killed, is stopped, or holds the interpreter lock. The monitor processes of all ranks
report to that of rank 0, the *hub*, and the first fault is sent to every rank, which ends with a sentence
that names rank, host and phase instead of the traceback of a broken connection (docs/adr/0120). The run uses
``monitor``.
"""

from __future__ import annotations

from shardflow.training.health.heartbeat import HEALTH_FOLDER, Beat, Fault
from shardflow.training.health.monitor import HealthMonitor, RankHealthMonitor

__all__ = [
    "HEALTH_FOLDER",
    "Beat",
    "Fault",
    "HealthMonitor",
    "RankHealthMonitor",
]
