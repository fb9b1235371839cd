"""Packing in tasks: which of several tasks this is, and which headers it reads first.

Every task comes to the same plan by itself, from the header rows that all of them share. No task waits for
another: one that finds header rows missing reads those files itself.

The folders of a job: the dataset's, the hidden work folder inside it, and the private one beside it.

Owns who may write there (one job at a time) and what may be there. The dataset's folder only ever holds the
manifests, ``shards/``, ``samples/``, ledgers, pages, ``tokens/``, ``views/`` and, while a job runs or
was killed, ``.work/``. The private folder holds identifiers; nothing of it is ever copied into the dataset.

Deaths of packing processes, recorded as inputs of every later run.

Whether a study runs into a memory limit, a deadline or a crash may depend on the machine and the moment. So
the first such death only asks for a second try, alone; the second one is written down in the private folder,
and from then on it is what is known of that input: a re-run quarantines it without trying and comes to the
same bytes (see docs/adr/0031-packing-processes.md). To try again, remove the line.
"""

from __future__ import annotations

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

from shardflow.errors import ConfigError, StorageError
from shardflow.format.reasons import Reason
from shardflow.logs import EventLog, read_events
from shardflow.storage import is_temporary_name

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from shardflow.packing.engines.base import Failure

_MAX_TASKS: Final = 100_000


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """One task of several: the ``index``-th of ``count``, from 0."""

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
        """Read ``"3/8"``.

        Raises:
            ConfigError: It is no such text.
        """
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if match is None:
            raise ConfigError("a task must be i/n, such as 0/8, got another text; tasks count from 0.")
        return cls(int(match[1]), int(match[2]))

    @property
    def name(self) -> str:
        """Name of its files: ``task-00003-of-00008``."""
        return f"task-{self.index:05d}-of-{self.count:05d}"

    def order(self, batches: Sequence[int]) -> list[int]:
        """Order the batches of the header pass: its own part first, then those of the others.

        The others' are read back, where they are there. In an order of its own for each task: tasks that read
        for one that does not run share its work, and do not meet in the same batch.
        """
        start, stop = (len(batches) * edge // self.count for edge in (self.index, self.index + 1))
        others = [*batches[:start], *batches[stop:]]
        others.sort(key=lambda batch: hashlib.sha256(f"{self}:{batch}".encode("ascii")).digest())
        return [*batches[start:stop], *others]


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
    _WORK,
)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where everything lies while a job runs."""

    output: Path
    private: Path
    array_task: ArrayTask | None = None
    """The task that this is, of a job in tasks."""

    @property
    def work(self) -> Path:
        """Hidden folder for what is not yet, or never will be, part of the dataset; removed at the end."""
        return self.output / _WORK

    @property
    def fragments(self) -> Path:
        """Packed studies that wait for their shard."""
        return self.work / "fragments"

    @property
    def records(self) -> Path:
        """What is known of each shard that stands."""
        return self.work / "shards"

    @property
    def headers(self) -> Path:
        """Header rows of the input files; private."""
        return self.private / "headers"

    @property
    def reports(self) -> Path:
        """Texts of the reports, one after another; private. Every task writes its own."""
        return self.private / (
            "reports.bin" if self.array_task is None else f"reports-{self.array_task.name}.bin"
        )

    @property
    def crash_log(self) -> Path:
        """Studies and files that ended their process twice; private, an input of every run.

        Every task writes its own file: appending from several machines to one is not safe everywhere.
        """
        if self.array_task is None:
            return self.private / "resource_outcomes.jsonl"
        return self.private / f"resource_outcomes-{self.array_task.name}.jsonl"

    @property
    def process_log(self) -> Path:
        """What packing processes say while they start, and where in the code they crashed; private."""
        return self.private / "packing-processes.log"

    @property
    def uploaded(self) -> Path:
        """Marks of the files that an object store has."""
        return self.work / "uploaded"

    @property
    def tasks(self) -> Path:
        """Locks of tasks, and how many they are."""
        return self.work / "tasks"

    @property
    def num_tasks(self) -> int | None:
        """Into how many tasks the job was divided; None where no task has run."""
        return _read_count(self.tasks)

    @property
    def retry_mark(self) -> Path:
        """Says which version a `retry` has begun with; private."""
        return self.private / "retrying"

    @property
    def unfinished(self) -> str | None:
        """What kind of job, beside a first packing, was stopped here; None where none was."""
        try:
            return (self.work / "job").read_text(encoding="ascii").strip() or None
        except OSError:
            return None

    def begin(self, kind: str) -> None:
        """Say what kind of job works here, for whoever finds its work folder."""
        write_plainly(self.work / "job", kind.encode("ascii"), mode=0o644)

    def private_ledger(self, plan_digest: str) -> Path:
        """The way back from surrogates to input paths; private."""
        return self.private / f"inputs-{plan_digest[:16]}.jsonl"

    def remove_work(self) -> None:
        """Remove the work folder, what killed writers left, and the private spools: nothing needs them."""
        for folder in (self.output, self.output / "shards", self.output / "samples", self.private):
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
        # The lock goes last: from then on another job may have one here, and with it the folder.
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
    """Make the folders and hold the only right to write into them.

    Args:
        output: Folder of the dataset.
        private: The private folder.
        inputs: Folders that both must lie apart from.
        writes_output: Whether the job may write into ``output``; one that may not only holds ``private``.
        share: The task that this is: tasks share the folders with each other, and with nobody else.

    Raises:
        ConfigError: The folders are not as they must be, or another job holds the right.
        StorageError: They cannot be made.
    """
    output, private = output.absolute(), private.absolute()
    _check_apart(output, private, inputs)
    _check_contents(output)
    workspace = Workspace(output, private, array_task)
    try:
        private.mkdir(parents=True, exist_ok=True, mode=0o700)
        if writes_output:
            output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"output and private_dir must be folders that can be made, got {type(error).__name__}; "
            "correct them."
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
        try:
            if writes_output:
                for folder in (workspace.fragments, workspace.records):
                    folder.mkdir(parents=True, exist_ok=True)
            workspace.headers.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise storage_error("making the work folders", error) from None
        yield workspace


def write_plainly(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file of the work or private folder: whole or not at all, but not forced to the disk.

    What a power cut takes of it is made again; its readers check what they read.

    Raises:
        StorageError: No space, or no permission.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error("writing a work file", error) from None


def storage_error(action: str, error: OSError) -> StorageError:
    """Say what failed without a path: work files are named after surrogates, but folders after people."""
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return StorageError(
        f"{action} must succeed, got: {reason}; make room or repair it, and run the job again."
    )


def _check_apart(output: Path, private: Path, inputs: tuple[Path, ...]) -> None:
    resolved_output, resolved_private = output.resolve(), private.resolve()
    if resolved_private.is_relative_to(resolved_output) or resolved_output.is_relative_to(resolved_private):
        raise ConfigError(
            "private_dir must lie outside output, and output outside private_dir; move one of them."
        )
    for index, root in enumerate(inputs):
        resolved = root.resolve()
        for name, own in (("output", resolved_output), ("private_dir", resolved_private)):
            if own.is_relative_to(resolved) or resolved.is_relative_to(own):
                raise ConfigError(
                    f"{name} must lie apart from the input folders (number {index + 1}), got one inside the "
                    "other; move it."
                )


def _check_contents(output: Path) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError("output must be a folder, got a file; name another place.")
    foreign = [
        entry
        for entry in output.iterdir()
        if not entry.name.startswith(_OWN_NAMES) and not is_temporary_name(entry.name)
    ]
    if foreign:
        raise ConfigError(
            f"output must be new, empty or a dataset, got a folder with {len(foreign)} other entries; "
            "name another place."
        )


def _read_count(folder: Path) -> int | None:
    try:
        return int((folder / "count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _agree_on_count(folder: Path, array_task: ArrayTask) -> None:
    """Let all tasks be of one division: of two, tasks could remove each other's fragments."""
    if _read_count(folder) is None:
        write_plainly(folder / f"count-{array_task.name}", str(array_task.count).encode("ascii"), mode=0o644)
        # A link, unlike a rename, leaves what another task has put there meanwhile.
        with suppress(FileExistsError):
            (folder / "count").hardlink_to(folder / f"count-{array_task.name}")
        (folder / f"count-{array_task.name}").unlink(missing_ok=True)
    count = _read_count(folder)
    if count != array_task.count:
        raise ConfigError(
            f"the tasks of a job must be of one number, got {array_task} after tasks of {count}; go on with "
            f"--task i/{count}, or finish with `shardflow pack` alone, which takes over what stands."
        )


@contextmanager
def _lock(path: Path, name: str, *, is_shared: bool = False) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops when this process ends, however it ends."""
    for _ in range(_LOCK_TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the job that held it has just ended and removed the folder
        except OSError as error:
            raise storage_error(f"locking {name}", error) from None
        try:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                break
            except OSError as error:
                raise storage_error(f"locking {name}", error) from None
            if not _is_same_file(descriptor, path):
                continue  # the job that held it has just ended and removed it
            yield
            return
        finally:
            os.close(descriptor)
    raise ConfigError(f"{name} must be used by one job at a time, got a running one; wait for it.")


def _lock_path(output: Path) -> Path:
    return output / _WORK / "lock"


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


_REASONS: Final[dict[str, Reason]] = {
    "failed": Reason.WORKER_FAILED,
    "killed": Reason.WORKER_KILLED,
    "out_of_memory": Reason.WORKER_OUT_OF_MEMORY,
    "timeout": Reason.WORKER_TIMEOUT,
}


_CONVERSION: Final = "/convert"
_PATTERN: Final = "resource_outcomes*.jsonl"


def reason_of_failure(failure: Failure) -> Reason:
    """Return the ledger's reason for a failed task."""
    return _REASONS[failure]


def conversion_of(surrogate: str) -> str:
    """Return what the conversion of an attachment is recorded as: the file itself can be read."""
    return f"{surrogate}{_CONVERSION}"


class CrashLog:
    """The recorded outcomes of one private folder.

    Args:
        path: The JSONL file to add to; need not exist. What tasks have recorded beside it is known too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, int], str] = {}
        for path in self._paths():
            for record in read_events(path):
                if record.get("event") == "resource_outcome" and record.get("reason") in set(
                    _REASONS.values()
                ):
                    self._known[str(record.get("input")), int(record.get("num_bytes", -1))] = record["reason"]

    def __len__(self) -> int:
        return len(self._known)

    def find(self, surrogate: str, num_bytes: int) -> str | None:
        """Return the recorded reason of a file or study, by surrogate and input size; None without one."""
        return self._known.get((surrogate, num_bytes))

    def lift(self, surrogates: Container[str]) -> None:
        """Forget what is recorded of files, their conversions and studies, so that they are tried again.

        Raises:
            StorageError: The file cannot be written.
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
        """Record an outcome, durably.

        Raises:
            StorageError: It cannot be written.
        """
        with EventLog(self._path, mode=0o600) as log:
            log.write("resource_outcome", input=surrogate, num_bytes=num_bytes, reason=str(reason))
            log.sync()
        self._known[surrogate, num_bytes] = str(reason)

    def _paths(self) -> list[Path]:
        own = [self._path] if self._path.exists() else []
        return [*own, *(path for path in sorted(self._path.parent.glob(_PATTERN)) if path != self._path)]
