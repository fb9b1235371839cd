"""Opening a byte store from a path or URL, and erasing objects from one.

`erase` is not part of the `ByteStore` interface, whose objects never change. It exists for data that must not
be kept, such as that of a person who withdrew consent; its caller is responsible for concurrent readers.
"""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from shardflow.errors import StorageError, os_reason
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.store import Cache, CachedStore
from shardflow.storage.client import REMOTE_SCHEMES
from shardflow.storage.local import LocalStore
from shardflow.storage.remote import RemoteStore
from shardflow.storage.store import ByteStore, check_object_path


def erase(store: ByteStore, path: str) -> None:
    """Delete an object if it exists.

    Raises:
        StorageError: It cannot be deleted, or the store cannot delete.
    """
    check_object_path(path)
    if isinstance(store, LocalStore):
        try:
            (store.root / path).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be deleted: {os_reason(error)}.") from None
    elif isinstance(store, RemoteStore):
        store.erase(path)
    else:
        raise StorageError(f"{path} cannot be deleted: a {type(store).__name__} does not delete.")


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
    return CachedStore(store, cache if isinstance(cache, Cache) else Cache(cache))


def _open_origin(text: str) -> ByteStore:
    if "://" not in text:
        return LocalStore(text)
    parts = urlsplit(text)
    if parts.scheme in REMOTE_SCHEMES:
        return RemoteStore(text)
    if parts.scheme != "file":
        known = ", ".join(f"{scheme}://" for scheme in sorted({"file", *REMOTE_SCHEMES}))
        raise StorageError(
            f"the scheme of a dataset URL is unknown; give a path, or a URL that begins with one of {known}."
        )
    if parts.netloc not in ("", "localhost"):
        raise StorageError("a file:// URL must not name a host; write file:///absolute/path.")
    return LocalStore(unquote(parts.path))
