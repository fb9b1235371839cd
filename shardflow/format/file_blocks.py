"""Digests of the blocks of a large table, by which a process proves what it reads of it, when it reads it.

Proving a table against its one digest in the manifest reads all of it: some 5 GB of 10^8 samples, before the
first one is seen. So a writer hashes each 64 KiB of a large samples table too, and the manifest names the
file of these digests (``extra.samples_blocks``, docs/format.md, section 8). A reader compares each block with
its digest, and puts it into a node file, where the processes of a machine find it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardflow.errors import ChecksumError, FormatError, NotFoundError, ShardflowError, StorageError
from shardflow.format.keys import Json, sha256_hex
from shardflow.format.manifest import FileEntry, Manifest
from shardflow.format.table import BLOCK_NUM_BYTES, Table, TableDamageError, encode_table
from shardflow.storage import ByteRange, ByteStore, LocalStore
from shardflow.storage.local import write_atomic
from shardflow.storage.node_files import PartialFile, own_bytes

KIND: Final = "file-blocks"
FORMAT_VERSION: Final = 1
MIN_NUM_BYTES: Final = 16 << 20
"""Size from which a table has digests of its blocks; a smaller one is read whole in 0.02 s."""
_BLOCKS_AT_ONCE: Final = 64
_DIGEST_NUM_BYTES: Final = hashlib.sha256().digest_size
_CAUSE: Final = (
    "as an older shardflow leaves it when it appends or copies; to renew the digests, write the next version "
    "(`shardflow pack --append`, `shardflow remove` or `shardflow compact`)"
)
logger = logging.getLogger(__name__)


class StaleDigestsError(FormatError):
    """Digests are missing, or those of another table: the table is right, and can only be proven whole."""


class BlockDigests:
    """Digests of the blocks of a file that is being written."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._rest = b""
        self.num_bytes = 0

    def add(self, piece: bytes | memoryview) -> None:
        """Count the next bytes of the file."""
        self.num_bytes += len(piece)
        view = memoryview(self._rest + piece if self._rest else piece)
        whole = len(view) // BLOCK_NUM_BYTES * BLOCK_NUM_BYTES
        for start in range(0, whole, BLOCK_NUM_BYTES):
            self._digests.append(hashlib.sha256(view[start : start + BLOCK_NUM_BYTES]).digest())
        self._rest = bytes(view[whole:])

    def write(self, root: Path, entry: FileEntry) -> FileEntry:
        """Write the digests of a whole file beside it, and return what a manifest says of them.

        Raises:
            StorageError: They cannot be written.
        """
        data = self.encode(entry)
        path = f"{entry.path.removesuffix('.tbl')}.blocks"
        write_atomic(root / path, [data], replace=True)
        return FileEntry(path=path, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def encode(self, entry: FileEntry) -> bytes:
        """Encode the digests of a whole file."""
        digests = [*self._digests, *([hashlib.sha256(self._rest).digest()] if self._rest else [])]
        meta: dict[str, Json] = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "block_num_bytes": BLOCK_NUM_BYTES,
            "num_bytes": entry.num_bytes,
            "sha256": entry.sha256,
        }
        column = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, _DIGEST_NUM_BYTES)
        return encode_table({"block_sha256": column}, meta)


def open_large(store: ByteStore, entry: FileEntry, blocks: FileEntry | None) -> Table:
    """Open a table that may be large: block by block, where there are digests for that and reading is near.

    Args:
        store: Where the table is stored.
        entry: The table, as the manifest names it.
        blocks: The digests of its blocks; None without any.

    Raises:
        ChecksumError: The table is not the one that the manifest names, or its digests are not.
        NotFoundError: There is no such table.
        StorageError: Reading failed.
    """
    if blocks is not None and isinstance(store, LocalStore) and 0 < entry.num_bytes == store.size(entry.path):
        try:
            return open_proven(store, entry, blocks)
        except ChecksumError:
            raise
        except (StorageError, FormatError) as error:
            logger.warning("%s", describe_slower(entry, error))
    buffer = own_bytes(store, entry.path, sha256=entry.sha256, num_bytes=entry.num_bytes)
    return Table(buffer, name=entry.path)


def open_proven(store: ByteStore, entry: FileEntry, blocks: FileEntry) -> Table:
    """Open a table of which each block is proven, and copied to a node file, when it is first needed.

    Args:
        store: Where the table is stored.
        entry: The table, as the manifest names it.
        blocks: The digests of its blocks, as the manifest names them.

    Raises:
        ChecksumError: The digests are others than the manifest's, or the table does not begin or end as they
            say; when a block is read, that it is another one.
        StaleDigestsError: The digests are missing, or those of another table.
        FormatError: They are no digests.
        StorageError: The node has no place for the table, or reading failed.
    """
    source = _Blocks(store, entry, blocks)
    try:
        return Table(source.view, name=entry.path, need=source.need)
    except TableDamageError:
        source.need(0, entry.num_bytes, afresh=True)  # the machine stopped while the node file was written
        return Table(source.view, name=entry.path, need=source.need)


class _Blocks:
    """A table's node file, and where its blocks come from. Safe for many threads and processes."""

    def __init__(self, store: ByteStore, entry: FileEntry, blocks: FileEntry) -> None:
        self._store, self._entry, self._blocks = store, entry, blocks
        self._num_blocks = -(-entry.num_bytes // BLOCK_NUM_BYTES)
        # Named by the digests too, which alone say what is in it: a hostile dataset may name the table of
        # another one beside digests of its own. A flag for each block follows the table.
        name = sha256_hex(f"{entry.sha256} {entry.num_bytes} {blocks.sha256}".encode())
        self._file = PartialFile(f"blocks-{name}.tbl", entry.num_bytes + self._num_blocks)
        self.view = self._file.view[: entry.num_bytes]
        self._is_there = np.frombuffer(self._file.view, np.uint8)[entry.num_bytes :]
        self._digests: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        if not self._is_there.all():
            self._expected()  # what is wrong with them is found now, not in the middle of a run

    def need(self, start: int, stop: int, *, afresh: bool = False) -> None:
        """Fetch and prove what is missing of some bytes of the table, or all of them.

        Raises:
            ChecksumError: A block is another one.
            StorageError: Reading or writing failed.
        """
        first, last = start // BLOCK_NUM_BYTES, -(-stop // BLOCK_NUM_BYTES)
        missing = (
            np.arange(first, last)
            if afresh
            else first + np.flatnonzero(~self._is_there[first:last].view(bool))
        )
        for run_start, run_stop in _runs(missing):
            self._fetch(run_start, run_stop)

    def _fetch(self, first: int, stop: int) -> None:
        digests = self._expected()
        offset = first * BLOCK_NUM_BYTES
        data = memoryview(bytearray(min(stop * BLOCK_NUM_BYTES, self._entry.num_bytes) - offset))
        self._store.read_ranges(self._entry.path, [ByteRange(offset, len(data))], [data])
        for number in range(first, stop):
            at = number * BLOCK_NUM_BYTES - offset
            if hashlib.sha256(data[at : at + BLOCK_NUM_BYTES]).digest() != digests[number].tobytes():
                raise ChecksumError(
                    f"{self._entry.path} must have the blocks that {self._blocks.path} names, got another "
                    f"one at offset {offset + at}: it is damaged or another file; run `shardflow verify`, "
                    "and fetch it or make it again."
                )
        self._file.write(offset, data)
        # Only now: a block without its flag is fetched again.
        self._file.write(self._entry.num_bytes + first, b"\x01" * (stop - first))

    def _expected(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the digests, ``(num_blocks, 32)``; those of a machine where all is there are never read."""
        if self._digests is None:
            self._digests = read_digests(self._store, self._entry, self._blocks)
        return self._digests


def read_digests(
    store: ByteStore, entry: FileEntry, blocks: FileEntry
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the digests of the blocks of a file, ``(num_blocks, 32)`` uint8.

    Raises:
        StaleDigestsError: They are missing, or those of another file.
        FormatError: They are no digests.
        ChecksumError: They are others than the manifest's.
        StorageError: They cannot be read.
    """
    try:
        data = own_bytes(store, blocks.path, sha256=blocks.sha256, num_bytes=blocks.num_bytes)
    except NotFoundError:
        raise missing_digests(blocks.path) from None
    return parse_digests(data, entry, blocks.path)


def missing_digests(path: str) -> StaleDigestsError:
    """Return the error of digests that a manifest names, and that are not there."""
    return StaleDigestsError(f"{path} must exist and does not, {_CAUSE}.")


def describe_slower(entry: FileEntry, error: ShardflowError) -> str:
    """Return how a reader, and ``shardflow verify``, warn of a table whose blocks cannot be proven alone."""
    return f"{entry.path} is read whole, which is slower: {error.message}"


def parse_digests(data: memoryview, entry: FileEntry, path: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the digests in a file of them, ``(num_blocks, 32)`` uint8.

    Args:
        data: The file.
        entry: The file whose blocks they are of.
        path: What errors call the digests.

    Raises:
        StaleDigestsError: They are those of another file.
        FormatError: They are no digests.
    """
    table = Table(data, name=path)
    table.expect_kind(KIND, FORMAT_VERSION)
    found = (table.meta.get("sha256"), table.meta.get("num_bytes"))
    if found != (entry.sha256, entry.num_bytes):
        raise StaleDigestsError(
            f"{path} must hold the digests of {entry.path}, got those of another table, {_CAUSE}."
        )
    digests = table.column("block_sha256")
    shape = (-(-entry.num_bytes // BLOCK_NUM_BYTES), _DIGEST_NUM_BYTES)
    if table.meta.get("block_num_bytes") != BLOCK_NUM_BYTES or digests.shape != shape:
        raise FormatError(
            f"{path} must hold {shape[0]} digests of blocks of {BLOCK_NUM_BYTES} bytes, got others; "
            "run `shardflow verify`."
        )
    return digests


def has_stale_digests(store: ByteStore, manifest: Manifest) -> bool:
    """Return whether a version names digests of its samples table that are missing or of another table.

    Raises:
        FormatError: They are damaged.
        StorageError: They cannot be read.
    """
    if manifest.samples_blocks is None:
        return False
    try:
        read_digests(store, manifest.samples, manifest.samples_blocks)
    except StaleDigestsError:
        return True
    return False


def _runs(blocks: np.ndarray[Any, np.dtype[np.int64]]) -> Iterator[tuple[int, int]]:
    """Yield runs of numbers that follow each other, of bounded length, as start and stop."""
    for run in np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1):
        for start in range(0, len(run), _BLOCKS_AT_ONCE):
            part = run[start : start + _BLOCKS_AT_ONCE]
            yield int(part[0]), int(part[-1]) + 1
