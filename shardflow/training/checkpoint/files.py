"""Checkpoint folders: published whole or not at all, and verified before they are used.

A checkpoint is ``checkpoints/step-00000012/`` with ``model.safetensors``, ``optimizer.safetensors`` and
``state.json``; if every rank holds a part of the model, each has its own pair of tensor files
(``model-00003.safetensors``), whose rows follow one another in rank order. It is written into a hidden
folder, every file synced, then renamed, then the parent is synced, then ``latest`` points to it.
``loader.lock.json`` lists what the run read, and its digest is in the loader's state. ``state.json`` holds
size and SHA-256 of the tensor files and its own digest; no byte of a tensor file is
parsed before its digest is verified. No pickle (docs/adr/0052).

Invariant: the newest sound folder is the truth; ``latest`` is a pointer for people and tools, moved last, so
that it never names a checkpoint that a power cut could take back. A run that falls back sets the newer,
damaged folders aside first, so that they do not count as its newest ones when old checkpoints are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from shardflow.errors import CheckpointError, StorageError, os_reason
from shardflow.loading.rows.lock import LOCK_NAME
from shardflow.storage import fsync_directory, write_atomic
from shardflow.training.checkpoint.tensors import PiecewiseTensors, TensorFile, TensorFileError, write_tensors

FORMAT_VERSION: Final = 1
"""Raised when a file or key is added, removed or changes its meaning (change class CHECKPOINT STATE)."""
SHARDED_FORMAT_VERSION: Final = 2
"""The same with a pair of tensor files for each rank; older readers refuse it by its number."""

_PARTS = ("model", "optimizer")
STATE_FILE, _LATEST = "state.json", "latest"
_NAME = re.compile(r"step-(\d{8,})")
_TENSOR_FILE = re.compile(r"(model|optimizer)(?:-\d{5})?\.safetensors")
_UNFINISHED = re.compile(r"\.(?:unfinished|removed)-.*")
_DAMAGED = "damaged-"
_MAX_STATE_BYTES = 64 * 1024**2
_HASHING_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that was read back and found sound."""

    name: str
    """Such as ``step-00000012``."""
    state: dict[str, Any]
    """What the run put there, without the checkpoint's own bookkeeping."""
    model: PiecewiseTensors
    optimizer: PiecewiseTensors
    lock: dict[str, Any] | None = None
    """What the run read, see `shardflow.loading.rows.lock`; None in a checkpoint older than locks."""


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: The folder; created with the first checkpoint.
        keep_last: How many checkpoints stay; older ones are removed once a new one is saved.
    """

    def __init__(self, path: Path, *, keep_last: int) -> None:
        self.path = path
        self._keep_last = keep_last

    def names(self) -> list[str]:
        """List the checkpoints that have their final name, newest first; damaged ones included."""
        if not self.path.is_dir():
            return []
        found = [entry.name for entry in self.path.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(found, key=step_of, reverse=True)

    def begin(self, global_step: int) -> Path:
        """Make the hidden folder that a checkpoint is written into, and return it.

        Raises:
            CheckpointError: it could not be written (no space, no permission); earlier checkpoints are
                untouched. The same holds for :meth:`write_part` and :meth:`publish`.
        """
        unfinished = self.path / f".unfinished-{_name_of(global_step)}-{secrets.token_hex(4)}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            unfinished.mkdir()
        except OSError as error:
            raise _unwritten(global_step, error) from None
        return unfinished

    def write_part(
        self,
        unfinished: Path,
        global_step: int,
        *,
        model: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
        part: int | None = None,
    ) -> dict[str, Any]:
        """Write and sync the tensors that one rank holds.

        Args:
            unfinished: What :meth:`begin` returned.
            global_step: Steps that are done.
            model: Tensors, or this rank's rows of them.
            optimizer: The same of the optimizer.
            part: The rank, where each writes its own; None where this is all.

        Returns:
            For :meth:`publish`: size and digest of each file, by its name.
        """
        suffix = "" if part is None else f"-{part:05d}"
        files: dict[str, Any] = {}
        try:
            for kind, tensors in zip(_PARTS, (model, optimizer), strict=True):
                file_name = f"{kind}{suffix}.safetensors"
                files[file_name] = write_tensors(unfinished / file_name, tensors)
        except (OSError, TensorFileError) as error:
            if part is None:
                shutil.rmtree(unfinished, ignore_errors=True)
            for kind in _PARTS:  # others may still be writing theirs
                (unfinished / f"{kind}{suffix}.safetensors").unlink(missing_ok=True)
            raise _unwritten(global_step, error) from None
        return files

    def publish(
        self,
        unfinished: Path,
        global_step: int,
        *,
        state: Mapping[str, Any],
        files: Mapping[str, Any],
        lock: bytes | None = None,
    ) -> str:
        """Give a completely written checkpoint its name, point ``latest`` to it, remove old ones.

        Args:
            unfinished: What :meth:`begin` returned.
            global_step: Steps that are done.
            state: JSON object of everything that is no tensor.
            files: What :meth:`write_part` returned, of all ranks together.
            lock: Content of ``loader.lock.json``, whose digest is in the loader's state.

        Returns:
            The checkpoint's name.
        """
        name = _name_of(global_step)
        is_sharded = any(f"{kind}.safetensors" not in files for kind in _PARTS)
        content: dict[str, Any] = {
            "format_version": SHARDED_FORMAT_VERSION if is_sharded else FORMAT_VERSION,
            "files": dict(files),
            "run": dict(state),
        }
        content["digest"] = _digest_of(content)
        try:
            if lock is not None:
                _write_synced(unfinished / LOCK_NAME, lock)
            _write_synced(unfinished / STATE_FILE, _canonical(content))
            fsync_directory(unfinished)
            self._rename(unfinished, self.path / name)
            self._point_latest(name)
        except (OSError, StorageError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise _unwritten(global_step, error) from None
        self._remove_old()
        return name

    def newest_sound(self) -> tuple[Checkpoint | None, list[str]]:
        """Read the newest checkpoint that is sound.

        Returns:
            The checkpoint, or None where there is none, and a sentence for each newer one that is damaged.
        """
        problems: list[str] = []
        for name in self.names():
            try:
                return read_checkpoint(self.path / name), problems
            except CheckpointError as error:
                problems.append(error.message)
        return None, problems

    def resume_from(self, name: str) -> None:
        """Make a checkpoint the newest one; only for the one process that may write here.

        Newer folders, which are damaged, get a name beginning with ``damaged-`` and are never removed.
        ``latest`` is put right where a kill came before it was moved.

        Raises:
            CheckpointError: The folder cannot be written.
        """
        try:
            for newer in self.names():
                if newer == name:
                    break
                (self.path / newer).rename(self.path / f"{_DAMAGED}{newer}-{secrets.token_hex(4)}")
            fsync_directory(self.path)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints newer than {name} could not be set aside: {os_reason(error)}; make run.output "
                "writable and start again."
            ) from None
        self._point_latest(name)

    def remove_unfinished(self) -> None:
        """Remove what a killed run left half written; only for the one process that may write here."""
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if _UNFINISHED.fullmatch(entry.name):
                    shutil.rmtree(entry, ignore_errors=True)

    def _rename(self, unfinished: Path, final: Path) -> None:
        if final.exists():
            # A damaged checkpoint of the same step, which the run fell back from and has now reached again.
            self._remove(final)
        unfinished.rename(final)
        fsync_directory(self.path)

    def _point_latest(self, name: str) -> None:
        latest, content = self.path / _LATEST, f"{name}\n".encode()
        if not latest.is_file() or latest.read_bytes() != content:
            write_atomic(latest, [content], replace=True)

    def _remove_old(self) -> None:
        for name in self.names()[self._keep_last :]:
            self._remove(self.path / name)

    def _remove(self, folder: Path) -> None:
        # Renamed first: a folder that is being emptied must not look like a damaged checkpoint.
        doomed = self.path / f".removed-{folder.name}-{secrets.token_hex(4)}"
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint; every digest is checked before anything of a file is parsed.

    Tensors stay in the mapped files until they are asked for, by rows.

    Raises:
        CheckpointError: a file is missing, cut, changed, or of another format version.
    """
    name = folder.name
    content = _read_state(folder, name)
    files = content["files"]
    for file_name in files:
        if not _TENSOR_FILE.fullmatch(file_name):
            raise _damaged(name, "tensor files of known names", "another name")

    def open_file(file_name: str) -> TensorFile:
        try:
            facts = files[file_name]
            return TensorFile(folder / file_name, num_bytes=facts["num_bytes"], sha256=facts["sha256"])
        except OSError as error:
            raise _damaged(name, f"a readable {file_name}", os_reason(error)) from None
        except TensorFileError as error:
            raise _damaged(name, f"{file_name} with its recorded size and digest", str(error)) from None

    # Hashing a large file takes seconds and does not hold the interpreter.
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        opened = dict(zip(files, pool.map(open_file, files), strict=True))
    model, optimizer = (
        PiecewiseTensors([opened[file_name] for file_name in sorted(files) if file_name.startswith(kind)])
        for kind in _PARTS
    )
    lock = _read_lock(folder, name, content["run"])
    return Checkpoint(name=name, state=content["run"], model=model, optimizer=optimizer, lock=lock)


def read_run_state(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors, checked by its digest; those are not read.

    Raises:
        CheckpointError: it is missing, cut, changed, or of another format version.
    """
    state: dict[str, Any] = _read_state(folder, folder.name)["run"]
    return state


def _read_lock(folder: Path, name: str, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the loader's lock; None if its state names none."""
    loader = state.get("loader")
    digest = loader.get("lock") if isinstance(loader, Mapping) else None
    if digest is None:
        return None
    try:
        data = (folder / LOCK_NAME).read_bytes()
    except OSError as error:
        raise _damaged(name, f"a readable {LOCK_NAME}", os_reason(error)) from None
    if not digest or not hashlib.sha256(data).hexdigest().startswith(digest):
        raise _damaged(name, f"{LOCK_NAME} with the digest of the loader's state", "another one")
    lock: dict[str, Any] = json.loads(data)
    return lock


def _read_state(folder: Path, name: str) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        if path.stat().st_size > _MAX_STATE_BYTES:
            raise _damaged(name, f"{STATE_FILE} of at most {_MAX_STATE_BYTES} bytes", "more")
        data = path.read_bytes()
    except OSError as error:
        raise _damaged(name, f"a readable {STATE_FILE}", os_reason(error)) from None
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(name, f"{STATE_FILE} as JSON", type(error).__name__) from None
    # Compared as bytes, so that a bit that JSON does not care about is found as well.
    is_own = isinstance(content, dict) and _canonical(content) == data
    if not is_own or content.pop("digest", None) != _digest_of(content):
        raise _damaged(name, f"{STATE_FILE} with its own digest", "another one")
    state: dict[str, Any] = content
    if state.get("format_version") not in {FORMAT_VERSION, SHARDED_FORMAT_VERSION}:
        known = f"format version {FORMAT_VERSION} or {SHARDED_FORMAT_VERSION}"
        raise _damaged(name, known, repr(state.get("format_version")))
    files: Any = state.get("files")
    is_whole = isinstance(state.get("run"), dict) and isinstance(files, dict)
    if not is_whole or not all(
        isinstance(facts, dict) and {"num_bytes", "sha256"} <= facts.keys() for facts in files.values()
    ):
        raise _damaged(name, f"{STATE_FILE} with the run's state and its files", "others")
    return state


def _damaged(name: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {name} is damaged: expected {expected}, found {found}; it is not used."
    )


def _unwritten(global_step: int, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {_name_of(global_step)} could not be written: {os_reason(error)}; earlier checkpoints "
        "are untouched: free up space in run.output and start again."
    )


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _name_of(global_step: int) -> str:
    return f"step-{global_step:08d}"


def step_of(name: str) -> int:
    """Return the global step that a checkpoint is named for; -1 of another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else -1
