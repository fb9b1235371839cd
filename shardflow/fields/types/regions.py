"""Fields of regions: what masks and boxes of annotations share, and boxes beside pictures.

`Mask` (`shardflow.fields.types.masks`) and `Boxes` follow the field that they name: the same pictures are
chosen, and a region lands where the pixels do. What a study's annotations hold is known once they are read,
together with the masks of the chosen pictures; tables know only the sizes, so memory is laid out before.
"""

from __future__ import annotations

import difflib
import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

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
from shardflow.fields.layout import Picture, Window
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.settings import checked_labels
from shardflow.fields.types.members import present_beside
from shardflow.fields.types.pixels import BoundPixels
from shardflow.format.contents.regions import Box, Region, read_regions
from shardflow.format.keys import ANNOTATIONS_FIELD

_LOGGER = logging.getLogger(__name__)
_STUDIES_BEFORE_WARNING: Final = 4
_MAX_LISTED: Final = 12

_MAX_BOXES: Final = 2**16


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
        object.__setattr__(self, "labels", checked_labels(self.labels))

    @property
    def depends_on(self) -> Sequence[str]:
        """The field whose pictures are followed."""
        return (self.like,)


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
        return present_beside(entry, arrays, ("mask", "label", "index", "annotated"))


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

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Empty every slot."""
        for slot in range(len(slots)):
            self.blank(arrays, slot)

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
                place = region.places.get(shown.picture.position)
                if region.series != shown.picture.series or place is None or place.box is None:
                    continue
                carried = shown.carry(place.box)
                if carried is not None:
                    yield from ((carried, label, shown.place) for label in self.field.labels_of(region))
