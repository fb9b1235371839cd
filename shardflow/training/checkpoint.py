"""Checkpoints: one folder each, whole or absent, and checked before it is believed.

A checkpoint is ``checkpoints/step-00000012/`` with ``model.safetensors``, ``optimizer.safetensors`` and
``state.json``. It is written into a hidden folder, every file synced, then the folder gets its name by one
rename, then the parent is synced, then ``latest`` names it. ``state.json`` holds size and SHA-256 of the
other files and its own digest; nothing of a tensor file is parsed before its digest is right. No pickle
(docs/adr/0052).

Invariant: the newest sound folder is the truth; ``latest`` is a pointer for people and tools, moved last,
so that it never names a checkpoint that a power cut could take back. A run that falls back sets the newer,
damaged folders aside first: they must not count as its newest ones when old checkpoints are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save_file

from shardflow.errors import CheckpointError
from shardflow.storage import fsync_directory, write_atomic

__all__ = ["FORMAT_VERSION", "Checkpoint", "CheckpointFolder", "read_checkpoint"]

FORMAT_VERSION: Final = 1
"""Raised when a file or key is added, removed or changes its meaning (change class CHECKPOINT STATE)."""

_LOGGER = logging.getLogger(__name__)
_MODEL, _OPTIMIZER, _STATE, _LATEST = "model.safetensors", "optimizer.safetensors", "state.json", "latest"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.(?:unfinished|removed)-.*")
_DAMAGED = "damaged-"
_MAX_STATE_BYTES = 64 * 1024**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that was read back and found sound."""

    name: str
    """Such as ``step-00000012``."""
    state: dict[str, Any]
    """What the run put there, without the checkpoint's own bookkeeping."""
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: The folder; created with the first checkpoint.
        keep_last: How many checkpoints stay; older ones are removed after a new one stands.
    """

    def __init__(self, path: Path, *, keep_last: int) -> None:
        self.path = path
        self._keep_last = keep_last

    def names(self) -> list[str]:
        """List the checkpoints that have their final name, newest first; damaged ones included."""
        if not self.path.is_dir():
            return []
        found = [entry.name for entry in self.path.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(found, key=_step_of, reverse=True)

    def save(
        self,
        global_step: int,
        *,
        state: Mapping[str, Any],
        model: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
    ) -> str:
        """Write a checkpoint; when this returns it survives a power cut.

        Args:
            global_step: Steps that are done.
            state: JSON object of everything that is no tensor.
            model: Flat tensors of the model.
            optimizer: Flat tensors of the optimizer.

        Returns:
            Its name.

        Raises:
            CheckpointError: it could not be written (no space, no permission); earlier checkpoints are
                untouched.
        """
        name = f"step-{global_step:08d}"
        unfinished = self.path / f".unfinished-{name}-{secrets.token_hex(4)}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            unfinished.mkdir()
            files = {
                _MODEL: _write_tensors(unfinished / _MODEL, model),
                _OPTIMIZER: _write_tensors(unfinished / _OPTIMIZER, optimizer),
            }
            content: dict[str, Any] = {"format_version": FORMAT_VERSION, "files": files, "run": dict(state)}
            content["digest"] = _digest_of(content)
            _write_synced(unfinished / _STATE, _canonical(content))
            fsync_directory(unfinished)
            self._publish(unfinished, self.path / name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {name} must be written, got {_reason_of(error)}; earlier checkpoints are "
                "untouched: free space in run.output and start again."
            ) from None
        self._point_latest(name)
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

    def go_on_from(self, name: str) -> None:
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
                f"checkpoints newer than {name} must be set aside, got {_reason_of(error)}; make run.output "
                "writable and start again."
            ) from None
        self._point_latest(name)

    def remove_unfinished(self) -> None:
        """Remove what a killed run left half written; only for the one process that may write here."""
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if _UNFINISHED.fullmatch(entry.name):
                    shutil.rmtree(entry, ignore_errors=True)

    def _publish(self, unfinished: Path, final: Path) -> None:
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

    Raises:
        CheckpointError: a file is missing, cut, changed, or of another format version.
    """
    name = folder.name
    content = _read_state(folder, name)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for file_name in (_MODEL, _OPTIMIZER):
        expected = content["files"][file_name]
        data = _read(folder, name, file_name)
        if len(data) != expected["num_bytes"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise _damaged(name, f"{file_name} with its recorded size and digest", "other bytes")
        tensors[file_name] = parse_tensors(data)
    return Checkpoint(name=name, state=content["run"], model=tensors[_MODEL], optimizer=tensors[_OPTIMIZER])


def _read_state(folder: Path, name: str) -> dict[str, Any]:
    data = _read(folder, name, _STATE)
    try:
        content: Any = json.loads(data)
    except ValueError as error:
        raise _damaged(name, f"{_STATE} as JSON", type(error).__name__) from None
    # Compared as bytes, so that a bit that JSON does not care about is found as well.
    is_own = isinstance(content, dict) and _canonical(content) == data
    if not is_own or content.pop("digest", None) != _digest_of(content):
        raise _damaged(name, f"{_STATE} with its own digest", "another one")
    state: dict[str, Any] = content
    if state.get("format_version") != FORMAT_VERSION:
        raise _damaged(name, f"format version {FORMAT_VERSION}", repr(state.get("format_version")))
    return state


def _read(folder: Path, name: str, file_name: str) -> bytes:
    path = folder / file_name
    try:
        if file_name == _STATE and path.stat().st_size > _MAX_STATE_BYTES:
            raise _damaged(name, f"{_STATE} of at most {_MAX_STATE_BYTES} bytes", "more")
        return path.read_bytes()
    except OSError as error:
        raise _damaged(name, f"a readable {file_name}", type(error).__name__) from None


def _damaged(name: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {name} must have {expected}, got {found}; it is not used.")


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    save_file(dict(tensors), path, metadata={"format": "pt"})
    # save_file makes it readable for its owner alone; the folder has the mode that the user's umask allows.
    path.chmod(path.parent.stat().st_mode & 0o666)
    digest = hashlib.sha256()
    with path.open("r+b") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        num_bytes = file.tell()
        os.fsync(file.fileno())
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _reason_of(error: Exception) -> str:
    code = getattr(error, "errno", None)
    return f"{type(error).__name__} ({os.strerror(code)})" if code else type(error).__name__


def _step_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else -1
