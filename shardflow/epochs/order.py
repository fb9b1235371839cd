"""Stage 1 of the plan, the order: which row of the samples table stands at which position of the epoch.

Here every sample of the population may follow every other one. Whatever narrows that (lanes that keep a node's shards
together, windows that bound what is open) is another order with the same two members, ``num_samples`` and ``rows``.
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

    __slots__ = ("_permutation", "population")

    def __init__(self, population: range, *, seed: int, epoch: int) -> None:
        self.population = population
        self._permutation = Permutation(len(population), derive(seed, "epoch-order", epoch))

    @property
    def num_samples(self) -> int:
        """Positions of the epoch, one for each sample."""
        return len(self.population)

    def rows(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows at ``positions``, int64 in their shape; the positions lie in ``[0, num_samples)``."""
        return self._permutation(positions) * self.population.step + self.population.start
