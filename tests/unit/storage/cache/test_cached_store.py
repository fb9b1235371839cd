"""A cached store gives the bytes of its origin, each block fetched once, whatever becomes of the cache."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import google_crc32c
import numpy as np
import pytest

from shardflow.errors import ConfigError, ShortReadError
from shardflow.storage import ByteRange, Cache, CacheConfig, CachedStore, LocalStore, open_store
from shardflow.storage.cache.blocks import ObjectBlocks
from shardflow.storage.cache.folder import MARKER
from shardflow.storage.cache.store import read_afresh
from tests.conformance.stores import StoreConformance
from tests.integration.loader_support import HookedStore

pytestmark = pytest.mark.fast

PIECE_BYTES = 3000
NUM_PIECES = 40
GAP_BYTES = 512


class Origin:
    """A folder with one object of many pieces, and a note of what is read of it."""

    def __init__(self, folder: Path) -> None:
        self.reads: list[tuple[str, ByteRange]] = []
        self.store = HookedStore(LocalStore(folder), self._note)
        rng = np.random.default_rng(5)
        self.content = rng.bytes(NUM_PIECES * (PIECE_BYTES + GAP_BYTES))
        self.ranges = [
            ByteRange(number * (PIECE_BYTES + GAP_BYTES) + GAP_BYTES, PIECE_BYTES)
            for number in range(NUM_PIECES)
        ]
        self.store.put_new("a.tar", self.content)

    def _note(self, path: str, ranges: Sequence[ByteRange]) -> None:
        self.reads += [(path, span) for span in ranges]

    @property
    def num_bytes_read(self) -> int:
        return sum(span.num_bytes for _, span in self.reads)

    def blocks_of(self, path: str, *, block_bytes: int = 8192) -> ObjectBlocks | None:
        if path != "a.tar":
            return None
        return ObjectBlocks.of_pieces(
            hashlib.sha256(self.content).hexdigest(),
            np.array([span.offset for span in self.ranges], np.int64),
            np.array([span.num_bytes for span in self.ranges], np.int64),
            np.array([google_crc32c.value(self.piece(n)) for n in range(NUM_PIECES)], np.uint32),
            block_bytes=block_bytes,
            space="d" * 64,
            units=np.arange(NUM_PIECES),
        )

    def piece(self, number: int) -> bytes:
        span = self.ranges[number]
        return self.content[span.offset : span.offset + span.num_bytes]

    def cached(self, config: CacheConfig) -> CachedStore:
        store = CachedStore(self.store, Cache(config))
        store.bind(self.blocks_of)
        return store


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin")


@pytest.fixture
def config(tmp_path: Path) -> CacheConfig:
    # A machine that stands still for 30 s makes a waiting reader fetch for itself, which is right, and no
    # test of fetching once.
    return CacheConfig(
        directory=tmp_path / "cache", max_bytes=1 << 20, min_free_bytes=0, block_bytes=8192, wait_s=600.0
    )


def read(store: CachedStore, origin: Origin, numbers: Sequence[int]) -> list[bytes]:
    buffers = [bytearray(PIECE_BYTES) for _ in numbers]
    store.read_ranges("a.tar", [origin.ranges[n] for n in numbers], [memoryview(b) for b in buffers])
    return [bytes(buffer) for buffer in buffers]


def assert_reads_right(
    store: CachedStore, origin: Origin, numbers: Sequence[int] = range(NUM_PIECES)
) -> None:
    assert read(store, origin, numbers) == [origin.piece(n) for n in numbers]


def block_files(config: CacheConfig) -> list[Path]:
    assert config.directory is not None
    return sorted(path for path in (config.directory / "blocks").rglob("*") if path.is_file())


def items(store: CachedStore, stage: str) -> int:
    return store.cache.counters.totals(stage).num_items


class TestUnboundStore(StoreConformance):
    """Of a store that was told nothing, everything passes through."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> CachedStore:
        found = open_store(
            tmp_path / "origin", cache=CacheConfig(directory=tmp_path / "cache", max_bytes=1 << 20)
        )
        assert isinstance(found, CachedStore)
        return found


@pytest.mark.parametrize("tier", ["disk", "memory", "both"])
def test_each_block_is_fetched_once(origin: Origin, config: CacheConfig, tier: str) -> None:
    if tier != "disk":
        directory = config.directory if tier == "both" else None
        config = CacheConfig(
            directory=directory,
            max_bytes=config.max_bytes if directory else 0,
            min_free_bytes=0,
            ram_bytes=1 << 20,
            block_bytes=8192,
        )
    store = origin.cached(config)
    assert_reads_right(store, origin, [7, 3, 30])
    assert_reads_right(store, origin)
    fetched = origin.num_bytes_read
    # Pairs of pieces with the gap between them; no byte twice.
    assert fetched == NUM_PIECES // 2 * (2 * PIECE_BYTES + GAP_BYTES)
    assert_reads_right(store, origin, [5, 5, 6, 39, 0])
    assert origin.num_bytes_read == fetched
    assert items(store, "cache_ram" if tier != "disk" else "cache_disk") > 0


def test_reading_one_piece_fetches_its_block_and_no_more(origin: Origin, config: CacheConfig) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin, [11])
    assert origin.num_bytes_read == 2 * PIECE_BYTES + GAP_BYTES
    assert len(block_files(config)) == 1


def test_what_is_no_piece_comes_from_the_origin(origin: Origin, config: CacheConfig) -> None:
    store = origin.cached(config)
    buffer = bytearray(600)
    store.read_ranges("a.tar", [ByteRange(0, 600)], [memoryview(buffer)])
    assert bytes(buffer) == origin.content[:600]
    assert block_files(config) == []


def test_another_process_finds_what_one_has_fetched(origin: Origin, config: CacheConfig) -> None:
    assert_reads_right(origin.cached(config), origin)
    origin.reads.clear()
    assert_reads_right(origin.cached(config), origin)
    assert origin.reads == []


def test_a_cache_stays_in_its_bounds(origin: Origin, config: CacheConfig) -> None:
    small = CacheConfig(
        directory=config.directory, max_bytes=40960, min_free_bytes=0, block_bytes=8192, policy="lru"
    )
    store = origin.cached(small)
    for number in range(NUM_PIECES):
        assert_reads_right(store, origin, [number])
        on_disk = sum(-(-path.stat().st_size // 4096) * 4096 for path in block_files(small))
        assert on_disk <= 40960
    assert items(store, "cache_disk_evicted") == NUM_PIECES // 2 - 5
    # The newest five blocks are those of the last ten pieces.
    origin.reads.clear()
    assert_reads_right(store, origin, range(NUM_PIECES - 10, NUM_PIECES))
    assert origin.reads == []


def test_memory_stays_in_its_bounds(origin: Origin) -> None:
    store = origin.cached(CacheConfig(ram_bytes=40000, block_bytes=8192, policy="lru"))
    memory = store.cache.memory
    assert memory is not None
    for number in range(NUM_PIECES):
        assert_reads_right(store, origin, [number])
        assert 0 < memory.num_bytes <= 40000
    origin.reads.clear()
    assert_reads_right(store, origin, [NUM_PIECES - 1])
    assert origin.reads == []


def test_space_that_others_need_stays_free(origin: Origin, config: CacheConfig) -> None:
    assert config.directory is not None
    floor = shutil.disk_usage(config.directory.parent).free + (1 << 40)
    store = origin.cached(
        CacheConfig(directory=config.directory, max_bytes=1 << 20, min_free_bytes=floor, block_bytes=8192)
    )
    assert_reads_right(store, origin)
    assert block_files(config) == []


def test_whole_objects_are_kept_by_their_digest(origin: Origin, config: CacheConfig) -> None:
    origin.store.put_new("table", b"rows" * 1000)
    sha256 = hashlib.sha256(b"rows" * 1000).hexdigest()

    def blocks_of(path: str) -> ObjectBlocks | None:
        return ObjectBlocks.whole(sha256, 4000) if path == "table" else None

    store = origin.cached(config)
    store.bind(blocks_of)
    assert store.read("table") == b"rows" * 1000
    assert store.map("table") == b"rows" * 1000
    assert store.map("table").readonly
    assert [span for path, span in origin.reads if path == "table"] == [ByteRange(0, 4000)]
    block_files(config)[0].write_bytes(b"crow" * 1000)
    assert store.read("table") == b"rows" * 1000
    assert store.map("table") == b"rows" * 1000
    assert items(store, "cache_poisoned") == 1


def test_a_short_object_is_a_short_read(origin: Origin, config: CacheConfig, tmp_path: Path) -> None:
    cut = origin.ranges[20].offset + 100
    (tmp_path / "origin" / "a.tar").write_bytes(origin.content[:cut])
    store = origin.cached(config)
    with pytest.raises(ShortReadError):
        read(store, origin, [20])
    with pytest.raises(ShortReadError):
        read(store, origin, [21])
    assert_reads_right(store, origin, range(20))
    assert len(block_files(config)) == 10


def test_a_short_object_is_a_short_read_where_nothing_is_kept(
    origin: Origin, config: CacheConfig, tmp_path: Path
) -> None:
    store = origin.cached(CacheConfig(ram_bytes=1, block_bytes=8192))
    (tmp_path / "origin" / "a.tar").write_bytes(origin.content[: origin.ranges[20].offset + 100])
    assert_reads_right(store, origin, range(20))
    with pytest.raises(ShortReadError):
        read(store, origin, [19, 20])


def test_a_table_is_mapped_once_for_all_who_open_it_at_once(
    origin: Origin, config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = b"rows" * 5000
    origin.store.put_new("table", table)
    blocks = ObjectBlocks.whole(hashlib.sha256(table).hexdigest(), len(table))
    gate = threading.Barrier(3)

    def before(path: str, ranges: Sequence[ByteRange]) -> None:
        origin.reads += [(path, span) for span in ranges]
        # Until another one waits for what is read here; all three would read it if nobody did.
        eventually(lambda: _is_waiting() or len(origin.reads) > 1)

    origin.store = HookedStore(LocalStore(origin.store.url), before)
    map_whole = origin.store.map

    def map_past_the_cache(path: str) -> memoryview:
        origin.reads.append((path, ByteRange(0, 0)))
        return map_whole(path)

    monkeypatch.setattr(origin.store, "map", map_past_the_cache)
    stores = [origin.cached(config) for _ in range(3)]
    found: list[bytes] = []

    def open_one(store: CachedStore) -> None:
        store.bind(lambda _: blocks)
        gate.wait(300)
        found.append(bytes(store.map("table")))

    threads = [threading.Thread(target=open_one, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [table] * 3
    assert [items(store, "cache_fault") for store in stores] == [0, 0, 0]
    assert [path for path, _ in origin.reads] == ["table"]


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_who_comes_second_waits_for_the_first(origin: Origin, config: CacheConfig, tier: str) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def before(path: str, ranges: Sequence[ByteRange]) -> None:
        origin.reads += [(path, span) for span in ranges]
        begun.set()
        assert go_on.wait(300)

    origin.store = HookedStore(LocalStore(origin.store.url), before)
    if tier == "memory":  # of one process; a folder is shared by several
        first = second = origin.cached(CacheConfig(ram_bytes=1 << 20, block_bytes=8192))
    else:
        first, second = origin.cached(config), origin.cached(config)
    threads = [threading.Thread(target=assert_reads_right, args=(first, origin, [4]))]
    threads[0].start()
    assert begun.wait(300)
    threads.append(threading.Thread(target=assert_reads_right, args=(second, origin, [5])))
    threads[1].start()
    eventually(_is_waiting)
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(origin.reads) == 1
    assert items(second, "cache_wait") == 1


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_waiting() -> bool:
    """Tell whether some thread is in a wait for a block."""
    return any(
        frame.f_code.co_name == "wait" and "cache" in frame.f_code.co_filename
        for top in sys._current_frames().values()
        for frame in _stack(top)
    )


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_a_fork_has_a_slot_of_its_own(origin: Origin, config: CacheConfig) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin, range(8))
    with store._lock, store.cache._lock:  # as a thread of the parent might hold them
        child = os.fork()
        if child == 0:
            status = 1
            signal.alarm(60)
            with contextlib.suppress(BaseException):
                assert_reads_right(store, origin)
                status = 0
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    origin.reads.clear()
    assert_reads_right(store, origin)
    assert origin.reads == []
    assert config.directory is not None
    assert len(list((config.directory / "slots").iterdir())) == 2


def test_wrong_bytes_of_the_origin_are_not_kept(origin: Origin, config: CacheConfig) -> None:
    broken = bytearray(origin.content)
    broken[origin.ranges[8].offset] ^= 1
    path = Path(origin.store.url) / "a.tar"
    path.write_bytes(bytes(broken))
    store = origin.cached(config)
    assert read(store, origin, [8])[0] != origin.piece(8)
    assert items(store, "cache_unsound") == 1
    assert block_files(config) == []
    read_afresh(store, "a.tar", [origin.ranges[8]], [memoryview(bytearray(PIECE_BYTES))])
    assert items(store, "cache_poisoned") == 0
    # Right again, and kept.
    path.write_bytes(origin.content)
    assert_reads_right(store, origin, [8, 9])
    assert len(block_files(config)) == 1


# ---- what can happen to a cache folder (N4) ------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "longer"])
def test_a_poisoned_block_is_dropped_and_fetched_anew(
    origin: Origin, config: CacheConfig, damage: str
) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin)
    victim = block_files(config)[3]
    data = bytearray(victim.read_bytes())
    data[100] ^= 4
    victim.write_bytes(
        {"flipped": bytes(data), "cut": bytes(data[:99]), "empty": b"", "longer": bytes(data) + b"x"}[damage]
    )
    origin.reads.clear()
    found = read(store, origin, [6])
    if damage == "flipped":  # whoever checks the piece says so
        assert found != [origin.piece(6)]
        buffer = bytearray(PIECE_BYTES)
        read_afresh(store, "a.tar", [origin.ranges[6]], [memoryview(buffer)])
        found = [bytes(buffer)]
    assert found == [origin.piece(6)]
    assert len(origin.reads) == 1
    assert items(store, "cache_poisoned") == 1
    assert_reads_right(store, origin)
    assert len(origin.reads) == 1


def test_a_folder_with_files_of_others_is_refused(origin: Origin, config: CacheConfig) -> None:
    assert config.directory is not None
    config.directory.mkdir()
    (config.directory / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="nothing was touched"):
        origin.cached(config)
    assert [path.name for path in config.directory.iterdir()] == ["thesis.txt"]


def test_a_marker_of_another_kind_is_refused(origin: Origin, config: CacheConfig, tmp_path: Path) -> None:
    assert config.directory is not None
    config.directory.mkdir()
    (config.directory / MARKER).write_text("{}")
    with pytest.raises(ConfigError, match="nothing was touched"):
        origin.cached(config)


def test_a_folder_that_is_deleted_under_us_costs_the_cache_alone(
    origin: Origin, config: CacheConfig, caplog: pytest.LogCaptureFixture
) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin, range(10))
    assert config.directory is not None
    shutil.rmtree(config.directory)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_reads_right(store, origin)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "origin" in caplog.text
    assert items(store, "cache_fault") >= 1
    assert not config.directory.exists()


def test_blocks_that_are_deleted_under_us_are_fetched_anew(origin: Origin, config: CacheConfig) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin)
    assert config.directory is not None
    for path in (config.directory / "blocks").iterdir():
        shutil.rmtree(path)
    assert_reads_right(store, origin)
    assert len(block_files(config)) == NUM_PIECES // 2
    assert items(store, "cache_fault") == 0


def test_of_blocks_that_are_read_at_once_the_lost_ones_alone_are_fetched(
    origin: Origin, config: CacheConfig, tmp_path: Path
) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin)
    gone, cut, linked = (block_files(config)[number] for number in (3, 7, 11))
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:99])
    linked.unlink()
    linked.symlink_to(tmp_path)
    origin.reads.clear()
    assert_reads_right(store, origin)
    # Two blocks of two pieces, and the pieces of the one whose place is taken.
    assert sorted(span.offset for _, span in origin.reads) == [
        origin.ranges[number].offset for number in (6, 14, 22, 23)
    ]
    assert items(store, "cache_poisoned") == 2


def test_blocks_hold_as_many_neighbors_as_fit_large_and_small_ones_apart() -> None:
    rng = np.random.default_rng(3)
    sizes = np.where(rng.random(400) < 0.3, rng.integers(2048, 9000, 400), rng.integers(1, 2048, 400))
    offsets = np.cumsum(sizes + GAP_BYTES) - sizes
    blocks = ObjectBlocks.of_pieces(
        "0" * 64, offsets, sizes, np.zeros(400, np.uint32), block_bytes=8192, space="", units=None
    )
    assert blocks is not None
    firsts = blocks.first_piece.tolist()
    stops = offsets + sizes
    for number, (first, stop) in enumerate(itertools.pairwise(firsts)):
        is_large = sizes[first:stop] >= 2048
        assert is_large.all() or not is_large.any()
        assert (blocks.starts[number], blocks.stops[number]) == (offsets[first], stops[stop - 1])
        assert stop == first + 1 or stops[stop - 1] - offsets[first] <= 8192
        if stop < 400:  # the next one does not fit, or is of the other kind
            assert stops[stop] - offsets[first] > 8192 or (sizes[stop] >= 2048) != is_large[0]


def test_the_blocks_of_hundreds_of_objects_are_found_once(
    origin: Origin, config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full shuffle each sample is in another shard."""
    store = origin.cached(config)
    asked: list[str] = []
    names = [f"a{number:03d}" for number in range(300)]

    def blocks_of(path: str) -> ObjectBlocks | None:
        asked.append(path)
        return origin.blocks_of("a.tar")

    store.bind(blocks_of)
    for name in 2 * names:
        assert store.num_bytes_ahead(name, [origin.ranges[0]]) == 2 * PIECE_BYTES + GAP_BYTES
    assert asked == names
    # Within bounds: those that were not asked for lately are found again.
    found = origin.blocks_of("a.tar")
    assert found is not None
    monkeypatch.setattr("shardflow.storage.cache.store._MAX_KNOWN_BYTES", 10 * found.held_bytes)
    asked.clear()
    for name in ("b", names[-1], names[0]):
        store.num_bytes_ahead(name, [origin.ranges[0]])
    assert asked == ["b", names[0]]
    assert len(store._known) == 10


def test_whether_all_of_an_object_is_kept_is_looked_up_once_a_second(
    origin: Origin, config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = origin.cached(config)
    assert not store.is_kept("a.tar")
    assert_reads_right(store, origin, range(1))
    monkeypatch.setattr("shardflow.storage.cache.store._LOOK_S", 0.0)
    assert not store.is_kept("a.tar")
    assert_reads_right(store, origin)
    assert store.is_kept("a.tar")
    store.drop("a.tar", [origin.ranges[0]])
    monkeypatch.setattr("shardflow.storage.cache.store._LOOK_S", 3600.0)
    assert store.is_kept("a.tar")  # as it was a moment ago
    monkeypatch.setattr("shardflow.storage.cache.store._LOOK_S", 0.0)
    assert not store.is_kept("a.tar")


def test_objects_that_are_not_cached_are_forgotten_too(
    origin: Origin, config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = origin.cached(config)
    store.bind(lambda _: None)
    monkeypatch.setattr("shardflow.storage.cache.store._MAX_KNOWN_BYTES", 4096)
    for number in range(1000):
        assert store.num_bytes_ahead(f"a{number}", [origin.ranges[0]]) == 0
    assert 1 < len(store._known) < 100


@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_links_are_neither_followed_nor_deleted(
    origin: Origin, config: CacheConfig, tmp_path: Path, target: str
) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin)
    victim = block_files(config)[2]
    others = tmp_path / "others"
    if target == "file":
        others.write_bytes(victim.read_bytes()[::-1])
    elif target == "folder":
        others.mkdir()
    victim.unlink()
    victim.symlink_to(others)
    for _ in range(2):
        assert_reads_right(store, origin)
    assert victim.is_symlink()
    assert others.exists() == (target != "nothing")
    assert items(store, "cache_fault") == 0


def test_a_linked_object_folder_is_not_entered(origin: Origin, config: CacheConfig, tmp_path: Path) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin, [0])
    folder = block_files(config)[0].parent
    outside = tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    assert_reads_right(store, origin)
    assert len(list(outside.iterdir())) == 1


def test_a_garbage_catalog_costs_a_warning(
    origin: Origin, config: CacheConfig, caplog: pytest.LogCaptureFixture
) -> None:
    assert_reads_right(origin.cached(config), origin)
    assert config.directory is not None
    (config.directory / "catalog").write_bytes(b"garbage" * 1000)
    with caplog.at_level(logging.WARNING):
        store = origin.cached(config)
        assert_reads_right(store, origin)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_deleted_catalog_leaves_no_blocks_that_no_one_counts(origin: Origin, config: CacheConfig) -> None:
    assert_reads_right(origin.cached(config), origin)
    assert config.directory is not None
    (config.directory / "catalog").unlink()
    (config.directory / "blocks" / "notes.txt").write_text("not ours")
    store = origin.cached(config)
    assert [path.name for path in block_files(config)] == ["notes.txt"]
    assert_reads_right(store, origin)
    disk = store.cache.disk
    assert disk is not None
    assert disk.num_bytes == NUM_PIECES // 2 * 8192


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO"])
def test_a_disk_that_takes_nothing_costs_one_warning(
    origin: Origin,
    config: CacheConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
) -> None:
    store = origin.cached(config)
    assert_reads_right(store, origin, range(4))
    real, fault = os.write, getattr(errno, code)

    def write(descriptor: int, data: bytes) -> int:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(os, "write", write)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_reads_right(store, origin)
    monkeypatch.setattr(os, "write", real)
    assert len(caplog.records) == 1
    assert code in caplog.text
    assert items(store, "cache_fault") >= 1
    assert config.directory is not None
    assert list((config.directory / "incoming").iterdir()) == []


def test_a_full_disk_is_left_alone_for_a_while(
    origin: Origin, config: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    store = origin.cached(config)
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr("shardflow.storage.cache.disk._PAUSE_S", 3600.0)
    monkeypatch.setattr("shardflow.storage.cache.store._LOOK_S", 0.0)
    for _ in range(3):
        assert_reads_right(store, origin)
        assert not store.is_kept("a.tar")
    assert items(store, "cache_fault") == 1


def test_a_folder_that_cannot_be_made_costs_one_warning(
    origin: Origin, config: CacheConfig, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        store = origin.cached(
            CacheConfig(directory=tmp_path / "file" / "cache", max_bytes=1 << 20, block_bytes=8192)
        )
        assert_reads_right(store, origin)
    assert len(caplog.records) == 1
    assert "ENOTDIR" in caplog.text
