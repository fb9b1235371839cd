"""Stored integers mean the values they came from, and their bytes decode to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydicom.pixels.decoders import RLELosslessDecoder
from pydicom.uid import RLELossless

from shardflow.synthetic.instances import pixel_bytes, rle_frame, store
from shardflow.synthetic.study import Encoding

pytestmark = pytest.mark.fast

VALUES = np.array([[-1024.0, -1000.4, -0.5], [0.0, 39.6, 3071.0]], dtype=np.float32)


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        (Encoding(bits_stored=12, intercept="-1024"), [[0, 24, 1024], [1024, 1064, 4095]]),
        (Encoding(bits_stored=16, is_signed=True), [[-1024, -1000, 0], [0, 40, 3071]]),
        (Encoding(bits_stored=12, is_signed=True), [[-1024, -1000, 0], [0, 40, 2047]]),
        (Encoding(bits_stored=16, slope="0.5", intercept="-1024.0"), [[0, 47, 2047], [2048, 2127, 8190]]),
        (Encoding(bits_stored=12, slope=None), [[0, 0, 0], [0, 40, 3071]]),
    ],
)
def test_values_are_rounded_to_what_the_encoding_can_say(
    encoding: Encoding, expected: list[list[int]]
) -> None:
    stored = store(VALUES.copy(), encoding, full_scale=False)
    assert stored.dtype == (np.int16 if encoding.is_signed else np.uint16)
    assert stored.tolist() == expected


def test_radiographs_fill_the_range_and_can_be_inverse() -> None:
    values = np.array([[0.0, 0.25, 1.0]], dtype=np.float32)
    assert store(values.copy(), Encoding(bits_stored=10), full_scale=True).tolist() == [[0, 256, 1023]]
    inverse = Encoding(bits_stored=10, photometric="MONOCHROME1")
    assert store(values.copy(), inverse, full_scale=True).tolist() == [[1023, 767, 0]]


def test_padding_lies_outside_the_circle() -> None:
    encoding = Encoding(bits_stored=16, is_signed=True, padding=-2000)
    stored = store(np.zeros((32, 32), np.float32), encoding, full_scale=False)
    assert stored[0, 0] == stored[31, 31] == -2000
    assert stored[16, 0] == stored[16, 16] == 0


@pytest.mark.parametrize("is_signed", [False, True])
def test_high_bits_do_not_touch_those_that_count(is_signed: bool) -> None:
    plain = Encoding(bits_stored=12, is_signed=is_signed)
    values = np.arange(-500, 524, dtype=np.float32).reshape(32, 32)
    clean = store(values.copy(), plain, full_scale=False)
    spoiled = store(
        values.copy(), Encoding(bits_stored=12, is_signed=is_signed, has_high_bits=True), full_scale=False
    )
    assert (spoiled.view(np.uint16) >> 12).any()
    low = (spoiled.view(np.uint16) & 0xFFF).astype(np.int32)
    restored = np.where(low >= 2048, low - 4096, low) if is_signed else low
    assert np.array_equal(restored, clean)


def test_native_bytes_are_in_the_order_asked_for() -> None:
    stored = np.array([[1, 256, 3]], dtype=np.uint16)
    assert pixel_bytes(stored, big_endian=False) == b"\x01\x00\x00\x01\x03\x00"
    assert pixel_bytes(stored, big_endian=True) == b"\x00\x01\x01\x00\x00\x03"


# pydicom suspects any frame that happens to be as long as it would be without compression.
@pytest.mark.filterwarnings("ignore:The number of bytes of compressed pixel data:UserWarning")
@given(
    arrays(
        np.uint16,
        st.tuples(st.integers(1, 9), st.integers(1, 300)),
        elements=st.sampled_from([0, 1, 257, 65535]),
    )
)
def test_run_length_frames_decode_to_what_was_encoded(pixels: np.ndarray) -> None:
    check_frame(pixels)


@pytest.mark.parametrize("width", [2, 3, 127, 128, 129, 130, 131, 256, 257, 258])
def test_long_runs_and_long_stretches_are_cut_into_packets(width: int) -> None:
    check_frame(np.zeros((3, width), np.uint16))
    check_frame(np.tile(np.arange(width, dtype=np.uint16), (3, 1)))


def check_frame(pixels: np.ndarray) -> None:
    frame = rle_frame(pixels)
    decoded, _ = RLELosslessDecoder.as_array(
        frame_holder(frame),
        decoding_plugin="pydicom",
        transfer_syntax_uid=RLELossless,
        rows=pixels.shape[0],
        columns=pixels.shape[1],
        samples_per_pixel=1,
        bits_allocated=16,
        bits_stored=16,
        pixel_representation=0,
        photometric_interpretation="MONOCHROME2",
        number_of_frames=1,
        pixel_keyword="PixelData",
    )
    assert np.array_equal(decoded, pixels)


def frame_holder(frame: bytes) -> bytes:
    """Encapsulate one frame."""
    offsets = b"\xfe\xff\x00\xe0\x00\x00\x00\x00"
    item = b"\xfe\xff\x00\xe0" + len(frame).to_bytes(4, "little") + frame
    return offsets + item + b"\xfe\xff\xdd\xe0\x00\x00\x00\x00"
