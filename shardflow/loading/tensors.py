"""Tensors of arrays: without a copy on the CPU, through pinned memory on a GPU.

All arrays travel in one copy: they are laid out in a region of pinned memory, the region is copied on a
stream of its own while the device still computes, and the tensors are views of the result.

Pinned memory is a ring of fixed size. A region belongs to one copy and is free again once the device has
passed the copy's event. A request for more than is free waits for the oldest copy, never for the newest. The
operating system cannot page pinned memory out, so its size is a setting, not a consequence of the load; a
micro-batch larger than the ring gets memory of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.field import Arrays, ArraySpec
from shardflow.loading.layout import BatchLayout

Device: TypeAlias = torch.device | str | int | None
"""A device as torch takes it; None for the CPU."""
_ALIGNMENT: Final = 512  # fast for device copies, and a multiple of every array's own alignment
_RING_BYTES: Final = 256 << 20
"""Pinned memory for batches that users move, per process and GPU; taken with the first one."""


class Mark(Protocol):
    """A point in a device's work, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


@dataclass(slots=True, eq=False)
class Region:
    """A piece of pinned memory that one copy reads from."""

    memory: torch.Tensor
    """``(num_bytes,)`` uint8."""
    start: int
    """Its first byte in the ring."""
    stop: int
    mark: Mark | None = None
    """Set once the copy is under way; the region is free when the device has passed it."""


class PinnedRing:
    """Ring of ``num_bytes`` of pinned memory that lends regions; used by one thread.

    Args:
        num_bytes: Size of the ring; taken with the first region.
        allocate: Returns pinned memory, ``(num_bytes,)`` uint8.

    Attributes:
        num_waits: How often a region had to wait for an older copy: if often, the ring is too small.

    Raises:
        ConfigError: ``num_bytes`` is not positive.
    """

    def __init__(self, num_bytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        if num_bytes < 1:
            raise ConfigError(f"the pinned ring must have at least 1 byte, got {num_bytes}.")
        self.num_waits = 0
        self._num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._allocate = allocate
        self._memory: torch.Tensor | None = None
        self._lent: deque[Region] = deque()
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Pinned memory of the ring; 0 before the first region."""
        return 0 if self._memory is None else self._num_bytes

    @property
    def num_lent(self) -> int:
        """Regions whose copy is not known to be done."""
        return len(self._lent)

    def lend(self, num_bytes: int) -> Region:
        """Lend a region that nothing else reads or writes until its mark is passed.

        Args:
            num_bytes: Its size.

        Raises:
            ConfigError: The newest region has got no mark: its copy was never started.
        """
        if self._lent and self._lent[-1].mark is None:
            raise ConfigError("a region must be marked before the next one is lent, got one without a mark.")
        size = max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        if size > self._num_bytes:
            # Alone: not beside a ring full of other copies.
            while self._lent:
                self._take_back_oldest()
            return Region(self._allocate(num_bytes), 0, 0)
        if self._memory is None:
            self._memory = self._allocate(self._num_bytes)
        while self._lent and self._is_passed(self._lent[0]):
            self._lent.popleft()
        start = self._next if self._next + size <= self._num_bytes else 0
        while any(region.start < start + size and start < region.stop for region in self._lent):
            self._take_back_oldest()
        region = Region(self._memory[start : start + num_bytes], start, start + size)
        self._lent.append(region)
        self._next = start + size
        return region

    def _take_back_oldest(self) -> None:
        region = self._lent.popleft()
        if region.mark is not None and not region.mark.query():
            self.num_waits += 1
            region.mark.synchronize()

    @staticmethod
    def _is_passed(region: Region) -> bool:
        return region.mark is not None and region.mark.query()


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A micro-batch's tensors on their way."""

    tensors: dict[str, torch.Tensor]
    flat: torch.Tensor | None = None
    """The one piece of device memory that all of them are views of; None where nothing was copied."""
    started: Any = None
    arrived: Any = None
    """Events around the copy."""


class CudaCopies:
    """Copies of arrays to a GPU through a pinned ring, on a stream of their own; used by one thread.

    Args:
        device: The GPU.
        ring_bytes: Pinned memory.

    Attributes:
        ring: The pinned memory.
    """

    def __init__(self, device: torch.device, ring_bytes: int) -> None:
        self.ring = PinnedRing(ring_bytes, pinned)
        self._device = device
        self._stream: torch.cuda.Stream = _stream(device)

    def pin(self, arrays: Arrays, layout: BatchLayout) -> Region:
        """Copy arrays into pinned memory; they may be overwritten or freed as soon as this returns."""
        region = self.ring.lend(layout.num_bytes)
        for name, place in layout.views(region.memory.numpy()).items():
            np.copyto(place, arrays[name])
        return region

    def start(self, region: Region, layout: BatchLayout) -> Parcel:
        """Begin the copy of a region, which keeps its pinned memory until the device is done with it."""
        started, arrived = self.event(), self.event()
        with torch.cuda.stream(self._stream):
            started.record(self._stream)
            # Memory of the copy stream's own: no computation that is still under way can be using it.
            flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
            flat.copy_(region.memory, non_blocking=True)
            arrived.record(self._stream)
        region.mark = arrived
        return Parcel(tensors_of(flat, layout), flat, started, arrived)

    def receive(self, parcel: Parcel) -> dict[str, torch.Tensor]:
        """Return the tensors, for use on the current stream, which waits for the copy; the host does not."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(parcel.arrived)
        if parcel.flat is not None:
            # Freed by the loop, the memory may go to the next copy only when this stream is done with it.
            parcel.flat.record_stream(stream)
        return parcel.tensors

    @staticmethod
    def event() -> torch.cuda.Event:
        """Return an event that measures time."""
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event


def to_tensors(
    entries: Mapping[str, Any], device: Device = None, *, pin_memory: bool | None = None
) -> dict[str, Any]:
    """Return entries with tensors in place of numeric arrays; see `shardflow.loading.Batch.torch`.

    Raises:
        ConfigError: There is no such device, or no pinned memory without a GPU.
    """
    target = _device_of(device)
    found: dict[str, NDArray[Any]] = {}
    taken = {name: _take_arrays(value, name, found) for name, value in entries.items()}
    if target.type == "cuda" and pin_memory is not False:
        tensors = _copy_pinned(found, target)
    elif pin_memory and target.type == "cpu":
        tensors = _pin(found)
    else:
        tensors = {name: tensor_of(array).to(target) for name, array in found.items()}
    return {name: _put_tensors(value, tensors, target) for name, value in taken.items()}


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor that shares its memory; one that torch cannot share is copied.

    Those are arrays that nobody may write to, and arrays with negative strides.
    """
    is_plain = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if is_plain else array.copy())


def layout_of(arrays: Arrays) -> BatchLayout:
    """Lay arrays out in one buffer, in their order."""
    return BatchLayout.of([ArraySpec(name, array.dtype, array.shape) for name, array in arrays.items()])


def tensors_of(flat: torch.Tensor, layout: BatchLayout) -> dict[str, torch.Tensor]:
    """Return the arrays of a layout as views of one piece of memory, ``(num_bytes,)`` uint8."""
    return {
        spec.name: flat[offset : offset + spec.num_bytes].view(_torch_dtype(spec.dtype)).view(spec.shape)
        for spec, offset in zip(layout.arrays, layout.offsets, strict=True)
    }


def pinned(num_bytes: int) -> torch.Tensor:
    """Return pinned memory, ``(num_bytes,)`` uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class _Place(str):
    """Where in the entries an array was: the name that its tensor has."""

    __slots__ = ()


def _take_arrays(value: Any, name: str, found: dict[str, NDArray[Any]]) -> Any:
    """Return an entry with a `_Place` for each numeric array in its lists, and put those into ``found``."""
    if isinstance(value, np.ndarray):
        native = value.dtype.newbyteorder("=")
        if native.kind not in "biufc" or native.char in "gG":  # of text, or wider than torch has
            return value
        found[name] = value.astype(native, copy=False)
        return _Place(name)
    if isinstance(value, list):
        return [_take_arrays(one, f"{name}.{place}", found) for place, one in enumerate(value)]
    return value


def _put_tensors(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    match value:
        case _Place():
            return tensors[value]
        case torch.Tensor():
            return value.to(device, non_blocking=True)
        case list():
            return [_put_tensors(one, tensors, device) for one in value]
    return value


def _device_of(device: Device) -> torch.device:
    try:
        found = torch.device("cpu" if device is None else device)
    except RuntimeError:
        raise ConfigError(f"torch has no device {device!r}; write for example 'cuda' or 'cuda:1'.") from None
    if found.type != "cuda":
        return found
    number = torch.cuda.device_count()
    if not number or (found.index or 0) >= number:
        raise ConfigError(
            f"the device {device!r} is none of the {number} GPUs that torch sees; leave it out for the CPU."
        )
    index: int | None = found.index  # None without a number, which torch's stubs do not know
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _pin(arrays: Arrays) -> dict[str, torch.Tensor]:
    if not torch.cuda.device_count():
        raise ConfigError("pin_memory=True needs a GPU to pin memory for, and torch sees none here.")
    layout = layout_of(arrays)
    flat = pinned(layout.num_bytes)
    for name, place in layout.views(flat.numpy()).items():
        np.copyto(place, arrays[name])
    return tensors_of(flat, layout)


_lock = threading.Lock()


def _copy_pinned(arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
    layout = layout_of(arrays)
    with _lock:  # a ring has one user at a time
        copies = _copies_to(device)
        parcel = copies.start(copies.pin(arrays, layout), layout)
    return copies.receive(parcel)


@cache
def _copies_to(device: torch.device) -> CudaCopies:
    return CudaCopies(device, _RING_BYTES)


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
