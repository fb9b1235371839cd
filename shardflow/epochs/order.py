"""Stage 1 of the plan, the order: which row of the samples table stands at which position of the epoch.

Here every sample of the population may follow every other one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardflow.epochs.permutation import Permutation
from shardflow.seeds import derive

__all__ = ["EpochOrder"]


class EpochOrder:
    """A full shuffle of a row range, anew in every epoch, in constant memory.

    Args:
        population: Rows of the samples table, at least one; a split is such a range.
        seed: Run-level seed.
        epoch: Number of the epoch, from 0.
    """

    def __init__(self, population: range, *, seed: int, epoch: int) -> None:
        self._population = population
        self._permutation = Permutation(len(population), derive(seed, "epoch-order", epoch))

    def rows(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows, int64, that stand at ``positions`` in ``[0, len(population))``."""
        rows = self._permutation(positions)
        rows *= self._population.step
        rows += self._population.start
        return rows
