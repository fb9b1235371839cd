"""Delivery of regions: the base of bound fields that deliver one region of each sample, and its voxels.

Stored voxels are decoded, resampled once, and brought into their place.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.catalog import SelectedSeries
from shardflow.fields.decode import ThreadState, cast_saturated
from shardflow.fields.field import (
    Arrays,
    BoundField,
    Coverage,
    Field,
    FieldContext,
    RegionContent,
    SlotRequest,
    Slots,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.series_rows import ImageSet, Limits
from shardflow.fields.types.pixels import LossWarning
from shardflow.fields.volumes.geometry import Grid, Vector
from shardflow.fields.volumes.resampling import Interpolation, Region, inside, resample, smoothing
from shardflow.fields.volumes.stored import Crop, is_covered, stored_view
from shardflow.format import array_header, decode_array
from shardflow.format.facts.units import WindowTable
from shardflow.format.volumes.bricks import RegionPlan
from shardflow.telemetry import StageCounters

_LOGGER = logging.getLogger(__name__)
_FRAME: Final = "frame_of_reference_key"
_LIMITS: Final = Limits(max_series=1)


class BoundRegion(BoundField):
    """Field of regions, bound to a selection; the first selected series of a sample is delivered.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        selected: The series to deliver regions of.
        context: The samples and their tables.

    Raises:
        ConfigError: Samples are single images.
    """

    has_pictures = True
    beside: ClassVar[tuple[str, ...]]
    """Arrays beside the regions: ``NAME_mask`` and others."""
    spec: Field

    def __init__(self, name: str, spec: Field, selected: SelectedSeries, context: FieldContext) -> None:
        super().__init__(name)
        self.spec, self.selected = spec, selected
        self._samples, self._populations = context.samples, context.populations
        self._num_samples, self._num_missing = context.num_samples, 0
        if "image" in {getattr(dataset, "unit", "study") for dataset in context.samples.datasets}:
            raise ConfigError(
                f"The field {name!r} needs whole series, and samples are single images; write "
                "unit='series' or unit='study'."
            )

    def _count_missing(self, context: FieldContext, what: str) -> None:
        """Count the samples without content, once `has_content` is known.

        Args:
            context: The samples and their tables.
            what: What they lack, for the message.

        Raises:
            ConfigError: There are some, and ``missing`` is ``error``.
        """
        self._num_missing = context.count_missing(self.has_content)
        if self._num_missing and self.spec.missing == "error":
            raise ConfigError(
                f"{self._num_missing:,} of {self._num_samples:,} samples have no {what}; write missing='pad' "
                "to pad and mask them, or missing='drop' to leave them out."
            )

    @property
    def has_content(self) -> list[NDArray[np.bool_]]:
        """Rows of each dataset's own table that have a selected series, ``(num_rows,)``."""
        return [self.selected.num_images(place) > 0 for place in range(len(self.selected.catalog.tables))]

    @property
    def coverage(self) -> Coverage:
        """Series that are delivered, by the images that these hold, and others that are left out."""
        delivered, left_out = self.selected.roles(_LIMITS)
        return Coverage(
            num_samples=self._num_samples,
            num_missing=self._num_missing,
            delivered=delivered,
            left_out=left_out,
        )

    def delivered_images(self, place: int) -> ImageSet:
        """Return the stored images of a dataset that the field delivers."""
        return self.selected.images(place, _LIMITS)

    def num_delivered(self, place: int) -> NDArray[np.int64]:
        """Return 1 for each row of a dataset that has a series: a region costs the same, wherever it is."""
        return self.has_content[place].astype(np.int64)

    def prepare(self, arrays: Arrays, slots: Slots) -> None:  # noqa: ARG002
        """Empty what is beside the regions of every slot."""
        self._blank_beside(arrays, slice(None))

    def _blank_beside(self, arrays: Arrays, slots: int | slice) -> None:
        for beside in self.beside:
            if f"{self.name}_{beside}" in arrays:
                arrays[f"{self.name}_{beside}"][slots] = np.eye(4) if beside == "affine" else 0

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs."""
        return {"type": self.spec.type_name, "name": self.name}

    def _window(self, request: SlotRequest) -> int:
        """Return the number of the window, or of the tile, that a sample is."""
        samples = self._samples.datasets[request.component].samples
        assert isinstance(samples, WindowTable)  # noqa: S101 - checked when the fields were bound
        return int(samples.numbers(np.array([request.table_row]))[0])


class Delivery:
    """Rule that makes delivered voxels of stored ones. Safe for many threads.

    Args:
        name: Name of the entry.
        dtype: As delivered.
        fill: Value outside of a volume, in its unit.
        windows: Least and greatest value of each channel; empty delivers values.
        interpolation: Between stored voxels.
        antialias: Whether to smooth before a coarser grid is sampled.
        counters: Gets the stages ``decode`` and ``transform``, and ``saturated``.

    Attributes:
        blank: ``(C, 1, 1, 1)``: voxels of an empty slot.
    """

    def __init__(
        self,
        name: str,
        *,
        dtype: np.dtype[Any],
        fill: float,
        windows: Sequence[tuple[float, float]],
        interpolation: Interpolation,
        antialias: bool,
        counters: StageCounters,
    ) -> None:
        self.name, self.dtype, self.fill, self.windows = name, dtype, fill, windows
        self.interpolation, self._antialias, self.counters = interpolation, antialias, counters
        self._loss = LossWarning(name, dtype)
        self._has_other_frames = False
        self.blank = np.full((max(1, len(windows)), 1, 1, 1), 0 if windows else fill, dtype)
        for (low, high), channel in zip(windows, self.blank, strict=False):
            show_window(np.full((1, 1, 1), fill, np.float32), low, high, channel)

    def is_direct(self, crop: Crop) -> bool:
        """Whether stored voxels are delivered as they are, so that they can be decoded into place."""
        can_hold = np.can_cast(crop.stored.dtype, self.dtype)
        return can_hold and not self.windows and crop.grid.is_copy

    def finish(self, voxels: NDArray[Any], crop: Crop, target: NDArray[Any], thread: ThreadState) -> None:
        """Bring the voxels of a region into the place of the delivered ones.

        Args:
            voxels: Of the region, as stored.
            crop: What to deliver.
            target: ``(C, D, H, W)`` to fill.
            thread: Of the caller.
        """
        stored = crop.stored.dtype
        dtype = np.dtype(np.float32 if np.can_cast(stored, np.float32) else np.float64)
        is_in_place = dtype == self.dtype and not self.windows
        values = target[0] if is_in_place else thread.scratch.array("volume", target.shape[1:], dtype)
        if not is_covered(crop):
            values[...] = self.fill
        if crop.region is not None:
            resample(
                voxels,
                crop.region,
                crop.stored.shape,
                crop.grid,
                values,
                mode=self.interpolation,
                sigmas=self.sigmas(crop.grid),
            )
        if self.windows:
            for (low, high), channel in zip(self.windows, target, strict=True):
                show_window(values, low, high, channel)
        elif not is_in_place:
            has_rounded = stored.kind == "f" and self.dtype.kind != "f"
            num_saturated = cast_saturated(values, target[0])
            if num_saturated:
                self.counters.add("saturated", num_items=num_saturated)
            if num_saturated or has_rounded:
                self._loss.warn(stored)

    def sigmas(self, grid: Grid) -> Vector:
        """Return the smoothing before a grid is sampled, see `resampling.smoothing`."""
        return smoothing(grid) if self._antialias else (0.0, 0.0, 0.0)

    def check_frames(self, own: str | None, other: str | None) -> None:
        """Count and log, once, that a series is in another frame of reference than the one it follows."""
        if own is None or other is None or own == other:
            return
        self.counters.add("other_frames", num_items=1)
        if not self._has_other_frames:
            self._has_other_frames = True
            _LOGGER.warning(
                "series of the field %r are in another frame of reference than those of the field that they "
                "are like, so their places in millimeters need not agree; register them before packing, or "
                "leave such studies out with where=",
                self.name,
            )


def show_window(values: NDArray[Any], low: float, high: float, target: NDArray[Any]) -> None:
    """Bring values from a window to 0 to 1, or for bytes to 0 to 255, and cut what is beyond.

    Args:
        values: Any shape.
        low: Value that becomes 0.
        high: Value that becomes 1.
        target: The same shape; float32 or uint8.
    """
    share = np.subtract(values, low)
    np.multiply(share, 1 / (high - low), out=share)
    np.clip(share, 0, 1, out=share)
    if target.dtype.kind != "f":
        np.rint(np.multiply(share, np.iinfo(target.dtype).max, out=share), out=share)
    np.copyto(target, share, casting="unsafe")


class SlotVolume(RegionContent):
    """Region of one slot. It is finished with its last stored field, so that few regions are held at once."""

    __slots__ = (
        "_arrays",
        "_crop",
        "_delivery",
        "_is_direct",
        "_left",
        "_num_slices",
        "_shard",
        "_slot",
        "_voxels",
        "fields",
        "plans",
    )

    def __init__(
        self,
        delivery: Delivery,
        shard: Shard,
        slot: int,
        arrays: Arrays,
        crop: Crop,
        fields: Sequence[int],
        plan: RegionPlan | None,
    ) -> None:
        self._delivery, self._shard, self._slot, self._arrays, self._crop = (
            delivery,
            shard,
            slot,
            arrays,
            crop,
        )
        self.fields, self.plans = fields, () if plan is None else (plan,)
        self._left = len(fields) + (plan is not None)
        self._is_direct = delivery.is_direct(crop)
        self._voxels: NDArray[Any] | None = None
        self._num_slices = 0 if crop.region is None or plan is not None else crop.region.shape[0]
        name, stored = delivery.name, crop.stored
        arrays[f"{name}_mask"][slot] = 1
        unknown = np.full((4, 4), np.nan)
        found = unknown if stored.affine is None else crop.grid.affine(stored.affine).to_array()
        arrays[f"{name}_affine"][slot] = found
        if f"{name}_valid" in arrays:
            inside(crop.grid, stored.shape, arrays[f"{name}_valid"][slot, 0])
        if crop.region is None:
            arrays[name][slot] = delivery.blank
        elif self._is_direct:
            if not is_covered(crop):
                arrays[name][slot] = delivery.fill
            self._voxels = stored_view(arrays[name][slot, 0], crop.grid, crop.region)

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Decode a slice, or read the display range of the series."""
        if place == self._num_slices:
            self._read_study(payload)
        else:
            self._decode(place, payload, thread)
        self._finish(thread)

    def target(self, place: int, thread: ThreadState) -> NDArray[Any]:  # noqa: ARG002 - one plan
        """Return where to decode the stored voxels of the region, ``(slices, rows, columns)``."""
        return self._stored(thread)

    def _stored(self, thread: ThreadState) -> NDArray[Any]:
        if self._voxels is None:
            region = self._crop.region or Region((0, 0, 0), self._crop.stored.shape)
            self._voxels = thread.scratch.lend(region.shape, self._crop.stored.dtype)
        return self._voxels

    def put_region(self, place: int, thread: ThreadState) -> None:  # noqa: ARG002 - one plan
        """Note that the region is decoded."""
        self._finish(thread)

    def _finish(self, thread: ThreadState) -> None:
        """Deliver the region with the last that it waited for."""
        self._left -= 1
        if self._left or self._voxels is None or self._is_direct:
            return
        thread.enter("transform", f"shard {self._shard.name}")
        target = self._arrays[self._delivery.name][self._slot]
        with self._delivery.counters.timed("transform", target.nbytes):
            self._delivery.finish(self._voxels, self._crop, target, thread)
        thread.scratch.take_back(self._voxels)
        self._voxels = None

    def close(self) -> None:
        """Set the display range to the extremes of the voxels where the study states none."""
        ranges, voxels = (
            self._arrays[f"{self._delivery.name}_range"][self._slot],
            self._arrays[self._delivery.name],
        )
        if not ranges.any():
            ranges[:] = voxels[self._slot].min(), voxels[self._slot].max()

    def _decode(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        crop, number = self._crop, self.fields[place]
        _, rows, columns = (crop.region or Region((0, 0, 0), crop.stored.shape)).slices
        thread.enter("decode", f"shard {self._shard.name}")
        codec, target = self._shard.codec(number), self._stored(thread)[place]
        try:
            shape, dtype = array_header(codec, payload)
            with self._delivery.counters.timed("decode", math.prod(shape) * dtype.itemsize):
                if shape == target.shape and dtype == target.dtype and target.flags.c_contiguous:
                    decode_array(codec, payload, out=target)
                elif shape == crop.stored.shape[1:] and np.can_cast(dtype, target.dtype):
                    whole = thread.scratch.array("slice", shape, dtype)
                    target[...] = decode_array(codec, payload, out=whole)[rows, columns]
                else:
                    detail = f"a slice is {dtype} {shape}, and another one in the series table"
                    raise self._shard.bad(BadSampleReason.SIZE_MISMATCH, number, detail)
        except FormatError as error:
            raise self._shard.bad(BadSampleReason.DECODE_FAILED, number, error.message) from None

    def _read_study(self, payload: NDArray[np.uint8]) -> None:
        try:
            series = json.loads(payload.tobytes())["series"]
            found = series[self._crop.stored.series].get("display_range")
            if found is not None:
                self._arrays[f"{self._delivery.name}_range"][self._slot] = float(found[0]), float(found[1])
            if self._crop.like is not None:
                both = (series[each].get(_FRAME) for each in (self._crop.stored.series, self._crop.like))
                self._delivery.check_frames(*both)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reason = BadSampleReason.TEXT_UNREADABLE
            raise self._shard.bad(reason, "study.json", type(error).__name__) from None
