"""What a corpus job will do: files in their order, parts, and the digest of all that decides the bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardflow.corpora.inputs import InputFile, Piece, cut_parts
from shardflow.corpora.known_files import KnownFile
from shardflow.corpora.passes import run_all
from shardflow.packing.engine import Task

if TYPE_CHECKING:
    from shardflow.corpora.config import CorpusConfig
    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.engine import Engine

__all__ = ["CorpusPlan", "FoundFile", "build_plan", "look_at"]

_PLAN_VERSION: Final = 1
_FILES_AT_ONCE: Final = 32
# Seconds of a task for each MiB of input, beside execution.task_timeout_s: half of the slowest that was seen,
# a Parquet file whose texts are scrubbed strictly.
_SECONDS_PER_MIB: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFile:
    """An input file that was looked at."""

    file: InputFile
    known: KnownFile
    """Surrogate, size and probe; its number of lines is not known yet."""
    groups: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPlan:
    """Files and parts, in their order. Parts are numbered from 1."""

    files: tuple[FoundFile, ...]
    parts: tuple[tuple[Piece, ...], ...]
    digest: str
    """Of files, settings, key and the version before: equal plans give equal datasets."""
    basis: str
    """Digest of all that every part depends on."""

    def payload(self, number: int) -> dict[str, Any]:
        """Return what a task is told of a part."""
        pieces, facts = [], []
        for piece in self.parts[number - 1]:
            found = self.files[piece.file]
            pieces.append(
                {
                    "file": found.known.file,
                    "path": str(found.file.path),
                    "format": found.file.format,
                    "start": piece.start,
                    "stop": piece.stop,
                }
            )
            known = found.known
            facts.append([known.file, known.num_bytes, known.probe, found.file.modified_ns])
            facts.append([piece.start, piece.stop])
        digest = hashlib.sha256(json.dumps([self.basis, number, facts]).encode("ascii")).hexdigest()
        return {"number": number, "digest": digest, "pieces": pieces}

    def num_bytes(self, number: int) -> int:
        """Return the size of a part, as its input is estimated."""
        return sum(piece.weight_bytes for piece in self.parts[number - 1])

    def seconds(self, number: int, base_s: float) -> float:
        """Return the time that a task of a part may take."""
        return base_s + _SECONDS_PER_MIB * self.num_bytes(number) / (1 << 20)


def look_at(pool: Engine, files: Sequence[InputFile], key: SecretKey, timeout_s: float) -> list[FoundFile]:
    """Look at every file with the packing processes.

    Raises:
        StorageError: One cannot be read.
        ShardflowError: One ends its process, whatever is tried: it cannot even be opened.
    """
    results: dict[int, dict[str, Any]] = {}

    def tasks() -> Any:
        for start in range(0, len(files), _FILES_AT_ONCE):
            some = files[start : start + _FILES_AT_ONCE]
            payload = {"files": [[str(file.path), file.format] for file in some]}
            yield Task(kind="inspect", payload=payload, timeout_s=timeout_s, handle=start)

    def take(task: Task, result: dict[str, Any]) -> None:
        for number, facts in enumerate(result["files"]):
            results[task.handle + number] = facts

    run_all(pool, tasks(), take)
    return [
        FoundFile(
            file=file,
            known=KnownFile(
                file=key.surrogate("input", file.name),
                path=str(file.path.absolute()),
                format=file.format,
                num_bytes=file.num_bytes,
                probe=results[number]["probe"],
                num_lines=0,
            ),
            groups=None if results[number]["groups"] is None else tuple(results[number]["groups"]),
        )
        for number, file in enumerate(files)
    ]


def build_plan(
    config: CorpusConfig,
    key: SecretKey,
    files: Sequence[FoundFile],
    *,
    created_with: dict[str, str],
    parent: str | None,
) -> CorpusPlan:
    """Cut the files into parts.

    Args:
        config: The settings.
        key: The secret key.
        files: What is to be packed, in order.
        created_with: Versions of the packages that decide the bytes.
        parent: The version before; None for a first one.
    """
    parts = cut_parts(
        [found.file for found in files], [found.groups for found in files], config.shards.part_bytes
    )
    settings = [config.content_digest(), key.key_id]
    basis = hashlib.sha256(json.dumps([created_with, settings]).encode("ascii")).hexdigest()
    known = [
        [found.known.file, found.known.num_bytes, found.known.probe, found.file.format] for found in files
    ]
    facts = json.dumps([_PLAN_VERSION, settings, parent, known])
    return CorpusPlan(
        files=tuple(files),
        parts=tuple(tuple(part) for part in parts),
        digest=hashlib.sha256(facts.encode("ascii")).hexdigest(),
        basis=basis,
    )
