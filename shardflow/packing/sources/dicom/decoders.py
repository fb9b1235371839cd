"""Decoders of encoded frames: a fixed order for every transfer syntax, and a check before each.

imagecodecs comes first: it is as fast as any, releases the GIL, reads 12-bit JPEG and holds no GPL code. It
is registered as a plugin of pydicom's decoder interface, so that pydicom's handling of signs, planes and
color applies. Pillow and pydicom's RLE decoder follow where it fails. The order does not depend on what is
installed: decoders differ by 1-3 levels on lossy JPEG, and a dataset must not depend on a machine. What the
frame declares is compared with the header before a codec allocates memory for it.

Source: ISO/IEC 10918-1 (JPEG) B.2.2, ISO/IEC 14495-1 (JPEG-LS) C.2, ISO/IEC 15444-1 (JPEG 2000) A.5.1.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import imagecodecs
import numpy as np
from pydicom.pixels.decoders.base import Decoder, DecodeRunner, get_decoder

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.dictionary import RLE
from shardflow.packing.sources.dicom.values import (
    CodestreamHeader,
    holds_end_of_jpeg,
    read_jpeg_header,
    third_party_silence,
)

_JP2_SIGNATURE = b"\x00\x00\x00\x0cjP  "


def read_jpeg2000_header(data: bytes) -> CodestreamHeader | None:
    """Read the size marker of a JPEG 2000 or HTJ2K stream, bare or in JP2 boxes; None where there is none."""
    try:
        position = _skip_boxes(data) if data.startswith(_JP2_SIGNATURE) else 0
        if position is None or data[position : position + 4] != b"\xff\x4f\xff\x51":
            return None
        width, height, left, top = struct.unpack_from(">IIII", data, position + 8)
        (count,) = struct.unpack_from(">H", data, position + 40)
        precision = (data[position + 42] & 0x7F) + 1
        return CodestreamHeader(
            rows=height - top, columns=width - left, num_components=count, precision=precision
        )
    except (IndexError, struct.error):
        return None


def _skip_boxes(data: bytes) -> int | None:
    """Return the start of the codestream box; None if a box has no proper length (other parsers hang)."""
    position = 0
    while True:
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"jp2c":
            return position + 8
        if length < 8:
            return None
        position += int(length)


Array = np.ndarray[Any, np.dtype[Any]]

_JPEG = "1.2.840.10008.1.2.4."
_LOSSY_JPEG = frozenset({_JPEG + "50", _JPEG + "51"})
_LOSSLESS_JPEG = frozenset({_JPEG + "57", _JPEG + "70"})
_JPEG_LS = frozenset({_JPEG + "80", _JPEG + "81"})
_JPEG_2000 = frozenset({_JPEG + "90", _JPEG + "91"})
_HTJ2K = frozenset({_JPEG + "201", _JPEG + "202", _JPEG + "203"})

DECODER_ORDER: dict[str, tuple[str, ...]] = {
    RLE: ("imagecodecs", "pydicom"),
    **dict.fromkeys(_LOSSY_JPEG | _JPEG_2000, ("imagecodecs", "pillow")),
    **dict.fromkeys(_LOSSLESS_JPEG | _JPEG_LS | _HTJ2K, ("imagecodecs",)),
}
"""Decoders of each encapsulated transfer syntax, in the order in which they are tried."""

DECODER_DEPENDENCIES = dict.fromkeys(DECODER_ORDER, ("imagecodecs>=2025.3.30",))
"""Part of pydicom's plugin interface."""

_PLUGIN = "imagecodecs"


def is_available(uid: str) -> bool:
    """Whether the plugin decodes a transfer syntax (part of pydicom's plugin interface)."""
    return uid in DECODER_ORDER


def decode_frame(data: bytes, image: ImageDescription, transfer_syntax_uid: str) -> tuple[Array, str]:
    """Decode one frame.

    Args:
        data: The encoded frame, its fragments joined.
        image: What the header says; the frame must have this shape.
        transfer_syntax_uid: A key of `DECODER_ORDER`.

    Returns:
        ``(rows, columns)`` stored values, or ``(rows, columns, 3)`` RGB; and the name of the decoder. The
        dtype is what ``bits_allocated`` and the signedness say; values of RLE frames still hold their unused
        bits.

    Raises:
        SourceError: UNSUPPORTED_TRANSFER_SYNTAX, DECODE_FAILED, PIXEL_DATA_TRUNCATED (a JPEG without end).
    """
    order = DECODER_ORDER.get(transfer_syntax_uid)
    if order is None:
        raise source_error(Reason.UNSUPPORTED_TRANSFER_SYNTAX)
    precision = _check_codestream(data, image, transfer_syntax_uid)
    # A codestream of so many bits has the unused ones below the stored ones in it, as a native frame has.
    is_shifted = precision > image.bits_stored <= image.high_bit
    failures: list[str] = []
    for name in order:
        try:
            with third_party_silence():
                array, _ = _decoder(transfer_syntax_uid).as_array(
                    _encapsulated(data),
                    index=0,
                    validate=False,
                    decoding_plugin=name,
                    correct_unused_bits=transfer_syntax_uid != RLE,
                    pixel_keyword="PixelData",
                    number_of_frames=1,
                    rows=image.rows,
                    columns=image.columns,
                    samples_per_pixel=image.samples_per_pixel,
                    bits_allocated=image.bits_allocated,
                    bits_stored=image.bits_allocated if is_shifted else image.bits_stored,
                    pixel_representation=int(image.is_signed),
                    planar_configuration=image.planar_configuration,
                    photometric_interpretation=image.photometric_interpretation,
                )
        except _OutOfMemoryError:
            raise MemoryError from None
        except Exception as error:  # noqa: BLE001 - any error of a decoder means: try the next one
            failures.append(f"{name}: {type(error).__name__}")
        else:
            if is_shifted:
                return _move_down(array, image), name
            return _extend_sign(array, image) if transfer_syntax_uid != RLE else array, name
    raise source_error(Reason.DECODE_FAILED, "; ".join(failures))


def _move_down(array: Array, image: ImageDescription) -> Array:
    """Clear the bits above ``high_bit``, and move the stored ones to the bottom, with their sign."""
    num_bits = 8 * array.dtype.itemsize
    above = np.left_shift(array, num_bits - 1 - image.high_bit)
    return np.right_shift(above, num_bits - image.bits_stored)


def _extend_sign(array: Array, image: ImageDescription) -> Array:
    """Extend the sign of stored bits that lie as they are in a codestream of more bits.

    JPEG-LS has no sign at all and JPEG 2000 is often written without it; pydicom 3.0 extends from the
    precision of the codestream, so a negative value of 12 bits in a codestream of 16 stays positive. Values
    that need more bits than the header says are left alone: there the codestream is right.
    """
    if not image.is_signed or image.bits_stored == 8 * array.dtype.itemsize:
        return array
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or not 1 << (image.bits_stored - 1) <= highest < 1 << image.bits_stored:
        return array
    unused = 8 * array.dtype.itemsize - image.bits_stored
    return np.right_shift(np.left_shift(array, unused), unused)


def _check_codestream(data: bytes, image: ImageDescription, transfer_syntax_uid: str) -> int:
    """Refuse a frame whose own header tells another shape: a codec would allocate by it. Refuse one cut off.

    libjpeg fills the missing part with gray and reports nothing; the other codecs report it.

    Returns:
        Bits of a sample in the codestream; 0 for RLE, which does not say it.
    """
    header: CodestreamHeader | None
    if transfer_syntax_uid == RLE:
        segments = struct.unpack_from("<I", data)[0] if len(data) >= 64 else 0
        if segments != image.samples_per_pixel * (image.bits_allocated // 8):
            raise source_error(
                Reason.DECODE_FAILED, f"{segments} RLE segments do not fit the samples and bits"
            )
        return 0
    if transfer_syntax_uid in _JPEG_2000 | _HTJ2K:
        header = read_jpeg2000_header(data)
    else:
        header = read_jpeg_header(data)
    if header is None:
        raise source_error(Reason.DECODE_FAILED, "the frame has no header of its codec")
    found = header.rows, header.columns, header.num_components
    if found != (image.rows, image.columns, image.samples_per_pixel):
        raise source_error(
            Reason.DECODE_FAILED, "rows, columns or components of the frame differ from the header's"
        )
    if transfer_syntax_uid in _LOSSY_JPEG | _LOSSLESS_JPEG and not holds_end_of_jpeg(data):
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, "no end of the JPEG")
    return header.precision


@cache
def _decoder(transfer_syntax_uid: str) -> Decoder:
    decoder = get_decoder(transfer_syntax_uid)
    if _PLUGIN not in decoder.available_plugins:
        decoder.add_plugin(_PLUGIN, (__name__, "decode_with_imagecodecs"))
    return decoder


def _encapsulated(data: bytes) -> bytes:
    """One frame as pydicom wants it: an empty offset table and one item."""
    return b"".join((b"\xfe\xff\x00\xe0\0\0\0\0\xfe\xff\x00\xe0", struct.pack("<I", len(data)), data))


class _OutOfMemoryError(BaseException):
    """Carries a MemoryError past pydicom, which turns every Exception of a plugin into a failed decoding."""


def decode_with_imagecodecs(src: bytes, runner: DecodeRunner) -> Any:
    """Decode a frame (the function of pydicom's plugin interface)."""
    try:
        return _decode_any(src, runner)
    except MemoryError:
        raise _OutOfMemoryError from None


def _decode_any(src: bytes, runner: DecodeRunner) -> Any:
    syntax = str(runner.transfer_syntax)
    if syntax == RLE:
        num_bytes = runner.rows * runner.columns * runner.samples_per_pixel * (runner.bits_allocated // 8)
        decoded = imagecodecs.dicomrle_decode(
            src, f"<u{runner.bits_allocated // 8}", out=bytearray(num_bytes)
        )
        runner.set_option("planar_configuration", 1)
        return decoded
    array = np.ascontiguousarray(_decode(src, syntax, runner))
    runner.set_option("bits_allocated", 8 * array.dtype.itemsize)
    if array.ndim == 3:
        runner.set_option("planar_configuration", 0)
    return array


def _decode(src: bytes, syntax: str, runner: DecodeRunner) -> Array:
    if syntax in _JPEG_LS:
        return _array(imagecodecs.jpegls_decode(src))
    if syntax in _JPEG_2000 | _HTJ2K:
        # Not htj2k_decode, which drops the errors of OpenJPH: a frame that is cut off would be wrong pixels.
        return _array(imagecodecs.jpeg2k_decode(src, numthreads=1))
    if runner.samples_per_pixel == 1:
        return _array(imagecodecs.jpeg8_decode(src))
    if syntax in _LOSSLESS_JPEG:
        return _array(imagecodecs.jpeg8_decode(src, colorspace="RGB", outcolorspace="RGB"))
    stored = "RGB" if holds_rgb(src, str(runner.photometric_interpretation)) else "YCBCR"
    runner.set_option("photometric_interpretation", "RGB")
    return _array(imagecodecs.jpeg8_decode(src, colorspace=stored, outcolorspace="RGB"))


def holds_rgb(src: bytes, photometric: str) -> bool:
    """Return whether a color JPEG holds RGB: its own markers first, then what the header says."""
    header = read_jpeg_header(src)
    if header is None:
        return photometric == "RGB"
    if header.adobe_transform is not None:
        return header.adobe_transform == 0
    if header.component_ids in (b"RGB", b"rgb"):
        return True
    return photometric == "RGB" and not header.is_jfif


def _array(decoded: Any) -> Array:
    return np.asarray(decoded)
