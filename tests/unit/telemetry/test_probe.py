"""The probe beside the loop: it sees who keeps the interpreter, and ends when it is told to."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from shardflow.telemetry.process import ProcessFacts, ProcessProbe

pytestmark = pytest.mark.fast


def facts_while(work: Callable[[], object]) -> ProcessFacts:
    """What a probe says of a second or more in which this thread did nothing but `work`."""
    probe = ProcessProbe(every_s=0.2)
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            work()
        return probe.take()
    finally:
        probe.close()


def idle() -> None:
    time.sleep(0.1)


def run_python() -> int:
    return sum(number % 7 for number in range(20_000))


def call_that_keeps_the_interpreter() -> list[int]:
    return sorted(range(500_000, 0, -1))


def test_python_that_runs_all_the_time_and_a_call_that_does_not_let_go_are_seen() -> None:
    free = facts_while(idle).gil_wait_share
    # Not how long each waits: a busy machine may take the thread its processor at any time.
    assert facts_while(run_python).gil_wait_share > max(0.6, free)
    assert facts_while(call_that_keeps_the_interpreter).gil_wait_share > max(0.6, free)
    assert free < 0.6


def test_processor_time_and_memory_of_other_processes_count() -> None:
    code = "import sys\nbig = bytearray(b'1') * (64 << 20)\nprint('up', flush=True)\nsum(iter(int, 1))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            alone = ProcessProbe(every_s=0.1)
            both = ProcessProbe(lambda: [child.pid], every_s=0.1)
            deadline = time.monotonic() + 60
            cpu_s, seen = 0.0, both.take()
            while (cpu_s < 0.05 or not seen.pss_bytes) and time.monotonic() < deadline:
                time.sleep(0.2)
                seen = both.take()
                cpu_s += seen.cpu_s
            own = alone.take()
            alone.close()
            both.close()
        finally:
            child.kill()
    assert cpu_s >= 0.05
    assert seen.pss_bytes >= own.pss_bytes + (32 << 20)


def test_a_closed_probe_leaves_no_thread() -> None:
    before = threading.active_count()
    probe = ProcessProbe()
    assert threading.active_count() == before + 1
    probe.close()
    assert threading.active_count() == before
