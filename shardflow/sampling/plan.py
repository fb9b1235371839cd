"""Epoch plan: the rows of every micro-batch of every step, known before the first step runs.

Five stages, each of which knows only the one before it. Without lanes::

    order     position -> row of the samples table           EpochOrder
    slots     sample slot -> position, by the tail rule      EpochSlots
    micros    micro-batch j = slots [j * B, (j + 1) * B)     FixedMicroBatches
    steps     step k = micro-batches [k * M, (k + 1) * M)    EpochPlan
    ranks     micro-batch of a step -> rank and rank slot    RankSchedule

With lanes, `LanePlan` replaces the first three. Only the last stage knows the world size, so steps are the
same for every world size. Nothing is stored per sample or per step: an epoch of 200 million samples is
planned at once, and any step is found without those before it.

`plan_id` is the digest of everything that decides the contents of each step, besides seed and epoch;
`PlanSummary` holds the numbers of an epoch that are reported before its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass
from math import gcd, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.errors import PlanError
from shardflow.sampling.blend import BlendOrder, Mixture, json_digest
from shardflow.sampling.budget_batches import BudgetMicroBatches
from shardflow.sampling.lane_plan import BudgetSlots, LaneMicroBatches, LanePlan, LaneSummary
from shardflow.sampling.layout import Rows, RowSet, SampleLayout, nth_rows
from shardflow.sampling.micro_batches import EpochOrder, EpochSlots, FixedMicroBatches, MicroBatch
from shardflow.sampling.permutation import MAX_COUNTER, Int64Array, check_ints, checked_int
from shardflow.sampling.spec import MAX_PER_STEP, BatchSpec

DEFAULT_VIEW = "full_study"
"""The view in which a sample is a whole study with its report."""

PLAN_VERSION = 1
"""Increased with every change to the order or the forming of steps (change class ITERATION ORDER)."""


def plan_id(
    *,
    dataset_id: str,
    split: str,
    spec: BatchSpec,
    view: str = DEFAULT_VIEW,
    subset: str | None = None,
    sampling: str | None = None,
) -> str:
    """Return the identity of a plan.

    Two runs of equal identity and seed run the same steps on any world size. Optional parts (a subset, a
    sampling) enter the digest only if they are used, so plans without them keep their identity.

    Args:
        dataset_id: Digest of the manifest, which fixes the samples table; of a blend, its own digest.
        split: Name of the split that is the population.
        spec: How micro-batches and steps are formed.
        view: Name of the view, which defines a sample.
        subset: Digest of the rows, if they are not all of the split.
        sampling: Digest of the weights and draws of the rows, if not all are drawn once an epoch.

    Returns:
        64 hexadecimal digits, the SHA-256 of the canonical JSON of all parts.
    """
    parts = {
        "plan_version": PLAN_VERSION,
        "dataset_id": dataset_id,
        "split": split,
        "view": view,
        "batch": spec.to_json(),
        **({} if subset is None else {"subset": subset}),
        **({} if sampling is None else {"sampling": sampling}),
    }
    return json_digest(parts)


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """Assignment of the micro-batches of a step to ranks, round-robin.

    Every rank runs ``ceil(M / W)`` micro-batches a step, one after the other in its *rank slots* 0, 1, ...;
    rank ``r`` runs micro-batch ``slot * W + r`` in slot ``slot``. Numbers in the last slot from M on are
    padding micro-batches of weight 0, so that every rank joins every collective.

    If the plan has lanes and the number of nodes is known and divides ``gcd(M, lanes)``, lanes are assigned
    to nodes first: a node runs only the micro-batches of its own lanes, so each shard is read by one node.
    The steps are the same either way.

    Args:
        micro_batches_per_step: M of the batch spec.
        world_size: W, the number of data-parallel ranks, 1 to M.
        allow_padding: False refuses a world size that does not divide M.
        lanes: Lanes of the batch spec; 0 for none.
        ranks_per_node: Data-parallel ranks of a node, numbered consecutively; 0 if unknown.

    Raises:
        PlanError: The world size is out of range, or does not divide M and padding is refused.

    Example:
        >>> schedule = RankSchedule(micro_batches_per_step=512, world_size=56)
        >>> schedule.num_micro_batches_per_rank, schedule.num_padding_micro_batches
        (10, 48)
        >>> round(schedule.efficiency, 3)
        0.914
    """

    micro_batches_per_step: int
    world_size: int
    allow_padding: bool = True
    lanes: int = 0
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        where = "rank schedule"
        bounds = dict.fromkeys(("lanes", "ranks_per_node"), (0, MAX_PER_STEP))
        bounds |= dict.fromkeys(("micro_batches_per_step", "world_size"), (1, MAX_PER_STEP))
        check_ints(self, bounds, where=where, error=PlanError)
        if self.world_size > self.micro_batches_per_step:
            raise PlanError(
                f"world_size must be at most micro_batches_per_step ({self.micro_batches_per_step}), got "
                f"{self.world_size} ({where}); start at most {self.micro_batches_per_step} ranks, or begin a "
                f"new run with micro_batches_per_step set to a multiple of {self.world_size}."
            )
        if self.num_padding_micro_batches and not self.allow_padding:
            raise PlanError(
                f"world_size must divide micro_batches_per_step ({self.micro_batches_per_step}), got "
                f"{self.world_size} ({where}, padding is refused); start {self._divisor_below()} ranks, or "
                f"allow padding micro-batches at an efficiency of {self.efficiency:.1%}."
            )

    @property
    def num_micro_batches_per_rank(self) -> int:
        """Micro-batches that every rank runs in a step, including padding."""
        return -(-self.micro_batches_per_step // self.world_size)

    @property
    def num_padding_micro_batches(self) -> int:
        """Padding micro-batches of a step, over all ranks."""
        return self.num_micro_batches_per_rank * self.world_size - self.micro_batches_per_step

    @property
    def efficiency(self) -> float:
        """Share of the micro-batches that are not padding, above 0.5 and at most 1."""
        return self.micro_batches_per_step / (self.num_micro_batches_per_rank * self.world_size)

    @property
    def num_nodes(self) -> int:
        """Nodes with lanes of their own; 0 if every node reads from all lanes."""
        if not self.lanes or not self.ranks_per_node or self.world_size % self.ranks_per_node:
            return 0
        num_nodes = self.world_size // self.ranks_per_node
        return num_nodes if gcd(self.micro_batches_per_step, self.lanes) % num_nodes == 0 else 0

    def node_of_lane(self, lane: int) -> int:
        """Return the node that reads a lane, if ``num_nodes`` is not 0."""
        group = gcd(self.micro_batches_per_step, self.lanes)
        return lane % group // (group // self.num_nodes)

    def micro(self, rank: int, slot: int) -> int:
        """Return the micro-batch that ``rank`` runs in its rank slot ``slot``; padding if not below M.

        Raises:
            PlanError: There is no such rank or rank slot.
        """
        where = "rank schedule"
        rank = checked_int("rank", rank, low=0, high=self.world_size - 1, where=where, error=PlanError)
        last = self.num_micro_batches_per_rank - 1
        slot = checked_int("slot", slot, low=0, high=last, where=where, error=PlanError)
        num_nodes = self.num_nodes
        if not num_nodes:
            return slot * self.world_size + rank
        # In every step, micro-batch m comes from a lane that is congruent to it modulo the group.
        node, local = divmod(rank, self.ranks_per_node)
        per_node, number = self.micro_batches_per_step // num_nodes, slot * self.ranks_per_node + local
        if number >= per_node:
            padding_per_node = self.num_padding_micro_batches // num_nodes
            return self.micro_batches_per_step + node * padding_per_node + number - per_node
        group = gcd(self.micro_batches_per_step, self.lanes)
        row, column = divmod(number, group // num_nodes)
        return row * group + node * (group // num_nodes) + column

    def micros(self, rank: int) -> Sequence[int]:
        """Return the micro-batches that ``rank`` runs in a step, in order; those not below M are padding.

        Raises:
            PlanError: There is no such rank.
        """
        return [self.micro(rank, slot) for slot in range(self.num_micro_batches_per_rank)]

    def is_padding(self, micro: int) -> bool:
        """Return whether a micro-batch of this schedule is padding."""
        return micro >= self.micro_batches_per_step

    def _divisor_below(self) -> int:
        return next(w for w in range(self.world_size, 0, -1) if self.micro_batches_per_step % w == 0)


def data_parallel_rank(
    rank: int, mesh_shape: Sequence[int], data_dimensions: Sequence[int]
) -> tuple[int, int]:
    """Return the data-parallel rank of a process in a mesh, and the number of such ranks.

    Processes that differ only in other dimensions (tensor, pipeline, context) get the same rank, and so the
    same micro-batches.

    Args:
        rank: Number of the process in the mesh, in row-major order.
        mesh_shape: Size of each dimension.
        data_dimensions: The data-parallel ones, such as replicate and shard of a hybrid mesh.

    Raises:
        PlanError: There is no such rank or dimension, or a dimension is named twice.

    Example:
        >>> data_parallel_rank(5, mesh_shape=(4, 2), data_dimensions=(0,))
        (2, 4)
    """
    where = f"mesh {tuple(mesh_shape)}"
    rank = checked_int("rank", rank, low=0, high=prod(mesh_shape) - 1, where=where, error=PlanError)
    if len(set(data_dimensions)) != len(data_dimensions):
        raise PlanError(f"data_dimensions must differ, got {tuple(data_dimensions)} ({where}).")
    for number in data_dimensions:
        checked_int("dimension", number, low=0, high=len(mesh_shape) - 1, where=where, error=PlanError)
    data_rank, size = 0, 1
    for number in sorted(data_dimensions):
        place = rank // prod(mesh_shape[number + 1 :]) % mesh_shape[number]
        data_rank = data_rank * mesh_shape[number] + place
        size *= mesh_shape[number]
    return data_rank, size


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """Numbers of one epoch on one world size, as plain Python values."""

    seed: int
    epoch: int
    tail: str
    num_samples: int
    num_steps: int
    num_dropped: int
    num_repeated: int
    num_padding_slots: int
    micro_batch_size: int
    micro_batches_per_step: int
    samples_per_step: int
    """Sample slots of a step, including padding slots of the last step but no padding micro-batches."""
    world_size: int
    num_micro_batches_per_rank_per_step: int
    num_micro_batches_per_rank: int
    """Micro-batches that every rank runs in the epoch, including padding: ``len(loader)``."""
    num_padding_micro_batches_per_step: int
    efficiency: float
    """Share of a step's micro-batches that are not padding; 1.0 if the world size divides M."""
    lanes: LaneSummary | None = None
    """Numbers of the lanes; None, and left out of the JSON, if the spec has none."""
    max_tokens: int = 0
    """The token budget; 0, and left out of the JSON, without one."""
    num_skipped: int = 0
    """Samples in ``num_dropped`` that are over the budget and skipped by rule."""

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as a JSON object; padding micro-batches keep the key of older versions."""
        numbers = asdict(self)
        numbers["num_fillers_per_step"] = numbers.pop("num_padding_micro_batches_per_step")
        del numbers["lanes"]
        if self.lanes is not None:
            numbers["lanes"] = self.lanes.to_json()
        if not self.max_tokens:
            del numbers["max_tokens"], numbers["num_skipped"]
        return numbers

    def lines(self) -> list[str]:
        """Return the numbers as lines of text."""
        held = (
            f"{self.samples_per_step:,} samples ({self.micro_batches_per_step:,} micro-batches of "
            f"{self.micro_batch_size:,})"
        )
        if self.max_tokens:
            held = f"{self.micro_batches_per_step:,} micro-batches of at most {self.max_tokens:,} tokens"
        rows = {
            "steps": f"{self.num_steps:,} of {held}",
            f"tail {self.tail}": self._tail_line(),
            "ranks": (
                f"{self.world_size:,}, each runs {self.num_micro_batches_per_rank_per_step:,} micro-batches "
                f"a step, {self.num_micro_batches_per_rank:,} in the epoch"
            ),
            "efficiency": f"{self.efficiency:.1%}{self._padding_note()}",
            **(self.lanes.lines() if self.lanes is not None else {}),
        }
        if self.max_tokens and self.lanes is not None and self.lanes.num_over_budget:
            fate = "skipped by rule" if self.num_skipped else "alone in a micro-batch, or cut"
            rows["over budget"] = f"{self.lanes.num_over_budget:,} samples, {fate}"
        title = f"epoch {self.epoch} with seed {self.seed}: {self.num_samples:,} samples"
        return [title, *(f"  {name:<13}{text}" for name, text in rows.items())]

    def _tail_line(self) -> str:
        if self.num_dropped:
            return f"samples left out of this epoch: {self.num_dropped:,}"
        if self.num_repeated:
            return f"slots that repeat a sample, at full weight: {self.num_repeated:,}"
        if self.num_padding_slots:
            what = "micro-batches without samples" if self.max_tokens else "padding slots of weight 0"
            return f"{what}: {self.num_padding_slots:,}"
        return "the samples fill every step"

    def _padding_note(self) -> str:
        if not self.num_padding_micro_batches_per_step:
            return ""
        return (
            f", because the ranks do not divide the micro-batches of a step; padding micro-batches in every "
            f"step: {self.num_padding_micro_batches_per_step:,}"
        )


class EpochPlan:
    """The steps of one epoch: a pure function of its arguments, the same on every rank and machine.

    Safe to share between threads.

    Args:
        population: Rows of the samples table that belong to the epoch: those of a split or a subset; or a
            mixture, such as rows with weights, or a blend, whose rows are blended ones.
        spec: How micro-batches and steps are formed.
        seed: Run-level seed, 0 to 2**63 - 1.
        epoch: Number of the epoch, from 0.
        layout: Layout of the samples; required if the spec has lanes, otherwise unused.
        is_shuffled: False leaves samples in the order of their rows, the same in every epoch; lanes and
            mixtures have orders of their own.

    Attributes:
        num_samples: Samples of the epoch: of the population, or draws of a mixture.
        num_steps: Steps of the epoch, at least 1; under a token budget they differ between epochs.
        lane_plan: The lanes of the epoch; None if the spec has none.

    Raises:
        PlanError: No samples, no step, a number out of range, or a layout that is missing or does not fit.

    Example:
        >>> from shardflow.sampling import BatchSpec, EpochPlan
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
        population: Rows | Mixture,
        spec: BatchSpec,
        *,
        seed: int,
        epoch: int,
        layout: SampleLayout | None = None,
        is_shuffled: bool = True,
    ) -> None:
        self.population = _checked_population(population)
        self._is_shuffled = is_shuffled
        # The indices that the stages use: rows of a range, or numbers of the samples of a subset or blend.
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
            if isinstance(self.population, Mixture):
                num_samples = self.population.num_draws
                order = BlendOrder(self.population, seed=self.seed, epoch=self.epoch)
            else:
                num_samples = len(self._numbers)
                order = EpochOrder(
                    self._numbers, seed=self.seed, epoch=self.epoch, is_shuffled=self._is_shuffled
                )
            slots = self._slots = EpochSlots.of(num_samples, self.spec)
            self._micros = FixedMicroBatches(order, slots, size=self.spec.micro_batch_size)
        else:
            self._slots, self._micros = lane_plan.slots, lane_plan.micros
        self._padding = self._micros.padding_micro_batch()
        self.num_samples, self.num_steps = self._slots.num_samples, self._slots.num_steps

    @property
    def num_dropped(self) -> int:
        """Samples that tail ``drop`` leaves out, plus those that a budget skips by rule."""
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
        """Return the plan of another epoch of the same run, reusing everything that all epochs share."""
        epoch = checked_int("epoch", epoch, low=0, high=MAX_COUNTER, where="epoch plan", error=PlanError)
        other = copy(self)
        other.epoch = epoch
        other._form(None if self.lane_plan is None else self.lane_plan.for_epoch(epoch))
        return other

    def micro_batch(self, step: int, micro: int) -> MicroBatch:
        """Return micro-batch ``micro`` of ``step``.

        Args:
            step: 0 to ``num_steps - 1``.
            micro: 0 to ``M - 1``, with M = ``micro_batches_per_step``. M to 2 M - 1 are padding
                micro-batches, which :meth:`RankSchedule.micro` assigns if the world size does not divide M.

        Raises:
            PlanError: There is no such step or micro-batch.
        """
        per_step = self.spec.micro_batches_per_step
        step = self._checked_step(step)
        micro = checked_int("micro", micro, low=0, high=2 * per_step - 1, where="epoch plan", error=PlanError)
        if micro >= per_step:
            return self._padding
        found = self._micros.micro_batch(step * per_step + micro)
        if isinstance(self.population, range):
            return found
        return MicroBatch(self._rows(found.rows), found.weights)

    def step(self, step: int) -> tuple[Int64Array, npt.NDArray[np.uint8]]:
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

    def numbered_step(self, step: int) -> tuple[Int64Array, npt.NDArray[np.uint8]]:
        """Return a step with the layout's numbers instead of rows: in a subset, numbers from 0."""
        per_step = self.spec.micro_batches_per_step
        first = self._checked_step(step) * per_step
        return self._micros.span(first, first + per_step)

    def summary(self, schedule: RankSchedule) -> PlanSummary:
        """Return everything known about the epoch before its first step.

        Raises:
            PlanError: The schedule is for another number of micro-batches per step.
        """
        if schedule.micro_batches_per_step != self.spec.micro_batches_per_step:
            raise PlanError(
                f"micro_batches_per_step of the schedule must be {self.spec.micro_batches_per_step}, got "
                f"{schedule.micro_batches_per_step} (epoch plan); build both from one batch spec."
            )
        slots, spec = self._slots, self.spec
        return PlanSummary(
            seed=self.seed,
            epoch=self.epoch,
            tail=spec.tail,
            num_samples=slots.num_samples,
            num_steps=slots.num_steps,
            num_dropped=slots.num_dropped,
            num_repeated=slots.num_repeated,
            num_padding_slots=slots.num_padding_slots,
            micro_batch_size=spec.micro_batch_size,
            micro_batches_per_step=spec.micro_batches_per_step,
            samples_per_step=spec.samples_per_step,
            world_size=schedule.world_size,
            num_micro_batches_per_rank_per_step=schedule.num_micro_batches_per_rank,
            num_micro_batches_per_rank=slots.num_steps * schedule.num_micro_batches_per_rank,
            num_padding_micro_batches_per_step=schedule.num_padding_micro_batches,
            efficiency=schedule.efficiency,
            lanes=None if self.lane_plan is None else self.lane_plan.summary(),
            max_tokens=0 if spec.budget is None else spec.budget.max_tokens,
            num_skipped=slots.num_skipped if isinstance(slots, BudgetSlots) else 0,
        )

    def _rows(self, numbers: Int64Array) -> Int64Array:
        """Return the rows of samples, -1 in padding slots; read-only."""
        rows = numbers.copy()
        is_sample = numbers >= 0
        found = numbers[is_sample]
        if isinstance(self.population, Mixture):
            rows[is_sample] = self.population.rows(found)
        else:
            rows[is_sample] = nth_rows(self.population, found)
        rows.setflags(write=False)
        return rows

    def _checked_step(self, step: int) -> int:
        where = f"epoch {self.epoch}"
        return checked_int("step", step, low=0, high=self.num_steps - 1, where=where, error=PlanError)


def _numbers_of(population: Rows | Mixture) -> range:
    if isinstance(population, range):
        return population
    return range(population.num_samples if isinstance(population, Mixture) else len(population))


def _checked_population(population: Rows | Mixture) -> Rows | Mixture:
    if isinstance(population, RowSet | Mixture):
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
            "layout must be given where the batch spec has lanes, got none (epoch plan); pass the sample "
            "layout, or choose lanes = 0."
        )
    if layout.population != population:
        raise PlanError(
            f"population must be the layout's {layout.population}, got {population} (epoch plan); build both "
            f"from one split."
        )
    return layout
