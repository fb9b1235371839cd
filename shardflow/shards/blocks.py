"""What a cache is told of a dataset's files: digests, fields with their checksums, rows that need them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.shards.index import ShardIndex
from shardflow.shards.manifest import Manifest
from shardflow.shards.samples import SamplesTable
from shardflow.storage.cache import ObjectBlocks

__all__ = ["DatasetBlocks"]


class DatasetBlocks:
    """From a path to the blocks of the file; rows of the samples table are their units.

    A shard is cut between its fields; an index and the samples table are one block each. Manifests are not
    kept, since the newest is asked for.

    Args:
        manifest: The list of files.
        samples: Returns the samples table, which need not be open yet.
        shard_index: Returns the index of a shard by its position in the manifest.
        block_bytes: Largest block of several fields.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        samples: Callable[[], SamplesTable],
        shard_index: Callable[[int], ShardIndex],
        block_bytes: int,
    ) -> None:
        self._manifest, self._samples, self._shard_index = manifest, samples, shard_index
        self._block_bytes = block_bytes
        shards = manifest.shards
        self._shards = {entry.path: place for place, entry in enumerate(shards)}
        self._indexes = {entry.index.path: place for place, entry in enumerate(shards)}

    def __call__(self, path: str) -> ObjectBlocks | None:
        """Return the blocks of a file; None for one that is not kept."""
        samples, space = self._manifest.samples, self._manifest.dataset_id
        if path == samples.path:
            return ObjectBlocks.whole(samples.sha256, samples.num_bytes, space=space)
        place = self._indexes.get(path)
        if place is not None:
            index, rows = self._manifest.shards[place].index, self._rows(place)
            units = (rows.start, rows.stop)
            return ObjectBlocks.whole(index.sha256, index.num_bytes, space=space, units=units)
        place = self._shards.get(path)
        return None if place is None else self._of_shard(place)

    def _of_shard(self, place: int) -> ObjectBlocks | None:
        try:
            index = self._shard_index(place)
        except FormatError:
            return None  # a damaged index names no blocks; the reader masks its samples
        rows = self._rows(place)
        row_of_sample = np.full(index.num_samples, -1, np.int64)
        inside = self._samples().gather("row_in_shard", np.arange(rows.start, rows.stop)).astype(np.int64)
        known = inside < index.num_samples
        row_of_sample[inside[known]] = np.arange(rows.start, rows.stop)[known]
        first: NDArray[np.int64] = index.first_field.astype(np.int64)
        units = np.repeat(row_of_sample, first[1:] - first[:-1])
        return ObjectBlocks.of_pieces(
            self._manifest.shards[place].sha256,
            index.field_offsets.astype(np.int64),
            index.field_num_bytes.astype(np.int64),
            index.field_crc32c,
            block_bytes=self._block_bytes,
            space=self._manifest.dataset_id,
            units=units,
        )

    def _rows(self, place: int) -> range:
        """Return the rows of a shard: they follow each other, in the rows of its split."""
        samples = self._samples()
        rows = samples.splits.get(self._manifest.shards[place].split, range(0))
        bounds = []
        for shard in (place, place + 1):
            low, high = rows.start, rows.stop
            while low < high:
                middle = (low + high) // 2
                if int(samples.gather("shard", middle)) < shard:
                    low = middle + 1
                else:
                    high = middle
            bounds.append(low)
        return range(*bounds)
