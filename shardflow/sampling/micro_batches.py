"""Epoch order, sample slots and fixed-size micro-batches: the first three stages of a plan without lanes.

`EpochOrder` shuffles all rows of the population. `EpochSlots` fills whole steps: slot ``s`` of an epoch's
``num_steps * samples_per_step`` holds position ``s`` of the order while there is one, and the tail rule
fills the rest. `FixedMicroBatches` groups B slots at a time. Micro-batches are numbered over the
whole epoch; other ways to form them (a token budget, lanes) are further subclasses of `MicroBatches`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardflow.errors import PlanError
from shardflow.sampling.blend import BlendOrder
from shardflow.sampling.lanes import Recent
from shardflow.sampling.permutation import Int64Array, Permutation
from shardflow.sampling.spec import BatchSpec
from shardflow.seeds import derive

UInt8Array = npt.NDArray[np.uint8]
PADDING_ROW = -1
"""Row of a slot that holds no sample."""
# Rows computed at once, in 0.3 ms; a micro-batch of the two latest blocks then costs only a slice.
_BLOCK_ROWS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochSlots:
    """The slots of an epoch, and the effect of the tail rule.

    Always ``num_samples - num_dropped + num_repeated + num_padding_slots == num_slots``.
    """

    num_samples: int
    num_steps: int
    num_slots: int
    num_dropped: int
    """Samples that this epoch leaves out (tail ``drop``)."""
    num_repeated: int
    """Slots that repeat a sample, at weight 1 (tail ``repeat``)."""
    num_padding_slots: int
    """Slots without a sample, at weight 0 (tail ``mask``): the last ones of the last step."""

    @classmethod
    def of(cls, num_samples: int, spec: BatchSpec) -> EpochSlots:
        """Fill steps with ``num_samples`` (at least 1).

        Raises:
            PlanError: Tail ``drop``, and the samples do not fill one step.
        """
        num_steps, remainder = divmod(num_samples, spec.samples_per_step)
        missing = spec.samples_per_step - remainder if remainder and spec.tail != "drop" else 0
        num_steps += bool(missing)
        if not num_steps:
            raise PlanError(
                f"num_steps must be at least 1, got 0 (tail 'drop': {num_samples} samples do not fill one "
                f"step of micro_batch_size {spec.micro_batch_size} * micro_batches_per_step "
                f"{spec.micro_batches_per_step} = {spec.samples_per_step}); choose tail 'repeat' or 'mask', "
                f"or sizes whose product is at most {num_samples}."
            )
        return cls(
            num_samples=num_samples,
            num_steps=num_steps,
            num_slots=num_steps * spec.samples_per_step,
            num_dropped=remainder if spec.tail == "drop" else 0,
            num_repeated=missing if spec.tail == "repeat" else 0,
            num_padding_slots=missing if spec.tail == "mask" else 0,
        )

    def positions(self, start: int, stop: int) -> Int64Array:
        """Return the positions in the slots ``[start, stop)``.

        Padding slots come last and hold none, so the result may be shorter than ``stop - start``.
        """
        stop = min(stop, self.num_slots - self.num_padding_slots)
        positions = np.arange(start, stop, dtype=np.int64)
        if stop > self.num_samples:
            # The epoch's order from its start, several times if it is shorter than the gap.
            np.remainder(positions, self.num_samples, out=positions)
        return positions


class EpochOrder:
    """Full shuffle of a row range, different in every epoch, in constant memory; or the rows as they are.

    Args:
        population: Rows of the samples table, at least one; a split is such a range.
        seed: Run-level seed.
        epoch: Number of the epoch, from 0.
        is_shuffled: Whether to shuffle them.
    """

    def __init__(self, population: range, *, seed: int, epoch: int, is_shuffled: bool = True) -> None:
        self._population = population
        self._permutation = (
            Permutation(len(population), derive(seed, "epoch-order", epoch)) if is_shuffled else None
        )

    def rows(self, positions: Int64Array) -> Int64Array:
        """Return the rows at ``positions`` in ``[0, len(population))``."""
        rows = positions.copy() if self._permutation is None else self._permutation(positions)
        rows *= self._population.step
        rows += self._population.start
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The samples of one forward/backward of one rank; both arrays are read-only."""

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
    """Slots of a padding micro-batch."""

    @abstractmethod
    def micro_batch(self, number: int) -> MicroBatch:
        """Return micro-batch ``number`` of the epoch."""

    def padding_micro_batch(self) -> MicroBatch:
        """Return a padding micro-batch."""
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
            Rows ``(stop - start, size)`` int64 and weights of the same shape uint8; padding after the end.
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
    """Return rows and weights of slots without samples."""
    return np.full(shape, PADDING_ROW, np.int64), np.zeros(shape, np.uint8)


def frozen(rows: Int64Array, weights: UInt8Array) -> tuple[Int64Array, UInt8Array]:
    """Make the arrays read-only, and return them."""
    rows.setflags(write=False)
    weights.setflags(write=False)
    return rows, weights
