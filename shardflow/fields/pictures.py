"""Field types of pictures: images of a sample across its series, and slices of one series."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np

from shardflow.errors import ConfigError
from shardflow.fields.catalog import Limits, SeriesImages
from shardflow.fields.field import BoundField, FieldContext, check_choice, check_count
from shardflow.fields.image_members import BoundImageMember
from shardflow.fields.layout import Picture
from shardflow.fields.pixels import MAX_SIDE, BoundPixels, PixelField
from shardflow.fields.raw import is_image_field
from shardflow.fields.views import DrawKey
from shardflow.sampling import Permutation, TileRule

Sampling: TypeAlias = Literal["even", "random", "slab"]
_MAX_IMAGES: Final = 2**12
_MAX_TILES: Final = 2**10


@dataclass(frozen=True, kw_only=True)
class Image(PixelField):
    """One or several images of a sample, across its series.

    ``(B, C, H, W)``, or with ``num_images`` other than 1 ``(B, N, C, H, W)``, in the order of acquisition.
    ``NAME_mask`` ``(B,)`` or ``(B, N)`` uint8 is 1 where there is an image; ``NAME_range`` ``(B, 2)`` or
    ``(B, N, 2)`` float32 is the display range in the unit of the pixels. Units are those stored (CT: HU).

    Example::

        sf.Image(series="role == 'frontal'", size=(512, 512))

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "image"

    num_images: int | Literal["all"] = 1
    """Places for images (N); ``"all"`` is the largest number of selected images that a sample of the
    population has."""
    member: str | None = None
    """In place of series: a stored JPEG or PNG, such as ``"png"`` of tars of other writers. 16 bits and gray
    stay as they are; ``NAME_range`` is the least and the greatest pixel."""
    tiles: int | None = None
    """Cut each image into at most so many tiles of ``size``, after resizing it to a whole number of them, see
    `shardflow.sampling.image_sizes.TileRule`. The entry is ``(B, T, C, H, W)``, an overview first where an
    image has several tiles, then the tiles row by row, image after image; ``NAME_grid`` ``(B, N, 2)`` int64
    is the number of rows and columns of tiles of each image."""

    def _check(self) -> None:
        super()._check()
        if self.member is not None:
            self._check_member(self.member)
        if self.tiles is not None:
            check_count("tiles", self.tiles, _MAX_TILES)
            if self.size is None or self.fit != "stretch":
                raise ConfigError("tiles needs size=(rows, columns) of a tile, and fit='stretch'.")
        if self.num_images != "all":
            check_count("num_images", self.num_images, _MAX_IMAGES, "or 'all', ")

    def _check_member(self, member: str) -> None:
        if not is_image_field(member):
            raise ConfigError(f"member of an image ends with jpg, jpeg or png, got {member!r}.")
        given = {
            "series": self.series is not None,
            "num_images": self.num_images != 1,
            "tiles": self.tiles is not None,
            "resolution": self.resolution != "full",
            "windows": bool(self.windows),
        }
        excess = [name for name, is_given in given.items() if is_given]
        if excess:
            raise ConfigError(
                f"member={member!r} names one image of each sample, so {' and '.join(excess)} cannot apply; "
                "leave out either member or the others."
            )

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        if self.member is not None:
            return BoundImageMember(name, self, self.member, context)
        return BoundImage(name, self, context)


@dataclass(frozen=True, kw_only=True)
class Slices(PixelField):
    """K of the N slices of one series of a sample.

    ``(B, K, C, H, W)`` in geometric order. The first selected series by acquisition is delivered; others are
    counted as left out. ``NAME_mask`` ``(B, K)`` uint8 is 1 where there is a slice, ``NAME_index`` ``(B, K)``
    int64 its position in the series (-1 for none), ``NAME_range`` ``(B, 2)`` float32 the display range.

    Example::

        sf.Slices(series="modality == 'CT' and kind == 'volume'", num_slices=32, size=(256, 256))

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "slices"

    num_slices: int | None = None
    """Slices to deliver (K); None delivers all, as a list of arrays where the population's numbers differ."""
    sampling: Sampling = "even"
    """``even``: spread over the series; ``random``: drawn anew in each epoch; ``slab``: adjacent ones that
    begin at a slice drawn anew in each epoch. A series of fewer slices is delivered whole."""

    def _check(self) -> None:
        super()._check()
        check_choice("sampling", self.sampling, ("even", "random", "slab"))
        if self.num_slices is None:
            if self.sampling != "even":
                raise ConfigError(f"sampling={self.sampling!r} needs num_slices, the number to draw.")
        else:
            check_count("num_slices", self.num_slices, MAX_SIDE)

    def for_evaluation(self) -> PixelField:
        """Return the field with evenly spread slices, and the first of its windows."""
        return replace(super().for_evaluation(), sampling="even")  # type: ignore[call-arg]

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundSlices(name, self, context)


class BoundImage(BoundPixels):
    """Images of a sample across its series, bound to a selection."""

    spec: Image

    def _limits(self) -> Limits:
        return Limits(max_images=self.num_pictures)

    def choose(self, component: int, row: int, draw: DrawKey | None) -> list[Picture]:  # noqa: ARG002
        """Return the first images by acquisition."""
        found = [
            Picture(one.series, index, one.shape[1:])
            for one in self.selected.of_row(component, row)
            for index in list(one.indexes)[: self.num_pictures]
        ]
        return found[: self.num_pictures]

    def describe(self) -> dict[str, Any]:
        """Return what `present_pixels` needs; a single image has no axis of its own."""
        is_single = self.spec.num_images == 1 and self.tile_rule is None
        return {**super().describe(), "single": is_single}

    @cached_property
    def tile_rule(self) -> TileRule | None:
        """Rule that cuts images into tiles; None delivers them whole."""
        if self.spec.tiles is None or self.spec.size is None:
            return None
        return TileRule(rows=self.spec.size[0], columns=self.spec.size[1], max_tiles=self.spec.tiles)

    def _count_pictures(self) -> int:
        if self.spec.num_images != "all":
            return self.spec.num_images
        counts = [self.selected.num_images(place) for place in range(len(self._populations))]
        return max(1, self._most(counts))

    def _has_one_number(self) -> bool:
        return True


class BoundSlices(BoundPixels):
    """Slices of one series of a sample, bound to a selection."""

    spec: Slices

    def _limits(self) -> Limits:
        # Slices that are drawn anew in each epoch are all delivered by and by.
        is_drawn = self.spec.sampling != "even"
        return Limits(max_series=1, max_of_series=None if is_drawn else self.spec.num_slices)

    def choose(self, component: int, row: int, draw: DrawKey | None) -> list[Picture]:
        """Return the chosen slices of the first series by acquisition, in geometric order."""
        for one in self.selected.of_row(component, row)[:1]:
            return [Picture(one.series, index, one.shape[1:]) for index in self._sample(one, draw)]
        return []

    def describe(self) -> dict[str, Any]:
        """Return what `present_pixels` needs; slices share one display range."""
        return {**super().describe(), "stack": True}

    def _sample(self, series: SeriesImages, draw: DrawKey | None) -> list[int]:
        """Return the positions of the slices to deliver, ascending."""
        available, most = np.asarray(series.indexes, np.int64), self.spec.num_slices
        if most is None or len(available) <= most:
            return list(series.indexes)
        places = np.arange(most, dtype=np.int64)
        if self.spec.sampling == "even" or draw is None:
            chosen = (2 * places + 1) * len(available) // (2 * most)
        elif self.spec.sampling == "slab":
            chosen = places + draw.derive("slab-choice") * (len(available) - most + 1) // 2**64
        else:
            chosen = np.sort(Permutation(len(available), draw.derive("slice-choice"))(places))
        found: list[int] = available[chosen].tolist()
        return found

    def _count_pictures(self) -> int:
        if self.spec.num_slices is not None:
            return self.spec.num_slices
        return max(1, *(int(each) for each in self.selected.values("num_slices")))

    def _has_one_number(self) -> bool:
        return self.spec.num_slices is not None or len(self.selected.values("num_slices")) == 1
