"""Measure one dataset on this machine: each stage alone, whole batches, and what the machine gives at most.

All contestants handle the same samples: those of the first micro-batches of the loader's own order, the
primary series and the report of each. They take turns in rounds, so that a machine that slows down slows all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import google_crc32c
import numpy as np
from numpy.typing import NDArray

from pipelines.bench_limits import Extent, drop_from_memory, read_extents, scratch_extent
from pipelines.bench_loader import bench_config, bench_spec, foreign_fields, has_texts_alone
from shardflow.errors import ChecksumError, ConfigError, NoListingError
from shardflow.fields.raw import is_image_field
from shardflow.fields.reader import FieldReader, Shard
from shardflow.fields.scratch import ThreadState
from shardflow.loading import Loader
from shardflow.loading.selection import select
from shardflow.shards import Dataset, array_header, decode_array
from shardflow.shards.tokens import stored_tokenizers
from shardflow.storage import ByteRange
from shardflow.telemetry import StageCounters

__all__ = ["BenchOptions", "Content", "Measured", "measure"]

_READ_BYTES = 8 << 20
# A remote store sends requests of a read side by side: so much at once, or its latency would be measured.
_REMOTE_READ_BYTES = 128 << 20
_STAGES = ("index", "read", "check", "decode", "transform")
_MOST_TEXTS = 16_384
_IMAGE = "image"
_DAMAGED = "DATASET must be whole to be measured, got a damaged sample; run: shardflow verify DATASET."
_Place = tuple[Shard, NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to measure."""

    split: str
    subset: tuple[str, ...] = ()
    """Terms that the samples meet."""
    num_threads: int
    num_repeats: int
    max_bytes: int
    """Stop taking samples above so many stored bytes; the first one always counts."""
    scratch: Path | None = None
    """Where the bytes of a remote dataset are put to measure this machine's disk; None: the usual place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What every contestant handles in one round."""

    num_samples: int
    num_slices: int
    stored_bytes: int
    decoded_bytes: int
    codecs: tuple[str, ...]
    """Of the slices, sorted; ``image`` for fields of foreign shards that OpenCV reads."""
    micro_batch_size: int
    """Samples of a micro-batch: one, or many where there are texts alone."""
    num_tokens: int = 0
    """Stored token ids of the samples, by the first tokenizer that there are any of."""
    tokenizer: str = ""
    """SHA-256 of its ``tokenizer.json``; empty where no tokens are stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was found."""

    content: Content
    rows: NDArray[np.int64]
    """Of the samples, in the order of the loader."""
    seconds: dict[str, list[float]]
    """Of each round, by contestant."""
    scaling: dict[int, list[float]]
    """Seconds of ``batches`` in each round, by number of threads."""
    stages: dict[str, float]
    """Seconds of all threads of the loader a round, by stage."""


def measure(
    dataset: Dataset, options: BenchOptions, progress: Callable[[int, int], None] | None = None
) -> Measured:
    """Run all contestants once unmeasured, and then in turns.

    Raises:
        ConfigError: The dataset has no such split or samples, or no slices in them.
        ChecksumError: A byte of the dataset is wrong.
    """
    with ExitStack() as stack:
        bench = _Bench(dataset, options)
        runs = bench.contestants()
        extents = bench.local_extents()
        if extents is None:
            extents = stack.enter_context(scratch_extent(bench.payloads(), options.scratch))
            runs["memory"] = lambda: read_extents(extents, bench.buffer)
        if drop_from_memory(extents):
            runs["disk"] = lambda: read_extents(extents, bench.buffer)
        widths = [number for number in _powers_of_two(options.num_threads) if number < options.num_threads]
        for number in widths:
            runs[f"batches {number}"] = lambda number=number: bench.batches(number)  # type: ignore[misc]
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        total = (options.num_repeats + 1) * len(runs)
        for turn in range(options.num_repeats + 1):
            for place in range(len(runs)):
                name = list(runs)[(place + turn) % len(runs)]
                if name == "disk":
                    drop_from_memory(extents)
                start = time.perf_counter()
                runs[name]()
                if turn:  # the first one fills the page cache and wakes the processor up
                    seconds[name].append(time.perf_counter() - start)
                if progress is not None:
                    progress(turn * len(runs) + place + 1, total)
                if name == "disk":
                    read_extents(extents, bench.buffer)  # the others measure memory, whoever comes next
    scaling = {number: seconds.pop(f"batches {number}") for number in widths}
    scaling[options.num_threads] = seconds["batches"]
    rounds = options.num_repeats + 1
    stages = {name: total / rounds for name, total in bench.stage_seconds.items()}
    return Measured(
        content=bench.content,
        rows=np.array(bench.rows, np.int64),
        seconds=seconds,
        scaling=scaling,
        stages=stages,
    )


def _powers_of_two(most: int) -> Iterator[int]:
    number = 1
    while number <= most:
        yield number
        number *= 2


class _Bench:
    def __init__(self, dataset: Dataset, options: BenchOptions) -> None:
        self._dataset = dataset
        self._options = options
        self._reader = FieldReader(
            select(dataset, options.split, options.subset),
            read_bytes=_READ_BYTES,
            counters=StageCounters(),
        )
        self.has_texts_alone = has_texts_alone(dataset)
        self._num_micro_batches = 0
        self._tokenizer = _first_tokenizer(dataset)
        self.rows: list[int] = []
        self._places = self._choose()
        self._held: list[NDArray[np.uint8]] = []
        self._payloads = self._hold()
        decoded = [_decode(payload) for payload in self._payloads]
        self._room = max((array.nbytes for array in decoded), default=0)
        self.content = Content(
            num_samples=len(self._places),
            num_slices=len(decoded),
            stored_bytes=sum(_num_bytes(*place) for place in self._places),
            decoded_bytes=sum(array.nbytes for array in decoded),
            codecs=tuple(sorted({codec for codec, _ in self._payloads})),
            micro_batch_size=bench_spec(dataset).micro_batch_size,
            num_tokens=self._count_tokens(),
            tokenizer=self._tokenizer,
        )
        self.stage_seconds = dict.fromkeys(_STAGES, 0.0)
        self._is_remote = "://" in dataset.store.url
        self.buffer = np.empty(_REMOTE_READ_BYTES if self._is_remote else _READ_BYTES, np.uint8)
        if not decoded and not dataset.is_foreign and not self.has_texts_alone:
            raise ConfigError(f"--split must hold slices, got none in {options.split!r}.")

    def contestants(self) -> dict[str, Callable[[], None]]:
        """Return those of this dataset by name."""
        runs: dict[str, Callable[[], None]] = {"cat": self.cat}
        if not self.has_texts_alone:  # those the loader reads another way
            runs["read"] = self.read
        runs["check"] = self.check
        if self.content.num_slices:
            runs["decode"] = self.decode
        runs["batches"] = self.batches
        if self._tokenizer:
            runs["tokens"] = self.tokens
        return runs

    def _loader(self, num_threads: int | None = None, *, tokenizer: str = "") -> Loader:
        options = self._options
        config = bench_config(
            self._dataset, num_threads=num_threads or options.num_threads, tokenizer=tokenizer
        )
        return Loader(
            self._dataset,
            split=options.split,
            subset=options.subset,
            spec=bench_spec(self._dataset),
            seed=0,
            config=config,
        )

    def _choose(self) -> list[_Place]:
        """Take the samples that the loader gives first."""
        plan, samples, thread = self._loader().plan, self._dataset.samples, ThreadState()
        chosen: list[_Place] = []
        num_bytes = 0
        for step in range(plan.num_steps):
            rows = [row for row in plan.micro_batch(step, 0).rows.tolist() if row >= 0]
            places: list[_Place] = []
            for row in rows:
                shard = self._reader.open_shard(int(samples.gather("shard", row)), thread)
                fields = self._fields(shard, int(samples.gather("row_in_shard", row)))
                num_bytes += _num_bytes(shard, fields)
                places.append((shard, fields))
            if chosen and (num_bytes > self._options.max_bytes or len(chosen) >= _MOST_TEXTS):
                break
            chosen += places
            self.rows += rows
            self._num_micro_batches += 1
        return chosen

    def _fields(self, shard: Shard, row: int) -> NDArray[np.int64]:
        if self._dataset.is_foreign:
            found = (shard.find(row, name) for name in foreign_fields(self._dataset))
            return np.array([number for number in found if number is not None], np.int64)
        report = shard.report(row)
        fields = shard.slices(row)
        return fields if report is None else np.append(fields, report)

    def _hold(self) -> list[tuple[str, NDArray[np.uint8]]]:
        """Keep the payloads in memory, for checking and decoding alone."""
        thread = ThreadState()
        held = []
        for shard, fields in self._places:
            payloads = {place: payload.copy() for place, payload in self._checked(shard, fields, thread)}
            self._held += payloads.values()
            for place, field in enumerate(fields.tolist()):
                codec = _IMAGE if is_image_field(shard.field_name(field)) else shard.codec(field)
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

    def payloads(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of every field that is read."""
        yield from self._held

    def local_extents(self) -> list[Extent] | None:
        """Return where the bytes lie in files; None for a dataset in an object store."""
        if self._is_remote or self._dataset.is_foreign:
            return None
        root = Path(self._dataset.store.url)
        return [Extent(root / path, start, stop) for path, start, stop in self._stretches()]

    def _stretches(self) -> Iterator[tuple[str, int, int]]:
        places = [
            (shard.path, int(shard.index.field_offsets[field]), shard.num_bytes(field))
            for shard, fields in self._places
            for field in fields.tolist()
        ]
        return _joined(sorted(places))

    def cat(self) -> None:
        """Read the bytes from the store into one buffer, in the order in which they lie, checking nothing."""
        for path, start, stop in self._stretches():
            for offset in range(start, stop, len(self.buffer)):
                size = min(len(self.buffer), stop - offset)
                self._dataset.store.read_ranges(path, [ByteRange(offset, size)], [self.buffer[:size].data])

    def read(self) -> None:
        """Read the fields as the loader does, with their checksums, in threads."""

        def work(places: list[_Place]) -> None:
            thread = ThreadState()
            for shard, fields in places:
                for _ in self._checked(shard, fields, thread):
                    pass

        self._in_threads(work, self._places)

    def check(self) -> None:
        """Take the checksums of all fields from memory, in threads."""

        def work(payloads: list[NDArray[np.uint8]]) -> None:
            for payload in payloads:
                google_crc32c.value(payload)

        self._in_threads(work, self._held)

    def decode(self) -> None:
        """Decode the slices from memory, in threads, each into one buffer that stays warm."""

        def work(payloads: list[tuple[str, NDArray[np.uint8]]]) -> None:
            out = np.empty(self._room, np.uint8)
            for payload in payloads:
                _decode(payload, out)

        self._in_threads(work, self._payloads)

    def batches(self, num_threads: int | None = None) -> None:
        """Let the loader make the batches: read, check, decode, order, deliver."""
        with self._loader(num_threads) as loader:
            for batch in islice(loader, self._num_micro_batches):
                if batch.quarantined:
                    raise ChecksumError(_DAMAGED)
            if num_threads is None:
                for name in _STAGES:
                    self.stage_seconds[name] += loader.counters.totals(name).seconds

    def tokens(self) -> None:
        """Let the loader make the batches with stored token ids in place of the texts."""
        with self._loader(tokenizer=self._tokenizer) as loader:
            for batch in islice(loader, self._num_micro_batches):
                if batch.quarantined:
                    raise ChecksumError(_DAMAGED)

    def _count_tokens(self) -> int:
        if not self._tokenizer:
            return 0
        with self._loader(tokenizer=self._tokenizer) as loader:
            return sum(
                int(batch.arrays["token_offsets"][-1]) for batch in islice(loader, self._num_micro_batches)
            )

    def _in_threads(self, work: Callable[[list[Any]], None], items: list[Any]) -> None:
        num_threads = self._options.num_threads
        with ThreadPoolExecutor(num_threads) as pool:
            for done in [pool.submit(work, items[number::num_threads]) for number in range(num_threads)]:
                done.result()


def _first_tokenizer(dataset: Dataset) -> str:
    try:
        return next(iter(stored_tokenizers(dataset)), "")
    except NoListingError:  # plain web servers; what nobody can find is not measured
        return ""


def _num_bytes(shard: Shard, fields: NDArray[np.int64]) -> int:
    return int(shard.index.field_num_bytes[fields].sum())


def _decode(payload: tuple[str, NDArray[np.uint8]], out: NDArray[np.uint8] | None = None) -> NDArray[Any]:
    codec, data = payload
    if codec == _IMAGE:
        picture = cv2.imdecode(data, cv2.IMREAD_COLOR)
        if picture is None:
            raise ChecksumError(_DAMAGED)
        return np.asarray(picture)
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
