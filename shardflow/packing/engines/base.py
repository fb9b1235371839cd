"""What runs tasks for a packing job, wherever its processes are.

An engine gives tasks to killable, memory-capped packing processes and hands back what became of each. It may
run a task twice, or lose one with its machine and give it to another: tasks are idempotent, and their files
appear whole or not at all. What is run where, and in which order, never shows in the bytes.

Codec between typed records and JSON: the one place where task payloads and results cross a process border.

A record is a frozen dataclass; it travels as a JSON object, field by field under the field's name. Its
annotations are the schema: what comes from another process is checked against them, so that a process that
was taken over by an input can send wrong values, but none of another type. A class with ``to_json`` and
``from_json`` has a form of its own.

What a packing process may take: memory, processor time, file size, open files.

A process sets its limits on itself before it imports a decoder, so that every byte of foreign code runs under
them; the hard memory limit cannot be raised again. The job has its own deadline per task besides: a sleeping
process uses no processor time.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
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

from shardflow.errors import ShardflowError

if TYPE_CHECKING:
    from types import TracebackType

Record = TypeVar("Record")
Decoder = Callable[[Any], Any]


def encode(value: Any) -> Any:
    """Return a record, or a collection of records, as JSON values."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [encode(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): encode(one) for key, one in value.items()}
    return str(value) if isinstance(value, (Path, str)) else value


def decode(record: type[Record], value: Any) -> Record:
    """Read what `encode` returned for a record of this type.

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
    """Build the function that reads values of a type; once per type."""
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
    exact = _of(kind, lambda value: value)
    return (lambda value: value if type(value) is int else exact(value)) if kind is float else exact


def _record_decoder(record: Any) -> Decoder:
    hints = get_type_hints(record, include_extras=True)
    decoders = [(field.name, _decoder(hints[field.name])) for field in fields(record)]
    return lambda value: record(**{name: decoder(value[name]) for name, decoder in decoders})


def _of(kind: type, read: Decoder) -> Decoder:
    """Read values of exactly one JSON type."""

    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return read(value)

    return check


_PR_SET_PDEATHSIG: Final = 1

PROCESS_ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        # One thread: blosc2 gives other bytes with more, and thread pools reserve address space.
        "BLOSC_NTHREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "MKL_NUM_THREADS": "1",
        "NUMEXPR_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # glibc would give a freed slice back to the kernel at once, and the next one pay for its pages again
        # (docs/adr/0031). 32 MiB is the largest threshold that it takes; up to 128 MiB are kept.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TOP_PAD_": str(4 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    }
)
"""What a packing process is started with, beside the environment of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLimits:
    """Limits of one packing process."""

    memory_bytes: int
    """Address space (RLIMIT_AS)."""
    task_s: float
    """Processor time of one task, rounded up to seconds (RLIMIT_CPU, moved on before each task)."""
    file_bytes: int
    """Largest file that it may write (RLIMIT_FSIZE)."""
    open_files: int = 256
    """Open descriptors (RLIMIT_NOFILE)."""

    def apply(self) -> None:
        """Put the calling process under the limits, for good; processor time starts with `start_task`."""
        _bound(resource.RLIMIT_AS, self.memory_bytes)
        _bound(resource.RLIMIT_FSIZE, self.file_bytes)
        _bound(resource.RLIMIT_NOFILE, self.open_files)
        # A core file would hold images and identifiers.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self.start_task()

    def start_task(self) -> None:
        """Give the calling process the processor time of one more task.

        Past it the kernel sends SIGXCPU, which ends the process even inside a decoder that never returns.
        """
        usage = resource.getrusage(resource.RUSAGE_SELF)
        soft = math.ceil(usage.ru_utime + usage.ru_stime + self.task_s) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(
            resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )


def _bound(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (bound, bound))


def end_with(parent_pid: int) -> None:
    """End the calling process when its parent dies, even by SIGKILL (Linux), and leave signals to the parent.

    A terminal's Ctrl-C and a scheduler's SIGTERM reach the whole process group: the job decides when its
    processes end, or a death by signal would look like a study's fault.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)  # the parent died before the call above


Failure: TypeAlias = Literal["timeout", "killed", "out_of_memory", "failed", "storage"]
"""How a task failed by its own doing; the loss of a machine is no failure of a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What a packing process is started with."""

    limits: WorkerLimits
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
    """Of the kind's record; see `shardflow.packing.engines.base.decode`."""
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
