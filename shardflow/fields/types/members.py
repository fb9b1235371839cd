"""Fields of stored members as they are: JSON, bytes and arrays.

No table knows the size of a member, so specs declare a bound, and a larger one masks its slot. Nothing is
ever unpickled.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Coverage,
    Field,
    FieldContext,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
    check_count,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.format import Dataset
from shardflow.format.foreign.places import num_samples_with

MAX_BYTES: Final = 1 << 40
_MAX_AXES: Final = 8
_MAX_SLOTS: Final = 1 << 12
_NUMBERS: Final = "biufc"
# What NumPy, zipfile and json raise for bytes that are not what their name says.
_UNREADABLE: Final = (
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OSError,
    RuntimeError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_IMAGE_KINDS: Final = frozenset({"jpg", "jpeg", "png"})
# webdataset would unpickle these, which runs foreign code.
_PICKLES: Final = frozenset({"pth", "pt", "pkl", "pickle", "pyd", "dill"})
# Data types of NIfTI by their codes; colors, complex and 128-bit values are none of these.
_NIFTI_DTYPES: Final = {
    2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"
}  # fmt: skip
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


def is_nifti(name: str) -> bool:
    """Tell whether a field is a NIfTI volume."""
    return f".{name}".endswith((".nii", ".nii.gz"))


@dataclass(frozen=True, kw_only=True)
class Json(Field):
    """JSON of a member, as plain Python values.

    The entry is a list of B values, None where there is no member; ``NAME_mask`` ``(B,)`` uint8 is 1 where
    there is one.

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "json"
    reads_previous: ClassVar[bool] = True

    member: str
    """Stored field that holds the JSON, such as ``"study.json"``."""
    max_bytes: int = 1 << 16
    """Size that it may have; a larger one masks its slot."""
    num_samples: int = 1
    """Neighboring slots of a micro-batch that each sample fills, such as the completions of a prompt that are
    compared with each other; see `Volume.num_samples`."""

    def __post_init__(self) -> None:
        check_member(self)
        check_count("num_samples", self.num_samples, _MAX_SLOTS)

    @property
    def num_crops(self) -> int:
        """The slots of each sample."""
        return self.num_samples

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundJson(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the values and their mask."""
        found = member_bytes(entry, arrays)
        values = [None if one is None else json.loads(one.tobytes()) for one in found]
        return {entry["name"]: values, f"{entry['name']}_mask": mask_of(found)}


@dataclass(frozen=True, kw_only=True)
class Bytes(Field):
    """Bytes of a member, as stored.

    The entry is a list of B ``bytes``, empty where there is no member; ``NAME_mask`` ``(B,)`` uint8 is 1
    where there is one.

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "bytes"
    reads_previous: ClassVar[bool] = True

    member: str
    """Name of the stored field."""
    max_bytes: int = 1 << 20
    """Size that it may have; a larger one masks its slot."""

    def __post_init__(self) -> None:
        check_member(self)

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundBytes(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the bytes and their mask."""
        found = member_bytes(entry, arrays)
        values = [b"" if one is None else one.tobytes() for one in found]
        return {entry["name"]: values, f"{entry['name']}_mask": mask_of(found)}


@dataclass(frozen=True, kw_only=True)
class Array(Field):
    """Array of a member: ``.npy``, ``.npz``, or a NIfTI volume, ``.nii`` or ``.nii.gz``.

    With ``shape`` ``(B, *shape)``; with ``max_shape`` ``(B, *max_shape)``, zeros behind each array, and
    ``NAME_shape`` ``(B, n)`` int64 is the shape of each; ``NAME_mask`` ``(B,)`` uint8 is 1 where there is
    one. A volume has the axes of its file (x, y, z, ...) and its values scaled. An array of another shape, a
    pickle, and values that ``dtype`` cannot hold mask the slot; floats are rounded to a smaller float.

    Example::

        sf.Array(member="embedding.npy", shape=(768,), dtype="float32")

    Raises:
        ConfigError: A setting is out of range, or the member is no array.
    """

    type_name: ClassVar[str] = "array"
    reads_previous: ClassVar[bool] = True

    member: str
    """Stored field that holds the array; its name ends with ``npy``, ``npz``, ``nii`` or ``nii.gz``."""
    dtype: str
    """Dtype to deliver, such as ``"float32"``: a boolean, an integer, a float or complex."""
    shape: tuple[int, ...] | None = None
    """Shape of every array."""
    max_shape: tuple[int, ...] | None = None
    """Largest size of each axis."""
    array: str | None = None
    """Name of the array in an ``.npz``; None where it holds a single one."""
    max_bytes: int = 1 << 28
    """Size that the member may have; a larger one masks its slot."""

    def __post_init__(self) -> None:
        check_member(self)
        kind = self.member.rpartition(".")[2]
        if is_pickle(self.member) or not (kind in ("npy", "npz") or is_nifti(self.member)):
            raise ConfigError(
                f"member names an .npy, .npz, .nii or .nii.gz array, got {self.member!r}; pickles are never "
                "read, write arrays with numpy.save."
            )
        if self.array is not None and kind != "npz":
            raise ConfigError(f"array names one of an .npz, and {self.member!r} is none; leave it out.")
        if (self.shape is None) == (self.max_shape is None):
            raise ConfigError(
                "No table knows the shape of an array: write either shape=(768,) for all, or "
                "max_shape=(512, 4)."
            )
        for name in ("shape", "max_shape"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _checked_shape(name, getattr(self, name)))
        dtype: Any = self.dtype
        try:
            is_number = isinstance(dtype, str) and np.dtype(dtype).kind in _NUMBERS
        except TypeError:
            is_number = False
        if not is_number:
            raise ConfigError(f"dtype is a number type such as 'float32', got {dtype!r}.")

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundArray(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the arrays, their mask, and their shapes if they differ."""
        return present_beside(entry, arrays, ("mask", "shape"))


def present_beside(entry: Mapping[str, Any], arrays: Arrays, beside: Sequence[str]) -> dict[str, Any]:
    """Return the array of an entry, and those beside it that the batch has, such as its mask."""
    name = entry["name"]
    names = (name, *(f"{name}_{one}" for one in beside))
    return {one: arrays[one] for one in names if one in arrays}


def check_member(spec: Any) -> None:
    """Refuse settings of a member that cannot be.

    Raises:
        ConfigError: One is out of range.
    """
    check_choice("missing", spec.missing, ("pad", "drop", "error"))
    check_count("max_bytes", spec.max_bytes, MAX_BYTES)
    if spec.member is not None and (not isinstance(spec.member, str) or not spec.member):
        raise ConfigError(f"member is the name of a stored field, such as 'study.json', got {spec.member!r}.")
    # Names of fields in an index are lower case.
    if spec.member is not None and spec.member != spec.member.lower():
        raise ConfigError(f"member is in lower case, as stored; write member={spec.member.lower()!r}.")


def _checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        sides = tuple(shape)
    except TypeError:
        raise ConfigError(f"{name} is a tuple of sizes, such as (768,), got {shape!r}.") from None
    if len(sides) > _MAX_AXES:
        raise ConfigError(f"{name} has at most {_MAX_AXES} axes, got {len(sides)}.")
    for side in sides:
        check_count(f"each size of {name}", side, MAX_BYTES)
    check_count(f"the number of elements of {name}", math.prod(sides), MAX_BYTES)
    return sides


def gather(datasets: Sequence[Dataset], name: str, slots: Slots) -> NDArray[np.int64]:
    """Return a column of the samples table by slot, ``(B,)``; 0 where there is no sample."""
    found = np.zeros(len(slots), np.int64)
    used = np.flatnonzero(slots.rows >= 0)
    for component, dataset in enumerate(datasets):
        here = used if len(datasets) == 1 else used[slots.components[used] == component]
        found[here] = dataset.studies.gather(name, slots.study_rows[here])
    return found


class BoundMember(BoundField):
    """Field of one member of each sample, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        context: The samples.
        member: Name of the stored field; None is the text that a shard's index names.
        max_bytes: Size that it may have.

    Raises:
        ConfigError: Samples without the member are to be dropped, and no table knows which they are; or no
            sample has it.
    """

    def __init__(
        self, name: str, spec: Field, context: FieldContext, member: str | None, max_bytes: int = MAX_BYTES
    ) -> None:
        super().__init__(name)
        self.spec, self.member, self._max_bytes = spec, member, max_bytes
        self._datasets = context.samples.datasets
        self._num_samples, self._num_missing = context.num_samples, 0
        counts = [num_samples_with(dataset.manifest) for dataset in self._datasets]
        if member is not None and None not in counts and not any(member in (found or ()) for found in counts):
            held = ", ".join(sorted({name for found in counts for name in found or ()}))
            raise ConfigError(f"No sample has the member {member!r} of the field {name!r}; there are {held}.")
        self._is_everywhere = all(
            found is not None and found.get(member or "") == dataset.studies.num_samples
            for found, dataset in zip(counts, self._datasets, strict=True)
        )
        if spec.missing == "drop" and self.has_content is None:
            raise ConfigError(
                f"No table knows which samples have {member}, so the field {name!r} cannot drop the others; "
                "write missing='pad', or missing='error' to mask them."
            )

    @property
    def has_content(self) -> Sequence[NDArray[np.bool_]] | None:
        """Rows that have the member, if all have; None where no table says."""
        if not self._is_everywhere:
            return None
        return [np.ones(dataset.samples.num_samples, bool) for dataset in self._datasets]

    @property
    def coverage(self) -> Coverage | None:
        """Number of samples that have the member; None where no table says."""
        if self.has_content is None:
            return None
        return Coverage(num_samples=self._num_samples, num_missing=self._num_missing)

    def find(self, shard: Shard, row_in_shard: int) -> int | None:
        """Return the number of the member of a sample; None if it has none."""
        return shard.find(row_in_shard, self.member or shard.index.text_field)

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the number of the member, if the sample has it.

        Raises:
            BadSample: It has none, and ``missing`` is ``error``; or it is larger than ``max_bytes``.
        """
        number = self.find(shard, request.row_in_shard)
        if number is None:
            if self.spec.missing == "error":
                raise shard.bad(BadSampleReason.FIELD_MISSING, self.member or shard.index.text_field)
            return ()
        if shard.num_bytes(number) > self._max_bytes:
            detail = f"{shard.num_bytes(number):,} bytes, and {self._max_bytes:,} are allowed"
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, number, detail)
        return (number,)

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs."""
        return {"type": self.spec.type_name, "name": self.name}


class BoundBytes(BoundMember):
    """Field that delivers the bytes of a member, in a flat array with a start and a length by slot.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        context: The samples.
    """

    def __init__(self, name: str, spec: Any, context: FieldContext) -> None:
        super().__init__(name, spec, context, spec.member, spec.max_bytes)

    def spaces(self, slots: Slots) -> NDArray[np.int64]:
        """Return the bytes that each slot may need, ``(B,)``."""
        return slots.once(self.name, self._spaces)

    def _spaces(self, slots: Slots) -> NDArray[np.int64]:
        """Compute `spaces`: no member is larger than its sample."""
        spaces = np.minimum(gather(self._datasets, "num_bytes", slots), self._max_bytes)
        return np.where(slots.rows >= 0, spaces, 0)

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return [
            ArraySpec.of(f"{self.name}.data", np.uint8, int(self.spaces(slots).sum())),
            ArraySpec.of(f"{self.name}.start", np.int64, len(slots) + 1),
            ArraySpec.of(f"{self.name}.length", np.int64, len(slots)),
        ]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Lay out the slots, all of them empty: their length is -1."""
        starts = arrays[f"{self.name}.start"]
        starts[0] = 0
        np.cumsum(self.spaces(slots), out=starts[1:])
        arrays[f"{self.name}.length"][:] = -1

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        fields = self.needed(shard, request)
        start, stop = arrays[f"{self.name}.start"][request.slot : request.slot + 2].tolist()
        self.check_size(shard, fields, stop - start)
        return SlotBytes(self, shard, request.slot, arrays, start, fields)

    def check_size(self, shard: Shard, fields: Sequence[int], num_bytes: int) -> None:
        """Refuse a member that is larger than its space.

        Raises:
            BadSample: It is.
        """
        if fields and shard.num_bytes(fields[0]) > num_bytes:
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, fields[0], "larger than the samples table says")

    def check(self, shard: Shard, number: int, payload: NDArray[np.uint8]) -> None:
        """Refuse bytes that are not what the field promises; by default all are.

        Raises:
            BadSample: They are not.
        """

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without the member."""
        arrays[f"{self.name}.length"][slot] = -1


class SlotBytes:
    """Bytes of one slot."""

    __slots__ = ("_arrays", "_field", "_shard", "_slot", "_start", "fields")

    def __init__(
        self, field: BoundBytes, shard: Shard, slot: int, arrays: Arrays, start: int, fields: Sequence[int]
    ) -> None:
        self._field, self._shard, self._slot, self._arrays = field, shard, slot, arrays
        self._start, self.fields = start, fields

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:  # noqa: ARG002
        """Copy the bytes into their place."""
        self._field.check(self._shard, self.fields[place], payload)
        name = self._field.name
        self._arrays[f"{name}.data"][self._start : self._start + len(payload)] = payload
        self._arrays[f"{name}.length"][self._slot] = len(payload)

    def close(self) -> None:
        """Do nothing: the slot is complete."""


class BoundJson(BoundBytes):
    """JSON of a member, bound to a selection."""

    def check(self, shard: Shard, number: int, payload: NDArray[np.uint8]) -> None:
        """Refuse what is not JSON."""
        try:
            json.loads(payload.tobytes())
        except _UNREADABLE as error:
            raise shard.bad(BadSampleReason.TEXT_UNREADABLE, number, type(error).__name__) from None


class BoundArray(BoundMember):
    """Array of a member, bound to a selection."""

    spec: Array

    def __init__(self, name: str, spec: Array, context: FieldContext) -> None:
        super().__init__(name, spec, context, spec.member, spec.max_bytes)
        self._shape: tuple[int, ...] = spec.shape if spec.shape is not None else spec.max_shape or ()
        self._counters = context.counters

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        specs = [
            ArraySpec.of(self.name, self.spec.dtype, len(slots), *self._shape),
            ArraySpec.of(f"{self.name}_mask", np.uint8, len(slots)),
        ]
        if self.spec.max_shape is not None:
            specs.append(ArraySpec.of(f"{self.name}_shape", np.int64, len(slots), len(self._shape)))
        return specs

    def prepare(self, arrays: Arrays, slots: Slots) -> None:  # noqa: ARG002
        """Note that every slot is empty."""
        for beside in (f"{self.name}_mask", f"{self.name}_shape"):
            if beside in arrays:
                arrays[beside][:] = 0

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without an array."""
        for name in (self.name, f"{self.name}_mask", f"{self.name}_shape"):
            if name in arrays:
                arrays[name][slot] = 0

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        fields = self.needed(shard, request)
        if not fields or self.spec.max_shape is not None:
            arrays[self.name][request.slot] = 0
        return _SlotArray(self, shard, request.slot, arrays, fields)

    def decode(
        self, shard: Shard, number: int, payload: NDArray[np.uint8], target: NDArray[Any]
    ) -> tuple[int, ...]:
        """Decode an array into its place, and return its shape.

        Raises:
            BadSample: The bytes are no array of plain numbers, or it does not fit.
        """
        try:
            with self._counters.timed("decode", target.nbytes):
                stored = self._read(payload)
        except _UNREADABLE as error:
            raise shard.bad(BadSampleReason.DECODE_FAILED, number, type(error).__name__) from None
        is_exact = self.spec.shape is not None
        if stored.ndim != len(self._shape) or not all(
            size == most if is_exact else size <= most
            for size, most in zip(stored.shape, self._shape, strict=True)
        ):
            raise shard.bad(
                BadSampleReason.SIZE_MISMATCH,
                number,
                f"{stored.shape}, and {'shape' if is_exact else 'max_shape'} is {self._shape}",
            )
        place = target[tuple(map(slice, stored.shape))]
        if not _copy_exactly(stored, place):
            detail = f"{stored.dtype} with values that {self.spec.dtype} cannot hold"
            raise shard.bad(BadSampleReason.DECODE_FAILED, number, detail)
        return stored.shape

    def _read(self, payload: NDArray[np.uint8]) -> NDArray[Any]:
        if self.spec.member.endswith("npy"):
            return read_npy(payload)
        if is_nifti(self.spec.member):
            return read_nifti(payload, self.spec.max_bytes)
        with zipfile.ZipFile(io.BytesIO(payload.tobytes())) as archive:
            names = [f"{self.spec.array}.npy"] if self.spec.array is not None else archive.namelist()
            if len(names) != 1:
                raise ValueError("several arrays and no name")
            # The size is that of the directory, which zipfile does not exceed when it decompresses.
            if archive.getinfo(names[0]).file_size > self.spec.max_bytes:
                raise ValueError("larger than max_bytes")
            return read_npy(np.frombuffer(archive.read(names[0]), np.uint8))


class _SlotArray:
    """Array of one slot."""

    __slots__ = ("_arrays", "_field", "_shard", "_slot", "fields")

    def __init__(
        self, field: BoundArray, shard: Shard, slot: int, arrays: Arrays, fields: Sequence[int]
    ) -> None:
        self._field, self._shard, self._slot, self._arrays = field, shard, slot, arrays
        self.fields = fields

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Decode the array into its place."""
        field, arrays, slot = self._field, self._arrays, self._slot
        thread.enter("decode", f"shard {self._shard.name}")
        target = arrays[field.name][slot : slot + 1].reshape(arrays[field.name].shape[1:])
        shape = field.decode(self._shard, self.fields[place], payload, target)
        arrays[f"{field.name}_mask"][slot] = 1
        if f"{field.name}_shape" in arrays:
            arrays[f"{field.name}_shape"][slot] = shape

    def close(self) -> None:
        """Do nothing: the slot is complete."""


def _copy_exactly(source: NDArray[Any], target: NDArray[Any]) -> bool:
    """Copy into an array of another dtype; return whether it holds every value.

    Floats may be rounded to a smaller float, and no finite one may become infinite.
    """
    if source.dtype.kind == "c" and target.dtype.kind != "c":
        return False
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")
        if np.can_cast(source.dtype, target.dtype):
            return True
        if {source.dtype.kind, target.dtype.kind} <= {"f", "c"}:
            return bool((np.isinf(target) == np.isinf(source)).all())
        return bool((target == source).all())


def member_bytes(entry: Mapping[str, Any], arrays: Arrays) -> list[NDArray[np.uint8] | None]:
    """Return the bytes of each slot without a copy; None where there is no member."""
    name = entry["name"]
    data, starts = arrays[f"{name}.data"], arrays[f"{name}.start"].tolist()
    lengths = arrays[f"{name}.length"].tolist()
    return [
        None if length < 0 else data[start : start + length]
        for start, length in zip(starts[:-1], lengths, strict=True)
    ]


def mask_of(found: Sequence[object]) -> NDArray[np.uint8]:
    """Return 1 for each slot that has a member, ``(B,)`` uint8."""
    return np.array([one is not None for one in found], np.uint8)


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


def read_nifti(payload: NDArray[np.uint8], max_bytes: int) -> NDArray[Any]:
    """Return the volume of a NIfTI file of version 1 or 2, also gzipped, with its values scaled.

    Args:
        payload: ``(num_bytes,)``, the file: header and volume in one.
        max_bytes: Size that it may have when it is not compressed.

    Returns:
        With the axes of the file, ``(x, y, z, ...)``; of its dtype, or float64 where it has a scale.

    Raises:
        ValueError: It is no such file, has another size than its header says, or is larger.
        zlib.error: It cannot be decompressed.
    """
    data = payload.tobytes()
    if data[:2] == b"\x1f\x8b":
        data = _gunzip(data, max_bytes)
    order = next((sign for sign in "<>" if data[:4] in (struct.pack(f"{sign}i", n) for n in (348, 540))), "")
    if order and struct.unpack_from(f"{order}i", data)[0] == 348 and data[344:348] == b"n+1\0":
        dims, code = struct.unpack_from(f"{order}8h", data, 40), struct.unpack_from(f"{order}h", data, 70)[0]
        start, slope, shift = struct.unpack_from(f"{order}3f", data, 108)
    elif order and data[4:8] == b"n+2\0":
        code, dims = struct.unpack_from(f"{order}h", data, 12)[0], struct.unpack_from(f"{order}8q", data, 16)
        start, slope, shift = struct.unpack_from(f"{order}qdd", data, 168)
    else:
        raise ValueError("no NIfTI of a known version in one file")
    if code not in _NIFTI_DTYPES or not 1 <= dims[0] <= 7:
        raise ValueError("no NIfTI of plain numbers")
    shape = dims[1 : 1 + dims[0]]
    if min(shape) < 1:
        raise ValueError("a NIfTI without values")
    dtype = np.dtype(f"{order}{_NIFTI_DTYPES[code]}")
    if not 0 <= start <= len(data) - math.prod(shape) * dtype.itemsize:
        raise ValueError("another size than in the header")
    volume = np.frombuffer(data, dtype, math.prod(shape), int(start)).reshape(shape, order="F")
    is_scaled = math.isfinite(slope) and slope != 0 and (slope, shift) != (1, 0)
    return volume * np.float64(slope) + np.float64(shift) if is_scaled else volume


def _gunzip(data: bytes, max_bytes: int) -> bytes:
    """Decompress all members of a gzip file, which never grow beyond a bound."""
    pieces, num_bytes = [], 0
    while data:
        stream = zlib.decompressobj(wbits=31)
        pieces.append(stream.decompress(data, max_bytes - num_bytes + 1))
        num_bytes += len(pieces[-1])
        if num_bytes > max_bytes:
            raise ValueError("larger than max_bytes")
        if not stream.eof:
            raise ValueError("a cut gzip file")
        data = stream.unused_data.lstrip(b"\0")
    return b"".join(pieces)
