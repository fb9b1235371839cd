"""Which slices of a series: K of N, in order."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.epochs import Permutation
from shardflow.seeds import derive

__all__ = ["SliceChoice", "choose_slices"]

SliceChoice: TypeAlias = Literal["even", "random"]


def choose_slices(
    num_slices: int,
    most: int,
    how: SliceChoice,
    *,
    seed: int,
    epoch: int,
    row: int,
    place: tuple[int, ...] = (),
) -> NDArray[np.int64]:
    """Return the indices of the slices to deliver, ascending.

    Args:
        num_slices: N, slices of the primary series.
        most: K, slices that are wanted; all where there are no more.
        how: ``even``: the middles of K equal parts. ``random``: K different ones, others in each epoch.
        seed: Run-level seed.
        epoch: Epoch.
        row: Row of the sample in the samples table; of a blend, the blended one.
        place: Step, micro-batch and slot in a blend, where a sample may stand twice; else nothing.
    """
    if num_slices <= most:
        return np.arange(num_slices, dtype=np.int64)
    places = np.arange(most, dtype=np.int64)
    if how == "even":
        return (2 * places + 1) * num_slices // (2 * most)
    return np.sort(Permutation(num_slices, derive(seed, "slice-choice", epoch, row, *place))(places))
