"""Measurements of ``shardflow bench``: the loader on a dataset, between the limits of storage and codec.

All contestants handle the same data: what the fields read of the samples of the first micro-batches, in the
loader's own order. They take turns in rounds, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import BoundField, DrawKey, Field, SlotRequest
from shardflow.fields.quarantine import BadSample, BadSampleReason
from shardflow.fields.reader import FieldReader, Shard
from shardflow.fields.registry import FieldSet
from shardflow.fields.types.members import is_image_field
from shardflow.fields.types.pixel_field import PixelField
from shardflow.format import Dataset, array_header, decode_array
from shardflow.format.contents.pictures import opencv
from shardflow.loading import Loader, LoaderConfig
from shardflow.loading.binding import bind_fields, bind_transform
from shardflow.loading.rows.selection import Selection
from shardflow.loading.rows.windows import select_samples
from shardflow.sampling import BatchSpec
from shardflow.storage import ByteRange
from shardflow.telemetry import StageCounters
from shardflow.telemetry.process import ProcessProbe

LIMITS: Final = ("cat", "decode")
"""Contestants that no loader can be faster than."""
_READ_BYTES: Final = 8 << 20
# A remote store sends the requests of a read side by side: one at a time, its latency would be measured.
_REMOTE_READ_BYTES: Final = 128 << 20
_STAGES: Final = ("index", "read", "check", "decode", "transform")
# Texts are read a micro-batch at once, so one of a single text would measure what nobody does.
_TEXTS_PER_MICRO_BATCH: Final = 64
_MOST_TEXTS: Final = 16_384
_SEED: Final = 0
_TIMED_SAMPLES: Final = 16
_TIMED_S: Final = 2.0
_IMAGE: Final = "image"
_DAMAGED: Final = "DATASET must be whole to be measured, got a damaged sample; run: shardflow verify DATASET."


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to measure."""

    split: str
    unit: str = "study"
    """What a sample is."""
    where: str | None = None
    """Which of them."""
    keys: str | None = None
    num_threads: int
    num_repeats: int
    max_bytes: int
    """Stop taking samples above this many stored bytes; the first one always counts."""
    fields: Mapping[str, Field] | None = None
    """What the loader delivers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The content of a round, and the seconds of each contestant and round."""

    num_samples: int
    num_slices: int
    stored_bytes: int
    decoded_bytes: int
    codecs: tuple[str, ...]
    """Of the slices, sorted; ``image`` for members that OpenCV reads."""
    micro_batch_size: int
    seconds: dict[str, list[float]]
    scaling: dict[int, list[float]]
    """Seconds of ``batches``, by number of threads."""
    stages: dict[str, float]
    """Seconds of all threads of the loader in a round, by stage."""


def measure(
    dataset: Dataset, options: BenchOptions, progress: Callable[[int, int], None] | None = None
) -> Measured:
    """Run all contestants once without measuring, then in turns.

    Raises:
        ConfigError: The dataset has no such split or samples, or fields do not fit it.
        ChecksumError: A byte of the dataset is wrong.
    """
    bench = _Bench(dataset, options)
    runs = bench.contestants()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.num_repeats + 1):
        for place in range(len(runs)):
            name = list(runs)[(place + turn) % len(runs)]
            if name == "disk":
                bench.drop_from_memory()
            start = time.perf_counter()
            runs[name]()
            if turn:  # the first round fills the page cache and wakes the processor up
                seconds[name].append(time.perf_counter() - start)
            if progress is not None:
                progress(turn * len(runs) + place + 1, (options.num_repeats + 1) * len(runs))
    widths = {number: seconds.pop(f"batches {number}") for number in bench.widths}
    return Measured(
        num_samples=bench.num_samples,
        num_slices=len(bench.slices),
        stored_bytes=sum(stop - start for _, start, stop in bench.fields),
        decoded_bytes=bench.decoded_bytes,
        codecs=tuple(sorted({codec for codec, _ in bench.slices})),
        micro_batch_size=bench.spec.micro_batch_size,
        seconds=seconds,
        scaling={**widths, options.num_threads: seconds["batches"]},
        stages={name: total / (options.num_repeats + 1) for name, total in bench.stage_seconds.items()},
    )


class _Bench:
    def __init__(self, dataset: Dataset, options: BenchOptions) -> None:
        self._dataset = dataset
        self._options = options
        selection = select_samples(
            dataset,
            options.split,
            unit=options.unit,
            where=options.where,
            keys=options.keys,
            fields=options.fields,
        )
        self._selection, self._fields = bind_fields(selection, options.fields, StageCounters())
        has_members = any(isinstance(one, PixelField) for one in self._fields.specs.values())
        has_texts_alone = not (has_members or self._fields.has_pictures)
        self.spec = BatchSpec(
            micro_batch_size=_TEXTS_PER_MICRO_BATCH if has_texts_alone else self._fields.num_crops,
            micro_batches_per_step=1,
            tail="mask",
        )
        self.widths = [number for number in (1, 2, 4, 8, 16, 32, 64, 128) if number < options.num_threads]
        self.num_samples = self._num_micro_batches = 0
        self.fields: list[tuple[str, int, int]] = []
        self.slices: list[tuple[str, NDArray[np.uint8]]] = []
        self._take_samples()
        decoded = [_decode(payload).nbytes for payload in self.slices]
        self.decoded_bytes, self._largest = sum(decoded), max(decoded, default=0)
        # A sample may lack a member that no table knows of; without such fields it is damage.
        self._may_lack = set() if options.fields is None else {BadSampleReason.FIELD_MISSING.value}
        self.stage_seconds = dict.fromkeys(_STAGES, 0.0)
        self._is_remote = "://" in dataset.store.url
        self._buffer = np.empty(_REMOTE_READ_BYTES if self._is_remote else _READ_BYTES, np.uint8)
        self._stretches = list(_joined(sorted(self.fields)))

    def contestants(self) -> dict[str, Callable[[], None]]:
        runs: dict[str, Callable[[], None]] = {"cat": self._cat}
        if not self._is_remote and not self._dataset.is_foreign and self.drop_from_memory():
            runs["disk"] = self._cat
        if self.slices:
            runs["decode"] = self._decode_all
        runs["batches"] = lambda: self._batches(self._options.num_threads)
        for number in self.widths:
            runs[f"batches {number}"] = lambda number=number: self._batches(number)  # type: ignore[misc]
        return runs

    def _loader(self, num_threads: int) -> Loader:
        return Loader(
            self._dataset,
            split=self._options.split,
            where=self._options.where,
            keys=self._options.keys,
            batch=self.spec,
            seed=_SEED,
            world="single",
            fields=self._options.fields,
            unit=self._options.unit,
            config=LoaderConfig(num_threads=num_threads),
        )

    def _take_samples(self) -> None:
        """Take the samples that the loader delivers first, and keep the payloads of their slices."""
        reader = FieldReader(self._selection, read_bytes=_READ_BYTES, counters=StageCounters())
        plan, thread = self._loader(1).plan, ThreadState()
        num_bytes = 0
        for step in range(plan.num_steps):
            rows = plan.micro_batch(step, 0).rows
            places: list[tuple[Shard, NDArray[np.int64]]] = []
            rows = rows[rows >= 0]
            for row in rows.tolist():
                shard = reader.open_shard(self._number("shard", row), thread)
                places.append((shard, self._needed(shard, row, self._fields.own)))
            earlier = rows[:0] if self._fields.previous is None else self._fields.previous.rows(rows)
            for row in earlier[earlier >= 0].tolist():
                shard = reader.open_shard(self._number("shard", row), thread)
                places.append((shard, self._needed(shard, row, self._fields.of_previous)))
            num_bytes += sum(int(shard.index.field_num_bytes[fields].sum()) for shard, fields in places)
            if self.num_samples and (num_bytes > self._options.max_bytes or self.num_samples >= _MOST_TEXTS):
                return
            self.num_samples += len(rows)
            self._num_micro_batches += 1
            for shard, fields in places:
                for field in fields.tolist():
                    start = int(shard.index.field_offsets[field])
                    self.fields.append((shard.path, start, start + shard.num_bytes(field)))
                for place, payload in chain.from_iterable(reader.read(shard, fields, thread)):
                    if not isinstance(payload, np.ndarray):
                        raise ChecksumError(_DAMAGED)
                    name = shard.field_name(fields[place])
                    codec = _IMAGE if is_image_field(name) else shard.codec(fields[place])
                    if codec:
                        self.slices.append((codec, payload.copy()))

    def _number(self, name: str, row: int) -> int:
        """Return a column of the samples table for a row."""
        return int(self._selection.column(name, np.array([row]))[0])

    def _needed(self, shard: Shard, row: int, fields: Sequence[BoundField]) -> NDArray[np.int64]:
        """Return the numbers of the stored fields that some fields need of a sample."""
        at = np.array([row])
        request = SlotRequest(
            slot=0,
            draw=DrawKey(_SEED, 0, row, (), row),
            row_in_shard=self._number("row_in_shard", row),
            key="",
            entity=self._selection.entity(row),
            study_row=int(self._selection.study_rows(at)[0]),
            table_row=row,
        )
        needed = (number for field in fields for number in field.needed(shard, request))
        try:
            return np.array(sorted({*needed}), np.int64)
        except BadSample:
            return np.zeros(0, np.int64)  # the loader masks it too

    def drop_from_memory(self) -> bool:
        """Drop the samples' bytes from the page cache; return whether the next read comes from the disk.

        It does not if the files are in memory anyway (tmpfs), other processes map them, or on some network
        file systems.
        """
        root = Path(self._dataset.store.url)
        is_forgotten = True
        for path, start, stop in self._stretches:
            with (root / path).open("rb") as file:
                os.fsync(file.fileno())  # what is not on the disk yet cannot be forgotten
                os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)
                is_forgotten = is_forgotten and not _is_in_memory(file.fileno(), (start + stop) // 2)
        return is_forgotten

    def _cat(self) -> None:
        for path, start, stop in self._stretches:
            for offset in range(start, stop, len(self._buffer)):
                size = min(len(self._buffer), stop - offset)
                self._dataset.store.read_ranges(path, [ByteRange(offset, size)], [self._buffer[:size].data])

    def _decode_all(self) -> None:
        def work(payloads: list[tuple[str, NDArray[np.uint8]]]) -> None:
            out = np.empty(self._largest, np.uint8)  # one buffer a thread, which stays warm
            for payload in payloads:
                _decode(payload, out)

        num_threads = self._options.num_threads
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(work, (self.slices[number::num_threads] for number in range(num_threads))))

    def _batches(self, num_threads: int) -> None:
        with self._loader(num_threads) as loader:
            for batch in islice(loader, self._num_micro_batches):
                if any(row.reason not in self._may_lack for row in batch.quarantined):
                    raise ChecksumError(_DAMAGED)
            if num_threads == self._options.num_threads:
                for name in _STAGES:
                    self.stage_seconds[name] += loader.counters.totals(name).seconds


def _decode(payload: tuple[str, NDArray[np.uint8]], out: NDArray[np.uint8] | None = None) -> NDArray[Any]:
    codec, data = payload
    if codec == _IMAGE:
        cv2 = opencv()
        picture = cv2.imdecode(data, cv2.IMREAD_COLOR)
        if picture is None:
            raise ChecksumError(_DAMAGED)
        return np.asarray(picture)
    if out is None:
        return decode_array(codec, data)
    shape, dtype = array_header(codec, data)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return decode_array(codec, data, out=out[:num_bytes].view(dtype).reshape(shape))


def _is_in_memory(descriptor: int, offset: int) -> bool:
    """Whether a byte can be read without waiting for a disk."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:
        return True  # unknown, so no claim is made


def _joined(places: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Join ranges of one file that are within a page of each other (headers and padding between them)."""
    page = os.sysconf("SC_PAGE_SIZE")
    current: tuple[str, int, int] | None = None
    for path, start, stop in places:
        if current and current[0] == path and start - current[2] <= page:
            current = (path, current[1], stop)
        else:
            if current:
                yield current
            current = (path, start, stop)
    if current:
        yield current


def describe_dataset(
    dataset: Dataset, options: BenchOptions, measured: Measured, busy: float, need: int
) -> dict[str, Any]:
    """Turn seconds into rates; sizes in bytes, MB are 1,000,000 of them."""
    results = {}
    for name, rounds in measured.seconds.items():
        median = statistics.median(rounds)
        results[name] = {
            "seconds": [round(value, 6) for value in rounds],
            "median_seconds": round(median, 6),
            "spread": _spread(rounds),
            "samples_per_s": _rate(measured.num_samples, median),
            "samples_per_s_range": [_rate(measured.num_samples, end(rounds)) for end in (max, min)],
            "stored_mb_per_s": _rate(measured.stored_bytes / 1e6, median),
        }
    medians = {name: statistics.median(rounds) for name, rounds in measured.seconds.items()}
    limit = max((name for name in LIMITS if name in medians), key=lambda name: medians[name])
    scheme, separator, _ = dataset.store.url.partition("://")
    return {
        "dataset_id": dataset.dataset_id,
        "split": options.split,
        "unit": options.unit,
        "where": options.where,
        "keys": options.keys is not None,
        "fields": "default" if options.fields is None else list(options.fields),
        "tier": scheme if separator else "local",
        "threads": options.num_threads,
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_before": round(busy, 2),
        "repeats": options.num_repeats,
        "need_samples_per_s": need,
        "samples": measured.num_samples,
        "slices": measured.num_slices,
        "codecs": list(measured.codecs),
        "micro_batch_size": measured.micro_batch_size,
        "stored_bytes": measured.stored_bytes,
        "decoded_bytes": measured.decoded_bytes,
        "dataset_bytes": sum(shard.num_bytes for shard in dataset.manifest.shards),
        "results": results,
        "scaling": [
            {"threads": number, "samples_per_s": _rate(measured.num_samples, statistics.median(rounds))}
            for number, rounds in measured.scaling.items()
        ],
        "stages": {name: round(value, 6) for name, value in measured.stages.items()},
        "limit": limit,
        "share_of_limit": round(medians[limit] / medians["batches"], 4),
    }


def _rate(amount: float, seconds: float) -> float:
    return round(amount / max(seconds, 1e-9), 2)


def _spread(rounds: Sequence[float]) -> float:
    return round((max(rounds) - min(rounds)) / statistics.median(rounds), 4)


def time_transform(selection: Selection, fields: FieldSet, transform: str) -> dict[str, Any]:
    """Measure a transform on the first samples of an epoch, one at a time in one thread.

    Returns:
        ``name``; ``samples``, how many different ones; ``ms_per_sample``, the median; and ``gil_share`` from
        0 to 1, the share of its time for which it kept other threads from running Python.

    Raises:
        ConfigError: The transform cannot be used.
        SampleError: It fails on a sample.
    """
    bound = bind_transform(selection, fields, transform, None, None)
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
    samples: list[tuple[dict[str, Any], str, DrawKey, int, int]] = []
    with Loader(selection, batch=spec, seed=0, world="single", fields=fields.specs) as loader:
        for batch in islice(loader, _TIMED_SAMPLES):
            row, component = int(batch.arrays["row"][0]), max(0, batch.components[0])
            draw = DrawKey(0, 0, row, (), row)
            sample = copy.deepcopy(fields.sample(batch.arrays, 0, 1))
            samples.append((sample, batch.sample_keys[0] or "", draw, component, row))
    for (
        sample,
        key,
        draw,
        component,
        row,
    ) in samples:  # the first call of a library costs what no later one does
        bound.run(copy.deepcopy(sample), key, draw, component, row)
    seconds: list[float] = []
    began = time.perf_counter()
    probe = ProcessProbe(every_s=_TIMED_S)
    try:
        for sample, key, draw, component, row in cycle(samples):
            own = copy.deepcopy(sample)  # a transform may change what it gets
            start = time.perf_counter()
            bound.run(own, key, draw, component, row)
            seconds.append(time.perf_counter() - start)
            if time.perf_counter() - began > _TIMED_S and len(seconds) >= len(samples):
                break
        gil_share = probe.take().gil_wait_share
    finally:
        probe.close()
    return {
        "name": transform,
        "samples": len(samples),
        "ms_per_sample": statistics.median(seconds) * 1e3,
        "gil_share": gil_share,
    }
