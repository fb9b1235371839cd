"""Ray engine: packing processes on the machines of a Ray cluster, or on this one.

Every Ray worker holds one process of the local engine, which reads the inputs under its own limits and dies
with the worker. What such a process does to itself (a deadline, too much memory, a crash) is an outcome of
its task, as with the local engine. The loss of a worker or its machine is not: the task goes to another
worker and costs only time. All machines see the same folders under the same paths, and the same Python
environment.

Only JSON passes between job and worker, and no exception leaves a worker: Ray would write its text and a
traceback into logs. Imported only if Ray is asked for (extra ``ray``).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray
from ray._private import ray_constants
from ray.exceptions import RayError

from shardflow.errors import ShardflowError, StorageError, os_reason
from shardflow.logs import describe_exception
from shardflow.packing.engines.base import (
    Answer,
    Engine,
    Task,
    TaskDone,
    WorkerSetup,
    decode,
    done_with,
    encode,
)
from shardflow.packing.engines.local import LocalEngine
from shardflow.processes import handler_kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
_LOCALHOST: Final = "127.0.0.1"
_OBJECT_STORE_BYTES: Final = 100 << 20
"""Tasks and results are some KB each; nothing else passes through Ray."""
_START_TIMEOUT_S: Final = 300.0
"""Time without a single worker after which the job gives up."""
_GRACE_S: Final = 150.0
"""Time after a task's deadline, when the worker should have killed its process, until it counts as lost."""
_MAX_LOSSES: Final = 5
_MAX_FAILED_STARTS: Final = 3
_QUIET: Final = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # It would kill workers, whose processes have limits of their own.
    "RAY_memory_monitor_refresh_ms": "0",
}


class PackingWorker:
    """Actor inside a Ray worker, which runs one task at a time in a packing process of its own.

    Args:
        start: `WorkerSetup` as JSON.
        folder: Working directory of the job.
    """

    def __init__(self, start: str, folder: str) -> None:
        with suppress(OSError):
            os.chdir(folder)
        self._pool = LocalEngine(1, decode(WorkerSetup, json.loads(start)))

    def pid(self) -> int:
        """Return the process id of the Ray worker."""
        return os.getpid()

    def run(self, task: str) -> str:
        """Run a `Task`, given as JSON, and return the `Answer` as JSON."""
        try:
            self._pool.submit(decode(Task, json.loads(task)))
            done = self._pool.wait()
            answer = Answer(
                result=done.result,
                failure=done.failure,
                detail=done.detail,
                peak_memory_bytes=self._pool.peak_memory_bytes,
            )
        except StorageError as error:
            answer = Answer(failure="storage", detail=error.message)
        except ShardflowError as error:
            answer = Answer(cannot_start=error.message)
        except Exception as error:  # noqa: BLE001 - Ray would log its text
            answer = Answer(cannot_start=f"a Ray worker failed: {describe_exception(error)}")
        return json.dumps(encode(answer))


@dataclass(slots=True, eq=False)
class _Given:
    task: Task
    num_losses: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    actor: Any
    answer: Any
    """Pending result: the process id of a starting worker, or the answer to its task; None if idle."""
    pid: int | None = None
    given: _Given | None = None
    deadline: float = float("inf")


class RayEngine(Engine):
    """Runs tasks in packing processes inside Ray workers; see `shardflow.packing.engines.base.Engine`.

    Args:
        num_processes: Number of concurrent processes; 0 takes every processor of the cluster.
        worker: Start message of each process.
        address: Of a running cluster (``host:port``, or ``auto``); empty starts Ray on this machine, for
            this job alone, reachable from nowhere else.

    Attributes:
        folder: Private folder of a Ray that was started here, removed at the end; None for a running cluster.

    Raises:
        ShardflowError: Ray cannot be started or reached.
    """

    def __init__(
        self,
        num_processes: int,
        worker: WorkerSetup,
        *,
        address: str = "",
    ) -> None:
        self._start = json.dumps(encode(worker)), str(Path.cwd())
        self.folder = None if address else Path(tempfile.mkdtemp(prefix="sf-ray-"))
        self._workers: list[_Worker] = []
        self._queue: deque[_Given] = deque()
        self._finished: deque[TaskDone] = deque()
        self._num_failed_starts = 0
        try:
            _connect(address, num_processes, self.folder)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            self._full_num_processes = num_processes or int(resources.get("CPU", 1))
        except (RayError, OSError, RuntimeError, ValueError) as error:
            self.close()
            raise ShardflowError(
                f"Ray could not be started or reached ({os_reason(error)}); check "
                "execution.ray_address, or pack with --engine local."
            ) from None
        self._num_processes = self._full_num_processes
        self._actor_class: Any = ray.remote(PackingWorker)

    @property
    def pids(self) -> list[int]:
        """Process ids of the Ray workers that have started."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    @property
    def has_idle(self) -> bool:
        """Whether a task can be submitted without waiting for another one."""
        return self._num_given < self._num_processes

    @property
    def num_running(self) -> int:
        """Number of submitted tasks that `wait` has not returned yet."""
        return len(self._finished) + self._num_given

    @property
    def _num_given(self) -> int:
        return len(self._queue) + sum(worker.given is not None for worker in self._workers)

    def restart(self, num_processes: int | None = None) -> None:
        """Replace all processes: with as many as given, else as many as at first; no task may be running."""
        self._num_processes = num_processes or self._full_num_processes
        while self._workers:
            self._end(self._workers[-1])

    def submit(self, task: Task) -> None:
        """Hand a task to an idle worker, starting one if necessary."""
        self._queue.append(_Given(task))
        self._feed()

    def wait(self) -> TaskDone:
        """Wait until any submitted task is done.

        Raises:
            ShardflowError: Processes or workers cannot start, or a task loses every worker.
        """
        if not self.num_running:
            raise ValueError("nothing was submitted")
        silent_until = time.monotonic() + _START_TIMEOUT_S
        while not self._finished:
            self._feed()
            awaited = {worker.answer: worker for worker in self._workers if worker.answer is not None}
            now = time.monotonic()
            # A worker may be queued in a full cluster while others are working: only a silence of all counts.
            until = min([silent_until, *(worker.deadline for worker in awaited.values())])
            answered, _ = ray.wait(list(awaited), num_returns=1, timeout=max(0.0, until - now))
            for answer in answered:
                self._take(awaited[answer])
            now = time.monotonic()
            for worker in [worker for worker in self._workers if worker.deadline <= now]:
                self._lost(worker)
            if answered or any(worker.given is not None for worker in self._workers):
                silent_until = now + _START_TIMEOUT_S
            elif now >= silent_until:
                raise ShardflowError(
                    f"no Ray worker started within {_START_TIMEOUT_S:g} s; add processors to the cluster "
                    "and run the job again."
                )
        return self._finished.popleft()

    def close(self) -> None:
        """Kill every worker, and stop Ray if it was started here; unfinished tasks are dropped."""
        while self._workers:
            self._end(self._workers[-1])
        self._queue.clear()
        ray.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _feed(self) -> None:
        """Hand waiting tasks to idle workers, and start workers for the rest."""
        for worker in self._workers:
            if not self._queue:
                return
            if worker.answer is None:
                worker.given = given = self._queue.popleft()
                worker.deadline = time.monotonic() + given.task.timeout_s * given.task.num_steps + _GRACE_S
                worker.answer = worker.actor.run.remote(json.dumps(encode(given.task)))
        num_starting = sum(worker.pid is None for worker in self._workers)
        missing = min(len(self._queue) - num_starting, self._num_processes - len(self._workers))
        for _ in range(missing):
            actor = self._actor_class.options(
                max_restarts=0, max_task_retries=0, num_cpus=1, scheduling_strategy="SPREAD"
            ).remote(*self._start)
            self._workers.append(_Worker(actor, actor.pid.remote()))

    def _take(self, worker: _Worker) -> None:
        try:
            answer = ray.get(worker.answer)
        except RayError:
            # The error's text holds a traceback and is ignored.
            self._lost(worker)
            return
        worker.answer, worker.deadline = None, float("inf")
        if worker.given is None:
            worker.pid = int(answer)
            self._num_failed_starts = 0
            return
        task, worker.given = worker.given.task, None
        done = decode(Answer, json.loads(answer))
        if done.cannot_start is not None:
            raise ShardflowError(done.cannot_start)
        self.peak_memory_bytes = max(self.peak_memory_bytes, done.peak_memory_bytes)
        self._finished.append(done_with(task, done))

    def _lost(self, worker: _Worker) -> None:
        """Requeue the task of a lost worker: its study is not to blame."""
        self._end(worker)
        self.num_replaced += 1
        if worker.given is None:
            self._num_failed_starts += 1
            if self._num_failed_starts > _MAX_FAILED_STARTS * self._num_processes:
                raise ShardflowError(
                    "Ray workers end before they start; is the environment of this job installed on every "
                    "machine?"
                )
            return
        worker.given.num_losses += 1
        if worker.given.num_losses >= _MAX_LOSSES:
            raise ShardflowError(
                f"{_MAX_LOSSES} Ray workers in a row were lost during the same task; check the machines, "
                "and run the job again."
            )
        self._queue.appendleft(worker.given)

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        with suppress(RayError, RuntimeError):
            ray.kill(worker.actor)


def _connect(address: str, num_processes: int, folder: Path | None) -> None:
    """Join a cluster, or start Ray here without dashboard, usage statistics, or ports open to others."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "critical"}
    if folder is None:
        with handler_kept(signal.SIGTERM):
            ray.init(address=address, **quiet)
        return
    with _alone(), handler_kept(signal.SIGTERM):
        ray.init(
            address="local",
            num_cpus=num_processes or None,
            num_gpus=0,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            # Ray makes its own folder world-readable, so it is placed inside a private one.
            _temp_dir=str(folder / "ray"),
            **quiet,
        )
        if ray.util.get_node_ip_address() != _LOCALHOST:  # type: ignore[no-untyped-call]
            raise RuntimeError("Ray listens on a public interface")


@contextmanager
def _alone() -> Iterator[None]:
    """Make Ray bind every port to the loopback interface instead of a public one.

    Ray's own switch for this is meant for other systems than Linux, and it is read only once: hence both.
    """
    is_cluster = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment({**_QUIET, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that Ray starts."""
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
