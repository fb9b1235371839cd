"""What of a sample's primary series a batch holds: which slices, at which size, as which numbers.

A view decides sizes before anything is read (from facts alone), so that slices are decoded straight into
their place. Choices are keyed by (seed, epoch, row): the same on every rank, worker and restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.configs import Bounds, check_fields
from shardflow.epochs import Permutation
from shardflow.errors import FormatError
from shardflow.loading.batch import ArraySpec
from shardflow.seeds import derive

__all__ = ["ImageView", "NativeView", "PixelDtype", "SliceFacts", "View"]

PixelDtype: TypeAlias = Literal["int16", "float32"]


@dataclass(frozen=True, slots=True)
class SliceFacts:
    """Facts of the samples of a micro-batch, ``(B,)`` int64 each; zeros in padding slots."""

    num_slices: NDArray[np.int64]
    """Slices of all series: a bound on those of the primary one."""
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageView:
    """K of the N slices of the primary series, each resized to one size.

    A slice is stretched to ``rows x columns`` (area averaging where it shrinks, linear where it grows).
    Colour becomes luminance. A series of fewer slices fills the first places; ``slice_mask`` tells.
    """

    num_slices: Annotated[int, Bounds(1)]
    rows: Annotated[int, Bounds(1)]
    columns: Annotated[int, Bounds(1)]
    slice_choice: Literal["even", "random"] = "even"
    """``even``: the middles of K equal parts. ``random``: K different slices, others in each epoch, in
    order.
    """
    dtype: PixelDtype = "int16"
    """``int16`` is for series that are stored as int16 or uint8, such as CT: others are cut and rounded, and
    the loader counts it and warns. ``float32`` holds all 16-bit values exactly.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def may_resize(self) -> bool:
        """Slices are brought to the view's size."""
        return True

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_slots = len(facts.rows)
        return [
            ArraySpec.of("image", self.dtype, num_slots, self.num_slices, self.rows, self.columns),
            ArraySpec.of("slice_mask", np.uint8, num_slots, self.num_slices),
        ]

    def prepare(self, arrays: Mapping[str, NDArray[Any]], facts: SliceFacts) -> None:
        """Fill what does not depend on any pixel."""

    def choose(self, num_slices: int, *, seed: int, epoch: int, row: int) -> NDArray[np.int64]:
        """Return the indices of the slices to deliver, ascending.

        Args:
            num_slices: N, slices of the primary series.
            seed: Run-level seed.
            epoch: Epoch.
            row: Row of the sample in the samples table.
        """
        if num_slices <= self.num_slices:
            return np.arange(num_slices, dtype=np.int64)
        places = np.arange(self.num_slices, dtype=np.int64)
        if self.slice_choice == "even":
            return (2 * places + 1) * num_slices // (2 * self.num_slices)
        return np.sort(Permutation(num_slices, derive(seed, "slice-choice", epoch, row))(places))

    def target(self, arrays: Mapping[str, NDArray[Any]], slot: int, num_chosen: int) -> NDArray[Any]:
        """Zero the places that stay empty; return the others, ``(num_chosen, rows, columns)``."""
        image: NDArray[Any] = arrays["image"][slot]
        image[num_chosen:] = 0
        mask = arrays["slice_mask"][slot]
        mask[:num_chosen] = 1
        mask[num_chosen:] = 0
        return image[:num_chosen]

    def blank(self, arrays: Mapping[str, NDArray[Any]], slot: int) -> None:
        """Make a slot look like one without slices."""
        arrays["image"][slot] = 0
        arrays["slice_mask"][slot] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeView:
    """All slices of the primary series at their own size, one sample after another in a flat array.

    Room is made for what the samples table allows (all series of the study), so a batch may be larger than
    what it shows; memory that is not used is not touched.
    """

    dtype: PixelDtype = "int16"
    """As in `ImageView`."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def may_resize(self) -> bool:
        """A slice of another size than the table says is a damage."""
        return False

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_slots = len(facts.rows)
        num_pixels = int((facts.num_slices * facts.rows * facts.columns).sum())
        return [
            ArraySpec.of("pixels", self.dtype, num_pixels),
            ArraySpec.of("pixel_start", np.int64, num_slots),
            ArraySpec.of("image_shape", np.int64, num_slots, 3),
        ]

    def prepare(self, arrays: Mapping[str, NDArray[Any]], facts: SliceFacts) -> None:
        """Fill what does not depend on any pixel."""
        pixels = facts.num_slices * facts.rows * facts.columns
        arrays["pixel_start"][:] = np.cumsum(pixels) - pixels
        arrays["image_shape"][:, 0] = 0
        arrays["image_shape"][:, 1] = facts.rows
        arrays["image_shape"][:, 2] = facts.columns

    def choose(self, num_slices: int, *, seed: int, epoch: int, row: int) -> NDArray[np.int64]:  # noqa: ARG002
        """Return the indices of all slices."""
        return np.arange(num_slices, dtype=np.int64)

    def target(self, arrays: Mapping[str, NDArray[Any]], slot: int, num_chosen: int) -> NDArray[Any]:
        """Return the place of a slot's slices, ``(num_chosen, rows, columns)``.

        Raises:
            FormatError: There are more slices than the samples table says.
        """
        shape = arrays["image_shape"][slot]
        shape[0] = num_chosen
        start, stop = _pixel_range(arrays, slot)
        if start + int(np.prod(shape)) > stop:
            raise FormatError(f"slices must be at most as many as the samples table says, got {num_chosen}.")
        return arrays["pixels"][start : start + int(np.prod(shape))].reshape(shape.tolist())

    def blank(self, arrays: Mapping[str, NDArray[Any]], slot: int) -> None:
        """Make a slot look like one without slices; its pixels are out of reach then."""
        arrays["image_shape"][slot, 0] = 0


View: TypeAlias = ImageView | NativeView


def _pixel_range(arrays: Mapping[str, NDArray[Any]], slot: int) -> tuple[int, int]:
    starts = arrays["pixel_start"]
    return int(starts[slot]), int(starts[slot + 1]) if slot + 1 < len(starts) else len(arrays["pixels"])
