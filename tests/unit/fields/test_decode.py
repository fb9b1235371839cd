from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.fields.decode import Scratch, convert_slice, decode_slice
from shardflow.format import encode_array

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(5)


def _deliver(source: NDArray[Any], target: NDArray[Any], *, may_resize: bool = True) -> int:
    """Store a slice and bring it to its place; returns how many pixels were saturated."""
    scratch = Scratch()
    payload = np.frombuffer(encode_array("b2nd", source), np.uint8)
    decoded = decode_slice("b2nd", payload, target, scratch, may_resize=may_resize)
    return 0 if decoded is None else convert_slice(decoded, target, scratch)


def test_a_slice_of_the_right_size_and_type_is_decoded_in_place() -> None:
    source = RNG.integers(-1024, 3071, (32, 20)).astype(np.int16)
    payload = np.frombuffer(encode_array("b2nd", source), np.uint8)
    batch = np.zeros((3, 32, 20), np.int16)
    scratch = Scratch()
    assert decode_slice("b2nd", payload, batch[1], scratch, may_resize=True) is None
    assert (batch[1] == source).all()
    assert not batch[[0, 2]].any()
    assert scratch.num_bytes == 0


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint8", "float32", "int32"])
@pytest.mark.parametrize("target_dtype", ["int16", "float32"])
@pytest.mark.parametrize("shape", [(16, 24), (8, 12), (20, 40), (9, 31)])
def test_sizes_and_types_become_what_opencv_and_rounding_say(
    dtype: str, target_dtype: str, shape: tuple[int, int]
) -> None:
    source = RNG.integers(0, 200, (16, 24)).astype(dtype)
    target = np.zeros((2, *shape), target_dtype)
    assert _deliver(source, target[1]) == 0
    shrunk = (min(shape[1], 24), min(shape[0], 16))
    expected = cv2.resize(source.astype(np.float64), shrunk, interpolation=cv2.INTER_AREA)
    expected = cv2.resize(expected, shape[::-1], interpolation=cv2.INTER_LINEAR)
    # Integers are rounded once, or twice where OpenCV works in integers.
    assert abs(target[1] - expected).max() <= (
        1.01 if target_dtype == "int16" or dtype != "float32" else 1e-3
    )
    assert not target[0].any()


@pytest.mark.parametrize("dtype", ["int16", "uint16", "float32"])
def test_an_axis_that_shrinks_is_averaged_although_the_other_one_grows(dtype: str) -> None:
    """Stripes finer than the result has rows are grey; sampled, they would be a pattern."""
    source = np.zeros((64, 8), dtype)
    source[::2] = 1000
    target = np.zeros((8, 16), np.float32)
    _deliver(source, target)
    assert (target == 500).all()
    turned = np.zeros((16, 8), np.int16)
    _deliver(np.ascontiguousarray(source.T), turned)
    assert (turned == 500).all()


def test_resizing_writes_into_the_batch_and_nowhere_else() -> None:
    batch = np.full((3, 8, 8), 77, np.int16)
    _deliver(np.full((32, 32), 5, np.int16), batch[1])
    assert (batch[1] == 5).all()
    assert (batch[[0, 2]] == 77).all()


def test_what_int16_cannot_hold_is_saturated_and_counted() -> None:
    source = np.array([[0, 32767, 32768, 65535]], np.uint16)
    target = np.zeros((1, 4), np.int16)
    assert _deliver(source, target) == 2
    assert target.tolist() == [[0, 32767, 32767, 32767]]
    source32 = np.array([[-40000, -32768, 5, 40000]], np.int32)
    assert _deliver(source32, target) == 2
    assert target.tolist() == [[-32768, -32768, 5, 32767]]


def test_float_values_are_rounded_and_what_is_no_number_becomes_zero() -> None:
    source = np.array([[1.5, -2.4, np.nan, np.inf, -np.inf]], np.float32)
    target = np.zeros((1, 5), np.int16)
    assert _deliver(source, target) == 2
    assert target.tolist() == [[2, -2, 0, 32767, -32768]]


def test_float32_holds_all_16_bit_values() -> None:
    source = np.array([[0, 65535]], np.uint16)
    target = np.zeros((1, 2), np.float32)
    assert _deliver(source, target) == 0
    assert target.tolist() == [[0, 65535]]


def test_colour_becomes_luminance() -> None:
    source = np.zeros((4, 4, 3), np.uint8)
    source[..., 0] = 100
    target = np.zeros((4, 4), np.int16)
    _deliver(source, target)
    assert (target == 30).all()
    _deliver(np.full((4, 4, 1), 9, np.uint8), target)
    assert (target == 9).all()
    _deliver(np.full((8, 8, 3), 12, np.int16), target)
    assert (target == 12).all()


def test_other_shapes_are_refused() -> None:
    with pytest.raises(FormatError, match="samples per pixel"):
        _deliver(np.zeros((4, 4, 2), np.uint8), np.zeros((4, 4), np.int16))
    with pytest.raises(FormatError, match="samples table"):
        _deliver(np.zeros((4, 5), np.int16), np.zeros((4, 4), np.int16), may_resize=False)


def test_bytes_that_are_no_slice_are_refused() -> None:
    with pytest.raises(FormatError):
        decode_slice("b2nd", np.zeros(100, np.uint8), np.zeros((4, 4), np.int16), Scratch(), may_resize=True)


def test_scratch_memory_is_reused() -> None:
    scratch = Scratch()
    first = scratch.array("slice", (100, 10), np.dtype("int16"))
    again = scratch.array("slice", (10, 10), np.dtype("float32"))
    assert np.shares_memory(first, again)
    assert not np.shares_memory(again, scratch.array("sized", (10, 10), np.dtype("float32")))
    before = scratch.num_bytes
    scratch.array("slice", (100, 10), np.dtype("int16"))
    assert scratch.num_bytes == before
