"""Fields of pixels: images and slices, decoded into their places.

Which images a sample has, and their sizes, follow from the series table, so memory is laid out before
anything is read, and only chosen images are read. With one size for all, an entry is one array; otherwise
images are stored one after another, and the entry is a list.
"""

from __future__ import annotations

import json
import logging
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.catalog import SelectedSeries
from shardflow.fields.decode import ThreadState, convert_picture, cut_tiles, decode_slice
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Coverage,
    DrawKey,
    FieldContext,
    SlotRequest,
    Slots,
    StackContent,
)
from shardflow.fields.layout import (
    WINDOWS,
    Picture,
    PictureLayout,
    Window,
    content_boxes,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.series_rows import ImageSet, Limits
from shardflow.fields.types.pixel_field import DEFAULT_SERIES, PixelField
from shardflow.format import Dataset, array_header, decode_array
from shardflow.format.codecs import Outs, decode_arrays
from shardflow.sampling import Permutation, TileRule

_LOGGER = logging.getLogger(__name__)
_COLOR: Final = 3
_EXAMPLE_VALUES: Final = 100
_AIR_HU: Final = -1024
_BESIDE: Final = ("mask", "range", "box", "grid")
"""Arrays beside the pixels that are 0 where a slot is empty."""
ORIGINAL: Final = 0
"""Number of the version of a sample that is not augmented."""


def check_fill(name: str, fill: float, dtype: np.dtype[Any]) -> float:
    """Return the value of places without an image.

    Raises:
        ConfigError: The dtype cannot hold it.
    """
    if isinstance(fill, bool) or not isinstance(fill, int | float):
        raise ConfigError(f"fill of the field {name!r} is a number, such as 0, got {fill!r}.")
    info = None if dtype.kind == "f" else np.iinfo(dtype)
    if info is not None and not (info.min <= fill <= info.max and float(fill).is_integer()):
        raise ConfigError(
            f"fill={fill} of the field {name!r} does not fit into {dtype}; write another one, or a wider "
            "dtype."
        )
    return fill


def packed_variants(dataset: Dataset) -> Mapping[str, object]:
    """Return the settings of packing by which small and augmented versions of slices were stored."""
    variants = dataset.manifest.extra.get("variants")
    return variants if isinstance(variants, dict) else {}


def fill_value(name: str, fill: float | None, selected: SelectedSeries, dtype: np.dtype[Any]) -> float:
    """Return the value of places without an image: as given, else air where all images are in HU, else 0.

    Raises:
        ConfigError: The dtype cannot hold it.
    """
    if fill is None:
        in_hounsfield = selected.values("unit") == ["HU"]
        fill = _AIR_HU if in_hounsfield and np.can_cast(np.int16, dtype) else 0
    return check_fill(name, fill, dtype)


class LossWarning:
    """Warning, once per field, that pixels are not delivered as stored; two threads at once may both warn."""

    def __init__(self, name: str, delivered: np.dtype[Any]) -> None:
        self._name, self._delivered, self._has_warned = name, delivered, False

    def warn(self, stored: np.dtype[Any]) -> None:
        """Warn, unless that was done."""
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "pixels of the field %r are cut or rounded: stored as %s, delivered as %s; leave out its "
                "dtype to keep every bit",
                self._name,
                stored,
                self._delivered,
            )


class BoundPixels(BoundField):
    """Field of images or slices, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        context: The samples and their tables.

    Attributes:
        selected: Series and images that the field selects.
        num_places: Places for pictures in each slot (N), at most.
        layout: Places of the pixels.
        size: Rows and columns of every picture; None if they differ.

    Raises:
        ConfigError: The field selects nothing, a sample has nothing for it and ``missing`` is ``error``, or a
            dataset was packed without the small versions that it reads.
    """

    selected: SelectedSeries
    has_pictures = True
    is_stack: ClassVar[bool] = False
    """Whether the pictures are slices of one series."""

    def __init__(self, name: str, spec: PixelField, context: FieldContext) -> None:
        super().__init__(name)
        self.spec = spec
        self._counters = context.counters
        self.selected = context.catalog.select(spec.series or DEFAULT_SERIES, context.populations)
        self.selected.check(name, spec.series, pads=spec.missing == "pad", default=DEFAULT_SERIES)
        self._check_small(context)
        self._populations = context.populations
        self._num_samples = context.num_samples
        self._num_missing = context.count_missing(self.has_content)
        if self._num_missing and spec.missing == "error":
            raise ConfigError(
                f"{self._num_missing:,} of {self._num_samples:,} samples have no image for the field {name!r}"
                f"{'' if spec.series is None else f' (series={spec.series!r})'}; write missing='pad' to pad "
                "and mask them, or missing='drop' to leave these samples out."
            )
        has_color = max(self.selected.values("channels"), default=1) > 1
        self.channels: int = spec.channels or (_COLOR if has_color else 1)
        stored = [np.dtype(each) for each in self.selected.values("dtype")] or [np.dtype(np.uint8)]
        self.dtype = np.dtype(spec.dtype) if spec.dtype is not None else np.result_type(*stored)
        self._loss = LossWarning(name, self.dtype)
        if spec.windows and "HU" not in (self.selected.values("unit") or ["HU"]):
            raise ConfigError(
                f"windows of the field {name!r} are in HU, and none of its images is; leave them out, and "
                f"scale by {name}_range."
            )
        self.fill = fill_value(name, spec.fill, self.selected, self.dtype)
        shapes = self.selected.shapes()
        self.size = self._common_size(shapes)
        self.num_pictures = self._count_pictures()
        self.num_places = self.num_pictures * self._most_tiles(shapes)
        self.layout = PictureLayout(
            name,
            self.dtype,
            channels=self.channels,
            size=self.size,
            fill=self.fill,
        )

    @cached_property
    def tile_rule(self) -> TileRule | None:
        """Rule that cuts pictures into tiles; None delivers them whole."""
        if self.spec.tiles is None or self.spec.size is None:
            return None
        return TileRule(rows=self.spec.size[0], columns=self.spec.size[1], max_tiles=self.spec.tiles)

    @property
    def has_variants(self) -> bool:
        """Whether a sample may be delivered as one of its augmented variants."""
        return False

    def _common_size(self, shapes: NDArray[np.int64]) -> tuple[int, int] | None:
        """Return the rows and columns of every picture; None if they differ."""
        is_one_size = len(shapes) == 1 and self._has_one_number()
        return self.spec.size or ((int(shapes[0, 0]), int(shapes[0, 1])) if is_one_size else None)

    def _most_tiles(self, shapes: NDArray[np.int64]) -> int:
        """Return the largest number of places that a picture of the population takes."""
        if self.tile_rule is None:
            return 1
        return int(self.tile_rule.num_places(shapes[:, 0], shapes[:, 1]).max(initial=1))

    @property
    def has_content(self) -> list[NDArray[np.bool_]]:
        """Rows of each dataset's own table that have an image, ``(num_rows,)``."""
        return [self.selected.num_images(place) > 0 for place in range(len(self.selected.catalog.tables))]

    @property
    def coverage(self) -> Coverage:
        """Images that are delivered, and selected images that the field has no place for."""
        delivered, left_out = self.selected.roles(self._limits())
        return Coverage(
            num_samples=self._num_samples,
            num_missing=self._num_missing,
            delivered=delivered,
            left_out=left_out,
        )

    def delivered_images(self, place: int) -> ImageSet:
        """Return the stored images of a dataset that the field delivers."""
        return self.selected.images(place, self._limits())

    def num_delivered(self, place: int) -> NDArray[np.int64]:
        """Return how many pictures or tiles of each row are delivered, ``(num_rows,)``."""
        weights = None if self.tile_rule is None else self.tile_rule.num_places
        return self.selected.num_delivered(place, self._limits_of_sample(), weights)

    @abstractmethod
    def _limits(self) -> Limits:
        """Return what there are places for, over all epochs."""

    def _limits_of_sample(self) -> Limits:
        """Return what there are places for in a micro-batch."""
        return self._limits()

    @abstractmethod
    def choose(self, component: int, row: int, draw: DrawKey) -> list[Picture]:
        """Return the pictures of a sample, in the order of their places.

        Args:
            component: Component of a blend.
            row: Row of its dataset's own table.
            draw: Key of its random choices; their number and sizes depend on no row of the selection.
        """

    @abstractmethod
    def _count_pictures(self) -> int: ...

    @abstractmethod
    def _has_one_number(self) -> bool:
        """Whether pictures of one size form one array."""

    def _most(self, counts: Sequence[NDArray[np.int64]]) -> int:
        """Return the largest count of a sample of the population."""
        pairs = zip(counts, self._populations, strict=True)
        return max((int(count[used].max(initial=0)) for count, used in pairs), default=0)

    def _check_small(self, context: FieldContext) -> None:
        """Refuse small versions of a dataset that was packed without any."""
        if self.spec.resolution != "small":
            return
        for place, dataset in enumerate(context.samples.datasets):
            has_images = (self.has_content[place] & context.populations[place]).any()
            if has_images and not packed_variants(dataset).get("small_px"):
                raise ConfigError(
                    f"resolution='small' of the field {self.name!r} reads small versions, and a dataset was "
                    "packed without; pack it with variants.small_px, or leave out resolution."
                )

    # ---- BoundField ------------------------------------------------------------------------------

    @property
    def varying(self) -> Sequence[str]:
        """The pictures and what is beside each of them, where padding follows the micro-batch."""
        if self.spec.padding == "cap":
            return ()
        entry, name = self.describe(), self.name
        if entry.get("single"):
            return ()
        found = [f"{name}_mask", f"{name}_index" if entry.get("stack") else f"{name}_range"]
        found += [] if self.size is None else [name]
        return [*found, f"{name}_box"] if self.spec.fit == "letterbox" else found

    def places(self, slots: Slots) -> int:
        """Return the number of places of each slot of a micro-batch."""
        if self.spec.padding == "cap":
            return self.num_places
        pictures = slots.once(f"{self.name}.pictures", self._all_pictures).values()
        return min(self.num_places, max([1, *map(self._num_shown, pictures)]))

    def _num_shown(self, pictures: Sequence[Picture]) -> int:
        if self.tile_rule is None or not pictures:
            return len(pictures)
        shapes = np.array([picture.shape for picture in pictures], np.int64)
        return int(self.tile_rule.num_places(shapes[:, 0], shapes[:, 1]).sum())

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        name, num_slots, num_places = self.name, len(slots), self.places(slots)
        specs = self.layout.array_specs(slots, num_places, self.pictures)
        specs += [
            ArraySpec.of(f"{name}_mask", np.uint8, num_slots, num_places),
            ArraySpec.of(f"{name}_range", np.float32, num_slots, num_places, 2),
            ArraySpec.of(f"{name}_index", np.int64, num_slots, num_places),
        ]
        if self.tile_rule is not None:
            specs.append(ArraySpec.of(f"{name}_grid", np.int64, num_slots, self.num_pictures, 2))
        if self.spec.fit == "letterbox":
            specs.append(ArraySpec.of(f"{name}_box", np.int64, num_slots, num_places, 4))
        return specs

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Empty every slot, and lay out the pictures of the samples."""
        name = self.name
        for beside in _BESIDE:
            if f"{name}_{beside}" in arrays:
                arrays[f"{name}_{beside}"][:] = 0
        arrays[f"{name}_index"][:] = -1
        self.layout.prepare(arrays, slots, self.pictures)

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the numbers of the chosen pictures, and of the study's description."""
        return self._fields(shard, request, self.chosen(request))

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotPixels:
        """Begin a slot."""
        pictures = self.chosen(request)
        return SlotPixels(self, shard, request, arrays, pictures, self._fields(shard, request, pictures))

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without pictures."""
        name = self.name
        self.layout.blank(arrays, slot)
        for beside in _BESIDE:
            if f"{name}_{beside}" in arrays:
                arrays[f"{name}_{beside}"][slot] = 0
        arrays[f"{name}_index"][slot] = -1

    def example(self, arrays: Arrays) -> None:
        """Fill the only slot with a ramp of small values, and all that is beside it."""
        super().example(arrays)
        name = self.name
        pixels = arrays[name if self.size is not None else f"{name}.data"]
        pixels[...] = (np.arange(pixels.size) % _EXAMPLE_VALUES).astype(pixels.dtype).reshape(pixels.shape)
        arrays[f"{name}_range"][...] = 0, _EXAMPLE_VALUES - 1
        arrays[f"{name}_index"][...] = np.arange(arrays[f"{name}_index"].shape[1])
        if f"{name}_grid" in arrays:
            arrays[f"{name}_grid"][...] = 1
        if f"{name}_box" in arrays:
            arrays[f"{name}_box"][...] = 0, 0, *(self.size or (1, 1))

    def describe(self) -> dict[str, Any]:
        """Return what `present_pixels` needs."""
        return {"type": self.spec.type_name, "name": self.name, "ragged": self.size is None}

    # ---- slots -----------------------------------------------------------------------------------

    def pictures(self, slots: Slots, slot: int) -> list[Picture]:
        """Return the pictures of a slot."""
        return slots.once(f"{self.name}.pictures", self._all_pictures)[slot]

    def _all_pictures(self, slots: Slots) -> dict[int, list[Picture]]:
        components, rows = slots.components.tolist(), slots.table_rows.tolist()
        return {slot: self.choose(components[slot], rows[slot], slots.draw(slot)) for slot in slots.planned}

    def chosen(self, request: SlotRequest) -> list[Picture]:
        """Return the pictures of a sample to read."""
        return self.choose(request.component, request.table_row, request.draw)

    def windows(self, picture: Picture) -> list[Window]:
        """Return what of a picture is shown in each of its places."""
        frame = self.size or picture.delivered
        if self.tile_rule is None:
            if self.spec.fit == "stretch":
                return [Window(frame, (0, 0), (0, 0, *frame))]
            high, wide = (np.array([side], np.int64) for side in picture.shape)
            top, left, height, width = content_boxes(high, wide, frame)[0].tolist()
            return [Window((height, width), (0, 0), (top, left, height, width))]
        rows, columns = frame
        shape = (np.array([side], np.int64) for side in picture.shape)
        num_rows, num_columns = (int(each[0]) for each in self.tile_rule.grids(*shape))
        canvas = num_rows * rows, num_columns * columns
        overview = [Window(frame, (0, 0), (0, 0, *frame))] if num_rows * num_columns > 1 else []
        return overview + [
            Window(canvas, (row * rows, column * columns), (0, 0, rows, columns))
            for row in range(num_rows)
            for column in range(num_columns)
        ]

    def _fields(self, shard: Shard, request: SlotRequest, pictures: Sequence[Picture]) -> list[int]:
        """Return the numbers of the stored fields of pictures, and behind them that of the study."""
        by_series: dict[int, list[int]] = {}
        for series in dict.fromkeys([picture.series for picture in pictures]):
            by_series[series] = self.stored(shard, request, series)[0].tolist()
        try:
            found = [by_series[picture.series][picture.position] for picture in pictures]
        except IndexError:
            missing = next(one for one in pictures if one.position >= len(by_series[one.series]))
            num_stored = len(by_series[missing.series])
            detail = f"image {missing.position} of series {missing.series}, of which {num_stored} are stored"
            raise shard.bad(BadSampleReason.FIELD_MISSING, "", detail) from None
        study = shard.study(request.row_in_shard) if found else None
        return found if study is None else [*found, study]

    def stored(self, shard: Shard, request: SlotRequest, series: int) -> tuple[NDArray[np.int64], int]:
        """Return the numbers of the fields that hold a series, and which variant of it they are."""
        return shard.slices(request.row_in_shard, self.spec.resolution, series), ORIGINAL

    def window(self, draw: DrawKey) -> tuple[float, float] | None:
        """Return the CT window of a sample in an epoch; None for the display range of the series."""
        names = self.spec.windows
        if len(names) < 2:
            return WINDOWS[names[0]] if names else None
        order = Permutation(len(names), draw.derive("window-choice"))
        return WINDOWS[names[int(order(np.array([0]))[0])]]

    def decode(
        self, shard: Shard, number: int, payload: NDArray[np.uint8], target: NDArray[Any], thread: ThreadState
    ) -> None:
        """Decode a picture into its place ``(C, H, W)``.

        Raises:
            BadSample: The bytes cannot be decoded, or have another size than the tables say.
        """
        scratch, codec, num_saturated = thread.scratch, shard.codec(number), 0
        thread.enter("decode", f"shard {shard.name}")
        is_direct = self.channels == 1 and target.flags.c_contiguous
        plane = target[0] if is_direct else scratch.array("plane", target.shape[1:], target.dtype)
        started_s = time.perf_counter()
        try:
            has_color = False
            if self.channels == _COLOR:
                shape, _ = array_header(codec, payload)
                has_color = len(shape) == _COLOR and shape[2] == _COLOR
            decoded = self._decode(codec, payload, plane, thread, has_color=has_color)
        except FormatError as error:
            raise shard.bad(BadSampleReason.DECODE_FAILED, number, error.message) from None
        finally:
            self._counters.add("decode", time.perf_counter() - started_s, target.nbytes, 1)
        if decoded is None and is_direct:
            return
        thread.enter("transform", f"shard {shard.name}")
        with self._counters.timed("transform", target.nbytes):
            if decoded is not None:
                num_saturated = convert_picture(decoded, target, scratch)
            else:
                np.copyto(target, plane)
        if num_saturated:
            self._counters.add("saturated", num_items=num_saturated)
        if decoded is not None and (
            num_saturated or (decoded.dtype.kind == "f" and target.dtype.kind != "f")
        ):
            self._loss.warn(decoded.dtype)

    def decode_all(
        self,
        shard: Shard,
        numbers: Sequence[int],
        payloads: Sequence[NDArray[np.uint8]],
        targets: Outs,
        thread: ThreadState,
    ) -> None:
        """Decode pictures into their places ``(C, H, W)``; those stored as they are delivered all at once.

        Raises:
            BadSample: As of `decode`.
        """
        left: Sequence[int] = range(len(numbers))
        codecs = shard.codecs(numbers)
        if self.channels == 1 and len(codecs) == 1:
            if isinstance(targets, np.ndarray):
                planes: Outs = targets[:, 0]
            else:
                planes = [target[0] for target in targets]
            if all(plane.flags.c_contiguous for plane in planes):
                left = self._decode_together(shard, codecs.pop(), payloads, planes, thread)
        for place in left:
            self.decode(shard, numbers[place], payloads[place], targets[place], thread)

    def _decode_together(
        self,
        shard: Shard,
        codec: str,
        payloads: Sequence[NDArray[np.uint8]],
        planes: Outs,
        thread: ThreadState,
    ) -> Sequence[int]:
        """Decode pictures of the size and dtype of their places; returns the places of those that are not."""
        every = range(len(payloads))
        with suppress(FormatError):  # `decode` says what is wrong with it
            if array_header(codec, payloads[0]) != (planes[0].shape, planes[0].dtype):
                return every
        thread.enter("decode", f"shard {shard.name}")
        started_s = time.perf_counter()
        left = decode_arrays(codec, payloads, planes, thread.payloads).keys()
        num_bytes = sum(plane.nbytes for place, plane in enumerate(planes) if place not in left)
        self._counters.add("decode", time.perf_counter() - started_s, num_bytes, len(planes) - len(left))
        return sorted(left)

    def _decode(
        self,
        codec: str,
        payload: NDArray[np.uint8],
        plane: NDArray[Any],
        thread: ThreadState,
        *,
        has_color: bool,
    ) -> NDArray[Any] | None:
        """Decode a picture; None if ``plane`` ``(H, W)`` is filled, else ``(h, w)`` or ``(h, w, 3)``."""
        if not has_color:
            return decode_slice(codec, payload, plane, thread.scratch, may_resize=self.spec.resizes)
        shape, dtype = array_header(codec, payload)
        if not self.spec.resizes and shape[:2] != plane.shape:
            raise FormatError(f"an image is {plane.shape} in the tables and {shape[:2]} in its bytes")
        return decode_array(codec, payload, out=thread.scratch.array("slice", shape, dtype))


class SlotPixels(StackContent):
    """Pictures of one slot."""

    __slots__ = ("_arrays", "_field", "_pictures", "_ranges", "_request", "_shard", "_spans", "fields")

    def __init__(
        self,
        field: BoundPixels,
        shard: Shard,
        request: SlotRequest,
        arrays: Arrays,
        pictures: Sequence[Picture],
        fields: Sequence[int],
    ) -> None:
        self._field, self._shard, self._request, self._arrays = field, shard, request, arrays
        self._pictures, self.fields = pictures, fields
        self._ranges: dict[int, tuple[float, float]] = {}
        self._spans: Sequence[slice] | None = None  # of the tiles of each picture, where pictures are cut
        name, slot, rule = field.name, request.slot, field.tile_rule
        num_places = len(pictures)
        indexes = [picture.position for picture in pictures]
        if rule is not None and pictures:
            shapes = np.array([picture.shape for picture in pictures], np.int64)
            counts = rule.num_places(shapes[:, 0], shapes[:, 1])
            stops = np.cumsum(counts).tolist()
            self._spans = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
            num_places, indexes = stops[-1], np.repeat(indexes, counts).tolist()
            grids = np.stack(rule.grids(shapes[:, 0], shapes[:, 1]), axis=1)
            arrays[f"{name}_grid"][slot, : len(pictures)] = grids
        if field.size is not None:
            arrays[name][slot, num_places:] = field.fill
        arrays[f"{name}_mask"][slot, :num_places] = 1
        arrays[f"{name}_index"][slot, :num_places] = indexes
        if field.spec.fit == "letterbox":
            for place, picture in enumerate(pictures):
                arrays[f"{name}_box"][slot, place] = field.windows(picture)[0].box
                field.layout.place(arrays, slot, place)[:] = field.fill

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Decode a picture into its place, or read the display ranges of the study."""
        if place == len(self._pictures):
            self._read_study(payload)
            return
        if self._spans is None:
            self._field.decode(self._shard, self.fields[place], payload, self._target(place), thread)
            return
        tiles = self._tiles(place, self._spans)
        high, wide = self._arrays[f"{self._field.name}_grid"][self._request.slot, place].tolist()
        _, channels, rows, columns = tiles.shape
        canvas = thread.scratch.array("canvas", (channels, high * rows, wide * columns), tiles.dtype)
        self._field.decode(self._shard, self.fields[place], payload, canvas, thread)
        cut_tiles(canvas, tiles, thread.scratch)

    def put_all(self, payloads: Sequence[tuple[int, NDArray[np.uint8]]], thread: ThreadState) -> None:
        """Decode pictures into their places, and read the display ranges of the study if it is there."""
        pictures = [one for one in payloads if self._spans is None and one[0] < len(self._pictures)]
        if pictures:
            self._field.decode_all(
                self._shard,
                [self.fields[place] for place, _ in pictures],
                [payload for _, payload in pictures],
                self._targets([place for place, _ in pictures]),
                thread,
            )
        for place, payload in payloads if len(pictures) < len(payloads) else ():
            if self._spans is not None or place == len(self._pictures):
                self.put(place, payload, thread)

    def close(self) -> None:
        """Set the display ranges: those of the series, or else extremes of the pixels; slices share one."""
        if not self._pictures:
            return
        found = np.array([self._range(place, picture) for place, picture in enumerate(self._pictures)])
        ranges = self._arrays[f"{self._field.name}_range"][self._request.slot]
        if self._field.is_stack:
            found[:] = found[:, 0].min(), found[:, 1].max()
        if self._spans is None:
            ranges[: len(found)] = found
            return
        for span, extremes in zip(self._spans, found, strict=True):
            ranges[span] = extremes

    def _range(self, place: int, picture: Picture) -> tuple[float, float]:
        """Return the display range of a picture."""
        found = self._ranges.get(picture.series)
        if found is None:
            pixels = self._pixels(place)
            found = (float(pixels.min()), float(pixels.max())) if pixels.size else (0.0, 0.0)
        return found

    def _pixels(self, place: int) -> NDArray[Any]:
        """Return the pixels of a picture, or of its tiles."""
        return self._target(place) if self._spans is None else self._tiles(place, self._spans)

    def _tiles(self, place: int, spans: Sequence[slice]) -> NDArray[Any]:
        """Return the places of the tiles of a picture, ``(T, C, H, W)``."""
        tiles: NDArray[Any] = self._arrays[self._field.name][self._request.slot, spans[place]]
        return tiles

    def _target(self, place: int) -> NDArray[Any]:
        """Return the place of a picture, ``(C, H, W)``."""
        name, slot, arrays = self._field.name, self._request.slot, self._arrays
        target = self._field.layout.place(arrays, slot, place)
        if self._field.spec.fit == "letterbox":
            top, left, height, width = arrays[f"{name}_box"][slot, place].tolist()
            return target[:, top : top + height, left : left + width]
        return target

    def _targets(self, places: Sequence[int]) -> Outs:
        """Return the places of pictures, ``(C, H, W)`` each; as one array where they are adjacent."""
        first, stop = places[0], places[0] + len(places)
        if self._field.spec.fit != "letterbox" and places == [*range(first, stop)]:
            found = self._field.layout.places(self._arrays, self._request.slot, slice(first, stop))
            if found is not None:
                return found
        return [self._target(place) for place in places]

    def _read_study(self, payload: NDArray[np.uint8]) -> None:
        try:
            series = json.loads(payload.tobytes())["series"]
            for number in {picture.series for picture in self._pictures}:
                window = (
                    self._field.window(self._request.draw) if series[number].get("unit") == "HU" else None
                )
                found = window or series[number].get("display_range")
                if found is not None:
                    self._ranges[number] = float(found[0]), float(found[1])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reason = BadSampleReason.TEXT_UNREADABLE
            raise self._shard.bad(reason, "study.json", type(error).__name__) from None
