"""Shards under way: members are written as they come, and what an index needs is kept in columns.

The number of a shard is known only when all parts are done, and its index names it. So a shard waits as a
tar with its rows, and `shardflow.corpora.numbering` gives it name and index.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from shardflow.packing.workplace import storage_error
from shardflow.shards.canonical import Json
from shardflow.shards.table import encode_table
from shardflow.shards.table_layout import crc32c
from shardflow.shards.tar import BLOCK_NUM_BYTES, END_OF_ARCHIVE, member_header, member_num_bytes, padding
from shardflow.storage import write_atomic

__all__ = ["ROWS_KIND", "ShardFiles"]

ROWS_KIND: Final = "corpus-rows"
_BUFFER_BYTES: Final = 1 << 20


class ShardFiles:
    """Writes the samples of one split of a part into tars of at most so many bytes.

    Args:
        folder: Where the files go.
        split: The split.
        target_bytes: A shard is closed before it passes this; a larger sample is alone in one.
    """

    def __init__(self, folder: Path, split: str, target_bytes: int) -> None:
        self._folder = folder
        self._split = split
        self._target_bytes = target_bytes
        self._shard: _OpenShard | None = None
        self._records: list[dict[str, Any]] = []

    def add(self, key: str, fields: Sequence[tuple[str, bytes]]) -> None:
        """Append a sample.

        Args:
            key: Its sample key.
            fields: Names in ascending order, with their bytes.

        Raises:
            StorageError: It cannot be written.
            FormatError: A name is too long for a tar.
        """
        num_bytes = sum(member_num_bytes(len(payload)) for _, payload in fields)
        shard = self._shard
        if shard is not None and shard.num_bytes + num_bytes > self._target_bytes:
            self._end()
            shard = None
        if shard is None:
            name = f"{self._split}-{len(self._records):06d}"
            shard = self._shard = _OpenShard(self._folder, self._split, name)
        shard.add(key, fields)

    def close(self) -> list[dict[str, Any]]:
        """End the last shard; return what is known of each, as JSON.

        Raises:
            StorageError: It cannot be written.
        """
        self._end()
        return self._records

    def abandon(self) -> None:
        """Close what is open, for good or not."""
        if self._shard is not None:
            self._shard.file.close()

    def _end(self) -> None:
        if self._shard is not None:
            self._records.append(self._shard.close())
            self._shard = None


class _OpenShard:
    def __init__(self, folder: Path, split: str, name: str) -> None:
        self._folder = folder
        self._split = split
        self._name = name
        self.num_bytes = 0
        self.file: IO[bytes]
        try:
            self.file = (folder / f"{name}.tar").open("wb", buffering=0)
        except OSError as error:
            raise storage_error("writing a shard", error) from None
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

    def add(self, key: str, fields: Sequence[tuple[str, bytes]]) -> None:
        buffer = self._buffer
        for name, payload in fields:
            size = len(payload)
            buffer += (member_header(f"{key}.{name}", size), payload, padding(size))
            self._field_name.append(self._names.setdefault(name, len(self._names)))
            self._offsets.append(self.num_bytes + BLOCK_NUM_BYTES)
            self._sizes.append(size)
            self._crcs.append(crc32c(payload))
            num_bytes = member_num_bytes(size)
            self.num_bytes += num_bytes
            self._num_buffered += num_bytes
        self._keys.append(key.encode("ascii"))
        self._num_fields.append(len(fields))
        if self._num_buffered >= _BUFFER_BYTES:
            self._flush()

    def close(self) -> dict[str, Any]:
        self._buffer.append(END_OF_ARCHIVE)
        self.num_bytes += len(END_OF_ARCHIVE)
        self._flush()
        try:
            os.fsync(self.file.fileno())
            self.file.close()
        except OSError as error:
            raise storage_error("writing a shard", error) from None
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
        }
        meta: dict[str, Json] = {"kind": ROWS_KIND, "format_version": 1, "field_names": names}
        write_atomic(self._folder / f"{self._name}.rows", [encode_table(columns, meta)], replace=True)
        return {
            "name": self._name,
            "split": self._split,
            "num_bytes": self.num_bytes,
            "sha256": self._sha256.hexdigest(),
            "num_samples": len(self._keys),
            "num_fields": len(self._offsets),
        }

    def _flush(self) -> None:
        data = memoryview(b"".join(self._buffer))
        self._buffer.clear()
        self._num_buffered = 0
        self._sha256.update(data)
        try:
            while data:
                data = data[self.file.write(data) :]
        except OSError as error:
            raise storage_error("writing a shard", error) from None
