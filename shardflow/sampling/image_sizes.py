"""Image sizes: the tiles of an image, and the keyed choice of a size bucket per sample.

The tiles of an image follow from its size alone. A sample in a large bucket costs more tokens, so the choice
is part of the cost rule: plan and loader draw the same number from (seed, epoch, row), each for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.errors import ConfigError
from shardflow.sampling.permutation import GOLDEN_RATIO, Int64Array, check_ints, mix_array
from shardflow.seeds import derive

_TILE_BOUNDS = {"rows": (1, 2**16), "columns": (1, 2**16), "max_tiles": (1, 2**10)}
MAX_BUCKETS = 16
"""Most buckets of a rule, so that the state of a loader stays below 1 KB."""
_UPPER = np.uint64(32)
_BOUNDS = {"weight": (1, 2**16), "max_slices": (0, 2**17), "tokens_per_slice": (0, 2**17)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TileRule:
    """Cutting of images of any size into tiles of one size.

    An image gets as many rows and columns of tiles as cover it at its own size. While these are more than
    ``max_tiles``, the longer side is shortened by one tile, and the image is resized to the rest. An image of
    more than one tile also gets an overview first: the whole image in one tile.

    Raises:
        ConfigError: A number is out of range.
    """

    rows: int
    """Rows of a tile."""
    columns: int
    max_tiles: int
    """Most tiles of an image, without the overview."""

    def __post_init__(self) -> None:
        check_ints(self, _TILE_BOUNDS, where="tile rule", error=ConfigError)

    def grids(self, rows: npt.NDArray[Any], columns: npt.NDArray[Any]) -> tuple[Int64Array, Int64Array]:
        """Return the number of rows and columns of tiles of each image, at least 1.

        Args:
            rows: Pixel rows of the images.
            columns: Pixel columns, in the same shape.
        """
        high = np.maximum(1, -(-rows.astype(np.int64) // self.rows))
        wide = np.maximum(1, -(-columns.astype(np.int64) // self.columns))
        # A side longer than this exceeds the limit in any case.
        high, wide = np.minimum(high, self.max_tiles), np.minimum(wide, self.max_tiles)
        too_many = np.flatnonzero(high * wide > self.max_tiles)
        while too_many.size:
            is_high = high.flat[too_many] >= wide.flat[too_many]
            high.flat[too_many] -= is_high
            wide.flat[too_many] -= ~is_high
            too_many = too_many[high.flat[too_many] * wide.flat[too_many] > self.max_tiles]
        return high, wide

    def num_places(self, rows: npt.NDArray[Any], columns: npt.NDArray[Any]) -> Int64Array:
        """Return the number of tiles of each image, including the overview, int64."""
        high, wide = self.grids(rows, columns)
        num_tiles = high * wide
        return num_tiles + (num_tiles > 1)

    @property
    def most_places(self) -> int:
        """Most tiles of any image, including the overview."""
        return self.max_tiles + (self.max_tiles > 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageBucket:
    """Cost of a sample whose images get one size.

    Raises:
        ConfigError: A number is out of range.
    """

    weight: int = 1
    """Probability of the bucket, relative to the weights of the others."""
    max_slices: int
    """Most slices taken from a sample."""
    tokens_per_slice: int

    def __post_init__(self) -> None:
        check_ints(self, _BOUNDS, where="image bucket", error=ConfigError)


@dataclass(frozen=True, slots=True)
class BucketDraw:
    """The keyed choice of buckets in an epoch."""

    key: int

    @classmethod
    def of(cls, seed: int, epoch: int) -> BucketDraw:
        """Derive the key of an epoch."""
        return cls(derive(seed, "image-bucket", epoch))

    def choose(self, rows: npt.NDArray[Any], weights: Sequence[int]) -> Int64Array:
        """Return the number of each sample's bucket, int64.

        Uses integers only, so every machine chooses the same (pinned by
        ``tests/unit/sampling/test_buckets.py``).

        Args:
            rows: Rows of the samples table, of any shape.
            weights: Weights of the buckets.
        """
        words = (rows.astype(np.uint64) + np.uint64(1)) * GOLDEN_RATIO + np.uint64(self.key)
        mix_array(words, np.empty_like(words))
        bounds = np.cumsum(np.array(weights, np.uint64))
        # The upper half of the word as a share of the sum: both below 2**32, so the product fits.
        share = ((words >> _UPPER) * bounds[-1]) >> _UPPER
        chosen: Int64Array = np.searchsorted(bounds, share, side="right").astype(np.int64)
        return chosen
