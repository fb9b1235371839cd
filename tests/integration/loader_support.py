"""What the loader's tests share: loaders of a few words, stores that count, stall or lie, damage on disk, and
the pure plan's answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.format import Dataset
from shardflow.format.facts.series import SERIES_NAME, SeriesManifest
from shardflow.loading import Batch, Loader, LoaderConfig, Selection, World
from shardflow.loading.service_main import DataServer
from shardflow.sampling import BatchSpec, EpochPlan, RankSchedule
from shardflow.storage import ByteRange, ByteStore

__all__ = [
    "Batches",
    "HookedStore",
    "address_of",
    "batches_of",
    "check_everywhere",
    "digest_of",
    "flip_bit",
    "forget_threads",
    "frozen",
    "hooked",
    "lend_facts",
    "loader_threads",
    "locate",
    "number_of",
    "open_loader",
    "planned_keys",
    "received_keys",
    "resized",
    "serving",
    "slots_of",
]

Reading = Callable[[str, Sequence[ByteRange]], None]
Keys = tuple[int, int, int, tuple[str | None, ...], tuple[float, ...]]
Batches = dict[tuple[int, int], dict[str, Any]]
_EARLIER: WeakSet[threading.Thread] = WeakSet()
_SETTINGS = {field.name for field in dataclasses.fields(LoaderConfig)} - {"transform"}


class HookedStore:
    """A store that tells, before each ranged read, what is to be read; the hook may wait or raise."""

    def __init__(self, store: ByteStore, before: Reading) -> None:
        self._store = store
        self._before = before
        self.damage: Callable[[str, ByteRange, memoryview], None] | None = None

    @property
    def url(self) -> str:
        return self._store.url

    def size(self, path: str) -> int:
        return self._store.size(path)

    def read(self, path: str) -> bytes:
        return self._store.read(path)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        self._before(path, ranges)
        self._store.read_ranges(path, ranges, buffers)
        if self.damage is not None:
            for span, buffer in zip(ranges, buffers, strict=True):
                self.damage(path, span, buffer)

    def map(self, path: str) -> memoryview:
        return self._store.map(path)

    def put_new(self, path: str, data: bytes) -> None:
        self._store.put_new(path, data)

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        self._store.put_stream(path, chunks, num_bytes)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)


def hooked(url: str, before: Reading) -> tuple[Dataset, HookedStore]:
    """Open a dataset through a store that calls ``before``."""
    dataset = Dataset.open(url)
    store = HookedStore(dataset.store, before)
    return Dataset(store, dataset.manifest), store


def locate(dataset: Dataset, row: int, field: str) -> tuple[Path, int, int]:
    """Return the file, offset and size of a sample's field."""
    path, fields = dataset.sample_fields(row)
    found = next(entry for entry in fields if entry.name.startswith(field))
    return Path(dataset.store.url) / path, found.offset, found.num_bytes


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ (1 << bit)]))


def loader_threads() -> list[threading.Thread]:
    """Living threads of the loaders that this test has begun."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("shardflow-loading") and thread not in _EARLIER
    ]


def forget_threads() -> None:
    """Leave the threads of now out of `loader_threads`: a test that failed may have left its loader."""
    _EARLIER.update(threading.enumerate())


def planned_keys(
    dataset: Dataset,
    split: str,
    spec: BatchSpec,
    *,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Keys]:
    """What the pure plan says a rank receives: ``(epoch, step, micro, keys, weights)`` a micro-batch."""
    plan = EpochPlan(dataset.splits[split], spec, seed=seed, epoch=epoch)
    schedule = RankSchedule(spec.micro_batches_per_step, world_size)
    for step in range(plan.num_steps):
        rows, weights = plan.step(step)
        for micro in schedule.micros(rank):
            if schedule.is_padding(micro):
                size = spec.micro_batch_size
                yield epoch, step, micro, (None,) * size, (0.0,) * size
                continue
            keys = tuple(
                dataset.samples.sample_key(row) if row >= 0 else None for row in rows[micro].tolist()
            )
            yield epoch, step, micro, keys, tuple(weights[micro].astype(float).tolist())


def received_keys(batches: Iterable[Batch]) -> Iterator[Keys]:
    """The same of what a loader yields."""
    for batch in batches:
        weights = tuple(batch.info.weight.astype(float).tolist())
        yield batch.epoch, batch.step, batch.micro, tuple(batch.sample_keys), weights


def open_loader(source: Dataset | Selection | str, batch: BatchSpec, fields: Any, **settings: Any) -> Loader:
    """Open a loader of the split ``train`` with seed 5; takes settings of `Loader` and of `LoaderConfig`."""
    config = {name: settings.pop(name) for name in _SETTINGS & settings.keys()}
    source = Dataset.open(source) if isinstance(source, str) else source
    split = {} if isinstance(source, Selection) else {"split": "train"}
    settings = {"seed": 5, "config": LoaderConfig(**config), **split, **settings}
    return Loader(source, batch=batch, fields=fields, **settings)


def lend_facts(source: Dataset, target: Dataset) -> None:
    """Give a dataset the series table of another one, as if it held the same studies."""
    folders = [Path(each.store.url) / SeriesManifest.folder(each.dataset_id) for each in (source, target)]
    data = (folders[0] / SERIES_NAME).read_bytes()
    folders[1].mkdir(parents=True)
    (folders[1] / SERIES_NAME).write_bytes(data)
    manifest = SeriesManifest.of(target.dataset_id, data)
    (folders[1] / SeriesManifest.file_name).write_bytes(manifest.encode())


def number_of(key: str) -> int:
    """Return the number of a generated sample, see `tests.factories.sample_key`."""
    return int(key[:6].translate(str.maketrans("abcdefghij", "0123456789")))


def slots_of(batch: Batch) -> list[tuple[int, int]]:
    """Return the slots that hold a generated sample, and its number."""
    return [(slot, number_of(key)) for slot, key in enumerate(batch.info.sample_keys) if key is not None]


def resized(picture: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """Resize as decoding does: shrink by area, then grow linearly."""
    if picture.shape == size:
        return picture
    common = min(picture.shape[0], size[0]), min(picture.shape[1], size[1])
    shrunk = cv2.resize(picture, common[::-1], interpolation=cv2.INTER_AREA)
    return np.asarray(cv2.resize(shrunk, size[::-1], interpolation=cv2.INTER_LINEAR))


def frozen(value: Any) -> Any:
    """Return a value that compares by its content, and shares no memory with a batch."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, value.shape, value.tobytes()
    return [frozen(one) for one in value] if isinstance(value, list) else value


def digest_of(batch: Batch) -> str:
    """Return a digest of all that a batch says but where in its buffer it is."""
    entries = {name: frozen(value) for name, value in batch.items()}
    return hashlib.sha256(repr(({**batch.descriptor, "arrays": ()}, entries)).encode()).hexdigest()


def batches_of(loader: Loader) -> Batches:
    """Return what each batch of an epoch holds, with keys and weights, by step and micro-batch."""
    with loader:
        return {
            (batch.step, batch.micro): {
                **{name: frozen(value) for name, value in batch.items()},
                "keys": batch.info.sample_keys,
                "units": batch.info.units,
                "weight": batch.info.weight.tolist(),
            }
            for batch in loader
        }


@contextmanager
def serving(datasets: Iterable[Dataset], **settings: Any) -> Iterator[DataServer]:
    """Serve datasets, with the transforms of tests, from this process."""
    plain = [Dataset(one.store, one.manifest, one.tables) for one in datasets]
    server = DataServer(plain, **{"allowed": ["tests"], **settings})
    try:
        yield server
    finally:
        server.close()


def address_of(server: DataServer) -> str:
    """Return where a server of this process listens."""
    return f"127.0.0.1:{server.port}"


def check_everywhere(
    make: Callable[..., Loader],
    world_sizes: Sequence[int] = (2, 4),
    *,
    is_served: bool = True,
    has_workers: bool = False,
) -> Batches:
    """Check that batches are equal on any number of ranks and threads, in every execution and after a resume.

    Args:
        make: Opens the loader, with further settings.
        world_sizes: Numbers of ranks.
        is_served: Whether a data server can make the batches: transforms are named by what they are.
        has_workers: Whether several loader processes are tried beside one: `test_loader_everything` does, of
            all fields at once.

    Returns:
        The batches.
    """
    whole = batches_of(make())
    for world_size in world_sizes:
        parts: Batches = {}
        for rank in range(world_size):
            parts |= batches_of(make(world=World(rank=rank, world_size=world_size)))
        assert {place: parts[place] for place in whole} == whole
    assert batches_of(make(num_threads=1)) == whole
    for execution in ("process", "workers") if has_workers else ("process",):
        assert batches_of(make(execution=execution)) == whole
    if is_served:
        with make() as loader:
            datasets = loader.selection.datasets
        with serving(datasets) as server:
            served = make(execution="service", servers=[address_of(server)])
            assert batches_of(served) == whole
            assert served.counters.totals("service").num_items
            assert not served.counters.totals("service_local").num_items
    with make() as loader:
        last = loader.num_micro_batches_per_rank - 1
        states = [loader.state_dict()] + [loader.state_dict() for batch in loader if batch.slot == last]
    for state in states[:-1]:
        resumed, step = make(), int(str(state["step"]))
        resumed.load_state_dict(state)
        assert batches_of(resumed) == {place: value for place, value in whole.items() if place[0] >= step}
    return whole
