"""Starts torchrun, or ranks forked in its place, in a process of its own and never leaves anything behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.forks import REPOSITORY, Forked, rank_server

__all__ = ["REPOSITORY", "Finished", "Job", "is_gone", "job", "job_environment"]

_KILL_S = 300.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a job ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return f"exit code {self.exit_code}\n{self.stdout}\n{self.stderr}"


class Job:
    """A running job: torchrun and its ranks, or one plain process."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, out: IO[bytes], err: IO[bytes]) -> None:
        self.process = process
        self._out, self._err = out, err

    def rank_pids(self) -> dict[int, int]:
        """Process id of each living rank."""
        found: dict[int, int] = {}
        for pid in _descendants(self.process.pid):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [int(value[5:]) for value in variables if value.startswith(b"RANK=")]
                if ranks:
                    found.setdefault(ranks[0], pid)  # a rank comes before the processes that it started
        return found

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end; a job that takes longer is killed and fails the test."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the job took longer than {timeout_s} s\n{self._read(-1).text}") from None
        return self._read(code)

    def kill(self) -> None:
        """Kill the job and all its processes, by id, and wait for their end."""
        pids = [self.process.pid, *_descendants(self.process.pid)]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + _KILL_S
        while not all(map(is_gone, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _read(self, code: int) -> Finished:
        texts = []
        for stream in (self._out, self._err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
        return Finished(code, *texts)


@contextmanager
def job(
    folder: Path,
    module: str,
    arguments: Sequence[str],
    *,
    num_ranks: int | Sequence[int] | None,
    is_forked: bool = False,
    options: Sequence[str] = (),
    passes_codes: bool = False,
    standalone: bool = True,
    warnings: str = "error",
) -> Iterator[Job]:
    """Start ``python -m module``, on ranks where ``num_ranks`` is given; killed at the block's end.

    Args:
        folder: Where its output is kept.
        module: What to run.
        arguments: Its arguments.
        num_ranks: Ranks on this machine; several numbers for forked ranks of one world after the other; None
            for one process without torchrun.
        is_forked: Fork the ranks, or the one process, where torchrun is not what is tested: they import
            everything once.
        options: More options of torchrun.
        warnings: What Python does with warnings there.
        standalone: This machine alone; False where the options name the others.
        passes_codes: Start it through ``shardflow train``, which exits with the ranks' code.
    """
    command = [sys.executable, "-m", module, *arguments]
    if num_ranks is not None:
        torchrun = [str(Path(sys.executable).with_name("torchrun"))]
        ranks = [*(["--standalone"] if standalone else []), f"--nproc-per-node={num_ranks}", *options]
        command = [*torchrun, *ranks, "-m", module, *arguments]
        if passes_codes:
            command = [sys.executable, "-m", "shardflow.cli.main", "train", *ranks, *arguments]
        if is_forked:
            sizes = [num_ranks] if isinstance(num_ranks, int) else num_ranks
            forked = ["tests.distributed.forked", ",".join(map(str, sizes))]
            command = [sys.executable, "-m", *forked, module, *arguments]
    environment = job_environment() | {"PYTHONWARNINGS": warnings}
    folder.mkdir(parents=True, exist_ok=True)
    number = time.monotonic_ns()
    with (folder / f"{number}.out").open("w+b") as out, (folder / f"{number}.err").open("w+b") as err:
        process: subprocess.Popen[bytes] | Forked
        if is_forked:
            with Path(os.devnull).open("rb") as nothing:
                streams = [nothing.fileno(), out.fileno(), err.fileno()]
                process = Forked(rank_server(), command[1:], streams, cwd=REPOSITORY, environment=environment)
        else:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=err, env=environment)
        started = Job(process, out, err)
        try:
            yield started
        finally:
            started.kill()


def job_environment() -> dict[str, str]:
    """Environment of a job: of no rank yet, and strict."""
    kept = {
        name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    }
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "error",
    }


def is_gone(pid: int) -> bool:
    """Whether every thread of a process has ended: until then its files are open, and its locks are held."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}:
                return False
    return True


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listing.read_text().split()):
                found += [child, *_descendants(child)]
    return found
