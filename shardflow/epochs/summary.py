"""The numbers of an epoch that are known, and reported, before its first step."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shardflow.epochs.elastic import RankSchedule
from shardflow.epochs.slots import EpochSlots
from shardflow.epochs.spec import BatchSpec

__all__ = ["PlanSummary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """One epoch on one world size in numbers, plain Python values only."""

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
    """Sample slots of a step: padding in the last step included, fillers not."""
    world_size: int
    num_micro_batches_per_rank_per_step: int
    num_micro_batches_per_rank: int
    """Micro-batches that every rank runs in the epoch, fillers included: ``len(loader)``."""
    num_fillers_per_step: int
    efficiency: float
    """Share of a step's micro-batches that are no fillers; 1.0 where the world size divides M."""

    @classmethod
    def of(
        cls, slots: EpochSlots, spec: BatchSpec, schedule: RankSchedule, *, seed: int, epoch: int
    ) -> PlanSummary:
        """Collect the numbers of an epoch's slots, dealt by ``schedule``."""
        return cls(
            seed=seed,
            epoch=epoch,
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
            num_fillers_per_step=schedule.num_fillers,
            efficiency=schedule.efficiency,
        )

    def to_json(self) -> dict[str, int | float | str]:
        """Return the numbers as a JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the numbers as lines for people."""
        rows = {
            "steps": (
                f"{self.num_steps:,} of {self.samples_per_step:,} samples "
                f"({self.micro_batches_per_step:,} micro-batches of {self.micro_batch_size:,})"
            ),
            f"tail {self.tail}": self._tail_line(),
            "ranks": (
                f"{self.world_size:,}, each runs {self.num_micro_batches_per_rank_per_step:,} micro-batches "
                f"a step, {self.num_micro_batches_per_rank:,} in the epoch"
            ),
            "efficiency": f"{self.efficiency:.1%}{self._filler_note()}",
        }
        title = f"epoch {self.epoch} with seed {self.seed}: {self.num_samples:,} samples"
        return [title, *(f"  {name:<13}{text}" for name, text in rows.items())]

    def _tail_line(self) -> str:
        if self.num_dropped:
            return f"samples left out of this epoch: {self.num_dropped:,}"
        if self.num_repeated:
            return f"slots that hold a sample again, at full weight: {self.num_repeated:,}"
        if self.num_padding_slots:
            return f"padding slots of weight 0: {self.num_padding_slots:,}"
        return "the samples fill every step"

    def _filler_note(self) -> str:
        if not self.num_fillers_per_step:
            return ""
        return (
            f", as the ranks do not divide the micro-batches of a step; fillers of weight 0 in every step: "
            f"{self.num_fillers_per_step:,}"
        )
