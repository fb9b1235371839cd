"""Field reader: finds the fields of a sample in its shard, reads only those, and checks every byte.

Place and crc32c of a field come from the shard's index; no tar is walked. The byte store gets many ranges per
call, in ascending order, and joins adjacent ones, since it knows what a request costs. Payloads are checked
as soon as they are read, while they are in the processor's cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, FormatError, ShortReadError
from shardflow.fields.decode import ThreadState
from shardflow.fields.quarantine import BadSample, BadSampleReason
from shardflow.format import Dataset, ShardIndex
from shardflow.format.codecs import ROOM_BEFORE, codec_rank, room_behind
from shardflow.format.keys import (
    STUDY_FIELD,
    parse_mask_field,
    parse_slice_field,
    parse_small_field,
    parse_variant_field,
    parse_volume_field,
    volume_field,
)
from shardflow.format.slice_codecs.npy import npy_header
from shardflow.format.volumes.bricks import RegionPlan
from shardflow.storage import ByteRange, ByteStore, LocalStore
from shardflow.storage.cache.store import CachedStore, read_afresh
from shardflow.telemetry import StageCounters

_MAX_RANGES = 512
# Two fields are separated by a tar header and padding. Other stores get each field as a range of its own,
# since they know what a gap costs.
_LOCAL_GAP_BYTES = 4096
_MAX_SHARDS = 4096
_NO_SLICES = np.zeros(1, np.int64)
Resolution: TypeAlias = Literal["full", "small"]
"""Versions of stored slices."""
Payload: TypeAlias = tuple[int, NDArray[np.uint8] | BadSample]
"""Position of a field among those to read, and its bytes, or what is wrong with it."""


@dataclass(frozen=True, slots=True)
class _NameTable:
    """Meaning of the field names of a shard, by their number in the index."""

    codecs: tuple[str, ...]
    """Codec of a slice or mask; empty for other fields."""
    series: NDArray[np.int64]
    """Number of its series; -1 for other fields."""
    slice_index: NDArray[np.int64]
    """Position of a slice of the primary series along the normal; -1 for other fields."""
    small_index: NDArray[np.int64]
    """The same for small versions of slices."""
    all_index: NDArray[np.int64]
    """Position of a slice of any series."""
    all_small_index: NDArray[np.int64]
    variant: NDArray[np.int64]
    """Number of an augmented variant, from 1; 0 for other fields."""
    variant_index: NDArray[np.int64]
    """Position of the slice that a variant was made of, in any series."""
    mask: NDArray[np.int64]
    """Series, region and slice of a region's mask, ``(num_names, 3)``; -1 for other fields, and for the slice
    of masks in bricks."""
    preference: NDArray[np.int64]
    """Rank of its codec: of several codecs of a slice the lowest is read."""
    report: int
    study: int
    positions: Mapping[str, int]
    """Number of each name."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Open shard: its index, and the meaning of its field names.

    Fields are identified by their number in the index, so that a study of 300 slices needs no 300 objects.
    """

    number: int
    name: str
    path: str
    index: ShardIndex
    names: _NameTable
    store: ByteStore
    place: str
    """Shard, tier and, in a blend, component, for messages."""
    first_slice: NDArray[np.int64]
    """``(volumes + 1,)`` number of the first slice of each volume in bricks. Such slices are numbered behind
    the fields: they are read as fields are, one payload each, and are none. ``[0]`` without bricks."""

    def num_variants(self, row: int, series: int = 0) -> int:
        """Return the number of augmented variants of a series."""
        start, stop = self._span(row)
        ids = self.index.field_name_ids[start:stop]
        return int(self.names.variant[ids[self.names.series[ids] == series]].max(initial=0))

    def variant_slices(self, row: int, variant: int, series: int = 0) -> NDArray[np.int64]:
        """Return the fields of an augmented variant of a series, in geometric order."""
        names = self.names
        is_wanted = (names.series == series) & (names.variant == variant)
        return self._fields_by_index(row, np.where(is_wanted, names.variant_index, -1))

    def slices(self, row: int, resolution: Resolution = "full", series: int = 0) -> NDArray[np.int64]:
        """Return the fields that hold a series of a sample, in geometric order.

        Args:
            row: Of the sample in the shard.
            resolution: ``small`` returns the small versions, if there are any.
            series: Number of the series; 0 is the primary one.
        """
        names = self.names
        full_index, small_index = names.slice_index, names.small_index
        if series:
            is_wanted = names.series == series
            full_index = np.where(is_wanted, names.all_index, -1)
            small_index = np.where(is_wanted, names.all_small_index, -1)
        full = self._fields_by_index(row, full_index)
        if not len(full) and self.index.bricks is not None:
            full = self._slices_of_bricks(row, series)
        if resolution == "full":
            return full
        small = self._fields_by_index(row, small_index)
        return small if len(small) == len(full) else full

    def _slices_of_bricks(self, row: int, series: int) -> NDArray[np.int64]:
        field = self.volume_field(row, series)
        if field is None:
            return np.zeros(0, np.int64)
        volume = int(np.searchsorted(self.volumes, field))
        return np.arange(*self.first_slice[volume : volume + 2].tolist())

    @property
    def volumes(self) -> NDArray[np.int64]:
        """The fields that are volumes in bricks, ascending."""
        return np.zeros(0, np.int64) if self.index.bricks is None else self.index.bricks.fields

    def volume_field(self, row: int, series: int) -> int | None:
        """Return the field that holds a series in bricks; None if it is stored in slices, or not at all."""
        return self._find(row, self.names.positions.get(volume_field(series), -1))

    def slice_places(self, slices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the volumes of slices of bricks, as places in `volumes`, and their indexes in these."""
        places = np.searchsorted(self.first_slice, slices, side="right") - 1
        return places, slices - self.first_slice[places]

    def ranges(self, fields: Sequence[int], regions: Sequence[RegionPlan] = ()) -> list[ByteRange]:
        """Return the bytes of fields and regions, ascending; those of slices of bricks are whole bricks."""
        numbers = np.unique(np.array(fields, np.int64))
        is_stored = numbers < self.index.num_fields
        stored = numbers[is_stored]
        both = zip(
            self.index.field_offsets[stored].tolist(),
            self.index.field_num_bytes[stored].tolist(),
            strict=True,
        )
        found = {offset: ByteRange(offset, size) for offset, size in both}
        for plan in [*regions, *(plan for plan, _ in self.slabs(numbers[~is_stored]))]:
            found |= {span.offset: span for span in plan.brick_ranges()}  # crops of a sample share some
        return [found[offset] for offset in sorted(found)]

    def slabs(self, slices: NDArray[np.int64]) -> Iterator[tuple[RegionPlan, NDArray[np.int64]]]:
        """Yield the reading of slices of bricks, a layer of bricks at a time.

        Args:
            slices: ``(n,)`` numbers, ascending.

        Yields:
            A region over all rows and columns, and the numbers of the slices in it; its first slice is the
            first of them.
        """
        places, indexes = self.slice_places(slices)
        for place in sorted({*places.tolist()}):
            is_here = places == place
            volume = self.index.volume(int(self.volumes[place]))
            layers = indexes[is_here] // volume.brick_shape[0]
            starts = np.flatnonzero(np.diff(layers, prepend=-1))
            for numbers in np.split(slices[is_here], starts[1:]):
                first, last = (numbers[[0, -1]] - self.first_slice[place]).tolist()
                yield volume.plan((first, 0, 0), (last + 1, *volume.shape[1:])), numbers

    def masks(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the fields of a sample that hold masks of regions, ``(n,)``; series, region and slice.

        Masks in bricks have the slice -1, see `mask_slice`.
        """
        start, stop = self._span(row)
        places = self.names.mask[self.index.field_name_ids[start:stop]]
        found = np.flatnonzero(places[:, 0] >= 0)
        return found + start, places[found]

    def mask_slice(self, field: int, index: int) -> int:
        """Return the number of a slice of masks in bricks, which is read as a field is."""
        return int(self.first_slice[int(np.searchsorted(self.volumes, field))]) + index

    def mask_place(self, field: int) -> tuple[int, int, int]:
        """Return series, region and slice of the mask of a region, or of a slice of masks in bricks."""
        at = -1
        if field >= self.index.num_fields:
            places, indexes = self.slice_places(np.array([field]))
            field, at = int(self.volumes[int(places[0])]), int(indexes[0])
        series, region, index = self.names.mask[int(self.index.field_name_ids[field])].tolist()
        return series, region, max(index, at)

    def _fields_by_index(self, row: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        start, stop = self._span(row)
        ids = self.index.field_name_ids[start:stop]
        order = index[ids]
        found = np.flatnonzero(order >= 0)
        order = order[found]
        if (np.diff(order) <= 0).any():  # several codecs of a slice, or more than 9,999 slices
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

    def find(self, row: int, name: str) -> int | None:
        """Return a field of a sample by its name; None if it has no such field."""
        return self._find(row, self.names.positions.get(name, -1))

    def field_name(self, field: int) -> str:
        """Return the name of a field; of a slice of bricks that of its volume."""
        if field >= self.index.num_fields:
            field = int(self.volumes[int(self.slice_places(np.array([field]))[0][0])])
        return self.index.field_names[int(self.index.field_name_ids[field])]

    def codec(self, field: int) -> str:
        """Return the codec of a slice or mask."""
        if field >= self.index.num_fields:
            return "npy"
        return self.names.codecs[int(self.index.field_name_ids[field])]

    def codecs(self, fields: Sequence[int]) -> set[str]:
        """Return the codecs of slices or masks."""
        if max(fields) >= self.index.num_fields:
            return {self.codec(field) for field in fields}
        names = self.index.field_name_ids[np.array(fields, np.int64)].tolist()
        return {self.names.codecs[name] for name in names}

    def num_bytes(self, field: int) -> int:
        """Return the size of a field."""
        return int(self.index.field_num_bytes[field])

    def sample_num_bytes(self, row: int) -> int:
        """Return the size of all fields of a sample; 0 for a row that the shard does not have."""
        if row >= self.index.num_samples:
            return 0
        start, stop = self._span(row)
        return int(self.index.field_num_bytes[start:stop].sum())

    def bad(self, reason: BadSampleReason, field: int | str, detail: str = "") -> BadSample:
        """Return the finding that a field of this shard is bad."""
        return BadSample(
            reason, self.name, field if isinstance(field, str) else self.field_name(field), detail
        )

    def _span(self, row: int) -> tuple[int, int]:
        start, stop = self.index.first_field[row : row + 2].tolist()
        return start, stop

    def _find(self, row: int, name: int) -> int | None:
        start, stop = self._span(row)
        is_name = self.index.field_name_ids[start:stop] == name
        place = int(is_name.argmax()) if start < stop else 0
        return start + place if start < stop and is_name[place] else None


class _Stored(NamedTuple):
    """Field to read, as the index of its shard has it."""

    position: int
    """Among the fields to read."""
    number: int
    offset: int
    num_bytes: int
    crc32c: int


class Samples(Protocol):
    """Samples that are read, and their datasets; rows count over all datasets."""

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """One dataset, or one per component of a blend."""

    @property
    def is_blend(self) -> bool:
        """Whether the samples are those of a blend."""

    def shard(self, number: int) -> tuple[int, int]:
        """Return the component of a shard, counted over all datasets, and its position in the manifest."""

    def components_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the component of each row, from 0."""

    def table_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each sample in its own dataset's table."""


class FieldReader:
    """Reader of the fields of a dataset's shards. Safe for many threads.

    Args:
        samples: The samples and their datasets.
        read_bytes: How much one call to the store may read; a larger field is read alone.
        counters: Gets the stages ``index``, ``read`` and ``check``.

    Attributes:
        read_bytes: As given; may be set at any time, and applies to later reads.
    """

    def __init__(self, samples: Samples, *, read_bytes: int, counters: StageCounters) -> None:
        self.read_bytes = read_bytes
        self._samples = samples
        self._counters = counters
        self._shards: dict[int, Shard] = {}
        self._lock = threading.Lock()
        self._tiers = [_tier(dataset.store) for dataset in samples.datasets]

    def open_shard(self, number: int, thread: ThreadState) -> Shard:
        """Open a shard by its position in the manifest; in a blend, counted over all manifests.

        Raises:
            BadSample: The index is damaged, so every sample of the shard is bad.
            StorageError: The index cannot be read.
        """
        component, position = self._samples.shard(number)
        dataset = self._samples.datasets[component]
        name, path, *_ = dataset.manifest.shard_place(position)
        place = self._place(component, name)
        thread.enter("index", place)
        start = time.perf_counter()
        try:
            index = dataset.shard_index(position)
        except FormatError as error:
            raise BadSample(BadSampleReason.INDEX_DAMAGED, name, "", error.message) from None
        shard = self._shards.get(number)
        if shard is None or shard.index is not index:
            names, first_slice = _read_names(index.field_names, index.text_field), _NO_SLICES
            if index.bricks is not None:
                first_slice = index.num_fields + np.append(0, np.cumsum(index.bricks.shapes[:, 0]))
            shard = Shard(number, name, path, index, names, dataset.store, place, first_slice)
            with self._lock:
                while len(self._shards) >= _MAX_SHARDS:
                    self._shards.pop(next(iter(self._shards)))
                self._shards[number] = shard
        self._counters.add("index", time.perf_counter() - start, 0, 1)
        return shard

    def place(self, number: int) -> tuple[ByteStore, str, str]:
        """Return store and path of a shard, numbered as in `open_shard`, and its place for messages."""
        component, position = self._samples.shard(number)
        dataset = self._samples.datasets[component]
        name, path, *_ = dataset.manifest.shard_place(position)
        return dataset.store, path, self._place(component, name)

    def _place(self, component: int, name: str) -> str:
        place = f"shard {name}, tier {self._tiers[component]}"
        return f"component {component + 1}, {place}" if self._samples.is_blend else place

    def read(self, shard: Shard, fields: NDArray[np.int64], thread: ThreadState) -> Iterator[list[Payload]]:
        """Read fields in the order of the shard, some at a time.

        Args:
            shard: From `open_shard`.
            fields: ``(n,)`` distinct numbers of fields, in any order.
            thread: Of the caller; payloads are in its scratch memory, valid until the next ones are
                requested.

        Yields:
            For each of some fields its position in ``fields``, and its bytes, checked against the crc32c of
            the index; or what is wrong with the field.

        Raises:
            StorageError: The store cannot read the shard.
        """
        index = shard.index
        positions = np.arange(len(fields))
        in_bricks = positions[fields >= index.num_fields]
        if len(in_bricks):
            positions = positions[fields < index.num_fields]
        positions = positions[index.field_offsets[fields[positions]].argsort(kind="stable")]
        numbers = fields[positions]
        columns = index.field_offsets, index.field_num_bytes, index.field_crc32c
        values = (each.tolist() for each in (positions, numbers, *(column[numbers] for column in columns)))
        group: list[_Stored] = []
        num_bytes, max_bytes = 0, self.read_bytes
        for field in map(_Stored._make, zip(*values, strict=True)):
            if group and (num_bytes + field.num_bytes > max_bytes or len(group) == _MAX_RANGES):
                yield from self._read_group(shard, group, thread)
                group, num_bytes = [], 0
            group.append(field)
            num_bytes += field.num_bytes
        if group:
            yield from self._read_group(shard, group, thread)
        if len(in_bricks):  # after the annotations, which say what their masks are
            yield from self._read_slabs(shard, fields, in_bricks, thread)

    def _read_slabs(
        self, shard: Shard, fields: NDArray[np.int64], positions: NDArray[np.int64], thread: ThreadState
    ) -> Iterator[list[Payload]]:
        """Read slices of bricks; their payloads are NumPy files. A layer of bricks is decoded once."""
        positions = positions[np.argsort(fields[positions], kind="stable")]
        done = 0
        for plan, numbers in shard.slabs(fields[positions]):
            found = self._read_slab(shard, plan, thread)
            payloads: list[Payload] = []
            for number in numbers.tolist():
                position = int(positions[done])
                done += 1
                if isinstance(found, BadSample):
                    payloads.append((position, found))
                else:
                    index = int(shard.slice_places(np.array([number]))[1][0])
                    payloads.append((position, found[index - int(plan.start[0])]))
            yield payloads

    def _read_slab(
        self, shard: Shard, plan: RegionPlan, thread: ThreadState
    ) -> NDArray[np.uint8] | BadSample:
        """Return the slices of a region as NumPy files, ``(slices, bytes)``, or what is wrong with it."""
        volume = plan.volume
        depth, rows, columns = plan.shape
        header = npy_header((rows, columns), volume.dtype)
        plane_num_bytes = rows * columns * volume.dtype.itemsize
        files = thread.scratch.bytes("slab", depth * (len(header) + plane_num_bytes)).reshape(depth, -1)
        files[:, : len(header)] = np.frombuffer(header, np.uint8)
        pixels = files[:, len(header) :].view(volume.dtype).reshape(plan.shape)
        return self.read_region(shard, plan, pixels, thread) or files

    def read_region(
        self, shard: Shard, plan: RegionPlan, out: NDArray[Any], thread: ThreadState
    ) -> BadSample | None:
        """Read and decode a region of a volume in bricks; each brick is checked before it is decoded.

        Args:
            shard: Holds the volume.
            plan: The region.
            out: Array of its shape, of a dtype to which that of the volume can be cast safely.
            thread: Of the caller.

        Returns:
            What is wrong with the region; None if nothing is.

        Raises:
            StorageError: The store cannot read the shard.
        """
        field = plan.volume.place.rpartition(" ")[2]
        memory = thread.scratch.bytes("read", plan.buffer_num_bytes)
        for afresh in (False, True):
            thread.enter("read", shard.place)
            try:
                with self._counters.timed("read", plan.read_num_bytes, plan.num_stored):
                    plan.read(shard.store, shard.path, memory, afresh=afresh)
                thread.enter("decode", shard.place)
                with self._counters.timed("decode", plan.decoded_num_bytes(memory)):
                    plan.decode(memory, out)
            except ShortReadError:
                return shard.bad(BadSampleReason.FIELD_TRUNCATED, field)
            except ChecksumError:
                # Retry once at the origin: a cache or the transfer may have corrupted the data.
                continue
            except FormatError as error:
                return shard.bad(BadSampleReason.DECODE_FAILED, field, error.message)
            return None
        return shard.bad(BadSampleReason.CHECKSUM_MISMATCH, field)

    def _read_group(
        self,
        shard: Shard,
        group: Sequence[_Stored],
        thread: ThreadState,
    ) -> Iterator[list[Payload]]:
        is_local = isinstance(shard.store, LocalStore)
        spans, places = _joined(group, _LOCAL_GAP_BYTES if is_local else -1)
        memory = thread.scratch.bytes("read", places[-1] + group[-1].num_bytes + room_behind(len(group)))
        thread.payloads = memory
        buffers, begin = [], ROOM_BEFORE
        for span in spans:
            buffers.append(memory[begin : begin + span.num_bytes].data)
            begin += span.num_bytes
        payloads = [memory[at : at + field.num_bytes] for at, field in zip(places, group, strict=True)]
        num_bytes = sum(field.num_bytes for field in group)
        where = shard.place
        thread.enter("read", where)
        try:
            with self._counters.timed("read", num_bytes, len(group)):
                shard.store.read_ranges(shard.path, spans, buffers)
        except ShortReadError:
            if len(group) == 1:
                bad = shard.bad(BadSampleReason.FIELD_TRUNCATED, group[0].number)
                yield [(group[0].position, bad)]
                return
            # The shard ends inside one of the fields; the earlier ones are complete.
            for field in group:
                yield from self._read_group(shard, [field], thread)
            return
        thread.enter("check", where)
        with self._counters.timed("check", num_bytes, len(group)):
            wrong = [
                place
                for place, payload in enumerate(payloads)
                if google_crc32c.value(payload) != group[place].crc32c
            ]
        found: list[Payload] = [
            (field.position, payload) for field, payload in zip(group, payloads, strict=True)
        ]
        for place in wrong:
            # Retry once at the origin: a cache or the transfer may have corrupted the data.
            field = group[place]
            if not self._read_again(shard, field, payloads[place]):
                bad = shard.bad(BadSampleReason.CHECKSUM_MISMATCH, field.number)
                found[place] = field.position, bad
        yield found

    def _read_again(self, shard: Shard, field: _Stored, payload: NDArray[np.uint8]) -> bool:
        try:
            span = ByteRange(field.offset, field.num_bytes)
            read_afresh(shard.store, shard.path, [span], [payload.data])
        except ShortReadError:
            return False
        return bool(google_crc32c.value(payload) == field.crc32c)


def _joined(group: Sequence[_Stored], max_gap: int) -> tuple[list[ByteRange], list[int]]:
    """Join ascending fields that are close together.

    Returns:
        The spans to read, and the place of each field in the memory that they are read into, one behind
        another, after `ROOM_BEFORE` bytes.
    """
    spans: list[ByteRange] = []
    places: list[int] = []
    start = stop = group[0].offset
    begin = ROOM_BEFORE  # of the current span
    for _, _, offset, size, _ in group:
        if not 0 <= offset - stop <= max_gap and places:
            spans.append(ByteRange(start, stop - start))
            begin += stop - start
            start = offset
        places.append(begin + offset - start)
        stop = offset + size
    spans.append(ByteRange(start, stop - start))
    return spans, places


def _tier(store: ByteStore) -> str:
    if isinstance(store, CachedStore):
        return f"cache before {_tier(store.origin)}"
    scheme, separator, _ = store.url.partition("://")
    return scheme if separator and scheme != "file" else "local"


@lru_cache(maxsize=256)
def _read_names(field_names: tuple[str, ...], text_field: str) -> _NameTable:
    """Parse the field names of a shard; most shards of a dataset have the same ones."""
    codecs = [""] * len(field_names)
    series = np.full(len(field_names), -1, np.int64)
    all_index, all_small_index, variant_index = series.copy(), series.copy(), series.copy()
    variant = np.zeros(len(field_names), np.int64)
    mask = np.full((len(field_names), 3), -1, np.int64)
    preference = np.zeros(len(field_names), np.int64)
    for number, name in enumerate(field_names):
        full, small = parse_slice_field(name), parse_small_field(name)
        augmented = parse_variant_field(name)
        parsed = full or small or augmented
        rank = None if parsed is None else codec_rank(parsed.codec)
        if parsed is not None and rank is not None:
            codecs[number] = parsed.codec
            series[number] = parsed.series
            index = all_index if full else all_small_index if small else variant_index
            index[number] = parsed.index
            variant[number] = 0 if augmented is None else augmented.variant
            preference[number] = rank
        region = parse_mask_field(name)
        if region is not None and codec_rank(region.codec) is not None:
            codecs[number] = region.codec
            mask[number] = region.series, region.roi, region.index
        volume = parse_volume_field(name)
        if volume is not None and volume[1] is not None:
            mask[number, :2] = volume[0], volume[1]
    positions = {name: number for number, name in enumerate(field_names)}
    return _NameTable(
        tuple(codecs),
        series,
        np.where(series == 0, all_index, -1),
        np.where(series == 0, all_small_index, -1),
        all_index,
        all_small_index,
        variant,
        variant_index,
        mask,
        preference,
        positions.get(text_field, -1),
        positions.get(STUDY_FIELD, -1),
        positions,
    )
