"""Byte stores: named, write-once objects, read by byte ranges.

Handles where bytes are stored and how an object is written without ever exposing a torn one; knows nothing
of what the bytes mean.
"""

from __future__ import annotations

from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.store import Cache, CachedStore
from shardflow.storage.local import LocalStore, fsync_directory, is_temporary_name, write_atomic
from shardflow.storage.remote import RemoteStore, open_store
from shardflow.storage.requests import RemoteCounts, RemoteOptions, RequestCost, RetryPolicy
from shardflow.storage.store import ByteRange, ByteStore, check_object_path, origin_of

__all__ = [
    "ByteRange",
    "ByteStore",
    "Cache",
    "CacheConfig",
    "CachedStore",
    "LocalStore",
    "RemoteCounts",
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
