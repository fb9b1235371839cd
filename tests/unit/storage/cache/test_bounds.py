"""Bounds of a cache that change while it is read: memory at once, the folder in a while, bytes never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.storage import Cache, CacheConfig, CachedStore
from shardflow.storage.cache.folder import PAGE_NUM_BYTES
from tests.unit.storage.cache.test_cached_store import (
    Origin,
    assert_reads_right,
    block_files,
    items,
)

pytestmark = pytest.mark.fast

BLOCK_PAGES = 2  # two pieces of 3,000 bytes and what lies between
LOW = 5 * BLOCK_PAGES * PAGE_NUM_BYTES
DEADLINE_S = 300.0


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin")


@pytest.fixture
def config(tmp_path: Path) -> CacheConfig:
    return CacheConfig(
        directory=tmp_path / "cache", max_bytes=1 << 20, min_free_bytes=0, block_bytes=8192, wait_s=600.0
    )


def _eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _num_bytes(store: CachedStore) -> int:
    disk = store.cache.disk
    assert disk is not None
    return disk.num_bytes


def _file_bytes(config: CacheConfig) -> int:
    return sum(-(-path.stat().st_size // PAGE_NUM_BYTES) * PAGE_NUM_BYTES for path in block_files(config))


def _shrinking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardflow-cache-shrink"]


def test_memory_comes_down_at_once_and_goes_up_again(origin: Origin) -> None:
    store = origin.cached(CacheConfig(ram_bytes=1 << 20, block_bytes=8192))
    assert_reads_right(store, origin)
    memory = store.cache.memory
    assert memory is not None
    whole = memory.num_bytes
    assert whole > 100_000
    store.cache.change({"ram_bytes": 20_000})
    assert 0 < memory.num_bytes <= 20_000
    assert items(store, "cache_ram_evicted") > 10
    assert_reads_right(store, origin)
    assert memory.num_bytes <= 20_000
    store.cache.change({"ram_bytes": 1 << 20})
    assert_reads_right(store, origin)
    before = origin.num_bytes_read
    assert_reads_right(store, origin)
    assert (memory.num_bytes, origin.num_bytes_read) == (whole, before)


def test_a_block_that_is_being_fetched_goes_when_it_has_come(origin: Origin) -> None:
    store = origin.cached(CacheConfig(ram_bytes=1 << 20, block_bytes=8192))
    memory, blocks = store.cache.memory, origin.blocks_of("a.tar")
    assert memory is not None
    assert blocks is not None
    numbers = range(8)
    memory.claim(blocks, numbers, is_ahead=True)
    held = memory.num_bytes
    store.cache.change({"ram_bytes": 10_000})
    assert memory.num_bytes == held
    memory.keep(blocks, {n: memoryview(bytes(blocks.span(n).num_bytes)) for n in numbers})
    assert memory.num_bytes <= 10_000


def test_memory_can_be_added_before_a_folder_and_emptied_again(origin: Origin, config: CacheConfig) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin)
    assert len(store.cache.tiers) == 1
    store.cache.change({"ram_bytes": 1 << 20})
    memory = store.cache.memory
    assert memory is not None
    store.cache.disk.drop(origin.blocks_of("a.tar"), 0)  # type: ignore[union-attr, arg-type]
    assert_reads_right(store, origin)
    assert memory.num_bytes > 0
    store.cache.change({"ram_bytes": 0})
    assert memory.num_bytes == 0
    assert_reads_right(store, origin)
    assert memory.num_bytes == 0


def test_the_folder_follows_its_bound_down_and_up(origin: Origin, config: CacheConfig) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin)
    whole = _num_bytes(store)
    assert whole == _file_bytes(config) > 100_000
    store.cache.change({"max_bytes": LOW})
    assert _eventually(lambda: not _shrinking())
    assert _file_bytes(config) == _num_bytes(store) == LOW
    assert_reads_right(store, origin)
    assert _file_bytes(config) <= LOW
    store.cache.change({"max_bytes": 1 << 20})
    assert_reads_right(store, origin)
    assert _num_bytes(store) == _file_bytes(config) == whole
    assert items(store, "cache_fault") == 0


def test_readers_get_their_bytes_while_the_bound_goes_up_and_down(
    origin: Origin, config: CacheConfig
) -> None:
    store = origin.cached(config)
    ended = threading.Event()
    faults: list[BaseException] = []

    def read() -> None:
        try:
            while not ended.is_set():
                assert_reads_right(store, origin)
        except Exception as error:  # noqa: BLE001 - the test raises it
            faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(30):
        store.cache.change({"max_bytes": (1 << 20, LOW, 3 * LOW)[turn % 3], "ram_bytes": 9000 * (turn % 4)})
        time.sleep(0.002)
    store.cache.change({"max_bytes": LOW})
    ended.set()
    for reader in readers:
        reader.join(DEADLINE_S)
    assert not faults
    assert _eventually(lambda: not _shrinking())
    assert _file_bytes(config) == _num_bytes(store) <= LOW
    assert items(store, "cache_fault") == 0


def test_each_process_brings_the_folder_within_its_own_bound(origin: Origin, config: CacheConfig) -> None:
    """Two caches are two processes to the folder: each has a slot of its own."""
    large, small = origin.cached(config), origin.cached(replace(config, max_bytes=LOW))
    assert_reads_right(large, origin)
    whole = _num_bytes(large)
    assert_reads_right(small, origin)  # all of it is kept already, and no room is needed
    assert _num_bytes(small) == whole
    large.cache.disk.drop(origin.blocks_of("a.tar"), 3)  # type: ignore[union-attr, arg-type]
    assert_reads_right(small, origin)
    assert _num_bytes(small) <= LOW
    assert_reads_right(large, origin)
    assert LOW < _num_bytes(large) <= whole
    # The ranks of a node are told one after the other, and agree once the last one was.
    large.cache.change({"max_bytes": 2 * LOW})
    assert _eventually(lambda: not _shrinking())
    small.cache.change({"max_bytes": 2 * LOW})
    for store in (large, small, large):
        assert_reads_right(store, origin)
        assert _num_bytes(store) == _file_bytes(config) <= 2 * LOW


def test_one_that_fills_the_folder_again_is_not_fought_for_ever(origin: Origin, config: CacheConfig) -> None:
    large, small = origin.cached(config), origin.cached(config)
    assert_reads_right(large, origin)
    ended = threading.Event()

    def fill() -> None:
        while not ended.is_set():
            assert_reads_right(large, origin)

    filling = threading.Thread(target=fill)
    filling.start()
    small.cache.change({"max_bytes": LOW})
    assert _eventually(lambda: not _shrinking())
    ended.set()
    filling.join(DEADLINE_S)
    assert_reads_right(small, origin)


def test_a_cache_that_is_closed_meanwhile_leaves_no_thread(origin: Origin, config: CacheConfig) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin)
    blocks = origin.blocks_of("a.tar")
    assert blocks is not None
    other = Cache(config)
    assert other.disk is not None
    assert blocks.num_blocks > 4
    store.cache.disk.drop(blocks, 0)  # type: ignore[union-attr]
    other.disk.claim(blocks, [0], is_ahead=True)  # never comes: the thread would wait for it
    store.cache.change({"max_bytes": 8192})
    store.cache.close()
    assert not _shrinking()
    store.cache.change({"max_bytes": 8192})
    assert not _shrinking()
    other.close()


@pytest.mark.parametrize("changes", [{"ram_bytes": -1}, {"max_bytes": 100}, {"read_ahead_threads": 0}])
def test_what_no_cache_can_be_is_refused_and_nothing_changes(
    origin: Origin, config: CacheConfig, changes: dict[str, int]
) -> None:
    cache = origin.cached(config).cache
    with pytest.raises(ConfigError):
        cache.change(changes)
    assert cache.config == config
