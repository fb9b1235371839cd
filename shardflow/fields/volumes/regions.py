"""Masks and boxes in the region of a volume: cut and sampled as the volume is, at the nearest voxel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    FieldContext,
    NoContent,
    RegionContent,
    SlotContent,
    SlotRequest,
    Slots,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.types.masks import Mask, MaskPlanes, keep_majority, number_readers
from shardflow.fields.types.regions import BoundAnnotations, Boxes
from shardflow.fields.volumes.geometry import Shape
from shardflow.fields.volumes.resampling import Region as VoxelBox
from shardflow.fields.volumes.resampling import resample, source_region
from shardflow.fields.volumes.stored import Crop, stored_view
from shardflow.format import decode_array
from shardflow.format.contents.regions import Region
from shardflow.format.keys import volume_field
from shardflow.format.volumes.bricks import RegionPlan

_LEAST_SIDE: Final = 1e-6
"""Voxels that a visible box has at least, so that one beside the array is not seen for a rounding error."""
CropOf: TypeAlias = Callable[[Shard, SlotRequest], Crop | None]
"""Returns what the volume that is followed delivers of a sample."""


class BoundVolumeMask(MaskPlanes):
    """Masks of regions beside a volume, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        context: The samples.
        shape: Voxels (D, H, W) of the volume's region.
        crop_of: Which region that is.
    """

    spec: Mask

    def __init__(self, name: str, spec: Mask, context: FieldContext, shape: Shape, crop_of: CropOf) -> None:
        super().__init__(name, spec, context)
        self._shape, self._crop_of = shape, crop_of

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return [
            ArraySpec.of(self.name, np.uint8, len(slots), self.num_planes, *self._shape),
            ArraySpec.of(f"{self.name}_mask", np.uint8, len(slots)),
        ]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:  # noqa: ARG002
        """Note that nobody looked at any slot."""
        arrays[f"{self.name}_mask"][:] = 0

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without a volume."""
        arrays[self.name][slot] = arrays[f"{self.name}_mask"][slot] = 0

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the number of the annotations, and those of the masks in the slices of the region."""
        return self._fields(shard, request, self._crop_of(shard, request))

    def needed_regions(self, shard: Shard, request: SlotRequest) -> list[RegionPlan]:
        """Return the region of the masks in bricks."""
        return list(self._plans(shard, request, self._crop_of(shard, request)).values())

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        crop = self._crop_of(shard, request)
        fields = self._fields(shard, request, crop)
        self.blank(arrays, request.slot)
        if crop is None or not fields:
            return NoContent()
        arrays[f"{self.name}_mask"][request.slot] = 1
        plans = self._plans(shard, request, crop)
        return _SlotMask(self, shard, arrays[self.name][request.slot], crop, fields, plans)

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs."""
        own = {"type": self.spec.type_name, "name": self.name, "like": self.spec.like}
        return {**own, "ragged": False}

    def _fields(self, shard: Shard, request: SlotRequest, crop: Crop | None) -> list[int]:
        number = self.annotations(shard, request)
        if number is None or crop is None:
            return []
        box = voxel_box(crop)
        numbers, names = shard.masks(request.row_in_shard)
        if box is None:
            return [number]
        is_wanted = (names[:, 0] == crop.stored.series) & (names[:, 2] >= box.start[0])
        found: list[int] = numbers[is_wanted & (names[:, 2] < box.stop[0])].tolist()
        return [number, *found]

    def _plans(self, shard: Shard, request: SlotRequest, crop: Crop | None) -> dict[int, RegionPlan]:
        """Return what to read of masks in bricks, by the region that the volume is named after."""
        box = None if crop is None else voxel_box(crop)
        if crop is None or box is None or shard.index.bricks is None:
            return {}
        found = {}
        numbers, names = shard.masks(request.row_in_shard)
        is_wanted = (names[:, 0] == crop.stored.series) & (names[:, 2] < 0)
        for number, roi in zip(numbers[is_wanted].tolist(), names[is_wanted, 1].tolist(), strict=True):
            volume = shard.index.volume(number)
            if volume.shape != crop.stored.shape:
                raise shard.bad(BadSampleReason.SIZE_MISMATCH, number, "masks of another shape")
            found[roi] = volume.plan(box.start, box.stop)
        return found


def voxel_box(crop: Crop) -> VoxelBox | None:
    """Return the stored voxels that are nearest to a delivered one; None where all are outside."""
    return source_region(crop.grid, crop.stored.shape, "nearest")


class _SlotMask(RegionContent):
    """Masks of one slot. Fields are read in the order of their names, so the annotations come first."""

    __slots__ = (
        "_box",
        "_crop",
        "_field",
        "_left",
        "_planes",
        "_readers",
        "_regions",
        "_shard",
        "_target",
        "_values",
        "_volumes",
        "fields",
        "plans",
    )

    def __init__(
        self,
        field: BoundVolumeMask,
        shard: Shard,
        target: NDArray[np.uint8],
        crop: Crop,
        fields: Sequence[int],
        plans: Mapping[int, RegionPlan],
    ) -> None:
        self._field, self._shard, self._target, self._crop = field, shard, target, crop
        self._volumes, self.plans = [*plans], [*plans.values()]
        self.fields, self._left = fields, len(fields) + len(plans)
        self._box = voxel_box(crop)
        self._regions: dict[int, Region] = {}
        self._readers: list[int | None] | None = None
        """Each has a bit of a voxel until all are drawn."""
        self._values: NDArray[Any] | None = None
        self._planes: NDArray[np.uint8] | None = None
        """``(L, slices, rows, columns)`` of the stored voxels."""

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Draw the stored mask of a region, or read the annotations and draw what has no mask."""
        number = self.fields[place]
        if place:
            self._put_mask(number, payload, thread)
        else:
            self._put_annotations(number, payload, thread)
        self._finish(thread)

    def _put_annotations(self, number: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        series = self._crop.stored.series
        found = [one for one in self._field.read(self._shard, number, payload) if one.series == series]
        if self._field.spec.merge == "majority":
            self._readers = number_readers(self._shard, number, found).get(series, [])
        self._regions = {one.number: one for one in found if self._field.labels_of(one)}
        named = {one.volume for one in self._regions.values() if one.volume is not None}
        missing = sorted(named - {*self._volumes}) if self._box is not None else []
        if missing:
            raise self._shard.bad(BadSampleReason.FIELD_MISSING, volume_field(series, missing[0]))
        self._fill(thread)

    def target(self, place: int, thread: ThreadState) -> NDArray[Any] | None:
        """Return where to decode the masks in bricks; None if no region of a wanted label is in them."""
        plan = self.plans[place]
        if not any(one.volume == self._volumes[place] for one in self._regions.values()):
            self._finish(thread)
            return None
        self._values = thread.scratch.array("region", plan.shape, plan.volume.dtype)
        return self._values

    def put_region(self, place: int, thread: ThreadState) -> None:
        """Draw the masks in bricks that are decoded."""
        values, box = self._values, self._box
        if values is None or box is None:
            return
        regions = [one for one in self._regions.values() if one.volume == self._volumes[place]]
        try:
            tables = self._field.plane_tables(regions, values.dtype, self._readers)
        except FormatError as error:
            raise self._shard.bad(BadSampleReason.TEXT_UNREADABLE, self.fields[0], error.message) from None
        with self._field.counters.timed("regions", values.size):
            planes = self._drawn(box, thread)
            for plane, table in tables.items():
                part = planes[plane]
                np.bitwise_or(part, np.take(table, values), out=part)
        self._values = None
        self._finish(thread)

    def _finish(self, thread: ThreadState) -> None:
        """Sample what was drawn, with the last that it waited for."""
        self._left -= 1
        if self._left or self._box is None:
            return
        if self._readers:
            keep_majority(self._target if self._planes is None else self._planes, len(self._readers))
        if self._planes is None or self._crop.grid.is_copy:
            return
        stored, grid = self._crop.stored.shape, self._crop.grid
        with self._field.counters.timed("regions", self._target.nbytes):
            for plane, target in zip(self._planes, self._target, strict=True):
                resample(plane, self._box, stored, grid, target, mode="nearest")
        thread.scratch.take_back(self._planes)
        self._planes = None

    def close(self) -> None:
        """Do nothing: the slot is complete."""

    def _put_mask(self, number: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        _, roi, index = self._shard.mask_place(number)
        region = self._regions.get(roi)
        if region is None:
            return
        thread.enter("decode", f"shard {self._shard.name}")
        try:
            mask = thread.scratch.array("region", self._crop.stored.shape[1:], np.dtype(np.uint8))
            with self._field.counters.timed("decode", mask.nbytes):
                decode_array(self._shard.codec(number), payload, out=mask)
        except FormatError as error:
            raise self._shard.bad(BadSampleReason.DECODE_FAILED, number, error.message) from None
        self._draw(region, index, mask, region.mask_level(self._field.spec.threshold), thread)

    def _fill(self, thread: ThreadState) -> None:
        """Draw the regions where they have no stored mask."""
        box = self._box
        stored = {self._shard.mask_place(number)[1:] for number in self.fields[1:]}
        for region in self._regions.values() if box is not None else ():
            for index in region.places if region.volume is None else ():
                if box is None or not box.start[0] <= index < box.stop[0] or (region.number, index) in stored:
                    continue
                try:
                    filled = region.fill(index, self._crop.stored.shape[1:])
                except FormatError as error:
                    reason = BadSampleReason.TEXT_UNREADABLE
                    raise self._shard.bad(reason, self.fields[0], error.message) from None
                if filled is not None:
                    self._draw(region, index, filled, 1, thread)

    def _draw(
        self, region: Region, index: int, pixels: NDArray[np.uint8], level: int, thread: ThreadState
    ) -> None:
        box = self._box
        if box is None:
            return
        _, rows, columns = box.slices
        with self._field.counters.timed("regions", pixels.size):
            is_inside = pixels[rows, columns] >= level
            if not is_inside.any():
                return
            bit = 1 if self._readers is None else 1 << self._readers.index(region.reader)
            drawn = is_inside * np.uint8(bit)
            planes = self._drawn(box, thread)
            for plane in self._field.planes_of(region):
                part = planes[plane][index - box.start[0]]
                np.bitwise_or(part, drawn, out=part)

    def _drawn(self, box: VoxelBox, thread: ThreadState) -> Sequence[NDArray[np.uint8]]:
        """Return the planes to draw in, with the stored axes; where voxels are copied, the delivered ones."""
        if self._crop.grid.is_copy:
            return [stored_view(target, self._crop.grid, box) for target in self._target]
        if self._planes is None:
            self._planes = thread.scratch.lend((len(self._target), *box.shape), np.dtype(np.uint8))
            self._planes[...] = 0
        return list(self._planes)


class BoundVolumeBoxes(BoundAnnotations):
    """Boxes of regions beside a volume, bound to a selection; arguments as of `BoundVolumeMask`."""

    spec: Boxes

    def __init__(self, name: str, spec: Boxes, context: FieldContext, shape: Shape, crop_of: CropOf) -> None:
        super().__init__(name, spec, context)
        self.shape, self._crop_of = shape, crop_of

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        name, shape = self.name, (len(slots), self.spec.max_boxes)
        return [
            ArraySpec.of(name, np.float32, *shape, 6),
            ArraySpec.of(f"{name}_mask", np.uint8, *shape),
            ArraySpec.of(f"{name}_label", np.int64, *shape),
            ArraySpec.of(f"{name}_annotated", np.uint8, len(slots)),
        ]

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without boxes."""
        name = self.name
        arrays[name][slot] = arrays[f"{name}_mask"][slot] = arrays[f"{name}_annotated"][slot] = 0
        arrays[f"{name}_label"][slot] = -1

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the number of the annotations."""
        number = self.annotations(shard, request)
        return () if number is None else (number,)

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        fields, crop = self.needed(shard, request), self._crop_of(shard, request)
        self.blank(arrays, request.slot)
        if crop is None or not fields:
            return NoContent()
        arrays[f"{self.name}_annotated"][request.slot] = 1
        of_slot = {name: array[request.slot] for name, array in arrays.items() if name.startswith(self.name)}
        return _SlotVolumeBoxes(self, shard, of_slot, crop, fields)

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs."""
        return {"type": self.spec.type_name, "name": self.name, "like": self.spec.like}


class _SlotVolumeBoxes:
    """Boxes of one slot."""

    __slots__ = ("_arrays", "_crop", "_field", "_shard", "fields")

    def __init__(
        self,
        field: BoundVolumeBoxes,
        shard: Shard,
        arrays: Mapping[str, NDArray[Any]],
        crop: Crop,
        fields: Sequence[int],
    ) -> None:
        self._field, self._shard, self._arrays, self._crop = field, shard, arrays, crop
        self.fields = fields

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:  # noqa: ARG002
        """Read the annotations, and deliver their boxes.

        Raises:
            BadSample: They cannot be read, or hold too many boxes.
        """
        field, name = self._field, self._field.name
        found = list(self._boxes(field.read(self._shard, self.fields[0], payload)))
        if len(found) > field.spec.max_boxes:
            detail = f"{len(found):,} boxes, and {field.spec.max_boxes:,} are allowed"
            raise self._shard.bad(BadSampleReason.SIZE_MISMATCH, self.fields[0], detail)
        field.counters.add("regions", num_items=len(found))
        for at, (box, label) in enumerate(found):
            self._arrays[name][at] = box
            self._arrays[f"{name}_label"][at] = label
        self._arrays[f"{name}_mask"][: len(found)] = 1

    def close(self) -> None:
        """Do nothing: the slot is complete."""

    def _boxes(self, regions: Sequence[Region]) -> Iterator[tuple[list[float], int]]:
        for region in regions:
            if region.series != self._crop.stored.series:
                continue
            carried = self._carry(region)
            if carried is not None:
                yield from ((carried, label) for label in self._field.labels_of(region))

    def _carry(self, region: Region) -> list[float] | None:
        """Return the visible part of the box around a region; None if nothing of it is visible."""
        boxes = {index: place.box for index, place in region.places.items() if place.box is not None}
        if not boxes:
            return None
        # Edges of pixels and slices; voxel centers are half a voxel further.
        first_x, first_y, last_x, last_y = zip(*boxes.values(), strict=True)
        x0, y0, x1, y1 = min(first_x), min(first_y), max(last_x), max(last_y)
        sides = (min(boxes), max(boxes) + 1.0), (y0, y1), (x0, x1)
        grid = self._crop.grid
        corners = [grid.point((z - 0.5, y - 0.5, x - 0.5)) for z, y, x in itertools.product(*sides)]
        edges = [[at + 0.5 for at in axis] for axis in zip(*corners, strict=True)]
        lows = [max(min(axis), 0.0) for axis in edges]
        highs = [min(max(axis), float(side)) for axis, side in zip(edges, self._field.shape, strict=True)]
        is_seen = all(high - low > _LEAST_SIDE for low, high in zip(lows, highs, strict=True))
        return [*lows, *highs] if is_seen else None
