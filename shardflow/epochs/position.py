"""Where a run stands: a position, not a pickle of iterators.

A position counts *consumed* steps, so what was prefetched and not used is planned again. It is equal on all
ranks and says nothing about them, so any world size can go on from it, and at once: the plan finds the next
step without those before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardflow.epochs.integers import MAX_COUNTER, check_ints, checked_int
from shardflow.errors import StateError

__all__ = ["Position"]


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The next step to run.

    Raises:
        StateError: Epoch or step is no integer of at least 0.
    """

    epoch: int
    step: int

    def __post_init__(self) -> None:
        check_ints(
            self, dict.fromkeys(("epoch", "step"), (0, MAX_COUNTER)), where="position", error=StateError
        )

    @classmethod
    def after(
        cls, *, epoch: int, num_consumed: int, num_micro_batches_per_rank: int, num_steps: int
    ) -> Position:
        """Return the position of a rank that has consumed ``num_consumed`` micro-batches of ``epoch``.

        After the last micro-batch of step k it is k + 1. Inside a step it rounds down, because a step that
        was not finished has not changed the model. After the epoch's last step it is step 0 of the next.

        Args:
            epoch: The epoch that is being run.
            num_consumed: Micro-batches of it that this rank has consumed, fillers included, counted from the
                epoch's start also where the run was resumed in its middle.
            num_micro_batches_per_rank: Micro-batches that the rank runs in a step, at least 1.
            num_steps: Steps of the epoch.

        Raises:
            StateError: More micro-batches were consumed than the epoch has.
        """
        total = num_steps * num_micro_batches_per_rank
        where = f"epoch {epoch}"
        num_consumed = checked_int(
            "num_consumed", num_consumed, low=0, high=total, where=where, error=StateError
        )
        if num_consumed == total:
            return cls(epoch + 1, 0)
        return cls(epoch, num_consumed // num_micro_batches_per_rank)
