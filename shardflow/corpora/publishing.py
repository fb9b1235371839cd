"""Publish a corpus: samples table and outcomes as streams, the list of files, and the manifest last.

What grows with the lines is read from the indexes and outcomes of the parts a piece at a time; the job holds
one record for each part and one for each shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.deid.pseudonyms import SURROGATE_LENGTH
from shardflow.shards.canonical import Json
from shardflow.shards.index import ShardIndex
from shardflow.shards.manifest import ShardEntry
from shardflow.shards.manifest_entries import FileEntry
from shardflow.shards.samples import FACT_COLUMNS
from shardflow.shards.table import Table
from shardflow.shards.table_stream import StreamedColumn, stream_table
from shardflow.shards.tar import BLOCK_NUM_BYTES
from shardflow.storage import LocalStore, write_atomic

__all__ = ["created_with", "write_file", "write_samples"]

# The packages whose versions decide the bytes of a corpus.
_PACKAGES: Final = ("numpy", "pyarrow", "rapidfuzz", "shardflow")


def created_with() -> dict[str, str]:
    """Return the versions of the packages that decide the bytes."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def write_file(output: Path, path: str, pieces: Iterable[bytes]) -> FileEntry:
    """Write a file of the dataset from its pieces.

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

    write_atomic(output / path, counted(), replace=True)
    return FileEntry(path=path, num_bytes=num_bytes, sha256=sha256.hexdigest())


def write_samples(output: Path, path: str, shards: Sequence[ShardEntry]) -> FileEntry:
    """Write the samples table of text shards, one index after another.

    Args:
        output: Folder of the dataset, where the indexes lie.
        path: Of the table.
        shards: In the order of the manifest.

    Raises:
        StorageError: It cannot be written.
        FormatError: An index cannot be trusted.
    """
    store = LocalStore(output)
    num_rows = sum(shard.num_samples for shard in shards)
    splits: dict[str, list[int]] = {}
    row = 0
    for shard in shards:
        span = splits.setdefault(shard.split, [row, row])
        row = span[1] = row + shard.num_samples

    def of_indexes(values: Callable[[ShardIndex], NDArray[Any]]) -> Callable[[], Iterator[NDArray[Any]]]:
        def pieces() -> Iterator[NDArray[Any]]:
            for shard in shards:
                name = shard.index.path
                yield values(ShardIndex.from_table(Table(store.map(name), name=name)))

        return pieces

    def of_shards(values: Callable[[int, int], NDArray[Any]]) -> Callable[[], Iterator[NDArray[Any]]]:
        return lambda: (values(number, shard.num_samples) for number, shard in enumerate(shards))

    zeros = of_shards(lambda _, count: np.zeros(count, "<u4"))
    sources: dict[str, tuple[str, Callable[[], Iterable[NDArray[Any]]]]] = {
        "sample_key": (f"S{SURROGATE_LENGTH}", of_indexes(lambda index: index.sample_keys)),
        "shard": ("<u4", of_shards(lambda number, count: np.full(count, number, "<u4"))),
        "row_in_shard": ("<u4", of_shards(lambda _, count: np.arange(count, dtype="<u4"))),
        "offset_bytes": ("<u8", of_indexes(_offsets)),
        "num_bytes": ("<u8", of_indexes(_sizes)),
        **{
            name: ("<u4", of_indexes(_text_bytes) if name == "text_bytes" else zeros) for name in FACT_COLUMNS
        },
        "modality": ("u1", of_shards(lambda _, count: np.zeros(count, "u1"))),
    }
    columns = [
        StreamedColumn(name=name, dtype=np.dtype(dtype), num_rows=num_rows, pieces=pieces)
        for name, (dtype, pieces) in sources.items()
    ]
    meta: dict[str, Json] = {"kind": "samples", "format_version": 1, "splits": splits, "modalities": [""]}
    return write_file(output, path, stream_table(columns, meta))


def _offsets(index: ShardIndex) -> NDArray[Any]:
    return index.field_offsets[index.first_field[:-1]] - np.uint64(BLOCK_NUM_BYTES)


def _sizes(index: ShardIndex) -> NDArray[Any]:
    padded = -(-index.field_num_bytes.astype(np.int64) // BLOCK_NUM_BYTES) * BLOCK_NUM_BYTES
    sizes: NDArray[Any] = np.add.reduceat(padded + BLOCK_NUM_BYTES, index.first_field[:-1].astype(np.int64))
    return sizes


def _text_bytes(index: ShardIndex) -> NDArray[Any]:
    is_text = np.array([name == index.text_field for name in index.field_names], bool)[index.field_name_ids]
    # Every sample of a corpus has its text.
    sizes: NDArray[Any] = index.field_num_bytes[is_text]
    return sizes
