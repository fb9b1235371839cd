"""Open a byte store from a URL."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from shardflow.errors import StorageError
from shardflow.storage.local import LocalStore
from shardflow.storage.store import ByteStore

__all__ = ["open_store"]


def open_store(url: str | os.PathLike[str]) -> ByteStore:
    """Open the store at a path or ``file://`` URL.

    Raises:
        StorageError: The URL's scheme is not a known one.

    Example:
        >>> open_store("file:///data/set%201").url
        '/data/set 1'
    """
    text = os.fspath(url)
    if "://" not in text:
        return LocalStore(text)
    parts = urlsplit(text)
    if parts.scheme != "file":
        raise StorageError(f"a dataset URL must be a path or begin with file://, got {parts.scheme}://.")
    if parts.netloc not in ("", "localhost"):
        raise StorageError("a file:// URL must name no host, got one; write file:///absolute/path.")
    return LocalStore(unquote(parts.path))
