"""What the kernel says of processes and of the machine, from written files and from our own process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardflow.telemetry.process import (
    ProcessTimes,
    available_bytes,
    machine_bytes,
    num_processors,
    processor_s,
    pss_bytes,
)

pytestmark = pytest.mark.fast

_TICKS = os.sysconf("SC_CLK_TCK")


def write_process(proc: Path, pid: int, *, ticks: int = 0, delays_ns: dict[int, int] | None = None) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    # A program may be called anything, brackets and spaces included.
    (folder / "stat").write_text(
        f"{pid} (a) b (c) S 1 1 1 0 -1 4194560 9 9 9 9 {ticks} {ticks} 7 7 20 0 1 0 5"
    )
    for task, delay_ns in (delays_ns or {}).items():
        (folder / "task" / str(task)).mkdir(parents=True, exist_ok=True)
        (folder / "task" / str(task) / "schedstat").write_text(f"123456 {delay_ns} 42\n")


def test_processor_time_is_that_of_all_threads_in_either_mode(tmp_path: Path) -> None:
    write_process(tmp_path, 7, ticks=3 * _TICKS)
    assert processor_s(7, proc=tmp_path) == 6.0
    assert processor_s(8, proc=tmp_path) == 0.0


def test_memory_is_the_proportional_one(tmp_path: Path) -> None:
    write_process(tmp_path, 7)
    (tmp_path / "7" / "smaps_rollup").write_text(
        "00400000-7ffd rollup\nRss:   900 kB\nPss:    512 kB\nPss_Dirty:  9 kB\nShared_Clean: 1 kB\n"
    )
    assert pss_bytes(7, proc=tmp_path) == 512 * 1024
    assert pss_bytes(8, proc=tmp_path) == 0


def test_a_look_adds_what_came_since_the_last_one(tmp_path: Path) -> None:
    times = ProcessTimes(proc=tmp_path)
    write_process(tmp_path, 7, ticks=_TICKS, delays_ns={7: 1_000_000_000, 8: 500_000_000})
    times.update([7])
    assert (times.run_s, times.delay_s) == (2.0, 1.5)
    # One thread goes on, one has ended, one is new; so is a process.
    write_process(tmp_path, 7, ticks=2 * _TICKS, delays_ns={7: 1_250_000_000, 9: 250_000_000})
    for file in (tmp_path / "7" / "task" / "8").iterdir():
        file.unlink()
    write_process(tmp_path, 11, ticks=_TICKS, delays_ns={11: 1_000_000_000})
    times.update([7, 11])
    assert (times.run_s, times.delay_s) == (2.0 + 2.0 + 2.0, 1.5 + 0.5 + 1.0)
    times.update([7, 11, 12])
    assert (times.run_s, times.delay_s) == (6.0, 3.0)


def test_our_own_process_can_be_read() -> None:
    sum(range(3_000_000))
    times = ProcessTimes()
    times.update([os.getpid()])
    assert times.run_s > 0
    assert pss_bytes(os.getpid()) > 1 << 20


@pytest.mark.parametrize(
    ("limit", "use", "droppable", "expected"),
    [
        ("max", 1 << 30, 0, 8 << 30),  # no limit of the group's own: what the machine has
        (str(4 << 30), 3 << 30, 1 << 29, (1 << 30) + (1 << 29)),
        (str(64 << 30), 3 << 30, 0, 8 << 30),
        (str(1 << 30), 2 << 30, 0, 0),
    ],
)
def test_available_memory_is_the_least_of_machine_and_group(
    tmp_path: Path, limit: str, use: int, droppable: int, expected: int
) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    for folder in (proc, cgroup):
        folder.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemFree: 5 kB\nMemAvailable: {(8 << 30) // 1024} kB\n")
    (cgroup / "memory.max").write_text(limit + "\n")
    (cgroup / "memory.current").write_text(f"{use}\n")
    (cgroup / "memory.stat").write_text(f"anon 5\nfile 7\ninactive_file {droppable}\n")
    assert available_bytes(proc=proc, cgroup=cgroup) == expected


def test_this_machine_has_something() -> None:
    assert 0 < num_processors() <= (os.cpu_count() or 1)
    assert 0 < available_bytes() <= machine_bytes()
