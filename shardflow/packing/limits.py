"""What a packing process may take: memory, processor time, file size, open files.

A process sets its limits on itself before it imports a decoder, so that every byte of foreign code runs under
them; the hard memory limit cannot be raised again. The job has its own deadline per task besides: a sleeping
process uses no processor time.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["PROCESS_ENVIRONMENT", "ChildLimits", "end_with"]

_PR_SET_PDEATHSIG: Final = 1

PROCESS_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        # One thread: blosc2 gives other bytes with more, and thread pools reserve address space.
        "BLOSC_NTHREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "MKL_NUM_THREADS": "1",
        "NUMEXPR_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # glibc would give a freed slice back to the kernel at once, and the next one pay for its pages again
        # (docs/adr/0090). 32 MiB is the largest threshold that it takes; up to 128 MiB are kept.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TOP_PAD_": str(4 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    }
)
"""What a packing process is started with, beside the environment of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildLimits:
    """Limits of one packing process."""

    memory_bytes: int
    """Address space (RLIMIT_AS)."""
    task_s: float
    """Processor time of one task, rounded up to seconds (RLIMIT_CPU, moved on before each task)."""
    file_bytes: int
    """Largest file that it may write (RLIMIT_FSIZE)."""
    open_files: int = 256
    """Open descriptors (RLIMIT_NOFILE)."""

    def apply(self) -> None:
        """Put the calling process under the limits, for good; processor time starts with `start_task`."""
        _bound(resource.RLIMIT_AS, self.memory_bytes)
        _bound(resource.RLIMIT_FSIZE, self.file_bytes)
        _bound(resource.RLIMIT_NOFILE, self.open_files)
        # A core file would hold images and identifiers.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self.start_task()

    def start_task(self) -> None:
        """Give the calling process the processor time of one more task.

        Past it the kernel sends SIGXCPU, which ends the process even inside a decoder that never returns.
        """
        usage = resource.getrusage(resource.RUSAGE_SELF)
        soft = math.ceil(usage.ru_utime + usage.ru_stime + self.task_s) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(
            resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )


def _bound(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def end_with(parent_pid: int) -> None:
    """End the calling process when its parent dies, even by SIGKILL (Linux), and leave signals to the parent.

    A terminal's Ctrl-C and a scheduler's SIGTERM reach the whole process group: the job decides when its
    processes end, or a death by signal would look like a study's fault.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)  # the parent died before the call above
