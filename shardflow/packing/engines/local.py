"""Local engine: a pool of long-lived packing processes, each of which may die at any moment.

Starts, feeds, times, kills and replaces them. A task that kills its process, misses its deadline or runs out
of memory is returned as a failed task; it never takes another task or the job with it. What a failure means
for a study is decided by the caller.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ShardflowError, os_reason
from shardflow.packing.engines.base import (
    PROCESS_ENVIRONMENT,
    Answer,
    Engine,
    Failure,
    Task,
    TaskDone,
    decode,
    done_with,
    encode,
)
from shardflow.packing.engines.forking import ForkedProcess, current_server
from shardflow.packing.engines.worker import Channel, ChannelClosedError

if TYPE_CHECKING:
    from shardflow.packing.engines.base import WorkerSetup

_logger = logging.getLogger(__name__)

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from shardflow.packing.engines.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_START_TIMEOUT_S: Final = 120.0
# A starting process may be killed from outside, which says nothing about the next one.
_MAX_FAILED_STARTS: Final = 2
_SEND_TIMEOUT_S: Final = 60.0
_EXIT_S: Final = 1.0
_KILL_S: Final = 20.0


@dataclass(slots=True, eq=False)
class _Child:
    process: subprocess.Popen[bytes] | ForkedProcess
    channel: Channel
    deadline: float
    is_ready: bool = False
    task: Task | None = None


class LocalEngine(Engine):
    """Runs tasks in packing processes on this machine; see `shardflow.packing.engines.base.Engine`.

    Args:
        num_processes: Number of concurrent processes.
        worker: Start message of each process.
    """

    def __init__(self, num_processes: int, worker: WorkerSetup) -> None:
        self._start_message = encode(worker)
        self._log_path = worker.log_path
        self._selector = selectors.DefaultSelector()
        self._children: list[_Child] = []
        self._finished: deque[TaskDone] = deque()
        self._full_num_processes = num_processes
        self._num_processes = num_processes
        self._num_failed_starts = 0
        self._server = current_server()

    @property
    def pids(self) -> list[int]:
        """Ids of the live processes."""
        return [child.process.pid for child in self._children]

    @property
    def has_idle(self) -> bool:
        """Whether a task can be submitted without waiting for another one."""
        return len(self._children) < self._num_processes or any(
            child.task is None for child in self._children
        )

    @property
    def num_running(self) -> int:
        """Number of submitted tasks that `wait` has not returned yet."""
        return len(self._finished) + sum(child.task is not None for child in self._children)

    def restart(self, num_processes: int | None = None) -> None:
        """Replace all processes: with as many as given, else as many as at first; no task may be running."""
        self._num_processes = num_processes or self._full_num_processes
        while self._children:
            self._end(self._children[-1])

    def submit(self, task: Task) -> None:
        """Hand a task to an idle process, starting one if necessary."""
        child = next((child for child in self._children if child.task is None), None) or self._start()
        child.task = task
        if child.is_ready:
            self._send_task(child)

    def wait(self) -> TaskDone:
        """Wait until any submitted task is done.

        Raises:
            ShardflowError: Processes cannot start at all.
        """
        if not self.num_running:
            raise ValueError("nothing was submitted")
        # Answers that have arrived count, even if their deadline has passed meanwhile.
        for key, _ in self._selector.select(0):
            self._read(key.data)
        while not self._finished:
            now = time.monotonic()
            for child in self._busy():
                if child.deadline <= now:
                    self._timed_out(child)
            if self._finished:
                break
            next_deadline = min(child.deadline for child in self._busy())
            for key, _ in self._selector.select(max(0.0, next_deadline - now)):
                self._read(key.data)
        return self._finished.popleft()

    def close(self) -> None:
        """Kill every process and wait for its end; unfinished tasks are dropped."""
        while self._children:
            self._end(self._children[-1])
        self._selector.close()

    def _start(self) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs, open(self._log_path, "ab", opener=_open_private) as log:
            process = self._fork(theirs.fileno(), log.fileno()) or subprocess.Popen(
                # -P: a folder of the working directory must not shadow a library.
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _BOOT,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    json.dumps(sys.path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **PROCESS_ENVIRONMENT},
            )
        child = _Child(process, Channel(ours), deadline=time.monotonic() + _START_TIMEOUT_S)
        self._children.append(child)
        self._selector.register(child.channel, selectors.EVENT_READ, child)
        with suppress(ChannelClosedError):  # noticed by the next read
            child.channel.send(self._start_message, timeout_s=_SEND_TIMEOUT_S)
        return child

    def _fork(self, channel: int, log: int) -> ForkedProcess | None:
        """Start a process as a fork; None where there is nothing to fork."""
        if self._server is None:
            return None
        try:
            return self._server.start(channel, log)
        except OSError as error:
            _logger.warning(
                "packing processes cannot be forked any more (%s): they start as new interpreters",
                os_reason(error),
            )
            self._server = None
            return None

    def _send_task(self, child: _Child) -> None:
        task = child.task
        if task is None:
            return
        child.deadline = time.monotonic() + task.timeout_s
        with suppress(ChannelClosedError):
            child.channel.send(encode(task), timeout_s=_SEND_TIMEOUT_S)

    def _busy(self) -> list[_Child]:
        return [child for child in self._children if child.task is not None]

    def _read(self, child: _Child) -> None:
        """Process the messages of a child; a task that is lost with its process is finished too."""
        try:
            for message in child.channel.receive_available():
                self._take(child, message)
        except ChannelClosedError:
            self._died(child)

    def _take(self, child: _Child, message: dict[str, Any]) -> None:
        answer = decode(Answer, message)
        if answer.is_step and child.task is not None:
            child.deadline = time.monotonic() + child.task.timeout_s
            return
        if answer.cannot_start is not None:
            raise _cannot_start(answer.cannot_start)
        if answer.pid is not None:
            child.is_ready = True
            self._num_failed_starts = 0
            self._send_task(child)
            return
        task, child.task = child.task, None
        if task is None:
            return
        self.peak_memory_bytes = max(self.peak_memory_bytes, answer.peak_memory_bytes)
        self._finished.append(done_with(task, answer))
        if answer.failure == "out_of_memory":
            # Its address space is fragmented now: start the next study in a fresh one.
            self._replace(child)

    def _timed_out(self, child: _Child) -> None:
        task = child.task
        if not child.is_ready or task is None:
            self._start_failed(child, f"no message for {_START_TIMEOUT_S:g} s")
            return
        detail = f"no progress within {task.timeout_s:g} s"
        self._finished.append(TaskDone(task=task, failure="timeout", detail=detail))
        self._replace(child)

    def _died(self, child: _Child) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(_EXIT_S)  # its own exit code tells more than that of our kill
        if not child.is_ready:
            self._start_failed(child, _describe_exit(child.process.poll()))
            return
        self._replace(child)
        code = child.process.returncode
        if child.task is not None:
            failure: Failure = "timeout" if code == -signal.SIGXCPU else "killed"
            self._finished.append(TaskDone(task=child.task, failure=failure, detail=_describe_exit(code)))

    def _start_failed(self, child: _Child, detail: str) -> None:
        """Hand the task of a process that failed to start to another one, up to a limit."""
        task = child.task
        self._replace(child)
        self._num_failed_starts += 1
        if self._num_failed_starts > _MAX_FAILED_STARTS * self._num_processes:
            raise _cannot_start(detail)
        if task is not None:
            self.submit(task)

    def _replace(self, child: _Child) -> None:
        """Kill a process; the next task starts a new one."""
        self._end(child)
        self.num_replaced += 1

    def _end(self, child: _Child) -> None:
        if child not in self._children:
            return
        self._children.remove(child)
        self._selector.unregister(child.channel)
        child.channel.close()
        # Files appear whole or not at all, so a gentler end would save nothing.
        child.process.kill()
        try:
            child.process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            # It hangs inside the kernel, for example in a read of a dead file system, and ends when that read
            # does.
            _logger.warning("a packing process is still alive %g s after SIGKILL; giving up on it", _KILL_S)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    return "exit code unknown" if code is None else f"exit code {code}"


def _cannot_start(detail: str) -> ShardflowError:
    return ShardflowError(
        f"a packing process could not start: {detail}. Raise execution.memory_bytes if it is small, and see "
        "packing-processes.log in the private folder."
    )
