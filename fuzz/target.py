"""A fuzz target: a reader, what it may raise, and inputs to begin with."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from shardflow.errors import ShardflowError

MAX_BYTES = 1 << 16
"""Of an input."""


class Target(ABC):
    """A reader of bytes that a stranger wrote.

    Args:
        folder: For temporary files; emptied by nobody, so an input's files are written over.
    """

    errors: ClassVar[tuple[type[Exception], ...]] = (ShardflowError,)
    """What may leave `read`: errors that name what is wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def seeds(self) -> Iterable[bytes]:
        """Make inputs to begin with, valid ones as far as possible."""

    @abstractmethod
    def read(self, data: bytes) -> None:
        """Read an input as the library does."""

    def run(self, data: bytes) -> None:
        """Read an input; whatever leaves is a finding."""
        try:
            self.read(data)
        except self.errors:
            return

    def file(self, name: str, data: bytes) -> Path:
        """Write a file of an input."""
        path = self.folder / name
        path.write_bytes(data)
        return path


def as_json(data: bytes) -> Any:
    """Parse an input that only matters as JSON; None for what is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def encoded(*values: Any) -> Iterator[bytes]:
    """Encode seeds as JSON."""
    for value in values:
        yield json.dumps(value).encode()
