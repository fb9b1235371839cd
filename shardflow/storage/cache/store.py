"""Cached store: reads through process memory and the node's folder before the origin.

`CachedStore` returns the same bytes as its origin whatever happens to the cache. It knows objects by what
their owner declares (`CachedStore.bind`): digest, pieces, checksums; unknown objects pass through. `Cache`
holds the tiers of a process and their counters, and may be shared by several stores.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from shardflow.errors import ConfigError, ShortReadError
from shardflow.storage.cache.blocks import Claim, ObjectBlocks, Piece, Tier, copy_pieces
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.disk import DiskTier
from shardflow.storage.cache.forecast import AccessForecast
from shardflow.storage.cache.memory import MemoryTier
from shardflow.storage.store import ByteRange, ByteStore, check_ranges
from shardflow.telemetry import StageCounters

_LOGGER = logging.getLogger(__name__)
BlocksOf = Callable[[str], ObjectBlocks | None]
_MAX_OBJECTS = 256
_Wanted = Mapping[int, Sequence[Piece]]


class Cache:
    """The tiers of a process. Safe for many threads; crosses a process boundary as its settings.

    Datasets that are read together, such as those of a blend, share one, and with it the bounds.

    Args:
        config: The settings.

    Raises:
        ConfigError: The directory holds something and is no cache. One that cannot be used (read-only, no
            space) costs a warning, and reads go to the origin.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.counters = StageCounters()
        self._lock = threading.Lock()
        self._pid = 0
        self._disk: DiskTier | None = None
        self._memory: MemoryTier | None = None
        self._own_process()

    def __reduce__(self) -> tuple[type[Cache], tuple[CacheConfig]]:
        """Cross a process boundary as settings."""
        return type(self), (self.config,)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return bool(self.tiers)

    @property
    def disk(self) -> DiskTier | None:
        """The tier in the folder; None where there is none, or it failed."""
        self._check_process()
        return None if self._disk is None or self._disk.is_off else self._disk

    @property
    def memory(self) -> MemoryTier | None:
        """The tier in memory; None where there is none."""
        self._check_process()
        return self._memory

    @property
    def named_tiers(self) -> list[tuple[str, Tier]]:
        """The tiers, the nearest first, with the stage that their hits are counted in."""
        tiers: dict[str, Tier | None] = {"cache_ram": self.memory, "cache_disk": self.disk}
        return [(name, tier) for name, tier in tiers.items() if tier is not None]

    @property
    def tiers(self) -> list[Tier]:
        """The tiers, the nearest first."""
        return [tier for _, tier in self.named_tiers]

    @property
    def home(self) -> Tier:
        """The tier that blocks are claimed in: the one that most processes share."""
        self._check_process()
        # A folder that failed refuses every claim, which is what is wanted of it where there is nothing else.
        home = self.disk or self._memory or self._disk
        if home is None:
            raise ConfigError("a cache must have a directory or ram_bytes, got neither; set one.")
        return home

    @property
    def forecast(self) -> AccessForecast:
        """When blocks are needed next."""
        self._check_process()
        return self._forecast

    def change(self, changes: Mapping[str, int]) -> None:
        """Change settings while blocks are read and kept; nothing that is read changes by it.

        Memory that is too much is freed at once, the folder comes down to a lower bound within a while.

        Args:
            changes: ``ram_bytes``, ``max_bytes``, ``read_ahead_bytes`` or ``read_ahead_threads``; of the last
                two the loaders that read through this cache must be told.

        Raises:
            ConfigError: A value cannot be, see `CacheConfig`; nothing changes.
        """
        self._check_process()
        with self._lock:
            self.config = replace(self.config, **changes)  # type: ignore[arg-type]
            if "ram_bytes" in changes and self._memory is not None:
                self._memory.bound(self.config.ram_bytes)
            elif self.config.ram_bytes and self._memory is None:
                self._memory = MemoryTier(self.config, self._forecast, self.counters)
            if "max_bytes" in changes and self._disk is not None:
                self._disk.shrinker.bound(self.config.max_bytes)

    def close(self) -> None:
        """Free what the process holds; what is kept on disk stays for others."""
        with self._lock:
            if self._pid == os.getpid():
                for tier in (self._disk, self._memory):
                    if tier is not None:
                        tier.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            # A fork: locks may be held by threads that are not here, and the slot is the parent's.
            self._own_process()

    def _own_process(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.counters = StageCounters()
        self._disk = self._open_disk()
        self._forecast = AccessForecast() if self._disk is None else self._disk.forecast
        self._memory = (
            MemoryTier(self.config, self._forecast, self.counters) if self.config.ram_bytes else None
        )

    def _open_disk(self) -> DiskTier | None:
        if self.config.directory is None:
            return None
        try:
            return DiskTier(self.config.directory.expanduser().absolute(), self.config, self.counters)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            code = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
            _LOGGER.warning(
                "the cache directory cannot be used (%s): reads go to the origin; see that it is a writable "
                "folder of this node, and start again",
                code,
            )
            self.counters.add("cache_fault", num_items=1)
            return None


class CachedStore:
    """A store before another one. Safe for many threads; crosses a process boundary as its settings.

    Args:
        origin: Where the bytes come from.
        cache: The cache of this process; stores may share one.
    """

    def __init__(self, origin: ByteStore, cache: Cache) -> None:
        self.origin = origin
        self.cache = cache
        self._blocks_of: BlocksOf | None = None
        self._reset()

    def bind(self, blocks_of: BlocksOf) -> None:
        """Say who knows the objects' digests and pieces.

        Args:
            blocks_of: From a path to its blocks; None for an object that is not kept. May read through this
                store.
        """
        self._blocks_of = blocks_of

    @property
    def url(self) -> str:
        """The address of the origin."""
        return self.origin.url

    def __reduce__(self) -> tuple[type[CachedStore], tuple[ByteStore, Cache]]:
        """Cross a process boundary without what is known of objects."""
        return type(self), (self.origin, self.cache)

    def __repr__(self) -> str:
        return f"CachedStore({self.origin!r})"

    # ---- ByteStore -------------------------------------------------------------------------------

    def size(self, path: str) -> int:
        """Return an object's size in bytes; see `ByteStore.size`."""
        return self.origin.size(path)

    def read(self, path: str) -> bytes:
        """Return an object whole; see `ByteStore.read`."""
        blocks = self._blocks(path)
        if blocks is None or not blocks.sha256 or not blocks.span(0).num_bytes:
            return self.origin.read(path)
        data = bytearray(blocks.span(0).num_bytes)
        self._read_blocks(path, blocks, {0: [Piece(0, memoryview(data))]})
        if not blocks.is_sound(0, memoryview(data)):
            self._drop(blocks, [0])
            return self.origin.read(path)
        return bytes(data)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with its range; see `ByteStore.read_ranges`."""
        check_ranges(path, ranges, buffers)
        blocks = self._blocks(path)
        if blocks is None or not ranges:
            self.origin.read_ranges(path, ranges, buffers)
            return
        wanted: dict[int, list[Piece]] = {}
        around: list[int] = []
        for place, number in enumerate(blocks.find(ranges)):
            if number < 0:
                around.append(place)
                continue
            start = ranges[place].offset - int(blocks.starts[number])
            wanted.setdefault(number, []).append(Piece(start, buffers[place].cast("B")))
        if around:
            # Headers of a tar, say: nothing that has a checksum.
            self.origin.read_ranges(path, [ranges[at] for at in around], [buffers[at] for at in around])
        self._read_blocks(path, blocks, wanted)

    def map(self, path: str) -> memoryview:
        """Return a read-only view of an object: of a kept file the processes of a node share the memory."""
        blocks = self._blocks(path)
        disk = self.cache.disk
        if blocks is None or not blocks.sha256 or disk is None:
            return self.origin.map(path)
        found = disk.map(blocks)
        if found is None:
            # As for a read, though nothing is copied: another process may be fetching it.
            self._bring(path, blocks, {0: ()})
            found = disk.map(blocks)
        return self.origin.map(path) if found is None else found

    def put_new(self, path: str, data: bytes) -> None:
        """Write an object to the origin; see `ByteStore.put_new`."""
        self.origin.put_new(path, data)

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        """Write an object to the origin; see `ByteStore.put_stream`."""
        self.origin.put_stream(path, chunks, num_bytes)

    def list(self, prefix: str) -> list[str]:
        """Return the sorted names of the origin; see `ByteStore.list`."""
        return self.origin.list(prefix)

    # ---- beyond a plain store --------------------------------------------------------------------

    def know(self, path: str, blocks: ObjectBlocks) -> None:
        """Say what an object is that nobody was bound for, such as a table beside a dataset."""
        with self._lock:
            self._known[path] = blocks

    def num_bytes_ahead(self, path: str, ranges: Sequence[ByteRange]) -> int:
        """Return the bytes of the blocks that ranges need, kept or not."""
        blocks = self._blocks(path)
        if blocks is None:
            return 0
        return sum(blocks.span(number).num_bytes for number in _numbers(blocks, ranges))

    def read_ahead(self, path: str, ranges: Sequence[ByteRange]) -> Callable[[], None] | None:
        """Read what ranges need and nobody keeps or fetches; publishing it is left to the caller.

        Returns:
            What checks and publishes it: call it once, in any thread, for others wait for the blocks
            meanwhile. It may raise a `StorageError`. None where there is nothing to publish.

        Raises:
            StorageError: The origin cannot be read.
        """
        blocks = self._blocks(path)
        if blocks is None:
            return None
        numbers = _numbers(blocks, ranges)
        if not numbers:
            return None
        home = self.cache.home
        claims = home.claim(blocks, numbers, is_ahead=True)
        ours = [number for number, claim in zip(numbers, claims, strict=True) if claim is Claim.OURS]
        if not ours:
            return None
        try:
            with _released_on_error(home, blocks, ours):
                memory = {number: _memory(blocks, number, ()) for number in ours}
                parts = [(blocks.span(number).start, payload) for number, payload in memory.items()]
                self._read_origin(path, parts, len(ours))
        except ShortReadError:
            return None  # whoever reads it says so
        return partial(self._settle, home, path, blocks, memory)

    def drop(self, path: str, ranges: Sequence[ByteRange]) -> None:
        """Forget the blocks of ranges, whose bytes were found to be wrong."""
        blocks = self._blocks(path)
        if blocks is not None:
            self._drop(blocks, _numbers(blocks, ranges))

    # ---- inside ----------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._known: OrderedDict[str, ObjectBlocks | None] = OrderedDict()

    def _blocks(self, path: str) -> ObjectBlocks | None:
        if self._blocks_of is None or not self.cache.is_on:
            return None
        if self._pid != os.getpid():
            # After a fork the parent's lock may be held by a thread that does not exist here.
            self._reset()
        with self._lock:
            if path in self._known:
                self._known.move_to_end(path)
                return self._known[path]
        # Outside the lock: it may read an index, through this store.
        blocks = self._blocks_of(path)
        with self._lock:
            self._known[path] = blocks
            if len(self._known) > _MAX_OBJECTS:
                self._known.popitem(last=False)
        return blocks

    def _drop(self, blocks: ObjectBlocks, numbers: Sequence[int]) -> None:
        for number in numbers:
            for tier in self.cache.tiers:
                tier.drop(blocks, number)

    def _read_blocks(self, path: str, blocks: ObjectBlocks, wanted: _Wanted) -> None:
        tiers = self.cache.named_tiers
        missing = {
            number: pieces
            for number, pieces in wanted.items()
            if not self._read_kept(tiers, blocks, number, pieces)
        }
        self._bring(path, blocks, missing)

    def _read_kept(
        self,
        tiers: Sequence[tuple[str, Tier]],
        blocks: ObjectBlocks,
        number: int,
        pieces: Sequence[Piece],
    ) -> bool:
        num_bytes = sum(piece.buffer.nbytes for piece in pieces)
        for name, tier in tiers:
            start = time.perf_counter()
            if tier.read(blocks, number, pieces):
                self.cache.counters.add(name, time.perf_counter() - start, num_bytes, 1)
                return True
        return False

    def _bring(self, path: str, blocks: ObjectBlocks, missing: _Wanted) -> None:
        """Fetch blocks that are not kept, each by one process of the node, and fill what is wanted."""
        home, left = self.cache.home, dict(missing)
        given_up: set[int] = set()
        while left:
            numbers: dict[Claim, list[int]] = {claim: [] for claim in Claim}
            for number, claim in zip(left, home.claim(blocks, list(left), is_ahead=False), strict=True):
                numbers[claim].append(number)
            ours = numbers[Claim.OURS]
            busy = [number for number in numbers[Claim.BUSY] if number not in given_up]
            passing = numbers[Claim.REFUSED] + [
                number
                for number in (*numbers[Claim.KEPT], *given_up.intersection(numbers[Claim.BUSY]))
                if not self._read_kept(self.cache.named_tiers, blocks, number, left[number])
            ]
            # What is ours first: whoever waits for it must not wait for what we wait for.
            self._fetch(home, path, blocks, left, ours, passing)
            left = {number: left[number] for number in busy}
            given_up |= {number for number in busy if not self._wait(home, blocks, number)}

    def _wait(self, home: Tier, blocks: ObjectBlocks, number: int) -> bool:
        start = time.perf_counter()
        is_done = home.wait(blocks, number, self.cache.config.wait_s)
        self.cache.counters.add("cache_wait", time.perf_counter() - start, 0, 1)
        return is_done

    def _fetch(
        self,
        home: Tier,
        path: str,
        blocks: ObjectBlocks,
        wanted: _Wanted,
        ours: Sequence[int],
        passing: Sequence[int],
    ) -> None:
        """Read blocks that are ours whole and keep them, and of the others what is wanted."""
        if not ours and not passing:
            return
        memory = {number: _memory(blocks, number, wanted[number]) for number in ours}
        parts = [(blocks.span(number).start, payload) for number, payload in memory.items()]
        for number in passing:
            start = blocks.span(number).start
            parts += [(start + piece.start, piece.buffer) for piece in wanted[number]]
        try:
            with _released_on_error(home, blocks, ours):
                self._read_origin(path, parts, len(ours) + len(passing))
        except ShortReadError:
            # The object ends inside a block: read no more than what was asked for, if it was.
            parts = [
                (blocks.span(number).start + piece.start, piece.buffer)
                for number in (*ours, *passing)
                for piece in wanted[number]
            ]
            self._read_origin(path, parts, 0)
            return
        self._settle(home, path, blocks, memory)
        for number, payload in memory.items():
            pieces = wanted[number]
            if not (len(pieces) == 1 and pieces[0].buffer is payload):
                copy_pieces(payload, pieces)

    def _settle(self, home: Tier, path: str, blocks: ObjectBlocks, memory: Mapping[int, memoryview]) -> None:
        """Check blocks that are ours and were read, and keep those that are right."""
        with _released_on_error(home, blocks, list(memory)):
            sound = {
                number: payload
                for number, payload in memory.items()
                if self._is_sound(path, blocks, number, payload)
            }
            self._keep(home, blocks, sound)
        home.release(blocks, [number for number in memory if number not in sound])

    def _read_origin(self, path: str, parts: Sequence[tuple[int, memoryview]], num_blocks: int) -> None:
        if not parts:
            return
        ascending = sorted(parts, key=lambda part: part[0])
        ranges = [ByteRange(start, buffer.nbytes) for start, buffer in ascending]
        num_bytes = sum(span.num_bytes for span in ranges)
        with self.cache.counters.timed("cache_origin", num_bytes, num_blocks):
            self.origin.read_ranges(path, ranges, [buffer for _, buffer in ascending])

    def _is_sound(self, path: str, blocks: ObjectBlocks, number: int, payload: memoryview) -> bool:
        """Check a block before it is published; once more from the origin if it came wrong."""
        if blocks.is_sound(number, payload):
            return True
        self._read_origin(path, [(blocks.span(number).start, payload)], 0)
        if blocks.is_sound(number, payload):
            return True
        self.cache.counters.add("cache_unsound", num_bytes=payload.nbytes, num_items=1)
        return False

    def _keep(self, home: Tier, blocks: ObjectBlocks, payloads: Mapping[int, memoryview]) -> None:
        home.keep(blocks, payloads)
        memory = self.cache.memory
        if memory is not None and home is not memory:
            numbers = list(payloads)
            claims = memory.claim(blocks, numbers, is_ahead=False)
            ours = [number for number, claim in zip(numbers, claims, strict=True) if claim is Claim.OURS]
            memory.keep(blocks, {number: payloads[number] for number in ours})


@contextmanager
def _released_on_error(home: Tier, blocks: ObjectBlocks, numbers: Sequence[int]) -> Iterator[None]:
    """Give claims back where fetching or keeping their blocks fails, so that nobody waits for them."""
    try:
        yield
    except BaseException:
        home.release(blocks, numbers)
        raise


def _memory(blocks: ObjectBlocks, number: int, pieces: Sequence[Piece]) -> memoryview:
    """Return where a block is read to: the reader's own buffer, where that takes all of it."""
    num_bytes = blocks.span(number).num_bytes
    if len(pieces) == 1 and pieces[0].buffer.nbytes == num_bytes:
        return pieces[0].buffer
    # Not a bytearray: that would be written once more, with zeros.
    return np.empty(num_bytes, np.uint8).data


def _numbers(blocks: ObjectBlocks, ranges: Sequence[ByteRange]) -> list[int]:
    """Return the blocks that hold ranges, ascending."""
    return sorted({number for number in blocks.find(ranges) if number >= 0})


def read_afresh(
    store: ByteStore, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]
) -> None:
    """Read again what came wrong: past whatever a cache keeps of it, see `ByteStore.read_ranges`."""
    if isinstance(store, CachedStore):
        store.drop(path, ranges)
    store.read_ranges(path, ranges, buffers)
