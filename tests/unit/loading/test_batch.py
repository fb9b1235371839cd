from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from numpy.typing import NDArray

from shardflow.fields.field import ArraySpec
from shardflow.loading import Batch
from shardflow.loading.batch import SlotKeys
from shardflow.loading.layout import BatchLayout

pytestmark = pytest.mark.fast


def _layout() -> BatchLayout:
    return BatchLayout.of(
        [
            ArraySpec.of("row", np.int64, 2),
            ArraySpec.of("image", np.int16, 2, 3, 4, 5),
            ArraySpec.of("slice_mask", np.uint8, 2, 3),
            ArraySpec.of("report.start", np.int64, 3),
            ArraySpec.of("report.length", np.int64, 2),
            ArraySpec.of("report.data", np.uint8, 7),
            ArraySpec.of("empty", np.float32, 0),
        ]
    )


def _batch() -> Batch:
    layout = _layout()
    buffer = np.zeros(layout.num_bytes, np.uint8)
    arrays = layout.views(buffer)
    arrays["image"][1, 2] = 9
    arrays["slice_mask"][:] = [[1, 0, 0], [1, 1, 1]]
    arrays["report.start"][:] = [0, 4, 7]
    arrays["report.length"][:] = [4, 3]
    arrays["report.data"][:] = np.frombuffer("ja, né".encode(), np.uint8)
    descriptor = {
        "version": 1, "epoch": 2, "step": 3, "micro": 5, "slot": 1, "arrays": layout.to_json(),
        "entries": [{"type": "text", "name": "report"}], "keys": ["a", None], "quarantined": [],
    }  # fmt: skip
    return Batch(buffer, descriptor)


def test_arrays_are_aligned_views_of_one_buffer_and_do_not_overlap() -> None:
    batch = _batch()
    ends = 0
    for name, array in batch.arrays.items():
        if not array.size:
            continue
        assert np.shares_memory(array, batch.buffer), name
        assert array.flags.writeable
        start = array.ctypes.data - batch.buffer.ctypes.data
        assert start % 64 == 0
        assert start >= ends
        ends = start + array.nbytes
    assert ends <= batch.buffer.nbytes


def test_what_is_looked_up_late_is_that_of_the_descriptor() -> None:
    plain, asked = _batch(), []

    def look_up(rows: NDArray[np.int64]) -> NDArray[np.bytes_]:
        asked.append(rows.tolist())
        return np.array([b"a"])

    keys, layout = SlotKeys(look_up, np.array([7, -1])), _layout()
    described = {**plain.descriptor, "keys": None, "arrays": None}
    lazy = Batch(plain.buffer, described, arrays=layout.views(plain.buffer), layout=layout, keys=keys)
    assert lazy.num_slots == 2
    assert asked == []
    assert lazy.sample_keys == ["a", None]
    assert list(lazy.descriptor.items()) == list(plain.descriptor.items())
    assert [keys[0], keys[1]] == ["a", None]
    assert asked == [[7]]


def test_a_batch_is_rebuilt_from_bytes_and_json() -> None:
    batch = _batch()
    descriptor = json.loads(json.dumps(batch.descriptor))
    again = Batch(np.frombuffer(batch.buffer.tobytes(), np.uint8), descriptor)
    assert (again.epoch, again.step, again.micro, again.slot, again.sample_keys) == (2, 3, 5, 1, ["a", None])
    assert again.num_slots == 2
    for name, array in batch.arrays.items():
        assert again.arrays[name].dtype == array.dtype
        assert np.array_equal(again.arrays[name], array)


def test_a_batch_says_what_it_holds() -> None:
    assert "report list" in repr(_batch())
    assert _batch()["report"] == ["ja, ", "né"]


def test_a_copy_that_crosses_a_process_boundary_is_the_same_batch() -> None:
    plain, layout = _batch(), _layout()
    described = {**plain.descriptor, "keys": None, "arrays": None}
    keys = SlotKeys(lambda _: np.array([b"a"]), np.array([7, -1]))
    lazy = Batch(plain.buffer, described, arrays=layout.views(plain.buffer), layout=layout, keys=keys)
    again = pickle.loads(pickle.dumps(lazy))
    assert again.descriptor == plain.descriptor
    for name, array in again.arrays.items():
        assert np.shares_memory(array, again.buffer) or not array.size
        assert np.array_equal(array, plain.arrays[name])
