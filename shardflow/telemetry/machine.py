"""What of this machine the processes of a job may use: processors and memory, quotas counted."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["available_bytes", "machine_bytes", "num_processors"]

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
