"""Samples of several sizes in one micro-batch: each gets one of some sizes, by a keyed choice of the plan.

Many slices at a low resolution, few at a high one: which of them a sample gets is drawn anew each epoch, and
because it decides what the sample costs, the plan draws it too (`shardflow.epochs.buckets`), from the same
numbers. So a token budget holds, and every world size and every resume see the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from shardflow.configs import Bounds, check_fields
from shardflow.epochs import ImageBucket
from shardflow.epochs.buckets import MAX_BUCKETS, BucketDraw
from shardflow.errors import ConfigError
from shardflow.loading.view import ArraySpec
from shardflow.loading.slice_choice import SliceChoice
from shardflow.loading.view import ImageView, PixelDtype, Resolution, SliceFacts, flat_specs, flat_target
from shardflow.loading.windows import check_windows, choose_window

__all__ = ["SizedView", "SliceSize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceSize:
    """One of the sizes that a sample may get."""

    num_slices: Annotated[int, Bounds(1, 2**17)]
    rows: Annotated[int, Bounds(1)]
    columns: Annotated[int, Bounds(1)]
    weight: Annotated[int, Bounds(1, 2**16)] = 1
    """How likely it is, against the weights of the others."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedView:
    """K of the N slices of the primary series, with K, rows and columns by a keyed choice of each sample.

    Samples lie one after another in a flat array, as with a `NativeView`; `Batch.image` puts one together.
    """

    sizes: tuple[SliceSize, ...]
    resolution: Resolution = "full"
    slice_choice: SliceChoice = "even"
    dtype: PixelDtype = "int16"
    windows: tuple[str, ...] = ()
    """These four as in `ImageView`."""

    def __post_init__(self) -> None:
        check_windows(self.windows)
        if not 1 <= len(self.sizes) <= MAX_BUCKETS:
            raise ConfigError(f"sizes must be 1 to {MAX_BUCKETS}, got {len(self.sizes)}; correct them.")

    def buckets(self, tokens_per_slice: tuple[int, ...]) -> tuple[ImageBucket, ...]:
        """Return what a cost rule has to know for a token budget.

        Args:
            tokens_per_slice: What a slice of each size costs.
        """
        return tuple(
            ImageBucket(weight=size.weight, max_slices=size.num_slices, tokens_per_slice=tokens)
            for size, tokens in zip(self.sizes, tokens_per_slice, strict=True)
        )

    def of_sample(self, table_row: int, *, seed: int, epoch: int) -> ImageView:
        """Return what is delivered of a sample in an epoch."""
        weights = [size.weight for size in self.sizes]
        choice = BucketDraw.of(seed, epoch).choose(np.array([table_row], np.int64), weights)
        return self.of_size(int(choice[0]))

    @property
    def may_resize(self) -> bool:
        """Slices are brought to their sample's size."""
        return True

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        specs = flat_specs(self._shapes(facts), self.dtype)
        return [*specs, ArraySpec.of("size", np.int64, len(facts.rows))]

    def prepare(self, arrays: Mapping[str, NDArray[Any]], facts: SliceFacts) -> None:
        """Fill what does not depend on any pixel."""
        shapes = self._shapes(facts)
        num_pixels = shapes.prod(axis=1)
        arrays["display_range"][:] = 0
        arrays["pixel_start"][:] = np.cumsum(num_pixels) - num_pixels
        arrays["image_shape"][:] = shapes
        arrays["image_shape"][:, 0] = 0
        arrays["size"][:] = self._choices(facts)

    def of_size(self, number: int) -> ImageView:
        """Return what is delivered of a sample of one of the sizes."""
        size = self.sizes[number]
        return ImageView(
            num_slices=size.num_slices,
            rows=size.rows,
            columns=size.columns,
            resolution=self.resolution,
            slice_choice=self.slice_choice,
            dtype=self.dtype,
            windows=self.windows,
        )

    def window(
        self, *, seed: int, epoch: int, row: int, place: tuple[int, ...]
    ) -> tuple[float, float] | None:
        """Return the display range that a sample of a CT gets; None for that of the study."""
        return choose_window(self.windows, seed=seed, epoch=epoch, row=row, place=place)

    def target(self, arrays: Mapping[str, NDArray[Any]], slot: int, num_chosen: int) -> NDArray[Any]:
        """Return the place of a slot's slices, ``(num_chosen, rows, columns)``; see `NativeView.target`."""
        return flat_target(arrays, slot, num_chosen)

    def blank(self, arrays: Mapping[str, NDArray[Any]], slot: int) -> None:
        """Make a slot look like one without slices; its pixels are out of reach then."""
        arrays["image_shape"][slot, 0] = 0
        arrays["display_range"][slot] = 0

    def _choices(self, facts: SliceFacts) -> NDArray[np.int64]:
        weights = [size.weight for size in self.sizes]
        return BucketDraw.of(facts.seed, facts.epoch).choose(facts.table_row, weights)

    def _shapes(self, facts: SliceFacts) -> NDArray[np.int64]:
        """Return slices at most, rows and columns of each slot, ``(B, 3)``."""
        table = np.array([(size.num_slices, size.rows, size.columns) for size in self.sizes], np.int64)
        shapes: NDArray[np.int64] = table[self._choices(facts)]
        shapes[:, 0] = np.minimum(shapes[:, 0], facts.num_slices)
        return shapes
