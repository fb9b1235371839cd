"""The input files of a corpus, and how they are cut into parts.

A part is what one task reads: some bytes of a plain file, some row groups of a Parquet file, whole compressed
files, or many small ones. Parts follow from names and sizes alone, so every run cuts alike.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardflow.corpora.rows import row_groups
from shardflow.errors import ConfigError, StorageError

__all__ = ["InputFile", "Piece", "cut_parts", "discover", "inspect_file"]

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
_PROBE_BYTES: Final = 1 << 16
# What compressed text unfolds to, about; parts depend on it, so it is never tuned.
_INFLATION: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file below the input folders."""

    path: Path
    name: str
    """Number of its folder and path below it: what it is known by."""
    num_bytes: int
    modified_ns: int
    format: str
    """``jsonl``, ``gz``, ``zst``, ``parquet``, or ``other``, which is not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What a part reads of a file."""

    file: int
    start: int
    """First byte of a plain file, first row group of a Parquet file; 0 of any other."""
    stop: int
    weight_bytes: int


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
        path=path,
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
    try:
        with path.open("rb") as file:
            digest.update(file.read(_PROBE_BYTES))
            file.seek(max(file.seek(0, os.SEEK_END) - _PROBE_BYTES, 0))
            digest.update(file.read(_PROBE_BYTES))
    except OSError as error:
        raise StorageError(
            f"an input file must be readable, got {type(error).__name__} {error.errno}; check it, and run "
            "the job again."
        ) from None
    return {
        "probe": digest.hexdigest()[:32],
        "groups": row_groups(path) if kind == "parquet" else None,
    }


def cut_parts(
    files: Sequence[InputFile], groups: Sequence[Sequence[int] | None], part_bytes: int
) -> list[list[Piece]]:
    """Cut files into parts of about so many bytes, in their order.

    Args:
        files: The files.
        groups: Bytes of the row groups of each Parquet file; None for any other, and for one that is damaged.
        part_bytes: Largest part, but for a compressed file or a row group that is larger.
    """
    parts: list[list[Piece]] = []
    weight = 0
    for number, file in enumerate(files):
        for piece in _pieces(number, file, groups[number], part_bytes):
            if not parts or weight + piece.weight_bytes > part_bytes:
                parts.append([])
                weight = 0
            parts[-1].append(piece)
            weight += piece.weight_bytes
    return parts


def _pieces(number: int, file: InputFile, groups: Sequence[int] | None, part_bytes: int) -> Iterator[Piece]:
    size = file.num_bytes
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
