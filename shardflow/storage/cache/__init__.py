"""A cache that knows the future: memory, a folder that the processes of a node share, the store behind.

Owns what is kept, where, and what goes first. Knows nothing of datasets: objects come as digests, pieces and
checksums, the future as numbers of units and steps. Invariant: readers get the bytes of the origin, whatever
happens to the cache.
"""

from __future__ import annotations

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
