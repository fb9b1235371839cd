"""``shardflow top`` in a real terminal: it follows a run, and restores the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardflow.monitoring.history import METRICS_FILE
from tests.run_factory import write_run

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0
LEAVES = b"\x1b[?1049l"


class Terminal:
    """A terminal with the command in it."""

    def __init__(self, *arguments: str, columns: int = 100, lines: int = 30, **environment: str) -> None:
        self._leader, self._follower = pty.openpty()
        fcntl.ioctl(self._follower, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.mode_before = self.mode()
        self._seen = b""
        inherited = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardflow.cli.main", "top", *arguments],
            stdin=self._follower,
            stdout=self._follower,
            stderr=self._follower,
            env=inherited | {"TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY)} | environment,
            start_new_session=True,
        )

    def mode(self) -> list[Any]:
        """Echo, line buffering and the like."""
        return termios.tcgetattr(self._follower)

    def until(self, text: str) -> str:
        """Wait for plain text to be shown after all that was waited for before; returns what was shown."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", self._seen).decode(errors="ignore")
            if text in plain:
                self._seen = b""
                return plain
            assert time.monotonic() < deadline, f"{text!r} was not shown: {plain[-3000:]}"
            self._read(0.2)

    def press(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._follower, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def ended(self) -> tuple[int, bytes]:
        """Wait for the end: exit code, and what came since the last text that was waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        while self._read(0.2):
            pass
        assert self.process.poll() is not None
        return self.process.returncode, self._seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=PATIENCE_S)
        os.close(self._leader)
        os.close(self._follower)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._leader], [], [], timeout_s)[0]:
            return False
        self._seen += os.read(self._leader, 65536)
        return True


@pytest.fixture
def started() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for one in terminals:
        one.close()


def test_it_follows_a_run_until_q_is_pressed(tmp_path: Path, started: list[Terminal]) -> None:
    lines = (write_run(tmp_path / "whole", planned_steps=60) / METRICS_FILE).read_bytes().splitlines(True)
    steps = [at for at, line in enumerate(lines) if b'"event":"step"' in line]
    folder = tmp_path / "run"
    terminal = Terminal(str(folder))
    started.append(terminal)
    terminal.until("waiting for the first line")
    assert terminal.mode() != terminal.mode_before  # keys come at once, and are not shown
    folder.mkdir()
    with (folder / METRICS_FILE).open("ab", buffering=0) as file:
        file.write(b"".join(lines[: steps[20]]))
        terminal.until("step 20 of 60")
        # A line that is not whole yet is none.
        file.write(b"".join(lines[steps[20] : steps[30]]) + lines[steps[30]][:40])
        terminal.until("step 30 of 60")
        # Its line comes after; what was read so far may end between the two.
        terminal.until("Storage-bound")
        file.write(lines[steps[30]][40:] + b"".join(lines[steps[31] : steps[40]]))
        terminal.until("step 40 of 60")
    terminal.resize(140, 45)
    terminal.until("for a CPU, GIL 2.0 %")
    terminal.press("q")
    code, last = terminal.ended()
    assert code == 0
    assert LEAVES in last
    assert b"\x1b[?25h" in last  # the cursor is there again
    assert terminal.mode() == terminal.mode_before


def test_a_signal_ends_it_and_restores_the_terminal(tmp_path: Path, started: list[Terminal]) -> None:
    folder = write_run(tmp_path / "run", num_steps=60, planned_steps=60, outcome="finished")
    terminal = Terminal(str(folder), NO_COLOR="1")
    started.append(terminal)
    terminal.until("step 60 of 60")
    terminal.process.send_signal(signal.SIGTERM)
    code, last = terminal.ended()
    assert code == 128 + signal.SIGTERM
    assert LEAVES in last
    assert terminal.mode() == terminal.mode_before
