"""Cache settings. None of them changes what is read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from shardflow.config import Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError

_MIB = 1 << 20

EvictionPolicy = Literal["belady", "lru", "lfu-decay"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Where blocks of a dataset are kept on their way, and how many."""

    directory: Path | None = None
    """A folder on a disk of the node, shared by all its processes; made if it is missing. It must be empty or
    a cache already. None keeps nothing on disk."""
    max_bytes: ByteSize = 0
    """Bound on the folder, with what is under way and rounded up to pages of 4 KiB."""
    min_free_bytes: ByteSize = 4096 * _MIB
    """What stays free on the disk, whoever fills it."""
    ram_bytes: ByteSize = 0
    """Bound on the blocks kept in the memory of each process. Of use where there is no folder: what the
    folder holds is in the page cache already, once for all processes."""
    policy: EvictionPolicy = "belady"
    """What goes first when room is needed: what is needed last by the plan, what was used least recently, or
    least often of late."""
    read_ahead_bytes: ByteSize = 256 * _MIB
    """How far ahead of its reads the loader of a process fetches: bytes under way, those that wait to be
    published, and those that it has yet to come to. 0 fetches nothing ahead."""
    read_ahead_threads: Annotated[int, Bounds(1, 64)] = 8
    """Threads of a loader that wait for what is fetched ahead; two more check and publish it."""
    block_bytes: Annotated[int, Bounds(4096, 1 << 30)] = 256 << 10
    """Small neighbouring fields are kept together up to this size; a larger field is a block by itself."""
    wait_s: Annotated[float, Bounds(0.001)] = 30.0
    """How long a process waits for a block that another one fetches, before it fetches it too."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_bytes", "min_free_bytes", "ram_bytes", "read_ahead_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0 bytes, got {getattr(self, name)}; correct it.")
        if self.directory is not None and self.max_bytes < self.block_bytes:
            raise ConfigError(
                f"max_bytes must be at least a block ({self.block_bytes}) where a directory is given, got "
                f"{self.max_bytes}; say how much of the disk the cache may take."
            )
        if self.directory is None and self.max_bytes:
            raise ConfigError(
                "directory must be given with max_bytes, got none; name a folder, or set ram_bytes."
            )

        if not self.is_on:
            given = [entry.name for entry in fields(self) if getattr(self, entry.name) != entry.default]
            if given:
                raise ConfigError(
                    f"a cache must have a directory or ram_bytes, got {' and '.join(given)} without either; "
                    "name a folder with max_bytes, set ram_bytes, or remove these settings."
                )

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        return self.directory is not None or self.ram_bytes > 0
