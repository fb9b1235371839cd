"""Digests of fields: the SHA-256 of each piece of a shard that is read by itself (docs/format.md, 24).

A signature covers shards as a whole, and readers read fields: of a field they compare the crc32c, which finds
damage, but which anyone can meet on purpose. ``shardflow sign --fields`` writes this sidecar, and the signed
list covers it. Where it exists, a dataset that is opened with trusted keys through a cache proves what it
reads, see `CachedStore`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import AlreadyExistsError, ChecksumError, FormatError, ProofError
from shardflow.format.index import ShardIndex
from shardflow.format.keys import DIGEST_PATTERN, Json, sha256_hex
from shardflow.format.manifest import Manifest, ShardEntry
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table, encode_table
from shardflow.format.tar import HashedStream
from shardflow.storage import ByteStore
from shardflow.storage.node_files import named_bytes

_FORMAT_VERSION: Final = 1
_KIND: Final = "field-digests"
_COLUMN: Final = "sha256"
_NUM_BYTES: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestFile:
    """The table of one shard."""

    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.num_bytes < 0 or not DIGEST_PATTERN.fullmatch(self.sha256):
            raise FormatError("a table of digests has a size and a SHA-256; got others.")


@dataclass(frozen=True, kw_only=True)
class FieldDigestsManifest(SidecarManifest):
    """Manifest of the digests of a version."""

    root = "digests"
    file_name = "manifest.json"
    head: ClassVar[Mapping[str, Json]] = {
        "format": "shardflow-field-digests",
        "format_version": _FORMAT_VERSION,
    }
    remedy = "run: shardflow sign DATASET --fields --key FILE"
    name: ClassVar[str] = "fields"

    dataset_id: str
    files: tuple[DigestFile, ...]
    """One per shard, in the order of the manifest."""

    def body(self) -> dict[str, Json]:
        """Return the entries beside `head` and the digest."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Self:
        """Make a manifest of its entries."""
        return cls(**{**body, "files": tuple(DigestFile(**file) for file in body["files"])})

    def tables(self) -> dict[str, tuple[int | None, str]]:
        """Return size and SHA-256 of each table."""
        return {_table_name(number): (file.num_bytes, file.sha256) for number, file in enumerate(self.files)}

    @classmethod
    def folder(cls, dataset_id: str) -> str:
        """Return the folder of the digests of a version."""
        return f"{cls.root}/{cls.name}/{dataset_id}"

    @classmethod
    def is_name(cls, name: str) -> bool:
        """Return whether digests may have a name; there is one sidecar of them."""
        return name == cls.name


class FieldDigests:
    """Reader of the signed digests of a version.

    Args:
        store: Of the dataset; it trusts signed versions only.
        dataset_id: Of the version.

    Attributes:
        paths: Size and SHA-256 of each table by its path.

    Raises:
        FormatError: The manifest is damaged or not the signed one.
        StorageError: It cannot be read.
    """

    def __init__(self, store: ByteStore, dataset_id: str) -> None:
        manifest = FieldDigestsManifest.load(store, FieldDigestsManifest.name, dataset_id)
        folder = manifest.folder(dataset_id)
        self._store, self._dataset_id = store, dataset_id
        self.paths = {f"{folder}/{_table_name(number)}": file for number, file in enumerate(manifest.files)}
        self._ordered = tuple(self.paths.items())

    @classmethod
    def where_signed(cls, store: ByteStore, dataset_id: str, files: Mapping[str, str]) -> FieldDigests | None:
        """Open the digests if they are on the signed list; None if that has none.

        Args:
            store: Of the dataset.
            dataset_id: Of the version.
            files: The list, see `SignedList`.
        """
        path = f"{FieldDigestsManifest.folder(dataset_id)}/{FieldDigestsManifest.file_name}"
        return cls(store, dataset_id) if path in files else None

    def of_shard(self, number: int, num_pieces: int) -> NDArray[np.uint8]:
        """Return the digests of a shard, ``(num_pieces, 32)`` uint8, in the order of `ShardIndex.pieces`.

        Args:
            number: Its position in the manifest.
            num_pieces: Pieces that its index has.

        Raises:
            ProofError: There is no table for them, or another one than was signed.
            StorageError: It cannot be read.
        """
        path, file = self._ordered[number] if number < len(self._ordered) else ("", None)
        if file is None:
            raise ProofError(
                f"signed digests must cover each shard, got none for shard {number}; sign again."
            )
        try:
            data = named_bytes(self._store, path, sha256=file.sha256, num_bytes=file.num_bytes)
            digests = digests_of(Table(memoryview(data), name=path), self._dataset_id, number)
        except FormatError as error:
            raise ProofError(error.message) from None
        if len(digests) != num_pieces:
            raise ProofError(
                f"{path} must hold {num_pieces} digests, got {len(digests)}; sign the dataset again."
            )
        return digests


def digests_of(table: Table, dataset_id: str, number: int) -> NDArray[np.uint8]:
    """Return the digests of a shard, by its position in the manifest, ``(pieces, 32)``.

    Raises:
        FormatError: It is the table of another one.
    """
    table.expect_kind(_KIND, _FORMAT_VERSION)
    digests = table.column(_COLUMN)
    found = table.meta.get("dataset_id"), table.meta.get("shard"), digests.dtype, digests.shape[1:]
    if found != (dataset_id, number, np.dtype(np.uint8), (_NUM_BYTES,)):
        raise FormatError(
            f"{table.name} must hold the digests of shard {number} of this version, got another table; "
            f"delete its folder and {FieldDigestsManifest.remedy}."
        )
    return digests


def write_digests(
    store: ByteStore, manifest: Manifest, open_index: Callable[[int], ShardIndex], *, num_threads: int
) -> bool:
    """Write the digests of a version, unless they are there: each shard is read once, and checked meanwhile.

    Args:
        store: Of the dataset.
        manifest: The version.
        open_index: Returns the index of a shard by its position.
        num_threads: Shards that are read at once.

    Returns:
        Whether anything was written.

    Raises:
        ChecksumError: A shard is not the one that the manifest names; or another table is in the way.
        FormatError: Fields of a shard share bytes.
        StorageError: Reading or writing failed.
    """
    folder = FieldDigestsManifest.folder(manifest.dataset_id)

    def write(number: int) -> tuple[DigestFile, bool]:
        digests = _hash_pieces(store, manifest.shards[number], open_index(number))
        meta: dict[str, Json] = {
            "kind": _KIND,
            "format_version": _FORMAT_VERSION,
            "dataset_id": manifest.dataset_id,
            "shard": number,
        }
        data = encode_table({_COLUMN: digests}, meta)
        is_new = _put(store, f"{folder}/{_table_name(number)}", data)
        return DigestFile(num_bytes=len(data), sha256=sha256_hex(data)), is_new

    with ThreadPoolExecutor(num_threads) as pool:
        written = list(pool.map(write, range(len(manifest.shards))))
    files = tuple(file for file, _ in written)
    data = FieldDigestsManifest(dataset_id=manifest.dataset_id, files=files).encode()
    is_new = _put(store, f"{folder}/{FieldDigestsManifest.file_name}", data)
    return is_new or any(new for _, new in written)


def _hash_pieces(store: ByteStore, shard: ShardEntry, index: ShardIndex) -> NDArray[np.uint8]:
    """Return the digest of each piece of a shard, ``(pieces, 32)``, and check the shard as a whole."""
    pieces = index.pieces()
    digests = np.empty((len(pieces.offsets), _NUM_BYTES), np.uint8)
    stream = HashedStream(store, shard.path)
    order = np.argsort(pieces.offsets, kind="stable")
    for number in order.tolist():
        offset, num_bytes = int(pieces.offsets[number]), int(pieces.num_bytes[number])
        if offset < stream.position:
            raise FormatError(
                f"{shard.path} must hold its fields one after another to be signed with digests, got two "
                "that share bytes; sign it without --fields."
            )
        for _ in stream.take(offset - stream.position):
            pass
        digest = hashlib.sha256()
        for part in stream.take(num_bytes):
            digest.update(part.data)
        digests[number] = np.frombuffer(digest.digest(), np.uint8)
    if (stream.hexdigest(), stream.num_bytes) != (shard.sha256, shard.num_bytes):
        raise ChecksumError(
            f"{shard.path} must be the shard that the manifest names, got other bytes; run `shardflow "
            "verify`, fetch the shard again, and sign then."
        )
    return digests


def _put(store: ByteStore, path: str, data: bytes) -> bool:
    """Write an object; return False where the same one is there already."""
    try:
        store.put_new(path, data)
    except AlreadyExistsError:
        if store.read(path) != data:
            raise ChecksumError(
                f"{path} must hold the digests of this version, got other bytes; find out who wrote them, "
                "delete the folder, and sign again."
            ) from None
        return False
    return True


def _table_name(number: int) -> str:
    return f"shard-{number:06d}.tbl"
