"""Decoders: one order for every syntax, equal to pydicom's own plugins, safe against frames that lie."""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pydicom
import pytest
from pydicom.data import get_testdata_files
from pydicom.pixels import get_decoder
from pydicom.uid import (
    HTJ2KLossless,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom.decoders import DECODER_ORDER, decode_frame
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.dictionary import ENCAPSULATED_SYNTAXES
from shardflow.packing.sources.dicom.headers import BrokenInstance, read_header
from shardflow.packing.sources.dicom.stored import find_frames, read_frame

pytestmark = pytest.mark.fast

OTHER_PLUGINS = {
    "1.2.840.10008.1.2.5": "pydicom",
    "1.2.840.10008.1.2.4.50": "pillow",
    "1.2.840.10008.1.2.4.80": "pyjpegls",
    "1.2.840.10008.1.2.4.81": "pyjpegls",
    "1.2.840.10008.1.2.4.90": "pillow",
    "1.2.840.10008.1.2.4.91": "pillow",
}


def _describe(**changes: Any) -> ImageDescription:
    fields: dict[str, Any] = {
        "rows": 8,
        "columns": 6,
        "samples_per_pixel": 1,
        "num_frames": 1,
        "bits_allocated": 16,
        "bits_stored": 16,
        "high_bit": 15,
        "is_signed": False,
        "planar_configuration": 0,
        "photometric_interpretation": "MONOCHROME2",
        **changes,
    }
    return ImageDescription(**fields)


def test_every_syntax_has_an_order() -> None:
    assert set(DECODER_ORDER) == set(ENCAPSULATED_SYNTAXES)
    assert {order[0] for order in DECODER_ORDER.values()} == {"imagecodecs"}


def test_first_frames_of_bundled_files_equal_those_of_another_plugin() -> None:
    num_compared = 0
    for path in sorted(map(Path, get_testdata_files())):
        try:
            header = read_header(path)
        except SourceError:
            continue
        if isinstance(header, BrokenInstance) or header.transfer_syntax_uid not in OTHER_PLUGINS:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        frames = find_frames(descriptor, header.pixel_offset, header.num_bytes, header.image.num_frames)
        data = read_frame(descriptor, frames[0])
        os.close(descriptor)
        try:
            decoded, name = decode_frame(data, header.image, header.transfer_syntax_uid)
        except SourceError:
            assert path.name == "JPEG2000-embedded-sequence-delimiter.dcm"  # its size marker is overwritten
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plugin = OTHER_PLUGINS[header.transfer_syntax_uid]
            expected, _ = get_decoder(header.transfer_syntax_uid).as_array(
                pydicom.dcmread(path), index=0, decoding_plugin=plugin
            )
        assert name == "imagecodecs"
        assert decoded.dtype == expected.dtype, path.name
        np.testing.assert_array_equal(decoded, expected, err_msg=path.name)
        num_compared += 1
    assert num_compared >= 20


SIGNED = np.arange(-24, 24, dtype=np.int16).reshape(8, 6) * 50
UNSIGNED = (SIGNED.astype(np.int32) + 2048).astype(np.uint16)


@pytest.mark.parametrize(
    ("syntax", "data"),
    [
        (JPEGLSLossless, imagecodecs.jpegls_encode(UNSIGNED)),
        (JPEG2000Lossless, imagecodecs.jpeg2k_encode(UNSIGNED, level=0, codecformat="j2k", reversible=True)),
        (HTJ2KLossless, imagecodecs.htj2k_encode(UNSIGNED)),
        (JPEGLosslessSV1, imagecodecs.jpeg8_encode(UNSIGNED, lossless=True, bitspersample=12, predictor=1)),
    ],
)
def test_lossless_syntaxes_give_back_what_was_stored(syntax: str, data: bytes) -> None:
    decoded, name = decode_frame(bytes(data), _describe(bits_stored=12, high_bit=11), syntax)
    assert name == "imagecodecs"
    assert decoded.dtype == np.uint16
    np.testing.assert_array_equal(decoded, UNSIGNED)


@pytest.mark.parametrize(
    ("syntax", "data"),
    [
        (JPEGLSLossless, imagecodecs.jpegls_encode((SIGNED & 0xFFF).astype(np.uint16))),
        (JPEG2000Lossless, imagecodecs.jpeg2k_encode(SIGNED, level=0, codecformat="j2k", reversible=True)),
        (HTJ2KLossless, imagecodecs.htj2k_encode(SIGNED)),
        (
            JPEGLosslessSV1,
            imagecodecs.jpeg8_encode((SIGNED & 0xFFF).astype(np.uint16), lossless=True, bitspersample=12),
        ),
    ],
)
def test_signed_values_come_back_signed(syntax: str, data: bytes) -> None:
    decoded, _ = decode_frame(bytes(data), _describe(bits_stored=12, high_bit=11, is_signed=True), syntax)
    assert decoded.dtype == np.int16
    np.testing.assert_array_equal(decoded, SIGNED)


NOISE = np.random.default_rng(0).integers(0, 4096, (64, 64), np.uint16)


@pytest.mark.parametrize(
    ("syntax", "data", "end"),
    [
        (JPEGLSLossless, imagecodecs.jpegls_encode(NOISE), b"\xff\xd9"),
        (JPEG2000Lossless, imagecodecs.jpeg2k_encode(NOISE, level=0, codecformat="j2k"), b"\xff\xd9"),
        (HTJ2KLossless, imagecodecs.htj2k_encode(NOISE, reversible=True), b"\xff\xd9"),
        (JPEGLosslessSV1, imagecodecs.jpeg8_encode(NOISE, lossless=True, bitspersample=12), b""),
        (JPEGBaseline8Bit, imagecodecs.jpeg8_encode((NOISE >> 4).astype(np.uint8)), b""),
    ],
)
def test_a_frame_that_is_cut_off_is_an_error(syntax: str, data: bytes, end: bytes) -> None:
    bits = 8 if syntax == JPEGBaseline8Bit else 16
    image = _describe(rows=64, columns=64, bits_allocated=bits, bits_stored=bits, high_bit=bits - 1)
    decode_frame(bytes(data) + bytes(8), image, syntax)
    with pytest.raises(SourceError) as caught:
        decode_frame(bytes(data)[: len(data) // 2] + end, image, syntax)
    assert caught.value.reason == ("DECODE_FAILED" if end else "PIXEL_DATA_TRUNCATED")


@pytest.mark.parametrize("syntax", [JPEGBaseline8Bit, JPEGLosslessSV1])
def test_the_end_of_a_jpeg_is_looked_for_behind_its_start_and_before_zeros(syntax: str) -> None:
    pixels = (NOISE >> 4).astype(np.uint8)
    data = bytes(imagecodecs.jpeg8_encode(pixels, lossless=syntax == JPEGLosslessSV1))
    image = _describe(rows=64, columns=64, bits_allocated=8, bits_stored=8, high_bit=7)
    comment = data[:2] + b"\xff\xfe\x00\x06ab\xff\xd9" + data[2:]
    whole, _ = decode_frame(data, image, syntax)
    for padded in (data + bytes(5000), data + b"\xff" * 4000 + bytes(5000), comment):
        np.testing.assert_array_equal(decode_frame(padded, image, syntax)[0], whole)
    start = comment.index(b"\xff\xda")
    for cut in (comment[:-2], comment[: start + 200], comment[: start + 200] + bytes(5000), comment[:start]):
        with pytest.raises(SourceError) as caught:
            decode_frame(cut, image, syntax)
        assert caught.value.reason == "PIXEL_DATA_TRUNCATED"


@pytest.mark.parametrize("is_transformed", [True, False])
def test_colors_of_htj2k_are_read_with_and_without_a_component_transform(is_transformed: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 3), np.uint8)
    planes = pixels if is_transformed else np.moveaxis(pixels, 2, 0)
    data = imagecodecs.htj2k_encode(planes, reversible=True, planar=not is_transformed)
    colors = "YBR_RCT" if is_transformed else "RGB"
    bits = {"bits_allocated": 8, "bits_stored": 8, "high_bit": 7}
    image = _describe(samples_per_pixel=3, photometric_interpretation=colors, **bits)
    np.testing.assert_array_equal(decode_frame(bytes(data), image, HTJ2KLossless)[0], pixels)


def test_values_above_the_stated_bits_are_believed_to_the_codestream() -> None:
    wide = np.full((8, 6), 9000, np.uint16)
    image = _describe(bits_stored=12, high_bit=11, is_signed=True)
    np.testing.assert_array_equal(
        decode_frame(bytes(imagecodecs.jpegls_encode(wide)), image, JPEGLSLossless)[0], wide
    )


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize(
    ("syntax", "encode"),
    [
        (JPEGLSLossless, imagecodecs.jpegls_encode),
        (JPEG2000Lossless, lambda stored: imagecodecs.jpeg2k_encode(stored, level=0, codecformat="j2k")),
        (JPEGLosslessSV1, lambda stored: imagecodecs.jpeg8_encode(stored, lossless=True, bitspersample=16)),
    ],
)
@pytest.mark.parametrize("high_bit", [13, 15])
def test_stored_bits_that_lie_high_are_moved_down(
    syntax: str, encode: Callable[..., bytes], high_bit: int, *, is_signed: bool
) -> None:
    """With junk above and below, where an overlay may be."""
    values = SIGNED if is_signed else UNSIGNED
    stored = (values.astype(np.int32) & 0xFFF) << (high_bit - 11) | 1 | (0xFFFF << (high_bit + 1)) & 0xFFFF
    image = _describe(bits_stored=12, high_bit=high_bit, is_signed=is_signed)
    decoded, _ = decode_frame(bytes(encode(stored.astype(np.uint16))), image, syntax)
    np.testing.assert_array_equal(decoded, values)
    # An encoder that moved them down itself says so by its number of bits.
    low = bytes(imagecodecs.jpeg8_encode((values & 0xFFF).astype(np.uint16), lossless=True, bitspersample=12))
    np.testing.assert_array_equal(decode_frame(low, image, JPEGLosslessSV1)[0], values)


@pytest.mark.parametrize("syntax", sorted(ENCAPSULATED_SYNTAXES))
def test_a_frame_of_another_shape_is_refused_before_it_is_decoded(
    syntax: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header of 65,535 x 65,535 in the frame must not make a codec allocate 8 GB."""
    for name in ("jpeg8_decode", "jpegls_decode", "jpeg2k_decode", "dicomrle_decode"):
        monkeypatch.setattr(imagecodecs, name, lambda *_, **__: pytest.fail("decoded"))
    huge = struct.pack(">IIII", 65535, 65535, 0, 0)
    liars = {
        "jpeg": b"\xff\xd8\xff\xc3\x00\x0b\x10\xff\xff\xff\xff\x01\x01\x11\x00",
        "jpeg2000": b"\xff\x4f\xff\x51\x00\x29\x00\x00" + huge + b"\0" * 16 + b"\x00\x01\x0f\x01\x01",
        "rle": struct.pack("<16I", 15, *range(15)),
    }
    for liar in (*liars.values(), b"", b"x" * 100):
        with pytest.raises(SourceError) as caught:
            decode_frame(liar, _describe(), syntax)
        assert caught.value.reason == "DECODE_FAILED"


def test_the_next_decoder_is_tried_where_the_first_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("SENTINEL")

    rle = _rle(UNSIGNED)
    monkeypatch.setattr(imagecodecs, "dicomrle_decode", fail)
    decoded, name = decode_frame(rle, _describe(), RLELossless)
    assert name == "pydicom"
    np.testing.assert_array_equal(decoded, UNSIGNED)
    grey = imagecodecs.jpeg8_encode(UNSIGNED.astype(np.uint8))
    monkeypatch.setattr(imagecodecs, "jpeg8_decode", fail)
    image = _describe(bits_allocated=8, bits_stored=8, high_bit=7)
    assert decode_frame(bytes(grey), image, JPEGBaseline8Bit)[1] == "pillow"


def test_all_failures_are_named_by_their_class_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("SENTINEL")

    monkeypatch.setattr(imagecodecs, "jpegls_decode", fail)
    with pytest.raises(SourceError) as caught:
        decode_frame(bytes(imagecodecs.jpegls_encode(UNSIGNED)), _describe(), JPEGLSLossless)
    assert caught.value.message.endswith("(imagecodecs: RuntimeError)")
    assert "SENTINEL" not in caplog.text


def test_out_of_memory_is_never_a_failed_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(imagecodecs, "jpegls_decode", exhaust)
    with pytest.raises(MemoryError):
        decode_frame(bytes(imagecodecs.jpegls_encode(UNSIGNED)), _describe(), JPEGLSLossless)


def test_an_unknown_syntax_is_told() -> None:
    with pytest.raises(SourceError) as caught:
        decode_frame(b"", _describe(), "1.2.840.10008.1.2.4.100")
    assert caught.value.reason == "UNSUPPORTED_TRANSFER_SYNTAX"


@pytest.mark.parametrize(
    ("stored", "encoded", "photometric"),
    [
        ("RGB", {"colorspace": "RGB", "outcolorspace": "RGB"}, "RGB"),
        ("YCbCr in a JFIF file", {"colorspace": "RGB", "outcolorspace": "YCBCR"}, "YBR_FULL"),
        ("YCbCr in a JFIF file that says RGB", {"colorspace": "RGB", "outcolorspace": "YCBCR"}, "RGB"),
    ],
)
def test_colour_jpeg_is_rgb_once(stored: str, encoded: dict[str, Any], photometric: str) -> None:
    colour = np.zeros((16, 16, 3), np.uint8)
    colour[..., 0], colour[..., 1], colour[..., 2] = 200, 100, 50
    data = bytes(imagecodecs.jpeg8_encode(colour, level=100, subsampling="444", **encoded))
    image = _describe(
        rows=16,
        columns=16,
        samples_per_pixel=3,
        bits_allocated=8,
        bits_stored=8,
        high_bit=7,
        photometric_interpretation=photometric,
    )
    decoded, _ = decode_frame(data, image, JPEGBaseline8Bit)
    assert np.abs(decoded.astype(int) - colour).max() <= 2, stored


def _rle(array: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    planes = [array.byteswap().view(np.uint8).reshape(-1, 2)[:, k].tobytes() for k in range(2)]
    packed = [bytes([len(plane) - 1]) + plane for plane in planes]
    assert all(len(plane) <= 128 for plane in planes)
    padded = [part + b"\0" * (len(part) % 2) for part in packed]
    offsets = [64, 64 + len(padded[0])]
    return struct.pack("<16I", 2, *offsets, *([0] * 13)) + b"".join(padded)
