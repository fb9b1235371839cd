"""Micro-batches of a fixed size from lanes: B neighbours of one lane's line, across its windows.

What the lanes hold beyond their equal parts is pooled sample by sample, mixed, and dealt behind them, so an
epoch has the same number of steps, and the same tail, as one without lanes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import sums
from shardflow.epochs.micros import MicroBatch, MicroBatches, frozen, padding
from shardflow.epochs.permutation import Permutation
from shardflow.epochs.rounds import Rounds
from shardflow.epochs.slots import EpochSlots
from shardflow.epochs.windows import LaneWindows
from shardflow.seeds import derive

__all__ = ["LaneMicroBatches"]

Int64Array = npt.NDArray[np.int64]


class LaneMicroBatches(MicroBatches):
    """Micro-batch g of the epoch is number ``g // L`` of lane ``g mod L``, as long as all lanes have one.

    Safe to share between threads. A micro-batch opens the windows of its own lane only.

    Args:
        windows: The lanes in this epoch.
        slots: The slots of the epoch.
        size: B.
        per_step: M.
        seed: Run-level seed.
        epoch: Number of the epoch.
    """

    def __init__(
        self, windows: LaneWindows, slots: EpochSlots, *, size: int, per_step: int, seed: int, epoch: int
    ) -> None:
        self._windows, self._slots, self._size = windows, slots, size
        self.rounds = Rounds.of(windows.num_samples // size, per_step, round_micros=2**62)
        self._num_main = self.rounds.num_common * self.rounds.num_lanes * size
        left = windows.num_samples - self.rounds.num_common * size
        self._pool_before = sums(left)
        num_pooled = int(self._pool_before[-1])
        self._pool = Permutation(num_pooled, derive(seed, "pool-order", epoch)) if num_pooled else None

    @property
    def num_pooled_samples(self) -> int:
        """Samples of the lanes' uneven ends."""
        return int(self._pool_before[-1])

    def micro_batch(self, number: int) -> MicroBatch:
        """Return micro-batch ``number`` of the epoch."""
        size = self._size
        if number * size < self._num_main:
            place, lane = divmod(number, self.rounds.num_lanes)
            rows = self._windows.take(lane, np.arange(place * size, (place + 1) * size))
            return MicroBatch(*frozen(rows, np.ones(size, np.uint8)))
        rows, weights = padding((size,))
        found = self._rows(self._slots.positions(number * size, (number + 1) * size))
        rows[: found.size] = found
        weights[: found.size] = 1
        return MicroBatch(*frozen(rows, weights))

    def _rows(self, positions: Int64Array) -> Int64Array:
        """Return the rows at some positions of the epoch's order, in the lanes or in the pool."""
        lane, place = np.empty_like(positions), np.empty_like(positions)
        main = positions < self._num_main
        micro, slot = np.divmod(positions[main], self._size)
        lane[main] = micro % self.rounds.num_lanes
        place[main] = micro // self.rounds.num_lanes * self._size + slot
        if self._pool is not None and not main.all():
            pooled = self._pool(positions[~main] - self._num_main)
            lanes = np.searchsorted(self._pool_before, pooled, side="right") - 1
            lane[~main] = lanes
            place[~main] = self.rounds.num_common * self._size + pooled - self._pool_before[lanes]
        rows = np.empty_like(positions)
        for number in np.unique(lane).tolist():
            here = lane == number
            rows[here] = self._windows.take(number, place[here])
        return rows
