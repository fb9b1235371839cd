"""What processes took of their machine, as Linux's ``/proc`` says it: processor time, waits for it, memory.

Zeros where the kernel does not tell, and for a process that has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["ProcessTimes", "processor_s", "pss_bytes"]

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def processor_s(pid: int, *, proc: Path = _PROC) -> float:
    """Return the processor time of a process so far, all threads, in seconds."""
    text = _read(proc / str(pid) / "stat")
    # The name of the program comes second, in brackets, and may hold anything.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if len(fields) > 12 else 0.0


def pss_bytes(pid: int, *, proc: Path = _PROC) -> int:
    """Return the memory of a process, in which each shared page counts by its share.

    The kernel walks the process's page tables for it, milliseconds for one of many gigabytes.
    """
    for line in _read(proc / str(pid) / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


class ProcessTimes:
    """Processor time of processes, and how long their threads could have run and had no processor.

    Args:
        proc: Where the kernel tells it.

    Attributes:
        run_s: Seconds of processor time over all calls of `look`.
        delay_s: Seconds of waiting for a processor.
    """

    def __init__(self, *, proc: Path = _PROC) -> None:
        self.run_s = 0.0
        self.delay_s = 0.0
        self._proc = proc
        self._ran: dict[int, float] = {}
        self._waited: dict[tuple[int, str], float] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Add what came since the last look; the first one of a process adds all its life.

        Of a thread that has ended since, what it waited last is lost.
        """
        ran: dict[int, float] = {}
        waited: dict[tuple[int, str], float] = {}
        for pid in pids:
            ran[pid] = processor_s(pid, proc=self._proc)
            waited |= {(pid, task): waited_s for task, waited_s in self._delays(pid)}
        self.run_s += sum(max(0.0, now - self._ran.get(pid, 0.0)) for pid, now in ran.items())
        self.delay_s += sum(max(0.0, now - self._waited.get(task, 0.0)) for task, now in waited.items())
        self._ran, self._waited = ran, waited

    def _delays(self, pid: int) -> Iterable[tuple[str, float]]:
        folder = self._proc / str(pid) / "task"
        try:
            tasks = [entry.name for entry in folder.iterdir()]
        except OSError:
            return
        for task in tasks:
            # Time on a processor, time waiting for one, both in nanoseconds, and how often it got one.
            fields = _read(folder / task / "schedstat").split()
            if len(fields) == 3:
                yield task, int(fields[1]) / 1e9


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
