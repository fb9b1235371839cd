"""Byte stores: named, write-once objects, read by byte ranges.

Handles where bytes are stored and how an object is written without ever exposing a torn one; knows nothing
of what the bytes mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.storage.cache.config import CacheConfig
    from shardflow.storage.cache.store import Cache, CachedStore
    from shardflow.storage.local import LocalStore, fsync_directory, is_temporary_name, write_atomic
    from shardflow.storage.opening import open_store
    from shardflow.storage.remote import RemoteStore
    from shardflow.storage.requests import RemoteOptions, RequestCost, RetryPolicy
    from shardflow.storage.store import ByteRange, ByteStore, check_object_path, origin_of

__all__ = [
    "ByteRange",
    "ByteStore",
    "Cache",
    "CacheConfig",
    "CachedStore",
    "LocalStore",
    "RemoteOptions",
    "RemoteStore",
    "RequestCost",
    "RetryPolicy",
    "check_object_path",
    "fsync_directory",
    "is_temporary_name",
    "open_store",
    "origin_of",
    "write_atomic",
]
_SOURCES: Final = {
    "ByteRange": ".store:ByteRange",
    "ByteStore": ".store:ByteStore",
    "Cache": ".cache.store:Cache",
    "CacheConfig": ".cache.config:CacheConfig",
    "CachedStore": ".cache.store:CachedStore",
    "LocalStore": ".local:LocalStore",
    "RemoteOptions": ".requests:RemoteOptions",
    "RemoteStore": ".remote:RemoteStore",
    "RequestCost": ".requests:RequestCost",
    "RetryPolicy": ".requests:RetryPolicy",
    "check_object_path": ".store:check_object_path",
    "fsync_directory": ".local:fsync_directory",
    "is_temporary_name": ".local:is_temporary_name",
    "open_store": ".opening:open_store",
    "origin_of": ".store:origin_of",
    "write_atomic": ".local:write_atomic",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
