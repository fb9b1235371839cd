"""Fields by name, as they are stored: the view of shards that others wrote.

Sizes are fixed before reading, as in every view: a slot has room for its whole sample, and for the pixels of
its images as their headers told when they were indexed. Bytes are copied, images decoded, nothing unpickled.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.quarantine import BadSample, BadSampleReason
from shardflow.fields.reader import FieldReader, Shard
from shardflow.fields.scratch import ThreadState
from shardflow.fields.text import SlotRequest, check_row, find_text, put_text
from shardflow.fields.views import ArraySpec, SliceFacts
from shardflow.shards.foreign.images import HEAD_NUM_BYTES, image_header
from shardflow.telemetry import StageCounters

_COLOURS: Final = 3
_IMAGE_KINDS: Final = frozenset({"jpg", "jpeg", "png"})
# What webdataset would unpickle: code of a stranger.
_PICKLES: Final = frozenset({"pth", "pt", "pkl", "pickle", "pyd", "dill"})


def is_image_field(name: str) -> bool:
    """Tell whether a field holds a picture that can be decoded."""
    return name.rpartition(".")[2] in _IMAGE_KINDS


def readable_fields(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of fields that a view may hold: all but pickles."""
    return tuple(name for name in names if name.rpartition(".")[2] not in _PICKLES)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldsView:
    """Some fields of each sample; `Batch.field` gives them decoded by the last part of their name.

    No field is ever unpickled: ``.pth``, ``.pkl`` and the like are refused, ``.npy`` with objects as well.

    Raises:
        ConfigError: No field is named, one twice, or one that holds a pickle.
    """

    fields: tuple[str, ...]
    """Their names as the index has them: lower case, such as ``"jpg"`` or ``"seg.png"``."""
    missing: Literal["allow", "mask"] = "allow"
    """A sample without one of the fields: that field is None, or the sample is bad and masked."""
    images: Literal["pixels", "bytes"] = "pixels"
    """``pixels``: JPEG and PNG become RGB uint8 in the loader's threads. ``bytes``: left as they are."""

    def __post_init__(self) -> None:
        if not self.fields or len({*self.fields}) < len(self.fields):
            raise ConfigError("fields must name at least one field, each once, got none or one twice.")
        for name in self.fields:
            if name.rpartition(".")[2] in _PICKLES:
                raise ConfigError(f"a field must not be a pickle, got {name!a}; store arrays as .npy.")

    def is_decoded(self, name: str) -> bool:
        """Tell whether a field comes as pixels."""
        return self.images == "pixels" and is_image_field(name)

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_slots, num_fields = len(facts.rows), len(self.fields)
        return [
            ArraySpec.of("field_data", np.uint8, int(self._room(facts).sum())),
            ArraySpec.of("field_start", np.int64, num_slots, num_fields),
            ArraySpec.of("field_shape", np.int64, num_slots, num_fields, 3),
        ]

    def prepare(self, arrays: Mapping[str, NDArray[Any]], facts: SliceFacts) -> None:
        """Fill what does not depend on any field: each slot begins where its room does, empty."""
        room = self._room(facts)
        arrays["field_start"][:] = (np.cumsum(room) - room)[:, None]
        arrays["field_shape"][:] = (-1, 0, 0)

    def blank(self, arrays: Mapping[str, NDArray[Any]], slot: int) -> None:
        """Make a slot look like one without fields; its data are out of reach then."""
        arrays["field_shape"][slot] = (-1, 0, 0)

    def _room(self, facts: SliceFacts) -> NDArray[np.int64]:
        """Bytes that each slot may need, ``(B,)``."""
        num_images = sum(map(self.is_decoded, self.fields))
        return facts.num_bytes + num_images * facts.rows * facts.columns * _COLOURS


_TEXTS = frozenset({"txt", "text", "transcript", "caption"})


def decode_value(name: str, data: NDArray[np.uint8]) -> Any:
    """Decode a field: text to a string, ``json`` to plain data, ``npy`` to an array, ``cls`` to an integer.

    Returns:
        The value; the bytes of every other kind.

    Raises:
        FormatError: The bytes are not what the name says, or an array holds objects.
    """
    kind = name.rpartition(".")[2]
    try:
        if kind in _TEXTS:
            return str(data.data, "utf-8")
        if kind == "json":
            return json.loads(data.tobytes())
        if kind == "npy":
            return np.load(io.BytesIO(data.tobytes()), allow_pickle=False)
        if kind in {"cls", "index"}:
            return int(data.tobytes())
    except (ValueError, EOFError, RecursionError) as error:
        raise FormatError(f"a .{kind} field must decode, got {type(error).__name__} ({name!a}).") from None
    return data.tobytes()


_TEXT = -1
# As stored: an orientation tag would turn the picture, and with it the size that its header tells.
_READ_COLOUR = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
_READ_GREY = cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION


class RawAssembler:
    """Fills slots for the micro-batches of one epoch. Safe for many threads.

    Args:
        reader: Where bytes come from.
        view: Which fields.
        text: Whether the sample's text is asked for as well.
        counters: Gets the stage ``decode``.
    """

    def __init__(self, reader: FieldReader, view: FieldsView, *, text: bool, counters: StageCounters) -> None:
        self._reader = reader
        self._view = view
        self._text = text
        self._counters = counters

    def fill(
        self,
        shard_number: int,
        requests: list[SlotRequest],
        arrays: Mapping[str, NDArray[Any]],
        thread: ThreadState,
    ) -> dict[int, BadSample]:
        """Fill slots whose samples lie in one shard; see `ImageAssembler.fill`."""
        try:
            shard = self._reader.open_shard(shard_number, thread)
        except BadSample as bad:
            return {request.slot: bad for request in requests}
        bad_slots: dict[int, BadSample] = {}
        # One entry for each field to read; a field that is text as well is read once and put twice.
        work: dict[int, list[tuple[SlotRequest, int]]] = {}
        for request in requests:
            try:
                self._order(shard, request, work)
            except BadSample as bad:
                bad_slots[request.slot] = bad
        numbers = np.array(list(work), np.int64)
        stops = {request.slot: int(arrays["field_start"][request.slot, 0]) for request in requests}
        ends = self._ends(arrays)
        for position, payload in self._reader.read(shard, numbers, thread):
            number = int(numbers[position])
            for request, purpose in work[number]:
                slot = request.slot
                if slot in bad_slots:
                    continue
                try:
                    if isinstance(payload, BadSample):
                        raise payload
                    if purpose == _TEXT:
                        put_text(shard, request, payload, arrays)
                    else:
                        place = stops[slot], int(ends[slot])
                        stops[slot] += self._put(
                            shard, number, payload, arrays, (slot, purpose), place, thread
                        )
                except BadSample as bad:
                    bad_slots[slot] = bad
        return bad_slots

    def _order(
        self, shard: Shard, request: SlotRequest, work: dict[int, list[tuple[SlotRequest, int]]]
    ) -> None:
        check_row(shard, request)
        wanted: list[tuple[int, int]] = []
        text = find_text(shard, request) if self._text else None
        if text is not None:
            wanted.append((text, _TEXT))
        for purpose, name in enumerate(self._view.fields):
            number = shard.find(request.row_in_shard, name)
            if number is not None:
                wanted.append((number, purpose))
            elif self._view.missing == "mask":
                raise shard.bad(BadSampleReason.FIELD_MISSING, name)
        for number, purpose in wanted:
            work.setdefault(number, []).append((request, purpose))

    @staticmethod
    def _ends(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Where the room of each slot ends, ``(B,)``."""
        starts = arrays["field_start"][:, 0]
        return np.append(starts[1:], len(arrays["field_data"]))

    def _put(
        self,
        shard: Shard,
        number: int,
        payload: NDArray[np.uint8],
        arrays: Mapping[str, NDArray[Any]],
        at: tuple[int, int],
        place: tuple[int, int],
        thread: ThreadState,
    ) -> int:
        """Put one field behind the others of its slot; returns its size there."""
        start, end = place
        if not self._view.is_decoded(self._view.fields[at[1]]):
            shape, is_grey = (len(payload), 0, 0), False
            num_bytes = len(payload)
        else:
            header = image_header(payload[:HEAD_NUM_BYTES].tobytes())
            if header is None:
                raise shard.bad(BadSampleReason.DECODE_FAILED, number, "no JPEG or PNG of a known size")
            shape = (header.rows, header.columns, 3)
            num_bytes = header.rows * header.columns * 3
            is_grey = header.is_grey
        if start + num_bytes > end:
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, number, "larger than the samples table allows")
        target = arrays["field_data"][start : start + num_bytes]
        if shape[2]:
            thread.enter("decode", f"shard {shard.name}")
            with self._counters.timed("decode", num_bytes):
                _decode_rgb(shard, number, payload, target.reshape(shape), is_grey=is_grey)
        else:
            target[:] = payload
        arrays["field_start"][at] = start
        arrays["field_shape"][at] = shape
        return num_bytes


def _decode_rgb(
    shard: Shard, number: int, payload: NDArray[np.uint8], target: NDArray[np.uint8], *, is_grey: bool
) -> None:
    """Decode to RGB. A grey image is decoded as one: a third of the memory, and half of the time."""
    try:
        decoded = cv2.imdecode(payload, _READ_GREY if is_grey else _READ_COLOUR)
    except cv2.error as error:
        raise shard.bad(BadSampleReason.DECODE_FAILED, number, type(error).__name__) from None
    if decoded is None or decoded.shape != target.shape[: decoded.ndim]:
        raise shard.bad(BadSampleReason.DECODE_FAILED, number, "no picture of the size in its header")
    cv2.cvtColor(decoded, cv2.COLOR_GRAY2RGB if is_grey else cv2.COLOR_BGR2RGB, dst=target)
