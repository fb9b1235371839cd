"""The plan of one epoch: which rows make which micro-batch of which step, before the first step runs.

Stages, each of which knows only the one before it::

    order    position -> row                     order.EpochOrder
    slots    slot -> position, by the tail rule  slots.EpochSlots
    micros   micro-batch j = slots [j * B, (j + 1) * B)           here
    steps    step k = micro-batches [k * M, (k + 1) * M)          here
    ranks    slot i of rank r = micro-batch i * W + r of the step elastic.RankSchedule

The rank comes last, so the steps are the same for every world size. Nothing is stored per sample or per step: an epoch of
200 million samples is planned at once, and any step of it is found without the steps before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardflow.epochs.elastic import RankSchedule
from shardflow.epochs.integers import MAX_COUNTER, checked_int
from shardflow.epochs.order import EpochOrder
from shardflow.epochs.slots import EpochSlots
from shardflow.epochs.spec import BatchSpec
from shardflow.epochs.summary import PlanSummary
from shardflow.errors import PlanError

__all__ = ["EpochPlan", "MicroBatch"]

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

PADDING_ROW = -1
"""Stands in place of a row in a slot that holds no sample."""

# Rows that are computed at once: 0.2 ms, and then most micro-batches cost a slice. Two blocks are kept.
_BLOCK_ROWS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One micro-batch; both arrays are read-only."""

    rows: Int64Array
    """``(B,)`` int64, rows of the samples table; -1 in a padding slot."""
    weights: UInt8Array
    """``(B,)`` uint8, 1 for a sample and 0 for a padding slot."""

    @property
    def num_samples(self) -> int:
        """Slots that hold a sample."""
        return int(np.count_nonzero(self.weights))


class EpochPlan:
    """The steps of one epoch: a pure function of its arguments, the same on every rank and machine.

    Safe to share between threads.

    Args:
        population: Rows of the samples table that belong to the epoch, such as a split's.
        spec: How micro-batches and steps are formed.
        seed: Run-level seed, 0 to 2**63 - 1.
        epoch: Number of the epoch, from 0.

    Attributes:
        num_samples: Samples of the population.
        num_steps: Steps of the epoch, at least 1.
        num_dropped: Samples left out by tail ``drop``.
        num_repeated: Slots filled with samples again by tail ``repeat``.
        num_padding_slots: Slots filled with padding by tail ``mask``.

    Raises:
        PlanError: No samples, no step, or a number out of range.

    Example:
        >>> spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
        >>> plan = EpochPlan(range(100, 105), spec, seed=7, epoch=0)
        >>> plan.num_steps, plan.num_padding_slots
        (2, 3)
        >>> rows, weights = plan.step(1)
        >>> rows.shape, int(weights.sum())
        ((2, 2), 1)
    """

    __slots__ = (
        "_blocks", "_filler", "_micros_per_block", "_order", "_slots",
        "epoch", "num_dropped", "num_padding_slots", "num_repeated", "num_samples", "num_steps",
        "population", "seed", "spec",
    )  # fmt: skip

    def __init__(self, population: range, spec: BatchSpec, *, seed: int, epoch: int) -> None:
        if not len(population):
            raise PlanError(
                "num_samples must be at least 1, got 0 (the population of the epoch is empty); choose a split that "
                "holds samples."
            )
        where = "epoch plan"
        self.population, self.spec = population, spec
        self.seed = checked_int("seed", seed, low=0, high=MAX_COUNTER, where=where, error=PlanError)
        self.epoch = checked_int("epoch", epoch, low=0, high=MAX_COUNTER, where=where, error=PlanError)
        self._slots = slots = EpochSlots.of(len(population), spec)
        self._order = EpochOrder(population, seed=self.seed, epoch=self.epoch)
        self.num_samples, self.num_steps = slots.num_samples, slots.num_steps
        self.num_dropped, self.num_repeated = slots.num_dropped, slots.num_repeated
        self.num_padding_slots = slots.num_padding_slots
        self._micros_per_block = max(1, _BLOCK_ROWS // spec.micro_batch_size)
        self._blocks: tuple[tuple[int, Int64Array, UInt8Array], ...] = ()
        self._filler = MicroBatch(*_frozen(*_padding(spec.micro_batch_size)))

    def for_epoch(self, epoch: int) -> EpochPlan:
        """Return the plan of another epoch of the same run."""
        return EpochPlan(self.population, self.spec, seed=self.seed, epoch=epoch)

    def micro_batch(self, step: int, micro: int) -> MicroBatch:
        """Return micro-batch ``micro`` of ``step``.

        Args:
            step: 0 to ``num_steps - 1``.
            micro: 0 to ``micro_batches_per_step - 1``; from there to twice that number it is a filler, all padding, as
                :meth:`RankSchedule.micro` hands out where the world size does not divide the step.

        Raises:
            PlanError: There is no such step or micro-batch.
        """
        per_step = self.spec.micro_batches_per_step
        step = self._checked_step(step)
        micro = checked_int("micro", micro, low=0, high=2 * per_step - 1, where="epoch plan", error=PlanError)
        if micro >= per_step:
            return self._filler
        block, offset = divmod(step * per_step + micro, self._micros_per_block)
        rows, weights = self._block(block)
        return MicroBatch(rows[offset], weights[offset])

    def step(self, step: int) -> tuple[Int64Array, UInt8Array]:
        """Return all micro-batches of a step.

        Args:
            step: 0 to ``num_steps - 1``.

        Returns:
            Rows ``(M, B)`` int64, -1 in padding slots, and weights ``(M, B)`` uint8; both read-only.

        Raises:
            PlanError: There is no such step.
        """
        per_step = self.spec.micro_batches_per_step
        first = self._checked_step(step) * per_step
        block, offset = divmod(first, self._micros_per_block)
        if offset + per_step > self._micros_per_block:
            return self._materialise(first, first + per_step)
        rows, weights = self._block(block)
        return rows[offset : offset + per_step], weights[offset : offset + per_step]

    def summary(self, schedule: RankSchedule) -> PlanSummary:
        """Return everything that is known about the epoch before its first step.

        Raises:
            PlanError: The schedule belongs to another number of micro-batches per step.
        """
        if schedule.micro_batches_per_step != self.spec.micro_batches_per_step:
            raise PlanError(
                f"micro_batches_per_step of the schedule must be {self.spec.micro_batches_per_step}, got "
                f"{schedule.micro_batches_per_step} (epoch plan); build both from one batch spec."
            )
        return PlanSummary.of(self._slots, self.spec, schedule, seed=self.seed, epoch=self.epoch)

    def _checked_step(self, step: int) -> int:
        return checked_int(
            "step", step, low=0, high=self.num_steps - 1, where=f"epoch {self.epoch}", error=PlanError
        )

    def _block(self, block: int) -> tuple[Int64Array, UInt8Array]:
        # One read and one assignment of a tuple: threads may compute a block twice, never see half of one.
        blocks = self._blocks
        for number, rows, weights in blocks:
            if number == block:
                return rows, weights
        first = block * self._micros_per_block
        rows, weights = self._materialise(first, first + self._micros_per_block)
        self._blocks = ((block, rows, weights), *blocks[:1])
        return rows, weights

    def _materialise(self, first: int, stop: int) -> tuple[Int64Array, UInt8Array]:
        """Compute the micro-batches ``[first, stop)`` of the epoch; the last ones may lie behind its end."""
        size = self.spec.micro_batch_size
        stop = min(stop, self.num_steps * self.spec.micro_batches_per_step)
        positions = self._slots.positions(first * size, stop * size)
        rows, weights = _padding((stop - first) * size)
        rows[: positions.size] = self._order.rows(positions)
        weights[: positions.size] = 1
        return _frozen(rows.reshape(-1, size), weights.reshape(-1, size))


def _padding(num_slots: int) -> tuple[Int64Array, UInt8Array]:
    return np.full(num_slots, PADDING_ROW, np.int64), np.zeros(num_slots, np.uint8)


def _frozen(rows: Int64Array, weights: UInt8Array) -> tuple[Int64Array, UInt8Array]:
    rows.setflags(write=False)
    weights.setflags(write=False)
    return rows, weights
