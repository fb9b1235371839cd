"""Transfer of micro-batches to the device through pinned memory, and how long the device waits for them.

All arrays of a micro-batch travel in one copy: they are laid out in a region of pinned memory, the region is
copied on a stream of its own while the device still computes, and the tensors are views of the result. On
CPUs the tensors are the arrays: nothing is copied, and the loader keeps the memory until they are gone.

Pinned memory is a ring of fixed size. A region belongs to one copy and is free again once the device has
passed the copy's event. A request for more than is free waits for the oldest copy, never for the newest. The
operating system cannot page pinned memory out, so its size is a setting, not a consequence of the load; a
micro-batch larger than the ring gets memory of its own.

The wait is measured where it happens. On a device two events are in the computing stream: one where the loop
asked for the micro-batch, one after the copy. The device reaches the first when it has nothing left to do, so
the time between them is idle time. On CPUs the loop itself waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.views import ArraySpec
from shardflow.loading.batch import BatchLayout
from shardflow.telemetry import StageCounters

_ALIGNMENT = 512  # fast for device copies, and a multiple of every array's own alignment


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


Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A micro-batch's tensors on their way."""

    tensors: dict[str, torch.Tensor]
    flat: torch.Tensor | None = None
    """The one piece of device memory that all of them are views of; None where nothing was copied."""
    started: Any = None
    arrived: Any = None
    """Events around the copy."""


class Transfer:
    """Transfer of arrays to where the model computes; this one is for models on the CPU.

    Their tensors are the arrays. A device without a ring of its own gets copies.

    Args:
        counters: Gets the stage ``data_wait``.
        device: Where the tensors are wanted.
    """

    def __init__(self, counters: StageCounters, device: torch.device | None = None) -> None:
        self._counters = counters
        self._device = device or torch.device("cpu")
        self._asked_s: float | None = None
        self._wait_s = 0.0

    def ask(self) -> None:
        """Begin a data wait: the loop needs the next micro-batch now."""
        self._asked_s = time.perf_counter()

    def got(self) -> None:
        """End the wait that `ask` began, though nothing was received yet."""
        if self._asked_s is not None:
            waited_s = time.perf_counter() - self._asked_s
            self._wait_s += waited_s
            self._counters.add("data_wait", waited_s, 0, 1)
            self._asked_s = None

    def send(self, arrays: Arrays) -> Parcel:
        """Begin to move arrays, by name, of any shapes and of dtypes that torch has.

        On a device they may be overwritten or freed as soon as this returns; on the CPU the tensors share
        their memory and keep it alive.
        """
        return Parcel({name: torch.from_numpy(_plain(array)) for name, array in arrays.items()})

    def receive(self, parcel: Parcel) -> dict[str, torch.Tensor]:
        """Return the tensors, for use on the current stream; the wait that `ask` began ends here."""
        self.got()
        return {name: tensor.to(self._device) for name, tensor in parcel.tensors.items()}

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory that is held."""
        return 0

    def drain(self) -> float:
        """Return the seconds that the loop or the device waited since the last call.

        On a device this waits for the newest micro-batch to arrive: call it where the step has waited for the
        device anyway.
        """
        waited_s, self._wait_s = self._wait_s, 0.0
        return waited_s


class CudaTransfer(Transfer):
    """Transfer for models on a GPU: one copy a micro-batch, on a stream of its own.

    Args:
        device: The GPU.
        ring_bytes: Pinned memory.
        counters: Gets the stages ``pin`` (into pinned memory, and waiting for room there), ``copy`` (on the
            copy stream) and ``data_wait`` (the compute stream had nothing to do), and the gauge
            ``pinned_regions``.
    """

    def __init__(self, device: torch.device, *, ring_bytes: int, counters: StageCounters) -> None:
        super().__init__(counters, device)
        self._copies: torch.cuda.Stream = _stream(device)
        self._ring = PinnedRing(ring_bytes, _pinned)
        self._asked: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._sent: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []

    def ask(self) -> None:
        """See `Transfer.ask`."""
        self._asked = self._event()
        self._asked.record(torch.cuda.current_stream(self._device))

    def got(self) -> None:
        """See `Transfer.got`."""
        if self._asked is not None:
            reached = self._event()
            reached.record(torch.cuda.current_stream(self._device))
            self._waits.append((self._asked, reached))
            self._asked = None

    def send(self, arrays: Arrays) -> Parcel:
        """See `Transfer.send`."""
        layout = _layout(arrays)
        with self._counters.timed("pin", layout.num_bytes):
            region = self._ring.lend(layout.num_bytes)
            for name, place in layout.views(region.memory.numpy()).items():
                np.copyto(place, arrays[name])
        started, arrived = self._event(), self._event()
        with torch.cuda.stream(self._copies):
            started.record(self._copies)
            # Memory of the copy stream's own: no computation that is still under way can be using it.
            flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
            flat.copy_(region.memory, non_blocking=True)
            arrived.record(self._copies)
        region.mark = arrived
        self._sent.append((started, arrived, layout.num_bytes))
        self._counters.observe("pinned_regions", self._ring.num_lent)
        return Parcel(_tensors(flat, layout), flat, started, arrived)

    def receive(self, parcel: Parcel) -> dict[str, torch.Tensor]:
        """See `Transfer.receive`."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(parcel.arrived)
        if parcel.flat is not None:
            # Freed by the loop, the memory may go to the next copy only when this stream is done with it.
            parcel.flat.record_stream(stream)
        self.got()
        return parcel.tensors

    @property
    def pinned_bytes(self) -> int:
        """See `Transfer.pinned_bytes`."""
        return self._ring.num_bytes

    def drain(self) -> float:
        """See `Transfer.drain`."""
        total_s = 0.0
        for asked, reached in self._waits:
            reached.synchronize()
            waited_s = asked.elapsed_time(reached) / 1000
            self._counters.add("data_wait", waited_s, 0, 1)
            total_s += waited_s
        self._waits.clear()
        while self._sent and _is_passed(self._sent[0][1]):
            started, arrived, num_bytes = self._sent.pop(0)
            self._counters.add("copy", started.elapsed_time(arrived) / 1000, num_bytes, 1)
        return total_s

    @staticmethod
    def _event() -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return event


def open_transfer(device: torch.device, *, ring_bytes: int, counters: StageCounters) -> Transfer:
    """Return the transfer of micro-batches to a device."""
    if device.type == "cuda":
        return CudaTransfer(device, ring_bytes=ring_bytes, counters=counters)
    return Transfer(counters, device)


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _is_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _layout(arrays: Arrays) -> BatchLayout:
    return BatchLayout.of([ArraySpec(name, array.dtype, array.shape) for name, array in arrays.items()])


def _tensors(flat: torch.Tensor, layout: BatchLayout) -> dict[str, torch.Tensor]:
    """Return the arrays of a layout as views of one piece of device memory."""
    return {
        spec.name: flat[offset : offset + spec.num_bytes].view(_torch_dtype(spec.dtype)).view(spec.shape)
        for spec, offset in zip(layout.arrays, layout.offsets, strict=True)
    }


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that torch takes without a warning; only one that nobody may write to is copied."""
    return array if array.flags.writeable else array.copy()
