"""What encoded frames say about themselves."""

from __future__ import annotations

import struct

import imagecodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.packing.sources.dicom.decoders import read_jpeg2000_header
from shardflow.packing.sources.dicom.values import read_jpeg_header

pytestmark = pytest.mark.fast

GREY8 = np.arange(35, dtype=np.uint8).reshape(5, 7)
GREY16 = GREY8.astype(np.uint16) * 100
RGB = np.stack([GREY8] * 3, axis=-1)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (imagecodecs.jpeg8_encode(GREY8), (5, 7, 1, 8)),
        (imagecodecs.jpeg8_encode(RGB), (5, 7, 3, 8)),
        (imagecodecs.jpeg8_encode(GREY16, bitspersample=12, lossless=True), (5, 7, 1, 12)),
        (imagecodecs.jpegls_encode(GREY16), (5, 7, 1, 16)),
        (imagecodecs.jpegls_encode(RGB), (5, 7, 3, 8)),
    ],
)
def test_jpeg_and_jpeg_ls(data: bytes, expected: tuple[int, ...]) -> None:
    header = read_jpeg_header(bytes(data))
    assert header is not None
    assert (header.rows, header.columns, header.num_components, header.precision) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (imagecodecs.jpeg2k_encode(GREY16, codecformat="j2k", level=0), (5, 7, 1, 16)),
        (imagecodecs.jpeg2k_encode(RGB, codecformat="jp2", level=0), (5, 7, 3, 8)),
        (imagecodecs.htj2k_encode(GREY16), (5, 7, 1, 16)),
    ],
)
def test_jpeg_2000_bare_and_boxed(data: bytes, expected: tuple[int, ...]) -> None:
    header = read_jpeg2000_header(bytes(data))
    assert header is not None
    assert (header.rows, header.columns, header.num_components, header.precision) == expected


def _segment(marker: int, content: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(content) + 2) + content


def test_colour_markers_are_read() -> None:
    frame = _segment(0xC0, struct.pack(">BHHB", 8, 5, 7, 3) + b"R\x11\0G\x11\0B\x11\0")
    adobe = _segment(0xEE, b"Adobe\0\x64\0\0\0\0\x01")
    header = read_jpeg_header(b"\xff\xd8" + _segment(0xE0, b"JFIF\0") + adobe + b"\xff" + frame)
    assert header is not None
    assert (header.is_jfif, header.adobe_transform, header.component_ids) == (True, 1, b"RGB")


def test_boxes_without_a_length_do_not_hang() -> None:
    signature = b"\x00\x00\x00\x0cjP  \r\n\x87\n"
    assert read_jpeg2000_header(signature + b"\0\0\0\0junk" + b"x" * 20) is None
    assert read_jpeg2000_header(signature + b"\0\0\0\x01junk" + b"x" * 20) is None


@given(st.binary(max_size=80))
def test_garbage_has_no_header(data: bytes) -> None:
    for start in (b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\x4f\xff\x51", b"\x00\x00\x00\x0cjP  "):
        for read in (read_jpeg_header, read_jpeg2000_header):
            header = read(start + data)
            assert header is None or header.num_components >= 0
