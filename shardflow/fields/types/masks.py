"""Masks of regions beside the pictures of another field, from stored masks in slices or in bricks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    FieldContext,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
)
from shardflow.fields.layout import Picture, PictureLayout, present_pictures
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.types.regions import BoundAnnotations, BoundRegions, RegionField, Shown, followed
from shardflow.format import array_header, decode_array
from shardflow.format.contents.regions import Region

_MAX_READERS: Final = 8
_NUM_BITS: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class Mask(RegionField):
    """Masks of regions in the pictures of another field, of the same rows and columns.

    ``(B, L, H, W)`` uint8 of 0 and 1 beside a single image, ``(B, N, L, H, W)`` beside several, ``(B, K, L,
    H, W)`` beside slices; a list where that field's entry is one. ``NAME_mask`` ``(B,)``, ``(B, N)`` or
    ``(B, K)`` uint8 is 1 for a picture of a study that has annotations: zeros there mean that nothing is
    marked, elsewhere that nobody looked. Masks are letterboxed and cut into tiles as their pictures are, and
    resized to the nearest stored pixel at half-pixel centers.

    Beside a volume ``(B, L, D, H, W)``, cut and sampled as the volume is, at the nearest stored voxel, and
    ``NAME_mask`` ``(B,)``.

    A stored mask decides, of which only the slices or bricks that are shown are read; else closed outlines
    are filled by the even-odd rule at pixel centers; else the box is. Lines and points have no area.

    Example::

        fields={"ct": sf.Slices(num_slices=32, size=(256, 256)),
                "lesions": sf.Mask(like="ct", labels=["nodule", "mass"], merge="stack")}

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "mask"

    merge: Literal["union", "majority", "stack"] = "union"
    """``union``: one plane (L = 1) of all regions; ``majority``: one plane of what more than half of the
    readers marked, of those who have a region of any label in the series (as in LIDC-IDRI; regions of unknown
    readers are one reader's); ``stack``: a plane for each of ``labels``, in their order, that may overlap."""
    threshold: float = 0.5
    """Part of a pixel, above 0 and up to 1, that a fractional mask must cover."""

    def _check(self) -> None:
        super()._check()
        check_choice("merge", self.merge, ("union", "majority", "stack"))
        if self.merge == "stack" and self.labels is None:
            raise ConfigError("merge='stack' makes a plane for each label; write labels=['NAME', ...].")
        threshold: object = self.threshold
        if not isinstance(threshold, int | float) or threshold is True or not 0 < threshold <= 1:
            raise ConfigError(f"threshold is a number above 0 and up to 1, got {threshold!r}.")

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return followed(name, self, context) or BoundMask(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the masks, and which pictures belong to annotated studies."""
        name = entry["name"]
        mask = arrays[f"{name}_mask"]
        return {
            name: present_pictures(entry, arrays),
            f"{name}_mask": mask[:, 0] if entry.get("single") else mask,
        }


def number_readers(shard: Shard, field: int, regions: Sequence[Region]) -> dict[int, list[int | None]]:
    """Return the readers of each series, by its number; the bit of a pixel is that of a reader's place.

    Args:
        shard: Holds the regions.
        field: Of the annotations.
        regions: Of any label.

    Raises:
        BadSample: There are more readers than bits.
    """
    found: dict[int, list[int | None]] = {}
    for region in regions:
        readers = found.setdefault(region.series, [])
        if region.reader not in readers:
            readers.append(region.reader)
    most = max(map(len, found.values()), default=0)
    if most > _MAX_READERS:
        detail = f"{most} readers of a series, and {_MAX_READERS} are allowed"
        raise shard.bad(BadSampleReason.SIZE_MISMATCH, field, detail)
    return found


def keep_majority(planes: NDArray[np.uint8], num_readers: int) -> None:
    """Make pixels 1 that more than half of the readers marked, whose bits they hold, and others 0."""
    np.copyto(planes, _NUM_BITS[planes] >= num_readers // 2 + 1)


class MaskPlanes(BoundAnnotations):
    """Part of a field of masks that says in which planes a region is drawn."""

    spec: Mask

    @property
    def num_planes(self) -> int:
        """Planes of a mask."""
        return len(self.spec.labels) if self.spec.merge == "stack" and self.spec.labels is not None else 1

    def planes_of(self, region: Region) -> list[int]:
        """Return the planes that a region is drawn in."""
        labels = self.labels_of(region)
        return labels if self.spec.merge == "stack" else [0] * bool(labels)

    def plane_tables(
        self, regions: Sequence[Region], dtype: np.dtype[Any], readers: Sequence[int | None] | None
    ) -> dict[int, NDArray[np.uint8]]:
        """Return what each value of a volume of masks in bricks is in each plane that it is drawn in.

        Args:
            regions: Of the volume.
            dtype: Of the volume.
            readers: Each has a bit; None for one bit for all.

        Raises:
            FormatError: It is no volume of masks, or a region names a value that it cannot hold.
        """
        if dtype not in (np.uint8, np.uint16):
            raise FormatError(f"a volume of masks must be uint8 or uint16, got {dtype}.")
        found: dict[int, NDArray[np.uint8]] = {}
        for region in regions:
            bit = np.uint8(1 if readers is None else 1 << readers.index(region.reader))
            is_inside = region.table(dtype, self.spec.threshold)
            for plane in self.planes_of(region):
                table = found.setdefault(plane, np.zeros(len(is_inside), np.uint8))
                table[is_inside] |= bit
        return found


class BoundMask(BoundRegions, MaskPlanes):
    """Masks of regions, bound to a selection."""

    spec: Mask

    def __init__(self, name: str, spec: Mask, context: FieldContext) -> None:
        super().__init__(name, spec, context)
        self.layout = PictureLayout(name, np.uint8, channels=self.num_planes, size=self.like.size)

    @property
    def varying(self) -> Sequence[str]:
        """The masks beside pictures whose number depends on the micro-batch."""
        names = {self.like.name: self.name, f"{self.like.name}_mask": f"{self.name}_mask"}
        return [names[one] for one in self.like.varying if one in names]

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_places = self.like.places(slots)
        return [
            *self.layout.array_specs(slots, num_places, self.like.pictures),
            ArraySpec.of(f"{self.name}_mask", np.uint8, len(slots), num_places),
        ]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Empty every slot, and lay out the pictures of the samples."""
        arrays[f"{self.name}_mask"][:] = 0
        self.layout.prepare(arrays, slots, self.like.pictures)

    def begin(self, arrays: Arrays, slot: int, num_shown: int, *, is_annotated: bool) -> None:
        """Empty the planes of a slot."""
        arrays[f"{self.name}_mask"][slot] = 0
        arrays[f"{self.name}_mask"][slot, :num_shown] = is_annotated
        if self.layout.size is not None:
            self.layout.blank(arrays, slot)
            return
        for place in range(num_shown):
            self.layout.place(arrays, slot, place)[:] = 0

    def slot_content(
        self, shard: Shard, slot: int, arrays: Arrays, shown: Sequence[Shown], fields: Sequence[int]
    ) -> SlotContent:
        """Return the masks of a slot."""
        return _SlotMasks(self, shard, slot, arrays, shown, fields)

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without pictures."""
        arrays[f"{self.name}_mask"][slot] = 0
        self.layout.blank(arrays, slot)

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs: shapes are those of the field that is followed."""
        own = {"type": self.spec.type_name, "name": self.name, "like": self.like.name}
        return {**self.like.describe(), **own}

    def _fields(self, shard: Shard, request: SlotRequest, pictures: Sequence[Picture]) -> list[int]:
        found = super()._fields(shard, request, pictures)
        if found:
            numbers, names = shard.masks(request.row_in_shard)
            wanted = {(picture.series, picture.position) for picture in pictures}
            in_bricks = []
            for number, (series, _, index) in zip(numbers.tolist(), names.tolist(), strict=True):
                if (series, index) in wanted:
                    found.append(number)
                elif index < 0:
                    shown = sorted(at for one, at in wanted if one == series)
                    in_bricks += [shard.mask_slice(number, at) for at in shown]
            found += in_bricks
        return found


class _SlotMasks:
    """Masks of one slot. Fields are read in the order of their names, so the annotations come first."""

    __slots__ = ("_arrays", "_field", "_readers", "_regions", "_shard", "_shown", "_slot", "fields")

    def __init__(
        self,
        field: BoundMask,
        shard: Shard,
        slot: int,
        arrays: Arrays,
        shown: Sequence[Shown],
        fields: Sequence[int],
    ) -> None:
        self._field, self._shard, self._slot, self._arrays = field, shard, slot, arrays
        self.fields = fields
        self._shown: dict[tuple[int, int], list[Shown]] = {}
        for one in shown if fields else ():
            self._shown.setdefault((one.picture.series, one.picture.position), []).append(one)
        self._regions: dict[tuple[int, int], Region] = {}
        self._readers: dict[int, list[int | None]] = {}
        """Readers of each series, of whom a bit of a pixel is each's until the slot is closed."""

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Draw the stored mask of a region, or read the annotations and draw what has no mask."""
        number = self.fields[place]
        if place:
            self._put_mask(number, payload, thread)
            return
        every = self._field.read(self._shard, number, payload)
        if self._field.spec.merge == "majority":
            self._readers = number_readers(self._shard, number, every)
        found = [region for region in every if self._field.labels_of(region)]
        self._regions = {(region.series, region.number): region for region in found}
        self._fill(found)

    def close(self) -> None:
        """Keep what most readers marked, where that is asked for."""
        for (series, _), every in self._shown.items():
            if series in self._readers:
                for shown in every:
                    planes = self._field.layout.place(self._arrays, self._slot, shown.place)
                    keep_majority(planes, len(self._readers[series]))

    def _put_mask(self, number: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        series, roi, index = self._shard.mask_place(number)
        is_brick = number >= self._shard.index.num_fields
        place = self._regions.get((series, roi))
        regions = self._in_volume(series, roi) if is_brick else [] if place is None else [place]
        if not regions:
            return
        codec, shape = self._shard.codec(number), self._shown[series, index][0].picture.shape
        thread.enter("decode", f"shard {self._shard.name}")
        try:
            dtype = array_header(codec, payload)[1] if is_brick else np.dtype(np.uint8)
            mask = thread.scratch.array("region", shape, dtype)
            with self._field.counters.timed("decode", mask.nbytes):
                decode_array(codec, payload, out=mask)
            if is_brick:
                readers = self._readers.get(series)
                tables = self._field.plane_tables(regions, dtype, readers)
                self._draw_values(series, index, mask, tables)
                return
        except FormatError as error:
            raise self._shard.bad(BadSampleReason.DECODE_FAILED, number, error.message) from None
        self._draw(regions[0], index, mask, regions[0].mask_level(self._field.spec.threshold))

    def _in_volume(self, series: int, volume: int) -> list[Region]:
        regions = self._regions.values()
        return [one for one in regions if one.series == series and one.volume == volume]

    def _draw_values(
        self, series: int, index: int, values: NDArray[Any], tables: Mapping[int, NDArray[np.uint8]]
    ) -> None:
        """Draw a slice of masks in bricks."""
        for shown in self._shown[series, index]:
            planes = self._field.layout.place(self._arrays, self._slot, shown.place)
            top, left, rows, columns = shown.window.box
            with self._field.counters.timed("regions", rows * columns):
                picked = shown.pick(values)
                for plane, table in tables.items():
                    part = planes[plane, top : top + rows, left : left + columns]
                    np.bitwise_or(part, np.take(table, picked), out=part)

    def _fill(self, regions: Sequence[Region]) -> None:
        """Draw the regions where they have no stored mask."""
        stored = {self._shard.mask_place(number) for number in self.fields[1:]}
        for region in regions:
            for index in region.places if region.volume is None else ():
                shown = self._shown.get((region.series, index))
                if shown is None or (region.series, region.number, index) in stored:
                    continue
                try:
                    filled = region.fill(index, shown[0].picture.shape)
                except FormatError as error:
                    reason = BadSampleReason.TEXT_UNREADABLE
                    raise self._shard.bad(reason, self.fields[0], error.message) from None
                if filled is not None:
                    self._draw(region, index, filled, 1)

    def _draw(self, region: Region, index: int, pixels: NDArray[np.uint8], level: int) -> None:
        readers = self._readers.get(region.series)
        bit = np.uint8(1 if readers is None else 1 << readers.index(region.reader))
        for shown in self._shown[region.series, index]:
            planes = self._field.layout.place(self._arrays, self._slot, shown.place)
            top, left, rows, columns = shown.window.box
            with self._field.counters.timed("regions", rows * columns):
                is_inside = (shown.pick(pixels) >= level) * bit
                for plane in self._field.planes_of(region):
                    part = planes[plane, top : top + rows, left : left + columns]
                    np.bitwise_or(part, is_inside, out=part)
