"""The plan of one epoch: which rows make which micro-batch of which step, before the first step runs.

Five stages, each of which knows only the one before it::

    order     position -> row of the samples table           order.EpochOrder
    slots     sample slot -> position, by the tail rule      slots.EpochSlots
    micros    micro-batch j = slots [j * B, (j + 1) * B)     EpochPlan
    steps     step k = micro-batches [k * M, (k + 1) * M)    EpochPlan
    ranks     micro-batch of a step -> rank and round        elastic.RankSchedule

The world comes last, so the steps are the same for every world size. Nothing is stored per sample or per
step: an epoch of 200 million samples is planned at once, and any step is found without those before it.
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

__all__ = ["PADDING_ROW", "EpochPlan", "MicroBatch"]

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

PADDING_ROW = -1
"""Stands in place of a row in a slot that holds no sample."""

# Rows that are computed at once, in 0.2 ms; the micro-batches of the two latest blocks then cost a slice.
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


class EpochPlan:
    """The steps of one epoch: a pure function of its arguments, the same on every rank and machine.

    Safe to share between threads.

    Args:
        population: Rows of the samples table that belong to the epoch, such as those of a split.
        spec: How micro-batches and steps are formed.
        seed: Run-level seed, 0 to 2**63 - 1.
        epoch: Number of the epoch, from 0.

    Attributes:
        num_samples: Samples of the population.
        num_steps: Steps of the epoch, at least 1.
        num_dropped: Samples that tail ``drop`` leaves out.
        num_repeated: Slots that tail ``repeat`` fills with samples again.
        num_padding_slots: Slots that tail ``mask`` fills with padding.

    Raises:
        PlanError: No samples, no step, or a number out of range.

    Example:
        >>> from shardflow.epochs import BatchSpec, EpochPlan
        >>> spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
        >>> plan = EpochPlan(range(100, 105), spec, seed=7, epoch=0)
        >>> plan.num_steps, plan.num_padding_slots
        (2, 3)
        >>> rows, weights = plan.step(1)
        >>> rows.shape, int(weights.sum())
        ((2, 2), 1)
    """

    __slots__ = (
        "_blocks",
        "_filler",
        "_micros_per_block",
        "_order",
        "_slots",
        "epoch",
        "num_dropped",
        "num_padding_slots",
        "num_repeated",
        "num_samples",
        "num_steps",
        "population",
        "seed",
        "spec",
    )

    def __init__(self, population: range, spec: BatchSpec, *, seed: int, epoch: int) -> None:
        self.population = _checked_population(population)
        self.spec = spec
        where = "epoch plan"
        self.seed = checked_int("seed", seed, low=0, high=MAX_COUNTER, where=where, error=PlanError)
        self.epoch = checked_int("epoch", epoch, low=0, high=MAX_COUNTER, where=where, error=PlanError)
        self._slots = slots = EpochSlots.of(len(population), spec)
        self._order = EpochOrder(population, seed=self.seed, epoch=self.epoch)
        self.num_samples, self.num_steps = slots.num_samples, slots.num_steps
        self.num_dropped, self.num_repeated = slots.num_dropped, slots.num_repeated
        self.num_padding_slots = slots.num_padding_slots
        # A block holds whole steps; of a step that is larger than a block, whole micro-batches.
        whole_steps = _BLOCK_ROWS // spec.samples_per_step * spec.micro_batches_per_step
        self._micros_per_block = whole_steps or max(1, _BLOCK_ROWS // spec.micro_batch_size)
        self._blocks: tuple[tuple[int, Int64Array, UInt8Array], ...] = ()
        self._filler = MicroBatch(*_frozen(*_padding(spec.micro_batch_size)))

    def for_epoch(self, epoch: int) -> EpochPlan:
        """Return the plan of another epoch of the same run."""
        return EpochPlan(self.population, self.spec, seed=self.seed, epoch=epoch)

    def micro_batch(self, step: int, micro: int) -> MicroBatch:
        """Return micro-batch ``micro`` of ``step``.

        Args:
            step: 0 to ``num_steps - 1``.
            micro: 0 to ``M - 1``, with M = ``micro_batches_per_step``. M to 2 M - 1 is a filler, all padding,
                such as :meth:`RankSchedule.micro` deals where the world size does not divide M.

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
        if self._micros_per_block % per_step:
            return self._materialise(first, first + per_step)
        block, offset = divmod(first, self._micros_per_block)
        rows, weights = self._block(block)
        return rows[offset : offset + per_step], weights[offset : offset + per_step]

    def summary(self, schedule: RankSchedule) -> PlanSummary:
        """Return all that is known about the epoch before its first step.

        Raises:
            PlanError: The schedule is for another number of micro-batches per step.
        """
        if schedule.micro_batches_per_step != self.spec.micro_batches_per_step:
            raise PlanError(
                f"micro_batches_per_step of the schedule must be {self.spec.micro_batches_per_step}, got "
                f"{schedule.micro_batches_per_step} (epoch plan); build both from one batch spec."
            )
        return PlanSummary.of(self._slots, self.spec, schedule, seed=self.seed, epoch=self.epoch)

    def _checked_step(self, step: int) -> int:
        where = f"epoch {self.epoch}"
        return checked_int("step", step, low=0, high=self.num_steps - 1, where=where, error=PlanError)

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
        """Compute the epoch's micro-batches ``[first, stop)``; behind the last one there is padding."""
        size = self.spec.micro_batch_size
        positions = self._slots.positions(first * size, stop * size)
        rows, weights = _padding((stop - first) * size)
        rows[: positions.size] = self._order.rows(positions)
        weights[: positions.size] = 1
        return _frozen(rows.reshape(-1, size), weights.reshape(-1, size))


def _checked_population(population: range) -> range:
    if not isinstance(population, range):
        raise PlanError(f"population must be a range, got {type(population).__name__} (epoch plan).")
    if not population:
        raise PlanError(
            "num_samples must be at least 1, got 0 (epoch plan: its population is empty); choose a split "
            "that holds samples."
        )
    if min(population[0], population[-1]) < 0:
        raise PlanError(f"population must hold no negative row, got {population} (epoch plan).")
    return population


def _padding(num_slots: int) -> tuple[Int64Array, UInt8Array]:
    return np.full(num_slots, PADDING_ROW, np.int64), np.zeros(num_slots, np.uint8)


def _frozen(rows: Int64Array, weights: UInt8Array) -> tuple[Int64Array, UInt8Array]:
    rows.setflags(write=False)
    weights.setflags(write=False)
    return rows, weights
