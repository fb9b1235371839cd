"""The plan of one epoch: which rows make which micro-batch of which step, before the first step runs.

Five stages, each of which knows only the one before it. Without lanes::

    order     position -> row of the samples table           order.EpochOrder
    slots     sample slot -> position, by the tail rule      slots.EpochSlots
    micros    micro-batch j = slots [j * B, (j + 1) * B)     micros.FixedMicroBatches
    steps     step k = micro-batches [k * M, (k + 1) * M)    EpochPlan
    ranks     micro-batch of a step -> rank and rank slot    elastic.RankSchedule

With lanes the first three give way to lanes, windows and rounds (``lane_plan``). The world comes last, so the
steps are the same for every world size. Nothing is stored per sample or per step: an epoch of 200 million
samples is planned at once, and any step is found without those before it.
"""

from __future__ import annotations

from copy import copy

import numpy as np
import numpy.typing as npt

from shardflow.epochs.blend import Blend, BlendOrder
from shardflow.epochs.budget_micros import BudgetMicroBatches
from shardflow.epochs.elastic import RankSchedule
from shardflow.epochs.integers import MAX_COUNTER, checked_int
from shardflow.epochs.lane_micros import LaneMicroBatches
from shardflow.epochs.lane_plan import BudgetSlots, LanePlan
from shardflow.epochs.layout import SampleLayout
from shardflow.epochs.micros import FixedMicroBatches, MicroBatch
from shardflow.epochs.order import EpochOrder
from shardflow.epochs.rows import Rows, RowSet, nth_rows
from shardflow.epochs.slots import EpochSlots
from shardflow.epochs.spec import BatchSpec
from shardflow.epochs.summary import PlanSummary
from shardflow.errors import PlanError

__all__ = ["EpochPlan"]


class EpochPlan:
    """The steps of one epoch: a pure function of its arguments, the same on every rank and machine.

    Safe to share between threads.

    Args:
        population: Rows of the samples table that belong to the epoch: those of a split, or a subset. Or a
            blend, whose rows are blended ones.
        spec: How micro-batches and steps are formed.
        seed: Run-level seed, 0 to 2**63 - 1.
        epoch: Number of the epoch, from 0.
        layout: Where the samples lie; needed where the spec has lanes, and not used otherwise.

    Attributes:
        num_samples: Samples of the epoch: of the population, or draws of a blend.
        num_steps: Steps of the epoch, at least 1; under a token budget not the same in every epoch.
        lane_plan: The lanes of the epoch; None where the spec has none.

    Raises:
        PlanError: No samples, no step, a number out of range, or a layout that is missing or does not fit.

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

    _slots: EpochSlots | BudgetSlots
    _micros: FixedMicroBatches | LaneMicroBatches | BudgetMicroBatches

    def __init__(
        self,
        population: Rows | Blend,
        spec: BatchSpec,
        *,
        seed: int,
        epoch: int,
        layout: SampleLayout | None = None,
    ) -> None:
        self.population = _checked_population(population)
        # What the stages deal in: rows of a range, and of a subset or a blend the numbers of its samples.
        self._numbers = _numbers_of(self.population)
        self.spec = spec
        where = "epoch plan"
        self.seed = checked_int("seed", seed, low=0, high=MAX_COUNTER, where=where, error=PlanError)
        self.epoch = checked_int("epoch", epoch, low=0, high=MAX_COUNTER, where=where, error=PlanError)
        self.layout = layout
        lane_plan = None
        if spec.lanes:
            lane_plan = LanePlan.first(
                _checked_layout(layout, self._numbers), spec, seed=self.seed, epoch=epoch
            )
        self._form(lane_plan)

    def _form(self, lane_plan: LanePlan | None) -> None:
        """Form the micro-batches of the epoch."""
        self.lane_plan = lane_plan
        if lane_plan is None:
            order: EpochOrder | BlendOrder
            if isinstance(self.population, Blend):
                num_samples = self.population.num_draws
                order = BlendOrder(self.population, seed=self.seed, epoch=self.epoch)
            else:
                num_samples = len(self._numbers)
                order = EpochOrder(self._numbers, seed=self.seed, epoch=self.epoch)
            slots = self._slots = EpochSlots.of(num_samples, self.spec)
            self._micros = FixedMicroBatches(order, slots, size=self.spec.micro_batch_size)
        else:
            self._slots, self._micros = lane_plan.slots, lane_plan.micros
        self._filler = self._micros.filler()
        self.num_samples, self.num_steps = self._slots.num_samples, self._slots.num_steps

    @property
    def num_dropped(self) -> int:
        """Samples that tail ``drop`` leaves out, and those that a budget skips by rule."""
        return self._slots.num_dropped

    @property
    def num_repeated(self) -> int:
        """Slots that tail ``repeat`` fills with samples again."""
        return self._slots.num_repeated

    @property
    def num_padding_slots(self) -> int:
        """Slots that tail ``mask`` fills with padding; under a budget, micro-batches without samples."""
        return self._slots.num_padding_slots

    def for_epoch(self, epoch: int) -> EpochPlan:
        """Return the plan of another epoch of the same run; what all epochs share is not worked out again."""
        epoch = checked_int("epoch", epoch, low=0, high=MAX_COUNTER, where="epoch plan", error=PlanError)
        other = copy(self)
        other.epoch = epoch
        other._form(None if self.lane_plan is None else self.lane_plan.for_epoch(epoch))
        return other

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
        found = self._micros.micro_batch(step * per_step + micro)
        if isinstance(self.population, range):
            return found
        return MicroBatch(self._rows(found.rows), found.weights)

    def step(self, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return all micro-batches of a step.

        Args:
            step: 0 to ``num_steps - 1``.

        Returns:
            Rows ``(M, B)`` int64, -1 in padding slots, and weights ``(M, B)`` uint8; both read-only. Under a
            budget B is the largest micro-batch of the step.

        Raises:
            PlanError: There is no such step.
        """
        numbers, weights = self.numbered_step(step)
        return (numbers if isinstance(self.population, range) else self._rows(numbers)), weights

    def numbered_step(self, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return the same with what the layout knows samples by: in a subset, numbers from 0."""
        per_step = self.spec.micro_batches_per_step
        first = self._checked_step(step) * per_step
        return self._micros.span(first, first + per_step)

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
        lanes = None if self.lane_plan is None else self.lane_plan.summary()
        return PlanSummary.of(self._slots, self.spec, schedule, seed=self.seed, epoch=self.epoch, lanes=lanes)

    def _rows(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows of samples, -1 in padding slots; read-only."""
        rows = numbers.copy()
        is_sample = numbers >= 0
        found = numbers[is_sample]
        if isinstance(self.population, Blend):
            rows[is_sample] = self.population.rows(found)
        else:
            rows[is_sample] = nth_rows(self.population, found)
        rows.setflags(write=False)
        return rows

    def _checked_step(self, step: int) -> int:
        where = f"epoch {self.epoch}"
        return checked_int("step", step, low=0, high=self.num_steps - 1, where=where, error=PlanError)


def _numbers_of(population: Rows | Blend) -> range:
    if isinstance(population, range):
        return population
    return range(population.num_samples if isinstance(population, Blend) else len(population))


def _checked_population(population: Rows | Blend) -> Rows | Blend:
    if isinstance(population, RowSet | Blend):
        return population
    if not isinstance(population, range):
        raise PlanError(f"population must be a range or a row set, got {type(population).__name__}.")
    if not population:
        raise PlanError(
            "num_samples must be at least 1, got 0 (epoch plan: its population is empty); choose a split "
            "that holds samples."
        )
    if min(population[0], population[-1]) < 0:
        raise PlanError(f"population must hold no negative row, got {population} (epoch plan).")
    return population


def _checked_layout(layout: SampleLayout | None, population: range) -> SampleLayout:
    if layout is None:
        raise PlanError(
            "layout must be given where the batch spec has lanes, got none (epoch plan); hand in where the "
            "samples lie, or choose lanes = 0."
        )
    if layout.population != population:
        raise PlanError(
            f"population must be the layout's {layout.population}, got {population} (epoch plan); build both "
            f"from one split."
        )
    return layout
