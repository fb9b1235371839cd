"""Fields of regions: masks and boxes of what annotations mark, beside the pictures of another field.

`Mask` and `Boxes` follow the field that they name: the same pictures are chosen, and a region lands where the
pixels do. What a study's annotations hold is known once they are read, together with the masks of the chosen
pictures; tables know only the sizes, so memory is laid out before.
"""

from __future__ import annotations

import difflib
import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
    Field,
    FieldContext,
    Missing,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
    check_count,
)
from shardflow.fields.layout import Picture, PictureLayout, Window, present_pictures
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.types.pixels import BoundPixels
from shardflow.format import array_header, decode_array
from shardflow.format.keys import ANNOTATIONS_FIELD
from shardflow.format.regions import Box, Region, read_regions

_LOGGER = logging.getLogger(__name__)
_STUDIES_BEFORE_WARNING: Final = 4
_MAX_LISTED: Final = 12

_MAX_BOXES: Final = 2**16
_MAX_READERS: Final = 8
_NUM_BITS: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class RegionField(Field):
    """Settings that masks and boxes share."""

    like: str
    """Name of the `Image`, `Slices` or `Volume` field whose pictures the regions are in."""
    labels: Sequence[str] | None = None
    """Labels (names of the lexicon) or values of codes of the regions to deliver; None delivers all. Which
    labels a dataset has is in no table: a label that no region of an annotated study has is delivered as
    zeros, and counted as ``absent_labels`` of `Loader.counters` (items: labels, once for each study read)."""
    missing: Missing = "pad"
    """Meaning of a study without annotations. ``error`` masks its slot and counts a bad sample; ``drop`` is
    refused, since no table knows which studies have them."""

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        check_choice("missing", self.missing, ("pad", "drop", "error"))
        like: object = self.like
        if not isinstance(like, str):
            raise ConfigError(f"like is the name of an Image, Slices or Volume field, got {like!r}.")
        if self.labels is None:
            return
        if isinstance(self.labels, str):
            raise ConfigError(f"labels is a list of names, write labels=[{self.labels!r}].")
        labels = tuple(self.labels)
        if "" in labels or not {str} == {type(one) for one in labels}:
            raise ConfigError("labels is a list of at least one name, or None for regions of any label.")
        if len({*labels}) < len(labels):
            raise ConfigError("labels names one twice; leave out one of the two.")
        object.__setattr__(self, "labels", labels)

    @property
    def depends_on(self) -> Sequence[str]:
        """The field whose pictures are followed."""
        return (self.like,)


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


@dataclass(frozen=True, kw_only=True)
class Boxes(RegionField):
    """Boxes of regions in the pictures of another field, in pixels of the delivered picture.

    ``(B, M, 4)`` float32 of ``x0, y0, x1, y1``, which count edges: a box of the whole picture is ``0, 0, W,
    H``. By picture, then in the order of the annotations, a box for each region and picture (of a tiled
    image for each tile, cut at its edges); a region of several of the labels has a box for each. They are the
    boxes that the annotations state, also around masks, outlines and lines; one without width or height is
    left out. Beside it, ``(B, M)`` each: ``NAME_mask`` uint8, 1 where there is a box; ``NAME_label`` int64,
    the position in ``labels`` (0 without ``labels``); ``NAME_index`` int64, the picture's place in its field;
    both -1 for none. ``NAME_annotated`` ``(B,)`` uint8 is 1 where the sample has a picture and annotations.

    Beside a volume ``(B, M, 6)`` float32 of ``d0, h0, w0, d1, h1, w1`` in voxels of the delivered array,
    which count edges (MONAI's ``StandardMode``): a box for each region around its slices, cut at the edges
    of the array; ``NAME_mask``, ``NAME_label`` and ``NAME_annotated`` beside it.

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "boxes"

    max_boxes: int = 64
    """Places for boxes (M). A sample of more is masked, as a bad one."""

    def _check(self) -> None:
        super()._check()
        check_count("max_boxes", self.max_boxes, _MAX_BOXES)

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return followed(name, self, context) or BoundBoxes(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the boxes and what is beside them."""
        name = entry["name"]
        beside = (f"{name}_{one}" for one in _BESIDE_BOXES)
        return {name: arrays[name], **{one: arrays[one] for one in beside if one in arrays}}


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


_BESIDE_BOXES: Final = ("mask", "label", "index", "annotated")


class _SeenLabels:
    """Labels of regions read so far; warns once of wanted labels that none of them has.

    Every rank warns for itself; two threads at once may both warn.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._num_studies = 0
        self._has_warned = False

    def note(self, field: str, wanted: Sequence[str], regions: Sequence[Region]) -> None:
        """Take the regions of an annotated study into account."""
        if self._has_warned:
            return
        self._num_studies += 1
        self._seen.update(label for region in regions for label in region.names)
        absent = [label for label in wanted if label not in self._seen]
        folded = {label.casefold() for label in self._seen}
        is_slip = any(label.casefold() in folded for label in absent)
        if absent and self._seen and (is_slip or self._num_studies >= _STUDIES_BEFORE_WARNING):
            self._has_warned = True
            _LOGGER.warning(
                "field %r: none of the first %d annotated studies has a region of the label %s; they have %s",
                field,
                self._num_studies,
                ", ".join(map(repr, absent)),
                ", ".join(map(repr, sorted(self._seen)[:_MAX_LISTED])),
            )


def followed(name: str, spec: RegionField, context: FieldContext) -> BoundField | None:
    """Bind regions as the field that they follow does it; None where its pictures are followed."""
    like = context.bound.get(spec.like)
    return None if like is None else like.follow(name, spec, context)


class BoundAnnotations(BoundField):
    """Field that reads the annotations of a study, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        context: The samples.

    Raises:
        ConfigError: Samples without annotations should be dropped.
    """

    def __init__(self, name: str, spec: RegionField, context: FieldContext) -> None:
        super().__init__(name)
        if spec.missing == "drop":
            raise ConfigError(
                f"No table knows which samples have annotations, so the field {name!r} cannot drop the "
                "others; write missing='pad', or missing='error' to mask them."
            )
        self.spec, self.counters = spec, context.counters
        self._labels = _SeenLabels()

    def annotations(self, shard: Shard, request: SlotRequest) -> int | None:
        """Return the number of the annotations of a study; None where it has none.

        Raises:
            BadSample: It has none, and ``missing`` is ``error``.
        """
        number = shard.find(request.row_in_shard, ANNOTATIONS_FIELD)
        if number is None and self.spec.missing == "error":
            raise shard.bad(BadSampleReason.FIELD_MISSING, ANNOTATIONS_FIELD)
        return number

    def labels_of(self, region: Region) -> list[int]:
        """Return the positions in ``labels`` that a region has; of any region 0 without ``labels``."""
        labels = self.spec.labels
        if labels is None:
            return [0]
        return [place for place, label in enumerate(labels) if label in region.names]

    def read(self, shard: Shard, number: int, payload: NDArray[np.uint8]) -> list[Region]:
        """Read the annotations of a study, and count the labels that none of its regions has.

        Returns:
            All regions, also of other labels.

        Raises:
            BadSample: They cannot be read.
        """
        try:
            regions = read_regions(payload.tobytes())
        except FormatError as error:
            raise shard.bad(BadSampleReason.TEXT_UNREADABLE, number, error.message) from None
        if self.spec.labels is not None:
            self._labels.note(self.name, self.spec.labels, regions)
            found = {place for region in regions for place in self.labels_of(region)}
            self.counters.add("absent_labels", num_items=len(self.spec.labels) - len(found))
        return regions


class BoundRegions(BoundAnnotations):
    """Field of regions in pictures, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        context: The samples, and the fields that are already bound.

    Attributes:
        like: The field whose pictures are followed.

    Raises:
        ConfigError: ``like`` names no field of pictures, or samples without annotations should be dropped.
    """

    def __init__(self, name: str, spec: RegionField, context: FieldContext) -> None:
        super().__init__(name, spec, context)
        like = context.bound.get(spec.like)
        if not isinstance(like, BoundPixels):
            names = [one.name for one in context.bound.values() if one.has_pictures]
            near = difflib.get_close_matches(spec.like, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names) or 'none'}."
            raise ConfigError(
                f"The field {name!r} is like {spec.like!r}, which is no field of images, slices or volumes; "
                f"{hint}"
            )
        if like.has_variants:
            raise ConfigError(
                f"The field {name!r} is like {spec.like!r}, whose augmented variants show other places than "
                "the annotations mark; leave out its augment_pool, or this field."
            )
        self.like = like

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the number of the annotations, and those of the masks in the chosen pictures.

        Raises:
            BadSample: The study has no annotations, and ``missing`` is ``error``.
        """
        return self._fields(shard, request, self.like.chosen(request))

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        pictures = self.like.chosen(request)
        fields = self._fields(shard, request, pictures)
        shown = list(self._shown(pictures))
        self.begin(arrays, request.slot, len(shown), is_annotated=bool(fields))
        return self.slot_content(shard, request.slot, arrays, shown, fields)

    @abstractmethod
    def begin(self, arrays: Arrays, slot: int, num_shown: int, *, is_annotated: bool) -> None:
        """Make a slot one of pictures without regions.

        Args:
            arrays: Of the micro-batch.
            slot: The slot.
            num_shown: Places that show something of a picture.
            is_annotated: Whether somebody marked regions.
        """

    @abstractmethod
    def slot_content(
        self, shard: Shard, slot: int, arrays: Arrays, shown: Sequence[Shown], fields: Sequence[int]
    ) -> SlotContent:
        """Return the content of a slot that takes the bytes of ``fields``."""

    def _fields(self, shard: Shard, request: SlotRequest, pictures: Sequence[Picture]) -> list[int]:
        number = self.annotations(shard, request)
        return [] if number is None or not pictures else [number]

    def _shown(self, pictures: Sequence[Picture]) -> Iterator[Shown]:
        places = itertools.count()
        for picture in pictures:
            for window in self.like.windows(picture):
                yield Shown(next(places), picture, window)


@dataclass(frozen=True, slots=True)
class Shown:
    """Content of a place of a slot."""

    place: int
    picture: Picture
    window: Window

    def pick(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Return the nearest stored pixel, at half-pixel centers, of each pixel that is shown.

        Args:
            pixels: ``(rows, columns)`` of the stored picture.
        """
        sides = zip(pixels.shape, self.window.canvas, self.window.start, self.window.box[2:], strict=True)
        # In integers: a center between two stored pixels takes the second one on every machine.
        rows, columns = (
            (2 * np.arange(start, start + length) + 1) * stored // (2 * resized)
            for stored, resized, start, length in sides
        )
        picked: NDArray[Any] = pixels.take(rows, axis=0).take(columns, axis=1)
        return picked

    def carry(self, box: Box) -> Box | None:
        """Return the visible part of a box of the stored picture; None if nothing is visible."""
        edges = []
        for axis in (1, 0):
            stored, resized = self.picture.shape[axis], self.window.canvas[axis]
            first, length = self.window.box[axis], self.window.box[axis + 2]
            for edge in (box[1 - axis], box[3 - axis]):
                at = min(max(edge, 0), stored) * resized / stored - self.window.start[axis]
                edges.append(first + min(max(at, 0), length))
        x0, x1, y0, y1 = edges
        return (x0, y0, x1, y1) if x1 > x0 and y1 > y0 else None


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
            wanted = {(picture.series, picture.index) for picture in pictures}
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
            self._shown.setdefault((one.picture.series, one.picture.index), []).append(one)
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
                    np.bitwise_or(part, table[picked], out=part)

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


class BoundBoxes(BoundRegions):
    """Boxes of regions, bound to a selection."""

    spec: Boxes

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        name, shape = self.name, (len(slots), self.spec.max_boxes)
        return [
            ArraySpec.of(name, np.float32, *shape, 4),
            ArraySpec.of(f"{name}_mask", np.uint8, *shape),
            ArraySpec.of(f"{name}_label", np.int64, *shape),
            ArraySpec.of(f"{name}_index", np.int64, *shape),
            ArraySpec.of(f"{name}_annotated", np.uint8, len(slots)),
        ]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Empty every slot."""
        for slot in range(len(slots)):
            self.blank(arrays, slot)

    def begin(self, arrays: Arrays, slot: int, num_shown: int, *, is_annotated: bool) -> None:  # noqa: ARG002
        """Empty a slot."""
        self.blank(arrays, slot)
        arrays[f"{self.name}_annotated"][slot] = is_annotated

    def slot_content(
        self, shard: Shard, slot: int, arrays: Arrays, shown: Sequence[Shown], fields: Sequence[int]
    ) -> SlotContent:
        """Return the boxes of a slot."""
        return _SlotBoxes(self, shard, slot, arrays, shown, fields)

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without boxes."""
        name = self.name
        arrays[name][slot] = arrays[f"{name}_mask"][slot] = arrays[f"{name}_annotated"][slot] = 0
        arrays[f"{name}_label"][slot] = arrays[f"{name}_index"][slot] = -1

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs."""
        return {"type": self.spec.type_name, "name": self.name, "like": self.like.name}


@dataclass(frozen=True, slots=True)
class _SlotBoxes:
    """Boxes of one slot."""

    field: BoundBoxes
    shard: Shard
    slot: int
    arrays: Arrays
    shown: Sequence[Shown]
    fields: Sequence[int]

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:  # noqa: ARG002
        """Read the annotations, and deliver their boxes.

        Raises:
            BadSample: They cannot be read, or hold too many boxes.
        """
        found = list(self._boxes(self.field.read(self.shard, self.fields[0], payload)))
        most = self.field.spec.max_boxes
        if len(found) > most:
            detail = f"{len(found):,} boxes, and {most:,} are allowed"
            raise self.shard.bad(BadSampleReason.SIZE_MISMATCH, self.fields[0], detail)
        self.field.counters.add("regions", num_items=len(found))
        name, slot = self.field.name, self.slot
        for at, (box, label, shown) in enumerate(found):
            self.arrays[name][slot, at] = box
            self.arrays[f"{name}_label"][slot, at] = label
            self.arrays[f"{name}_index"][slot, at] = shown
        self.arrays[f"{name}_mask"][slot, : len(found)] = 1

    def close(self) -> None:
        """Do nothing: the slot is complete."""

    def _boxes(self, regions: Sequence[Region]) -> Iterator[tuple[Box, int, int]]:
        for shown in self.shown:
            for region in regions:
                place = region.places.get(shown.picture.index)
                if region.series != shown.picture.series or place is None or place.box is None:
                    continue
                carried = shown.carry(place.box)
                if carried is not None:
                    yield from ((carried, label, shown.place) for label in self.field.labels_of(region))
