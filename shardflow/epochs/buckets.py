"""Which size of image a sample gets in an epoch: a keyed number, known to the plan before anything is read.

A sample of a large bucket costs more tokens, so the choice is part of the cost rule: the plan and the loader
draw the same number from (seed, epoch, row of the samples table), each for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import check_ints
from shardflow.epochs.network import mix_array
from shardflow.errors import ConfigError
from shardflow.seeds import derive

__all__ = ["MAX_BUCKETS", "BucketDraw", "ImageBucket"]

Int64Array = npt.NDArray[np.int64]

MAX_BUCKETS = 16
"""So that a spec with buckets still leaves a loader's state under 1 KB."""

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_UPPER = np.uint64(32)
_BOUNDS = {"weight": (1, 2**16), "max_slices": (0, 2**17), "tokens_per_slice": (0, 2**17)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageBucket:
    """What a sample costs that gets this size of image.

    Raises:
        ConfigError: A number is out of range.
    """

    weight: int = 1
    """How likely it is, against the weights of the others."""
    max_slices: int
    """Slices that are taken at most."""
    tokens_per_slice: int

    def __post_init__(self) -> None:
        check_ints(self, _BOUNDS, where="image bucket", error=ConfigError)


@dataclass(frozen=True, slots=True)
class BucketDraw:
    """What the choices of an epoch follow from."""

    key: int

    @classmethod
    def of(cls, seed: int, epoch: int) -> BucketDraw:
        """Take the key of an epoch."""
        return cls(derive(seed, "image-bucket", epoch))

    def choose(self, rows: npt.NDArray[Any], weights: Sequence[int]) -> Int64Array:
        """Return the number of each sample's bucket, int64.

        Integers alone, so every machine finds the same; ``tests/unit/epochs/test_buckets.py`` pins it.

        Args:
            rows: Rows of the samples table, of any shape.
            weights: Of the buckets.
        """
        words = (rows.astype(np.uint64) + np.uint64(1)) * _GOLDEN_RATIO + np.uint64(self.key)
        mix_array(words, np.empty_like(words))
        bounds = np.cumsum(np.array(weights, np.uint64))
        # The upper half of the word as a share of the sum: both below 2**32, so the product fits.
        share = ((words >> _UPPER) * bounds[-1]) >> _UPPER
        chosen: Int64Array = np.searchsorted(bounds, share, side="right").astype(np.int64)
        return chosen
