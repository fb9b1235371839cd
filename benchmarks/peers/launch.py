"""Starts the ranks of a world, watches over them, and never leaves one behind.

A world hangs if none of its ranks has written a line for ``deadline_s``: then all of them are killed, the
task is noted as one that hung, and the tasks behind it get ranks of their own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.task import Task, write_tasks

__all__ = ["events", "run_tasks"]

REPOSITORY = Path(__file__).resolve().parents[2]
_CLOSED = {"end", "error", "not offered", "hang", "crash"}
_STARTUP_S = 300.0
_GRACE_S = 8.0
_POLL_S = 0.1


def run_tasks(peer: str, python: Path, folder: Path, tasks: list[Task], *, deadline_s: float) -> None:
    """Run tasks of one world size, in as few launches as the hangs among them allow."""
    (folder / "out").mkdir(exist_ok=True)
    left = list(tasks)
    while left:
        write_tasks(folder / "tasks.json", left)
        with _ranks(peer, python, folder, left[0].world_size) as processes:
            found = _watch(processes, folder, left, deadline_s)
        if found is None:
            return
        at, verdict = found
        for rank in range(left[at].world_size):
            _close(_path(folder, left[at], rank), verdict)
        left = left[at + 1 :]


def events(folder: Path, task: Task, rank: int) -> list[dict[str, Any]]:
    """Read what a rank wrote of a task; nothing where it never came to it."""
    path = _path(folder, task, rank)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _path(folder: Path, task: Task, rank: int) -> Path:
    return folder / "out" / f"{task.name}.rank-{rank}.jsonl"


def _watch(
    processes: list[subprocess.Popen[bytes]], folder: Path, tasks: list[Task], deadline_s: float
) -> tuple[int, str] | None:
    """Wait for the ranks; return which task they did not finish, and why, or None."""
    world_size, changed = len(processes), time.monotonic()
    size, allowed_s = _written_bytes(folder), _STARTUP_S
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return None
        now = time.monotonic()
        if (written := _written_bytes(folder)) != size:
            size, changed, allowed_s = written, now, deadline_s
        is_crash = any(code not in (None, 0) for code in codes)
        if now - changed > (_GRACE_S if is_crash else allowed_s):
            break
        time.sleep(_POLL_S)
    at = next(
        (
            number
            for number, task in enumerate(tasks)
            if any(not _is_closed(folder, task, rank) for rank in range(world_size))
        ),
        len(tasks) - 1,
    )
    return at, "crash" if is_crash else "hang"


def _written_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "out").iterdir())


def _is_closed(folder: Path, task: Task, rank: int) -> bool:
    found = events(folder, task, rank)
    return bool(found) and found[-1]["event"] in _CLOSED


def _close(path: Path, verdict: str) -> None:
    """Say of a rank that did not end its task why it did not."""
    path.touch()
    lines = path.read_text("utf-8").splitlines()
    if not lines or json.loads(lines[-1])["event"] not in _CLOSED:
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"event": verdict}) + "\n")


@contextmanager
def _ranks(peer: str, python: Path, folder: Path, world_size: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = folder / "home"
    home.mkdir(exist_ok=True)
    common = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
    }
    command = [str(python), "-m", "benchmarks.peers.rank", peer, str(folder), "tasks.json"]
    processes = []
    try:
        for rank in range(world_size):
            with (folder / f"log-{world_size}-{rank}.txt").open("ab") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        # All are stopped before one is killed, so that none complains of the others' end. Workers are of the
        # session of their rank.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        for process in processes:
            process.wait()
