"""Images of members: the JPEG and PNG files of tars of other writers, decoded into their places.

`shardflow index` notes in the manifest what the images of a member name have in common, and in the samples
table the size of each sample's images. What neither knows, the spec states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.decode import ThreadState, convert_picture, decode_file
from shardflow.fields.field import Arrays, ArraySpec, FieldContext, SlotContent, SlotRequest, Slots
from shardflow.fields.layout import PictureLayout, content_boxes
from shardflow.fields.members import BoundMember, gather
from shardflow.fields.pixels import LossWarning, PixelField, check_fill
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.format.foreign.places import ImageFacts, image_facts, num_samples_with

_COLOR: Final = 3


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
        arrays[f"{self.name}_range"][slot] = target.min(), target.max()

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
