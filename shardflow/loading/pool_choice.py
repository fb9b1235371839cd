"""Which version of a sample: the original, or one of the augmented variants that packing made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardflow.loading.view import ImageView
from shardflow.seeds import derive

if TYPE_CHECKING:
    from shardflow.loading.reader import Shard
    from shardflow.loading.views import View

__all__ = ["ORIGINAL", "choose_variant", "find_slices"]

ORIGINAL = 0
_WORD = 2**64


def choose_variant(
    num_variants: int, share: float, *, seed: int, epoch: int, row: int, place: tuple[int, ...] = ()
) -> int:
    """Return the number of the variant, from 1, or `ORIGINAL`.

    Args:
        num_variants: Of the sample's series.
        share: Of the samples that get a variant; which one, all are as likely.
        seed: Run-level seed.
        epoch: The epoch.
        row: Row of the sample in the samples table; of a blend, the blended one.
        place: Step, micro-batch and slot in a blend, where a sample may stand twice; else nothing.
    """
    if not num_variants or derive(seed, "variant-share", epoch, row, *place) >= share * _WORD:
        return ORIGINAL
    return 1 + derive(seed, "variant-choice", epoch, row, *place) * num_variants // _WORD


def find_slices(
    shard: Shard,
    row_in_shard: int,
    view: View,
    series: int,
    *,
    seed: int,
    epoch: int,
    row: int,
    place: tuple[int, ...] = (),
) -> tuple[NDArray[np.int64], int]:
    """Return the fields that hold the slices of a sample's series, and which variant of it they are.

    A variant has all slices of its series; one that has not is none, and the original is taken.
    """
    slices = shard.slices(row_in_shard, view.resolution, series)
    if isinstance(view, ImageView) and view.augment_pool:
        num_variants = shard.num_variants(row_in_shard, series)
        variant = choose_variant(
            num_variants, view.augment_pool, seed=seed, epoch=epoch, row=row, place=place
        )
        varied = shard.variant_slices(row_in_shard, variant, series) if variant else slices[:0]
        if len(varied) == len(slices):
            return varied, variant
    return slices, ORIGINAL
