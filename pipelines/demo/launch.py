"""Starting the jobs that the demo is made of, watching them, and killing one rank of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardflow.training.metrics import read_metrics

__all__ = ["TrainingJob", "run_command"]

_POLL_S = 0.03


def run_command(command: list[str], *, show_errors: bool, folder: Path) -> str:
    """Run one command to its end and return its standard output.

    Args:
        command: Program of the virtual environment and its arguments.
        show_errors: Let it draw on standard error (its progress bar); else that is shown on failure only.
        folder: Where it runs.

    Raises:
        RuntimeError: It failed; the message ends with what it said.
    """
    done = subprocess.run(
        _with_program(command),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if show_errors else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "\n".join(((done.stdout or "") + (done.stderr or "")).splitlines()[-12:])
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{said}")
    return done.stdout


def _with_program(command: list[str]) -> list[str]:
    """Replace the program by the one beside this interpreter, so that no activated environment is needed."""
    return [str(Path(sys.executable).with_name(command[0])), *command[1:]]


class TrainingJob:
    """One start of ``shardflow train``, in its own process group, its text in a log file."""

    def __init__(self, command: list[str], *, run: Path, log: Path, folder: Path) -> None:
        self.run = run
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                _with_program(command),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Two ranks on two cores: more threads each would only wait for each other.
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )

    @classmethod
    @contextmanager
    def start(cls, command: list[str], *, run: Path, log: Path, folder: Path) -> Iterator[TrainingJob]:
        """Start a job; whatever of it still runs when the body ends is killed."""
        job = cls(command, run=run, log=log, folder=folder)
        try:
            yield job
        finally:
            # Looked up first: once torchrun is gone, nothing says whose its ranks were.
            for pid in (*job._descendants(), job._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job._process.wait()

    def wait(self, on_step: Callable[[int, float | None], None]) -> int:
        """Wait for the end of the job and report its steps on the way.

        Args:
            on_step: Called with the number of steps done over all starts of the run, and the last loss.

        Returns:
            The exit code of torchrun.
        """
        while (code := self._process.poll()) is None:
            self._report(on_step)
            time.sleep(_POLL_S)
        self._report(on_step)
        return code

    def wait_until(
        self, is_time: Callable[[int], bool], on_step: Callable[[int, float | None], None]
    ) -> bool:
        """Wait until the number of steps done is right; False if the job ended before."""
        while self._process.poll() is None:
            if is_time(self._report(on_step)):
                return True
            time.sleep(_POLL_S)
        return False

    def kill_rank(self, rank: int) -> int:
        """Kill one rank with SIGKILL, as the kernel kills a process that takes too much memory.

        Returns:
            Its process id.

        Raises:
            RuntimeError: No process of the job says that it is this rank.
        """
        for pid in self._descendants():
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment and b"shardflow.training" in _command_line(pid):
                    os.kill(pid, signal.SIGKILL)
                    return pid
        raise RuntimeError(f"no process of the training job is rank {rank}; see {self.log}")

    def tail(self) -> str:
        """The last lines that the job wrote."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def _report(self, on_step: Callable[[int, float | None], None]) -> int:
        steps = read_metrics(self.run)
        if not steps:
            return 0
        done = int(steps[-1]["global_step"]) + 1
        on_step(done, steps[-1]["loss"])
        return done

    def _descendants(self) -> list[int]:
        """Process ids below torchrun: torchrun gives each rank a session of its own."""
        found: list[int] = []
        pending = [self._process.pid]
        while pending:
            with suppress(OSError):
                for listing in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
                    children = [int(pid) for pid in listing.read_text().split()]
                    found += children
                    pending += children
        return found


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
