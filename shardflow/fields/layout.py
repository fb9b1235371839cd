"""Layout of pictures in the arrays of a batch.

With one size for all, pictures lie in one array with a place for each; otherwise they are stored one after
another in a flat array, with the start and the shape of each place beside it, and are delivered as lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardflow.fields.field import Arrays, ArraySpec, Slots

PixelDtype: TypeAlias = Literal["uint8", "int16", "uint16", "float32"]
# Level and width as radiologists set them; the low and high ends are level -+ width / 2.
WINDOWS: Final = MappingProxyType(
    {
        "abdomen": (-160.0, 240.0),
        "angiography": (0.0, 600.0),
        "bone": (-450.0, 1050.0),
        "brain": (0.0, 80.0),
        "full": (-1024.0, 3071.0),
        "liver": (-20.0, 140.0),
        "lung": (-1350.0, 150.0),
        "mediastinum": (-125.0, 225.0),
        "stroke": (20.0, 60.0),
        "subdural": (-25.0, 175.0),
    }
)


class Picture(NamedTuple):
    """Image or slice to deliver."""

    series: int
    """Number of its series in the sample."""
    position: int
    """Its place in the series, from 0."""
    shape: tuple[int, int]
    """Stored rows and columns."""
    size: tuple[int, int] | None = None
    """Rows and columns to deliver, where these differ between samples and are not the stored ones."""

    @property
    def delivered(self) -> tuple[int, int]:
        """Rows and columns to deliver without a size for all."""
        return self.size or self.shape


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a resized picture that is shown in a place."""

    canvas: tuple[int, int]
    """Rows and columns that the picture is resized to."""
    start: tuple[int, int]
    """First row and column of the part."""
    box: tuple[int, int, int, int]
    """Area of the place that the part fills: first row, first column, rows, columns."""


def content_boxes(
    rows: NDArray[np.int64], columns: NDArray[np.int64], frame: tuple[int, int]
) -> NDArray[np.int64]:
    """Return the boxes of images that are fitted into a frame, with their aspect ratio, centered.

    Args:
        rows: ``(B,)`` rows of the images; 0 for none.
        columns: ``(B,)`` columns of the images.
        frame: Rows and columns of the frame.

    Returns:
        ``(B, 4)`` int64: first row, first column, rows, columns. Computed with integers alone, so that the
        result is the same on every machine.
    """
    high, wide = np.maximum(rows, 1), np.maximum(columns, 1)
    # The frame's height bounds an image whose aspect ratio is taller than the frame's.
    by_height = high * frame[1] >= wide * frame[0]
    height = np.where(by_height, frame[0], np.maximum(1, (2 * high * frame[1] + wide) // (2 * wide)))
    width = np.where(by_height, np.maximum(1, (2 * wide * frame[0] + high) // (2 * high)), frame[1])
    boxes = np.stack([(frame[0] - height) // 2, (frame[1] - width) // 2, height, width], axis=1)
    boxes[(rows == 0) | (columns == 0)] = 0
    return boxes.astype(np.int64)


PicturesOf: TypeAlias = Callable[[Slots, int], Sequence[Picture]]
"""Returns the pictures of a slot that holds a sample."""


class PictureLayout:
    """Arrays of pictures of one field. Safe for many threads.

    Args:
        name: Name of the entry.
        dtype: Of the pixels.
        channels: Channels of each picture.
        size: Rows and columns of every picture; None if they differ.
        fill: Value of an empty slot.
    """

    def __init__(
        self,
        name: str,
        dtype: DTypeLike,
        *,
        channels: int,
        size: tuple[int, int] | None,
        fill: float = 0,
    ) -> None:
        self.name, self.dtype, self.channels = name, np.dtype(dtype), channels
        self.size, self.fill = size, fill

    def array_specs(self, slots: Slots, num_places: int, pictures_of: PicturesOf) -> list[ArraySpec]:
        """Name the arrays of a micro-batch.

        Args:
            slots: Its samples.
            num_places: Places for pictures in each slot.
            pictures_of: Its pictures.
        """
        name, num_slots = self.name, len(slots)
        if self.size is not None:
            return [ArraySpec.of(name, self.dtype, num_slots, num_places, self.channels, *self.size)]
        pictures = [pictures_of(slots, slot) for slot in slots.used]
        num_pixels = sum(one.delivered[0] * one.delivered[1] for each in pictures for one in each)
        return [
            ArraySpec.of(f"{name}.data", self.dtype, self.channels * num_pixels),
            ArraySpec.of(f"{name}.start", np.int64, num_slots, num_places),
            ArraySpec.of(f"{name}_shape", np.int64, num_slots, num_places, 3),
        ]

    def prepare(self, arrays: Arrays, slots: Slots, pictures_of: PicturesOf) -> None:
        """Give each picture its place; the pixels stay undefined."""
        if self.size is not None:
            return
        starts, shapes = arrays[f"{self.name}.start"], arrays[f"{self.name}_shape"]
        starts[:], shapes[:] = 0, 0
        stop = 0
        for slot in slots.used:
            for place, picture in enumerate(pictures_of(slots, slot)):
                starts[slot, place] = stop
                shapes[slot, place] = (self.channels, *picture.delivered)
                stop += self.channels * picture.delivered[0] * picture.delivered[1]

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without pictures."""
        if self.size is not None:
            arrays[self.name][slot] = self.fill
        else:
            arrays[f"{self.name}_shape"][slot] = 0

    def place(self, arrays: Arrays, slot: int, place: int) -> NDArray[Any]:
        """Return a place, ``(C, H, W)``, without a copy."""
        if self.size is not None:
            found: NDArray[Any] = arrays[self.name][slot, place]
            return found
        start, shape = (
            int(arrays[f"{self.name}.start"][slot, place]),
            arrays[f"{self.name}_shape"][slot, place],
        )
        flat: NDArray[Any] = arrays[f"{self.name}.data"][start : start + int(shape.prod())]
        return flat.reshape(shape.tolist())

    def places(self, arrays: Arrays, slot: int, places: slice) -> NDArray[Any] | None:
        """Return adjacent places as one array ``(n, C, H, W)``, without a copy; None if sizes differ."""
        if self.size is not None:
            found: NDArray[Any] = arrays[self.name][slot, places]
            return found
        shapes = arrays[f"{self.name}_shape"][slot, places]
        if (shapes != shapes[0]).any():
            return None
        start = int(arrays[f"{self.name}.start"][slot, places.start])
        flat: NDArray[Any] = arrays[f"{self.name}.data"][start : start + len(shapes) * int(shapes[0].prod())]
        return flat.reshape(len(shapes), *shapes[0].tolist())


def present_pictures(entry: Mapping[str, Any], arrays: Arrays) -> Any:
    """Return the pictures of a batch, without a copy.

    Args:
        entry: Of the batch's descriptor: ``name``; ``ragged`` if sizes differ; ``single`` if a slot has one
            place, ``stack`` if its pictures have one shape.
        arrays: The arrays of the batch.

    Returns:
        One array ``(B, N, C, H, W)``, of single pictures ``(B, C, H, W)``. If ragged a list by slot: of
        single pictures the picture or None, of stacks ``(K, C, H, W)``, else a list of pictures.
    """
    name = entry["name"]
    if not entry["ragged"]:
        return arrays[name][:, 0] if entry.get("single") else arrays[name]
    flat, starts, shapes = arrays[f"{name}.data"], arrays[f"{name}.start"], arrays[f"{name}_shape"]

    def picture(slot: int, place: int) -> NDArray[Any] | None:
        shape = shapes[slot, place]
        if not shape.all():
            return None
        start = int(starts[slot, place])
        found: NDArray[Any] = flat[start : start + int(shape.prod())]
        return found.reshape(shape.tolist())

    def stack(slot: int) -> NDArray[Any]:
        num_places, shape = int((shapes[slot, :, 0] > 0).sum()), shapes[slot, 0].tolist()
        start = int(starts[slot, 0])
        found: NDArray[Any] = flat[start : start + num_places * int(np.prod(shape))]
        return found.reshape(num_places, *shape)

    num_slots, num_places = shapes.shape[:2]
    if entry.get("stack"):
        return [stack(slot) for slot in range(num_slots)]
    if entry.get("single"):
        return [picture(slot, 0) for slot in range(num_slots)]
    return [
        [one for place in range(num_places) if (one := picture(slot, place)) is not None]
        for slot in range(num_slots)
    ]
