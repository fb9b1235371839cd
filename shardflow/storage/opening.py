"""Opening a byte store from a path or URL, and erasing objects from one.

`erase` is no part of the `ByteStore` interface, whose objects never change: it exists for data that must not
be kept anywhere, such as that of a person who withdrew consent, and its caller answers for all readers.
"""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from shardflow.errors import StorageError
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.store import Cache, CachedStore
from shardflow.storage.client import REMOTE_SCHEMES
from shardflow.storage.local import LocalStore
from shardflow.storage.remote import RemoteStore
from shardflow.storage.store import ByteStore, check_object_path


def erase(store: ByteStore, path: str) -> None:
    """Delete an object; one that is not there is no error.

    Raises:
        StorageError: It cannot be deleted, or the store deletes nothing.
    """
    check_object_path(path)
    if isinstance(store, LocalStore):
        try:
            (store.root / path).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{path} must be deleted, got {type(error).__name__}.") from None
    elif isinstance(store, RemoteStore):
        store.erase(path)
    else:
        raise StorageError(f"{path} must lie in a store that deletes, got {type(store).__name__}.")


def open_store(url: str | os.PathLike[str], *, cache: Cache | CacheConfig | None = None) -> ByteStore:
    """Open the store at a path, or at an address: ``file://``, ``s3://``, ``gs://``, ``az://``, ``http(s)://``.

    Nothing is asked of a remote store yet.

    Args:
        url: The path or address.
        cache: What is kept before it. Objects are kept once their owner has said what they are, see
            `CachedStore.bind`, as a dataset does.

    Raises:
        StorageError: The scheme is not a known one, or the address carries credentials.
        ConfigError: The directory of the cache holds something and is no cache.

    Example:
        >>> open_store("file:///data/set%201").url
        '/data/set 1'
    """
    store = _open_origin(os.fspath(url))
    if cache is None or (isinstance(cache, CacheConfig) and not cache.is_on):
        return store
    return CachedStore(store, cache if isinstance(cache, Cache) else Cache(cache))


def _open_origin(text: str) -> ByteStore:
    if "://" not in text:
        return LocalStore(text)
    parts = urlsplit(text)
    if parts.scheme in REMOTE_SCHEMES:
        return RemoteStore(text)
    if parts.scheme != "file":
        known = ", ".join(f"{scheme}://" for scheme in sorted({"file", *REMOTE_SCHEMES}))
        raise StorageError(f"a dataset URL must be a path or begin with one of {known}, got another scheme.")
    if parts.netloc not in ("", "localhost"):
        raise StorageError("a file:// URL must name no host, got one; write file:///absolute/path.")
    return LocalStore(unquote(parts.path))
