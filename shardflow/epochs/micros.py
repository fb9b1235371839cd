"""Stage 3 of the plan, the micro-batches: sample slots, a fixed number at a time.

Micro-batches are numbered over the whole epoch. Whatever forms them otherwise (by a token budget, window by
window of a lane) is another class with the same members, and keeps what it has computed as suits it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardflow.epochs.blend import BlendOrder
from shardflow.epochs.order import EpochOrder
from shardflow.epochs.recent import Recent
from shardflow.epochs.slots import EpochSlots

__all__ = ["PADDING_ROW", "FixedMicroBatches", "MicroBatch", "MicroBatches", "frozen", "padding"]

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

PADDING_ROW = -1
"""Stands in place of a row in a slot that holds no sample."""

# Rows that are computed at once, in 0.3 ms; the micro-batches of the two latest blocks then cost a slice.
_BLOCK_ROWS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one rank runs in one forward/backward; both arrays are read-only."""

    rows: Int64Array
    """``(B,)`` int64, rows of the samples table; -1 in a padding slot."""
    weights: UInt8Array
    """``(B,)`` uint8, 1 for a sample and 0 for a padding slot."""

    @property
    def num_samples(self) -> int:
        """Slots that hold a sample."""
        return int(np.count_nonzero(self.weights))


class MicroBatches(ABC):
    """The micro-batches of an epoch, by their number."""

    _size = 1
    """Slots of a micro-batch of padding."""

    @abstractmethod
    def micro_batch(self, number: int) -> MicroBatch:
        """Return micro-batch ``number`` of the epoch."""

    def filler(self) -> MicroBatch:
        """Return a micro-batch of padding."""
        return MicroBatch(*frozen(*padding((self._size,))))

    def span(self, start: int, stop: int) -> tuple[Int64Array, UInt8Array]:
        """Return micro-batches ``[start, stop)`` of the epoch, padded to the longest of them, read-only."""
        micros = [self.micro_batch(number) for number in range(start, stop)]
        rows, weights = padding((stop - start, max(len(micro.rows) for micro in micros)))
        for place, micro in enumerate(micros):
            rows[place, : len(micro.rows)] = micro.rows
            weights[place, : len(micro.rows)] = micro.weights
        return frozen(rows, weights)


class FixedMicroBatches(MicroBatches):
    """Micro-batch j holds the sample slots ``[j * size, (j + 1) * size)``.

    Safe to share between threads.

    Args:
        order: The rows of the epoch's positions.
        slots: The positions of the epoch's slots.
        size: Slots of a micro-batch; ``slots.num_slots`` is a multiple of it.
    """

    def __init__(self, order: EpochOrder | BlendOrder, slots: EpochSlots, *, size: int) -> None:
        self._order = order
        self._slots = slots
        self._size = size
        self._micros_per_block = max(1, _BLOCK_ROWS // size)
        # Threads may compute a block twice; they never see half of one.
        self._blocks: Recent[tuple[Int64Array, UInt8Array]] = Recent(2)

    def micro_batch(self, number: int) -> MicroBatch:
        """Return micro-batch ``number`` of the epoch."""
        block, offset = divmod(number, self._micros_per_block)
        rows, weights = self._block(block)
        return MicroBatch(rows[offset], weights[offset])

    def span(self, start: int, stop: int) -> tuple[Int64Array, UInt8Array]:
        """Return micro-batches ``[start, stop)`` of the epoch, read-only.

        Returns:
            Rows ``(stop - start, size)`` int64 and weights of the same shape uint8; padding behind the end.
        """
        block, offset = divmod(start, self._micros_per_block)
        if offset + stop - start > self._micros_per_block:
            return self._compute(start, stop)
        rows, weights = self._block(block)
        return rows[offset : offset + stop - start], weights[offset : offset + stop - start]

    def _block(self, block: int) -> tuple[Int64Array, UInt8Array]:
        first = block * self._micros_per_block
        return self._blocks.get(block, lambda: self._compute(first, first + self._micros_per_block))

    def _compute(self, start: int, stop: int) -> tuple[Int64Array, UInt8Array]:
        positions = self._slots.positions(start * self._size, stop * self._size)
        rows, weights = padding((stop - start, self._size))
        rows.reshape(-1)[: positions.size] = self._order.rows(positions)
        weights.reshape(-1)[: positions.size] = 1
        return frozen(rows, weights)


def padding(shape: tuple[int, ...]) -> tuple[Int64Array, UInt8Array]:
    """Return rows and weights of slots that hold no sample."""
    return np.full(shape, PADDING_ROW, np.int64), np.zeros(shape, np.uint8)


def frozen(rows: Int64Array, weights: UInt8Array) -> tuple[Int64Array, UInt8Array]:
    """Return the arrays themselves, read-only from now on."""
    rows.setflags(write=False)
    weights.setflags(write=False)
    return rows, weights
