"""Decoding of a slice into its place in a batch, and the state of the loader thread that does it.

A slice whose stored size and dtype are those of its place is decoded straight into it. Any other goes through
the thread's scratch memory: luminance, then size, then number type. OpenCV and NumPy release the
interpreter's lock meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.format import array_header, decode_array
from shardflow.format.contents.pictures import decode_picture, file_header, opencv
from shardflow.format.slice_codecs import b2nd

# Loaded here, so that neither the first batch nor each forked worker waits for them.
b2nd.load()
with contextlib.suppress(ConfigError):  # where it is installed
    opencv()

_STEP = 1 << 20


class Scratch:
    """Named, growing buffers of one thread; a buffer is valid until the next call with its name.

    They grow to the largest slice and the largest read; after both, the thread allocates nothing more.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}
        self._spare: NDArray[np.uint8] | None = None

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of undefined content that is valid until it is given back or dropped."""
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer, self._spare = self._spare, None
        if buffer is None or len(buffer) < num_bytes:
            buffer = np.empty(-(-num_bytes // _STEP) * _STEP, np.uint8)
        return buffer[:num_bytes].view(dtype).reshape(shape)

    def take_back(self, array: NDArray[Any]) -> None:
        """Keep the memory of an array from `lend` for the next one; nobody else may use it any more."""
        base = array.base
        if isinstance(base, np.ndarray) and (self._spare is None or base.nbytes > self._spare.nbytes):
            self._spare = base

    def bytes(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        """Return ``(num_bytes,)`` uint8 of undefined content."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers[name] = np.empty(-(-num_bytes // _STEP) * _STEP, np.uint8)
        return buffer[:num_bytes]

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a C-contiguous array of undefined content."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self.bytes(name, num_bytes).view(dtype).reshape(shape)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        spare = 0 if self._spare is None else self._spare.nbytes
        return spare + sum(buffer.nbytes for buffer in self._buffers.values())


class ThreadState:
    """Scratch memory of one thread, and its current activity. Only the thread itself writes.

    Attributes:
        payloads: Memory of the payloads that were read last, with room around them, see `decode_arrays`; None
            if there is no room.

    Other threads may read the activity at any time and see a consistent triple, because it is stored with one
    assignment, so that a wait that takes too long can name what it waits for (contract S8).
    """

    __slots__ = ("_now", "payloads", "scratch")

    def __init__(self) -> None:
        self.scratch = Scratch()
        self.payloads: NDArray[np.uint8] | None = None
        self._now = ("idle", "", time.monotonic())

    def enter(self, stage: str, place: str) -> None:
        """Note the activity that begins now.

        Args:
            stage: ``plan``, ``index``, ``read``, ``check``, ``decode``, ``transform`` or ``idle``.
            place: Shard and tier, such as ``"shard train-000003, tier local"``.
        """
        self._now = (stage, place, time.monotonic())

    def describe(self) -> str:
        """Describe stage, place and duration."""
        stage, place, since = self._now
        return f"stage {stage}{f' of {place}' if place else ''} for {time.monotonic() - since:.1f} s"

    def describe_busy(self) -> str:
        """Describe the current activity; empty while the thread is idle."""
        return "" if self._now[0] == "idle" else self.describe()


# What cv2.resize and cv2.cvtColor accept; everything else is converted first.
_CV_RESIZE_DTYPES = {np.dtype(name) for name in ("uint8", "uint16", "int16", "float32", "float64")}
_CV_COLOUR_DTYPES = {np.dtype(name) for name in ("uint8", "uint16", "float32")}
_COLOUR_SAMPLES = 3


def decode_slice(
    codec: str, payload: NDArray[np.uint8], target: NDArray[Any], scratch: Scratch, *, may_resize: bool
) -> NDArray[Any] | None:
    """Decode a slice, straight into ``target`` if size and dtype match.

    Args:
        codec: Codec of the field.
        payload: The checked bytes of the field.
        target: ``(rows, columns)``, the slice's place in the batch.
        scratch: The thread's memory.
        may_resize: Whether another size is allowed.

    Returns:
        None if ``target`` is filled, or the decoded slice, in scratch memory, that `convert_slice` must bring
        there.

    Raises:
        FormatError: The payload cannot be decoded, or has a size that is not allowed.
    """
    shape, dtype = array_header(codec, payload)
    if shape == target.shape and dtype == target.dtype:
        decode_array(codec, payload, out=target)
        return None
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, _COLOUR_SAMPLES)):
        raise FormatError(
            f"a slice must be grey or have {_COLOUR_SAMPLES} samples per pixel, got shape {shape}."
        )
    if not may_resize and shape[:2] != target.shape:
        raise FormatError(f"a slice must be {target.shape} as the samples table says, got {shape[:2]}.")
    return decode_array(codec, payload, out=scratch.array("slice", shape, dtype))


def convert_slice(source: NDArray[Any], target: NDArray[Any], scratch: Scratch) -> int:
    """Convert a decoded slice into its place: luminance, then size, then number type.

    Args:
        source: ``(rows, columns)`` or ``(rows, columns, 1 or 3)``; may be overwritten.
        target: ``(rows, columns)`` int16 or float32.
        scratch: The thread's memory.

    Returns:
        Number of pixels that were saturated because the target's type cannot hold them.
    """
    if source.ndim == target.ndim + 1:
        source = _luminance(source, scratch)
    if source.shape != target.shape:
        if source.dtype not in _CV_RESIZE_DTYPES:
            source = source.astype(np.float64)
        cv2 = opencv()
        # First shrink, by area, so that nothing aliases; then grow.
        common = (min(source.shape[0], target.shape[0]), min(source.shape[1], target.shape[1]))
        if common not in (source.shape, target.shape):
            shrunk = scratch.array("shrunk", common, source.dtype)
            source = _resize(source, shrunk, cv2.INTER_AREA)
        is_direct = source.dtype == target.dtype
        sized = target if is_direct else scratch.array("sized", target.shape, source.dtype)
        _resize(source, sized, cv2.INTER_AREA if common == target.shape else cv2.INTER_LINEAR)
        if is_direct:
            return 0
        source = sized
    return cast_saturated(source, target)


def convert_picture(source: NDArray[Any], target: NDArray[Any], scratch: Scratch) -> int:
    """Convert a decoded picture into its place: channels, then size, then number type.

    Args:
        source: ``(rows, columns)`` or ``(rows, columns, 1 or 3)``; may be overwritten.
        target: ``(C, rows, columns)``; color in one channel becomes luminance, gray in three is repeated.
        scratch: The thread's memory.

    Returns:
        Number of pixels that were saturated because the target's type cannot hold them.
    """
    if len(target) == 1 and target.flags.c_contiguous:
        return convert_slice(source, target[0], scratch)
    if source.shape == target.shape[1:] and source.dtype == target.dtype:
        np.copyto(target, source)
        return 0
    plane = scratch.array("plane", target.shape[1:], target.dtype)
    if source.ndim == 2 or source.shape[2] != len(target):
        num_saturated = convert_slice(source, plane, scratch)
        np.copyto(target, plane)
        return num_saturated
    num_saturated = 0
    for channel, place in enumerate(target):
        num_saturated += convert_slice(np.ascontiguousarray(source[:, :, channel]), plane, scratch)
        np.copyto(place, plane)
    return num_saturated


def cut_tiles(canvas: NDArray[Any], tiles: NDArray[Any], scratch: Scratch) -> None:
    """Cut an image into tiles, with an overview first where there are several.

    Args:
        canvas: ``(C, rows, columns)``, whole numbers of tiles.
        tiles: ``(T, C, H, W)`` to fill.
        scratch: The thread's memory.
    """
    _, channels, rows, columns = tiles.shape
    high, wide = canvas.shape[1] // rows, canvas.shape[2] // columns
    if len(tiles) > high * wide:
        for channel in range(channels):
            convert_slice(canvas[channel], tiles[0, channel], scratch)
    pieces = canvas.reshape(channels, high, rows, wide, columns).transpose(1, 3, 0, 2, 4)
    tiles[-high * wide :] = pieces.reshape(high * wide, channels, rows, columns)


def decode_file(payload: NDArray[np.uint8]) -> NDArray[Any]:
    """Decode a JPEG or PNG as stored: gray stays gray, 16 bits stay 16 bits; alpha is left out.

    Orientation tags are ignored, because tables know the stored size.

    Returns:
        ``(rows, columns)``, or ``(rows, columns, 3)`` RGB; uint8 or uint16.

    Raises:
        FormatError: It cannot be decoded, or its pixels are not those of its header.
    """
    header = file_header(payload.data)
    if header is None:
        raise FormatError("no JPEG or PNG of a known size")
    cv2 = opencv()
    flags = cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
    flags |= cv2.IMREAD_COLOR if header.has_color else cv2.IMREAD_GRAYSCALE
    decoded = decode_picture(payload, flags)
    pixels: NDArray[Any] = cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB) if header.has_color else decoded
    return pixels


def _resize(source: NDArray[Any], target: NDArray[Any], interpolation: int) -> NDArray[Any]:
    opencv().resize(source, (target.shape[1], target.shape[0]), dst=target, interpolation=interpolation)
    return target


def _luminance(source: NDArray[Any], scratch: Scratch) -> NDArray[Any]:
    if source.shape[2] == 1:
        return source[:, :, 0]
    if source.dtype not in _CV_COLOUR_DTYPES:
        source = source.astype(np.float32)
    grey = scratch.array("grey", source.shape[:2], source.dtype)
    cv2 = opencv()
    cv2.cvtColor(source, cv2.COLOR_RGB2GRAY, dst=grey)
    return grey


def cast_saturated(source: NDArray[Any], target: NDArray[Any]) -> int:
    """Copy with a change of dtype; integers saturate, NaN becomes 0, floats are rounded in place.

    Returns:
        Number of values that were saturated.
    """
    if target.dtype.kind == "f" or np.can_cast(source.dtype, target.dtype):
        np.copyto(target, source, casting="unsafe")
        return 0
    limits = np.iinfo(target.dtype)
    if source.dtype.kind == "f":
        np.rint(source, out=source)
        np.copyto(source, 0, where=np.isnan(source))
    is_outside = source > limits.max
    if source.dtype.kind != "u":
        is_outside |= source < limits.min
    num_saturated = int(np.count_nonzero(is_outside))
    if num_saturated:
        source = np.clip(source, 0 if source.dtype.kind == "u" else limits.min, limits.max)
    np.copyto(target, source, casting="unsafe")
    return num_saturated
