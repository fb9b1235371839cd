"""Conditional writes to an object store: small objects in one request, large ones in parts.

The condition is If-None-Match: * or what the store has in its place. A store that takes the header and
overwrites all the same would lose data in silence, so the first write of a process is made twice: the second
one must be refused (and writes the same bytes if it is not).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from shardflow.errors import AlreadyExistsError, StorageError
from shardflow.storage.remote_faults import LengthRequiredError, translated
from shardflow.storage.retrying import PassingFaultError, Retrying
from shardflow.storage.store import sized

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Uploader"]

_MAX_PARTS: Final = 10_000
_MAX_OBJECT_BYTES: Final = 5 << 30
_CONCURRENT_PARTS: Final = 4


class Uploader:
    """Writes objects. Safe for many threads.

    Args:
        client: Gives the client for single requests.
        large_client: Gives one that tries each part of an upload again by itself.
        retrying: Runs single requests.
        part_bytes: Objects above this go in parts of it.
    """

    def __init__(
        self,
        client: Callable[[], ObjectStore],
        large_client: Callable[[], ObjectStore],
        retrying: Retrying,
        *,
        part_bytes: int,
    ) -> None:
        self._client = client
        self._large_client = large_client
        self._retrying = retrying
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._refuses_twice = False

    def put(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write an object; see `ByteStore.put_stream`."""
        if num_bytes > _MAX_OBJECT_BYTES:
            raise StorageError(
                f"{path} must have at most {_MAX_OBJECT_BYTES} bytes to be copied by the store, got "
                f"{num_bytes}; make smaller shards."
            )
        pieces = sized(path, chunks, num_bytes)
        if num_bytes <= self._part_bytes:
            # Not join, which gathers all views first: the next piece may overwrite the one before.
            gathered = bytearray()
            for piece in pieces:
                gathered += piece
            data = bytes(gathered)
            self._publish(path, lambda: self._put_small(path, data), lambda: self._holds(path, data))
            return
        folder, _, name = path.rpartition("/")
        hidden = f"{folder}{'/' if folder else ''}.{name}.{secrets.token_hex(8)}.tmp"
        try:
            self._upload(path, hidden, pieces, num_bytes)
            self._publish(
                path, lambda: self._copy(path, hidden), lambda: self._are_equal(path, hidden, num_bytes)
            )
        finally:
            with suppress(StorageError):
                self.delete(hidden)

    def _publish(self, path: str, write: Callable[[], None], is_ours: Callable[[], bool]) -> None:
        """Write conditionally; a write whose answer was lost meets itself at the next try."""

        def attempt(number: int) -> None:
            try:
                write()
            except AlreadyExistsError:
                if not number or not is_ours():
                    raise

        self._retrying(f"writing {path}", attempt)
        with self._lock:
            if self._refuses_twice:
                return
            try:
                self._retrying(f"writing {path}", lambda _: write())
            except AlreadyExistsError:
                self._refuses_twice = True
                return
        raise StorageError(
            "a store must refuse to write an object twice (If-None-Match), got one that overwrites; another "
            f"writer could replace what stands there ({path}): use a store with conditional writes."
        )

    def _put_small(self, path: str, data: bytes) -> None:
        import obstore

        with translated("writing", path):
            obstore.put(self._client(), path, data, mode="create", use_multipart=False)

    def _upload(self, path: str, hidden: str, pieces: Iterator[memoryview], num_bytes: int) -> None:
        import obstore

        failures: list[BaseException] = []

        def guarded() -> Iterator[bytes]:
            # The client wraps what the pieces raise; the caller shall get it as it was.
            try:
                yield from (bytes(piece) for piece in pieces)
            except BaseException as failure:
                failures.append(failure)
                raise

        part_bytes = max(self._part_bytes, -(-num_bytes // _MAX_PARTS))
        try:
            with translated("writing", path):
                obstore.put(
                    self._large_client(),
                    hidden,
                    guarded(),
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=_CONCURRENT_PARTS,
                )
        except PassingFaultError as fault:
            if failures:
                raise failures[0] from None
            raise StorageError(f"writing {path} must succeed, got {fault.message} in all tries.") from None
        except BaseException:
            if failures:
                raise failures[0] from None
            raise

    def _copy(self, path: str, hidden: str) -> None:
        import obstore

        try:
            with translated("writing", path):
                obstore.copy(self._client(), hidden, path, overwrite=False)
        except LengthRequiredError:
            # Ceph's gateway takes no copy of a part as the client sends it. What was uploaded comes back, and
            # goes there in one conditional request; it is in memory meanwhile.
            self._put_small(path, self._fetch(hidden))

    def _fetch(self, hidden: str) -> bytes:
        import obstore

        with translated("reading", hidden):
            return bytes(obstore.get(self._large_client(), hidden).bytes())

    def delete(self, path: str) -> None:
        """Delete an object, by one request."""
        import obstore

        with translated("deleting", path):
            obstore.delete(self._client(), path)

    def _holds(self, path: str, data: bytes) -> bool:
        import obstore

        with translated("reading", path):
            return memoryview(obstore.get(self._client(), path).bytes()) == data

    def _are_equal(self, path: str, hidden: str, num_bytes: int) -> bool:
        """Compare two objects; only where the answer to a copy was lost."""
        import obstore

        client = self._client()
        with translated("reading", path):
            if obstore.head(client, path)["size"] != num_bytes:
                return False
            for start in range(0, num_bytes, self._part_bytes):
                stop = min(start + self._part_bytes, num_bytes)
                found, ours = (
                    obstore.get_range(client, name, start=start, end=stop) for name in (path, hidden)
                )
                if memoryview(found) != memoryview(ours):
                    return False
        return True
