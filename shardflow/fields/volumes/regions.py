"""Masks and boxes in the region of a volume: cut and sampled as the volume is, at the nearest voxel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import Arrays, ArraySpec, FieldContext, NoContent, SlotContent, SlotRequest, Slots
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.types.regions import BoundAnnotations, Boxes, Mask
from shardflow.fields.volumes.geometry import Shape
from shardflow.fields.volumes.resampling import Region as VoxelBox
from shardflow.fields.volumes.resampling import resample, source_region
from shardflow.fields.volumes.stored import Crop, stored_view
from shardflow.format import decode_array
from shardflow.format.regions import Region

_LEAST_SIDE: Final = 1e-6
"""Voxels that a visible box has at least, so that one beside the array is not seen for a rounding error."""
CropOf: TypeAlias = Callable[[Shard, SlotRequest], Crop | None]
"""Returns what the volume that is followed delivers of a sample."""


class BoundVolumeMask(BoundAnnotations):
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
        self._num_planes = len(spec.labels) if spec.merge == "stack" and spec.labels is not None else 1

    def planes_of(self, region: Region) -> list[int]:
        """Return the planes that a region is drawn in."""
        labels = self.labels_of(region)
        return labels if self.spec.merge == "stack" else [0] * bool(labels)

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return [
            ArraySpec.of(self.name, np.uint8, len(slots), self._num_planes, *self._shape),
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

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        crop = self._crop_of(shard, request)
        fields = self._fields(shard, request, crop)
        self.blank(arrays, request.slot)
        if crop is None or not fields:
            return NoContent()
        arrays[f"{self.name}_mask"][request.slot] = 1
        return _SlotMask(self, shard, arrays[self.name][request.slot], crop, fields)

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


def voxel_box(crop: Crop) -> VoxelBox | None:
    """Return the stored voxels that are nearest to a delivered one; None where all are outside."""
    return source_region(crop.grid, crop.stored.shape, "nearest")


class _SlotMask:
    """Masks of one slot. Fields are read in the order of their names, so the annotations come first."""

    __slots__ = ("_box", "_crop", "_field", "_left", "_planes", "_regions", "_shard", "_target", "fields")

    def __init__(
        self,
        field: BoundVolumeMask,
        shard: Shard,
        target: NDArray[np.uint8],
        crop: Crop,
        fields: Sequence[int],
    ) -> None:
        self._field, self._shard, self._target, self._crop = field, shard, target, crop
        self.fields, self._left = fields, len(fields)
        self._box = voxel_box(crop)
        self._regions: dict[int, Region] = {}
        self._planes: NDArray[np.uint8] | None = None
        """``(L, slices, rows, columns)`` of the stored voxels."""

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Draw the stored mask of a region, or read the annotations and draw what has no mask."""
        number = self.fields[place]
        if place:
            self._put_mask(number, payload, thread)
        else:
            found = self._field.read(self._shard, number, payload)
            self._regions = {one.number: one for one in found if one.series == self._crop.stored.series}
            self._fill(thread)
        self._left -= 1
        if self._left or self._planes is None or self._box is None or self._crop.grid.is_copy:
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
            for index in region.places:
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
            planes = self._drawn(box, thread)
            for plane in self._field.planes_of(region):
                part = planes[plane][index - box.start[0]]
                np.bitwise_or(part, is_inside, out=part)

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

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Empty every slot."""
        for slot in range(len(slots)):
            self.blank(arrays, slot)

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
