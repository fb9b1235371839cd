"""Process probe: CPU and memory limits of the machine, and what this process and its children use of them.

`ProcessProbe` runs a thread that wakes every 20 to 100 ms and measures how late it is: each time costs a step
on a busy processor up to 0.1 ms, so that longer intervals are probed less often. A thread that needs the GIL
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
_MEMORY_FILES: Final = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Of cgroup v2 and v1: limit, usage, and the file and key of the part of the usage that is reclaimable."""
_PROC: Final = Path("/proc")
_READ_NUM_BYTES: Final = 1 << 16
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PROBES_PER_INTERVAL: Final = 50
_SHORTEST_PERIOD_S: Final = 0.02
_LONGEST_PERIOD_S: Final = 0.1
_HELD_S: Final = 1e-3
"""A longer wait after a sleep means that the GIL was held; a shorter one is timer inaccuracy."""
_UPDATES_PER_INTERVAL: Final = 5
"""Updates of CPU times per call of `take`."""
_JOIN_S: Final = 5.0


def num_processors() -> float:
    """Return the processors that this process may use, by its affinity and its cgroup's quota."""
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
    """Return the memory of the machine in bytes, or of its cgroup if less."""
    if not hasattr(os, "sysconf"):  # Windows: the least that a machine has on which one trains
        return 4 << 30
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, *_ in _MEMORY_FILES:
        text = _read(_CGROUP / limit)
        if text.isdigit():  # no limit is "max", in cgroup v1 about 2^63
            total = min(total, int(text))
    return total


def available_bytes(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return the memory that can be allocated before the kernel kills or swaps.

    The available memory of the machine, or the rest of its cgroup if less; reclaimable file pages count as
    available. All memory of the machine if the kernel does not report it.
    """
    free = _number_of(_read(proc / "meminfo"), "MemAvailable:") * 1024 or machine_bytes()
    for limit, use, stat, name in _MEMORY_FILES:
        most, now = _read(cgroup / limit), _read(cgroup / use)
        if most.isdigit() and now.isdigit() and int(most) < 1 << 60:
            droppable = _number_of(_read(cgroup / stat), name)
            free = min(free, max(0, int(most) - int(now) + droppable))
    return free


def _number_of(text: str, name: str) -> int:
    """Return the number after a name at the start of a line; 0 if there is none."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _read(path: Path | str) -> str:
    """Return the text of a kernel file; empty if it does not exist or its process has ended."""
    # Without the layers of a file object: there is a file for each thread.
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        parts = []
        while part := os.read(descriptor, _READ_NUM_BYTES):
            parts.append(part)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return b"".join(parts).decode("ascii", "replace").strip()


def processor_s(pid: int, *, proc: Path = _PROC) -> float:
    """Return the CPU time of a process so far, all threads, in seconds."""
    text = _read(proc / str(pid) / "stat")
    # The second field, the program name in parentheses, may contain anything.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if len(fields) > 12 else 0.0


def pss_bytes(pid: int, *, proc: Path = _PROC) -> int:
    """Return the proportional set size of a process, in bytes.

    The kernel walks the page tables for it, which takes milliseconds for a process of many gigabytes.
    """
    return _number_of(_read(proc / str(pid) / "smaps_rollup"), "Pss:") * 1024


class ProcessTimes:
    """CPU time of processes, and the time that their threads were runnable but had no processor.

    Args:
        proc: The proc file system.

    Attributes:
        run_s: Seconds of CPU time over all calls of `update`.
        delay_s: Seconds of waiting for a processor.
    """

    def __init__(self, *, proc: Path = _PROC) -> None:
        self.run_s = 0.0
        self.delay_s = 0.0
        self._proc = proc
        self._ran: dict[int, float] = {}
        self._waited: dict[tuple[int, str], float] = {}

    def update(self, pids: Iterable[int]) -> None:
        """Add the time since the last call, for a new process since its start.

        The last waits of a thread that has ended in the meantime are lost.
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
        folder = f"{self._proc}/{pid}/task"
        try:
            tasks = os.listdir(folder)  # noqa: PTH208 - without an object for each
        except OSError:
            return
        for task in tasks:
            # Nanoseconds running, nanoseconds runnable but waiting, and the number of time slices.
            fields = _read(f"{folder}/{task}/schedstat").split()
            if len(fields) == 3:
                yield task, int(fields[1]) / 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """Resource usage of a process and its loader processes over some time; see `RankNumbers`."""

    cpu_s: float = 0.0
    runnable_s: float = 0.0
    gil_wait_share: float = 0.0
    pss_bytes: int = 0
    available_bytes: int = 0
    """Available memory of the machine or its cgroup."""


class ProcessProbe:
    """Monitor of this process and its loader processes, from its creation to `close`.

    Args:
        children: Returns the process ids of the loader processes.
        every_s: Approximate time between calls of `take`: memory is read once in it, CPU times five times,
            and the GIL is probed up to fifty times.
    """

    def __init__(self, children: Callable[[], Sequence[int]] | None = None, *, every_s: float = 5.0) -> None:
        self._children = children or (lambda: ())
        self._every_s = every_s
        self._period_s = min(max(every_s / _PROBES_PER_INTERVAL, _SHORTEST_PERIOD_S), _LONGEST_PERIOD_S)
        self._lock = threading.Lock()
        self._held_s = 0.0
        self._probed_s = 0.0
        self._pss_bytes = 0
        self._available_bytes = available_bytes()
        self._times = ProcessTimes()
        self._times.update(self._pids())
        now = time.monotonic()
        # Time of the last update, and CPU time and waiting for a processor until then.
        self._seen = self._used = (now, self._times.run_s, self._times.delay_s)
        self._rates = (0.0, 0.0)
        self._taken_at = now
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shardflow-probe", daemon=True)
        self._thread.start()

    def take(self) -> ProcessFacts:
        """Return the resource usage since the last call.

        Reads no file: CPU times are the rates between the thread's updates times the length of the interval,
        and memory is the latest reading.
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
        """Stop the thread."""
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
                    times_at = now + self._every_s / _UPDATES_PER_INTERVAL
                    self._update()
                    if now >= memory_at:
                        memory_at = now + self._every_s
                        self._pss_bytes = sum(map(pss_bytes, self._pids()))
                        self._available_bytes = available_bytes()
                    delay.since()
                self._probe(delay)

    def _update(self) -> None:
        self._times.update(self._pids())
        with self._lock:
            self._seen = (time.monotonic(), self._times.run_s, self._times.delay_s)

    def _probe(self, delay: _OwnDelay) -> None:
        """Sleep, and measure how long other threads held the GIL afterwards.

        On average, the GIL is held during a sleep as often as at its end, so each probe counts its whole
        duration as held or as free.
        """
        began = time.perf_counter()
        # Not an event wait, which takes a lock and the GIL twice.
        time.sleep(self._period_s)
        probed_s = time.perf_counter() - began
        waited_s = probed_s - self._period_s - delay.since()
        with self._lock:
            self._probed_s += probed_s
            if waited_s > _HELD_S and _has_gil():
                self._held_s += probed_s


class _OwnDelay:
    """Time that the calling thread was runnable but had no processor."""

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
        """Return the seconds since the last call; 0 if the kernel does not report them."""
        if self._file < 0:
            return 0.0
        fields = os.pread(self._file, 64, 0).split()
        now_s = int(fields[1]) / 1e9 if len(fields) == 3 else self._seen_s
        before_s, self._seen_s = self._seen_s, now_s
        return now_s - before_s


def _has_gil() -> bool:
    """Return whether this interpreter runs one thread at a time."""
    is_enabled: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is None or is_enabled()
