"""Who runs which micro-batch of a step: the last stage of the plan, and the only one that knows the world size."""

from __future__ import annotations

from dataclasses import dataclass

from shardflow.epochs.integers import MAX_COUNTER, checked_int
from shardflow.errors import PlanError

__all__ = ["RankSchedule"]


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """The micro-batches of a step, dealt to ranks round by round.

    In round ``slot`` rank ``r`` runs micro-batch ``slot * world_size + r``. Every rank runs ``ceil(M / world_size)`` rounds;
    what lies at or behind M in the last round is a filler of weight 0, so that every rank joins every collective.

    Args:
        micro_batches_per_step: M of the batch spec.
        world_size: Number of data-parallel ranks, 1 to M.
        allow_fillers: False refuses a world size that does not divide M.

    Raises:
        PlanError: The world size is out of range, or does not divide M and fillers are not allowed.

    Example:
        >>> schedule = RankSchedule(micro_batches_per_step=64, world_size=56)
        >>> schedule.num_micro_batches_per_rank, schedule.num_fillers, round(schedule.efficiency, 3)
        (2, 48, 0.571)
    """

    micro_batches_per_step: int
    world_size: int
    allow_fillers: bool = True

    def __post_init__(self) -> None:
        where = "rank schedule"
        num_micros = checked_int(
            "micro_batches_per_step",
            self.micro_batches_per_step,
            low=1,
            high=MAX_COUNTER,
            where=where,
            error=PlanError,
        )
        world_size = checked_int(
            "world_size", self.world_size, low=1, high=MAX_COUNTER, where=where, error=PlanError
        )
        object.__setattr__(self, "micro_batches_per_step", num_micros)
        object.__setattr__(self, "world_size", world_size)
        if world_size > num_micros:
            raise PlanError(
                f"world_size must be at most micro_batches_per_step ({num_micros}), got {world_size} ({where}); start "
                f"at most {num_micros} ranks, or, for a new run, set micro_batches_per_step to a multiple of "
                f"{world_size}."
            )
        if num_micros % world_size and not self.allow_fillers:
            raise PlanError(
                f"world_size must divide micro_batches_per_step ({num_micros}), got {world_size} ({where}, fillers "
                f"are not allowed); start {self._nearest_divisor()} ranks, or allow fillers at an efficiency of "
                f"{self.efficiency:.1%}."
            )

    @property
    def num_micro_batches_per_rank(self) -> int:
        """Micro-batches that every rank runs in a step, fillers included."""
        return -(-self.micro_batches_per_step // self.world_size)

    @property
    def num_fillers(self) -> int:
        """Fillers in a step, over all ranks."""
        return self.num_micro_batches_per_rank * self.world_size - self.micro_batches_per_step

    @property
    def efficiency(self) -> float:
        """Share of the micro-batches that are no fillers, in (0.5, 1]; the speed-up over one rank is this times W."""
        return self.micro_batches_per_step / (self.num_micro_batches_per_rank * self.world_size)

    def micro(self, rank: int, slot: int) -> int:
        """Return the micro-batch that ``rank`` runs in round ``slot``; a filler if it is not below M.

        Raises:
            PlanError: There is no such rank or round.
        """
        where = "rank schedule"
        rank = checked_int("rank", rank, low=0, high=self.world_size - 1, where=where, error=PlanError)
        last = self.num_micro_batches_per_rank - 1
        slot = checked_int("slot", slot, low=0, high=last, where=where, error=PlanError)
        return slot * self.world_size + rank

    def micros(self, rank: int) -> range:
        """Return the micro-batches that ``rank`` runs in a step, in order; those not below M are fillers."""
        first = self.micro(rank, 0)
        return range(first, self.num_micro_batches_per_rank * self.world_size, self.world_size)

    def is_filler(self, micro: int) -> bool:
        """Say whether a micro-batch of this schedule is all padding."""
        return micro >= self.micro_batches_per_step

    def _nearest_divisor(self) -> int:
        return next(w for w in range(self.world_size, 0, -1) if self.micro_batches_per_step % w == 0)
