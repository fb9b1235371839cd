"""What runs tasks for a packing job, wherever its processes are.

An engine gives tasks to killable, memory-capped packing processes and hands back what became of each. It may
run a task twice, or lose one with its machine and give it to another: tasks are idempotent, and their files
appear whole or not at all. What is run where, and in which order, never shows in the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias

from shardflow.packing.limits import ChildLimits

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Engine", "Failure", "Task", "TaskDone"]

Failure: TypeAlias = Literal["timeout", "killed", "out_of_memory", "failed", "storage"]
"""How a task failed by its own doing; the loss of a machine is no failure of a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What a packing process is started with."""

    limits: ChildLimits
    """What it may take."""
    handlers: str
    """Of the registry, or ``"module:function"``: makes the handler of its tasks."""
    setup: Any
    """Record that this function is given."""
    log_path: Path
    """Where the process writes why it could not start, and stacks of crashes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One piece of work for a packing process."""

    kind: str
    payload: Any
    """Record; what the handler gets."""
    timeout_s: float
    """Wall time after which the process is killed."""
    handle: Any = None
    """The caller's own mark; stays in the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskDone:
    """What became of a task: a result, or a failure."""

    task: Task
    result: dict[str, Any] | None = None
    """Of the kind's record; see `shardflow.packing.wire.decode`."""
    failure: Failure | None = None
    detail: str = ""
    """Class name and place in the code; never text of an input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a packing process sends back."""

    result: dict[str, Any] | None = None
    """Record as JSON; None where the task failed."""
    failure: Failure | None = None
    detail: str = ""
    peak_memory_bytes: int = 0
    """Most resident memory that the process ever had."""
    cannot_start: str | None = None
    """Why no task will ever succeed."""
    pid: int | None = None
    """Sent once, when the process is ready for its first task."""


class Engine(Protocol):
    """Runs tasks; a context manager, which ends every process that it started.

    Attributes:
        peak_memory_bytes: Most resident memory that any packing process had.
    """

    peak_memory_bytes: int

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def has_idle(self) -> bool:
        """Whether a task may be submitted now without waiting for another."""
        ...

    @property
    def num_running(self) -> int:
        """Number of tasks submitted that `wait` has not returned yet."""
        ...

    def submit(self, task: Task) -> None:
        """Give a task to an idle process, starting one if need be."""
        ...

    def wait(self) -> TaskDone:
        """Wait until any submitted task comes back.

        Raises:
            ShardflowError: Processes cannot start at all, or do not last.
        """
        ...

    def restart(self, num_processes: int | None = None) -> None:
        """Go on with fresh processes: as many as given, else as many as at first; nothing may be running."""
        ...

    def close(self) -> None:
        """End every process and wait for its end; unfinished tasks are forgotten."""
        ...
