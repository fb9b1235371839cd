"""The numbers of an epoch that are known, and reported, before its first step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardflow.epochs.elastic import RankSchedule
from shardflow.epochs.lane_plan import BudgetSlots, LaneSummary
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
    lanes: LaneSummary | None = None
    """What lanes make of it; None, and no key of the JSON, where the spec has none."""
    max_tokens: int = 0
    """The token budget; 0, and no key of the JSON, without one."""
    num_skipped: int = 0
    """Samples of ``num_dropped`` that are over the budget and skipped by rule."""

    @classmethod
    def of(
        cls,
        slots: EpochSlots | BudgetSlots,
        spec: BatchSpec,
        schedule: RankSchedule,
        *,
        seed: int,
        epoch: int,
        lanes: LaneSummary | None = None,
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
            lanes=lanes,
            max_tokens=0 if spec.budget is None else spec.budget.max_tokens,
            num_skipped=slots.num_skipped if isinstance(slots, BudgetSlots) else 0,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as a JSON object."""
        numbers = asdict(self)
        if self.lanes is None:
            del numbers["lanes"]
        if not self.max_tokens:
            del numbers["max_tokens"], numbers["num_skipped"]
        return numbers

    def lines(self) -> list[str]:
        """Return the numbers as lines for people."""
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
            "efficiency": f"{self.efficiency:.1%}{self._filler_note()}",
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
            return f"slots that hold a sample again, at full weight: {self.num_repeated:,}"
        if self.num_padding_slots:
            what = "micro-batches without samples" if self.max_tokens else "padding slots of weight 0"
            return f"{what}: {self.num_padding_slots:,}"
        return "the samples fill every step"

    def _filler_note(self) -> str:
        if not self.num_fillers_per_step:
            return ""
        return (
            f", as the ranks do not divide the micro-batches of a step; fillers of weight 0 in every step: "
            f"{self.num_fillers_per_step:,}"
        )
