"""PNG and JPEG: sizes before pixels, whole files only, values as stored."""

from __future__ import annotations

import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.pixels import form_of, iter_slices
from shardflow.packing.sources.images import iter_stored_image, read_image
from shardflow.packing.sources.placement import Placement
from tests.layout_trees import picture, write_png

pytestmark = pytest.mark.fast


def _placement(*, is_gray: bool = False) -> Placement:
    return Placement(
        form="raster", patient="p", study="s", series="e", instance="i", attributes={}, is_gray=is_gray
    )


def _decode(path: Path, *, is_gray: bool = False) -> NDArray[Any]:
    header = read_image(path, _placement(is_gray=is_gray), limits=HeaderLimits())
    (decoded,) = iter_slices(path, header, read=iter_stored_image)  # type: ignore[arg-type]
    assert decoded.pixels.shape[:2] == (header.image.rows, header.image.columns)  # type: ignore[union-attr]
    return decoded.pixels


def _reason(path: Path, *, is_gray: bool = False) -> str:
    with pytest.raises(SourceError) as caught:
        _decode(path, is_gray=is_gray)
    assert path.name not in str(caught.value)
    return caught.value.reason


@pytest.mark.parametrize("bits", [8, 16])
def test_gray_values_are_those_of_the_file(tmp_path: Path, bits: int) -> None:
    pixels = write_png(tmp_path / "a.png", picture(1, (13, 9), bits))
    assert np.array_equal(_decode(tmp_path / "a.png"), pixels)
    assert _decode(tmp_path / "a.png").dtype == (np.uint8 if bits == 8 else np.uint16)


def test_colour_comes_as_rgb_and_a_gray_radiograph_in_colour_as_gray(tmp_path: Path) -> None:
    colour = np.zeros((6, 5, 3), np.uint8)
    colour[..., 0] = 200
    write_png(tmp_path / "red.png", colour)
    assert np.array_equal(_decode(tmp_path / "red.png"), colour)
    assert _reason(tmp_path / "red.png", is_gray=True) == "INVALID_IMAGE_DESCRIPTION"
    gray = picture(2, (6, 5))
    write_png(tmp_path / "gray.png", np.repeat(gray[..., None], 3, axis=2))
    assert np.array_equal(_decode(tmp_path / "gray.png", is_gray=True), gray)


def test_a_jpeg_is_read_and_a_cut_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    assert cv2.imwrite(str(path), np.full((40, 30), 77, np.uint8))
    assert np.array_equal(_decode(path), np.full((40, 30), 77, np.uint8))
    path.write_bytes(path.read_bytes()[:-2])
    assert _reason(path) == "PIXEL_DATA_TRUNCATED"


def test_the_end_of_a_jpeg_is_looked_for_behind_its_start_and_before_zeros(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    assert cv2.imwrite(str(path), np.full((40, 30), 77, np.uint8))
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(5000))
    assert np.array_equal(_decode(path), np.full((40, 30), 77, np.uint8))
    path.write_bytes(whole[:2] + b"\xff\xfe\x00\x06ab\xff\xd9" + whole[2:-2])
    assert _reason(path) == "PIXEL_DATA_TRUNCATED"


def test_every_cut_of_a_png_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_png(path, picture(3))
    whole = path.read_bytes()
    for size in range(40, len(whole), 37):
        path.write_bytes(whole[:size])
        assert _reason(path) == "PIXEL_DATA_TRUNCATED"


def test_a_flipped_bit_of_a_png_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_png(path, picture(3))
    data = bytearray(path.read_bytes())
    data[60] ^= 4
    path.write_bytes(data)
    with pytest.raises(SourceError, match="another checksum") as caught:
        _decode(path)
    assert caught.value.reason == "DECODE_FAILED"


def test_a_bomb_is_refused_by_its_head(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_png(path, picture(3))
    data = bytearray(path.read_bytes())
    data[16:24] = (1 << 16).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    path.write_bytes(data)
    assert _reason(path) == "LIMIT_EXCEEDED"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "NOT_IMAGE"),
        (b"GIF89a", "NOT_IMAGE"),
        (b"\x89PNG\r\n\x1a\n", "HEADER_UNREADABLE"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "HEADER_UNREADABLE"),
    ],
)
def test_what_is_no_picture_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "a.png").write_bytes(data)
    assert _reason(tmp_path / "a.png") == reason


def test_transparency_is_refused(tmp_path: Path) -> None:
    write_png(tmp_path / "a.png", np.zeros((4, 4), np.uint8))
    assert cv2.imwrite(str(tmp_path / "b.png"), np.zeros((4, 4, 4), np.uint8))
    assert _reason(tmp_path / "b.png") == "INVALID_IMAGE_DESCRIPTION"


def test_a_picture_is_rescaled_by_its_row(tmp_path: Path) -> None:
    stored = write_png(tmp_path / "a.png", picture(3, (6, 5), 16))
    row = replace(_placement(), modality="CT", rescale=(1.0, -32768.0))
    header = read_image(tmp_path / "a.png", row, limits=HeaderLimits())
    assert isinstance(header, InstanceHeader)
    (decoded,) = iter_slices(tmp_path / "a.png", header, read=iter_stored_image)
    assert np.array_equal(decoded.pixels, stored.astype(np.int32) - 32768)
    assert (form_of([header]).unit, str(decoded.pixels.dtype), decoded.num_clipped) == ("HU", "int16", 0)
    write_png(tmp_path / "b.png", np.zeros((6, 5, 3), np.uint8))
    with pytest.raises(SourceError, match="slope and intercept of a picture in color"):
        read_image(tmp_path / "b.png", row, limits=HeaderLimits())


def test_a_small_picture_takes_little_memory_whatever_the_limit(tmp_path: Path) -> None:
    """A process of 700 MiB could not read one of 87 bytes, because the limit was asked for at once."""
    write_png(tmp_path / "a.png", picture(4))
    tracemalloc.start()
    try:
        _decode(tmp_path / "a.png")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    with pytest.raises(SourceError, match="a picture of more than 8 bytes") as caught:
        read_image(tmp_path / "a.png", _placement(), limits=HeaderLimits(max_inflated_bytes=8))
    assert caught.value.reason == "LIMIT_EXCEEDED"
