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

from shardflow.errors import ConfigError, ProofError, ShortReadError
from shardflow.storage.cache.blocks import Claim, ObjectBlocks, Piece, Tier, copy_pieces
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.disk import DiskTier
from shardflow.storage.cache.forecast import AccessForecast
from shardflow.storage.cache.memory import MemoryTier
from shardflow.storage.store import ByteRange, ByteStore, check_ranges
from shardflow.telemetry import StageCounters

_LOGGER = logging.getLogger(__name__)
BlocksOf = Callable[[str], ObjectBlocks | None]
# With a full shuffle each sample is in another shard, and its blocks take longer to find than to read.
_MAX_KNOWN_BYTES = 64 << 20
# How long a look at all blocks of an object answers for them, in seconds.
_LOOK_S = 1.0
_MAX_LOOKS = 4096
_NO_BLOCKS_BYTES = 256  # the path of an object that is not cached, and its entry
_Wanted = Mapping[int, Sequence[Piece]]


class Cache:
    """The cache tiers of a process. Thread-safe; pickles as its settings.

    Datasets that are read together, such as those of a blend, share one and its limits.

    Args:
        config: The settings.

    Raises:
        ConfigError: The directory is not empty and no cache. One that cannot be used (read-only, no space)
            only logs a warning, and reads go to the origin.
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
        """Pickle the settings."""
        return type(self), (self.config,)

    @property
    def is_on(self) -> bool:
        """Whether any tier is usable."""
        return bool(self.tiers)

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier; None if there is none or it failed."""
        self._check_process()
        return None if self._disk is None or self._disk.is_off else self._disk

    @property
    def memory(self) -> MemoryTier | None:
        """The memory tier; None if there is none."""
        self._check_process()
        return self._memory

    @property
    def named_tiers(self) -> list[tuple[str, Tier]]:
        """The usable tiers, the nearest first, with the stage that counts their hits."""
        tiers: dict[str, Tier | None] = {"cache_ram": self.memory, "cache_disk": self.disk}
        return [(name, tier) for name, tier in tiers.items() if tier is not None]

    @property
    def tiers(self) -> list[Tier]:
        """The usable tiers, the nearest first."""
        return [tier for _, tier in self.named_tiers]

    @property
    def home(self) -> Tier:
        """The tier in which blocks are claimed: the one that most processes share."""
        self._check_process()
        # Without another tier a failed folder is right: it refuses every claim.
        home = self.disk or self._memory or self._disk
        if home is None:
            raise ConfigError("a cache must have a directory or ram_bytes, got neither; set one.")
        return home

    @property
    def forecast(self) -> AccessForecast:
        """Forecast of the next uses of blocks."""
        self._check_process()
        return self._forecast

    def change(self, changes: Mapping[str, int]) -> None:
        """Change settings while the cache is in use, without an effect on the bytes that are read.

        Excess memory is freed at once; a folder shrinks to a lower limit in the background.

        Args:
            changes: ``ram_bytes``, ``max_bytes``, ``read_ahead_bytes`` or ``read_ahead_threads``; the caller
                must pass the last two on to the loaders that read through this cache.

        Raises:
            ConfigError: A value is not allowed, see `CacheConfig`; nothing changes.
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
        """Release the tiers; blocks on disk stay for other processes."""
        with self._lock:
            if self._pid == os.getpid():
                for tier in (self._disk, self._memory):
                    if tier is not None:
                        tier.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            # After a fork, locks may be held by threads that do not exist here, and the slot is the parent's.
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
                "cannot use the cache directory (%s): reading from the origin; make sure that it is a "
                "writable folder of this node, and restart",
                code,
            )
            self.counters.add("cache_fault", num_items=1)
            return None


class CachedStore:
    """Byte store that reads another one through a cache. Thread-safe; pickles as its settings.

    Args:
        origin: The store with the objects.
        cache: The cache of this process; stores may share one.
    """

    def __init__(self, origin: ByteStore, cache: Cache) -> None:
        self.origin = origin
        self.cache = cache
        self._blocks_of: BlocksOf | None = None
        self._reset()

    def bind(self, blocks_of: BlocksOf) -> None:
        """Set the function that declares the digests and pieces of objects.

        Args:
            blocks_of: Returns the blocks of a path, None for an object that is not cached. May read through
                this store.
        """
        self._blocks_of = blocks_of

    @property
    def url(self) -> str:
        """URL of the origin."""
        return self.origin.url

    def __reduce__(self) -> tuple[type[CachedStore], tuple[ByteStore, Cache]]:
        """Pickle origin and cache, without declared objects."""
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
            # Bytes without a checksum, such as tar headers.
            self.origin.read_ranges(path, [ranges[at] for at in around], [buffers[at] for at in around])
        self._read_blocks(path, blocks, wanted)
        if blocks.piece_sha256 is not None:
            self._prove(path, blocks, ranges, buffers)

    def map(self, path: str) -> memoryview:
        """Return a read-only view of an object; processes of a node share the memory of a cached file."""
        blocks = self._blocks(path)
        disk = self.cache.disk
        if blocks is None or not blocks.sha256 or disk is None:
            return self.origin.map(path)
        found = disk.map(blocks)
        if found is None:
            # As for a read, but without copying: another process may be fetching it.
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
        """Declare an object that `bind` does not cover, such as a sidecar table."""
        self._remember(path, blocks)

    def is_kept(self, path: str) -> bool:
        """Return whether all blocks of an object are cached, or were within the last second: a hint."""
        now = time.monotonic()
        looked, is_kept = self._looks.get(path, (-_LOOK_S, False))
        if now - looked >= _LOOK_S:
            blocks = self._blocks(path)
            is_kept = blocks is not None and bool(
                self.cache.home.has(blocks, np.arange(blocks.num_blocks)).all()
            )
            if len(self._looks) >= _MAX_LOOKS:
                self._looks.clear()
            self._looks[path] = now, is_kept
        return is_kept

    def num_bytes_ahead(self, path: str, ranges: Sequence[ByteRange]) -> int:
        """Return the bytes of the blocks that ranges need, cached or not."""
        blocks = self._blocks(path)
        if blocks is None:
            return 0
        numbers = _numbers(blocks, ranges)
        return int((blocks.stops[numbers] - blocks.starts[numbers]).sum())

    def read_ahead(self, path: str, ranges: Sequence[ByteRange]) -> Callable[[], None] | None:
        """Fetch the blocks that ranges need and that nobody has cached or is fetching.

        Returns:
            A function that checks and publishes them: call it once, in any thread; others wait for the blocks
            meanwhile. It may raise a `StorageError`. None if there is nothing to publish.

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
            return None  # the read itself reports it
        return partial(self._settle, home, path, blocks, memory)

    def drop(self, path: str, ranges: Sequence[ByteRange]) -> None:
        """Drop the blocks of ranges whose bytes are wrong."""
        blocks = self._blocks(path)
        if blocks is not None:
            self._drop(blocks, _numbers(blocks, ranges))

    # ---- inside ----------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._known: OrderedDict[str, ObjectBlocks | None] = OrderedDict()
        self._known_bytes = 0
        self._looks: dict[str, tuple[float, bool]] = {}

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
        self._remember(path, blocks)
        return blocks

    def _remember(self, path: str, blocks: ObjectBlocks | None) -> None:
        """Remember the blocks of an object; beyond the bound, forget the least recently used objects."""
        with self._lock:
            if path in self._known:
                self._known_bytes -= _held_bytes(self._known.pop(path))
            self._known[path] = blocks
            self._known_bytes += _held_bytes(blocks)
            while self._known_bytes > _MAX_KNOWN_BYTES and len(self._known) > 1:
                self._known_bytes -= _held_bytes(self._known.popitem(last=False)[1])

    def _prove(
        self, path: str, blocks: ObjectBlocks, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]
    ) -> None:
        """Compare what was read with the digests of its pieces, whatever tier or origin it came from."""
        start = time.perf_counter()
        num_bytes = num_pieces = 0
        for span, buffer, numbers in zip(ranges, buffers, blocks.pieces_in(ranges), strict=True):
            view = buffer.cast("B")
            for number in numbers:
                piece = blocks.piece(number)
                first, stop = piece.offset - span.offset, piece.offset - span.offset + piece.num_bytes
                if first < 0 or stop > span.num_bytes:
                    # A part of a piece proves nothing.
                    whole = np.empty(piece.num_bytes, np.uint8).data
                    self.read_ranges(path, [piece], [whole])
                    begin, end = max(first, 0), min(stop, span.num_bytes)
                    view[begin:end] = whole[begin - first : end - first]
                    continue
                if not blocks.is_proven(number, view[first:stop]):
                    self._read_forged(path, blocks, number, view[first:stop])
                num_bytes += piece.num_bytes
                num_pieces += 1
        self.cache.counters.add("cache_proof", time.perf_counter() - start, num_bytes, num_pieces)

    def _read_forged(self, path: str, blocks: ObjectBlocks, number: int, payload: memoryview) -> None:
        """Read a piece without its digest once more from the origin.

        What is merely damaged there is left to the reader, which finds it by its checksum.

        Raises:
            ProofError: The origin has bytes that were made to fit the checksum.
        """
        piece = blocks.piece(number)
        self.drop(path, [piece])
        self._read_origin(path, [(piece.offset, payload)], 0)
        if not blocks.is_proven(number, payload) and blocks.has_checksum(number, payload):
            raise ProofError(
                f"{path} must hold the signed bytes at offset {piece.offset} ({piece.num_bytes} bytes), got "
                "others that were made to have their crc32c, from the store itself; find out who wrote the "
                "shard, run `shardflow verify`, and fetch it again from where it was signed."
            )

    def _drop(self, blocks: ObjectBlocks, numbers: Sequence[int]) -> None:
        for number in numbers:
            for tier in self.cache.tiers:
                tier.drop(blocks, number)

    def _read_blocks(self, path: str, blocks: ObjectBlocks, wanted: _Wanted) -> None:
        self._bring(path, blocks, self._read_kept(blocks, wanted))

    def _read_kept(self, blocks: ObjectBlocks, wanted: _Wanted) -> _Wanted:
        """Fill the pieces of cached blocks, and return those of the others."""
        left = dict(wanted)
        for name, tier in self.cache.named_tiers:
            if not left:
                break
            start = time.perf_counter()
            found = tier.read(blocks, left)
            pieces = [piece for number in found for piece in left.pop(number)]
            if found:
                num_bytes = sum(piece.buffer.nbytes for piece in pieces)
                self.cache.counters.add(name, time.perf_counter() - start, num_bytes, len(found))
        return left

    def _bring(self, path: str, blocks: ObjectBlocks, missing: _Wanted) -> None:
        """Fetch missing blocks, each by one process of the node, and fill the wanted pieces."""
        home, left = self.cache.home, dict(missing)
        given_up: set[int] = set()
        while left:
            numbers: dict[Claim, list[int]] = {claim: [] for claim in Claim}
            for number, claim in zip(left, home.claim(blocks, list(left), is_ahead=False), strict=True):
                numbers[claim].append(number)
            ours = numbers[Claim.OURS]
            busy = [number for number in numbers[Claim.BUSY] if number not in given_up]
            kept = (*numbers[Claim.KEPT], *given_up.intersection(numbers[Claim.BUSY]))
            passing = [
                *numbers[Claim.REFUSED],
                *self._read_kept(blocks, {number: left[number] for number in kept}),
            ]
            # Our own blocks first, so that waiting processes do not also wait for what we wait for.
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
        """Read claimed blocks completely and keep them, and only the wanted pieces of the others."""
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
            # The object ends within a block: read only the wanted pieces.
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
        """Check the blocks that were read, and keep the correct ones."""
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
        """Check a block before it is published; read a wrong one once more from the origin."""
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
    """Release claims if fetching or keeping their blocks fails, so that nobody waits for them."""
    try:
        yield
    except BaseException:
        home.release(blocks, numbers)
        raise


def _held_bytes(blocks: ObjectBlocks | None) -> int:
    return _NO_BLOCKS_BYTES if blocks is None else blocks.held_bytes


def _memory(blocks: ObjectBlocks, number: int, pieces: Sequence[Piece]) -> memoryview:
    """Return the buffer for a block: the reader's own one if that holds all of it."""
    num_bytes = blocks.span(number).num_bytes
    if len(pieces) == 1 and pieces[0].buffer.nbytes == num_bytes:
        return pieces[0].buffer
    # Not a bytearray, which would be filled with zeros first.
    return np.empty(num_bytes, np.uint8).data


def _numbers(blocks: ObjectBlocks, ranges: Sequence[ByteRange]) -> list[int]:
    """Return the blocks that hold ranges, ascending."""
    return sorted({number for number in blocks.find(ranges) if number >= 0})


def read_afresh(
    store: ByteStore, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]
) -> None:
    """Drop ranges with wrong bytes from the cache and read them again from the origin."""
    if isinstance(store, CachedStore):
        store.drop(path, ranges)
    store.read_ranges(path, ranges, buffers)
