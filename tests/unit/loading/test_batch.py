from __future__ import annotations

import json

import numpy as np
import pytest

from shardflow.fields.views import ArraySpec
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
            ArraySpec.of("text_offsets", np.int64, 3),
            ArraySpec.of("text_bytes", np.uint8, 7),
            ArraySpec.of("empty", np.float32, 0),
        ]
    )


def _batch() -> Batch:
    layout = _layout()
    buffer = np.zeros(layout.num_bytes, np.uint8)
    arrays = layout.views(buffer)
    arrays["image"][1, 2] = 9
    arrays["slice_mask"][:] = [[1, 0, 0], [1, 1, 1]]
    arrays["text_offsets"][:] = [0, 4, 7]
    arrays["text_bytes"][:] = np.frombuffer("ja, né".encode(), np.uint8)
    descriptor = {
        "version": 1, "epoch": 2, "step": 3, "micro": 5, "slot": 1, "arrays": layout.to_json(),
        "keys": ["a", None], "quarantined": [],
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


def test_keys_kept_as_bytes_are_those_of_the_descriptor() -> None:
    plain = _batch()
    keys = SlotKeys(np.array([b"a"]), np.array([True, False]))
    lazy = Batch(plain.buffer, {**plain.descriptor, "keys": None}, keys=keys)
    assert lazy.num_slots == 2
    assert lazy.sample_keys == ["a", None]
    assert list(lazy.descriptor.items()) == list(plain.descriptor.items())
    assert [keys[0], keys[1]] == ["a", None]


def test_a_batch_is_rebuilt_from_bytes_and_json() -> None:
    batch = _batch()
    descriptor = json.loads(json.dumps(batch.descriptor))
    again = Batch(np.frombuffer(batch.buffer.tobytes(), np.uint8), descriptor)
    assert (again.epoch, again.step, again.micro, again.slot, again.sample_keys) == (2, 3, 5, 1, ["a", None])
    assert again.num_slots == 2
    for name, array in batch.arrays.items():
        assert again.arrays[name].dtype == array.dtype
        assert np.array_equal(again.arrays[name], array)


def test_texts_and_slices_of_a_slot() -> None:
    batch = _batch()
    assert [batch.text(0), batch.text(1)] == ["ja, ", "né"]
    assert batch.image(0).shape == (1, 4, 5)
    assert batch.image(1).shape == (3, 4, 5)
    assert (batch.image(1)[2] == 9).all()
    assert "image [2, 3, 4, 5] int16" in repr(batch)


def test_a_native_image_is_put_together() -> None:
    layout = BatchLayout.of(
        [
            ArraySpec.of("pixels", np.int16, 20),
            ArraySpec.of("pixel_start", np.int64, 2),
            ArraySpec.of("image_shape", np.int64, 2, 3),
        ]
    )
    buffer = np.zeros(layout.num_bytes, np.uint8)
    arrays = layout.views(buffer)
    arrays["pixels"][:] = np.arange(20)
    arrays["pixel_start"][:] = [0, 8]
    arrays["image_shape"][:] = [[2, 2, 2], [0, 3, 3]]
    batch = Batch(buffer, {"arrays": layout.to_json(), "keys": ["a", "b"]})
    assert batch.image(0).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert batch.image(1).shape == (0, 3, 3)
