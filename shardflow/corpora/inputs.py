"""The input files of a corpus, how they are cut into parts, and the list that is kept of them.

A part is what one task reads: some bytes of a plain file, some row groups of a Parquet file, whole compressed
files, or many small ones. Parts follow from names and sizes alone, so every run cuts alike.

The list, one line of JSON for each file, is in the private folder, mode 0600: the way back from surrogates,
and what an append goes by. A line of a file is found again by its place there (docs/corpora.md).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.corpora.lines import reading, row_groups
from shardflow.errors import ConfigError, FormatError, StorageError
from shardflow.storage import write_atomic

if TYPE_CHECKING:
    from shardflow.corpora.config import CorpusConfig
    from shardflow.deid.pseudonyms import SecretKey

_FORMATS: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "gz",
    ".ndjson.gz": "gz",
    ".json.gz": "gz",
    ".jsonl.zst": "zst",
    ".ndjson.zst": "zst",
    ".parquet": "parquet",
}
_LISTED: Final = ("file", "path", "format", "num_bytes", "probe", "num_lines")
_PLAN_VERSION: Final = 1
_PROBE_BYTES: Final = 1 << 16
# What compressed text unfolds to, about; parts depend on it, so it is never tuned.
_INFLATION: Final = 4
# Seconds of a task for each MiB of input, beside execution.task_timeout_s: half of the slowest that was seen,
# a Parquet file whose texts are scrubbed strictly.
_SECONDS_PER_MIB: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file of the inputs; what `inspect_file` finds, and its lines, are filled in as they are known."""

    path: str
    format: str
    """``jsonl``, ``gz``, ``zst``, ``parquet``, or ``other``, which is not read."""
    num_bytes: int
    file: str = ""
    """Surrogate of its name."""
    name: str = ""
    """Number of its folder and path below it: what it is known by."""
    modified_ns: int = 0
    probe: str = ""
    """Digest of its ends."""
    groups: tuple[int, ...] | None = None
    """Bytes of each row group of a Parquet file; None for any other, and for a damaged one."""
    num_lines: int = 0

    def is_same(self, other: InputFile) -> bool:
        """Tell whether it holds what it held, as far as sizes and ends tell."""
        return (self.file, self.num_bytes, self.probe) == (other.file, other.num_bytes, other.probe)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What a part reads of a file."""

    file: int
    start: int
    """First byte of a plain file, first row group of a Parquet file; 0 of any other."""
    stop: int
    weight_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPlan:
    """Files and parts, in their order. Parts are numbered from 1."""

    files: tuple[InputFile, ...]
    parts: tuple[tuple[Piece, ...], ...]
    digest: str
    """Of files, settings, key and the version before: equal plans give equal datasets."""
    basis: str
    """Digest of all that every part depends on."""

    def payload(self, number: int) -> dict[str, Any]:
        """Return what a task is told of a part."""
        pieces, facts = [], []
        for piece in self.parts[number - 1]:
            file = self.files[piece.file]
            pieces.append(
                {
                    "file": file.file,
                    "path": file.path,
                    "format": file.format,
                    "start": piece.start,
                    "stop": piece.stop,
                }
            )
            facts.append([file.file, file.num_bytes, file.probe, file.modified_ns])
            facts.append([piece.start, piece.stop])
        return {"number": number, "digest": _digest([self.basis, number, facts]), "pieces": pieces}

    def num_bytes(self, number: int) -> int:
        """Return the size of a part, as its input is estimated."""
        return sum(piece.weight_bytes for piece in self.parts[number - 1])

    def seconds(self, number: int, base_s: float) -> float:
        """Return the time that a task of a part may take."""
        return base_s + _SECONDS_PER_MIB * self.num_bytes(number) / (1 << 20)


def build_plan(
    config: CorpusConfig,
    key: SecretKey,
    files: Sequence[InputFile],
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
    settings = [config.content_digest(), key.key_id]
    known = [[file.file, file.num_bytes, file.probe, file.format] for file in files]
    return CorpusPlan(
        files=tuple(files),
        parts=tuple(tuple(part) for part in cut_parts(files, config.shards.part_bytes)),
        digest=_digest([_PLAN_VERSION, settings, parent, known]),
        basis=_digest([created_with, settings]),
    )


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()


def discover(roots: Sequence[Path]) -> list[InputFile]:
    """List every file below the roots, in the order of their names.

    Raises:
        ConfigError: A root is not there.
        StorageError: A folder cannot be listed.
    """
    files: list[InputFile] = []
    for number, root in enumerate(roots):
        if not root.exists():
            raise ConfigError(f"inputs.files[{number}] must exist, got nothing there; correct it.")
        found = [root] if root.is_file() else list(_walk(root))
        for path in found:
            below = path.name if path == root else path.relative_to(root).as_posix()
            files.append(_input_file(path, f"{number}/{below}"))
    return sorted(files, key=lambda file: file.name.encode("utf-8", "surrogatepass"))


def _walk(root: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise StorageError(
            f"an input folder must be readable, got {type(error).__name__} {error.errno}; check it."
        ) from None

    for folder, _, names in os.walk(root, onerror=fail):
        for name in names:
            yield Path(folder) / name


def _input_file(path: Path, name: str) -> InputFile:
    try:
        status = path.stat()
        is_file = path.is_file()
    except OSError:
        status, is_file = None, False
    suffix = next((suffix for suffix in _FORMATS if path.name.lower().endswith(suffix)), "")
    return InputFile(
        path=str(path.absolute()),
        name=name,
        num_bytes=status.st_size if status is not None and is_file else 0,
        modified_ns=status.st_mtime_ns if status is not None else 0,
        format=_FORMATS.get(suffix, "other") if is_file else "other",
    )


def inspect_file(path: Path, kind: str) -> dict[str, Any]:
    """Look at a file: what tells it from a changed one, and the row groups of Parquet.

    Returns:
        ``probe``: digest of its first and last 64 KiB; ``groups``: bytes of each row group, None for what is
        no Parquet.

    Raises:
        StorageError: It cannot be read.
    """
    if kind == "other":
        return {"probe": "", "groups": None}
    digest = hashlib.sha256()
    with reading(path.open, "rb") as file:
        digest.update(reading(file.read, _PROBE_BYTES))
        reading(file.seek, max(reading(file.seek, 0, os.SEEK_END) - _PROBE_BYTES, 0))
        digest.update(reading(file.read, _PROBE_BYTES))
    return {
        "probe": digest.hexdigest()[:32],
        "groups": row_groups(path) if kind == "parquet" else None,
    }


def cut_parts(files: Sequence[InputFile], part_bytes: int) -> list[list[Piece]]:
    """Cut files into parts of about so many bytes, in their order.

    A compressed file or a row group that is larger than a part is a part alone.
    """
    parts: list[list[Piece]] = []
    weight = 0
    for number, file in enumerate(files):
        for piece in _pieces(number, file, part_bytes):
            if not parts or weight + piece.weight_bytes > part_bytes:
                parts.append([])
                weight = 0
            parts[-1].append(piece)
            weight += piece.weight_bytes
    return parts


def _pieces(number: int, file: InputFile, part_bytes: int) -> Iterator[Piece]:
    size, groups = file.num_bytes, file.groups
    if file.format == "jsonl":
        count = max(-(-size // part_bytes), 1)
        for index in range(count):
            start, stop = index * size // count, (index + 1) * size // count
            yield Piece(file=number, start=start, stop=stop, weight_bytes=stop - start)
        return
    if file.format != "parquet" or not groups:
        factor = _INFLATION if file.format in {"gz", "zst"} else 1
        yield Piece(file=number, start=0, stop=0, weight_bytes=0 if file.format == "other" else size * factor)
        return
    start = weight = 0
    for group, num_bytes in enumerate(groups):
        if group > start and weight + num_bytes > part_bytes:
            yield Piece(file=number, start=start, stop=group, weight_bytes=weight)
            start, weight = group, 0
        weight += num_bytes
    yield Piece(file=number, start=start, stop=len(groups), weight_bytes=weight)


def list_path(private: Path, plan_digest: str) -> Path:
    """Return where the list of a version's files lies."""
    return private / f"corpus-{plan_digest[:16]}.jsonl"


def write_list(path: Path, files: Iterable[InputFile]) -> None:
    """Write the list of a version's files.

    Raises:
        StorageError: It cannot be written.
    """
    lines = (
        json.dumps({name: getattr(file, name) for name in _LISTED}, separators=(",", ":")) + "\n"
        for file in files
    )
    write_atomic(path, (line.encode("ascii") for line in lines), replace=True, mode=0o600)


def read_list(path: Path) -> list[InputFile]:
    """Read the list of a version's files.

    Raises:
        ConfigError: There is none: another private folder, or a dataset of another job.
        FormatError: It is damaged.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        raise ConfigError(
            "private_dir must hold the list of the corpus' files (corpus-*.jsonl), got none; name the folder "
            "that the dataset was packed with."
        ) from None
    try:
        return [InputFile(**json.loads(line)) for line in lines]
    except (ValueError, TypeError):
        raise FormatError(
            "the list of the corpus' files (corpus-*.jsonl) must be whole, got other bytes; restore it."
        ) from None
