"""Views: which slices of a sample a batch contains, at which size and with which number type.

A view derives sizes from the samples table, before anything is read, so that slices are decoded straight into
their places. Choices are keyed by (seed, epoch, row), and in a blend, whose epoch may draw a sample again,
also by the slot of the plan: they are the same on every rank, worker and restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.config import Bounds, check_fields
from shardflow.errors import ConfigError, FormatError
from shardflow.fields.field import Arrays as Arrays  # noqa: PLC0414 - until views go
from shardflow.fields.field import ArraySpec as ArraySpec  # noqa: PLC0414 - until views go
from shardflow.fields.field import DrawKey as DrawKey  # noqa: PLC0414 - until views go
from shardflow.fields.layout import WINDOWS as WINDOWS  # noqa: PLC0414 - until views go
from shardflow.fields.layout import PixelDtype as PixelDtype  # noqa: PLC0414 - until views go
from shardflow.fields.layout import content_boxes as content_boxes  # noqa: PLC0414 - until views go
from shardflow.fields.reader import Resolution
from shardflow.sampling import ImageBucket, Permutation, TileRule
from shardflow.sampling.image_sizes import MAX_BUCKETS, BucketDraw

_DEFAULT_DTYPE: Final[PixelDtype] = "int16"
SliceChoice: TypeAlias = Literal["even", "random"]


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
    """Seed and epoch of the plan, for keyed choices."""


def slices_of(arrays: Arrays, slot: int) -> NDArray[Any]:
    """Return the existing slices of a slot, ``(slices, rows, columns)``, without a copy.

    Raises:
        KeyError: The arrays hold no slices.
    """
    if "image" in arrays:
        slices: NDArray[Any] = arrays["image"][slot]
        return slices[: int(arrays["slice_mask"][slot].sum())]
    start = int(arrays["pixel_start"][slot])
    shape = arrays["image_shape"][slot].tolist()
    return arrays["pixels"][start : start + math.prod(shape)].reshape(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """Settings of the views that deliver chosen slices, resized."""

    resolution: Resolution = "full"
    """``small`` reads only the small versions that packing made (its ``variants`` settings). A series that is
    no larger than its small version would be has none, and is read as it is. The choice of slices does not
    depend on it.
    """
    slice_choice: SliceChoice = "even"
    """``even``: the middles of K equal parts. ``random``: K distinct slices in order, drawn anew each
    epoch.
    """
    dtype: PixelDtype | None = None
    """``int16`` is for series that are stored as int16 or uint8, such as CT; ``uint16`` for radiographs of 16
    bits, ``uint8`` for pictures of 8 bits. Others are cut and rounded, and the loader counts it and warns.
    ``float32`` holds all 16-bit values exactly. None is int16, and an error if that cuts or rounds a pixel.
    """
    windows: tuple[str, ...] = ()
    """Names of `shardflow.fields.layout.WINDOWS`: each sample of a CT gets one of them as its display range,
    drawn anew each epoch, all as likely. None: what the study says, or what the slices hold.
    """

    may_resize: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)
        unknown = sorted(set(self.windows) - set(WINDOWS))
        if unknown:
            raise ConfigError(f"windows must be of {', '.join(WINDOWS)}, got {unknown[0]!r}; correct it.")

    def window(self, key: DrawKey) -> tuple[float, float] | None:
        """Return the display range that a sample of a CT gets in an epoch; None for that of the study."""
        if len(self.windows) < 2:
            return WINDOWS[self.windows[0]] if self.windows else None
        order = Permutation(len(self.windows), key.derive("window-choice"))
        return WINDOWS[self.windows[int(order(np.array([0]))[0])]]

    def _choose(self, num_slices: int, most: int, key: DrawKey) -> NDArray[np.int64]:
        """Return the indices of the slices to deliver, ascending; all where there are at most ``most``."""
        if num_slices <= most:
            return np.arange(num_slices, dtype=np.int64)
        places = np.arange(most, dtype=np.int64)
        if self.slice_choice == "even":
            return (2 * places + 1) * num_slices // (2 * most)
        return np.sort(Permutation(num_slices, key.derive("slice-choice"))(places))


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageView(_Settings):
    """K of the N slices of the primary series, each resized to one size.

    A slice is stretched to ``rows x columns`` (area averaging where it shrinks, linear where it grows).
    Colour becomes luminance. A series of fewer slices fills the first places; ``slice_mask`` tells.
    """

    num_slices: Annotated[int, Bounds(1)]
    rows: Annotated[int, Bounds(1)]
    columns: Annotated[int, Bounds(1)]
    padding: Literal["cap", "longest"] = "cap"
    """Places for slices: always ``num_slices``, or as many as the longest study of the micro-batch needs, at
    most ``num_slices`` and at least one. The samples table counts the slices of all series, so there may be a
    place too many.
    """
    fit: Literal["stretch", "letterbox"] = "stretch"
    """``letterbox`` keeps the shape of a slice and centres it in its place; ``content_box`` says where it is,
    and the rest is 0.
    """
    augment_pool: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Share of the samples that get one of the augmented variants that packing made of them (its
    ``variants.augment`` settings), drawn anew each epoch; all slices of a sample alike. ``variant`` in the
    batch says which one, and 0 for the original.
    """

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if self.augment_pool and self.resolution != "full":
            raise ConfigError(
                f"resolution must be full with augment_pool, got {self.resolution}: variants have the size "
                "of the slices; leave out one."
            )

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_slots, num_places = len(facts.rows), self.num_slices
        if self.padding == "longest":
            num_places = min(num_places, max(1, int(facts.num_slices.max(initial=1))))
        specs = [
            ArraySpec.of(
                "image", self.dtype or _DEFAULT_DTYPE, num_slots, num_places, self.rows, self.columns
            ),
            ArraySpec.of("slice_mask", np.uint8, num_slots, num_places),
            ArraySpec.of("display_range", np.float32, num_slots, 2),
        ]
        if self.fit == "letterbox":
            specs.append(ArraySpec.of("content_box", np.int64, num_slots, 4))
        if self.augment_pool:
            specs.append(ArraySpec.of("variant", np.int64, num_slots))
        return specs

    def prepare(self, arrays: Arrays, facts: SliceFacts) -> None:
        """Fill the arrays that do not depend on pixels."""
        arrays["display_range"][:] = 0
        if self.fit == "letterbox":
            arrays["content_box"][:] = content_boxes(facts.rows, facts.columns, (self.rows, self.columns))
        if self.augment_pool:
            arrays["variant"][:] = -1

    def choose(self, num_slices: int, key: DrawKey) -> NDArray[np.int64]:
        """Return the indices of the slices to deliver, ascending."""
        return self._choose(num_slices, self.num_slices, key)

    def target(self, arrays: Arrays, slot: int, num_chosen: int) -> NDArray[Any]:
        """Zero the places that stay empty; return the others, ``(num_chosen, rows, columns)``.

        Raises:
            FormatError: There are more slices than the samples table says.
        """
        image: NDArray[Any] = arrays["image"][slot]
        if num_chosen > len(image):
            raise _too_many(num_chosen)
        image[num_chosen:] = 0
        mask = arrays["slice_mask"][slot]
        mask[:num_chosen] = 1
        mask[num_chosen:] = 0
        if self.fit == "stretch":
            return image[:num_chosen]
        image[:num_chosen] = 0
        top, left, height, width = arrays["content_box"][slot].tolist()
        return image[:num_chosen, top : top + height, left : left + width]

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without slices."""
        arrays["image"][slot] = 0
        arrays["slice_mask"][slot] = 0
        arrays["display_range"][slot] = 0
        if self.fit == "letterbox":
            arrays["content_box"][slot] = 0
        if self.augment_pool:
            arrays["variant"][slot] = -1


class _FlatArrays:
    """Layout of samples of several sizes, one after another in a flat array."""

    __slots__ = ()

    def target(self, arrays: Arrays, slot: int, num_chosen: int) -> NDArray[Any]:
        """Return the place of a slot's slices, ``(num_chosen, rows, columns)``.

        Raises:
            FormatError: There are more slices than the samples table says.
        """
        shape, starts = arrays["image_shape"][slot], arrays["pixel_start"]
        shape[0] = num_chosen
        start = int(starts[slot])
        stop = int(starts[slot + 1]) if slot + 1 < len(starts) else len(arrays["pixels"])
        size = int(np.prod(shape))
        if start + size > stop:
            raise _too_many(num_chosen)
        return arrays["pixels"][start : start + size].reshape(shape.tolist())

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without slices; its pixels can no longer be reached."""
        arrays["image_shape"][slot, 0] = 0
        arrays["display_range"][slot] = 0

    @staticmethod
    def _specs(shapes: NDArray[np.int64], dtype: PixelDtype) -> list[ArraySpec]:
        """Name the arrays.

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

    @staticmethod
    def _prepare(arrays: Arrays, shapes: NDArray[np.int64]) -> None:
        num_pixels = shapes.prod(axis=1)
        arrays["display_range"][:] = 0
        arrays["pixel_start"][:] = np.cumsum(num_pixels) - num_pixels
        arrays["image_shape"][:] = shapes
        arrays["image_shape"][:, 0] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeView(_FlatArrays):
    """All slices of the primary series at their own size, one sample after another in a flat array.

    Space is reserved for what the samples table allows (all series of the study), so a batch may be larger
    than its content; unused memory is not touched.
    """

    resolution: ClassVar[Resolution] = "full"
    """The samples table knows the sizes of full slices alone."""
    may_resize: ClassVar[bool] = False
    """A slice of another size than the table says is damaged."""

    dtype: PixelDtype | None = None
    """As in `ImageView`."""

    def __post_init__(self) -> None:
        check_fields(self)

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return self._specs(self._shapes(facts), self.dtype or _DEFAULT_DTYPE)

    def prepare(self, arrays: Arrays, facts: SliceFacts) -> None:
        """Fill the arrays that do not depend on pixels."""
        self._prepare(arrays, self._shapes(facts))

    def window(self, key: DrawKey) -> None:  # noqa: ARG002
        """Return None: the display range is that of the study."""
        return

    def choose(self, num_slices: int, key: DrawKey) -> NDArray[np.int64]:  # noqa: ARG002
        """Return the indices of all slices."""
        return np.arange(num_slices, dtype=np.int64)

    @staticmethod
    def _shapes(facts: SliceFacts) -> NDArray[np.int64]:
        return np.stack([facts.num_slices, facts.rows, facts.columns], axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceSize:
    """Size that a sample of a `SizedView` may get."""

    num_slices: Annotated[int, Bounds(1, 2**17)]
    rows: Annotated[int, Bounds(1)]
    columns: Annotated[int, Bounds(1)]
    weight: Annotated[int, Bounds(1, 2**16)] = 1
    """Its probability, relative to the weights of the other sizes."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedView(_FlatArrays, _Settings):
    """K of the N slices of the primary series, with K, rows and columns by a keyed choice of each sample.

    Samples lie one after another in a flat array, as with a `NativeView`; `Batch.image` puts one together.
    """

    sizes: tuple[SliceSize, ...]

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if not 1 <= len(self.sizes) <= MAX_BUCKETS:
            raise ConfigError(f"sizes must be 1 to {MAX_BUCKETS}, got {len(self.sizes)}; correct them.")

    def buckets(self, tokens_per_slice: tuple[int, ...]) -> tuple[ImageBucket, ...]:
        """Return the image buckets of a cost rule for a token budget.

        Args:
            tokens_per_slice: Tokens of a slice of each size.
        """
        return tuple(
            ImageBucket(weight=size.weight, max_slices=size.num_slices, tokens_per_slice=tokens)
            for size, tokens in zip(self.sizes, tokens_per_slice, strict=True)
        )

    def choose(self, num_slices: int, key: DrawKey) -> NDArray[np.int64]:
        """Return the indices of the slices to deliver, ascending."""
        drawn = self._draw(np.array([key.table_row], np.int64), key.seed, key.epoch)
        return self._choose(num_slices, self.sizes[int(drawn[0])].num_slices, key)

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        specs = self._specs(self._shapes(facts), self.dtype or _DEFAULT_DTYPE)
        return [*specs, ArraySpec.of("size", np.int64, len(facts.rows))]

    def prepare(self, arrays: Arrays, facts: SliceFacts) -> None:
        """Fill the arrays that do not depend on pixels."""
        self._prepare(arrays, self._shapes(facts))
        arrays["size"][:] = self._choices(facts)

    def _draw(self, table_rows: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the number of the size that each sample gets."""
        weights = [size.weight for size in self.sizes]
        return BucketDraw.of(seed, epoch).choose(table_rows, weights)

    def _choices(self, facts: SliceFacts) -> NDArray[np.int64]:
        return self._draw(facts.table_row, facts.seed, facts.epoch)

    def _shapes(self, facts: SliceFacts) -> NDArray[np.int64]:
        """Return slices at most, rows and columns of each slot, ``(B, 3)``."""
        table = np.array([(size.num_slices, size.rows, size.columns) for size in self.sizes], np.int64)
        shapes: NDArray[np.int64] = table[self._choices(facts)]
        shapes[:, 0] = np.minimum(shapes[:, 0], facts.num_slices)
        return shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class TileView(_Settings):
    """Tiles of K of the N slices of the primary series, each a place of its own, as slices are elsewhere.

    The number of tiles is that of the full size, also with ``resolution="small"``. A slice is brought to a
    whole number of tiles, see `shardflow.sampling.image_sizes.TileRule`; the overview comes first,
    then the tiles row by row. A batch has as many places as its sample of most tiles needs.
    """

    rows: Annotated[int, Bounds(1, 2**16)]
    """Rows of a tile."""
    columns: Annotated[int, Bounds(1, 2**16)]
    max_tiles: Annotated[int, Bounds(1, 2**10)]
    """Tiles of a slice at most, the overview not counted."""
    num_slices: Annotated[int, Bounds(1)] = 1

    @property
    def rule(self) -> TileRule:
        """Rule that cuts images into tiles; also used by a cost rule for a token budget."""
        return TileRule(rows=self.rows, columns=self.columns, max_tiles=self.max_tiles)

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_slots = len(facts.rows)
        num_tiles = self.rule.num_places(facts.rows, facts.columns)
        num_places = max(1, int((np.minimum(facts.num_slices, self.num_slices) * num_tiles).max(initial=1)))
        return [
            ArraySpec.of(
                "image", self.dtype or _DEFAULT_DTYPE, num_slots, num_places, self.rows, self.columns
            ),
            ArraySpec.of("slice_mask", np.uint8, num_slots, num_places),
            ArraySpec.of("tile_grid", np.int64, num_slots, 2),
            ArraySpec.of("display_range", np.float32, num_slots, 2),
        ]

    def prepare(self, arrays: Arrays, facts: SliceFacts) -> None:
        """Fill the arrays that do not depend on pixels."""
        arrays["display_range"][:] = 0
        arrays["tile_grid"][:] = np.stack(self.rule.grids(facts.rows, facts.columns), axis=1)

    def choose(self, num_slices: int, key: DrawKey) -> NDArray[np.int64]:
        """Return the indices of the slices to deliver, ascending."""
        return self._choose(num_slices, self.num_slices, key)

    def target(self, arrays: Arrays, slot: int, num_chosen: int) -> NDArray[Any]:
        """Zero the places that stay empty; return the others, ``(num_chosen, places, rows, columns)``.

        Raises:
            FormatError: There are more slices than the samples table says.
        """
        image: NDArray[Any] = arrays["image"][slot]
        each = self._places(arrays, slot)
        used = num_chosen * each
        if used > len(image):
            raise _too_many(num_chosen)
        image[used:] = 0
        arrays["slice_mask"][slot] = np.arange(len(image)) < used
        return image[:used].reshape(num_chosen, each, self.rows, self.columns)

    def canvas_shape(self, arrays: Arrays, slot: int) -> tuple[int, int]:
        """Return the size that a slice of a slot is resized to before it is cut."""
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

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without slices."""
        for name in ("image", "slice_mask", "display_range"):
            arrays[name][slot] = 0

    @staticmethod
    def _places(arrays: Arrays, slot: int) -> int:
        num_tiles = int(arrays["tile_grid"][slot].prod())
        return num_tiles + (num_tiles > 1)


View: TypeAlias = ImageView | NativeView | SizedView | TileView
"""A view of slices: what a loader may be asked to deliver of a study's primary series."""


def _too_many(num_chosen: int) -> FormatError:
    return FormatError(f"slices must be at most as many as the samples table says, got {num_chosen}.")
