"""Transfer of micro-batches to the device, and how long the device waits for them.

On a GPU they go through pinned memory (`shardflow.loading.tensors.CudaCopies`). On CPUs the tensors are the
arrays: nothing is copied, and the loader keeps the memory until they are gone.

The wait is measured where it happens. On a device two events are in the computing stream: one where the loop
asked for the micro-batch, one after the copy. The device reaches the first when it has nothing left to do, so
the time between them is idle time. On CPUs the loop itself waits.
"""

from __future__ import annotations

import time

import torch

from shardflow.fields.field import Arrays
from shardflow.loading.tensors import CudaCopies, Parcel, layout_of, tensor_of
from shardflow.telemetry import StageCounters


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
        return Parcel({name: tensor_of(array) for name, array in arrays.items()})

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
        self._copies = CudaCopies(device, ring_bytes)
        self._asked: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._sent: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []

    def ask(self) -> None:
        """See `Transfer.ask`."""
        self._asked = CudaCopies.event()
        self._asked.record(torch.cuda.current_stream(self._device))

    def got(self) -> None:
        """See `Transfer.got`."""
        if self._asked is not None:
            reached = CudaCopies.event()
            reached.record(torch.cuda.current_stream(self._device))
            self._waits.append((self._asked, reached))
            self._asked = None

    def send(self, arrays: Arrays) -> Parcel:
        """See `Transfer.send`."""
        layout = layout_of(arrays)
        with self._counters.timed("pin", layout.num_bytes):
            region = self._copies.pin(arrays, layout)
        parcel = self._copies.start(region, layout)
        self._sent.append((parcel.started, parcel.arrived, layout.num_bytes))
        self._counters.observe("pinned_regions", self._copies.ring.num_lent)
        return parcel

    def receive(self, parcel: Parcel) -> dict[str, torch.Tensor]:
        """See `Transfer.receive`."""
        tensors = self._copies.receive(parcel)
        self.got()
        return tensors

    @property
    def pinned_bytes(self) -> int:
        """See `Transfer.pinned_bytes`."""
        return self._copies.ring.num_bytes

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


def open_transfer(device: torch.device, *, ring_bytes: int, counters: StageCounters) -> Transfer:
    """Return the transfer of micro-batches to a device."""
    if device.type == "cuda":
        return CudaTransfer(device, ring_bytes=ring_bytes, counters=counters)
    return Transfer(counters, device)


def _is_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
