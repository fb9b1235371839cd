"""Starter of data servers that tests kill: ``python -m tests.distributed.data_servers DATASET...``.

It has imported everything, so a server starts within a fraction of a second. For each line on standard input
it forks a server and writes its process id and port; it ends with its input.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from shardflow.format import Dataset
from shardflow.loading.service_main import DataServer

REPOSITORY = Path(__file__).resolve().parents[2]


def be_server(datasets: Sequence[str], answer: int) -> NoReturn:
    """Serve until somebody kills this process."""
    try:
        server = DataServer([Dataset.open(one) for one in datasets])
        os.write(answer, f"{os.getpid()} {server.port}\n".encode())
        while True:
            signal.pause()
    finally:
        os._exit(1)


def main() -> None:
    """Fork a server for each line of the input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    children = []
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            be_server(sys.argv[1:], sys.stdout.fileno())
        children.append(child)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


class Servers:
    """Servers of one starter."""

    def __init__(self, starter: subprocess.Popen[str]) -> None:
        self._starter = starter
        self.running: dict[int, str] = {}
        """Addresses by process id."""

    def start(self) -> int:
        """Start a server and return its process id."""
        assert self._starter.stdin is not None
        assert self._starter.stdout is not None
        self._starter.stdin.write("\n")
        self._starter.stdin.flush()
        pid, port = map(int, self._starter.stdout.readline().split())
        self.running[pid] = f"127.0.0.1:{port}"
        return pid

    def kill(self, pid: int) -> None:
        """Kill a server."""
        del self.running[pid]
        os.kill(pid, signal.SIGKILL)


class Chaos(threading.Thread):
    """Kills and adds servers at random times until a number of kills is reached, or ``is_over`` is set."""

    def __init__(self, processes: Servers, file: Path, num_kills: int, seed: int) -> None:
        super().__init__()
        self.processes, self.file, self.num_kills = processes, file, num_kills
        self.num_killed = 0
        self.is_over = threading.Event()
        self.random = random.Random(seed)
        self.add()

    def add(self) -> None:
        self.processes.start()
        self.write()

    def write(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{one}\n" for one in self.processes.running.values()), encoding="ascii")
        new.rename(self.file)

    def run(self) -> None:
        while self.num_killed < self.num_kills and not self.is_over.wait(self.random.uniform(0.05, 0.6)):
            if len(self.processes.running) < 2 or (
                len(self.processes.running) < 4 and self.random.random() < 0.5
            ):
                self.add()
                continue
            self.processes.kill(self.random.choice(list(self.processes.running)))
            self.num_killed += 1
            if self.random.random() < 0.5:  # else its address stays in the list for a while
                self.write()


@contextmanager
def server_processes(*datasets: str) -> Iterator[Servers]:
    """Start a starter of servers, which ends with the block."""
    command = [sys.executable, "-m", "tests.distributed.data_servers", *datasets]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        yield Servers(starter)
        assert starter.stdin is not None
        starter.stdin.close()


if __name__ == "__main__":
    main()
