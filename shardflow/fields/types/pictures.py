"""Field types of pictures: images of a sample across its series, slices of one series, and images of members.

`shardflow index` notes in the manifest what the JPEG and PNG members of a name have in common, and in the
samples table the size of each sample's images. What neither knows, the spec of a member states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.decode import ThreadState, convert_picture, decode_file
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    DrawKey,
    FieldContext,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
    check_count,
)
from shardflow.fields.layout import Picture, PictureLayout, content_boxes
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.series_rows import Limits, SeriesImages
from shardflow.fields.types.members import BoundMember, gather, is_image_field
from shardflow.fields.types.pixel_field import MAX_SIDE, PixelField
from shardflow.fields.types.pixels import (
    ORIGINAL,
    BoundPixels,
    LossWarning,
    SlotPixels,
    check_fill,
    packed_variants,
)
from shardflow.format.contents.pictures import opencv
from shardflow.format.foreign.places import ImageFacts, image_facts, num_samples_with
from shardflow.sampling import ImageBucket, Permutation
from shardflow.sampling.image_sizes import MAX_BUCKETS, BucketDraw

Sampling: TypeAlias = Literal["even", "random", "slab"]
_COLOR: Final = 3
_MAX_IMAGES: Final = 2**12
_WORD: Final = 2**64


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

    def _check(self) -> None:
        super()._check()
        if self.member is not None:
            self._check_member(self.member)
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
            "padding": self.padding != "cap",
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

    ``(B, K, C, H, W)`` in geometric order; of a finding the center slice comes first. The first selected
    series by acquisition is delivered; others are counted as left out. ``NAME_mask`` ``(B, K)`` uint8 is 1
    where there is a slice, ``NAME_index`` ``(B, K)`` int64 its position in the series (-1 for none),
    ``NAME_range`` ``(B, 2)`` float32 the display range.

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
    sizes: tuple[tuple[int, int, int, int], ...] = ()
    """In place of ``num_slices`` and ``size``: several ``(num_slices, rows, columns, weight)``, of which each
    sample gets one, drawn anew in each epoch with a probability as its weight. The entry is a list of B
    arrays. A token budget charges for them by `buckets`."""
    augment_pool: float = 0.0
    """Share of the samples that get one of the augmented variants that packing made of them (its
    ``variants.augment`` settings), drawn anew in each epoch. ``NAME_variant`` ``(B,)`` int64 says which one:
    0 for the original, -1 for no slices."""

    @property
    def resizes(self) -> bool:
        """Whether slices are brought to a size that the spec states."""
        return bool(self.sizes) or super().resizes

    def _check(self) -> None:
        object.__setattr__(self, "sizes", _checked_sizes(self.sizes))
        super()._check()
        check_choice("sampling", self.sampling, ("even", "random", "slab"))
        share: object = self.augment_pool
        if not isinstance(share, int | float) or share is True or not 0 <= share <= 1:
            raise ConfigError(f"augment_pool is a share of the samples from 0 to 1, got {share!r}.")
        if self.augment_pool and self.resolution != "full":
            raise ConfigError(
                "augment_pool needs resolution='full', the size that variants are stored in; leave out one."
            )
        if self.sizes:
            given = {"num_slices": self.num_slices, "size": self.size, "tiles": self.tiles}
            excess = [name for name, value in given.items() if value is not None]
            if excess:
                raise ConfigError(f"sizes stands in place of {' and '.join(excess)}; leave out one of them.")
        elif self.num_slices is None:
            if self.sampling != "even":
                raise ConfigError(f"sampling={self.sampling!r} needs num_slices, the number to draw.")
        else:
            check_count("num_slices", self.num_slices, MAX_SIDE)

    def for_evaluation(self) -> PixelField:
        """Return the field with evenly spread slices, the first of its windows, and no variants.

        Each sample keeps the one of several sizes that a token budget charges for; it is drawn by the epoch,
        which is 0 in every evaluation.
        """
        return replace(super().for_evaluation(), sampling="even", augment_pool=0.0)  # type: ignore[call-arg]

    def buckets(self, tokens_per_slice: Sequence[int]) -> tuple[ImageBucket, ...]:
        """Return the image buckets by which the cost rule of a token budget charges for ``sizes``.

        Args:
            tokens_per_slice: Tokens of a slice of each size.
        """
        return tuple(
            ImageBucket(weight=weight, max_slices=num_slices, tokens_per_slice=tokens)
            for (num_slices, _, _, weight), tokens in zip(self.sizes, tokens_per_slice, strict=True)
        )

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundSlices(name, self, context)


def _checked_sizes(sizes: Any) -> tuple[tuple[int, int, int, int], ...]:
    example = "sizes is a list of (num_slices, rows, columns, weight), such as [(32, 224, 224, 1)]"
    try:
        found = [tuple(size) for size in sizes]
    except TypeError:
        raise ConfigError(f"{example}, got {sizes!r}.") from None
    if len(found) > MAX_BUCKETS:
        raise ConfigError(f"sizes are at most {MAX_BUCKETS}, got {len(found)}; leave out some.")
    checked = []
    for size in found:
        if len(size) != 4:
            raise ConfigError(f"{example}, got {size!r}.")
        num_slices, rows, columns, weight = size
        for value in size:
            check_count("each number of sizes", value, MAX_SIDE)
        checked.append((num_slices, rows, columns, weight))
    return tuple(checked)


def choose_slices(num_slices: int, most: int, sampling: Sampling, key: DrawKey) -> NDArray[np.int64]:
    """Return the positions of slices to deliver, ascending; all where there are at most ``most``.

    Args:
        num_slices: Slices to choose from.
        most: Slices to deliver.
        sampling: How they are chosen, see `Slices`.
        key: Key of the sample's random choices.
    """
    if num_slices <= most:
        return np.arange(num_slices, dtype=np.int64)
    places = np.arange(most, dtype=np.int64)
    if sampling == "even":
        return (2 * places + 1) * num_slices // (2 * most)
    if sampling == "slab":
        return places + key.derive("slab-choice") * (num_slices - most + 1) // _WORD
    return np.sort(Permutation(num_slices, key.derive("slice-choice"))(places))


def choose_variant(num_variants: int, share: float, key: DrawKey) -> int:
    """Return the number of the variant, from 1, or `ORIGINAL`.

    Args:
        num_variants: Number of variants of the series.
        share: Share of the samples that get a variant; all variants are equally likely.
        key: Key of the sample's random choices.
    """
    if not num_variants or key.derive("variant-share") >= share * _WORD:
        return ORIGINAL
    return 1 + key.derive("variant-choice") * num_variants // _WORD


def _center_first(chosen: NDArray[np.int64], center: int) -> NDArray[np.int64]:
    """Return positions among the slices of a finding, that of its center first, then the others in order.

    If the center is not among them, it replaces its nearest neighbor.
    """
    others = np.delete(chosen, int(np.argmin(np.abs(chosen - center))))
    return np.concatenate(([center], others))


class BoundImage(BoundPixels):
    """Images of a sample across its series, bound to a selection."""

    spec: Image

    def _limits(self) -> Limits:
        return Limits(max_images=self.num_pictures)

    def choose(self, component: int, row: int, draw: DrawKey) -> list[Picture]:  # noqa: ARG002
        """Return the first images by acquisition; of a finding the one at its center first."""
        found = []
        for one in self.selected.of_row(component, row):
            indexes = list(one.indexes)
            if one.center in indexes:
                indexes = [one.center, *(index for index in indexes if index != one.center)]
            found += [Picture(one.series, index, one.shape[1:]) for index in indexes[: self.num_pictures]]
        return found[: self.num_pictures]

    def describe(self) -> dict[str, Any]:
        """Return what `present_pixels` needs; a single image has no axis of its own."""
        is_single = self.spec.num_images == 1 and self.tile_rule is None
        return {**super().describe(), "single": is_single}

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
    is_stack = True

    def __init__(self, name: str, spec: Slices, context: FieldContext) -> None:
        super().__init__(name, spec, context)
        if spec.augment_pool and not any(
            packed_variants(dataset).get("augment") for dataset in context.samples.datasets
        ):
            raise ConfigError(
                f"augment_pool of the field {name!r} needs augmented variants, and no dataset was packed "
                "with any; pack one with variants.augment.num_variants, or leave it out."
            )

    @property
    def has_variants(self) -> bool:
        """Whether a sample may be delivered as one of its augmented variants."""
        return self.spec.augment_pool > 0

    def _limits(self) -> Limits:
        # Slices that are drawn anew in each epoch are all delivered by and by.
        is_drawn = self.spec.sampling != "even"
        num_slices = max((size[0] for size in self.spec.sizes), default=self.spec.num_slices)
        return Limits(max_series=1, max_of_series=None if is_drawn else num_slices)

    def _limits_of_sample(self) -> Limits:
        if self.spec.sizes:
            raise ConfigError(
                "A token budget that counts what is delivered cannot charge for the drawn sizes of the field "
                f"{self.name!r}; write num_slices= and size= in place of sizes=, or "
                "CostRule(buckets=field.buckets(tokens_per_slice)) in place of counts_delivered."
            )
        return Limits(max_series=1, max_of_series=self.spec.num_slices)

    def choose(self, component: int, row: int, draw: DrawKey) -> list[Picture]:
        """Return the chosen slices of the first series by acquisition, in geometric order."""
        most, size = self.spec.num_slices, None
        if self.spec.sizes:
            weights = [one[3] for one in self.spec.sizes]
            drawn = BucketDraw.of(draw.seed, draw.epoch).choose(np.array([row]), weights)
            most, rows, columns, _ = self.spec.sizes[int(drawn[0])]
            size = rows, columns
        for one in self.selected.of_row(component, row)[:1]:
            shape = one.shape[1:]
            return [Picture(one.series, index, shape, size) for index in self._sample(one, most, draw)]
        return []

    # ---- augmented variants ----------------------------------------------------------------------

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        specs = super().array_specs(slots)
        if self.has_variants:
            specs.append(ArraySpec.of(f"{self.name}_variant", np.int64, len(slots)))
        return specs

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Empty every slot, and lay out the slices of the samples."""
        super().prepare(arrays, slots)
        if self.has_variants:
            arrays[f"{self.name}_variant"][:] = -1

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotPixels:
        """Begin a slot."""
        if self.has_variants:
            for picture in self.chosen(request)[:1]:
                _, variant = self.stored(shard, request, picture.series)
                arrays[f"{self.name}_variant"][request.slot] = variant
        return super().open(shard, request, arrays)

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without slices."""
        super().blank(arrays, slot)
        if self.has_variants:
            arrays[f"{self.name}_variant"][slot] = -1

    def stored(self, shard: Shard, request: SlotRequest, series: int) -> tuple[NDArray[np.int64], int]:
        """Return the fields that hold a series or its variant; a variant that lacks slices is ignored."""
        slices, original = super().stored(shard, request, series)
        if not self.has_variants:
            return slices, original
        num_variants = shard.num_variants(request.row_in_shard, series)
        variant = choose_variant(num_variants, self.spec.augment_pool, request.draw)
        if variant == ORIGINAL:
            return slices, original
        varied = shard.variant_slices(request.row_in_shard, variant, series)
        return (varied, variant) if len(varied) == len(slices) else (slices, original)

    # ---- slices ----------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return what `present_pixels` needs; slices share one display range."""
        return {**super().describe(), "stack": self.is_stack}

    def _sample(self, series: SeriesImages, most: int | None, draw: DrawKey) -> list[int]:
        """Return the positions of the slices to deliver, ascending; of a finding its center first."""
        num_slices = len(series.indexes)
        if (most is None or num_slices <= most) and series.center is None:
            return list(series.indexes)
        chosen = choose_slices(num_slices, num_slices if most is None else most, self.spec.sampling, draw)
        if series.center is not None and series.center in series.indexes:
            chosen = _center_first(chosen, series.indexes.index(series.center))
        found: list[int] = np.asarray(series.indexes, np.int64)[chosen].tolist()
        return found

    def _count_pictures(self) -> int:
        if self.spec.sizes:
            return max(size[0] for size in self.spec.sizes)
        if self.spec.num_slices is not None:
            return self.spec.num_slices
        return max([1, *(int(each) for each in self.selected.values("num_slices"))])

    def _has_one_number(self) -> bool:
        if self.spec.sizes:
            return False
        return self.spec.num_slices is not None or len(self.selected.values("num_slices")) == 1


class BoundImageMember(BoundMember):
    """Images of a member, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        member: Name of the stored field.
        context: The samples.

    Attributes:
        layout: Places of the pixels; without a size each place has the bytes of its sample's largest image.

    Raises:
        ConfigError: Neither the index nor the spec states size, dtype or channels.
    """

    spec: PixelField

    def __init__(self, name: str, spec: PixelField, member: str, context: FieldContext) -> None:
        super().__init__(name, spec, context, member)
        self._counters = context.counters
        facts = self._facts(member)
        self._refuse_unknown(member, facts)
        channels = spec.channels or (_COLOR if facts is not None and facts.has_color else 1)
        is_deep = facts is not None and facts.num_bits > 8
        dtype = np.dtype(spec.dtype or ("uint16" if is_deep else "uint8"))
        size = spec.size
        if size is None and facts is not None:
            size = facts.size
        fill = check_fill(name, spec.fill or 0, dtype)
        self.layout = PictureLayout(name, dtype, channels=channels, size=size, fill=fill)
        self._loss = LossWarning(name, dtype)

    def _facts(self, member: str) -> ImageFacts | None:
        """Return what the images of all datasets have in common; None if the index of one does not say."""
        joined: ImageFacts | None = None
        for dataset in self._datasets:
            if member not in (num_samples_with(dataset.manifest) or {member: 0}):
                continue
            facts = image_facts(dataset.manifest, member)
            if facts is None:
                return None
            joined = facts if joined is None else joined.joined(facts)
        return joined

    def _refuse_unknown(self, member: str, facts: ImageFacts | None) -> None:
        if facts is not None:
            return
        spec, is_foreign = self.spec, all(dataset.is_foreign for dataset in self._datasets)
        needed = {
            # The samples table of foreign tars has the size of the largest image of each sample.
            "size=(rows, columns)": spec.size is None and not is_foreign,
            "dtype='uint16' (or 'uint8')": spec.dtype is None and member.endswith("png"),
            "channels=1 (or 3)": spec.channels is None,
        }
        missing = [name for name, is_missing in needed.items() if is_missing]
        if missing:
            raise ConfigError(
                f"No table knows what the images of {member!r} are like, so the field {self.name!r} needs "
                f"{', '.join(missing)}{'; or index the tars again' if is_foreign else ''}."
            )

    def num_delivered(self, place: int) -> NDArray[np.int64]:
        """Return 1 for each row that may have an image, ``(num_rows,)``."""
        has_content = self.has_content
        dataset = self._datasets[place]
        if has_content is None:
            return np.ones(dataset.samples.num_samples, np.int64)
        return has_content[place].astype(np.int64)

    # ---- BoundField ------------------------------------------------------------------------------

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        name, num_slots, layout = self.name, len(slots), self.layout
        if layout.size is not None:
            specs = layout.array_specs(slots, 1, lambda *_: ())
        else:
            specs = [
                ArraySpec.of(f"{name}.data", layout.dtype, int(self._spaces(slots).sum())),
                ArraySpec.of(f"{name}.start", np.int64, num_slots, 1),
                ArraySpec.of(f"{name}_shape", np.int64, num_slots, 1, 3),
            ]
        specs += [
            ArraySpec.of(f"{name}_mask", np.uint8, num_slots, 1),
            ArraySpec.of(f"{name}_range", np.float32, num_slots, 1, 2),
            ArraySpec.of(f"{name}_index", np.int64, num_slots, 1),
        ]
        if self.spec.fit == "letterbox":
            specs.append(ArraySpec.of(f"{name}_box", np.int64, num_slots, 1, 4))
        return specs

    def _spaces(self, slots: Slots) -> NDArray[np.int64]:
        """Return the elements that each slot may need without a common size, ``(B,)``."""
        sides = (gather(self._datasets, name, slots) for name in ("rows", "columns"))
        return self.layout.channels * np.multiply(*sides)

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Empty every slot, and lay them out."""
        if self.layout.size is None:
            spaces = self._spaces(slots)
            arrays[f"{self.name}.start"][:, 0] = np.cumsum(spaces) - spaces
            arrays[f"{self.name}_shape"][:] = 0
        self._blank_beside(arrays, slice(None))

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without an image."""
        self.layout.blank(arrays, slot)
        self._blank_beside(arrays, slot)

    def _blank_beside(self, arrays: Arrays, slots: int | slice) -> None:
        for beside, empty in (("mask", 0), ("range", 0), ("box", 0), ("index", -1)):
            if f"{self.name}_{beside}" in arrays:
                arrays[f"{self.name}_{beside}"][slots] = empty

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        fields = self.needed(shard, request)
        if not fields or self.spec.fit == "letterbox":
            self.layout.blank(arrays, request.slot)
        return _SlotImage(self, shard, request.slot, arrays, fields)

    def describe(self) -> dict[str, Any]:
        """Return what `present_pixels` needs."""
        return {**super().describe(), "ragged": self.layout.size is None, "single": True}

    def decode(
        self,
        shard: Shard,
        number: int,
        payload: NDArray[np.uint8],
        arrays: Arrays,
        slot: int,
        thread: ThreadState,
    ) -> None:
        """Decode an image into its place.

        Raises:
            BadSample: It cannot be decoded, or is larger than the samples table says.
        """
        thread.enter("decode", f"shard {shard.name}")
        try:
            with self._counters.timed("decode", len(payload)):
                decoded = decode_file(payload)
        except FormatError as error:
            raise shard.bad(BadSampleReason.DECODE_FAILED, number, error.message) from None
        target = self._target(shard, number, (decoded.shape[0], decoded.shape[1]), arrays, slot)
        stored = decoded.dtype
        thread.enter("transform", f"shard {shard.name}")
        with self._counters.timed("transform", target.nbytes):
            num_saturated = convert_picture(decoded, target, thread.scratch)
        if num_saturated:
            self._counters.add("saturated", num_items=num_saturated)
            self._loss.warn(stored)
        arrays[f"{self.name}_mask"][slot] = 1
        arrays[f"{self.name}_index"][slot] = 0
        if decoded.shape == target.shape[1:] and decoded.dtype == target.dtype:
            # Gray is the same in all channels, and still in the processor's cache.
            arrays[f"{self.name}_range"][slot] = opencv().minMaxLoc(decoded)[:2]
            return
        pixels = target[:1] if decoded.ndim == 2 else target
        arrays[f"{self.name}_range"][slot] = pixels.min(), pixels.max()

    def _target(
        self, shard: Shard, number: int, shape: tuple[int, int], arrays: Arrays, slot: int
    ) -> NDArray[Any]:
        """Return the place of an image, ``(C, H, W)``."""
        name, layout = self.name, self.layout
        if layout.size is None:
            starts, num_elements = arrays[f"{name}.start"][:, 0], layout.channels * shape[0] * shape[1]
            stop = int(starts[slot + 1]) if slot + 1 < len(starts) else len(arrays[f"{name}.data"])
            if int(starts[slot]) + num_elements > stop:
                raise shard.bad(BadSampleReason.SIZE_MISMATCH, number, "larger than the samples table allows")
            arrays[f"{name}_shape"][slot, 0] = (layout.channels, *shape)
            return layout.place(arrays, slot, 0)
        if self.spec.size is None and shape != layout.size:
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, number, "another size than the index says")
        target = layout.place(arrays, slot, 0)
        if self.spec.fit == "letterbox":
            high, wide = (np.array([side], np.int64) for side in shape)
            box = content_boxes(high, wide, layout.size)[0]
            arrays[f"{name}_box"][slot, 0] = box
            top, left, rows, columns = box.tolist()
            target = target[:, top : top + rows, left : left + columns]
        return target


class _SlotImage:
    """Image of one slot."""

    __slots__ = ("_arrays", "_field", "_shard", "_slot", "fields")

    def __init__(
        self, field: BoundImageMember, shard: Shard, slot: int, arrays: Arrays, fields: Sequence[int]
    ) -> None:
        self._field, self._shard, self._slot, self._arrays = field, shard, slot, arrays
        self.fields = fields

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Decode the image into its place."""
        self._field.decode(self._shard, self.fields[place], payload, self._arrays, self._slot, thread)

    def close(self) -> None:
        """Do nothing: the slot is complete."""
