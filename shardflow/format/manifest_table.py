"""Shards of a large manifest as a table that the processes of a node share.

The manifest of 10^5 shards is 35 MB of JSON: parsing it takes 2 s of CPU, and its entries take 140 MB. So the
first process of a node that opens such a dataset parses and checks it, and writes the entries as columns to a
node file named by the SHA-256 of the manifest's bytes; the others digest those bytes and map the columns.
An entry is made when it is asked for.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, ManifestError, ShardflowError
from shardflow.format.keys import Json
from shardflow.format.manifest import (
    CheckedShards,
    FileEntry,
    Manifest,
    ShardEntry,
    check_size,
    latest_version,
    load,
    manifest_path,
)
from shardflow.format.table import Table, encode_table
from shardflow.storage import ByteStore, LocalStore
from shardflow.storage.node_files import named_bytes, node_file, object_pieces

MIN_SHARED_BYTES = 4 << 20
"""Size from which a manifest is shared; it has some 12,000 shards."""
_KIND: Final = "manifest-shards"
_FORMAT_VERSION: Final = 1
_COUNTS: Final = ("num_samples", "num_fields", "num_removed", "num_volumes")
_BLOCK: Final = 4096
_Entry = TypeVar("_Entry", FileEntry, ShardEntry)
logger = logging.getLogger(__name__)


def load_shared(store: ByteStore, version: int | None = None) -> Manifest:
    """Load a version of the dataset in a store, see `shardflow.format.manifest.load`.

    Raises:
        ManifestError: There is no such manifest, or it cannot be trusted.
        StorageError: Reading failed.
    """
    number = latest_version(store) if version is None else version
    path = manifest_path(number)
    try:
        num_bytes = store.size(path)
        check_size(num_bytes)
        if num_bytes < MIN_SHARED_BYTES:
            return load(store, number, num_bytes=num_bytes)
        digest = hashlib.sha256()
        for piece in object_pieces(store, path, num_bytes):
            digest.update(piece)
        name = f"manifest-{digest.hexdigest()}.tbl"

        def make(_: Path) -> list[bytes]:
            # The bytes that were digested, though the file may be another one now.
            data = named_bytes(store, path, sha256=digest.hexdigest(), num_bytes=num_bytes)
            try:
                return [_encoded(Manifest.parse(data), digest.hexdigest())]
            except ManifestError as error:
                raise ManifestError(f"{path}: {error.message}") from None

        place = node_file(name, make)
        try:
            return SharedShards(place).manifest(digest.hexdigest(), number)
        except (FormatError, KeyError, TypeError, ValueError):
            place.unlink(missing_ok=True)  # the next process makes it again
            raise
    except ManifestError:
        raise
    except (ShardflowError, KeyError, TypeError, ValueError) as error:
        logger.warning("The manifest is parsed by each process, which is slower: %s", error)
        return load(store, number)


def _encoded(manifest: Manifest, file_sha256: str) -> bytes:
    """Encode a manifest: columns of its shards, and what else it says as meta data."""
    shards = manifest.shards
    splits = sorted({shard.split for shard in shards})
    number_of = {split: number for number, split in enumerate(splits)}
    columns: dict[str, NDArray[Any]] = {
        "name": np.array([shard.name for shard in shards], "S"),
        "split": np.array([number_of[shard.split] for shard in shards], "<u4"),
        "path": np.array([shard.path for shard in shards], "S"),
        "num_bytes": np.array([shard.num_bytes for shard in shards], "<u8"),
        "sha256": np.array([shard.sha256 for shard in shards], "S64"),
        "index_path": np.array([shard.index.path for shard in shards], "S"),
        "index_num_bytes": np.array([shard.index.num_bytes for shard in shards], "<u8"),
        "index_sha256": np.array([shard.index.sha256 for shard in shards], "S64"),
        **{name: np.array([getattr(shard, name) for shard in shards], "<u8") for name in _COUNTS},
    }
    body = manifest.body_without_shards()
    meta: dict[str, Json] = {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "file_sha256": file_sha256,
        "dataset_id": manifest.dataset_id,
        "splits": splits,
        "body": body,
    }
    return encode_table(columns, meta)


class SharedShards(CheckedShards):
    """Shards in the order of the manifest, made of columns when they are asked for. Safe for many threads.

    Args:
        path: The node file.

    Raises:
        FormatError: It is damaged, or another file.
    """

    def __init__(self, path: Path) -> None:
        table = Table(LocalStore(path.parent).map(path.name), name=path.name)
        table.expect_kind(_KIND, _FORMAT_VERSION)
        self._path, self._meta = path, table.meta
        self._names: list[str] = table.meta["splits"]
        self._columns = {name: table.column(name) for name in table.column_names}
        self.splits = self._meta["body"]["splits"]
        self.has_volumes = bool(self._columns["num_volumes"].any())

    def manifest(self, file_sha256: str, version: int) -> Manifest:
        """Return the manifest.

        Raises:
            FormatError: It is one of other bytes.
        """
        body = self._meta["body"]
        if (self._meta["file_sha256"], body["manifest_version"]) != (file_sha256, version):
            raise FormatError(f"{self._path} is of another manifest.")
        return Manifest.checked(body, self, self._meta["dataset_id"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross a process boundary as the node file; as entries where that was deleted."""
        return (SharedShards, (self._path,)) if self._path.exists() else (tuple, (list(self),))

    def __len__(self) -> int:
        return len(self._columns["split"])

    @overload
    def __getitem__(self, place: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, place: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        if isinstance(place, slice):
            return tuple(self._entries(place))
        return next(self._entries(slice(place, place + 1 or None)), None) or self._missing(place)

    def place(self, place: int) -> tuple[str, str]:
        """Return name and path of a shard; an entry takes six times as long."""
        name, path = self._columns["name"][place], self._columns["path"][place]
        return name.decode("ascii"), path.decode("ascii")

    def __iter__(self) -> Iterator[ShardEntry]:
        for start in range(0, len(self), _BLOCK):
            yield from self._entries(slice(start, start + _BLOCK))

    def _missing(self, place: int) -> ShardEntry:
        raise IndexError(f"a shard must be one of {len(self)}, got {place}.")

    def _entries(self, here: slice) -> Iterator[ShardEntry]:
        columns = (column[here].tolist() for column in self._columns.values())
        for name, split, path, num_bytes, sha256, *index, samples, fields, removed, volumes in zip(
            *columns, strict=True
        ):
            yield _made(
                ShardEntry,
                name=name.decode("ascii"),
                split=self._names[split],
                path=path.decode("ascii"),
                num_bytes=num_bytes,
                sha256=sha256.decode("ascii"),
                index=_made(
                    FileEntry,
                    path=index[0].decode("ascii"),
                    num_bytes=index[1],
                    sha256=index[2].decode("ascii"),
                ),
                num_samples=samples,
                num_fields=fields,
                num_removed=removed,
                num_volumes=volumes,
            )


def _made(kind: type[_Entry], **values: Any) -> _Entry:
    """Make an entry without the checks that it passed when the manifest was parsed."""
    entry = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(entry, name, value)
    return entry
