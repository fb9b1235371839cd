"""The caches and remote stores that a loader reads through, and their settings that may change meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from shardflow.shards import Dataset
from shardflow.storage import CachedStore, RemoteStore
from shardflow.storage.cache import Cache

__all__ = ["Tiers"]

_CACHE_SETTINGS: Final = ("read_ahead_bytes", "read_ahead_threads", "ram_bytes", "max_bytes")


class Tiers:
    """What lies between a loader and the bytes of its datasets.

    Datasets of a blend share a cache; remote stores have the same limit each.

    Args:
        datasets: What is read.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        stores = [dataset.store for dataset in datasets]
        origins = [store.origin if isinstance(store, CachedStore) else store for store in stores]
        caches = [store.cache for store in stores if isinstance(store, CachedStore)]
        self._caches: list[Cache] = list({id(cache): cache for cache in caches}.values())
        self._remotes = list({id(one): one for one in origins if isinstance(one, RemoteStore)}.values())

    @property
    def is_remote(self) -> bool:
        """Whether anything comes over a network."""
        return bool(self._remotes)

    def settings(self) -> dict[str, int]:
        """Return what `change` changes, by name; of several caches or stores the largest value."""
        found: dict[str, int] = {}
        for name in _CACHE_SETTINGS:
            if name == "max_bytes" and not any(cache.config.directory for cache in self._caches):
                continue
            if self._caches:
                found[f"cache.{name}"] = max(getattr(cache.config, name) for cache in self._caches)
        if self._remotes:
            found["store.max_concurrency"] = max(store.max_concurrency for store in self._remotes)
        return found

    def least(self, name: str) -> int:
        """Return the least that a cache's setting may be: a cache of nothing is none."""
        configs = [cache.config for cache in self._caches]
        if name == "cache.max_bytes":
            return max((config.block_bytes for config in configs if config.directory), default=0)
        if name == "cache.ram_bytes":
            return max((config.block_bytes for config in configs if not config.directory), default=0)
        return 0

    def disk_room_bytes(self) -> int:
        """Return what the folders of the caches can hold: what they do, and what their disks have free."""
        tiers = [cache.disk for cache in self._caches]
        return min((tier.room_bytes for tier in tiers if tier is not None), default=0)

    def change(self, changes: Mapping[str, int | str]) -> None:
        """Change settings by name; those of others are passed over.

        Raises:
            ConfigError: A value cannot be, see `CacheConfig`.
        """
        kept = {
            name.partition(".")[2]: int(one) for name, one in changes.items() if name.startswith("cache.")
        }
        for cache in self._caches if kept else ():
            cache.change(
                {name: one for name, one in kept.items() if name != "max_bytes" or cache.config.directory}
            )
        for store in self._remotes if "store.max_concurrency" in changes else ():
            store.bound(int(changes["store.max_concurrency"]))
