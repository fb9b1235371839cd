"""On CPUs nothing is copied and the loop's wait is counted; what a GPU does is in tests/gpu."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardflow.loading.tensors import layout_of, tensors_of
from shardflow.telemetry import StageCounters
from shardflow.training.device.transfer import Transfer, open_transfer

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


def test_tensors_are_the_arrays() -> None:
    arrays: dict[str, Array] = {
        "image": np.arange(12, dtype=np.int16).reshape(3, 4),
        "mask": np.ones(3, np.uint8),
    }
    transfer = Transfer(StageCounters())
    tensors = transfer.receive(transfer.send(arrays))
    arrays["image"][1, 1] = 99
    assert tensors["image"][1, 1] == 99
    assert tensors["image"].dtype == torch.int16
    assert list(tensors) == ["image", "mask"]


def test_an_array_that_nobody_may_write_to_is_copied() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    tensors = Transfer(StageCounters()).send({"row": array}).tensors
    tensors["row"][0] = 7  # would be a fault in read-only memory
    assert array[0] == 0


def test_the_wait_is_from_asking_to_receiving_and_is_drained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr("shardflow.training.device.transfer.time.perf_counter", lambda: next(clock))
    counters = StageCounters()
    transfer = Transfer(counters)
    transfer.ask()
    parcel = transfer.send({"row": np.zeros(1)})
    transfer.receive(parcel)
    transfer.receive(parcel)  # nobody asked: it was there already
    transfer.ask()
    transfer.got()
    assert transfer.drain() == 3.5
    assert transfer.drain() == 0.0
    totals = counters.totals("data_wait")
    assert (totals.seconds, totals.num_items) == (3.5, 2)


def test_a_flat_copy_is_cut_into_the_same_arrays() -> None:
    """What a GPU gets is one piece of memory; the views of it must be the arrays that went in."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "image": generator.integers(-2000, 3000, (2, 3, 4, 5)).astype(np.int16),
        "mask": generator.integers(0, 2, (2, 3)).astype(np.uint8),
        "wide": generator.integers(0, 65536, (7,)).astype(np.uint16),
        "range": generator.random((2, 2)).astype(np.float32),
        "rows": generator.integers(0, 9, (1, 3)),
        "none": np.zeros((0, 4), np.float32),
        "flag": np.array([[True, False]]),
    }
    layout = layout_of(arrays)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, place in layout.views(flat.numpy()).items():
        np.copyto(place, arrays[name])
    tensors = tensors_of(flat, layout)
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape, name
        assert np.array_equal(tensors[name].numpy(), array), name


def test_a_cpu_gets_no_copies() -> None:
    transfer = open_transfer(torch.device("cpu"), ring_bytes=1 << 40, counters=StageCounters())
    assert isinstance(transfer, Transfer)
