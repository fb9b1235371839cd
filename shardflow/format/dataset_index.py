"""Indexes of the shards of a dataset: opened one by one, or all in one table that processes of a node share.

Opening the index of a shard costs a file, a digest and a parse. With a full shuffle each sample of a batch is
in another shard, so a dataset of many shards would pay that for every sample, or hold every index in every
process. The first process on a node reads the indexes once, each compared with the manifest's digest, and
writes their columns one behind another to a node file; all others map it. `DatasetIndex.shard` gives the
index of one shard as views, and `texts` the places of texts of any shards at once. `ShardIndexes` chooses
between the two.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, ShardflowError
from shardflow.format.index import ShardIndex, TextPlaces
from shardflow.format.keys import Json
from shardflow.format.manifest import Manifest
from shardflow.format.table import StreamedColumn, Table, stream_table
from shardflow.storage import ByteStore, LocalStore
from shardflow.storage.node_files import named_bytes, node_file

KIND: Final = "dataset-index"
FORMAT_VERSION: Final = 1
MIN_COLLECTED_SHARDS: Final = 64
"""Number of shards from which a loader collects their indexes."""
# More is fetched as it is needed: nobody waits minutes for a first batch.
_MAX_REMOTE_NUM_BYTES: Final = 1 << 30
# Bound on the indexes that stay open, in bytes of their files; one may exceed it, alone. They are read
# rather than mapped: their digest needs every byte anyway, and a map holds a file descriptor.
_MAX_OPEN_NUM_BYTES: Final = 256 << 20
# What a view of the collected indexes counts as: it takes little time to make, and 2 KB of objects in each
# process, so that no more than 4,096 of 100,000 shards are kept.
_VIEW_NUM_BYTES: Final = 64 << 10
_NUM_THREADS: Final = 16
_SHARDS_AT_ONCE: Final = 8 * _NUM_THREADS
_CHUNK_ROWS: Final = 1 << 18
_COLUMNS: Final = {
    "sample_key": np.dtype("S64"),
    "sample_text": np.dtype("<i8"),
    "sample_first_field": np.dtype("<u4"),
    "field_name": np.dtype("<u4"),
    "field_offset": np.dtype("<u8"),
    "field_num_bytes": np.dtype("<u8"),
    "field_crc32c": np.dtype("<u4"),
}
"""Columns that are spooled. ``sample_text`` is the number of a sample's text among all fields, or -1; of the
others docs/format.md, section 6 tells, one shard behind another."""
logger = logging.getLogger(__name__)


class ShardIndexes:
    """Indexes of the shards of a version, opened as they are needed. Safe for many threads.

    Args:
        store: Of the dataset.
        manifest: Its version.

    Attributes:
        collected: The indexes of all shards, once `collect` has put them together; else None.
    """

    def __init__(self, store: ByteStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._open: OrderedDict[int, tuple[ShardIndex, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self.collected: DatasetIndex | None = None
        self._is_tried = False
        self._collecting = threading.Lock()

    def shard(self, shard: int) -> ShardIndex:
        """Return the index of a shard by its position in the manifest.

        Raises:
            ChecksumError: The index differs from what the manifest says.
            FormatError: It is the index of another shard.
        """
        with self._lock:
            found = self._open.get(shard)
            if found is not None:
                self._open.move_to_end(shard)
                return found[0]
        index, num_bytes = self._of_collected(shard), _VIEW_NUM_BYTES
        if index is None:
            index, num_bytes = self.open(shard), self._manifest.shards[shard].index.num_bytes
        with self._lock:
            if shard not in self._open:  # another thread may have opened it meanwhile
                self._open[shard] = index, num_bytes
                self._num_bytes += num_bytes
            while self._num_bytes > _MAX_OPEN_NUM_BYTES and len(self._open) > 1:
                _, (_, num_bytes) = self._open.popitem(last=False)
                self._num_bytes -= num_bytes
        return index

    def open(self, shard: int) -> ShardIndex:
        """Read the index of a shard, which `shard` keeps.

        Raises:
            ChecksumError: The index differs from what the manifest says.
            FormatError: It is the index of another shard.
        """
        entry = self._manifest.shards[shard]
        file = entry.index
        data = named_bytes(self._store, file.path, sha256=file.sha256, num_bytes=file.num_bytes)
        index = ShardIndex.decode(Table(memoryview(data), name=file.path))
        num_volumes = 0 if index.bricks is None else len(index.bricks.fields)
        found = (index.shard, index.shard_num_bytes, index.num_samples, index.num_fields, num_volumes)
        if found != (entry.name, entry.num_bytes, entry.num_samples, entry.num_fields, entry.num_volumes):
            raise FormatError(f"{file.path} must be the index of {entry.name}, got one of {index.shard}.")
        return index

    def collect(self) -> None:
        """Put the indexes of all shards together, if there are many, see `DatasetIndex`.

        Where that is impossible, each is opened when it is first needed.
        """
        with self._collecting:
            if self._is_tried:
                return
            self._is_tried = True
            manifest = self._manifest
            if len(manifest.shards) < MIN_COLLECTED_SHARDS or (
                not isinstance(self._store, LocalStore) and manifest.index_num_bytes > _MAX_REMOTE_NUM_BYTES
            ):
                return
            try:
                self.collected = DatasetIndex.of(manifest, self.open)
            except ShardflowError as error:
                logger.warning("The indexes of shards are read one by one, which is slower: %s", error)

    def _of_collected(self, shard: int) -> ShardIndex | None:
        collected = self.collected  # another thread may give it up meanwhile
        # The bricks of volumes are in the index of the shard alone.
        if collected is None or self._manifest.shard_place(shard).num_volumes:
            return None
        try:
            return collected.shard(shard)
        except FormatError as error:  # the file of this node is damaged, not the dataset
            logger.warning("The indexes of shards are read one by one, which is slower: %s", error)
            collected.delete()
            self.collected = None
            return None


class DatasetIndex:
    """Index of a whole dataset, open for reading. Safe for many threads.

    Args:
        path: The node file.
        manifest: Of the dataset.

    Raises:
        FormatError: The table is of another dataset.
        ChecksumError: It is damaged.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        table = Table(LocalStore(path.parent).map(path.name), name=path.name)
        table.expect_kind(KIND, FORMAT_VERSION)
        self._path, self._table, self._manifest = path, table, manifest
        self._first_sample = table.column("shard_first_sample").astype(np.int64)
        self._first_field = table.column("shard_first_field").astype(np.int64)
        self._text_field = table.column("shard_text_field")
        found = (table.meta.get("dataset_id"), len(self._text_field))
        if found != (manifest.dataset_id, len(manifest.shards)):
            raise FormatError(f"{path} is not the index of this dataset.")
        self._field_names: tuple[str, ...] = tuple(table.meta["field_names"])
        self._text_fields: list[str] = table.meta["text_fields"]
        self._is_foreign: bool = table.meta["foreign"]

    @classmethod
    def of(cls, manifest: Manifest, open_index: Callable[[int], ShardIndex]) -> DatasetIndex:
        """Open the index of a dataset on this node, and make it if it is the first time.

        Args:
            manifest: Of the dataset.
            open_index: Reads the index of a shard by its position, and compares it with the manifest.

        Raises:
            FormatError: The index of a shard is damaged.
            StorageError: An index cannot be read, or the node has no place for the file.
        """
        name = f"index-{manifest.dataset_id}.tbl"
        path = node_file(name, lambda folder: _collect(manifest, open_index, folder))
        try:
            return cls(path, manifest)
        except FormatError:
            path.unlink(missing_ok=True)  # the next process makes it again
            raise

    def delete(self) -> None:
        """Delete the node file, which the next process makes again."""
        self._path.unlink(missing_ok=True)

    def shard(self, position: int) -> ShardIndex:
        """Return the index of a shard by its position in the manifest, without a copy.

        Raises:
            ChecksumError: A block of the table is damaged.
        """
        place = self._manifest.shard_place(position)
        samples = slice(*self._first_sample[position : position + 2].tolist())
        fields = slice(*self._first_field[position : position + 2].tolist())
        # A shard of n samples has n + 1 bounds.
        bounds = slice(samples.start + position, samples.stop + position + 1)
        places = {"sample_key": samples, "sample_first_field": bounds}
        columns = {
            name: self._view(name, places.get(name, fields)) for name in _COLUMNS if name != "sample_text"
        }
        text_field = self._text_fields[int(self._text_field[position])] if self._is_foreign else None
        return ShardIndex(place.name, place.num_bytes, self._field_names, columns, text_field)

    def texts(self, positions: NDArray[np.int64], rows: NDArray[np.int64]) -> TextPlaces:
        """Return the places of the texts of samples of any shards.

        Args:
            positions: ``(n,)`` positions of their shards in the manifest.
            rows: ``(n,)`` rows in their shards.

        Raises:
            IndexError: A shard has no such row.
            ChecksumError: A block of the table is damaged.
        """
        samples = self._first_sample[positions] + rows
        if (samples >= self._first_sample[positions + 1]).any():
            raise IndexError("A row is not one of its shard.")
        fields = self._table.gather("sample_text", samples)
        has_text = fields >= 0
        fields = np.maximum(fields, 0)
        return TextPlaces(
            keys=self._table.gather("sample_key", samples),
            offsets=self._table.gather("field_offset", fields).astype(np.int64),
            num_bytes=np.where(has_text, self._table.gather("field_num_bytes", fields), 0).astype(np.int64),
            crc32c=self._table.gather("field_crc32c", fields),
        )

    def _view(self, name: str, rows: slice) -> NDArray[Any]:
        view = self._table.whole(name)
        if view is None:
            view = self._table.spans(name, np.array([rows.start]), np.array([rows.stop]))
        return view[rows]


def _collect(manifest: Manifest, open_index: Callable[[int], ShardIndex], folder: Path) -> Iterator[bytes]:
    """Yield the table of all indexes; reads each once, and spools the columns to temporary files."""
    num_samples = sum(entry.num_samples for entry in manifest.shards)
    names: dict[str, int] = {}
    text_fields: dict[str, int] = {}
    first_sample, first_field, shard_text_field = [0], [0], []
    is_foreign = False
    with ExitStack() as stack, ThreadPoolExecutor(_NUM_THREADS) as pool:
        spools = {name: _Spool(stack, folder, dtype) for name, dtype in _COLUMNS.items()}
        for start in range(0, len(manifest.shards), _SHARDS_AT_ONCE):
            stop = min(start + _SHARDS_AT_ONCE, len(manifest.shards))
            for index in pool.map(open_index, range(start, stop)):
                is_foreign |= index.is_foreign
                own = np.array([names.setdefault(name, len(names)) for name in index.field_names], "<u4")
                texts = index.text_fields
                spools["field_name"].add(own[index.field_name_ids])
                spools["field_offset"].add(index.field_offsets)
                spools["field_num_bytes"].add(index.field_num_bytes)
                spools["field_crc32c"].add(index.field_crc32c)
                spools["sample_key"].add(index.sample_keys)
                spools["sample_first_field"].add(index.first_field)
                spools["sample_text"].add(np.where(texts < 0, -1, texts + first_field[-1]))
                shard_text_field.append(text_fields.setdefault(index.text_field, len(text_fields)))
                first_sample.append(first_sample[-1] + index.num_samples)
                first_field.append(first_field[-1] + index.num_fields)
        lengths = {
            name: num_samples if name in ("sample_key", "sample_text") else first_field[-1] for name in spools
        }
        lengths["sample_first_field"] = num_samples + len(manifest.shards)
        columns = [
            _column("shard_first_sample", np.array(first_sample, "<u8")),
            _column("shard_first_field", np.array(first_field, "<u8")),
            _column("shard_text_field", np.array(shard_text_field, "<u4")),
            *(spool.column(name, lengths[name]) for name, spool in spools.items()),
        ]
        meta: dict[str, Json] = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "dataset_id": manifest.dataset_id,
            "field_names": list(names),
            "foreign": is_foreign,
            "text_fields": list(text_fields),
        }
        yield from stream_table(columns, meta)


class _Spool:
    """A column that is written piece by piece, and read once it is whole."""

    def __init__(self, stack: ExitStack, folder: Path, dtype: np.dtype[Any]) -> None:
        self._file = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - the stack closes it
        self._dtype = dtype

    def add(self, values: NDArray[Any]) -> None:
        """Append a piece."""
        self._file.write(np.ascontiguousarray(values, self._dtype).data.cast("B"))

    def column(self, name: str, num_rows: int) -> StreamedColumn:
        """Return the column, of as many rows as the manifest says."""
        return StreamedColumn(name=name, dtype=self._dtype, shape=(num_rows,), pieces=self._pieces())

    def _pieces(self) -> Iterator[NDArray[Any]]:
        self._file.seek(0)
        while data := self._file.read(_CHUNK_ROWS * self._dtype.itemsize):
            yield np.frombuffer(data, self._dtype)


def _column(name: str, values: NDArray[Any]) -> StreamedColumn:
    return StreamedColumn(name=name, dtype=values.dtype, shape=values.shape, pieces=(values,))
