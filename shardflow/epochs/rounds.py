"""Rounds: how steps take equally from all lanes, and what becomes of the lanes' uneven ends.

A lane is a line of micro-batches. All lanes give their first T micro-batches to steps, equally many to each
step as far as the numbers allow; what a lane has beyond T is *pooled*. The world size has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import sums

__all__ = ["Rounds"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """The lanes' equal parts, cut into rounds in which micro-batches of equal cost rank meet.

    Always ``num_lane_steps * M == T * L``, and every round is whole steps.
    """

    num_lanes: int
    per_step: int
    """M, micro-batches of a step."""
    num_common: int
    """T, micro-batches that every lane gives."""
    bounds: Int64Array
    """``(R + 1,)`` int64: in round r each lane gives its micro-batches ``[bounds[r], bounds[r + 1])``."""
    pool_before: Int64Array
    """``(L + 1,)`` int64: how many micro-batches the lanes before each one leave to the pool."""

    @classmethod
    def of(cls, num_micros: Int64Array, per_step: int, *, round_micros: int) -> Rounds:
        """Cut lanes into rounds.

        Args:
            num_micros: ``(L,)`` int64, micro-batches of each lane.
            per_step: M.
            round_micros: About how many micro-batches a lane gives in a round, such as a window has; at
                least 1.
        """
        num_lanes = len(num_micros)
        # Whole steps from all lanes equally need a multiple of this from each.
        unit = per_step // gcd(per_step, num_lanes)
        num_units = int(num_micros.min()) // unit
        num_rounds = max(1, min(num_units, num_units * unit // round_micros))
        numbers = np.arange(num_rounds + 1, dtype=np.int64)
        return cls(
            num_lanes=num_lanes,
            per_step=per_step,
            num_common=num_units * unit,
            bounds=unit * (numbers * num_units // num_rounds),
            pool_before=sums(num_micros - num_units * unit),
        )

    @property
    def num_lane_steps(self) -> int:
        """Steps that take from all lanes."""
        return self.num_common * self.num_lanes // self.per_step

    @property
    def num_pooled(self) -> int:
        """Micro-batches of the pool."""
        return int(self.pool_before[-1])

    def round_of(self, step: int) -> tuple[int, int, int]:
        """Return the round of a lane step, the step's number in it, and the steps of the round."""
        steps = self.bounds * self.num_lanes // self.per_step
        number = int(np.searchsorted(steps, step, side="right")) - 1
        return number, step - int(steps[number]), int(steps[number + 1] - steps[number])
