"""In which order the GPU's side asks for things; streams and events are stand-ins that write it down.

What a real device makes of it is in tests/gpu.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shardflow.loading import tensors as module
from shardflow.telemetry import StageCounters
from shardflow.training.device.transfer import CudaTransfer


class Log:
    """What was asked of the device, in order, and a clock that its events read."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now_ms = 0.0
        self.current: Stream | None = None


class Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Event) -> None:
        self.log.lines.append(f"{self.name} waits for {event.where}")


class Event:
    def __init__(self, log: Log) -> None:
        self.log, self.where, self.time_ms = log, "", 0.0
        self.is_passed = False

    def record(self, stream: Stream) -> None:
        self.where, self.time_ms = f"event on {stream.name}", self.log.now_ms
        self.log.lines.append(self.where)

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.is_passed = True
        self.log.lines.append("host waits")

    def elapsed_time(self, later: Event) -> float:
        return later.time_ms - self.time_ms


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    compute = Stream(log, "compute")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.lines.append(f"on {stream.name}:")
        log.current = stream
        yield
        log.current = None
        log.lines.append("end")

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        log.lines.append(f"memory is used by {stream.name}")

    def empty(*sizes: Any, **settings: Any) -> torch.Tensor:
        if log.current is not None:
            log.lines.append(f"memory of {log.current.name}")
        return real_empty(*sizes, **settings)

    real_empty = torch.empty
    monkeypatch.setattr(module, "_stream", lambda device: Stream(log, "copies"))
    monkeypatch.setattr(module, "pinned", lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    monkeypatch.setattr(module.CudaCopies, "event", staticmethod(lambda: Event(log)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(torch, "empty", empty)
    return log


def open_transfer(counters: StageCounters | None = None, ring_bytes: int = 4096) -> CudaTransfer:
    return CudaTransfer(torch.device("cpu"), ring_bytes=ring_bytes, counters=counters or StageCounters())


def test_a_copy_is_made_and_marked_on_its_own_stream_and_awaited_by_the_computing_one(log: Log) -> None:
    transfer = open_transfer()
    parcel = transfer.send({"image": np.arange(6, dtype=np.int16)})
    assert log.lines == [
        "on copies:", "event on copies", "memory of copies", "event on copies", "end",
    ]  # fmt: skip
    log.lines.clear()
    tensors = transfer.receive(parcel)
    assert log.lines == ["compute waits for event on copies", "memory is used by compute"]
    assert tensors["image"].tolist() == list(range(6))


def test_the_host_may_write_over_its_arrays_once_they_were_sent(log: Log) -> None:
    transfer = open_transfer()
    image = np.arange(6, dtype=np.int16)
    parcel = transfer.send({"image": image})
    image[:] = -1
    assert transfer.receive(parcel)["image"].tolist() == list(range(6))


def test_a_region_is_lent_again_only_when_its_copy_is_passed(log: Log) -> None:
    transfer = open_transfer(ring_bytes=1024)
    for number in range(2):
        transfer.send({"image": np.full(200, number, np.int16)})
    assert "host waits" not in log.lines
    transfer.send({"image": np.full(200, 2, np.int16)})
    assert log.lines.count("host waits") == 1


def test_the_wait_is_what_lies_between_asking_and_the_end_of_the_copy(log: Log) -> None:
    counters = StageCounters()
    transfer = open_transfer(counters)
    log.now_ms = 1000.0
    transfer.ask()
    log.now_ms = 1200.0
    parcel = transfer.send({"row": np.zeros(2)})
    log.now_ms = 1250.0
    transfer.receive(parcel)
    log.now_ms = 2000.0
    transfer.ask()
    log.now_ms = 2010.0
    transfer.got()
    transfer.got()  # nobody asked
    assert parcel.arrived is not None
    assert transfer.drain() == pytest.approx(0.26)
    assert transfer.drain() == 0.0
    assert counters.totals("data_wait").num_items == 2
    assert counters.totals("copy").num_items == 0  # not known to be over
    parcel.arrived.is_passed = True
    transfer.drain()
    assert (counters.totals("copy").num_items, counters.totals("copy").num_bytes) == (1, 64)


def test_a_batch_of_any_entries_goes_in_one_copy_that_the_computing_stream_awaits(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    copies = module.CudaCopies(torch.device("cpu"), 4096)
    monkeypatch.setattr(module, "_copies_to", lambda device: copies)
    image = np.arange(6, dtype=np.uint16).reshape(2, 3)
    entries = {"image": image, "views": [image[:1], None], "report": ["a", "b"]}
    tensors = module.to_tensors(entries, "cuda")
    assert log.lines == [
        "on copies:", "event on copies", "memory of copies", "event on copies", "end",
        "compute waits for event on copies", "memory is used by compute",
    ]  # fmt: skip
    image[:] = 0  # the batch may be gone
    assert tensors["image"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["image"].dtype == torch.uint16
    assert tensors["views"][0].tolist() == [[0, 1, 2]]
    assert tensors["views"][1] is None
    assert tensors["report"] == ["a", "b"]
