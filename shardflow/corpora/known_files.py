"""The files that a corpus was packed from: the way back from surrogates, and what an append goes by.

One line of JSON for each file, in the private folder, mode 0600: surrogate, path, and what tells it from a
changed one. A line of a file is found again by its place there (docs/corpora.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardflow.errors import ConfigError, FormatError
from shardflow.storage import write_atomic

__all__ = ["KnownFile", "list_path", "read_list", "write_list"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFile:
    """A file of a version."""

    file: str
    """Surrogate of its name."""
    path: str
    format: str
    num_bytes: int
    probe: str
    num_lines: int

    def is_same(self, other: KnownFile) -> bool:
        """Tell whether it holds what it held, as far as sizes and ends tell."""
        return (self.file, self.num_bytes, self.probe) == (other.file, other.num_bytes, other.probe)


def list_path(private: Path, plan_digest: str) -> Path:
    """Return where the list of a version lies."""
    return private / f"corpus-{plan_digest[:16]}.jsonl"


def write_list(path: Path, files: Iterable[KnownFile]) -> None:
    """Write the list of a version.

    Raises:
        StorageError: It cannot be written.
    """
    lines = (
        json.dumps(
            {
                "file": file.file,
                "path": file.path,
                "format": file.format,
                "num_bytes": file.num_bytes,
                "probe": file.probe,
                "num_lines": file.num_lines,
            },
            ensure_ascii=True,
            separators=(",", ":"),
        ).encode("ascii")
        + b"\n"
        for file in files
    )
    write_atomic(path, lines, replace=True, mode=0o600)


def read_list(path: Path) -> list[KnownFile]:
    """Read the list of a version.

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
        return [_known(json.loads(line)) for line in lines]
    except (ValueError, TypeError, KeyError):
        raise FormatError(
            "the list of the corpus' files (corpus-*.jsonl) must be whole, got other bytes; restore it."
        ) from None


def _known(entry: Mapping[str, Any]) -> KnownFile:
    return KnownFile(**entry)
