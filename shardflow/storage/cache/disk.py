"""Disk tier: a folder shared by all processes of a node, where each block is fetched by one of them.

A claim is a catalog row with the claimant's slot, and a slot is a file lock that the kernel releases when
its process ends. Whoever finds the claim of a dead process settles it: a published block is kept, anything
else is treated as never begun. A fault of the folder disables the tier with one warning, and reads continue
from the origin.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ShortReadError
from shardflow.storage.cache.blocks import Claim, Int64Array, ObjectBlocks, Piece
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.eviction import Evictor, Shrinker, incoming_name
from shardflow.storage.cache.folder import (
    ABSENT,
    BLOCKED,
    CLAIMED,
    READY,
    BlockDamagedError,
    CacheFolder,
    Catalog,
    CatalogObject,
    Header,
    pages_of,
)
from shardflow.storage.cache.forecast import AccessForecast, decayed
from shardflow.storage.local import read_scattered
from shardflow.telemetry import StageCounters

_LOGGER = logging.getLogger(__name__)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PAUSE_S = 10.0
_LOOK_AT_HOLDER_S = 0.05
_READ_CLOCK_EVERY = 32
_NOTES_PER_HALF_LIFE = 64
_MAX_NOTED = 1 << 16
_DIRTY, _CLEAN = b"D", b"C"


class DiskTier:
    """Keeps blocks in a folder; see `Tier`.

    Args:
        path: The folder.
        config: Limits and policy.
        counters: Receive ``cache_disk_evicted``, ``cache_poisoned`` and ``cache_fault``.

    Raises:
        ConfigError: The folder is not empty and no cache.
        OSError: The folder cannot be used.
        ValueError: Its catalog is damaged.
    """

    def __init__(self, path: Path, config: CacheConfig, counters: StageCounters) -> None:
        self._config = config
        self._counters = counters
        self._folder = CacheFolder(path)
        self._slot, self._slot_file = self._folder.take_slot()
        try:
            self._catalog = Catalog(self._folder)
            self.forecast = AccessForecast(self._folder, self._slot)
            self._evictor = Evictor(config, self._folder, self._catalog, self.forecast, counters)
            self.shrinker = Shrinker(self._catalog, self._evictor, self._fail)
            self._recover()
        except BaseException:
            os.close(self._slot_file)
            self._slot_file = -1
            raise
        # Clock at the last use that this process recorded, by row.
        self._noted: dict[int, int] = {}
        self._clock = self._num_reads = 0
        self._is_off = False
        self._paused_until = 0.0
        self._has_warned_of_space = False

    @property
    def is_off(self) -> bool:
        """Whether a fault disabled the folder."""
        return self._is_off

    @property
    def num_bytes(self) -> int:
        """Bytes of published and claimed blocks, according to the catalog."""
        return self._catalog.header().used_pages * 4096

    @property
    def room_bytes(self) -> int:
        """Bytes that the folder can hold: its own, and the free space of the disk."""
        return self.num_bytes + max(self._folder.free_bytes() - self._config.min_free_bytes, 0)

    # ---- Tier ------------------------------------------------------------------------------------

    def has(self, blocks: ObjectBlocks, numbers: Sequence[int] | Int64Array) -> NDArray[np.bool_]:
        """Return which blocks are published according to the catalog; see `Tier.has`."""
        if not self._is_off and len(numbers) and time.monotonic() >= self._paused_until:
            with self._guarded():
                wanted = np.asarray(numbers)
                first, last = int(wanted.min()), int(wanted.max())
                row = self._catalog.object_of(blocks).first_row + first
                states = self._catalog.rows(row, last - first + 1)["state"]
                return np.asarray(states[wanted - first] == READY, np.bool_)
        return np.zeros(len(numbers), bool)

    def read(self, blocks: ObjectBlocks, wanted: Mapping[int, Sequence[Piece]]) -> list[int]:
        """Fill pieces of blocks from their files; see `Tier.read`."""
        found: list[int] = []
        damaged: list[int] = []
        if self._is_off:
            return found
        with self._guarded():
            try:
                numbers = list(wanted)
                sizes = (blocks.stops[numbers] - blocks.starts[numbers]).tolist()
                with self._folder.opened(blocks.name) as folder:
                    for (number, pieces), num_bytes in zip(wanted.items(), sizes, strict=True):
                        try:
                            self._read_block(folder, number, num_bytes, pieces)
                        except BlockDamagedError:
                            damaged.append(number)
                        except (FileNotFoundError, ShortReadError):  # ShortReadError: cut while it is read
                            continue
                        else:
                            found.append(number)
            except FileNotFoundError:
                pass
            except BlockDamagedError:
                damaged = list(wanted)
            if found:  # an object of which nothing was ever cached has no rows
                self._note_uses(blocks, found)
        for number in damaged:
            self.drop(blocks, number)
        return found

    def _read_block(self, folder: int, number: int, num_bytes: int, pieces: Sequence[Piece]) -> None:
        descriptor = self._folder.open_block_in(folder, number, num_bytes)
        try:
            starts, buffers = [piece.start for piece in pieces], [piece.buffer for piece in pieces]
            read_scattered(descriptor, "a block", starts, buffers)
        finally:
            os.close(descriptor)

    def claim(self, blocks: ObjectBlocks, numbers: Sequence[int], *, is_ahead: bool) -> list[Claim]:
        """Ask to fetch blocks; see `Tier.claim`."""
        claims = [Claim.REFUSED] * len(numbers)
        if self._is_off or time.monotonic() < self._paused_until:
            return claims
        with self._guarded():
            known = self._catalog.object_of(blocks)
            # In later epochs most blocks are there. Reading ahead needs no lock to see that: of a block whose
            # file was deleted from outside, the read itself takes notice.
            is_kept = self.has(blocks, numbers).tolist() if is_ahead else [False] * len(numbers)
            claims = [Claim.KEPT if kept else Claim.REFUSED for kept in is_kept]
            places = [place for place, kept in enumerate(is_kept) if not kept]
            if not places:
                return claims
            wanted = [numbers[place] for place in places]
            first, stop = blocks.unit_first[wanted], blocks.unit_stop[wanted]
            distances = self.forecast.distances(blocks.space, first, stop, is_scan=is_ahead).tolist()
            with self._catalog.locked():
                header = self._catalog.header()
                for place, distance in zip(places, distances, strict=True):
                    claims[place] = self._claim(header, known, blocks, numbers[place], distance)
                self._catalog.write_header(header)
                self._clock = header.clock
        return claims

    def keep(self, blocks: ObjectBlocks, payloads: Mapping[int, memoryview]) -> None:
        """Publish blocks; see `Tier.keep`."""
        states: dict[int, int] = {}
        for number, payload in payloads.items():
            states[number] = ABSENT
            with self._guarded():
                known = self._catalog.object_of(blocks)
                incoming = incoming_name(known.first_row + number, self._slot)
                is_kept = self._folder.publish(blocks.name, number, incoming, payload)
                states[number] = READY if is_kept else BLOCKED
        self._finish(blocks, states)

    def release(self, blocks: ObjectBlocks, numbers: Sequence[int]) -> None:
        """Give claims back; see `Tier.release`."""
        self._finish(blocks, dict.fromkeys(numbers, ABSENT))

    def wait(self, blocks: ObjectBlocks, number: int, timeout_s: float) -> bool:
        """Wait for another thread or process; see `Tier.wait`."""
        deadline = time.monotonic() + timeout_s
        pause_s, look_at = 0.0005, time.monotonic() + _LOOK_AT_HOLDER_S
        with self._guarded():
            row = self._catalog.object_of(blocks).first_row + number
            while True:
                state, _, owner = self._catalog.rows(row, 1)[0].tolist()[:3]
                if state != CLAIMED:
                    break
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + _LOOK_AT_HOLDER_S
                    if not self._folder.is_slot_held(owner):
                        break
                if now >= deadline:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.01)
        return True

    def drop(self, blocks: ObjectBlocks, number: int) -> None:
        """Delete a block whose bytes are wrong; see `Tier.drop`."""
        if self._is_off:
            return
        with self._guarded():
            if not self._is_there(blocks.name, number):
                return
            self._counters.add("cache_poisoned", num_bytes=blocks.span(number).num_bytes, num_items=1)
            known = self._catalog.object_of(blocks)
            row = known.first_row + number
            with self._catalog.locked():
                header, rows = self._catalog.header(), self._catalog.rows(row, 1)
                if rows["state"][0] == CLAIMED:
                    return  # being fetched again already
                if rows["state"][0] == READY:
                    header.used_pages -= min(header.used_pages, int(rows["pages"][0]))
                is_gone = self._folder.remove_block(known.name, number)
                rows["state"], rows["pages"] = (ABSENT if is_gone else BLOCKED), 0
                self._catalog.write_rows(row, rows)
                self._catalog.write_header(header)

    def map(self, blocks: ObjectBlocks) -> memoryview | None:
        """Return a read-only map of an object that is one block; None if it is not cached.

        The bytes stay readable after the block is evicted.
        """
        num_bytes = blocks.span(0).num_bytes
        descriptor = self._open(blocks, 0) if num_bytes else None
        if descriptor is None:
            return None
        try:
            found = memoryview(mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)
        if not blocks.is_sound(0, found):
            self.drop(blocks, 0)
            return None
        self._note_uses(blocks, [0])
        return found

    def close(self) -> None:
        """Release the slot; the blocks stay for other processes."""
        self.shrinker.close()
        if self._slot_file >= 0:
            self.forecast.close()
            os.pwrite(self._slot_file, _CLEAN, 0)
            os.close(self._slot_file)
            self._slot_file = -1
        self._is_off = True

    def __del__(self) -> None:
        """Close the descriptor that holds the slot."""
        if getattr(self, "_slot_file", -1) >= 0:
            os.close(self._slot_file)

    # ---- inside ----------------------------------------------------------------------------------

    def _claim(
        self, header: Header, known: CatalogObject, blocks: ObjectBlocks, number: int, distance: float
    ) -> Claim:
        """Claim one block; under the lock."""
        row = known.first_row + number
        num_bytes = blocks.span(number).num_bytes
        rows = self._catalog.rows(row, 1)
        state, owner = int(rows["state"][0]), int(rows["owner"][0])
        if state == BLOCKED:
            return Claim.REFUSED
        if state == CLAIMED:
            if self._folder.is_slot_held(owner):
                return Claim.BUSY
            self._evictor.settle(header, known, number, rows)
            state = int(rows["state"][0])
        if state == READY:
            if self._folder.has_block(known.name, number, num_bytes):
                return Claim.KEPT
            # Its file was deleted from outside.
            header.used_pages -= min(header.used_pages, int(rows["pages"][0]))
            rows["state"] = ABSENT
            self._catalog.write_rows(row, rows)
        pages = pages_of(num_bytes)
        if not self._evictor.make_room(header, pages, distance):
            return Claim.REFUSED
        header.used_pages += pages
        header.claimed_pages += pages
        header.clock += 1
        # Totals first: a kill between the two writes leaves them too high, which the next scan corrects.
        self._catalog.write_header(header)
        rows["state"], rows["owner"], rows["pages"] = CLAIMED, self._slot, pages
        rows["last_use"], rows["frequency"] = header.clock & 0xFFFFFFFF, 1.0
        self._catalog.write_rows(row, rows)
        return Claim.OURS

    def _is_there(self, name: str, number: int) -> bool:
        """Return whether anything exists in a block's place, ours or not."""
        try:
            os.close(self._folder.open_block(name, number, None))
        except FileNotFoundError:
            return False
        except BlockDamagedError:
            pass
        return True

    def _finish(self, blocks: ObjectBlocks, states: Mapping[int, int]) -> None:
        """Record the results of our claims."""
        if not states:
            return
        with self._guarded():
            known = self._catalog.object_of(blocks)
            with self._catalog.locked():
                header = self._catalog.header()
                for number, state in states.items():
                    row = known.first_row + number
                    rows = self._catalog.rows(row, 1)
                    if (int(rows["state"][0]), int(rows["owner"][0])) != (CLAIMED, self._slot):
                        continue
                    pages = int(rows["pages"][0])
                    header.claimed_pages -= min(header.claimed_pages, pages)
                    if state != READY:
                        header.used_pages -= min(header.used_pages, pages)
                    rows["state"] = state
                    self._catalog.write_rows(row, rows)
                self._catalog.write_header(header)

    def _note_uses(self, blocks: ObjectBlocks, numbers: Sequence[int]) -> None:
        """Record that blocks were read, except those recorded a small part of a half-life ago."""
        first_row = self._catalog.object_of(blocks).first_row
        before, self._num_reads = self._num_reads, self._num_reads + len(numbers)
        if not before or before // _READ_CLOCK_EVERY != self._num_reads // _READ_CLOCK_EVERY:
            self._clock = self._catalog.header().clock
        clock, half_life = self._clock, self._evictor.half_life
        noted = self._noted
        for row in (first_row + number for number in numbers):
            last = noted.get(row)
            if last is not None and clock - last < half_life / _NOTES_PER_HALF_LIFE:
                continue
            if len(noted) >= _MAX_NOTED:
                noted.clear()
            noted[row] = clock
            found = self._catalog.rows(row, 1)[0]
            age = max(clock - int(found["last_use"]), 0)
            self._catalog.write_use(row, clock, decayed(float(found["frequency"]), age, half_life) + 1.0)

    def _recover(self) -> None:
        """Settle the claims and unfinished files of the last process with this slot."""
        if os.pread(self._slot_file, 1, 0) == _DIRTY:
            with self._catalog.locked():
                header = self._catalog.header()
                self._evictor.scan(header, dead_slot=self._slot)
                self._catalog.write_header(header)
            suffix = incoming_name(0, self._slot).partition("-")[2]
            for name in self._folder.names("incoming"):
                if name.endswith(f"-{suffix}"):
                    self._folder.remove("incoming", name)
        os.pwrite(self._slot_file, _DIRTY, 0)

    def _open(self, blocks: ObjectBlocks, number: int) -> int | None:
        """Open a cached block; a damaged one is dropped."""
        if self._is_off:
            return None
        with self._guarded():
            try:
                return self._folder.open_block(blocks.name, number, blocks.span(number).num_bytes)
            except FileNotFoundError:
                return None
            except BlockDamagedError:
                self.drop(blocks, number)
        return None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Disable the folder on a fault."""
        try:
            yield
        except (OSError, ValueError, BlockDamagedError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Count a fault, warn once, and disable the folder; on a full disk only for a while."""
        self._counters.add("cache_fault", num_items=1)
        code = getattr(error, "errno", None)
        name = errno.errorcode.get(code or 0, type(error).__name__)
        if code in _NO_SPACE:
            self._paused_until = time.monotonic() + _PAUSE_S
            if not self._has_warned_of_space:
                self._has_warned_of_space = True
                _LOGGER.warning(
                    "the disk of the cache is full (%s): blocks are read from the origin and not cached; "
                    "free disk space, or lower max_bytes",
                    name,
                )
        elif not self._is_off:
            self._is_off = True
            _LOGGER.warning(
                "the cache directory failed (%s): reading from the origin; make sure that it exists and is "
                "writable, and restart",
                name,
            )
