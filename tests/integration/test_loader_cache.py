"""Loaders over a cache: the same batches, each block fetched once a node, the future known."""

from __future__ import annotations

import logging
import pickle
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import DrawKey, SlotRequest
from shardflow.fields.reader import FieldReader
from shardflow.fields.types.pixels import BoundPixels
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, Selection, World, open_blend
from shardflow.loading.rows.selection import select
from shardflow.sampling import BatchSpec, RankSchedule, TokenBudget
from shardflow.storage import (
    ByteRange,
    Cache,
    CacheConfig,
    CachedStore,
    LocalStore,
    RemoteOptions,
    RemoteStore,
    RetryPolicy,
)
from shardflow.telemetry import StageCounters
from tests.factories import make_dataset
from tests.integration.loader_support import HookedStore, frozen, open_loader, received_keys
from tests.object_stores import WebServer
from tests.sweeps import sampled

SEED = 3
FIELDS: Mapping[str, sf.Field] = {
    "image": sf.Slices(num_slices=2, size=(16, 16), sampling="random", missing="pad"),
    "report": sf.Text(),
}
BUDGET = TokenBudget(max_tokens=70, max_samples=4)
SPECS = {
    "fixed": BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask"),
    "lanes": BatchSpec(
        micro_batch_size=2, micro_batches_per_step=4, tail="mask", lanes=4, window_bytes=20_000
    ),
    "budget": BatchSpec(budget=BUDGET, micro_batches_per_step=4, tail="mask", lanes=4, window_bytes=20_000),
}
POLICIES = ("belady", "lru", "lfu-decay")
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset")
    return make_dataset(folder / "a", num_samples=40, samples_per_shard=6, size=(48, 48), facts=True)


@pytest.fixture
def config(tmp_path: Path) -> CacheConfig:
    return CacheConfig(
        directory=tmp_path / "cache",
        max_bytes=1 << 26,
        min_free_bytes=0,
        block_bytes=4096,
        read_ahead_bytes=100_000,
    )


class Origin:
    """The store behind the cache, and a count of what was read of it."""

    def __init__(self, url: str) -> None:
        self.reads: Counter[tuple[str, ByteRange]] = Counter()
        self.store = HookedStore(LocalStore(url), self._note)

    def _note(self, path: str, ranges: Sequence[ByteRange]) -> None:
        self.reads.update((path, span) for span in ranges)

    def open(self, config: CacheConfig) -> Dataset:
        store = CachedStore(self.store, Cache(config))
        return Dataset(store, Dataset.open(self.store.url).manifest)


def loader(dataset: Dataset | Selection, spec: BatchSpec, **settings: Any) -> Loader:
    return open_loader(dataset, spec, settings.pop("fields", FIELDS), seed=SEED, **settings)


def epochs(source: Loader, num_epochs: int = 2) -> Iterator[Batch]:
    for epoch in range(num_epochs):
        source.set_epoch(epoch)
        yield from source


def assert_equal(found: Sequence[Batch], expected: Sequence[Batch]) -> None:
    assert list(received_keys(found)) == list(received_keys(expected))
    for batch, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert frozen(batch[name]) == frozen(value), name


def needed_blocks(dataset: Dataset, source: Loader, epoch: int, step: int) -> set[str]:
    """Names of the blocks that a step of one rank reads."""
    assert isinstance(dataset.store, CachedStore)
    reader = FieldReader(source.selection, read_bytes=1, counters=StageCounters())
    rows, _ = source.plan.for_epoch(epoch).step(step)
    found: set[str] = set()
    for row in rows[rows >= 0].tolist():
        shard = reader.open_shard(int(dataset.samples.gather("shard", row)), ThreadState())
        inside = int(dataset.samples.gather("row_in_shard", row))
        request = SlotRequest(
            slot=0,
            draw=DrawKey(SEED, epoch, row, table_row=row),
            row_in_shard=inside,
            key="",
            study_row=row,
            table_row=row,
        )
        fields = sorted(number for one in source._fields.bound for number in one.needed(shard, request))
        blocks = dataset.store._blocks(shard.path)
        assert blocks is not None
        offsets = shard.index.field_offsets[fields].tolist()
        sizes = shard.index.field_num_bytes[fields].tolist()
        numbers = blocks.find([ByteRange(*span) for span in zip(offsets, sizes, strict=True)])
        found |= {f"{blocks.name}/{number:08x}" for number in numbers}
    return found


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_close_waits_for_what_is_read_ahead(url: str, config: CacheConfig) -> None:
    is_reading = threading.Event()

    class Slow(Origin):
        def _note(self, path: str, ranges: Sequence[ByteRange]) -> None:
            if threading.current_thread().name.startswith("shardflow-ahead"):
                is_reading.set()
                # Until everything is told to end, and a while longer: only a join outlasts that.
                while not all(reads.is_closed for reads in source._runtime.planner._streams):
                    time.sleep(0.001)
                time.sleep(0.3)

    source = loader(Slow(url).open(config), SPECS["fixed"])
    iterator = iter(source)
    iterator._stream.start()
    assert is_reading.wait(DEADLINE_S)
    source.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardflow-ahead")]


@pytest.mark.parametrize(
    ("kind", "policy"), sampled(product(SPECS, POLICIES), {*zip(SPECS, POLICIES, strict=True)})
)
def test_a_cache_changes_no_batch(url: str, config: CacheConfig, kind: str, policy: Any) -> None:
    expected = list(epochs(loader(Dataset.open(url), SPECS[kind])))
    # A third of the blocks: most of what is kept has to go again.
    small = replace(config, max_bytes=80 * 4096, policy=policy)
    assert_equal(list(epochs(loader(Dataset.open(url, cache=small), SPECS[kind]))), expected)


@pytest.mark.parametrize("execution", ["threads", "process"])
def test_what_a_cache_counts_is_in_the_loaders_counters(
    url: str, config: CacheConfig, execution: Any
) -> None:
    expected = list(epochs(loader(Dataset.open(url), SPECS["lanes"])))
    with loader(Dataset.open(url, cache=config), SPECS["lanes"], execution=execution) as source:
        assert_equal(list(epochs(source)), expected)
        counted = source.counters.snapshot()
    # Of the two epochs; what is fetched behind the last micro-batch is no one's.
    assert counted["cache_disk"]["num_items"] > 0
    assert counted["cache_origin"]["num_bytes"] > 0


def test_a_cache_in_memory_changes_no_batch(url: str) -> None:
    expected = list(epochs(loader(Dataset.open(url), SPECS["lanes"])))
    dataset = Dataset.open(url, cache=CacheConfig(ram_bytes=200_000, block_bytes=4096))
    assert_equal(list(epochs(loader(dataset, SPECS["lanes"]))), expected)
    assert isinstance(dataset.store, CachedStore)
    assert dataset.store.cache.counters.totals("cache_ram").num_items > 0


def test_a_node_that_has_all_of_it_goes_on_while_the_store_is_down(url: str, config: CacheConfig) -> None:
    config = replace(config, read_ahead_bytes=1 << 20)
    manifest = Dataset.open(url).manifest
    whole = {"image": sf.Slices(num_slices=8, size=(16, 16)), "report": sf.Text()}
    with WebServer(Path(url)) as web:
        retry = RetryPolicy(max_attempts=2, first_wait_s=0.001, max_wait_s=0.01)
        store = RemoteStore(f"http://127.0.0.1:{web.port}", RemoteOptions(retry=retry))
        dataset = Dataset(CachedStore(store, Cache(config)), manifest)
        source = loader(dataset, SPECS["lanes"], fields=whole)
        first = list(epochs(source, 1))
        again = loader(pickle.loads(pickle.dumps(dataset)), SPECS["lanes"], fields=whole)
    num_requests = web.num_requests
    source.set_epoch(1)
    second = list(source)
    assert_equal([*epochs(again)], [*first, *second])
    assert web.num_requests == num_requests  # also none of connections that stayed open


def test_a_blend_shares_one_cache(url: str, config: CacheConfig, tmp_path: Path) -> None:
    make_dataset(tmp_path / "texts", num_samples=10, slices=0, facts=True)
    blend = tmp_path / "blend.toml"
    blend.write_text(
        f'[[component]]\ndataset = "{url}"\nrepeat = 1.5\n[[component]]\ndataset = "texts"\nrepeat = 0.5\n'
        f'[[component]]\ndataset = "{url}"\nwhere = "facts.num_slices >= 3"\n'
    )
    spec = SPECS["lanes"]
    expected = list(epochs(loader(open_blend(blend), spec)))
    selection = open_blend(blend, cache=replace(config, max_bytes=80 * 4096))
    assert_equal(list(epochs(loader(selection, spec))), expected)
    caches = {id(dataset.store.cache) for dataset in selection.datasets}  # type: ignore[attr-defined]
    assert len(caches) == 1


@pytest.mark.parametrize("ahead_bytes", [0, 1 << 20])
def test_the_ranks_of_a_node_fetch_each_block_once(url: str, config: CacheConfig, ahead_bytes: int) -> None:
    config = replace(config, read_ahead_bytes=ahead_bytes)
    origin = Origin(url)
    ranks = [
        loader(origin.open(config), SPECS["fixed"], world=World(rank=rank, world_size=2, ranks_per_node=2))
        for rank in range(2)
    ]
    for epoch in range(2):
        for rank in ranks:
            rank.set_epoch(epoch)
        for _ in zip(*ranks, strict=True):
            pass
    del ranks
    assert origin.reads
    assert set(origin.reads.values()) == {1}


def test_a_resumed_run_reads_what_is_kept(url: str, config: CacheConfig) -> None:
    first = Origin(url)
    source = loader(first.open(config), SPECS["lanes"])
    whole = list(epochs(source, 1))
    again = Origin(url)
    resumed = loader(again.open(config), SPECS["lanes"])
    source.set_epoch(0)
    iterator = iter(source)
    for _ in range(8):
        next(iterator)
    resumed.load_state_dict(source.state_dict())
    rest = list(resumed)
    assert_equal(rest, whole[8:])
    # The random slices of epoch 0 are the same; only what lies ahead in epoch 1 may be new.
    assert not again.reads.keys() & first.reads.keys()


def test_poisoned_blocks_cost_no_sample(url: str, config: CacheConfig) -> None:
    expected = list(epochs(loader(Dataset.open(url), SPECS["fixed"])))
    list(epochs(loader(Dataset.open(url, cache=config), SPECS["fixed"])))
    assert config.directory is not None
    for path in (config.directory / "blocks").rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(bytes(data))
    dataset = Dataset.open(url, cache=config)
    source = loader(dataset, SPECS["fixed"])
    found = list(epochs(source))
    assert_equal(found, expected)
    assert source.quarantined == []
    assert isinstance(dataset.store, CachedStore)
    assert dataset.store.cache.counters.totals("cache_poisoned").num_items > 0


def test_a_cache_that_is_deleted_during_an_epoch_costs_one_warning(
    url: str, config: CacheConfig, caplog: pytest.LogCaptureFixture
) -> None:
    expected = list(epochs(loader(Dataset.open(url), SPECS["lanes"])))
    found: list[Batch] = []
    with caplog.at_level(logging.WARNING):
        for number, batch in enumerate(epochs(loader(Dataset.open(url, cache=config), SPECS["lanes"]))):
            found.append(batch)
            if number == 3:
                assert config.directory is not None
                while config.directory.exists():  # blocks are published into it meanwhile
                    shutil.rmtree(config.directory, ignore_errors=True)
    assert_equal(found, expected)
    assert len([record for record in caplog.records if "cache" in record.message]) == 1


def test_the_next_epoch_is_warmed_before_this_one_ends(url: str, config: CacheConfig) -> None:
    dataset = Dataset.open(url, cache=config)
    source = loader(dataset, SPECS["fixed"])
    iterator = iter(source)
    for _ in range(len(source) - 1):
        next(iterator)
    assert config.directory is not None
    this_epoch = {
        block for step in range(source.num_steps) for block in needed_blocks(dataset, source, 0, step)
    }
    # Other slices of the same samples.
    next_epoch = needed_blocks(dataset, source, 1, 0) - this_epoch
    assert next_epoch
    assert eventually(
        lambda: all((config.directory / "blocks" / block).exists() for block in next_epoch)  # type: ignore[operator]
    )


def test_in_shards_that_are_kept_whole_nothing_is_looked_for(
    url: str, config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reads to come of an epoch whose shards are all cached need no place."""
    asking: set[str] = set()
    needed = BoundPixels.needed

    def noted(self: BoundPixels, *arguments: Any) -> Any:
        asking.add(threading.current_thread().name.rpartition("-")[0])
        return needed(self, *arguments)

    monkeypatch.setattr(BoundPixels, "needed", noted)
    dataset = Dataset.open(url, cache=config)
    source = loader(dataset, SPECS["fixed"])
    list(source)
    assert "shardflow-ahead" in asking
    for position in range(len(dataset.manifest.shards)):
        _keep_whole(dataset, position)
    monkeypatch.setattr("shardflow.storage.cache.store._LOOK_S", 0.0)
    source.set_epoch(1)
    asking.clear()
    found = list(source)
    assert not asking & {"shardflow-ahead"}
    plain = loader(Dataset.open(url), SPECS["fixed"])
    plain.set_epoch(1)
    assert_equal(found, list(plain))


def test_shards_that_are_kept_whole_leave_room_for_reads_of_others(url: str, config: CacheConfig) -> None:
    """Of samples in them a loop of reports counts no images, as it does not where it looks for reports."""
    dataset = Dataset.open(url, cache=config)
    for position in range(0, len(dataset.manifest.shards), 2):
        _keep_whole(dataset, position)
    source = loader(dataset, SPECS["fixed"], fields={"report": sf.Text()})
    numbers = range(source.plan.num_steps * 4)
    stream, thread = source._runtime.planner.follow(source.plan, numbers), ThreadState()
    reads = [
        read
        for planned in stream._plan_epoch(source.plan, numbers, 0)
        for read in stream.locate(planned, thread)
    ]
    stream.close()
    first = next(place for place, read in enumerate(reads) if read.ranges)
    kept = [read.num_bytes for read in reads[first:] if not read.ranges]
    looked_for = [read.num_bytes for read in reads if read.ranges]
    assert 0 < np.mean(kept) < 2 * np.mean(looked_for)


def _keep_whole(dataset: Dataset, position: int) -> None:
    path = dataset.manifest.shard_place(position)[1]
    index = dataset.shard_index(position)
    spans = [
        ByteRange(*span)
        for span in zip(index.field_offsets.tolist(), index.field_num_bytes.tolist(), strict=True)
    ]
    dataset.store.read_ranges(path, spans, [memoryview(bytearray(span.num_bytes)) for span in spans])


@pytest.mark.parametrize("kind", list(SPECS))
def test_the_cache_knows_when_each_row_is_read_next(url: str, config: CacheConfig, kind: str) -> None:
    world = World(rank=2, world_size=4, ranks_per_node=2)
    dataset = Dataset.open(url, cache=config)
    source = loader(dataset, SPECS[kind], world=world)
    assert isinstance(dataset.store, CachedStore)
    outlook = dataset.store.cache.forecast
    iterator = iter(source)
    next(iterator)
    (cached,) = source._runtime.planner._cached
    assert eventually(lambda: cached.run.table.has_epoch(0) and cached.run.table.has_epoch(1))
    iterator.close()  # its threads report where they read, too
    schedule = RankSchedule(4, 4, lanes=SPECS[kind].lanes, ranks_per_node=2)
    micros = [micro for rank in (2, 3) for micro in schedule.micros(rank) if not schedule.is_padding(micro)]
    plans = [select(dataset, "train").plan(SPECS[kind], seed=SEED, epoch=epoch) for epoch in (0, 1)]
    uses: dict[int, list[int]] = {}
    for epoch, plan in enumerate(plans):
        for step in range(plan.num_steps):
            rows = plan.step(step)[0][micros]
            for row in rows[rows >= 0].tolist():
                uses.setdefault(row, []).append(step + epoch * plans[0].num_steps)
    everything = np.arange(dataset.samples.num_samples)
    for now in range(plans[0].num_steps):
        expected = [
            min((use - now for use in uses.get(row, []) if use >= now), default=np.inf)
            for row in everything.tolist()
        ]
        outlook.report(cached.run, 0, now, now)
        for is_scan in (True, False):
            found = outlook.distances(dataset.dataset_id, everything, everything + 1, is_scan=is_scan)
            assert found.tolist() == expected


def test_threads_end_with_the_iteration(url: str, config: CacheConfig) -> None:
    def running() -> list[str]:
        return [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith(("shardflow-ahead", "shardflow-foresight"))
        ]

    source = loader(Dataset.open(url, cache=config), SPECS["fixed"])
    assert running() == []
    iterator = iter(source)
    next(iterator)
    source.close()
    assert eventually(lambda: running() == [])
