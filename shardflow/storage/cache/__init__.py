"""Read cache: process memory, a folder shared by the processes of a node, and the store behind them.

Decides what is kept, where, and what is evicted first, using the epoch plan's next uses. Independent of
datasets: objects are given by digests, pieces and checksums, future reads by units and steps. Readers get
the bytes of the origin whatever happens to the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.storage.cache.blocks import ObjectBlocks
    from shardflow.storage.cache.config import CacheConfig
    from shardflow.storage.cache.forecast import AccessForecast, Run
    from shardflow.storage.cache.store import Cache, CachedStore, read_afresh

__all__ = [
    "AccessForecast",
    "Cache",
    "CacheConfig",
    "CachedStore",
    "ObjectBlocks",
    "Run",
    "read_afresh",
]
_SOURCES: Final = {
    "AccessForecast": ".forecast:AccessForecast",
    "Cache": ".store:Cache",
    "CacheConfig": ".config:CacheConfig",
    "CachedStore": ".store:CachedStore",
    "ObjectBlocks": ".blocks:ObjectBlocks",
    "Run": ".forecast:Run",
    "read_afresh": ".store:read_afresh",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
