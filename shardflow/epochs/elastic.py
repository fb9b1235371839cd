"""Stage 5 of the plan: who runs which micro-batch of a step; the only stage that knows the world size."""

from __future__ import annotations

from dataclasses import dataclass

from shardflow.epochs.integers import checked_int
from shardflow.epochs.spec import MAX_PER_STEP
from shardflow.errors import PlanError

__all__ = ["RankSchedule"]


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """The micro-batches of a step, dealt to the ranks like cards.

    Every rank runs ``ceil(M / W)`` micro-batches a step, one after the other in its *rank slots* 0, 1, ...;
    rank ``r`` runs micro-batch ``slot * W + r`` in slot ``slot``. Those of the last slot that are not below M
    are fillers of weight 0, so that every rank joins every collective.

    Args:
        micro_batches_per_step: M of the batch spec.
        world_size: W, the number of data-parallel ranks, 1 to M.
        allow_fillers: False refuses a world size that does not divide M.

    Raises:
        PlanError: The world size is out of range, or does not divide M and fillers are refused.

    Example:
        >>> schedule = RankSchedule(micro_batches_per_step=512, world_size=56)
        >>> schedule.num_micro_batches_per_rank, schedule.num_fillers, round(schedule.efficiency, 3)
        (10, 48, 0.914)
    """

    micro_batches_per_step: int
    world_size: int
    allow_fillers: bool = True

    def __post_init__(self) -> None:
        where = "rank schedule"
        for name in ("micro_batches_per_step", "world_size"):
            value = getattr(self, name)
            number = checked_int(name, value, low=1, high=MAX_PER_STEP, where=where, error=PlanError)
            object.__setattr__(self, name, number)
        if self.world_size > self.micro_batches_per_step:
            raise PlanError(
                f"world_size must be at most micro_batches_per_step ({self.micro_batches_per_step}), got "
                f"{self.world_size} ({where}); start at most {self.micro_batches_per_step} ranks, or begin a "
                f"new run with micro_batches_per_step set to a multiple of {self.world_size}."
            )
        if self.num_fillers and not self.allow_fillers:
            raise PlanError(
                f"world_size must divide micro_batches_per_step ({self.micro_batches_per_step}), got "
                f"{self.world_size} ({where}, fillers are refused); start {self._divisor_below()} ranks, or "
                f"allow fillers at an efficiency of {self.efficiency:.1%}."
            )

    @property
    def num_micro_batches_per_rank(self) -> int:
        """Micro-batches that every rank runs in a step, fillers included."""
        return -(-self.micro_batches_per_step // self.world_size)

    @property
    def num_fillers(self) -> int:
        """Fillers of a step, over all ranks."""
        return self.num_micro_batches_per_rank * self.world_size - self.micro_batches_per_step

    @property
    def efficiency(self) -> float:
        """Share of the micro-batches that are run and are no fillers, over 0.5 and at most 1."""
        return self.micro_batches_per_step / (self.num_micro_batches_per_rank * self.world_size)

    def micro(self, rank: int, slot: int) -> int:
        """Return the micro-batch that ``rank`` runs in its rank slot ``slot``; a filler if not below M.

        Raises:
            PlanError: There is no such rank or rank slot.
        """
        where = "rank schedule"
        rank = checked_int("rank", rank, low=0, high=self.world_size - 1, where=where, error=PlanError)
        last = self.num_micro_batches_per_rank - 1
        slot = checked_int("slot", slot, low=0, high=last, where=where, error=PlanError)
        return slot * self.world_size + rank

    def micros(self, rank: int) -> range:
        """Return the micro-batches that ``rank`` runs in a step, in order; those not below M are fillers.

        Raises:
            PlanError: There is no such rank.
        """
        return range(self.micro(rank, 0), self.num_micro_batches_per_rank * self.world_size, self.world_size)

    def is_filler(self, micro: int) -> bool:
        """Say whether a micro-batch that this schedule deals is a filler."""
        return micro >= self.micro_batches_per_step

    def _divisor_below(self) -> int:
        return next(w for w in range(self.world_size, 0, -1) if self.micro_batches_per_step % w == 0)
