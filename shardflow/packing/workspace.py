"""Workspace of a packing job: its folders, the locks on them, array tasks, and the crash log.

One job at a time may write into a dataset's folder and its private folder; the array tasks of one job share
them. The dataset's folder only ever holds manifests, ``shards/``, ``samples/``, ledgers, pages, ``tokens/``,
``views/``, ``facts/``, ``tables/`` and, while a job runs or after it was killed, ``.work/``. The private
folder holds identifiers; nothing in it is ever copied into the dataset.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from shardflow.errors import ConfigError, FormatError, StorageError, naming_os_errors, os_reason
from shardflow.format.reasons import Reason
from shardflow.logs import EventLog, read_events
from shardflow.storage import is_temporary_name

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from shardflow.packing.engines.base import Failure

_REASONS: Final[dict[Failure, Reason]] = {
    "failed": Reason.WORKER_FAILED,
    "killed": Reason.WORKER_KILLED,
    "out_of_memory": Reason.WORKER_OUT_OF_MEMORY,
    "timeout": Reason.WORKER_TIMEOUT,
}
_CONVERSION: Final = "/convert"
_SETTINGS_ERRORS: Final = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
}
"""Errors of creating a folder that its path causes, not the disk or the network."""
_CRASH_LOGS: Final = "resource_outcomes*.jsonl"
_MAX_TASKS: Final = 100_000
_WORK: Final = ".work"
_LOCK_TRIES: Final = 100
_OWN_NAMES: Final = (
    "manifest-",
    "shards",
    "samples",
    "ledger",
    "report.html",
    "report-0",
    "tokens",
    "views",
    "facts",
    "tables",
    _WORK,
)
"""First letters of every name that may exist in a dataset's folder."""


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """One of the tasks that share a job: number ``index`` of ``count``, counted from 0.

    Every task computes the same plan on its own from header rows that all tasks share. No task waits for
    another: a task that finds header rows missing reads those files itself.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= _MAX_TASKS:
            raise ConfigError(
                f"a task must be i/n with 0 <= i < n <= {_MAX_TASKS}, got {self}; tasks count from 0."
            )

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``"3/8"``.

        Raises:
            ConfigError: The text is not of this form.
        """
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if match is None:
            raise ConfigError("a task must be i/n, such as 0/8, with i counted from 0; correct it.")
        return cls(int(match[1]), int(match[2]))

    @property
    def name(self) -> str:
        """Stem of the task's file names: ``task-00003-of-00008``."""
        return f"task-{self.index:05d}-of-{self.count:05d}"

    def order(self, batches: Sequence[int]) -> list[int]:
        """Order the batches of the header pass: the task's own part first, then those of the other tasks.

        Batches that another task has finished are only loaded. Each task visits the rest in an order of its
        own, so that tasks that cover for a missing one divide its batches among themselves.
        """
        start, stop = (len(batches) * edge // self.count for edge in (self.index, self.index + 1))
        others = [*batches[:start], *batches[stop:]]
        others.sort(key=lambda batch: hashlib.sha256(f"{self}:{batch}".encode("ascii")).digest())
        return [*batches[start:stop], *others]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths of everything that a job writes."""

    output: Path
    private: Path
    array_task: ArrayTask | None = None
    """The array task that this process is; None for a whole job."""

    @property
    def work(self) -> Path:
        """Hidden folder for what is not part of the dataset (yet); removed when the job ends."""
        return self.output / _WORK

    @property
    def fragments(self) -> Path:
        """Packed studies, waiting to be assembled into shards."""
        return self.work / "fragments"

    @property
    def records(self) -> Path:
        """One JSON record for each finished shard."""
        return self.work / "shards"

    @property
    def rows(self) -> Path:
        """Rows of the samples table that the job makes, until it is written."""
        return self.work / "rows"

    @property
    def headers(self) -> Path:
        """Header rows of the input files; private."""
        return self.private / "headers"

    @property
    def reports(self) -> Path:
        """Report texts, concatenated; private. Every array task writes its own file."""
        return self.private / (
            "reports.bin" if self.array_task is None else f"reports-{self.array_task.name}.bin"
        )

    @property
    def documents(self) -> Path:
        """Texts of the PDF and RTF reports that the job has read; private, and likewise."""
        return self.reports.with_name(self.reports.name.replace("reports", "reports-documents", 1))

    @property
    def crash_log(self) -> Path:
        """Studies and files that crashed their process twice; private, an input of every later run.

        Every array task appends to its own file: not every file system can append from several machines.
        """
        if self.array_task is None:
            return self.private / "resource_outcomes.jsonl"
        return self.private / f"resource_outcomes-{self.array_task.name}.jsonl"

    @property
    def process_log(self) -> Path:
        """Standard error of starting packing processes, and stack traces of crashes; private."""
        return self.private / "packing-processes.log"

    @property
    def uploaded(self) -> Path:
        """Marks of files that were uploaded."""
        return self.work / "uploaded"

    @property
    def tasks(self) -> Path:
        """Locks of the array tasks, and their count."""
        return self.work / "tasks"

    @property
    def num_tasks(self) -> int | None:
        """Number of array tasks of the job; None if none has run."""
        return _read_count(self.tasks)

    @property
    def retry_mark(self) -> Path:
        """Name of the version that a `retry` started from; private."""
        return self.private / "retrying"

    @property
    def unfinished(self) -> str | None:
        """Kind of the interrupted job, other than a first packing; None if there is none."""
        try:
            return (self.work / "job").read_text(encoding="ascii").strip() or None
        except OSError:
            return None

    def begin(self, kind: str) -> None:
        """Record the kind of job, so that the next job knows what was interrupted."""
        write_plainly(self.work / "job", kind.encode("ascii"), mode=0o644)

    def private_ledger(self, plan_digest: str) -> Path:
        """Private ledger of a plan: maps surrogates back to input paths."""
        return self.private / f"inputs-{plan_digest[:16]}.jsonl"

    def people_ledger(self, plan_digest: str) -> Path:
        """Evidence of identity of a plan's patients, by surrogate; private."""
        return self.private / f"people-{plan_digest[:16]}.jsonl"

    def pictures(self, plan_digest: str) -> Path:
        """Pictures of images that a plan held back or blanked; private."""
        return self.private / f"pictures-{plan_digest[:16]}.jsonl"

    def remove_work(self) -> None:
        """Remove the work folder, temporary files of killed writers, and the private spools."""
        facts = self.output.glob("facts/*/*")
        for folder in (self.output, self.output / "shards", self.output / "samples", *facts, self.private):
            for path in folder.glob("*"):
                if is_temporary_name(path.name):
                    path.unlink()
        shutil.rmtree(self.headers, ignore_errors=True)
        for path in self.private.glob("reports*.bin"):
            path.unlink()
        self.retry_mark.unlink(missing_ok=True)
        lock = _lock_path(self.output)
        for entry in self.work.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != lock:
                entry.unlink()
        # The lock goes last: once it is gone, another job may create its own, and with it the folder.
        lock.unlink(missing_ok=True)
        with suppress(OSError):
            self.work.rmdir()


@contextmanager
def locked_workspace(
    output: Path,
    private: Path,
    inputs: tuple[Path, ...] = (),
    *,
    writes_output: bool = True,
    array_task: ArrayTask | None = None,
) -> Iterator[Workspace]:
    """Create the folders and hold the exclusive right to write into them.

    Args:
        output: Folder of the dataset.
        private: The private folder.
        inputs: Input folders; neither of the above may overlap with them.
        writes_output: Whether the job writes into ``output``; without, only ``private`` is locked.
        array_task: The array task that this is; tasks share the locks with each other, and with nobody else.

    Raises:
        ConfigError: A folder is unsuitable, or another job holds the lock.
        StorageError: The folders cannot be created.
    """
    output, private = output.absolute(), private.absolute()
    _check_apart(output, private, inputs)
    _check_contents(output)
    workspace = Workspace(output, private, array_task)
    with naming_os_errors("creating output and private_dir"):
        try:
            private.mkdir(parents=True, exist_ok=True, mode=0o700)
            if writes_output:
                output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in _SETTINGS_ERRORS:
                raise
            raise ConfigError(
                f"output and private_dir must be folders that this job can create, got: {os_reason(error)}; "
                "correct their paths, or the rights of the folders above them."
            ) from None
    if stat.S_IMODE(private.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError("private_dir must be closed to group and others; run chmod 700 on it.")
    with ExitStack() as locks:
        locks.enter_context(_lock(private / "lock", "private_dir", is_shared=array_task is not None))
        if writes_output:
            locks.enter_context(_lock(_lock_path(output), "output", is_shared=array_task is not None))
        if array_task is not None:
            locks.enter_context(_lock(workspace.tasks / f"{array_task.name}.lock", f"task {array_task}"))
            _agree_on_count(workspace.tasks, array_task)
        with naming_os_errors("creating the work folders"):
            if writes_output:
                for folder in (workspace.fragments, workspace.records):
                    folder.mkdir(parents=True, exist_ok=True)
            workspace.headers.mkdir(exist_ok=True, mode=0o700)
        yield workspace


def write_plainly(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file of the work or private folder atomically, without forcing it to disk.

    Readers verify what they read, and whatever a power cut destroys is made again.

    Raises:
        StorageError: There is no space, or no permission.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with naming_os_errors("writing a work file"):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            temporary.replace(path)
    except StorageError:
        temporary.unlink(missing_ok=True)
        raise


def _check_apart(output: Path, private: Path, inputs: tuple[Path, ...]) -> None:
    resolved_output, resolved_private = output.resolve(), private.resolve()
    if resolved_private.is_relative_to(resolved_output) or resolved_output.is_relative_to(resolved_private):
        raise ConfigError(
            "private_dir must be outside output, and output outside private_dir; move one of them."
        )
    for index, root in enumerate(inputs):
        resolved = root.resolve()
        for name, own in (("output", resolved_output), ("private_dir", resolved_private)):
            if own.is_relative_to(resolved) or resolved.is_relative_to(own):
                raise ConfigError(
                    f"{name} must not overlap with the input folders, but one of it and input folder "
                    f"{index + 1} is inside the other; move {name}."
                )


def _check_contents(output: Path) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError("output must be a folder, got a file; name another folder.")
    foreign = [
        entry
        for entry in output.iterdir()
        if not entry.name.startswith(_OWN_NAMES) and not is_temporary_name(entry.name)
    ]
    if foreign:
        raise ConfigError(
            f"output must be new, empty or a dataset, got a folder with {len(foreign)} other entries; "
            "name another folder."
        )


def _read_count(folder: Path) -> int | None:
    try:
        return int((folder / "count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _agree_on_count(folder: Path, array_task: ArrayTask) -> None:
    """Refuse tasks of different counts: they could remove each other's fragments."""
    if _read_count(folder) is None:
        write_plainly(folder / f"count-{array_task.name}", str(array_task.count).encode("ascii"), mode=0o644)
        # Unlike a rename, a link never replaces what another task has written meanwhile.
        with suppress(FileExistsError):
            (folder / "count").hardlink_to(folder / f"count-{array_task.name}")
        (folder / f"count-{array_task.name}").unlink(missing_ok=True)
    count = _read_count(folder)
    if count != array_task.count:
        raise ConfigError(
            f"all tasks of a job must have the same count, got {array_task} after tasks of {count}; "
            f"continue with --task i/{count}, or finish with plain `shardflow pack`, which keeps what is "
            "packed."
        )


@contextmanager
def _lock(path: Path, name: str, *, is_shared: bool = False) -> Iterator[None]:
    """Hold a lock that the kernel releases when this process ends, however it ends."""
    mode = (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    for _ in range(_LOCK_TRIES):
        with naming_os_errors(f"locking {name}"):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # the job that held it has just ended and removed the folder
        try:
            with naming_os_errors(f"locking {name}"):
                try:
                    fcntl.flock(descriptor, mode)
                except BlockingIOError:
                    break
            if not _is_same_file(descriptor, path):
                continue  # the job that held it has just ended and removed it
            yield
            return
        finally:
            os.close(descriptor)
    raise ConfigError(f"another job is using {name}; wait until it ends.")


def _lock_path(output: Path) -> Path:
    return output / _WORK / "lock"


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def reason_of_failure(failure: Failure) -> Reason:
    """Return the ledger's reason for a failed task."""
    return _REASONS[failure]


def conversion_of(surrogate: str) -> str:
    """Return the name under which a crash in the conversion of an attachment is logged."""
    return f"{surrogate}{_CONVERSION}"


class CrashLog:
    """Log of inputs that crashed their packing process, an input of every later run.

    Whether a study exceeds a memory limit or a deadline may depend on the machine and the moment. The first
    crash only causes a second try, alone; the second one is logged in the private folder. From then on it is
    a known fact about that input: a rerun quarantines it without trying, and produces identical bytes
    (docs/adr/0031). To try again, remove the line.

    Args:
        path: JSONL file to append to; need not exist. Files of array tasks beside it are read too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, int], str] = {}
        for path in self._paths():
            for record in read_events(path):
                if record.get("event") == "resource_outcome" and record.get("reason") in _REASONS.values():
                    self._known[str(record.get("input")), int(record.get("num_bytes", -1))] = record["reason"]

    def __len__(self) -> int:
        return len(self._known)

    def find(self, surrogate: str, num_bytes: int) -> str | None:
        """Return the logged reason of a file or study, by surrogate and input size, or None."""
        return self._known.get((surrogate, num_bytes))

    def lift(self, surrogates: Container[str]) -> None:
        """Remove the entries of files, their conversions and studies, so that they are tried again.

        Raises:
            StorageError: The log cannot be written.
        """
        kept = {
            key: reason
            for key, reason in self._known.items()
            if key[0].removesuffix(_CONVERSION) not in surrogates
        }
        if len(kept) == len(self._known):
            return
        unfinished = self._path.with_name(f"{self._path.name}.new")
        unfinished.unlink(missing_ok=True)
        with EventLog(unfinished, mode=0o600) as log:
            for (surrogate, num_bytes), reason in kept.items():
                log.write("resource_outcome", input=surrogate, num_bytes=num_bytes, reason=reason)
            log.sync()
        unfinished.replace(self._path)
        for path in self._paths():
            if path != self._path:
                path.unlink()
        self._known = kept

    def add(self, surrogate: str, num_bytes: int, reason: str) -> None:
        """Append an entry, durably.

        Raises:
            StorageError: The log cannot be written.
        """
        with EventLog(self._path, mode=0o600) as log:
            log.write("resource_outcome", input=surrogate, num_bytes=num_bytes, reason=str(reason))
            log.sync()
        self._known[surrogate, num_bytes] = str(reason)

    def _paths(self) -> list[Path]:
        own = [self._path] if self._path.exists() else []
        return [*own, *(path for path in sorted(self._path.parent.glob(_CRASH_LOGS)) if path != self._path)]


@contextmanager
def reading_private(what: str) -> Iterator[None]:
    """Read lines of a file of the private folder inside the block.

    Raises:
        FormatError: A line is damaged.
        StorageError: The file cannot be read.
    """
    try:
        with naming_os_errors(f"reading {what}"):
            yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{what} in the private folder holds a damaged line ({type(error).__name__}); restore it from "
            "a copy."
        ) from None
