"""Packing in tasks: which of several tasks this is, and which headers it reads first.

Every task comes to the same plan by itself, from the header rows that all of them share. No task waits for
another: one that finds header rows missing reads those files itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from shardflow.errors import ConfigError

__all__ = ["Share"]

_MAX_TASKS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Share:
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
