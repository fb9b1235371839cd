"""`open_store`: the store at a path or URL, of whatever kind.

What only remote stores or a cache need, such as an event loop and TLS, is imported when one is opened.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from shardflow.errors import StorageError
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.local import LocalStore

if TYPE_CHECKING:
    from shardflow.storage.cache.store import Cache
    from shardflow.storage.store import ByteStore


def open_store(url: str | os.PathLike[str], *, cache: Cache | CacheConfig | None = None) -> ByteStore:
    """Open the store at a path or URL: ``file://``, ``s3://``, ``gs://``, ``az://``, ``http(s)://``.

    Sends no request to a remote store.

    Args:
        url: The path or URL.
        cache: The cache to read through. Objects are cached once their owner has declared them with
            `CachedStore.bind`, as a dataset does.

    Raises:
        StorageError: The scheme is unknown, or the URL contains credentials.
        ConfigError: The directory of the cache is not empty and no cache.

    Example:
        >>> open_store("file:///data/set%201").url
        '/data/set 1'
    """
    store = _open_origin(os.fspath(url))
    if cache is None or (isinstance(cache, CacheConfig) and not cache.is_on):
        return store
    from shardflow.storage.cache.store import Cache, CachedStore

    return CachedStore(store, cache if isinstance(cache, Cache) else Cache(cache))


def _open_origin(text: str) -> ByteStore:
    if "://" not in text:
        return LocalStore(text)
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise StorageError("a file:// URL must not name a host; write file:///absolute/path.")
        return LocalStore(unquote(parts.path))
    from shardflow.storage.client import REMOTE_SCHEMES
    from shardflow.storage.remote import RemoteStore

    if parts.scheme not in REMOTE_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in sorted({"file", *REMOTE_SCHEMES}))
        raise StorageError(
            f"the scheme of a dataset URL is unknown; give a path, or a URL that begins with one of {known}."
        )
    return RemoteStore(text)
