"""Large images as tiles of one size: as many as an image is large, and an overview.

A radiograph of 3000 x 2500 pixels shrunk to 224 x 224 shows no nodule. Cut into tiles it keeps its detail,
and how many tiles there are follows from the samples table, so memory and cost are known before a byte is
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.configs import Bounds, check_fields
from shardflow.epochs import TileRule
from shardflow.errors import FormatError
from shardflow.loading.view import ArraySpec
from shardflow.loading.slice_choice import SliceChoice, choose_slices
from shardflow.loading.view import PixelDtype, Resolution, SliceFacts
from shardflow.loading.windows import check_windows, choose_window

__all__ = ["TileView"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileView:
    """Tiles of K of the N slices of the primary series, each a place of its own, as slices are elsewhere.

    A slice is brought to a whole number of tiles, see `shardflow.epochs.TileRule`; the overview comes first,
    then the tiles row by row. A batch has as many places as its sample of most tiles needs.
    """

    rows: Annotated[int, Bounds(1, 2**16)]
    """Rows of a tile."""
    columns: Annotated[int, Bounds(1, 2**16)]
    max_tiles: Annotated[int, Bounds(1, 2**10)]
    """Tiles of a slice at most, the overview not counted."""
    num_slices: Annotated[int, Bounds(1)] = 1
    resolution: Resolution = "full"
    slice_choice: SliceChoice = "even"
    dtype: PixelDtype = "int16"
    windows: tuple[str, ...] = ()
    """These five as in `ImageView`; the number of tiles is that of the full size also with ``small``."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_windows(self.windows)

    @property
    def rule(self) -> TileRule:
        """How images are cut; a cost rule takes it for a token budget."""
        return TileRule(rows=self.rows, columns=self.columns, max_tiles=self.max_tiles)

    @property
    def may_resize(self) -> bool:
        """Slices are brought to a whole number of tiles."""
        return True

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_slots = len(facts.rows)
        num_tiles = self.rule.num_places(facts.rows, facts.columns)
        num_places = max(1, int((np.minimum(facts.num_slices, self.num_slices) * num_tiles).max(initial=1)))
        return [
            ArraySpec.of("image", self.dtype, num_slots, num_places, self.rows, self.columns),
            ArraySpec.of("slice_mask", np.uint8, num_slots, num_places),
            ArraySpec.of("tile_grid", np.int64, num_slots, 2),
            ArraySpec.of("display_range", np.float32, num_slots, 2),
        ]

    def prepare(self, arrays: Mapping[str, NDArray[Any]], facts: SliceFacts) -> None:
        """Fill what does not depend on any pixel."""
        arrays["display_range"][:] = 0
        arrays["tile_grid"][:] = np.stack(self.rule.grids(facts.rows, facts.columns), axis=1)

    def choose(
        self,
        num_slices: int,
        *,
        seed: int,
        epoch: int,
        row: int,
        place: tuple[int, ...] = (),
    ) -> NDArray[np.int64]:
        """Return the indices of the slices to deliver, ascending; see `ImageView.choose`."""
        return choose_slices(
            num_slices, self.num_slices, self.slice_choice, seed=seed, epoch=epoch, row=row, place=place
        )

    def window(
        self, *, seed: int, epoch: int, row: int, place: tuple[int, ...]
    ) -> tuple[float, float] | None:
        """Return the display range that a sample of a CT gets; None for that of the study."""
        return choose_window(self.windows, seed=seed, epoch=epoch, row=row, place=place)

    def target(self, arrays: Mapping[str, NDArray[Any]], slot: int, num_chosen: int) -> NDArray[Any]:
        """Zero the places that stay empty; return the others, ``(num_chosen, places, rows, columns)``.

        Raises:
            FormatError: There are more slices than the samples table says.
        """
        image: NDArray[Any] = arrays["image"][slot]
        each = self._places(arrays, slot)
        used = num_chosen * each
        if used > len(image):
            raise FormatError(f"slices must be at most as many as the samples table says, got {num_chosen}.")
        image[used:] = 0
        arrays["slice_mask"][slot] = np.arange(len(image)) < used
        return image[:used].reshape(num_chosen, each, self.rows, self.columns)

    def canvas_shape(self, arrays: Mapping[str, NDArray[Any]], slot: int) -> tuple[int, int]:
        """Return the size that a slice of a slot is brought to before it is cut."""
        high, wide = arrays["tile_grid"][slot].tolist()
        return high * self.rows, wide * self.columns

    def cut(self, canvas: NDArray[Any], places: NDArray[Any]) -> None:
        """Cut a slice into its places.

        Args:
            canvas: ``(rows, columns)`` of `canvas_shape`.
            places: ``(tiles, rows, columns)``, the overview first where there are several.
        """
        high, wide = canvas.shape[0] // self.rows, canvas.shape[1] // self.columns
        tiles = canvas.reshape(high, self.rows, wide, self.columns).swapaxes(1, 2)
        if high * wide > 1:
            cv2.resize(canvas, (self.columns, self.rows), dst=places[0], interpolation=cv2.INTER_AREA)
        places[-high * wide :].reshape(tiles.shape)[:] = tiles

    def blank(self, arrays: Mapping[str, NDArray[Any]], slot: int) -> None:
        """Make a slot look like one without slices."""
        for name in ("image", "slice_mask", "display_range"):
            arrays[name][slot] = 0

    @staticmethod
    def _places(arrays: Mapping[str, NDArray[Any]], slot: int) -> int:
        num_tiles = int(arrays["tile_grid"][slot].prod())
        return num_tiles + (num_tiles > 1)
