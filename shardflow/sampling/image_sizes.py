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
from shardflow.sampling.permutation import check_ints, mix_array
from shardflow.seeds import derive

Int64Array = npt.NDArray[np.int64]

_TILE_BOUNDS = {"rows": (1, 2**16), "columns": (1, 2**16), "max_tiles": (1, 2**10)}
MAX_BUCKETS = 16
"""So that a spec with buckets still leaves a loader's state under 1 KB."""
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_UPPER = np.uint64(32)
_BOUNDS = {"weight": (1, 2**16), "max_slices": (0, 2**17), "tokens_per_slice": (0, 2**17)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TileRule:
    """How images of any size are cut into tiles of one.

    An image gets as many rows and columns of tiles as cover it at its own size; where those are more than
    ``max_tiles``, the longer side loses one after the other, and the image is brought to what is left. One of
    more than one tile also gets an overview, the whole image in one tile, first.

    Raises:
        ConfigError: A number is out of range.
    """

    rows: int
    """Rows of a tile."""
    columns: int
    max_tiles: int
    """Tiles of one image at most, the overview not counted."""

    def __post_init__(self) -> None:
        check_ints(self, _TILE_BOUNDS, where="tile rule", error=ConfigError)

    def grids(self, rows: npt.NDArray[Any], columns: npt.NDArray[Any]) -> tuple[Int64Array, Int64Array]:
        """Return the rows and columns of tiles of images, at least 1 each.

        Args:
            rows: Rows of the images.
            columns: Their columns, in the same shape.
        """
        high = np.maximum(1, -(-rows.astype(np.int64) // self.rows))
        wide = np.maximum(1, -(-columns.astype(np.int64) // self.columns))
        # More than this many a side are too many in any case.
        high, wide = np.minimum(high, self.max_tiles), np.minimum(wide, self.max_tiles)
        too_many = np.flatnonzero(high * wide > self.max_tiles)
        while too_many.size:
            is_high = high.flat[too_many] >= wide.flat[too_many]
            high.flat[too_many] -= is_high
            wide.flat[too_many] -= ~is_high
            too_many = too_many[high.flat[too_many] * wide.flat[too_many] > self.max_tiles]
        return high, wide

    def num_places(self, rows: npt.NDArray[Any], columns: npt.NDArray[Any]) -> Int64Array:
        """Return the tiles of images, the overview included, int64."""
        high, wide = self.grids(rows, columns)
        num_tiles = high * wide
        return num_tiles + (num_tiles > 1)

    @property
    def most_places(self) -> int:
        """Tiles of any image at most, the overview included."""
        return self.max_tiles + (self.max_tiles > 1)


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

        Integers alone, so every machine finds the same; ``tests/unit/sampling/test_buckets.py`` pins it.

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
