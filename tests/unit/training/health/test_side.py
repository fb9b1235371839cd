"""Real sides over real processes: ranks that die, stop, hold the interpreter, fail, or end well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.health import ranks

DEADLINE_S = 300.0
REPOSITORY = Path(__file__).resolve().parents[4]


class Rank:
    """A process of ``ranks.py``; what it says is read a line at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank ended without a word"
        return json.loads(line)

    def told(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        code = self.process.wait(DEADLINE_S)
        assert self.process.stderr is not None
        return code, self.process.stderr.read()


@contextmanager
def start(folder: Path, num_ranks: int = 2) -> Iterator[list[Rank]]:
    """Ranks that know each other, each in the phase "computing"."""
    folder.mkdir(exist_ok=True)
    found: list[Rank] = []
    try:
        for rank in range(num_ranks):
            process = subprocess.Popen(
                [sys.executable, "-Wignore", "-m", ranks.__name__, str(rank), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY,
            )
            found.append(Rank(process))
        port = found[0].says()["port"]
        for rank_process in found[1:]:
            rank_process.told({"port": port})
            rank_process.says()
        wait_for_connections(port, num_ranks - 1)
        yield found
    finally:
        for rank_process in found:
            for stream in (rank_process.process.stdin, rank_process.process.stdout):
                assert stream is not None
                stream.close()
            rank_process.process.kill()
            rank_process.process.wait()
            assert rank_process.process.stderr is not None
            rank_process.process.stderr.close()


def wait_for_connections(port: int, number: int) -> None:
    """Wait until so many sides have reached the hub; what they report is then on its way."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if sum(columns[1].endswith(f":{port:04X}") and columns[3] == "01" for columns in lines) >= number:
            return
        time.sleep(0.02)
    pytest.fail("the sides do not reach the hub")


def no_side_is_left(folder: Path) -> bool:
    """Sides end soon after their ranks, however those ended."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
        if not any(str(folder).encode() in line and b"health.side" in line for line in lines):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_is_killed_is_named_to_the_others(tmp_path: Path, victim: int) -> None:
    with start(tmp_path, 3) as found:
        found[victim].process.send_signal(signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            code, text = found[rank].end()
            assert code == 1
            assert f"rank {victim} ended without an error" in text
            assert "step 7, computing" in text
        assert no_side_is_left(tmp_path)
    if victim:
        (line,) = (tmp_path / "health" / "faults.jsonl").read_text().splitlines()
        assert json.loads(line)["rank"] == victim


def test_rank_that_hangs_is_named_with_all_stacks_and_ranks_that_end_well_are_no_fault(
    tmp_path: Path,
) -> None:
    """One that a signal has stopped, one that holds the interpreter's lock, and three of which none hangs."""
    stopped, held, sound = (tmp_path / name for name in ("stopped", "held", "sound"))
    with start(stopped) as of_stopped, start(held) as of_held, start(sound, 3) as of_sound:
        of_stopped[1].process.send_signal(signal.SIGSTOP)
        of_held[1].told({"hold": True})
        for found, kind in (
            (of_stopped, "has been stopped by a signal"),
            (of_held, "has shown no sign of its interpreter"),
        ):
            code, text = found[0].end()
            assert code == 1
            assert f"rank 1 {kind}" in text
            found[1].end()
        # By now longer than any of these may show no pulse.
        for rank in (1, 0, 2):  # the hub before another one
            of_sound[rank].told({"bye": "finished"})
            assert of_sound[rank].end() == (0, "")
        assert no_side_is_left(tmp_path)
    assert not (sound / "health" / "faults.jsonl").exists()
    for run in (stopped, held):
        for rank in (0, 1):
            assert "most recent call first" in (run / "health" / f"rank-{rank:05d}.stacks").read_text()
    assert "hold_the_interpreter" in (held / "health" / "rank-00001.stacks").read_text()


def test_rank_stuck_in_a_phase_is_named_with_what_it_waits_for(tmp_path: Path) -> None:
    with start(tmp_path) as found:
        found[1].told({"stick": True})
        code, text = found[0].end()
        assert code == 1
        assert "rank 1 has made no progress" in text
        assert "stage read of shard train-000003, tier remote" in text
        code, text = found[1].end()
        assert (code, "rank 1 has made no progress" in text) == (1, True)


def test_rank_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    with start(tmp_path) as found:
        found[0].told({"bye": "failed"})
        code, text = found[1].end()
        assert code == 1
        assert "rank 0 failed: the reason" in text


def test_stranger_at_the_port_hears_nothing(tmp_path: Path) -> None:
    import socket

    with start(tmp_path) as found:
        port = ranks.port_of(found[0].process.pid)
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as stream:
            stream.sendall(b'{"token": "guessed", "rank": 1}\n')
            assert stream.recv(100) == b""
        for rank in (1, 0):
            found[rank].told({"bye": "finished"})
            assert found[rank].end() == (0, "")


def test_stacks_are_written_when_a_person_asks(tmp_path: Path) -> None:
    with start(tmp_path) as found:
        os.kill(found[1].process.pid, signal.SIGUSR2)
        path = tmp_path / "health" / "rank-00001.stacks"
        deadline = time.monotonic() + DEADLINE_S
        while "most recent call first" not in path.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "most recent call first" in path.read_text()
        for rank in (1, 0):
            found[rank].told({"bye": "finished"})
            assert found[rank].end() == (0, "")
