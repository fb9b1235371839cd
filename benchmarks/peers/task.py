"""What a rank is asked to do, and what a loader must offer for it. Standard library only: all peers load it.

A *task* is one epoch of one loader in one setting, on so many ranks with so many workers each; or the first
part of one, whose state is saved; or the rest of one, in the same or another world.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "GLOBAL_BATCH",
    "NUM_SAMPLES",
    "SEED",
    "SHARDS",
    "NotOfferedError",
    "Stream",
    "Task",
    "read_tasks",
    "write_tasks",
]

SEED = 7
SHARD_SIZES = (15, 15, 15, 15, 15, 15, 13)
NUM_SAMPLES = sum(SHARD_SIZES)
GLOBAL_BATCH = 16
"""Samples of a step over all ranks, in every world: 4 a rank on four ranks, 8 on two, 16 on one."""


def _shards() -> list[list[str]]:
    starts = [sum(SHARD_SIZES[:number]) for number in range(len(SHARD_SIZES))]
    return [
        [f"s{start + place:06d}" for place in range(size)]
        for start, size in zip(starts, SHARD_SIZES, strict=True)
    ]


SHARDS = _shards()
"""The sample keys of each shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One epoch, or a part of one."""

    name: str
    setting: str
    options: dict[str, Any] = field(default_factory=dict)
    """What the setting means to the peer."""
    world_size: int
    num_workers: int
    stop_after: int | None = None
    """Steps after which the state is saved, and the task ends."""
    resume: str | None = None
    """Task whose state to begin with."""
    together: bool = False
    """Exchange a number after each step, as gradients would be; else each rank runs on its own."""

    @property
    def batch_size(self) -> int:
        """Samples of a step on one rank."""
        return GLOBAL_BATCH // self.world_size


class NotOfferedError(Exception):
    """The peer has no such function."""


class Stream(Protocol):
    """A peer's loader, opened for one task on one rank."""

    def length(self) -> int | None:
        """Return the batches of the epoch as the loader tells them, None where it does not."""
        ...

    def batches(self) -> Iterator[list[str]]:
        """Yield the sample keys of each batch, to the end of the epoch."""
        ...

    def save(self, folder: Path, rank: int) -> None:
        """Save the state by the peer's own means."""
        ...

    def load(self, folder: Path, rank: int) -> None:
        """Load a state before the first batch."""
        ...


def write_tasks(path: Path, tasks: list[Task]) -> None:
    """Write tasks for the ranks."""
    path.write_text(json.dumps([asdict(task) for task in tasks]), encoding="utf-8")


def read_tasks(path: Path) -> list[Task]:
    """Read what `write_tasks` wrote."""
    return [Task(**task) for task in json.loads(path.read_text(encoding="utf-8"))]
