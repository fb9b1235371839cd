"""Process probe: CPU and memory limits of the machine, and what this process and its children use of them.

`ProcessProbe` runs a thread that wakes every 20 ms and measures how late it is. A thread that needs the GIL
waits for the interpreter's switch interval (5 ms) if another one runs Python, or until a library call
returns; time spent waiting for a CPU, which the kernel reports, is not counted. Nothing here runs on the
path of a step. Numbers come from ``/proc`` and cgroups; they are 0 where the kernel does not report them or
the process has ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
_USES: Final = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Of cgroup v2 and of v1: limit, use, and what of the use the kernel gives up when asked."""
_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PERIOD_S: Final = 0.02
_HELD_S: Final = 1e-3
"""A wait for the interpreter that is longer found it held; a shorter one is the timer's."""
_LOOKS: Final = 5
"""Looks at processor times for one call of `take`."""
_JOIN_S: Final = 5.0


def num_processors() -> float:
    """Return the processors that this process may use: of its affinity, and of its cgroup's quota."""
    try:
        processors = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not on this system
        processors = float(os.cpu_count() or 1)
    quota = _read(_CGROUP / "cpu.max").split()  # "200000 100000" or "max 100000"
    if len(quota) == 2 and quota[0] != "max":
        return min(processors, int(quota[0]) / int(quota[1]))
    v1 = [_read(_CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if all(v1) and int(v1[0]) > 0:
        return min(processors, int(v1[0]) / int(v1[1]))
    return processors


@cache
def machine_bytes() -> int:
    """Return the memory that processes of this machine may fill: of the machine, or its cgroup if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        text = _read(_CGROUP / path)
        if text.isdigit():  # "max" is none; cgroup v1 writes about 2^63 for none
            total = min(total, int(text))
    return total


def available_bytes(*, proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int:
    """Return the memory that can be filled before somebody is killed or swapped out.

    That of the machine, or what is left of the cgroup's if less; pages of files that the kernel can drop
    count as free. All of the machine's where the kernel does not tell.
    """
    free = _number_of(_read(proc / "meminfo"), "MemAvailable:") * 1024 or machine_bytes()
    for limit, use, stat, name in _USES:
        most, now = _read(cgroup / limit), _read(cgroup / use)
        if most.isdigit() and now.isdigit() and int(most) < 1 << 60:
            droppable = _number_of(_read(cgroup / stat), name)
            free = min(free, max(0, int(most) - int(now) + droppable))
    return free


def _number_of(text: str, name: str) -> int:
    """Return the number behind a name at the start of a line; 0 where there is none."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def processor_s(pid: int, *, proc: Path = _PROC) -> float:
    """Return the processor time of a process so far, all threads, in seconds."""
    text = _read_process(proc / str(pid) / "stat")
    # The name of the program comes second, in brackets, and may hold anything.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if len(fields) > 12 else 0.0


def pss_bytes(pid: int, *, proc: Path = _PROC) -> int:
    """Return the memory of a process, in which each shared page counts by its share.

    The kernel walks the process's page tables for it, milliseconds for one of many gigabytes.
    """
    for line in _read_process(proc / str(pid) / "smaps_rollup").splitlines():
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
            fields = _read_process(folder / task / "schedstat").split()
            if len(fields) == 3:
                yield task, int(fields[1]) / 1e9


def _read_process(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """What a process and its loader processes took in a stretch of time, see `RankNumbers`."""

    cpu_s: float = 0.0
    runnable_s: float = 0.0
    gil_wait_share: float = 0.0
    pss_bytes: int = 0
    available_bytes: int = 0
    """Of the machine or its cgroup."""


class ProcessProbe:
    """Watches this process and those that load for it, from the first moment to `close`.

    Args:
        children: Returns the process ids of others that belong to this one.
        every_s: How often `take` is called, about: memory is read as often, times five times.
    """

    def __init__(self, children: Callable[[], Sequence[int]] | None = None, *, every_s: float = 5.0) -> None:
        self._children = children or (lambda: ())
        self._every_s = every_s
        self._lock = threading.Lock()
        self._held_s = 0.0
        self._probed_s = 0.0
        self._pss_bytes = 0
        self._available_bytes = available_bytes()
        self._times = ProcessTimes()
        self._times.look(self._pids())
        now = time.monotonic()
        # When, and how much processor time and waiting for a processor until then.
        self._seen = self._used = (now, self._times.run_s, self._times.delay_s)
        self._rates = (0.0, 0.0)
        self._taken_at = now
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shardflow-probe", daemon=True)
        self._thread.start()

    def take(self) -> ProcessFacts:
        """Return what was taken since the last call.

        No file is read for it: times are those of the looks that the thread took meanwhile, brought to the
        length of the stretch, and memory is as it was seen last.
        """
        now = time.monotonic()
        with self._lock:
            held_s, self._held_s = self._held_s, 0.0
            probed_s, self._probed_s = self._probed_s, 0.0
            passed_s = self._seen[0] - self._used[0]
            if passed_s > 0:
                run_s, delay_s = self._seen[1] - self._used[1], self._seen[2] - self._used[2]
                self._rates, self._used = (run_s / passed_s, delay_s / passed_s), self._seen
            length_s, self._taken_at = now - self._taken_at, now
            return ProcessFacts(
                cpu_s=self._rates[0] * length_s,
                runnable_s=self._rates[1] * length_s,
                gil_wait_share=held_s / probed_s if probed_s else 0.0,
                pss_bytes=self._pss_bytes,
                available_bytes=self._available_bytes,
            )

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _pids(self) -> list[int]:
        return [os.getpid(), *self._children()]

    def _run(self) -> None:
        times_at = memory_at = time.monotonic()
        with _OwnDelay() as delay:
            while not self._is_closed:
                now = time.monotonic()
                if now >= times_at:
                    times_at = now + self._every_s / _LOOKS
                    self._look()
                    if now >= memory_at:
                        memory_at = now + self._every_s
                        self._pss_bytes = sum(map(pss_bytes, self._pids()))
                        self._available_bytes = available_bytes()
                    delay.since()
                self._probe(delay)

    def _look(self) -> None:
        self._times.look(self._pids())
        with self._lock:
            self._seen = (time.monotonic(), self._times.run_s, self._times.delay_s)

    def _probe(self, delay: _OwnDelay) -> None:
        """Sleep, and see for how long others kept the interpreter when it was wanted again.

        Whether it is held at the end of a sleep says so of the sleep, on average; so each probe counts for
        its sleep and its wait, as held or as free.
        """
        began = time.perf_counter()
        # Not a wait for an event: that one needs a lock and the interpreter twice.
        time.sleep(_PERIOD_S)
        probed_s = time.perf_counter() - began
        waited_s = probed_s - _PERIOD_S - delay.since()
        with self._lock:
            self._probed_s += probed_s
            if waited_s > _HELD_S and _has_gil():
                self._held_s += probed_s


class _OwnDelay:
    """How long the calling thread could have run and had no processor."""

    def __init__(self) -> None:
        self._file = -1
        self._seen_s = 0.0

    def __enter__(self) -> _OwnDelay:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1
        self.since()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def since(self) -> float:
        """Return the seconds since the last call; 0 where the kernel does not tell."""
        if self._file < 0:
            return 0.0
        fields = os.pread(self._file, 64, 0).split()
        now_s = int(fields[1]) / 1e9 if len(fields) == 3 else self._seen_s
        before_s, self._seen_s = self._seen_s, now_s
        return now_s - before_s


def _has_gil() -> bool:
    """Whether this interpreter runs one thread at a time."""
    asked: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return asked is None or asked()
