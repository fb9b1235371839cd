"""Files of a dataset being written: shards that grow on disk, the cut of a split, the samples table."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import naming_os_errors
from shardflow.format.file_blocks import MIN_NUM_BYTES, BlockDigests
from shardflow.format.index import ShardIndex
from shardflow.format.keys import Json, shard_name
from shardflow.format.manifest import SAMPLES_BLOCKS, FileEntry, ShardEntry
from shardflow.format.samples import COLUMNS, DERIVED_COLUMNS, derived_column
from shardflow.format.table import StreamedColumn, Table, stream_table
from shardflow.format.tar import END_OF_ARCHIVE, member_header, member_num_bytes, padding
from shardflow.format.volumes.bricks import EncodedVolume, StoredVolume, brick_columns
from shardflow.storage import LocalStore, write_atomic

Fields = Sequence[tuple[str, bytes]]
"""Names of fields in ascending order, with their bytes."""

_BUFFER_BYTES: Final = 1 << 20
_DTYPES: Final = {"offset_bytes": "<u8", "num_bytes": "<u8", "modality": "u1"}


class SplitFiles:
    """Cuts the samples of one split into shards.

    Args:
        root: Folder of the dataset; shards go into ``shards/`` below it.
        split: The split; its shards are numbered from 0.
        target_bytes: A shard is closed before it passes this; a larger sample is alone in one.
        max_samples: A shard is closed when it holds so many; None for no limit.
        finished: Shards that an earlier writer has closed; the numbers go on behind them.
        on_shard: Called with each shard that is closed.
    """

    def __init__(
        self,
        root: Path,
        split: str,
        target_bytes: int,
        max_samples: int | None = None,
        *,
        finished: Sequence[ShardEntry] = (),
        on_shard: Callable[[ShardEntry], object] | None = None,
    ) -> None:
        self._root = root
        self._split = split
        self._target_bytes = target_bytes
        self._max_samples = max_samples
        self._shard: _OpenShard | None = None
        self._entries = list(finished)
        self._on_shard = on_shard

    def add(self, key: str, fields: Fields) -> None:
        """Append a sample.

        Raises:
            FormatError: A name is too long for a tar; nothing is written.
            StorageError: It cannot be written.
        """
        for name, payload in fields:
            member_header(f"{key}.{name}", len(payload))
        self.stream(key, fields, sum(member_num_bytes(len(payload)) for _, payload in fields))

    def stream(self, key: str, fields: Iterable[tuple[str, bytes | EncodedVolume]], num_bytes: int) -> None:
        """Append a sample whose fields are made one after another, volumes in bricks among them.

        Args:
            key: Of the sample.
            fields: Names in ascending order, with bytes or volumes; an error of theirs ends the shard, which
                `abandon` then removes.
            num_bytes: About the size of all members, by which shards are cut.

        Raises:
            FormatError: A name is too long for a tar.
            StorageError: It cannot be written.
        """
        shard = self._shard
        if shard is not None and (
            shard.num_bytes + num_bytes > self._target_bytes or shard.num_samples == self._max_samples
        ):
            self.cut()
        if self._shard is None:
            self._shard = _OpenShard(self._root, self._split, len(self._entries))
        self._shard.add(key, fields)

    def close(self) -> list[ShardEntry]:
        """End the last shard; return all of them.

        Raises:
            StorageError: It cannot be written.
        """
        self.cut()
        return self._entries

    def abandon(self) -> None:
        """Close what is open and remove it."""
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None

    def cut(self) -> None:
        """End the open shard, if there is one.

        Raises:
            StorageError: It cannot be written.
        """
        if self._shard is not None:
            self._entries.append(self._shard.close())
            self._shard = None
            if self._on_shard is not None:
                self._on_shard(self._entries[-1])


class _OpenShard:
    """A shard being written: members go to disk as they come, the columns of the index stay in memory."""

    def __init__(self, root: Path, split: str, number: int) -> None:
        self._root = root
        self._split = split
        self._name = shard_name(split, number)
        self._path = root / "shards" / f"{self._name}.tar"
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        self.num_bytes = 0
        with naming_os_errors("writing a shard"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("xb", buffering=0)
        self._sha256 = hashlib.sha256()
        self._buffer: list[bytes] = []
        self._num_buffered = 0
        self._keys: list[bytes] = []
        self._num_fields = array("I")
        self._names: dict[str, int] = {}
        self._field_name = array("I")
        self._offsets = array("Q")
        self._sizes = array("Q")
        self._crcs = array("I")
        self._volumes: list[tuple[int, StoredVolume]] = []

    @property
    def num_samples(self) -> int:
        return len(self._keys)

    def add(self, key: str, fields: Iterable[tuple[str, bytes | EncodedVolume]]) -> None:
        """Append a sample."""
        first = len(self._sizes)
        for name, payload in fields:
            pieces: Iterable[bytes]
            if isinstance(payload, bytes):
                size, pieces = len(payload), (payload,)
            else:
                size, pieces = payload.num_bytes, payload.pieces
                self._volumes.append((len(self._sizes), payload.stored))
            self._put(member_header(f"{key}.{name}", size))
            offset, checksum = self.num_bytes, 0
            for piece in pieces:
                checksum = google_crc32c.extend(checksum, piece)
                self._put(piece)
            self._put(padding(size))
            self._field_name.append(self._names.setdefault(name, len(self._names)))
            self._offsets.append(offset)
            self._sizes.append(size)
            self._crcs.append(checksum)
        self._keys.append(key.encode("ascii"))
        self._num_fields.append(len(self._sizes) - first)

    def _put(self, data: bytes) -> None:
        self._buffer.append(data)
        self.num_bytes += len(data)
        self._num_buffered += len(data)
        if self._num_buffered >= _BUFFER_BYTES:
            self._flush()

    def close(self) -> ShardEntry:
        """End the tar and write its index; both are on the disk then."""
        self._buffer.append(END_OF_ARCHIVE)
        self.num_bytes += len(END_OF_ARCHIVE)
        self._flush()
        with naming_os_errors("writing a shard"):
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self._path)
        names = sorted(self._names)
        position = np.empty(len(names), "<u4")
        position[[self._names[name] for name in names]] = np.arange(len(names))
        columns = {
            "sample_key": np.array(self._keys, "S"),
            "sample_first_field": np.cumsum([0, *self._num_fields]).astype("<u4"),
            "field_name": position[np.asarray(self._field_name)],
            "field_offset": np.asarray(self._offsets, "<u8"),
            "field_num_bytes": np.asarray(self._sizes, "<u8"),
            "field_crc32c": np.asarray(self._crcs, "<u4"),
            **(brick_columns(self._volumes) if self._volumes else {}),
        }
        index = ShardIndex.encode_columns(self._name, self.num_bytes, names, columns)
        # Syncs the folder, and with it the name of the tar.
        entry = write_file(self._root, f"shards/{self._name}.idx", [index])
        return ShardEntry(
            name=self._name,
            split=self._split,
            path=f"shards/{self._name}.tar",
            num_bytes=self.num_bytes,
            sha256=self._sha256.hexdigest(),
            index=entry,
            num_samples=len(self._keys),
            num_fields=len(self._offsets),
            num_volumes=len(self._volumes),
        )

    def abandon(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        data = memoryview(b"".join(self._buffer))
        self._buffer.clear()
        self._num_buffered = 0
        self._sha256.update(data)
        with naming_os_errors("writing a shard"):
            while data:
                data = data[self._file.write(data) :]


def link_shard(source: Path, entry: str, root: Path, name: str) -> FileEntry:
    """Link a finished shard into a dataset under a new name.

    Args:
        source: The folder it was written to.
        entry: Its name there.
        root: Folder of the dataset, on the same file system.
        name: Its new name; an existing file of that name is replaced.

    Returns:
        Its new index.

    Raises:
        StorageError: A file cannot be written.
        ChecksumError: The index is damaged.
    """
    tar, target = source / "shards" / f"{entry}.tar", root / "shards" / f"{name}.tar"
    with naming_os_errors("putting a shard into its place"):
        target.parent.mkdir(exist_ok=True)
        if not (target.exists() and target.samefile(tar)):
            target.unlink(missing_ok=True)
            os.link(tar, target)
    table = Table(LocalStore(source).map(f"shards/{entry}.idx"), name="the index of a part")
    columns = {column: table.column(column) for column in table.column_names}
    meta = table.meta
    index = ShardIndex.encode_columns(name, meta["shard_num_bytes"], meta["field_names"], columns)
    # Syncs the folder, and with it the name of the tar.
    return write_file(root, f"shards/{name}.idx", [index])


def write_samples(
    root: Path,
    path: str,
    shards: Sequence[ShardEntry],
    *,
    key_num_bytes: int,
    modalities: Sequence[str] = ("",),
    given: Mapping[str, NDArray[Any]] | None = None,
) -> SamplesFiles:
    """Write the samples table from the indexes of all shards, each of which is decoded once.

    Args:
        root: Folder of the dataset, where the indexes are.
        path: Of the table.
        shards: In the order of the manifest.
        key_num_bytes: Length of the longest sample key.
        modalities: Names that the column ``modality`` points into.
        given: Columns that no index determines (rows, columns, modality), all rows of each; zeros where
            one is not given.

    Raises:
        StorageError: It cannot be written.
        FormatError: An index cannot be trusted.
    """
    store, given = LocalStore(root), given or {}
    first = np.cumsum([0, *(shard.num_samples for shard in shards)])
    dtypes = _dtypes(key_num_bytes)
    with ExitStack() as stack, naming_os_errors("collecting the columns of the samples table"):
        # The table holds one column behind another, and an index a part of each.
        spools = {name: stack.enter_context(tempfile.TemporaryFile(dir=root)) for name in DERIVED_COLUMNS}
        for shard in shards:
            path_of_index = shard.index.path
            index = ShardIndex.decode(Table(store.map(path_of_index), name=path_of_index))
            for name, spool in spools.items():
                spool.write(np.ascontiguousarray(derived_column(index, name), dtypes[name]).data.cast("B"))
        for spool in spools.values():
            spool.flush()

        def column(number: int, name: str) -> NDArray[Any]:
            start, stop = int(first[number]), int(first[number + 1])
            if name in given:
                return given[name][start:stop]
            if name not in spools:
                return np.zeros(stop - start, "u1")
            size = dtypes[name].itemsize
            data = os.pread(spools[name].fileno(), (stop - start) * size, start * size)
            return np.frombuffer(data, dtypes[name])

        table = stream_samples(
            [(shard.split, shard.num_samples) for shard in shards],
            column,
            key_num_bytes=key_num_bytes,
            modalities=modalities,
        )
        return SamplesFiles.write(root, path, table)


@dataclass(frozen=True, slots=True)
class SamplesFiles:
    """The samples table of a version, and the digests of its blocks if it is large."""

    table: FileEntry
    blocks: FileEntry | None

    @property
    def extra(self) -> dict[str, Json]:
        """What the manifest's ``extra`` says of the digests."""
        return {} if self.blocks is None else {SAMPLES_BLOCKS: asdict(self.blocks)}

    @classmethod
    def write(cls, root: Path, path: str, pieces: Iterable[bytes]) -> SamplesFiles:
        """Write them from the pieces of the table.

        Raises:
            StorageError: They cannot be written.
        """
        digests = BlockDigests()

        def counted() -> Iterator[bytes]:
            for piece in pieces:
                digests.add(piece)
                yield piece

        table = write_file(root, path, counted())
        return cls(table, digests.write(root, table) if table.num_bytes >= MIN_NUM_BYTES else None)


def _dtypes(key_num_bytes: int) -> dict[str, np.dtype[Any]]:
    types = {"sample_key": f"S{key_num_bytes}", **_DTYPES}
    return {name: np.dtype(types.get(name, "<u4")) for name in COLUMNS}


def stream_samples(
    shards: Sequence[tuple[str, int]],
    column: Callable[[int, str], NDArray[Any]],
    *,
    key_num_bytes: int,
    modalities: Sequence[str],
) -> Iterator[bytes]:
    """Yield a samples table in pieces.

    Args:
        shards: Split and number of samples of each shard, in the order of the manifest.
        column: Returns a column of the samples of a shard, by its number; called for one at a time.
        key_num_bytes: Length of the longest sample key.
        modalities: Names that the column ``modality`` points into.
    """
    splits: dict[str, list[int]] = {}
    num_rows = 0
    for split, count in shards:
        if count:
            span = splits.setdefault(split, [num_rows, num_rows])
            num_rows = span[1] = num_rows + count

    def pieces(name: str) -> Iterator[NDArray[Any]]:
        for number, (_, count) in enumerate(shards):
            yield np.full(count, number) if name == "shard" else column(number, name)

    columns = [
        StreamedColumn(name=name, dtype=dtype, shape=(num_rows,), pieces=pieces(name))
        for name, dtype in _dtypes(key_num_bytes).items()
    ]
    meta: dict[str, Json] = {
        "kind": "samples",
        "format_version": 1,
        "splits": splits,
        "modalities": list(modalities),
    }
    yield from stream_table(columns, meta)


def write_file(root: Path, path: str, pieces: Iterable[bytes]) -> FileEntry:
    """Write a file of a dataset from its pieces, and return what a manifest says of it.

    Raises:
        StorageError: It cannot be written.
    """
    sha256, num_bytes = hashlib.sha256(), 0

    def counted() -> Iterator[bytes]:
        nonlocal num_bytes
        for piece in pieces:
            sha256.update(piece)
            num_bytes += len(piece)
            yield piece

    write_atomic(root / path, counted(), replace=True)
    return FileEntry(path=path, num_bytes=num_bytes, sha256=sha256.hexdigest())


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed ones of some packages, for a manifest's ``created_with``."""
    found = {name: _version_of(name) for name in names}
    return {name: number for name, number in found.items() if number}


@cache
def _version_of(package: str) -> str:
    """Return an installed package's version, for which its metadata are parsed; empty if it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
