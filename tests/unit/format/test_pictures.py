"""Pictures and frames that state more than their bytes can hold are refused before anything is decoded."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import blosc2
import cv2
import numpy as np
import pytest
from PIL import Image

from shardflow.errors import FormatError
from shardflow.fields.decode import decode_file
from shardflow.format.codecs import decode_array, decode_field
from shardflow.format.contents.pictures import decode_picture, file_header, picture_size

pytestmark = pytest.mark.fast


def encoded(kind: str, size: tuple[int, int] = (48, 32), mode: str = "L", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size).save(stream, kind, **options)
    return stream.getvalue()


def restated(jpeg: bytes, rows: int, columns: int) -> bytes:
    """Return a JPEG with another size in its header; what is missing is made up as gray."""
    data, at = bytearray(jpeg), 2
    while data[at + 1] not in (0xC0, 0xC2):
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    struct.pack_into(">HH", data, at + 5, rows, columns)
    return bytes(data)


def with_scans(jpeg: bytes, number: int) -> bytes:
    """Return a JPEG with its last scan many times."""
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + scan * number + jpeg[-2:]


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "L", {"optimize": True}),
        ("JPEG", "L", {"progressive": True, "optimize": True}),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 2}),
        ("PNG", "1", {"optimize": True}),
        ("PNG", "I;16", {}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGBA", {}),
    ],
)
def test_an_empty_picture_takes_the_fewest_bytes_and_decodes(
    kind: str, mode: str, options: dict[str, Any]
) -> None:
    data = encoded(kind, (3000, 2000), mode, **options)
    assert picture_size(data) == (2000, 3000)
    assert decode_picture(data, cv2.IMREAD_UNCHANGED, size=(2000, 3000)).shape[:2] == (2000, 3000)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (restated(encoded("JPEG"), 16000, 16000), "must have up to .* got 16000 x 16000 in its header"),
        (
            restated(encoded("JPEG", mode="RGB", progressive=True), 9000, 9000),
            "got 9000 x 9000 in its header",
        ),
        (with_scans(encoded("JPEG", progressive=True), 200), "must have up to 100 scans, got 20"),
        (encoded("BMP"), "must be a JPEG, PNG or WebP"),
        (encoded("TIFF"), "must be a JPEG, PNG or WebP"),
        (encoded("JPEG")[:4], "that states its size"),
    ],
    ids=["gray", "color", "scans", "bmp", "tiff", "head"],
)
@pytest.mark.parametrize(
    "decode",
    [lambda data: decode_field("a.jpg", data), lambda data: decode_file(np.frombuffer(data, np.uint8))],
    ids=["thumbnail", "picture"],
)
def test_a_picture_that_cannot_be_what_it_states_is_refused(
    data: bytes, match: str, decode: Callable[[bytes], object]
) -> None:
    with pytest.raises(FormatError, match=f"{match}|no JPEG or PNG of a known size"):
        decode(data)


def segment(content: bytes) -> bytes:
    """Return metadata of a JPEG."""
    return b"\xff\xe2" + struct.pack(">H", 2 + len(content)) + content


@pytest.mark.parametrize(
    ("inside", "behind"),
    [(segment(b"\xff\xda" * 200), b""), (b"", b"\xff\xda" * 200), (5 * segment(bytes(0xFFF0)), b"")],
    ids=["profile", "video", "header behind 300 KB"],
)
def test_a_picture_with_what_cameras_add_is_read(inside: bytes, behind: bytes) -> None:
    for plain in (encoded("JPEG"), encoded("JPEG", progressive=True)):
        data = plain[:2] + inside + plain[2:] + behind
        assert decode_picture(data, cv2.IMREAD_UNCHANGED, size=(32, 48)).shape == (32, 48)


def test_a_gray_sequential_picture_has_one_scan_that_a_decoder_takes() -> None:
    """Which is why its scans are not counted: that of a second one is an error, or is left out."""
    plain = encoded("JPEG")
    header = file_header(plain)
    assert header is not None
    assert header.has_one_scan
    for several in (encoded("JPEG", progressive=True), encoded("JPEG", mode="RGB"), encoded("PNG")):
        other = file_header(several)
        assert other is not None
        assert not other.has_one_scan


def test_a_header_that_decoders_do_not_see_is_not_believed() -> None:
    """They skip what follows a zero byte up to the next marker, which here is of a comment."""
    gray = encoded("JPEG")
    frame = gray[gray.index(b"\xff\xc0") : gray.index(b"\xff\xc0") + 13]
    comment = b"\xff\xfe" + struct.pack(">H", 2 + len(frame) + 16) + frame + bytes(16)
    rest = with_scans(encoded("JPEG", progressive=True), 200)[2:]
    with pytest.raises(FormatError, match="that states its size"):
        decode_picture(b"\xff\xd8\xff\0\0\x06" + comment + rest, cv2.IMREAD_UNCHANGED)


def test_a_picture_of_another_size_is_refused_before_it_is_decoded() -> None:
    cut = encoded("JPEG")[:-8]
    with pytest.raises(FormatError, match="must have 16 x 48 pixels, got 32 x 48"):
        decode_picture(cut, cv2.IMREAD_UNCHANGED, size=(16, 48))


def zeros(chunks: tuple[int, int], blocks: tuple[int, int]) -> bytes:
    """Return a frame of another writer, of 1 MiB of zeros, which take no bytes."""
    frame = blosc2.zeros((1024, 1024), dtype="u1", chunks=chunks, blocks=blocks, contiguous=True)
    return bytes(frame.to_cframe())


@pytest.mark.parametrize(
    ("chunks", "blocks"), [((1, 1), (1, 1)), ((1024, 1024), (1, 1))], ids=["chunks", "blocks"]
)
def test_a_frame_of_a_million_parts_is_refused(chunks: tuple[int, int], blocks: tuple[int, int]) -> None:
    with pytest.raises(FormatError, match=r"must have up to 2048 blocks, .* got 1048576 blocks"):
        decode_array("b2nd", zeros(chunks, blocks))


def test_frames_of_other_writers_are_read() -> None:
    for chunks, blocks in (((1024, 4), (1024, 4)), ((64, 64), (32, 32)), ((300, 700), (100, 70))):
        assert not decode_array("b2nd", zeros(chunks, blocks)).any()
