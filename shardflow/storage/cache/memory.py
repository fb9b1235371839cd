"""Memory tier: whole blocks in the memory of one process, up to a byte limit.

Meant for datasets behind a network where no disk is available. Beside a cache folder it only duplicates what
the page cache holds once for all processes of the node.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardflow.storage.cache.blocks import Claim, Int64Array, ObjectBlocks, Piece, copy_pieces
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.forecast import AccessForecast, decayed, eviction_order, is_worth_keeping
from shardflow.telemetry import StageCounters

_Key = tuple[str, int]
_BATCH_SHARE = 32


@dataclass(slots=True)
class _Kept:
    """A cached block, or a claim if it has no payload yet."""

    num_bytes: int
    space: str
    unit_first: int
    unit_stop: int
    last_use: int
    frequency: float = 1.0
    payload: memoryview | None = None


class MemoryTier:
    """Keeps blocks in memory; see `Tier`.

    Args:
        config: Limit and policy.
        forecast: Next uses of blocks.
        counters: Receive the stage ``cache_ram_evicted``.
    """

    def __init__(self, config: CacheConfig, forecast: AccessForecast, counters: StageCounters) -> None:
        self._max_bytes = config.ram_bytes
        self._policy = config.policy
        self._forecast = forecast
        self._counters = counters
        self._changed = threading.Condition()
        self._kept: dict[_Key, _Kept] = {}
        self._victims: deque[_Key] = deque()
        self._num_bytes = 0
        self._clock = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of cached and claimed blocks."""
        return self._num_bytes

    def bound(self, max_bytes: int) -> None:
        """Change the limit; the excess is evicted at once, claimed blocks when they arrive."""
        with self._changed:
            self._max_bytes = max_bytes
            self._victims.clear()
            self._shrink()

    def has(self, blocks: ObjectBlocks, numbers: Sequence[int] | Int64Array) -> NDArray[np.bool_]:
        """Return which blocks are kept; see `Tier.has`."""
        names = [(blocks.name, number) for number in np.asarray(numbers).tolist()]
        with self._changed:
            found = [*map(self._kept.get, names)]
            return np.array([one is not None and one.payload is not None for one in found], bool)

    def read(self, blocks: ObjectBlocks, wanted: Mapping[int, Sequence[Piece]]) -> list[int]:
        """Fill pieces of blocks; see `Tier.read`."""
        payloads: dict[int, memoryview] = {}
        with self._changed:
            for number in wanted:
                found = self._kept.get((blocks.name, number))
                if found is not None and found.payload is not None:
                    age = self._clock - found.last_use
                    found.frequency = decayed(found.frequency, age, self._half_life()) + 1.0
                    found.last_use = self._clock
                    payloads[number] = found.payload
        for number, payload in payloads.items():
            copy_pieces(payload, wanted[number])
        return list(payloads)

    def claim(self, blocks: ObjectBlocks, numbers: Sequence[int], *, is_ahead: bool) -> list[Claim]:
        """Ask to fetch blocks; see `Tier.claim`."""
        first, stop = blocks.unit_first[list(numbers)], blocks.unit_stop[list(numbers)]
        distances = self._forecast.distances(blocks.space, first, stop, is_scan=is_ahead).tolist()
        with self._changed:
            return [
                self._claim(blocks, number, distance)
                for number, distance in zip(numbers, distances, strict=True)
            ]

    def keep(self, blocks: ObjectBlocks, payloads: Mapping[int, memoryview]) -> None:
        """Keep blocks; see `Tier.keep`."""
        copies = {number: memoryview(bytes(payload)) for number, payload in payloads.items()}
        with self._changed:
            for number, payload in copies.items():
                found = self._kept.get((blocks.name, number))
                if found is not None:
                    found.payload = payload
            self._shrink()
            self._changed.notify_all()

    def release(self, blocks: ObjectBlocks, numbers: Sequence[int]) -> None:
        """Give claims back; see `Tier.release`."""
        with self._changed:
            for number in numbers:
                self._forget((blocks.name, number))
            self._changed.notify_all()

    def wait(self, blocks: ObjectBlocks, number: int, timeout_s: float) -> bool:
        """Wait for another thread; see `Tier.wait`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._is_busy((blocks.name, number)):
                if not self._changed.wait(deadline - time.monotonic()):
                    return False
        return True

    def drop(self, blocks: ObjectBlocks, number: int) -> None:
        """Forget a block; see `Tier.drop`."""
        key = (blocks.name, number)
        with self._changed:
            if key in self._kept and not self._is_busy(key):
                self._counters.add("cache_poisoned", num_bytes=self._kept[key].num_bytes, num_items=1)
                self._forget(key)

    def close(self) -> None:
        """Forget all blocks."""
        with self._changed:
            self._kept.clear()
            self._victims.clear()
            self._num_bytes = 0

    # ---- inside, under the lock ------------------------------------------------------------------

    def _claim(self, blocks: ObjectBlocks, number: int, distance: float) -> Claim:
        key = (blocks.name, number)
        found = self._kept.get(key)
        if found is not None:
            return Claim.BUSY if found.payload is None else Claim.KEPT
        num_bytes = blocks.span(number).num_bytes
        if not self._make_room(num_bytes, distance):
            return Claim.REFUSED
        self._clock += 1
        self._num_bytes += num_bytes
        self._kept[key] = _Kept(
            num_bytes,
            blocks.space,
            int(blocks.unit_first[number]),
            int(blocks.unit_stop[number]),
            self._clock,
        )
        return Claim.OURS

    def _make_room(self, num_bytes: int, distance: float) -> bool:
        if num_bytes > self._max_bytes:
            return False
        while self._num_bytes + num_bytes > self._max_bytes:
            victim = self._next_victim(num_bytes)
            if victim is None:
                return False
            kept = self._kept[victim]
            if not is_worth_keeping(self._policy, distance, self._distances([kept])[0]):
                self._victims.appendleft(victim)
                return False
            self._evict(victim)
        return True

    def _shrink(self) -> None:
        """Evict blocks down to the limit, whatever their value."""
        while self._num_bytes > self._max_bytes:
            victim = self._next_victim(self._num_bytes - self._max_bytes)
            if victim is None:
                return
            self._evict(victim)

    def _evict(self, key: _Key) -> None:
        self._counters.add("cache_ram_evicted", num_bytes=self._kept[key].num_bytes, num_items=1)
        self._forget(key)

    def _next_victim(self, num_bytes: int) -> _Key | None:
        for is_sorted in (False, True):
            while self._victims:
                key = self._victims.popleft()
                kept = self._kept.get(key)
                if kept is not None and kept.payload is not None:
                    return key
            if not is_sorted:
                self._sort_victims(num_bytes)
        return None

    def _sort_victims(self, num_bytes: int) -> None:
        """Choose the next victims, many of them with one sort."""
        keys = [key for key, kept in self._kept.items() if kept.payload is not None]
        kept = [self._kept[key] for key in keys]
        order = eviction_order(
            self._policy,
            next_use=np.array(self._distances(kept)),
            last_use=np.array([entry.last_use for entry in kept], np.float64),
            frequency=np.array([entry.frequency for entry in kept]),
            clock=self._clock,
            half_life=self._half_life(),
        )
        left = max(num_bytes, self._max_bytes // _BATCH_SHARE)
        for place in order.tolist():
            if left <= 0:
                break
            self._victims.append(keys[place])
            left -= kept[place].num_bytes

    def _distances(self, kept: list[_Kept]) -> list[float]:
        """Return the steps to the next use of blocks, which may belong to several datasets."""
        found = np.zeros(len(kept))
        for space in {entry.space for entry in kept}:
            here = [place for place, entry in enumerate(kept) if entry.space == space]
            first = np.array([kept[place].unit_first for place in here], np.int64)
            stop = np.array([kept[place].unit_stop for place in here], np.int64)
            found[here] = self._forecast.distances(space, first, stop, is_scan=True)
        return found.tolist()

    def _half_life(self) -> float:
        return max(1.0, len(self._kept))

    def _is_busy(self, key: _Key) -> bool:
        found = self._kept.get(key)
        return found is not None and found.payload is None

    def _forget(self, key: _Key) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._num_bytes -= found.num_bytes
