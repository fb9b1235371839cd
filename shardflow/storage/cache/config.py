"""Cache settings, none of which changes the bytes that are read."""

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
    """Settings of the read cache."""

    directory: Path | None = None
    """A folder on a disk of the node, shared by all its processes; created if it is missing. It must be empty
    or a cache already. None keeps nothing on disk."""
    max_bytes: ByteSize = 0
    """Limit on the folder, including blocks being fetched; files count in pages of 4 KiB."""
    min_free_bytes: ByteSize = 4096 * _MIB
    """Free space to leave on the disk, whatever else is stored there."""
    ram_bytes: ByteSize = 0
    """Limit on the blocks in the memory of each process. Useful without a folder: the blocks of a folder are
    in the page cache already, once for all processes."""
    policy: EvictionPolicy = "belady"
    """The block to evict first: the one that the plan needs last, the least recently used, or the least
    frequently used with decaying counts."""
    read_ahead_bytes: ByteSize = 256 * _MIB
    """Limit on prefetched bytes of the loader of a process: being fetched, waiting to be published, and
    published but not yet read. 0 disables prefetching."""
    read_ahead_threads: Annotated[int, Bounds(1, 64)] = 8
    """Threads of a loader that prefetch; two more check and publish the blocks."""
    block_bytes: Annotated[int, Bounds(4096, 1 << 30)] = 256 << 10
    """Small neighboring fields share a block up to this size; a larger field is a block by itself."""
    wait_s: Annotated[float, Bounds(0.001)] = 30.0
    """Longest wait for a block that another process fetches; then this process fetches it too."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_bytes", "min_free_bytes", "ram_bytes", "read_ahead_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0 bytes, got {getattr(self, name)}; correct it.")
        if self.directory is not None and self.max_bytes < self.block_bytes:
            raise ConfigError(
                f"max_bytes must be at least block_bytes ({self.block_bytes}) with a directory, got "
                f"{self.max_bytes}; set it to the disk space that the cache may use."
            )
        if self.directory is None and self.max_bytes:
            raise ConfigError(
                "directory must be given with max_bytes, got none; name a folder, or set ram_bytes instead."
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
        """Whether the settings keep anything."""
        return self.directory is not None or self.ram_bytes > 0
