"""What of a sample's primary series a batch holds: which slices, at which size, as which numbers.

A view decides sizes before anything is read (from facts alone), so that slices are decoded straight into
their place. Choices are keyed by (seed, epoch, row), and in a blend, whose epoch may draw a sample again, by
the slot of the plan too: the same on every rank, worker and restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import math

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardflow.configs import Bounds, check_fields
from shardflow.errors import ConfigError, FormatError
from shardflow.loading.slice_choice import SliceChoice, choose_slices
from shardflow.loading.windows import check_windows, choose_window

__all__ = [
    "ImageView",
    "NativeView",
    "PixelDtype",
    "Resolution",
    "SliceFacts",
    "content_boxes",
    "flat_specs",
    "flat_target",
]

PixelDtype: TypeAlias = Literal["uint8", "int16", "uint16", "float32"]
Resolution: TypeAlias = Literal["full", "small"]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Name, dtype and shape of an array of a batch."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, dtype: DTypeLike, *shape: int) -> ArraySpec:
        """Make a spec from anything that NumPy takes for a dtype."""
        return cls(name, np.dtype(dtype), shape)

    @property
    def num_bytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SliceFacts:
    """Facts of the samples of a micro-batch, ``(B,)`` int64 each; zeros in padding slots."""

    num_slices: NDArray[np.int64]
    """Slices of all series: a bound on those of the primary one."""
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    """Size of the whole sample in its shard."""
    table_row: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Row of the samples table of its dataset."""
    seed: int = 0
    epoch: int = 0
    """What keyed choices of the plan follow from."""


def content_boxes(
    rows: NDArray[np.int64], columns: NDArray[np.int64], frame: tuple[int, int]
) -> NDArray[np.int64]:
    """Return where images lie that keep their shape in a frame, as large as they fit, centred.

    Args:
        rows: ``(B,)`` rows of the images; 0 where there is none.
        columns: Likewise.
        frame: Rows and columns of the frame.

    Returns:
        ``(B, 4)`` int64: first row, first column, rows, columns. Integers alone, so that every machine finds
        the same.
    """
    high, wide = np.maximum(rows, 1), np.maximum(columns, 1)
    # The frame's height is what bounds an image that is, for its width, taller than the frame.
    by_height = high * frame[1] >= wide * frame[0]
    height = np.where(by_height, frame[0], np.maximum(1, (2 * high * frame[1] + wide) // (2 * wide)))
    width = np.where(by_height, np.maximum(1, (2 * wide * frame[0] + high) // (2 * high)), frame[1])
    boxes = np.stack([(frame[0] - height) // 2, (frame[1] - width) // 2, height, width], axis=1)
    boxes[(rows == 0) | (columns == 0)] = 0
    return boxes.astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageView:
    """K of the N slices of the primary series, each resized to one size.

    A slice is stretched to ``rows x columns`` (area averaging where it shrinks, linear where it grows).
    Colour becomes luminance. A series of fewer slices fills the first places; ``slice_mask`` tells.
    """

    num_slices: Annotated[int, Bounds(1)]
    rows: Annotated[int, Bounds(1)]
    columns: Annotated[int, Bounds(1)]
    resolution: Resolution = "full"
    """``small`` reads the small versions that packing made (its ``variants`` settings), and no byte of the
    large slices. A series that is no larger than its small version would be has none, and is read as it is.
    Which slices are chosen does not depend on it.
    """
    slice_choice: SliceChoice = "even"
    """``even``: the middles of K equal parts. ``random``: K different slices, others in each epoch, in
    order.
    """
    dtype: PixelDtype = "int16"
    """``int16`` is for series that are stored as int16 or uint8, such as CT; ``uint16`` for radiographs of 16
    bits, ``uint8`` for pictures of 8 bits. Others are cut and rounded, and the loader counts it and warns.
    ``float32`` holds all 16-bit values exactly.
    """
    padding: Literal["cap", "longest"] = "cap"
    """Places for slices: always ``num_slices``, or as many as the longest study of the micro-batch needs, at
    most ``num_slices`` and at least one. The samples table counts the slices of all series, so there may be a
    place too many.
    """
    fit: Literal["stretch", "letterbox"] = "stretch"
    """``letterbox`` keeps the shape of a slice and centres it in its place; ``content_box`` says where it is,
    and the rest is 0.
    """
    windows: tuple[str, ...] = ()
    """Names of `shardflow.loading.windows.WINDOWS`: each sample of a CT gets one of them as its display
    range, drawn anew each epoch, all as likely. None: what the study says, or what the slices hold.
    """

    augment_pool: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Share of the samples that get one of the augmented variants that packing made of them (its
    ``variants.augment`` settings), drawn anew each epoch; all slices of a sample alike. ``variant`` in the
    batch says which one, and 0 for the original.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        check_windows(self.windows)
        if self.augment_pool and self.resolution != "full":
            raise ConfigError(
                f"resolution must be full with augment_pool, got {self.resolution}: variants have the size "
                "of the slices; leave out one."
            )

    @property
    def may_resize(self) -> bool:
        """Slices are brought to the view's size."""
        return True

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_slots, num_places = len(facts.rows), self.num_slices
        if self.padding == "longest":
            num_places = min(num_places, max(1, int(facts.num_slices.max(initial=1))))
        specs = [
            ArraySpec.of("image", self.dtype, num_slots, num_places, self.rows, self.columns),
            ArraySpec.of("slice_mask", np.uint8, num_slots, num_places),
            ArraySpec.of("display_range", np.float32, num_slots, 2),
        ]
        if self.fit == "letterbox":
            specs.append(ArraySpec.of("content_box", np.int64, num_slots, 4))
        if self.augment_pool:
            specs.append(ArraySpec.of("variant", np.int64, num_slots))
        return specs

    def prepare(self, arrays: Mapping[str, NDArray[Any]], facts: SliceFacts) -> None:
        """Fill what does not depend on any pixel."""
        arrays["display_range"][:] = 0
        if self.fit == "letterbox":
            arrays["content_box"][:] = content_boxes(facts.rows, facts.columns, (self.rows, self.columns))
        if self.augment_pool:
            arrays["variant"][:] = -1

    def window(
        self, *, seed: int, epoch: int, row: int, place: tuple[int, ...]
    ) -> tuple[float, float] | None:
        """Return the display range that a sample of a CT gets; None for that of the study."""
        return choose_window(self.windows, seed=seed, epoch=epoch, row=row, place=place)

    def choose(
        self,
        num_slices: int,
        *,
        seed: int,
        epoch: int,
        row: int,
        place: tuple[int, ...] = (),
    ) -> NDArray[np.int64]:
        """Return the indices of the slices to deliver, ascending; see `choose_slices`."""
        return choose_slices(
            num_slices, self.num_slices, self.slice_choice, seed=seed, epoch=epoch, row=row, place=place
        )

    def target(self, arrays: Mapping[str, NDArray[Any]], slot: int, num_chosen: int) -> NDArray[Any]:
        """Zero the places that stay empty; return the others, ``(num_chosen, rows, columns)``.

        Raises:
            FormatError: There are more slices than the samples table says.
        """
        image: NDArray[Any] = arrays["image"][slot]
        if num_chosen > len(image):
            raise FormatError(f"slices must be at most as many as the samples table says, got {num_chosen}.")
        image[num_chosen:] = 0
        mask = arrays["slice_mask"][slot]
        mask[:num_chosen] = 1
        mask[num_chosen:] = 0
        if self.fit == "stretch":
            return image[:num_chosen]
        image[:num_chosen] = 0
        top, left, height, width = arrays["content_box"][slot].tolist()
        return image[:num_chosen, top : top + height, left : left + width]

    def blank(self, arrays: Mapping[str, NDArray[Any]], slot: int) -> None:
        """Make a slot look like one without slices."""
        arrays["image"][slot] = 0
        arrays["slice_mask"][slot] = 0
        arrays["display_range"][slot] = 0
        if self.fit == "letterbox":
            arrays["content_box"][slot] = 0
        if self.augment_pool:
            arrays["variant"][slot] = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeView:
    """All slices of the primary series at their own size, one sample after another in a flat array.

    Room is made for what the samples table allows (all series of the study), so a batch may be larger than
    what it shows; memory that is not used is not touched.
    """

    resolution: ClassVar[Resolution] = "full"
    """The samples table knows the sizes of full slices alone."""

    dtype: PixelDtype = "int16"
    """As in `ImageView`."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def may_resize(self) -> bool:
        """A slice of another size than the table says is a damage."""
        return False

    def window(
        self,
        *,
        seed: int,  # noqa: ARG002
        epoch: int,  # noqa: ARG002
        row: int,  # noqa: ARG002
        place: tuple[int, ...],  # noqa: ARG002
    ) -> tuple[float, float] | None:
        """Return None: the display range is that of the study."""
        return None

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return flat_specs(np.stack([facts.num_slices, facts.rows, facts.columns], axis=1), self.dtype)

    def prepare(self, arrays: Mapping[str, NDArray[Any]], facts: SliceFacts) -> None:
        """Fill what does not depend on any pixel."""
        arrays["display_range"][:] = 0
        pixels = facts.num_slices * facts.rows * facts.columns
        arrays["pixel_start"][:] = np.cumsum(pixels) - pixels
        arrays["image_shape"][:, 0] = 0
        arrays["image_shape"][:, 1] = facts.rows
        arrays["image_shape"][:, 2] = facts.columns

    def choose(
        self,
        num_slices: int,
        *,
        seed: int,  # noqa: ARG002
        epoch: int,  # noqa: ARG002
        row: int,  # noqa: ARG002
        place: tuple[int, ...] = (),  # noqa: ARG002
    ) -> NDArray[np.int64]:
        """Return the indices of all slices."""
        return np.arange(num_slices, dtype=np.int64)

    def target(self, arrays: Mapping[str, NDArray[Any]], slot: int, num_chosen: int) -> NDArray[Any]:
        """Return the place of a slot's slices, ``(num_chosen, rows, columns)``.

        Raises:
            FormatError: There are more slices than the samples table says.
        """
        return flat_target(arrays, slot, num_chosen)

    def blank(self, arrays: Mapping[str, NDArray[Any]], slot: int) -> None:
        """Make a slot look like one without slices; its pixels are out of reach then."""
        arrays["image_shape"][slot, 0] = 0
        arrays["display_range"][slot] = 0


def flat_specs(shapes: NDArray[np.int64], dtype: PixelDtype) -> list[ArraySpec]:
    """Name the arrays of samples that lie one after another in a flat array.

    Args:
        shapes: ``(B, 3)``, slices at most, rows and columns of each slot.
        dtype: Of the pixels.
    """
    return [
        ArraySpec.of("pixels", dtype, int(shapes.prod(axis=1).sum())),
        ArraySpec.of("pixel_start", np.int64, len(shapes)),
        ArraySpec.of("image_shape", np.int64, len(shapes), 3),
        ArraySpec.of("display_range", np.float32, len(shapes), 2),
    ]


def flat_target(arrays: Mapping[str, NDArray[Any]], slot: int, num_chosen: int) -> NDArray[Any]:
    """Return the place of a slot's slices in a flat array, ``(num_chosen, rows, columns)``.

    Raises:
        FormatError: There are more slices than the samples table says.
    """
    shape, starts = arrays["image_shape"][slot], arrays["pixel_start"]
    shape[0] = num_chosen
    start = int(starts[slot])
    stop = int(starts[slot + 1]) if slot + 1 < len(starts) else len(arrays["pixels"])
    if start + int(np.prod(shape)) > stop:
        raise FormatError(f"slices must be at most as many as the samples table says, got {num_chosen}.")
    return arrays["pixels"][start : start + int(np.prod(shape))].reshape(shape.tolist())
