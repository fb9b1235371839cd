"""Erase objects: for what must not lie anywhere any more, such as the data of a person who withdrew.

No part of the contract of a byte store, whose objects never change: whoever erases answers for all readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardflow.errors import StorageError
from shardflow.storage.local import LocalStore
from shardflow.storage.remote import RemoteStore
from shardflow.storage.store import check_object_path

if TYPE_CHECKING:
    from shardflow.storage.store import ByteStore

__all__ = ["erase"]


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
