"""The probe beside the loop: it sees who keeps the interpreter, and ends when it is told to."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from shardflow.telemetry.process import ProcessProbe

pytestmark = pytest.mark.fast


def share_while(work: Callable[[], object], *, is_right: Callable[[float], bool]) -> float:
    """The share of GIL waits while this thread does nothing but `work`, over the first second that fits.

    A busy machine may keep the probe's thread from running for a whole second, so a second that does not
    fit is followed by another one; a probe that is wrong never fits.
    """
    probe = ProcessProbe(every_s=0.2)
    try:
        for _ in range(30):
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                work()
            share = probe.take().gil_wait_share
            if is_right(share):
                break
        return share
    finally:
        probe.close()


def idle() -> None:
    time.sleep(0.1)


def run_python() -> int:
    return sum(number % 7 for number in range(20_000))


def call_that_keeps_the_interpreter() -> list[int]:
    return sorted(range(500_000, 0, -1))


@pytest.mark.parametrize("work", [run_python, call_that_keeps_the_interpreter])
def test_python_that_runs_all_the_time_and_a_call_that_does_not_let_go_are_seen(
    work: Callable[[], object],
) -> None:
    assert share_while(work, is_right=lambda share: share > 0.6) > 0.6


def test_a_thread_that_sleeps_holds_nothing() -> None:
    assert share_while(idle, is_right=lambda share: share < 0.6) < 0.6


def test_processor_time_and_memory_of_other_processes_count() -> None:
    code = "import sys\nbig = bytearray(b'1') * (64 << 20)\nprint('up', flush=True)\nsum(iter(int, 1))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            alone = ProcessProbe(every_s=0.1)
            both = ProcessProbe(lambda: [child.pid], every_s=0.1)
            deadline = time.monotonic() + 300
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
