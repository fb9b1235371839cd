"""Stored values: every layout a file may have, against what was written."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.pixels import convert_color_space
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.stored import iter_stored
from tests.unit.packing.sources.dicom.factory import header_of, make_dataset, make_file, write

pytestmark = pytest.mark.fast

NATIVE = [ImplicitVRLittleEndian, ExplicitVRLittleEndian, DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian]
LIMITS = HeaderLimits()
Array = np.ndarray[Any, np.dtype[Any]]


def _stored(path: Path, frames: list[int] | None = None) -> list[Array]:
    header = header_of(path)
    asked = list(range(header.image.num_frames)) if frames is None else frames
    return [array for array, _ in iter_stored(path, header, asked, LIMITS)]


@pytest.mark.parametrize("syntax", NATIVE)
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4"])
def test_native_frames_of_every_width_and_sign(tmp_path: Path, syntax: str, dtype: str) -> None:
    info = np.iinfo(dtype)
    pixels = np.linspace(info.min, info.max, 2 * 3 * 5, dtype=dtype).reshape(2, 3, 5)
    path = tmp_path / "a.dcm"
    dataset = make_dataset(pixels=pixels)
    if syntax == ExplicitVRBigEndian:
        dataset.PixelData = pixels.byteswap().tobytes()
        dataset["PixelData"].VR = "OB" if pixels.itemsize == 1 else "OW"
    write(path, dataset, syntax=syntax)
    np.testing.assert_array_equal(np.stack(_stored(path)), pixels)
    (last, first) = _stored(path, [1, 0])
    np.testing.assert_array_equal(np.stack([first, last]), pixels)
    assert first.dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("high_bit", "is_signed", "written", "expected"),
    [
        (11, 0, [0x0FFF, 0xF123, 0x0000], [0x0FFF, 0x0123, 0]),  # an overlay in the bits above
        (11, 1, [0x0FFF, 0xF7FF, 0x0800], [-1, 2047, -2048]),
        (15, 0, [0xFFF5, 0x1230, 0x000F], [0x0FFF, 0x0123, 0]),  # the used bits lie at the top
        (15, 1, [0xFFF5, 0x7FF0, 0x8000], [-1, 2047, -2048]),
    ],
)
def test_unused_bits_are_cleared_and_the_sign_is_extended(
    tmp_path: Path, high_bit: int, is_signed: int, written: list[int], expected: list[int]
) -> None:
    path = make_file(
        tmp_path / "a.dcm",
        pixels=np.array([written], np.uint16),
        BitsStored=12,
        HighBit=high_bit,
        PixelRepresentation=is_signed,
    )
    assert _stored(path)[0].tolist() == [expected]


COLOUR = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, DeflatedExplicitVRLittleEndian])
@pytest.mark.parametrize("planar", [0, 1])
def test_native_colour_is_rgb_with_samples_last(tmp_path: Path, syntax: str, planar: int) -> None:
    data = COLOUR if planar == 0 else COLOUR.transpose(2, 0, 1)
    dataset = make_dataset(pixels=COLOUR, PlanarConfiguration=planar, PixelData=data.tobytes())
    (array,) = _stored(write(tmp_path / "a.dcm", dataset, syntax=syntax))
    np.testing.assert_array_equal(array, COLOUR)
    assert array.flags.c_contiguous


def test_native_ycbcr_becomes_rgb(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.dcm", pixels=COLOUR, PhotometricInterpretation="YBR_FULL")
    expected = convert_color_space(COLOUR, "YBR_FULL", "RGB")
    np.testing.assert_array_equal(_stored(path)[0], expected)


def test_subsampled_ycbcr_becomes_rgb(tmp_path: Path) -> None:
    y = np.arange(24, dtype=np.uint8).reshape(4, 6) * 8
    pairs = [struct.pack("4B", y[r, c], y[r, c + 1], 90, 160) for r in range(4) for c in range(0, 6, 2)]
    dataset = make_dataset(pixels=COLOUR, PhotometricInterpretation="YBR_FULL_422", PixelData=b"".join(pairs))
    full = np.stack([y, np.full_like(y, 90), np.full_like(y, 160)], axis=-1)
    (array,) = _stored(write(tmp_path / "a.dcm", dataset))
    np.testing.assert_array_equal(array, convert_color_space(full, "YBR_FULL", "RGB"))


def test_wide_colour_loses_its_low_bits(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.dcm", pixels=COLOUR.astype(np.uint16) * 256 + 77)
    np.testing.assert_array_equal(_stored(path)[0], COLOUR)


def test_signed_colour_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="signed color"):
        _stored(make_file(tmp_path / "a.dcm", pixels=COLOUR, PixelRepresentation=1))


def test_packed_bits_become_bytes(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2, (3, 3, 5), dtype=np.uint8)
    dataset = make_dataset(pixels=bits, BitsAllocated=1, BitsStored=1, HighBit=0)
    dataset.PixelData = np.packbits(bits.ravel(), bitorder="little").tobytes()
    np.testing.assert_array_equal(np.stack(_stored(write(tmp_path / "a.dcm", dataset))), bits)


def test_bytes_of_a_big_endian_file_may_be_swapped_words(tmp_path: Path) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    for vr in ("OB", "OW"):
        dataset = make_dataset(pixels=pixels)
        data = np.frombuffer(pixels.tobytes(), "u2").byteswap().tobytes() if vr == "OW" else pixels.tobytes()
        dataset.PixelData = data
        dataset["PixelData"].VR = vr
        path = write(tmp_path / f"{vr}.dcm", dataset, syntax=ExplicitVRBigEndian)
        stored = np.stack(_stored(path))
        np.testing.assert_array_equal(stored, pixels)


def test_frames_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.dcm", pixels=np.arange(24, dtype=np.uint16).reshape(2, 3, 4))
    frames = iter_stored(path, header_of(path), [0, 1], LIMITS)
    assert next(frames)[1] == "native"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 2)
    with pytest.raises(SourceError, match="22 of 24 bytes"):
        next(frames)


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    path = make_file(tmp_path / "SENTINEL.dcm")
    header = header_of(path)
    path.unlink()
    with pytest.raises(SourceError) as caught:
        next(iter_stored(path, header, [0], LIMITS))
    assert caught.value.reason == "FILE_UNREADABLE"
    assert "SENTINEL" not in str(caught.value)
