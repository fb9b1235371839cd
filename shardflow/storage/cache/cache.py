"""The cache of a process: its tiers, opened when something is first kept, and what they count."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import replace

from shardflow.errors import ConfigError
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.disk import DiskTier
from shardflow.storage.cache.memory import MemoryTier
from shardflow.storage.cache.outlook import Outlook
from shardflow.storage.cache.tier import Tier
from shardflow.telemetry import StageCounters

__all__ = ["Cache"]

_LOGGER = logging.getLogger(__name__)


class Cache:
    """The tiers of a process. Safe for many threads; crosses a process boundary as its settings.

    Datasets that are read together, such as those of a blend, share one, and with it the bounds.

    Args:
        config: The settings.

    Raises:
        ConfigError: The directory holds something and is no cache. One that cannot be used (read-only, no
            space) costs a warning, and reads go to the origin.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.counters = StageCounters()
        self._lock = threading.Lock()
        self._pid = 0
        self._disk: DiskTier | None = None
        self._memory: MemoryTier | None = None
        self._own_process()

    def __reduce__(self) -> tuple[type[Cache], tuple[CacheConfig]]:
        """Cross a process boundary as settings."""
        return type(self), (self.config,)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return bool(self.tiers)

    @property
    def disk(self) -> DiskTier | None:
        """The tier in the folder; None where there is none, or it failed."""
        self._check_process()
        return None if self._disk is None or self._disk.is_off else self._disk

    @property
    def memory(self) -> MemoryTier | None:
        """The tier in memory; None where there is none."""
        self._check_process()
        return self._memory

    @property
    def named_tiers(self) -> list[tuple[str, Tier]]:
        """The tiers, the nearest first, with the stage that their hits are counted in."""
        tiers: dict[str, Tier | None] = {"cache_ram": self.memory, "cache_disk": self.disk}
        return [(name, tier) for name, tier in tiers.items() if tier is not None]

    @property
    def tiers(self) -> list[Tier]:
        """The tiers, the nearest first."""
        return [tier for _, tier in self.named_tiers]

    @property
    def home(self) -> Tier:
        """The tier that blocks are claimed in: the one that most processes share."""
        self._check_process()
        # A folder that failed refuses every claim, which is what is wanted of it where there is nothing else.
        home = self.disk or self._memory or self._disk
        if home is None:
            raise ConfigError("a cache must have a directory or ram_bytes, got neither; set one.")
        return home

    @property
    def outlook(self) -> Outlook:
        """When blocks are needed next."""
        self._check_process()
        return self._outlook

    def change(self, changes: Mapping[str, int]) -> None:
        """Change settings while blocks are read and kept; nothing that is read changes by it.

        Memory that is too much is freed at once, the folder comes down to a lower bound within a while.

        Args:
            changes: ``ram_bytes``, ``max_bytes``, ``read_ahead_bytes`` or ``read_ahead_threads``; of the last
                two the loaders that read through this cache must be told.

        Raises:
            ConfigError: A value cannot be, see `CacheConfig`; nothing changes.
        """
        self._check_process()
        with self._lock:
            self.config = replace(self.config, **changes)  # type: ignore[arg-type]
            if "ram_bytes" in changes and self._memory is not None:
                self._memory.bound(self.config.ram_bytes)
            elif self.config.ram_bytes and self._memory is None:
                self._memory = MemoryTier(self.config, self._outlook, self.counters)
            if "max_bytes" in changes and self._disk is not None:
                self._disk.shrinker.bound(self.config.max_bytes)

    def close(self) -> None:
        """Free what the process holds; what is kept on disk stays for others."""
        with self._lock:
            if self._pid == os.getpid():
                for tier in (self._disk, self._memory):
                    if tier is not None:
                        tier.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            # A fork: locks may be held by threads that are not here, and the slot is the parent's.
            self._own_process()

    def _own_process(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.counters = StageCounters()
        self._disk = self._open_disk()
        self._outlook = Outlook() if self._disk is None else self._disk.outlook
        self._memory = (
            MemoryTier(self.config, self._outlook, self.counters) if self.config.ram_bytes else None
        )

    def _open_disk(self) -> DiskTier | None:
        if self.config.directory is None:
            return None
        try:
            return DiskTier(self.config.directory.expanduser().absolute(), self.config, self.counters)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            code = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
            _LOGGER.warning(
                "the cache directory cannot be used (%s): reads go to the origin; see that it is a writable "
                "folder of this node, and start again",
                code,
            )
            self.counters.add("cache_fault", num_items=1)
            return None
