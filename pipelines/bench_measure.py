"""Measure one dataset on this machine: the bytes alone, reading, decoding, and whole batches.

All contestants handle the same samples: those of the first micro-batches of the loader's own order, the
primary series and the report of each. They take turns in rounds, so that a machine that slows down slows all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.epochs import BatchSpec
from shardflow.errors import ChecksumError, ConfigError
from shardflow.loading import Loader, LoaderConfig, NativeView
from shardflow.loading.reader import FieldReader, Shard
from shardflow.loading.thread_state import ThreadState
from shardflow.shards import Dataset, array_header, decode_array
from shardflow.storage import ByteRange
from shardflow.telemetry import StageCounters

__all__ = ["CONTESTANTS", "BenchOptions", "Content", "measure"]

CONTESTANTS = ("cat", "read", "decode", "batches")
"""The limit of the storage; what checks come on top; the limit of the codec; what training gets."""
_READ_BYTES = 8 << 20
_DAMAGED = "DATASET must be whole to be measured, got a damaged sample; run: shardflow verify DATASET."
_Place = tuple[Shard, NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to measure."""

    split: str
    num_threads: int
    num_repeats: int
    max_bytes: int
    """Stop taking samples above so many stored bytes; the first one always counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What every contestant handles in one round."""

    num_samples: int
    num_slices: int
    stored_bytes: int
    decoded_bytes: int


def measure(
    dataset: Dataset, options: BenchOptions, progress: Callable[[int, int], None] | None = None
) -> tuple[Content, dict[str, list[float]]]:
    """Run all contestants once unmeasured, and then in turns.

    Returns:
        What was handled in a round, and the seconds of each round by contestant.

    Raises:
        ConfigError: The dataset has no such split, or no slices in it.
        ChecksumError: A byte of the dataset is wrong.
    """
    bench = _Bench(dataset, options)
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    runs = {"cat": bench.cat, "read": bench.read, "decode": bench.decode, "batches": bench.batches}
    total = (options.num_repeats + 1) * len(runs)
    for turn in range(options.num_repeats + 1):
        for place in range(len(runs)):
            name = CONTESTANTS[(place + turn) % len(runs)]
            start = time.perf_counter()
            runs[name]()
            if turn:  # the first one fills the page cache and wakes the processor up
                seconds[name].append(time.perf_counter() - start)
            if progress is not None:
                progress(turn * len(runs) + place + 1, total)
    return bench.content, seconds


class _Bench:
    def __init__(self, dataset: Dataset, options: BenchOptions) -> None:
        self._dataset = dataset
        self._options = options
        self._reader = FieldReader(dataset, read_bytes=_READ_BYTES, counters=StageCounters())
        self._places = self._choose()
        self._payloads = self._hold()
        decoded = [_decode(payload) for payload in self._payloads]
        self._room = max((array.nbytes for array in decoded), default=0)
        self.content = Content(
            num_samples=len(self._places),
            num_slices=len(decoded),
            stored_bytes=sum(_num_bytes(*place) for place in self._places),
            decoded_bytes=sum(array.nbytes for array in decoded),
        )
        if not decoded:
            raise ConfigError(f"--split must hold slices, got none in {options.split!r}.")

    def _loader(self) -> Loader:
        spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
        config = LoaderConfig(view=NativeView(dtype="int16"), num_threads=self._options.num_threads)
        return Loader(self._dataset, split=self._options.split, spec=spec, seed=0, config=config)

    def _choose(self) -> list[_Place]:
        """Take the samples that the loader gives first."""
        plan, samples, thread = self._loader().plan, self._dataset.samples, ThreadState()
        chosen: list[_Place] = []
        num_bytes = 0
        for step in range(plan.num_steps):
            row = int(plan.micro_batch(step, 0).rows[0])
            shard = self._reader.open_shard(int(samples.gather("shard", row)), thread)
            row_in_shard = int(samples.gather("row_in_shard", row))
            report = shard.report(row_in_shard)
            fields = shard.slices(row_in_shard)
            if report is not None:
                fields = np.append(fields, report)
            num_bytes += _num_bytes(shard, fields)
            if chosen and num_bytes > self._options.max_bytes:
                break
            chosen.append((shard, fields))
        return chosen

    def _hold(self) -> list[tuple[str, NDArray[np.uint8]]]:
        """Keep the slices' payloads in memory, for decoding alone."""
        thread = ThreadState()
        held = []
        for shard, fields in self._places:
            payloads = {place: payload.copy() for place, payload in self._checked(shard, fields, thread)}
            for place, field in enumerate(fields.tolist()):
                codec = shard.codec(field)
                if codec:
                    held.append((codec, payloads[place]))
        return held

    def _checked(
        self, shard: Shard, fields: NDArray[np.int64], thread: ThreadState
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        for place, payload in self._reader.read(shard, fields, thread):
            if not isinstance(payload, np.ndarray):
                raise ChecksumError(_DAMAGED)
            yield place, payload

    def cat(self) -> None:
        """Read the bytes in one thread into one buffer, in the order in which they lie, checking nothing."""
        buffer = np.empty(_READ_BYTES, np.uint8)
        places = [
            (shard.path, int(shard.index.field_offsets[field]), shard.num_bytes(field))
            for shard, fields in self._places
            for field in fields.tolist()
        ]
        for path, start, stop in _joined(sorted(places)):
            for offset in range(start, stop, _READ_BYTES):
                size = min(_READ_BYTES, stop - offset)
                self._dataset.store.read_ranges(path, [ByteRange(offset, size)], [buffer[:size].data])

    def read(self) -> None:
        """Read the fields as the loader does, with their checksums, in threads."""

        def work(places: list[_Place]) -> None:
            thread = ThreadState()
            for shard, fields in places:
                for _ in self._checked(shard, fields, thread):
                    pass

        self._in_threads(work, self._places)

    def decode(self) -> None:
        """Decode the slices from memory, in threads, each into one buffer that stays warm."""

        def work(payloads: list[tuple[str, NDArray[np.uint8]]]) -> None:
            out = np.empty(self._room, np.uint8)
            for payload in payloads:
                _decode(payload, out)

        self._in_threads(work, self._payloads)

    def batches(self) -> None:
        """Let the loader make the batches: read, check, decode, order, deliver."""
        with self._loader() as loader:
            for batch in islice(loader, self.content.num_samples):
                if batch.quarantined:
                    raise ChecksumError(_DAMAGED)

    def _in_threads(self, work: Callable[[list[Any]], None], items: list[Any]) -> None:
        num_threads = self._options.num_threads
        with ThreadPoolExecutor(num_threads) as pool:
            for done in [pool.submit(work, items[number::num_threads]) for number in range(num_threads)]:
                done.result()


def _num_bytes(shard: Shard, fields: NDArray[np.int64]) -> int:
    return int(shard.index.field_num_bytes[fields].sum())


def _decode(payload: tuple[str, NDArray[np.uint8]], out: NDArray[np.uint8] | None = None) -> NDArray[Any]:
    codec, data = payload
    if out is None:
        return decode_array(codec, data)
    shape, dtype = array_header(codec, data)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return decode_array(codec, data, out=out[:num_bytes].view(dtype).reshape(shape))


def _joined(places: list[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Join ranges of one file that lie within a page of each other (headers and padding between them)."""
    page = os.sysconf("SC_PAGE_SIZE")
    current: tuple[str, int, int] | None = None
    for path, start, size in places:
        if current and current[0] == path and start - current[2] <= page:
            current = (path, current[1], start + size)
        else:
            if current:
                yield current
            current = (path, start, start + size)
    if current:
        yield current
