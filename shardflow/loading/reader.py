"""From index rows to checked bytes: find the fields of a sample, read just those, and trust none unchecked.

Owns finding, reading and checking; knows nothing of pixels or batches. Nothing walks a tar: a field's place
and crc32c come from the shard's index. Ranges are handed to the byte store in ascending order, many in one
call, and the store joins those that lie close together, since it knows what a request costs. A payload is
checked as soon as it is read, while it is in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, ShortReadError
from shardflow.loading.quarantine import BadSample, BadSampleReason
from shardflow.loading.thread_state import ThreadState
from shardflow.shards import Dataset, ShardIndex
from shardflow.shards.codecs import CODECS
from shardflow.shards.keys import REPORT_FIELD, STUDY_FIELD, parse_slice_field
from shardflow.storage import ByteRange
from shardflow.telemetry import StageCounters

__all__ = ["FieldReader", "Shard"]

_MAX_RANGES = 512
_MAX_SHARDS = 512


@dataclass(frozen=True, slots=True)
class _NameTable:
    """What the field names of a shard mean, by their number in the index."""

    codecs: tuple[str, ...]
    """Codec of a slice of the primary series, empty for everything else."""
    slice_index: NDArray[np.int64]
    """Place of that slice along the normal, -1 for everything else."""
    preference: NDArray[np.int64]
    """Which of several codecs of one slice is taken: the smallest number."""
    report: int
    study: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that can be read: its index, and what the names in it mean.

    Fields are named by their number in the index, so that a study of 300 slices makes no 300 objects.
    """

    number: int
    name: str
    path: str
    index: ShardIndex
    names: _NameTable

    def slices(self, row: int) -> NDArray[np.int64]:
        """Return the fields that hold the primary series of a sample, in geometric order."""
        start, stop = self._span(row)
        ids = self.index.field_name_ids[start:stop]
        order = self.names.slice_index[ids]
        found = np.flatnonzero(order >= 0)
        order = order[found]
        if (np.diff(order) <= 0).any():  # stored in several codecs, or more than 9,999 slices
            preferred = np.lexsort((self.names.preference[ids[found]], order))
            found, order = found[preferred], order[preferred]
            found = found[np.concatenate(([True], np.diff(order) > 0))]
        return found + start

    def report(self, row: int) -> int | None:
        """Return the field that holds the report of a sample."""
        return self._find(row, self.names.report)

    def study(self, row: int) -> int | None:
        """Return the field that holds the description of a sample."""
        return self._find(row, self.names.study)

    def field_name(self, field: int) -> str:
        """Return the name of a field."""
        return self.index.field_names[int(self.index.field_name_ids[field])]

    def codec(self, field: int) -> str:
        """Return the codec of a slice of the primary series."""
        return self.names.codecs[int(self.index.field_name_ids[field])]

    def num_bytes(self, field: int) -> int:
        """Return the size of a field."""
        return int(self.index.field_num_bytes[field])

    def bad(self, reason: BadSampleReason, field: int | str, detail: str = "") -> BadSample:
        """Make the finding that a field of this shard is bad."""
        return BadSample(
            reason, self.name, field if isinstance(field, str) else self.field_name(field), detail
        )

    def _span(self, row: int) -> tuple[int, int]:
        start, stop = self.index.first_field[row : row + 2].tolist()
        return start, stop

    def _find(self, row: int, name: int) -> int | None:
        start, stop = self._span(row)
        found = np.flatnonzero(self.index.field_name_ids[start:stop] == name)
        return start + int(found[0]) if len(found) else None


class FieldReader:
    """Reads fields of a dataset's shards. Safe for many threads.

    Args:
        dataset: The dataset.
        read_bytes: How much one call to the store may read; a larger field is read alone.
        counters: Gets the stages ``index``, ``read`` and ``check``.
    """

    def __init__(self, dataset: Dataset, *, read_bytes: int, counters: StageCounters) -> None:
        self._dataset = dataset
        self._read_bytes = read_bytes
        self._counters = counters
        self._shards: dict[int, Shard] = {}
        scheme, separator, _ = dataset.store.url.partition("://")
        self._tier = scheme if separator and scheme != "file" else "local"

    def open_shard(self, number: int, thread: ThreadState) -> Shard:
        """Open a shard by its position in the manifest.

        Raises:
            BadSample: The index is damaged, and with it every sample of the shard.
            StorageError: The index cannot be read.
        """
        entry = self._dataset.manifest.shards[number]
        thread.enter("index", self._place(entry.name))
        start = time.perf_counter()
        try:
            index = self._dataset.shard_index(number)
        except FormatError as error:
            raise BadSample(BadSampleReason.INDEX_DAMAGED, entry.name, "", error.message) from None
        shard = self._shards.get(number)
        if shard is None or shard.index is not index:
            shard = Shard(number, entry.name, entry.path, index, _read_names(index.field_names))
            if len(self._shards) >= _MAX_SHARDS:
                self._shards.clear()
            self._shards[number] = shard
        self._counters.add("index", time.perf_counter() - start, 0, 1)
        return shard

    def read(
        self, shard: Shard, fields: NDArray[np.int64], thread: ThreadState
    ) -> Iterator[tuple[int, NDArray[np.uint8] | BadSample]]:
        """Read fields in the order in which they lie in the shard.

        Args:
            shard: From `open_shard`.
            fields: ``(n,)`` numbers of fields, in any order, no two alike.
            thread: Of the caller; a payload lies in its scratch memory and is valid until the next one is
                asked for.

        Yields:
            The position in ``fields``, and the field's bytes, which have the crc32c of the index; or what is
            wrong with the field.

        Raises:
            StorageError: The store cannot read the shard at all.
        """
        order = np.argsort(shard.index.field_offsets[fields], kind="stable")
        sizes = shard.index.field_num_bytes[fields[order]].tolist()
        first = 0
        while first < len(order):
            stop, num_bytes = first + 1, sizes[first]
            while (
                stop < len(order)
                and stop - first < _MAX_RANGES
                and num_bytes + sizes[stop] <= self._read_bytes
            ):
                num_bytes += sizes[stop]
                stop += 1
            yield from self._read_group(shard, fields, order[first:stop], sizes[first:stop], thread)
            first = stop

    def _read_group(
        self,
        shard: Shard,
        fields: NDArray[np.int64],
        positions: NDArray[np.int64],
        sizes: list[int],
        thread: ThreadState,
    ) -> Iterator[tuple[int, NDArray[np.uint8] | BadSample]]:
        numbers = fields[positions]
        offsets = shard.index.field_offsets[numbers].tolist()
        checksums = shard.index.field_crc32c[numbers].tolist()
        num_bytes = sum(sizes)
        memory = thread.scratch.bytes("read", num_bytes)
        stops = list(accumulate(sizes))
        payloads = [memory[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
        ranges = [ByteRange(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
        where = self._place(shard.name)
        thread.enter("read", where)
        try:
            with self._counters.timed("read", num_bytes, len(sizes)):
                self._dataset.store.read_ranges(shard.path, ranges, [part.data for part in payloads])
        except ShortReadError:
            if len(positions) == 1:
                yield int(positions[0]), shard.bad(BadSampleReason.FIELD_TRUNCATED, int(numbers[0]))
                return
            # The shard ends inside one of the fields; those before its end are whole.
            for place in range(len(positions)):
                alone = slice(place, place + 1)
                yield from self._read_group(shard, fields, positions[alone], sizes[alone], thread)
            return
        for place, payload in enumerate(payloads):
            thread.enter("check", where)
            start = time.perf_counter()
            is_right = google_crc32c.value(payload) == checksums[place]
            self._counters.add("check", time.perf_counter() - start, sizes[place], 1)
            if not is_right:
                # Once more: what came wrong over a bus or from a cache may lie right at its origin.
                is_right = self._read_again(shard, ranges[place], payload, checksums[place])
            bad = None if is_right else shard.bad(BadSampleReason.CHECKSUM_MISMATCH, int(numbers[place]))
            yield int(positions[place]), bad or payload

    def _read_again(self, shard: Shard, span: ByteRange, payload: NDArray[np.uint8], checksum: int) -> bool:
        try:
            self._dataset.store.read_ranges(shard.path, [span], [payload.data])
        except ShortReadError:
            return False
        return bool(google_crc32c.value(payload) == checksum)

    def _place(self, shard_name: str) -> str:
        return f"shard {shard_name}, tier {self._tier}"


@lru_cache(maxsize=256)
def _read_names(field_names: tuple[str, ...]) -> _NameTable:
    """Take the field names of a shard apart; most shards of a dataset have equal ones."""
    ranks = {codec: rank for rank, codec in enumerate(CODECS)}
    codecs = [""] * len(field_names)
    slice_index = np.full(len(field_names), -1, np.int64)
    preference = np.zeros(len(field_names), np.int64)
    for number, name in enumerate(field_names):
        parsed = parse_slice_field(name)
        if parsed is not None and parsed.series == 0 and parsed.codec in ranks:
            codecs[number] = parsed.codec
            slice_index[number] = parsed.index
            preference[number] = ranks[parsed.codec]
    positions = {name: number for number, name in enumerate(field_names)}
    return _NameTable(
        tuple(codecs),
        slice_index,
        preference,
        positions.get(REPORT_FIELD, -1),
        positions.get(STUDY_FIELD, -1),
    )
