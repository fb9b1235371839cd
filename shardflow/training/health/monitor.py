"""Health monitor as a rank uses it: reports its phase, writes stacks, and receives faults of other ranks.

Cost: a phase is two small writes to memory; the pulse thread wakes a few times a second.

faulthandler reads the frames of other threads without the interpreter lock. If they run meanwhile it follows
pointers that they free, and the process dies of a segmentation fault. So a thread that holds the lock writes
the stacks of all; only a process that cannot run Python any more has its threads read without the lock, on
`LAST_STACKS_SIGNAL`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

from shardflow.errors import StorageError
from shardflow.processes import group_signals_held_back
from shardflow.training.health.heartbeat import (
    HEALTH_FOLDER,
    LAST_STACKS_SIGNAL,
    MAIN_STACK_SIGNAL,
    Fault,
    HeartbeatPage,
    SideConfig,
    split_lines,
)

_LOGGER = logging.getLogger(__name__)

_PROCESS: Final = "shardflow.training.health.side"
_RANK_VARIABLES: Final = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_EXIT_FAILED: Final = 1
_LONGEST_TICK_S: Final = 1.0
_REPORT_S: Final = 5.0
"""For logging and writing stacks, before a rank is killed."""


class StacksFile:
    """File of a rank's stacks.

    Registers handlers of the two signals, and shows a crash on standard error.

    Args:
        path: Of the file, which is appended to; standard error where it cannot be opened, because that the
            run folder cannot be written is the run's to say.
    """

    def __init__(self, path: Path) -> None:
        # The monitor process imports this module too, and needs neither stores nor NumPy.
        from shardflow.storage.local import make_directories

        try:
            make_directories(path.parent)
            self._file: IO[str] = path.open("a", encoding="utf-8")
        except (OSError, StorageError):
            self._file = sys.stderr
        faulthandler.register(MAIN_STACK_SIGNAL, file=self._file, all_threads=False, chain=False)
        faulthandler.register(LAST_STACKS_SIGNAL, file=self._file, all_threads=True, chain=False)
        faulthandler.enable()

    def write(self) -> None:
        """Append the stacks of all threads, in faulthandler's order: the most recent call first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = []
        for ident, frame in sys._current_frames().items():
            lines.append(f"Thread {names.get(ident, 'unknown')} (most recent call first):")
            lines += [
                f'  File "{place.f_code.co_filename}", line {number} in {place.f_code.co_name}'
                for place, number in traceback.walk_stack(frame)
            ]
        self._file.write("\n".join([*lines, "", ""]))
        self._file.flush()


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str = "starting"
    limit_s: float | None = None
    together: bool = False
    describe: Callable[[], str] | None = None


class HealthMonitor:
    """Receiver of a rank's phases; this one, of an unmonitored run or a test, does nothing."""

    def enter(
        self,
        phase: str,
        limit_s: float | None = None,
        *,
        together: bool = False,
        describe: Callable[[], str] | None = None,
    ) -> None:
        """Report what this rank's main thread begins.

        Args:
            phase: A few words, such as ``"step 17, waiting for data"``.
            limit_s: A phase that takes longer is a fault of this rank; None for no limit.
            together: It ends once other ranks have done their part.
            describe: Returns what is waited for, during the phase; called by another thread.
        """

    def together(self, phase: str) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Enter a phase that waits for other ranks, and the former one again afterwards."""
        return contextlib.nullcontext()


class RankHealthMonitor(HealthMonitor):
    """Monitor of this rank, which also receives the faults of others.

    Starts the monitor process, a thread for pulse and messages, and the handlers that write stacks. Once
    another rank is at fault the main thread has a few seconds to end by itself (its exchange fails, and it
    raises what `fault_elsewhere` returns); if it cannot, the process is ended.

    Args:
        rank: This rank.
        hang_s: Longest time without a pulse of the interpreter; 0 for no limit.
        lost_s: Longest silence of another rank.
        run: The run folder.
        listen: Address that the monitor process of rank 0 listens on; empty on other ranks.
        token: Known to this run's processes only.
        grace_s: How long the main thread has to end by itself.
    """

    def __init__(
        self,
        *,
        rank: int,
        hang_s: float,
        lost_s: float,
        run: Path,
        listen: str,
        token: str,
        grace_s: float = 5.0,
    ) -> None:
        self.rank = rank
        self.host = socket.gethostname()
        self._phase = _Phase()
        self._wait = ""
        self._grace_s = grace_s
        self._fault: Fault | None = None
        self._is_known = threading.Event()
        self._is_ending = threading.Event()
        self._is_listening = threading.Event()
        self._port: int | None = None
        self._page = HeartbeatPage()
        shortest_s = min(limit for limit in (hang_s, lost_s) if limit)
        self._tick_s = min(_LONGEST_TICK_S, shortest_s / 8)
        folder = run / HEALTH_FOLDER
        self._stacks = StacksFile(folder / f"rank-{rank:05d}.stacks")
        settings = SideConfig(
            rank=rank,
            pid=os.getpid(),
            host=self.host,
            page=self._page.descriptor,
            hang_s=hang_s,
            lost_s=lost_s,
            tick_s=self._tick_s,
            folder=str(folder),
            listen=listen,
            token=token,
            kill_after_s=grace_s + _REPORT_S,
        )
        read_end, self._to_process = os.pipe()
        self._from_process, write_end = os.pipe()
        with group_signals_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-Wignore", "-m", _PROCESS, json.dumps(asdict(settings))],
                stdin=read_end,
                stdout=write_end,
                pass_fds=(self._page.descriptor,),
                env=_environment(),
            )
        os.close(read_end)
        os.close(write_end)
        self._listener = threading.Thread(target=self._listen, name="shardflow-health", daemon=True)
        self._listener.start()

    # ---- reporting ------------------------------------------------------------------------

    def enter(
        self,
        phase: str,
        limit_s: float | None = None,
        *,
        together: bool = False,
        describe: Callable[[], str] | None = None,
    ) -> None:
        """Report what this rank's main thread begins; see `HealthMonitor`."""
        self._phase = _Phase(phase, limit_s, together, describe)
        self._page.write_phase(phase, limit_s=limit_s, is_together=together)

    @contextlib.contextmanager
    def together(self, phase: str) -> Iterator[None]:
        """Enter a phase that waits for other ranks; see `HealthMonitor`."""
        former = self._phase
        self.enter(phase, together=True)
        try:
            yield
        finally:
            self.enter(former.name, former.limit_s, together=former.together, describe=former.describe)

    def hub_port(self, timeout_s: float) -> int | None:
        """Return the port that this rank's monitor process listens on; None if it cannot, or is late."""
        self._is_listening.wait(timeout_s)
        return self._port

    def report_to(self, address: str, port: int) -> None:
        """Have this rank's monitor process report to that of rank 0."""
        self._command({"hub": [address, port]})

    def report_end(self, how: str, *, text: str = "", exit_code: int = 1) -> None:
        """Report how this rank ends; what follows is no fault, except for ``"failed"``.

        Args:
            how: ``"finished"``, ``"stopped"``, ``"lost"`` (a fault elsewhere) or ``"failed"``.
            text: Of a failure: the error's sentence, without any text that shardflow did not write.
            exit_code: Of a failure: what this rank leaves with.
        """
        self._is_ending.set()
        self._command({"bye": how, "text": text, "exit_code": exit_code})

    def close(self) -> None:
        """Release the monitor process, which ends by itself once the others are notified."""
        self._is_ending.set()
        with contextlib.suppress(OSError):
            os.close(self._to_process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._tick_s)
        self._process.returncode = self._process.returncode or 0  # Popen would warn of a child still running

    # ---- receiving ------------------------------------------------------------------------

    def fault_elsewhere(self, timeout_s: float) -> Fault | None:
        """Return the fault of another rank, or None if none is reported in time."""
        self._is_known.wait(timeout_s)
        fault = self._fault
        return fault if fault is not None and fault.rank != self.rank else None

    def _command(self, value: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the monitor process may have been killed
            os.write(self._to_process, json.dumps(value).encode() + b"\n")

    def _listen(self) -> None:
        """Show a pulse and read what the monitor process writes, until it ends."""
        data = b""
        while True:
            self._page.beat()
            self._describe_wait()
            if self._fault is not None:
                self._end_soon(self._fault)
                return
            if not select.select([self._from_process], [], [], self._tick_s)[0]:
                continue
            chunk = os.read(self._from_process, 1 << 16)
            if not chunk:
                os.close(self._from_process)
                self._is_listening.set()
                if not self._is_ending.is_set():
                    _LOGGER.warning("the monitor process of rank %d ended; hangs go undetected", self.rank)
                return
            messages, data, _ = split_lines(data + chunk)
            for message in messages:
                if "port" in message:
                    self._port = message["port"]
                    self._is_listening.set()
                if "fault" in message:
                    self._fault = Fault.from_json(message["fault"])
                    self._is_known.set()
                    self._write_stacks()

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk; standard error may be closed
            self._stacks.write()
        self._command({"stacks": "written"})

    def _describe_wait(self) -> None:
        describe, text = self._phase.describe, ""
        if describe is not None:
            # What it describes may be closing; the monitor must not end the run that it monitors.
            with contextlib.suppress(Exception):
                text = describe()
        if text != self._wait:
            self._wait = text
            self._page.write_wait(text)

    def _end_soon(self, fault: Fault) -> None:
        """End the process, unless the main thread does so first."""
        if fault.rank != self.rank and self._is_ending.wait(self._grace_s):
            return
        if self._is_ending.is_set():
            return
        _LOGGER.error("%s", fault.sentence())
        logging.shutdown()
        os._exit(_EXIT_FAILED)


def _environment() -> dict[str, str]:
    """Return the environment of the monitor process: the same code, but not that of a rank."""
    kept = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
