"""Into how many tiles an image is cut: from its size alone, so that the plan knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import check_ints
from shardflow.errors import ConfigError

__all__ = ["TileRule"]

Int64Array = npt.NDArray[np.int64]

_TILE_BOUNDS = {"rows": (1, 2**16), "columns": (1, 2**16), "max_tiles": (1, 2**10)}


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
