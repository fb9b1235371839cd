"""Engine interface: runs the tasks of a packing job; limits of its processes and the codec of their messages.

An engine hands tasks to killable, memory-limited packing processes and returns results or failures. It may
run a task twice, or lose one with its machine and give it to another: tasks are idempotent, and their files
appear whole or not at all. Which process runs what, and when, never shows in the bytes.

Payloads and results are typed records: frozen dataclasses that cross the process border as JSON objects,
field by field. Their annotations are the schema. A process that was taken over by an input can send wrong
values, but no value of another type. A class with ``to_json`` and ``from_json`` has a form of its own.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from shardflow.errors import ShardflowError, StorageError

if TYPE_CHECKING:
    from types import TracebackType

Record = TypeVar("Record")
Decoder = Callable[[Any], Any]
_PLAIN: Final = frozenset({bool, float, int, str, type(None)})


def encode(value: Any) -> Any:
    """Convert a record, or a collection of records, to JSON values."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {name: encode(getattr(value, name)) for name in _names_of(kind)}
    if isinstance(value, (list, tuple)):
        return [encode(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): encode(one) for key, one in value.items()}
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, (Path, str)) else value


@cache
def _names_of(record: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(record))


def decode(record: type[Record], value: Any) -> Record:
    """Convert JSON values that `encode` returned back to a record.

    Raises:
        ShardflowError: The value does not have the fields and types of the record.
    """
    try:
        schema: Any = record
        decoded: Record = _decoder(schema)(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ShardflowError(
            f"a message between processes must be a {record.__name__}, got {type(error).__name__}; "
            "this is an internal error."
        ) from None
    return decoded


@cache
def _decoder(kind: Any) -> Decoder:
    """Build the decoder of a type, once per type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if hasattr(kind, "from_json"):
        from_json: Decoder = kind.from_json
        return from_json
    if is_dataclass(kind):
        return _record_decoder(kind)
    if origin is Annotated:
        return _decoder(arguments[0])
    if origin in {Union, types.UnionType}:
        (other,) = (_decoder(one) for one in arguments if one is not type(None))
        return lambda value: None if value is None else other(value)
    if origin is Literal:
        return lambda value: arguments[arguments.index(value)]
    if origin is tuple:
        element = _decoder(arguments[0])
        return _of(list, lambda value: tuple([element(one) for one in value]))
    if origin is dict:
        key, element = arguments[0], _decoder(arguments[1])
        return _of(dict, lambda value: {key(name): element(one) for name, one in value.items()})
    if kind is Path:
        return Path
    if kind is datetime:
        return _of(str, datetime.fromisoformat)
    exact = _of(kind, lambda value: value)
    return (lambda value: value if type(value) is int else exact(value)) if kind is float else exact


def _record_decoder(record: Any) -> Decoder:
    hints = get_type_hints(record, include_extras=True)
    decoders = [(field.name, _decoder(hints[field.name])) for field in fields(record)]
    return lambda value: record(**{name: decoder(value[name]) for name, decoder in decoders})


def _of(kind: type, read: Decoder) -> Decoder:
    """Decode values of exactly one JSON type."""

    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return read(value)

    return check


_PR_SET_PDEATHSIG: Final = 1

PROCESS_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        # With several threads blosc2 writes other bytes, and thread pools reserve address space.
        "BLOSC_NTHREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "MKL_NUM_THREADS": "1",
        "NUMEXPR_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # By default glibc returns a freed slice to the kernel at once, and the next slice faults its pages in
        # again (docs/adr/0031). 32 MiB is the largest threshold it accepts; up to 128 MiB are kept.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TOP_PAD_": str(4 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    }
)
"""Environment variables of a packing process, beside those of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLimits:
    """Limits of one packing process.

    A process sets them on itself before it imports a decoder, or right after its fork, so that whatever reads
    an input runs under them; the hard memory limit cannot be raised again. The job has its own deadline for
    each task besides: a sleeping process uses no processor time.
    """

    memory_bytes: int
    """Address space (RLIMIT_AS)."""
    task_s: float
    """Processor time of one task, rounded up to seconds (RLIMIT_CPU, extended before each task)."""
    file_bytes: int
    """Largest file it may write (RLIMIT_FSIZE)."""
    open_files: int = 256
    """Open descriptors (RLIMIT_NOFILE)."""

    def apply(self) -> None:
        """Apply the limits to the calling process, for good; processor time starts with `start_task`."""
        _bound(resource.RLIMIT_AS, self.memory_bytes)
        _bound(resource.RLIMIT_FSIZE, self.file_bytes)
        _bound(resource.RLIMIT_NOFILE, self.open_files)
        # A core file would hold images and identifiers.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self.start_task()

    def start_task(self) -> None:
        """Grant the calling process the processor time of one more task.

        After it the kernel sends SIGXCPU, which ends the process even inside a decoder that never returns.
        """
        usage = resource.getrusage(resource.RUSAGE_SELF)
        soft = math.ceil(usage.ru_utime + usage.ru_stime + self.task_s) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(
            resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )


_on_step: Callable[[], None] | None = None


def step() -> None:
    """Note that a part of a task begins, such as the next file: it has the deadline of a task to itself.

    Without effect outside of a packing process.
    """
    if _on_step is not None:
        _on_step()


def on_step(call: Callable[[], None]) -> None:
    """Call a function at each `step` of this process."""
    global _on_step  # noqa: PLW0603 - one task runs in a packing process at a time
    _on_step = call


def _bound(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def end_with(parent_pid: int) -> None:
    """Tie the calling process to its parent: it dies with it, even by SIGKILL (Linux), and ignores signals.

    Ctrl-C in a terminal and SIGTERM of a scheduler reach the whole process group. The job decides when its
    processes end; otherwise a signal would look like a crash caused by a study.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)  # the parent died before the call above


Failure: TypeAlias = Literal["timeout", "killed", "out_of_memory", "failed", "storage"]
"""How a task failed by itself; the loss of a machine is no failure of a task. No process works without
storage, so ``storage`` ends the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """Start message of a packing process."""

    limits: WorkerLimits
    handlers: str
    """Name in the registry, or ``"module:function"``, of the function that makes its task handler."""
    setup: Any
    """Record that this function receives."""
    log_path: Path
    """File for errors at the start, and stack traces of crashes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Unit of work for a packing process."""

    kind: str
    payload: Any
    """Record that the handler receives."""
    timeout_s: float
    """Wall time after which the process is killed, counted anew from each `step` of the task."""
    num_steps: int = 1
    """Most steps of the task."""
    handle: Any = None
    """The caller's own label; not sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskDone:
    """Result or failure of a task."""

    task: Task
    result: dict[str, Any] | None = None
    """Record as JSON, to be read with `decode`."""
    failure: Failure | None = None
    detail: str = ""
    """Class name and place in the code, never text of an input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Message of a packing process to the job."""

    result: dict[str, Any] | None = None
    """Record as JSON; None if the task failed."""
    failure: Failure | None = None
    detail: str = ""
    peak_memory_bytes: int = 0
    """Peak resident memory of the process."""
    is_step: bool = False
    """Whether this is no answer: a part of the task begins, with a deadline of its own."""
    cannot_start: str | None = None
    """Reason why the process cannot run any task."""
    pid: int | None = None
    """Sent once, when the process is ready for its first task."""


def done_with(task: Task, answer: Answer) -> TaskDone:
    """Return the end of a task.

    Raises:
        StorageError: The task could not read or write what packing itself keeps.
    """
    if answer.failure == "storage":
        raise StorageError(answer.detail)
    return TaskDone(task=task, result=answer.result, failure=answer.failure, detail=answer.detail)


class Engine(Protocol):
    """Runs tasks in packing processes; a context manager, which ends every process that it started.

    Attributes:
        peak_memory_bytes: Peak resident memory of any packing process.
        num_replaced: Processes that were lost or killed.
    """

    peak_memory_bytes: int = 0
    num_replaced: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def has_idle(self) -> bool:
        """Whether a task can be submitted without waiting for another one."""
        ...

    @property
    def num_running(self) -> int:
        """Number of submitted tasks that `wait` has not returned yet."""
        ...

    def submit(self, task: Task) -> None:
        """Hand a task to an idle process, starting one if necessary."""
        ...

    def wait(self) -> TaskDone:
        """Wait until any submitted task is done.

        Raises:
            ShardflowError: Processes cannot start, or keep dying.
            StorageError: A task could not read or write what packing itself keeps.
        """
        ...

    def restart(self, num_processes: int | None = None) -> None:
        """Replace all processes: with as many as given, else as many as at first; no task may be running."""
        ...

    def close(self) -> None:
        """Kill every process and wait for its end; unfinished tasks are dropped."""
        ...


def run_each(engine: Engine, tasks: Iterable[Task]) -> Iterator[TaskDone]:
    """Hand each task to the first idle process, and yield tasks as they end; none may run at the start.

    Raises:
        ShardflowError: As `Engine.wait`.
        StorageError: As `Engine.wait`.
    """
    for task in tasks:
        engine.submit(task)
        while not engine.has_idle:
            yield engine.wait()
    while engine.num_running:
        yield engine.wait()
