"""Field kind of fields by name, as stored: the view of foreign shards.

Sizes are fixed before reading, as in every view: a slot has space for its whole sample, and for the pixels of
its images according to their headers when they were indexed. Bytes are copied, images decoded, nothing is
unpickled.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import Arrays, ArraySpec, SlotRequest
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.views import SliceFacts
from shardflow.format.foreign.scan import HEAD_NUM_BYTES, image_header
from shardflow.telemetry import StageCounters

_COLOURS: Final = 3
_IMAGE_KINDS: Final = frozenset({"jpg", "jpeg", "png"})
# webdataset would unpickle these, which runs foreign code.
_PICKLES: Final = frozenset({"pth", "pt", "pkl", "pickle", "pyd", "dill"})
_TEXTS = frozenset({"txt", "text", "transcript", "caption"})
# As stored: applying an orientation tag could swap the rows and columns of the header.
_READ_COLOUR = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
_READ_GREY = cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION
_NPY_HEAD: Final = 1 << 16
# The header is matched, not evaluated: NumPy parses it as Python source, which fails at times where several
# threads do so at once (CPython 3.11), and is slower.
_NPY_VALUE: Final = rb"'[<>|=]?[biufc?]\d*'|True|False|\([\d,\sL]*\)"
_NPY_ENTRY: Final = re.compile(rb"'(descr|fortran_order|shape)'\s*:\s*(" + _NPY_VALUE + rb")")
_NPY_HEADER: Final = re.compile(
    rb"\{\s*((?:'\w+'\s*:\s*(?:" + _NPY_VALUE + rb")\s*(?:,\s*|(?=\}))){3})\}", re.ASCII
)


def is_image_field(name: str) -> bool:
    """Tell whether a field is an image that can be decoded."""
    return name.rpartition(".")[2] in _IMAGE_KINDS


def is_pickle(name: str) -> bool:
    """Tell whether a field is a pickle, which nothing here reads."""
    return name.rpartition(".")[2] in _PICKLES


def readable_fields(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of fields that a view may name: all but pickles."""
    return tuple(name for name in names if not is_pickle(name))


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldsView:
    """View of some fields of each sample by name; `Batch.field` decodes them by their extension.

    No field is ever unpickled: ``.pth``, ``.pkl`` and the like are refused, as is ``.npy`` with objects.

    Raises:
        ConfigError: No field is named, a field is repeated, or a field is a pickle.
    """

    fields: tuple[str, ...]
    """Names as in the index: lower case, such as ``"jpg"`` or ``"seg.png"``."""
    missing: Literal["allow", "mask"] = "allow"
    """What a missing field means: the field is None, or the sample is bad and masked."""
    images: Literal["pixels", "bytes"] = "pixels"
    """``pixels``: JPEG and PNG are decoded to RGB uint8 in the loader's threads. ``bytes``: as stored."""

    def __post_init__(self) -> None:
        if not self.fields or len({*self.fields}) < len(self.fields):
            raise ConfigError("fields must name at least one field, each once, got none or one twice.")
        for name in self.fields:
            if is_pickle(name):
                raise ConfigError(f"a field must not be a pickle, got {name!a}; store arrays as .npy.")

    def is_decoded(self, name: str) -> bool:
        """Tell whether a field is delivered as pixels."""
        return self.images == "pixels" and is_image_field(name)

    def array_specs(self, facts: SliceFacts) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num_slots, num_fields = len(facts.rows), len(self.fields)
        return [
            ArraySpec.of("field_data", np.uint8, int(self._max_bytes(facts).sum())),
            ArraySpec.of("field_start", np.int64, num_slots, num_fields),
            ArraySpec.of("field_shape", np.int64, num_slots, num_fields, 3),
        ]

    def prepare(self, arrays: Arrays, facts: SliceFacts) -> None:
        """Fill what does not depend on any field: each slot is empty at the start of its space."""
        spaces = self._max_bytes(facts)
        arrays["field_start"][:] = (np.cumsum(spaces) - spaces)[:, None]
        arrays["field_shape"][:] = (-1, 0, 0)

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without fields; its data can no longer be reached."""
        arrays["field_shape"][slot] = (-1, 0, 0)

    def _max_bytes(self, facts: SliceFacts) -> NDArray[np.int64]:
        """Return the bytes that each slot may need, ``(B,)``."""
        num_images = sum(map(self.is_decoded, self.fields))
        return facts.num_bytes + num_images * facts.rows * facts.columns * _COLOURS


def decode_value(name: str, data: NDArray[np.uint8]) -> Any:
    """Decode a field: text to a string, ``json`` to plain data, ``npy`` to an array, ``cls`` to an integer.

    Returns:
        The value, or the bytes of any other kind.

    Raises:
        FormatError: The bytes do not match the name, or an array contains objects.
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


class NamedFields:
    """Field kind of fields by name.

    Args:
        view: Which fields.
        counters: Gets the stage ``decode``.
    """

    def __init__(self, view: FieldsView, counters: StageCounters) -> None:
        self.view = view
        self.counters = counters

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the numbers of the named fields that the sample has."""
        return list(self.find(shard, request).values())

    def find(self, shard: Shard, request: SlotRequest) -> dict[int, int]:
        """Return the numbers of the sample's fields, by their place in the view.

        Raises:
            BadSample: The sample lacks one, and the view masks such samples.
        """
        found = {}
        for place, name in enumerate(self.view.fields):
            number = shard.find(request.row_in_shard, name)
            if number is not None:
                found[place] = number
            elif self.view.missing == "mask":
                raise shard.bad(BadSampleReason.FIELD_MISSING, name)
        return found

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> _SlotFields:
        """Begin a slot."""
        return _SlotFields(self, shard, request, arrays)


class _SlotFields:
    """Fields of one slot, one after another in its space."""

    __slots__ = ("_arrays", "_end", "_kind", "_places", "_shard", "_slot", "_stop", "fields")

    def __init__(self, kind: NamedFields, shard: Shard, request: SlotRequest, arrays: Arrays) -> None:
        self._kind, self._shard, self._slot, self._arrays = kind, shard, request.slot, arrays
        found = kind.find(shard, request)
        self._places, self.fields = list(found), list(found.values())
        starts = arrays["field_start"]
        # A slot's space begins at the least of its starts, where each of them is until its field is put.
        self._stop = int(starts[self._slot].min())
        is_last = self._slot + 1 == len(starts)
        self._end = len(arrays["field_data"]) if is_last else int(starts[self._slot + 1].min())

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Append a field: its bytes, or its pixels."""
        shard, number = self._shard, self.fields[place]
        at = self._slot, self._places[place]
        shape, is_grey = (len(payload), 0, 0), False
        num_bytes = len(payload)
        if self._kind.view.is_decoded(self._kind.view.fields[at[1]]):
            header = image_header(payload[:HEAD_NUM_BYTES].tobytes())
            if header is None:
                raise shard.bad(BadSampleReason.DECODE_FAILED, number, "no JPEG or PNG of a known size")
            shape, is_grey = (header.rows, header.columns, _COLOURS), header.is_gray
            num_bytes = math.prod(shape)
        start = self._stop
        if start + num_bytes > self._end:
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, number, "larger than the samples table allows")
        target = self._arrays["field_data"][start : start + num_bytes]
        if shape[2]:
            thread.enter("decode", f"shard {shard.name}")
            with self._kind.counters.timed("decode", num_bytes):
                _decode_rgb(shard, number, payload, target.reshape(shape), is_grey=is_grey)
        else:
            target[:] = payload
        self._arrays["field_start"][at] = start
        self._arrays["field_shape"][at] = shape
        self._stop += num_bytes

    def close(self) -> None:
        """Do nothing: the fields are complete."""


def field_of(arrays: Arrays, slot: int, place: int) -> NDArray[np.uint8] | None:
    """Return a field of a slot by its place in the view, without a copy; None if the sample has none.

    Returns:
        ``(num_bytes,)`` as stored, or ``(rows, columns, 3)`` RGB for a decoded image.
    """
    shape = arrays["field_shape"][slot, place].tolist()
    if shape[0] < 0:
        return None
    size = shape if shape[2] else shape[:1]
    start = int(arrays["field_start"][slot, place])
    found: NDArray[np.uint8] = arrays["field_data"][start : start + math.prod(size)]
    return found.reshape(size)


def _decode_rgb(
    shard: Shard, number: int, payload: NDArray[np.uint8], target: NDArray[np.uint8], *, is_grey: bool
) -> None:
    """Decode to RGB. A gray image is decoded as gray: a third of the memory, half of the time."""
    try:
        decoded = cv2.imdecode(payload, _READ_GREY if is_grey else _READ_COLOUR)
    except cv2.error as error:
        raise shard.bad(BadSampleReason.DECODE_FAILED, number, type(error).__name__) from None
    if decoded is None or decoded.shape != target.shape[: decoded.ndim]:
        raise shard.bad(BadSampleReason.DECODE_FAILED, number, "no picture of the size in its header")
    cv2.cvtColor(decoded, cv2.COLOR_GRAY2RGB if is_grey else cv2.COLOR_BGR2RGB, dst=target)


def read_npy(payload: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the array of an ``.npy`` file without a copy.

    Args:
        payload: ``(num_bytes,)``, the file.

    Raises:
        ValueError: It is no such file, holds objects, or has another size than its header says.
    """
    head = payload[:_NPY_HEAD].tobytes()
    size_bytes = 2 if head[6:7] == b"\x01" else 4
    start = 8 + size_bytes
    if head[:6] != b"\x93NUMPY" or head[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise ValueError("no .npy of a known version")
    stop = start + int.from_bytes(head[8:start], "little")
    header = _NPY_HEADER.fullmatch(head[start:stop].strip())
    entries = {} if header is None else dict(_NPY_ENTRY.findall(header[1]))
    if len(entries) != 3:
        raise ValueError("no header of plain numbers")
    dtype = np.dtype(entries[b"descr"].strip(b"'").decode("ascii"))
    shape = tuple(int(size) for size in re.findall(rb"\d+", entries[b"shape"]))
    is_fortran = entries[b"fortran_order"] == b"True"
    num_bytes = math.prod(shape) * dtype.itemsize
    if len(payload) - stop != num_bytes:
        raise ValueError("another size than in the header")
    if not num_bytes:
        return np.empty(shape, dtype)
    values = np.frombuffer(payload[stop:].data, dtype)
    return values.reshape(shape[::-1]).T if is_fortran else values.reshape(shape)
